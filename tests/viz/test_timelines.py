"""Timelines agree with the schedule's own times and memory."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.viz.timelines import (
    draw_by_microbatches,
    draw_memory,
    draw_timelines,
    in_flight_over_time,
    schedule_name,
    summary,
    timed_tasks,
)

SCHEDULES = [
    make_schedule("gpipe", 4, 8),
    make_schedule("1f1b", 4, 8),
    make_schedule("interleaved", 4, 8, 2),
    make_schedule("1f1b", 3, 5, latency=2),
]


@given(schedule=st.sampled_from(SCHEDULES), backward_time=st.sampled_from([1.0, 2.0, 3.0]))
def test_tasks_fill_the_critical_path_and_start_after_their_inputs(
    schedule: Schedule, backward_time: float
):
    tasks = timed_tasks(schedule, backward_time)
    times = 1 / schedule.num_repeats, backward_time / schedule.num_repeats
    assert max(task.start + task.duration for task in tasks) == pytest.approx(
        schedule.critical_path(*times)
    )
    assert sum(task.duration for task in tasks) == pytest.approx(
        schedule.num_stages * schedule.ideal_time(*times)
    )
    ends = {(task.is_forward, task.stage, task.task): task.start + task.duration for task in tasks}
    for task in tasks:
        upstream = (task.is_forward, task.stage - (1 if task.is_forward else -1), task.task)
        assert ends.get(upstream, 0) <= task.start + 1e-9
    for stage in range(schedule.num_stages):
        own = sorted(
            (task.start, task.start + task.duration) for task in tasks if task.stage == stage
        )
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(own)), (
            "one thing at a time"
        )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)
def test_activations_in_flight_match_the_schedule(schedule: Schedule):
    in_flight = in_flight_over_time(schedule)
    assert in_flight.max(axis=0).tolist() == (schedule.in_flight() / schedule.num_repeats).tolist()
    assert in_flight[-1].max() <= 1, "the last tick still holds what it reads"


def test_the_summary_has_a_row_for_each_schedule():
    lines = summary(SCHEDULES).splitlines()
    assert len(lines) == 2 + len(SCHEDULES)
    assert lines[2] == "| gpipe | 4 | 8 | 1 | 33 | 37.5% | 8, 8, 8, 8 | 8, 1, 8 |"
    assert lines[5].startswith("| 1f1b, slack | 3 | 5 |")


def test_timelines_draw_every_task_on_a_common_time_axis():
    figure = draw_timelines(SCHEDULES)
    panels = figure.axes
    assert [axes.get_title(loc="left").split(":")[0] for axes in panels] == [
        schedule_name(schedule) for schedule in SCHEDULES
    ]
    assert "bubble 37.5%, at most 7 microbatches" in panels[1].get_title(loc="left")
    assert len({axes.get_xlim() for axes in panels}) == 1
    for axes, schedule in zip(panels, SCHEDULES, strict=True):
        assert len(axes.collections) == schedule.num_stages * (1 + 2 * schedule.num_tasks)
    assert "its backward takes 2" in panels[-1].get_xlabel()
    figure.canvas.draw()


def test_labels_that_do_not_fit_their_box_are_left_out():
    few, many = (
        draw_timelines([make_schedule("1f1b", 2, microbatches)]).axes[0]
        for microbatches in (4, 400)
    )
    assert len(few.texts) == 16
    assert not many.texts


def test_the_memory_figure_names_each_schedule_in_both_panels():
    over_time, compared = draw_memory(SCHEDULES).axes
    assert [text.get_text().split(" (")[0] for text in over_time.get_legend().get_texts()] == list(
        map(schedule_name, SCHEDULES)
    )
    assert [text.get_text() for text in compared.texts] == list(map(schedule_name, SCHEDULES))
    assert compared.lines[1].get_xydata().tolist() == [[37.5, 7]]


def test_the_growth_figure_has_a_line_for_each_schedule():
    by_count = {
        count: [make_schedule("gpipe", 4, count), make_schedule("1f1b", 4, count)]
        for count in (4, 8, 64)
    }
    bubbles, in_flight = draw_by_microbatches(by_count).axes
    assert [line.get_ydata().tolist() for line in in_flight.lines] == [[4, 8, 64], [4, 7, 7]]
    assert [tick.get_text() for tick in in_flight.get_xticklabels()] == ["4", "8", "64"]
    assert list(bubbles.lines[0].get_ydata()) == pytest.approx([75, 37.5, 100 * 3 / 64])
