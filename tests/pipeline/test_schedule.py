"""Schedules run every task once and in order, cost what the formulas say, and refuse tables that
cannot be run.
"""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import forward_schedules, schedules, training_schedules

from optimus_jax.errors import PlanError
from optimus_jax.pipeline.gpipe import forward_only, gpipe
from optimus_jax.pipeline.interleaved import interleaved
from optimus_jax.pipeline.one_f_one_b import one_f_one_b
from optimus_jax.pipeline.schedule import IDLE, Schedule
from optimus_jax.pipeline.tables import SCHEDULES, make_schedule


def ticks_of_tasks(schedule: Schedule, table) -> dict[tuple[int, int], int]:
    """Tick of each (microbatch, virtual stage); each may appear once."""
    found: dict[tuple[int, int], int] = {}
    for tick, row in enumerate(table.tolist()):
        for stage, task in enumerate(row):
            if task != IDLE:
                key = (
                    task // schedule.num_repeats,
                    task % schedule.num_repeats * schedule.num_stages + stage,
                )
                assert key not in found
                found[key] = tick
    return found


@given(schedule=schedules())
def test_every_task_runs_once_and_after_what_it_needs(schedule):
    forward, backward = (
        ticks_of_tasks(schedule, schedule.forward),
        ticks_of_tasks(schedule, schedule.backward),
    )
    last, count = (
        schedule.num_virtual_stages - 1,
        schedule.num_microbatches * schedule.num_virtual_stages,
    )
    assert len(forward) == count
    assert len(backward) == (0 if schedule.is_forward_only else count)
    heads = {i: tick for tick, i in enumerate(schedule.head.tolist()) if i != IDLE}
    assert heads == {i: forward[i, last] for i in range(schedule.num_microbatches)}
    for (i, k), tick in forward.items():
        assert k == 0 or tick >= forward[i, k - 1] + schedule.latency
    for (i, k), tick in backward.items():
        assert tick >= (heads[i] if k == last else backward[i, k + 1] + schedule.latency)


def test_tables_equal_the_closed_forms_of_the_papers():
    """The closed forms for latency 1, S stages, V repeats; arXiv:2104.04473 without the idle halves
    of ticks.
    """
    S, M, V = 4, 12, 3
    for i in range(M):
        for s in range(S):
            schedule = one_f_one_b(S, M)
            assert schedule.forward[i + s, s] == schedule.backward[i + 2 * (S - 1) - s, s] == i
            schedule = gpipe(S, M)
            assert (
                schedule.forward[i + s, s] == schedule.backward[M + S - 1 + i + S - 1 - s, s] == i
            )
            schedule, (g, j) = interleaved(S, M, V), divmod(i, S)
            for r in range(V):
                assert schedule.forward[g * S * V + r * S + j + s, s] == i * V + r
                assert (
                    schedule.backward[V * S - 1 + g * S * V + (V - 1 - r) * S + j + S - 1 - s, s]
                    == i * V + r
                )


