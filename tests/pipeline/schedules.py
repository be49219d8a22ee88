"""Hypothesis strategies for schedules."""

from hypothesis import strategies as st

from optimus_jax.pipeline.gpipe import forward_only
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import make_schedule

LATENCY = st.sampled_from((1, 2))
STAGES = st.sampled_from((1, 2, 3, 4, 6))


@st.composite
def training_schedules(draw: st.DrawFn) -> Schedule:
    """Training schedules that have a name."""
    name, num_stages = draw(st.sampled_from(("gpipe", "1f1b", "interleaved"))), draw(STAGES)
    if name == "interleaved":
        return make_schedule(
            name,
            num_stages,
            num_stages * draw(st.integers(1, 4)),
            draw(st.integers(1, 3)),
            draw(LATENCY),
        )
    return make_schedule(name, num_stages, draw(st.integers(1, 12)), 1, draw(LATENCY))


def forward_schedules() -> st.SearchStrategy[Schedule]:
    """Schedules for evaluation."""
    return st.builds(forward_only, STAGES, st.integers(1, 12), st.integers(1, 3), LATENCY)


def schedules() -> st.SearchStrategy[Schedule]:
    """All of them."""
    return st.one_of(training_schedules(), forward_schedules())
