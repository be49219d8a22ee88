"""The oracle: no faster than possible, and no slower than any policy."""

import itertools

import numpy as np
import pytest
from simulated import QUARTER, QUICK, SEARCHER, run, truth

from optimus_jax.control.deciding.candidates import switch_method_of
from optimus_jax.simulation.candidate_plans import candidate_plans
from optimus_jax.simulation.comparison import POLICIES, run_all, run_policy
from optimus_jax.simulation.oracle import (
    Scripted,
    best_static,
    run_oracle,
    run_static,
    shortest_path,
)
from optimus_jax.simulation.world import PlacedPlan

SLOW_FROM_8 = {"kind": "link", "link": "inter_host", "factor": 0.05, "start_s": 8, "for_s": 400}
LOST = {"kind": "lost", "devices": [11], "start_s": 40, "for_s": 60}


def plans_of(made):
    return candidate_plans(made.setup, made.timeline, SEARCHER)


@pytest.mark.parametrize(
    "events",
    [(), (QUARTER,), (LOST,), ({"kind": "compute", "factor": 1.5, "devices": [3], "start_s": 30},)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_oracle_is_no_slower_than_static_plans_nor_faster_than_possible(events, seed):
    made = truth(*events, seed=seed)
    plans = plans_of(made)
    _, static = best_static(made, plans)
    oracle = run_oracle(made, plans, [static])
    assert (
        oracle.total_s
        <= static.total_s
        <= min(run_static(made, plan).total_s for plan in plans[:5])
    )
    # No step is faster than under the fastest plan in the best of all conditions.
    least_s = min(
        made.world.step_time_s(PlacedPlan(plan, devices), made.timeline.conditions(index), 0)
        for plan in plans
        for index in range(len(made.timeline.bounds_s))
        if (devices := made.world.devices_for(plan, made.timeline.conditions(index)))
    )
    assert oracle.total_s >= least_s * made.noise.sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shortest_path_is_as_fast_as_the_best_of_all_sequences(seed):
    """Six steps and three plans: every sequence of plans is run, and none is faster."""
    cheap = QUICK | {
        "compile_s": 0.2,
        "move_share": 9.0,
        "move_s": 0.05,
        "verify_s": 0.05,
        "quiesce_s": 0.05,
        "first_steps_s": 0.05,
        "compile_slowdown": 1.01,
    }
    made = truth(
        {"kind": "link", "link": "inter_host", "factor": 0.2, "start_s": 0.5, "for_s": 1000},
        seed=seed,
        steps=6,
        start="default",
        switching=cheap,
    )
    plans = plans_of(made)
    slow = made.timeline.at(5.0)
    fastest = sorted(
        plans,
        key=lambda plan: made.world.step_time_s(
            PlacedPlan(plan, made.world.devices_for(plan, slow)), slow, 0
        ),
    )
    chosen = [made.setup.start, *[plan for plan in fastest if plan != made.setup.start][:2]]
    times_s = []
    for sequence in itertools.product(chosen, repeat=5):
        path = {
            step: plan
            for step, (before, plan) in enumerate(
                itertools.pairwise((made.setup.start, *sequence)), start=1
            )
            if plan != before
        }
        times_s.append(
            run(
                made,
                Scripted(path),
                every=None,
                asked_at=tuple(path),
                canary=False,
                compiles_ahead=True,
            ).total_s
        )
    path = shortest_path(made, chosen)
    walked = run(
        made,
        Scripted(path),
        every=None,
        asked_at=tuple(sorted(path)),
        canary=False,
        compiles_ahead=True,
    ).total_s
    assert walked == pytest.approx(min(times_s), rel=1e-9)
    assert path, "moving would have paid"


def test_expensive_moves_are_not_made():
    cheap, expensive = (
        truth(SLOW_FROM_8, start="default", switching=QUICK | {"move_s": move_s, "move_share": 9.0})
        for move_s in (0.1, 1e4)
    )
    assert shortest_path(cheap, plans_of(cheap))
    # Another executable with the same layout does not move the state.
    start = expensive.setup.start
    assert {
        switch_method_of(plan, start, same_devices=True)
        for plan in shortest_path(expensive, plans_of(expensive)).values()
    } <= {"executable"}


@pytest.mark.parametrize(
    "name", [name for name in POLICIES if name not in ("auto", "checkpoint-restart")]
)
def test_no_policy_is_faster_than_the_oracle(name):
    made = truth(QUARTER, seed=5)
    oracle = run_oracle(made, plans_of(made), [best_static(made, plans_of(made))[1]])
    # The oracle considers the best few plans of each of the conditions, so a policy may be faster
    # by their difference.
    assert run_policy(name, made, SEARCHER).total_s >= 0.99 * oracle.total_s


def test_all_methods_run_on_the_same_simulated_cluster():
    setup = truth(QUARTER).setup
    first, again = (
        run_all(setup, 0, SEARCHER, ("stay", "default", "best static", "oracle")) for _ in range(2)
    )
    assert first == again
    assert list(first) == ["stay", "default", "best static", "oracle"]
    assert np.ptp([outcome.total_s for outcome in first.values()]) > 0