@given(schedule=training_schedules())
def test_bubble_ticks_and_memory_equal_the_formulas(schedule):
    S, M, V, L = (
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_repeats,
        schedule.latency,
    )
    stage = np.arange(S)
    if V == 1 and schedule.name == "gpipe":
        assert schedule.num_ticks == 2 * (M + L * (S - 1))
        assert schedule.in_flight().tolist() == [M] * S
    elif V == 1:
        assert schedule.num_ticks == M + 2 * L * (S - 1)
        assert schedule.in_flight().tolist() == np.minimum(M, 2 * L * (S - 1 - stage) + 1).tolist()
    elif M < L * S:
        assert schedule.num_ticks == M + 2 * L * (S * V - 1), "the least that dependencies allow"
    else:
        group = -(-M // (M // (L * S)))
        assert schedule.num_ticks == M * V + (V - 1) * group + 2 * L * (S - 1)
        assert (
            schedule.in_flight().tolist()
            == np.minimum(M * V, (V - 1) * group + 2 * L * (S - 1 - stage) + 1).tolist()
        )
    no_stage_waits = M >= L if V == 1 else M >= L * S
    if no_stage_waits:
        for backward_s, head_s in ((1.0, 0.0), (2.5, 0.0)):
            assert schedule.bubble(1.0, backward_s, head_s) == pytest.approx(L * (S - 1) / (M * V))
        lost = L * (S - 1) * (0.1 + 0.3)
        assert schedule.critical_path(0.1, 0.3, 0.7) == pytest.approx(M * V * 0.4 + M * 0.7 + lost)
        assert schedule.ideal_time(0.1, 0.3, 0.7) == pytest.approx(M * V * 0.4 + M * 0.7)
        assert schedule.idle_fraction == pytest.approx(L * (S - 1) / (M * V + L * (S - 1)))
        for stages_tasks in (schedule.forward.T, schedule.backward.T):
            for tasks in stages_tasks:
                assert np.ptp(np.flatnonzero(tasks != IDLE)) == M * V - 1, (
                    "no stage waits once it has begun"
                )


@given(schedule=forward_schedules())
def test_forward_only_is_as_short_as_dependencies_allow(schedule):
    S, M, V, L = (
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_repeats,
        schedule.latency,
    )
    assert schedule.num_ticks == max(M * V + L * (S - 1), M + L * (S * V - 1))
    assert schedule.in_flight().tolist() == [0] * S
    assert schedule.backward_ticks.max() == IDLE
    assert schedule.ideal_time(1.0, 2.0, 0.5) == M * V + 0.5 * M
    assert schedule.phases()[0].embed


@given(schedule=schedules())
def test_phases_describe_their_ticks(schedule):
    phases = schedule.phases()
    assert [phase.start for phase in phases] == [0, *(phase.stop for phase in phases[:-1])]
    assert phases[-1].stop == schedule.num_ticks
    assert all(
        (a.forward, a.backward) != (b.forward, b.backward) for a, b in itertools.pairwise(phases)
    )
    seconds = 0.0
    for phase in phases:
        ticks = range(phase.start, phase.stop)
        assert len(ticks) == phase.num_ticks > 0
        embeds = [
            schedule.forward[t, 0] != IDLE and schedule.forward[t, 0] % schedule.num_repeats == 0
            for t in ticks
        ]
        embeds_back = [
            schedule.backward[t, 0] != IDLE and schedule.backward[t, 0] % schedule.num_repeats == 0
            for t in ticks
        ]
        heads = [schedule.head[t] != IDLE for t in ticks]
        assert all(phase.forward == (schedule.forward[t] != IDLE).any() for t in ticks)
        assert all(phase.backward == (schedule.backward[t] != IDLE).any() for t in ticks)
        for found, wanted in (
            (embeds, phase.embed),
            (embeds_back, phase.embed_backward),
            (heads, phase.head),
        ):
            assert any(found) == wanted
        seconds += phase.num_ticks * (3.0 * phase.forward + 5.0 * phase.backward) + 7.0 * sum(heads)
    assert schedule.critical_path(3.0, 5.0, 7.0) == seconds


def test_1f1b_has_three_phases():
    phases = [
        (
            phase.num_ticks,
            phase.forward,
            phase.backward,
            phase.head,
            phase.embed,
            phase.embed_backward,
        )
        for phase in one_f_one_b(4, 6).phases()
    ]
    assert phases == [
        (3, True, False, False, True, False),
        (6, True, True, True, True, True),
        (3, False, True, False, False, True),
    ]


def test_one_microbatch_with_latency_2_has_ticks_that_only_send():
    phases = one_f_one_b(2, 1, 2).phases()
    assert [(phase.forward, phase.backward) for phase in phases] == [
        (True, False),
        (False, False),
        (True, True),
        (False, False),
        (False, True),
    ]


@given(
    num_stages=st.integers(1, 6),
    num_microbatches=st.integers(1, 12),
    latency=st.sampled_from((1, 2)),
)
def test_interleaving_once_is_1f1b(num_stages, num_microbatches, latency):
    once, plain = (
        interleaved(num_stages, num_microbatches, 1, latency),
        one_f_one_b(num_stages, num_microbatches, latency),
    )
    assert once == plain
    assert hash(once) == hash(plain)
    assert once != gpipe(num_stages, num_microbatches, latency)
    assert once != replace(plain, latency=3 - latency)


@given(schedule=schedules(), data=st.data())
def test_change_of_any_table_entry_is_refused(schedule, data):
    name = data.draw(st.sampled_from(("forward", "backward", "head")))
    table = getattr(schedule, name).copy()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in table.shape)
    table[place] = data.draw(
        st.integers(-2, schedule.num_tasks + 1).filter(lambda task: task != table[place])
    )
    with pytest.raises(PlanError):
        replace(schedule, **{name: table}).validate()


