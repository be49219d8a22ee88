"""Drawn scenarios are reproducible and varied, and under them a run with the advisor ends, and
every decision has a reason.
"""

import dataclasses
import math
from dataclasses import replace

import pytest
from simulated import PRICING, QUICK, SEARCHER, scenario

from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.simulation.comparison import AUTO, STAY, run_all
from optimus_jax.simulation.events import EVENTS
from optimus_jax.simulation.named_scenarios import find_scenario
from optimus_jax.simulation.random_scenarios import (
    DEVICES_PER_HOST,
    MINUTES,
    MOST_COST_FACTOR,
    MOST_EVENTS,
    MOST_MISFIT,
    NUM_HOSTS,
    random_scenario,
)
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.simulation.setup import Setup

DRAWN = [random_scenario(seed) for seed in range(300)]
DURATION_S = 120.0
"""Duration of a run without events."""


def test_a_seed_draws_the_same_scenario():
    assert random_scenario(17) == random_scenario(17) == find_scenario("random:17")
    assert random_scenario(17).name == "random:17"
    assert random_scenario(18).events != random_scenario(17).events
    assert Scenario.from_json(DRAWN[17].to_json()) == DRAWN[17]


@pytest.mark.parametrize("name", ["random:", "random:x", "random:-1", "random:1.5"])
def test_a_drawn_scenario_is_named_by_a_seed(name):
    with pytest.raises(ConfigError, match="named by its seed"):
        find_scenario(name)


def test_all_kinds_of_events_are_drawn():
    kinds = {type(event) for drawn in DRAWN for event in drawn.events}
    assert kinds == set(EVENTS.values())
    sizes = {
        len([event for event in drawn.events if not isinstance(event, EVENTS["phase"])])
        for drawn in DRAWN
    }
    assert set(range(MOST_EVENTS + 1)) <= sizes, "two slow hosts are two events"
    assert {drawn.start for drawn in DRAWN} == {"best", "default"}


def test_drawn_values_are_within_their_limits():
    minutes = [drawn.duration_s / 60 for drawn in DRAWN]
    assert MINUTES[0] <= min(minutes) < 25
    assert 85 < max(minutes) <= MINUTES[1]
    assert 0.14 < max(drawn.misfit.plans for drawn in DRAWN) <= MOST_MISFIT
    assert 0.14 < max(drawn.misfit.terms for drawn in DRAWN) <= MOST_MISFIT
    factors = [drawn.switching.cost_factor for drawn in DRAWN]
    assert 1 / MOST_COST_FACTOR <= min(factors) < 0.2
    assert 5 < max(factors) <= MOST_COST_FACTOR
    for name in ("intra_host", "inter_host", "compute", "memory"):
        assert len({getattr(drawn.prior, name) for drawn in DRAWN}) > 30


def test_drawn_hosts_and_devices_exist_on_every_cluster_of_eight_hosts():
    places = [event for drawn in DRAWN for event in drawn.events if hasattr(event, "devices")]
    hosts = {event.host for event in places} - {None}
    devices = {device for event in places for device in event.devices}
    assert hosts == set(range(NUM_HOSTS))
    assert max(devices) < NUM_HOSTS * DEVICES_PER_HOST
    small = [event for seed in range(50) for event in random_scenario(seed, num_hosts=2).events]
    assert max(event.host or 0 for event in small if hasattr(event, "host")) == 1


def times_s(event):
    """When an event happens: its times by field."""
    fields = dataclasses.asdict(event)
    return {
        name: value
        for name, value in fields.items()
        if name.endswith("_s") and name != "wait_s" and value
    }


def quick(seed):
    """A drawn scenario on the small cluster, in minutes instead of hours."""
    drawn = random_scenario(seed, num_hosts=2)
    share = DURATION_S / drawn.duration_s
    events = [
        replace(event, **{name: time_s * share for name, time_s in times_s(event).items()})
        for event in drawn.events
    ]
    cost_factor = drawn.switching.cost_factor
    return replace(
        drawn,
        duration_s=DURATION_S,
        events=tuple(events),
        seq_len=drawn.seq_len and 512,
        switching=scenario(switching={**QUICK, "cost_factor": cost_factor}).switching,
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_run_ends_under_random_events(seed):
    assert_run_ends(quick(seed), seed)


@pytest.mark.nightly  # a quarter of an hour; the test above tries four of them
@pytest.mark.parametrize("seed", range(4, 315))
def test_many_runs_end_under_random_events(seed):
    assert_run_ends(quick(seed), seed)


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
