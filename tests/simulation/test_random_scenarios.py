"""Under random events, a run with the advisor ends, and every decision has a reason."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import PRICING, QUICK, SEARCHER, scenario

from optimus_jax.errors import PlanError
from optimus_jax.simulation.comparison import AUTO, STAY, run_all
from optimus_jax.simulation.setup import BEST, DEFAULT, Setup

DURATION_S = 120.0
"""Duration of a run without events."""


def sometimes(values):
    """One of the values, or None: the field keeps its default."""
    return st.none() | values


@st.composite
def times(draw):
    """When an event holds: from its start on, for a while, or repeatedly."""
    value = {
        "start_s": draw(st.floats(0, DURATION_S)),
        "for_s": draw(sometimes(st.floats(1, DURATION_S))),
        "ramp_s": draw(st.sampled_from([0, 0, 20])),
    }
    if value["for_s"] is not None and draw(st.booleans()):
        value |= {
            "every_s": value["for_s"] * draw(st.floats(1.2, 4)),
            "jitter": draw(st.floats(0, 0.4)),
        }
    return value


DEVICES = st.fixed_dictionaries({"host": st.integers(0, 1)}) | st.fixed_dictionaries(
    {"devices": st.lists(st.integers(0, 15), min_size=1, max_size=3, unique=True)}
)
SLOWED = DEVICES | st.just({})
SIZES = st.fixed_dictionaries({"seq_len": st.sampled_from([512, 2048])}) | st.fixed_dictionaries(
    {"global_batch": st.sampled_from([64, 96, 256])}
)


@st.composite
def events(draw):
    """Any kind of event."""
    kind = draw(st.sampled_from(["link", "compute", "memory", "data", "lost", "metrics", "switch"]))
    if kind == "switch":
        return {
            "kind": kind,
            "phase": draw(st.sampled_from(["prepare", "move", "verify", "canary"])),
            "count": draw(st.integers(1, 4)),
        }
    value = {"kind": kind, **draw(times())}
    if kind == "link":
        return value | {
            "link": draw(st.sampled_from(["intra_host", "inter_host"])),
            "factor": draw(st.sampled_from([0.1, 0.25, 0.5, 2.0])),
        }
    if kind == "compute":
        return value | {"factor": draw(st.sampled_from([1.1, 1.5, 4.0])), **draw(SLOWED)}
    if kind == "memory":
        return value | {"share": draw(st.floats(0.05, 0.6))}
    if kind == "data":
        return value | {"wait_s": draw(st.floats(0.01, 2))}
    if kind == "lost":
        once = {name: value[name] for name in ("kind", "start_s", "for_s")}
        return (
            once
            | draw(DEVICES)
            | {
                "notice_s": draw(st.sampled_from([0, 10, 40])),
                "during": draw(st.sampled_from(["none", "prepare", "move", "verify", "canary"])),
            }
        )
    return value | {
        "names": [draw(st.sampled_from(["*", "link*", "memory*", "step_times"]))],
        "fault": draw(st.sampled_from(["missing", "stale", "lying"])),
        "factor": draw(st.sampled_from([0.1, 2.0])),
    }


@st.composite
def scenarios(draw):
    """Up to four events, and a change of the batch."""
    phases = (
        [{"kind": "phase", "start_share": draw(st.floats(0.1, 0.9)), **draw(SIZES)}]
        if draw(st.booleans())
        else []
    )
    happens = [
        {name: value for name, value in event.items() if value is not None}
        for event in draw(st.lists(events(), min_size=1, max_size=4))
    ]
    prior = {
        name: draw(st.sampled_from([0.5, 2.0]))
        for name in draw(
            sometimes(st.sampled_from([("intra_host",), ("inter_host",), ("compute",)]))
        )
        or ()
    }
    return scenario(
        *happens,
        *phases,
        steps=None,
        duration_s=DURATION_S,
        start=draw(st.sampled_from([BEST, DEFAULT])),
        prior=prior,
        switching=QUICK,
    )


@settings(max_examples=15)  # an example takes up to 3 s: after each event all plans are priced
@given(made=scenarios(), seed=st.integers(0, 1000))
def test_a_run_ends_under_random_events(made, seed):
    assert_run_ends(made, seed)


@pytest.mark.nightly  # a quarter of an hour; the test above tries fifteen of them
@settings(max_examples=300)
@given(made=scenarios(), seed=st.integers(0, 1000))
def test_many_runs_end_under_random_events(made, seed):
    assert_run_ends(made, seed)


def assert_run_ends(made, seed):
    setup = Setup.of(made, PRICING)
    try:
        run_all(setup, seed, SEARCHER, (STAY,))
    except PlanError:  # nothing can train on what is left
        return
    auto = run_all(setup, seed, SEARCHER, (AUTO,))[AUTO]
    assert math.isfinite(auto.total_s)
    assert all(run_event.why for run_event in auto.run_events)


def test_a_cluster_too_small_for_the_model_is_an_error():
    made = replace(
        scenario(
            {"kind": "lost", "host": 0, "start_s": 10}, {"kind": "lost", "host": 1, "start_s": 10}
        ),
        duration_s=DURATION_S,
    )
    with pytest.raises(PlanError, match="nothing can train the model on what is left"):
        run_all(Setup.of(made, PRICING), 0, SEARCHER, (AUTO,))