def test_tables_are_read_only_copies():
    table = one_f_one_b(2, 2).forward.copy()
    schedule = replace(one_f_one_b(2, 2), forward=table)
    table[0, 0] = 7
    assert schedule.forward[0, 0] == 0
    with pytest.raises(ValueError, match="read-only"):
        schedule.forward[0, 0] = 1


def moved(schedule: Schedule, name: str, stage: int, old: int, new: int) -> Schedule:
    """The schedule with the task of `stage` in tick `old` exchanged with that in tick `new`."""
    table = getattr(schedule, name).copy()
    table[[old, new], stage] = table[[new, old], stage]
    return replace(schedule, **{name: table})


PLAIN, REPEATED, EVALUATION = one_f_one_b(4, 6), interleaved(2, 4, 2, 2), forward_only(2, 3)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            moved(PLAIN, "forward", 1, 1, 0),
            (
                r"'1f1b': forward of microbatch 0 on stage 1 runs in tick 0, before"
                r" its(.|\n)*latency=1(.|\n)*tick 1 or later"
            ),
        ),
        (
            moved(PLAIN, "backward", 0, 6, 5),
            (
                r"backward of microbatch 0 on stage 0 runs in tick 5, before its input(.|\n)*tick 6"
                r" or later"
            ),
        ),
        (
            moved(PLAIN, "backward", 3, 3, 2),
            (
                r"backward of microbatch 0 on stage 3 runs in tick 2, before its input(.|\n)*tick 3"
                r" or later"
            ),
        ),
        (
            moved(one_f_one_b(2, 4, 2), "backward", 0, 4, 3),
            (
                r"backward of microbatch 0 on stage 0 runs in tick 3, before its"
                r" input(.|\n)*latency=2(.|\n)*tick 4 or later"
            ),
        ),
        (
            moved(REPEATED, "forward", 0, 3, 4),
            (
                r"forward of microbatch 0, repeat 1 on stage 0 runs in tick 3, before its"
                r" input(.|\n)*latency=2(.|\n)*tick 4 or later"
            ),
        ),
        (
            replace(PLAIN, head=np.roll(PLAIN.head, 1)),
            (
                r"head in tick 3 is not(.|\n)*head\[3\]=-1, and microbatch 0 leaves(.|\n)*set"
                r" head\[3\]=0"
            ),
        ),
        (
            replace(PLAIN, forward=PLAIN.forward[:, :3]),
            r"'forward' has the wrong shape(.|\n)*given: \[12, 3\](.|\n)*shape \[12, 4\]",
        ),
        (
            replace(PLAIN, head=PLAIN.head[1:]),
            r"'head' has the wrong shape(.|\n)*given: \[11\](.|\n)*shape \[12\]",
        ),
        (
            replace(PLAIN, forward=PLAIN.forward[:0]),
            r"'forward' has the wrong shape(.|\n)*at least one tick",
        ),
        (
            replace(PLAIN, forward=np.where(PLAIN.forward == 5, 6, PLAIN.forward)),
            r"forward\[5, 0\] is no task(.|\n)*given: 6(.|\n)*0 to 5",
        ),
        (
            replace(PLAIN, head=np.where(PLAIN.head == 5, 6, PLAIN.head)),
            r"head\[8\] is no microbatch(.|\n)*given: 6(.|\n)*0 to 5, or -1",
        ),
        (
            replace(PLAIN, forward=np.where(PLAIN.forward == 5, 4, PLAIN.forward)),
            (
                r"forward of microbatch 4 on stage 0 runs 2 times(.|\n)*ticks 4, 5(.|\n)*exactly"
                r" one tick of 'forward'"
            ),
        ),
        (
            replace(PLAIN, backward=np.full_like(PLAIN.backward, IDLE)),
            r"backward of microbatch 0 on stage 0 runs 0 times(.|\n)*no tick of 12",
        ),
        (
            replace(PLAIN, is_forward_only=True),
            r"backward of microbatch 0 on stage 0 runs 1 times(.|\n)*leave 'backward' idle",
        ),
        (
            replace(EVALUATION, is_forward_only=False),
            r"backward of microbatch 0 on stage 0 runs 0 times",
        ),
        (
            replace(PLAIN, num_microbatches=60),
            r"12 ticks are too few(.|\n)*microbatches=60, repeats=1(.|\n)*use 60 ticks or more",
        ),
        (
            replace(PLAIN, latency=2),
            (
                r"forward of microbatch 0 on stage 1 runs in tick 1, before its"
                r" input(.|\n)*latency=2(.|\n)*tick 2"
            ),
        ),
        (replace(PLAIN, latency=3), r"no such latency(.|\n)*latency=3(.|\n)*latency=1 or 2"),
        (replace(PLAIN, num_stages=0), r"needs stages(.|\n)*stages=0(.|\n)*1 or more"),
        (
            replace(
                EVALUATION,
                forward=np.insert(EVALUATION.forward, 2, IDLE, 0),
                backward=np.insert(EVALUATION.backward, 2, IDLE, 0),
                head=np.insert(EVALUATION.head, 2, IDLE, 0),
            ),
            r"no stage does anything in tick 2(.|\n)*leave that tick out",
        ),
        (
            replace(
                one_f_one_b(2, 2, 2),
                **{
                    name: np.concatenate([table, np.full_like(table[:1], IDLE)])
                    for name, table in vars(one_f_one_b(2, 2, 2)).items()
                    if name in ("forward", "backward", "head")
                },
            ),
            r"no stage does anything in tick 6(.|\n)*given: tick 6 of 7",
        ),
    ],
)
def test_invalid_tables_are_refused(schedule, message):
    with pytest.raises(PlanError, match=message):
        schedule.validate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpip", 2, 2), r"unknown schedule 'gpip'(.|\n)*did you mean 'gpipe'"),
        (("zero", 2, 2), r"unknown schedule 'zero'(.|\n)*choose one of: gpipe, 1f1b, interleaved"),
        (
            ("1f1b", 2, 2, 2),
            r"'1f1b' visits each device once(.|\n)*repeats=2(.|\n)*choose schedule interleaved",
        ),
        (
            ("interleaved", 4, 6, 2),
            (
                r"multiple of the stages(.|\n)*microbatches=6, pipe=4(.|\n)*microbatches=4 or 8, or"
                r" schedule 1f1b"
            ),
        ),
        (
            ("interleaved", 4, 3, 2, 2),
            r"microbatches=3, pipe=4(.|\n)*microbatches=4, or schedule 1f1b",
        ),
        (("interleaved", 4, 4, 0), r"needs repeats(.|\n)*repeats=0"),
        (("gpipe", 0, 4), r"needs stages(.|\n)*stages=0"),
        (("1f1b", 2, 0), r"needs microbatches(.|\n)*microbatches=0"),
        (("1f1b", 2, 2, 1, 0), r"no such latency(.|\n)*latency=1 or 2"),
    ],
)
def test_invalid_combinations_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        make_schedule(*arguments)


