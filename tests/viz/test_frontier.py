"""The frontier of sample plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.viz.frontier import (
    GIB,
    PlanRecord,
    draw_frontier,
    frontier,
    merge_rankings,
    tooltip,
)


def fake(
    step_time_s: float,
    memory_bytes: float,
    *,
    rank: int = 1,
    schedule: str | None = None,
    microbatches: int = 1,
    mfu: float | None = None,
) -> PlanRecord:
    return PlanRecord(
        rank=rank,
        axes={"pipe": 1, "data": 4, "fsdp": 1, "tensor": 2},
        schedule=schedule,
        microbatches=microbatches,
        remat="full",
        zero=0,
        step_time_s=step_time_s,
        step_time_interval_s=[0.9 * step_time_s, 1.1 * step_time_s],
        tokens_per_s=1e6,
        mfu=mfu,
        memory_bytes=memory_bytes,
        bubble=0.25 if schedule else 0.0,
        communication=0.125,
    )


numbers = st.integers(1, 6).map(float)


def place(plan: PlanRecord) -> tuple[float, float]:
    return plan["step_time_s"], plan["memory_bytes"]


@given(plans=st.lists(st.builds(fake, numbers, numbers), max_size=20))
def test_the_frontier_is_pareto_optimal(plans):
    best = frontier(plans)
    times = [plan["step_time_s"] for plan in best]
    assert times == sorted(set(times))
    for plan in plans:
        beaten = any(
            place(other) != place(plan)
            and all(a <= b for a, b in zip(place(other), place(plan), strict=True))
            for other in plans
        )
        assert beaten != any(place(other) == place(plan) for other in best)


def test_searches_are_merged_into_one_ranking():
    ranking = merge_rankings([fake(1, 9), fake(3, 3, rank=2)], [fake(2, 5), fake(3, 3, rank=7)])
    assert [(plan["rank"], *place(plan)) for plan in ranking] == [(1, 1, 9), (2, 2, 5), (3, 3, 3)]


def test_the_tooltip_describes_the_plan():
    text = tooltip(fake(0.5, 2 * GIB, rank=3, schedule="1f1b", microbatches=8, mfu=0.41))
    for part in (
        "rank 3: data=4, tensor=2",
        "1f1b, bubble 25.0%",
        "8 microbatches",
        "ZeRO 0",
        "0.5 s a step (0.45 to 0.55)",
        "MFU 41.0%",
        "2.0 GiB",
        "12.5%",
    ):
        assert part in text
    assert "no stages; 1 microbatch<br>" in tooltip(fake(1, 1))
    assert "MFU unknown" in tooltip(fake(1, 1))


def test_each_cluster_has_its_points_and_its_frontier_line():
    pytest.importorskip("plotly")
    fast, small, bad = fake(1, 3 * GIB), fake(2, GIB), fake(3, 2 * GIB)
    figure = draw_frontier(
        {"8 GPUs": [bad, small, fast], "16 GPUs": []}, title="a title", capacity_bytes=80 * GIB
    )
    everything, line, none, no_line = figure.data
    assert list(everything.x) == [2, 1, 3]
    assert list(zip(line.x, line.y, strict=True)) == [(3, 1), (1, 2)]
    assert line.hovertext[0] == tooltip(fast)
    assert (line.name, no_line.name, len(none.x)) == ("8 GPUs", "16 GPUs", 0)
    assert line.marker.symbol != no_line.marker.symbol, "colour is not the only sign"
    assert "GiB" in figure.layout.xaxis.title.text
    assert "seconds" in figure.layout.yaxis.title.text
    assert figure.layout.shapes[0].x0 == 80
    assert "80 GiB" in figure.layout.annotations[0].text