def test_every_schedule_is_made_by_name():
    assert {name: make_schedule(name, 2, 2).name for name in SCHEDULES} == {
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved": "1f1b",
    }
    assert make_schedule("interleaved", 2, 4, 2, 2) == REPEATED


@given(schedule=schedules())
def test_a_schedule_survives_json(schedule):
    written = schedule.to_json()
    assert Schedule.from_json(written) == schedule
    value = json.loads(written)
    assert list(value) == [
        "name",
        "stages",
        "microbatches",
        "repeats",
        "latency",
        "forward",
        "backward",
        "head",
    ]
    assert (value["backward"] is None) == schedule.is_forward_only
    del value["head"]
    assert Schedule.from_json(json.dumps(value)) == schedule


def test_a_schedule_can_be_written_by_hand():
    written = (
        '{"name": "mine", "stages": 2, "microbatches": 1, "forward": [[0, -1], [-1, 0], [-1, -1]],'
        ' "backward": [[-1, -1], [-1, 0], [0, -1]]}'
    )
    assert Schedule.from_json(written) == replace(one_f_one_b(2, 1), name="mine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tick": 1}, r"no key 'tick'(.|\n)*choose one of: name"),
        ({"forwrd": 1}, r"no key 'forwrd'(.|\n)*did you mean 'forward'"),
        ({"forward": ...}, r"has no 'forward'(.|\n)*add 'forward'"),
        ({"backward": ...}, r"has no 'backward'"),
        ({"stages": ...}, r"has no 'stages'"),
        ({"stages": True}, r"'stages' is no whole number above 0(.|\n)*given: True"),
        ({"repeats": 0}, r"'repeats' is no whole number above 0(.|\n)*given: 0"),
        ({"microbatches": 2.0}, r"'microbatches' is no whole number(.|\n)*given: 2.0"),
        ({"latency": 3}, r"no such latency(.|\n)*latency=1 or 2"),
        ({"name": 1}, r"'name' is no text(.|\n)*given: 1"),
        ({"forward": []}, r"'forward' is no list of ticks(.|\n)*row of 2 tasks"),
        ({"forward": [[0, -1], 3]}, r"forward\[1\] is no list of whole numbers(.|\n)*given: 3"),
        ({"forward": [[0, None]]}, r"forward\[0\] is no list of whole numbers(.|\n)*\[0, null\]"),
        ({"backward": [[0, -1], [0]]}, r"backward\[1\] has 1 entries(.|\n)*stages=2"),
        ({"forward": [[0, 10**10]]}, r"forward\[0\] is no list of whole numbers"),
        ({"head": [0, "1"]}, r"head is no list of whole numbers"),
        ({"head": [0]}, r"'head' has the wrong shape(.|\n)*\[1\](.|\n)*shape \[4\]"),
        ({"microbatches": 3}, r"forward of microbatch 2 on stage 0 runs 0 times"),
        ({"microbatches": 10**9}, r"4 ticks are too few"),
        ({"backward": None}, r"no stage does anything in tick 3"),
    ],
)
def test_invalid_json_is_refused(changes, message):
    value = json.loads(one_f_one_b(2, 2).to_json()) | changes
    with pytest.raises(PlanError, match=message):
        Schedule.from_json(
            json.dumps({key: entry for key, entry in value.items() if entry is not ...})
        )


@pytest.mark.parametrize(
    ("written", "message"),
    [("{", "not JSON"), ("[1]", r"a JSON object(.|\n)*given: list"), ("", "not JSON")],
)
def test_json_that_is_no_object_is_refused(written, message):
    with pytest.raises(PlanError, match=message):
        Schedule.from_json(written)


def test_schedules_do_not_import_jax():
    modules = ", ".join(
        f"optimus_jax.pipeline.{name}" for name in ("tables", "buffers", "partition", "chart")
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, {modules}; assert not {{'jax', 'matplotlib'}} & set(sys.modules)",
        ],
        check=True,
    )
