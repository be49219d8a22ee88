"""The simulated cluster: true speeds differ from the planner's, signals are late and noisy, and
switches cost time and may fail.
"""

import statistics
from dataclasses import replace
from functools import cache

import pytest
from simulated import (
    CLUSTER,
    EXACT,
    PRICING,
    QUARTER,
    QUICK,
    FollowsScript,
    run,
    scenario,
    setup_of,
    truth,
)

from optimus_jax.config.request import make_config
from optimus_jax.control import constants
from optimus_jax.control.policy import Decision
from optimus_jax.control.signals import UNKNOWN
from optimus_jax.control.switch_state import Decided, News, Question
from optimus_jax.planning.search.search import USABLE_SHARE, fits, search
from optimus_jax.simulation.baseline_policies import Static
from optimus_jax.simulation.comparison import num_switches
from optimus_jax.simulation.events import PhaseEvent
from optimus_jax.simulation.named_scenarios import library
from optimus_jax.simulation.outcome import SimulationOptions
from optimus_jax.simulation.setup import Setup, Truth, default_plans
from optimus_jax.simulation.simulator import Simulation
from optimus_jax.simulation.telemetry import Now, Telemetry
from optimus_jax.simulation.timeline import NORMAL, ClusterConditions
from optimus_jax.simulation.true_switch_costs import PHASES as COST_PHASES
from optimus_jax.simulation.true_switch_costs import TrueSwitchCosts
from optimus_jax.simulation.world import PlacedPlan, World

BEST = search(PRICING, top=2).best
START, SECOND = (candidate.plan for candidate in BEST)
AS_FAST = replace(START, loss_chunk_tokens=1024)
OTHER = default_plans(PRICING, 16)[0]
PHASES = ("prepare", "quiesce", "move", "verify", "first_steps")


def switch(step, plan, **fields):
    return {step: Decision(step=step, action="switch", plan=plan, why="a test", **fields)}


def static_s(made, plan=START):
    return run(made, Static(plan, 16), every=None).total_s


# The true cluster


def test_true_speeds_are_off_by_the_shares_of_the_scenario():
    worlds = [truth(seed=seed).world for seed in range(8)]
    for name, share in (
        ("intra_host", 0.3),
        ("inter_host", 0.3),
        ("matmul", 0.15),
        ("memory_speed", 0.15),
    ):
        offs = {round(getattr(world, name), 6) for world in worlds}
        assert offs == {1 - share, 1 + share}
    times_s = [
        world.step_time_s(PlacedPlan(START, tuple(range(16))), NORMAL, 0) for world in worlds
    ]
    nominal_s = PRICING.step_time_s(START)
    assert len(set(times_s)) == 8
    assert statistics.median(abs(time_s / nominal_s - 1) for time_s in times_s) > 0.05


def test_without_misfit_only_overlap_differs_from_the_planner():
    world = truth(misfit=EXACT).world
    place = PlacedPlan(OTHER, tuple(range(16)))
    slowdown = world._rates.overlap_slowdown
    nominal = replace(PRICING, rates=replace(PRICING.rates, overlap_slowdown=slowdown))
    assert world.step_time_s(place, NORMAL, 0) == pytest.approx(
        nominal.step_time_s(OTHER), rel=1e-12
    )
    assert static_s(truth(misfit=EXACT)) == pytest.approx(
        400 * world.step_time_s(PlacedPlan(START, tuple(range(16))), NORMAL, 0), rel=1e-9
    )


def test_the_planner_may_be_told_wrong_speeds():
    made = setup_of(scenario(prior={"inter_host": 0.25}))
    assert made.assumed[0].cluster.inter_host.bytes_per_s == CLUSTER.inter_host.bytes_per_s / 4
    assert made.nominal[0].cluster == CLUSTER
    assert made.start != START


def test_a_first_plan_really_fits_where_the_planner_is_told_too_much_memory():
    """A run compiles its first plan, and goes on to the next if that needs more than there is."""
    memory_bytes = round(PRICING.memory(START).total / USABLE_SHARE / 1.05)
    accelerator = replace(CLUSTER.accelerator, memory_bytes=memory_bytes)
    pricing = replace(PRICING, cluster=replace(CLUSTER, accelerator=accelerator))
    made = Setup.of(scenario(prior={"memory": 1.15}), pricing)
    assert made.assumed[0].cluster.bytes_per_device == round(1.15 * memory_bytes)
    assert search(made.assumed[0], top=1).best[0].plan == START
    assert START not in made.tried
    assert all(fits(pricing.memory(plan), pricing.cluster) for plan in made.tried)


def test_plans_are_tried_in_the_conditions_of_the_beginning():
    slow = {"kind": "link", "factor": 0.1, "for_s": 600}
    made = truth(slow, misfit=EXACT)
    assert made.setup.tried_s == {
        plan: made.world.step_time_s(
            PlacedPlan(plan, tuple(range(16))), replace(NORMAL, inter_host=0.1), 0
        )
        for plan in made.setup.tried
    }


def test_the_same_seed_gives_the_same_run():
    def outcome(seed):
        return run(truth(QUARTER, seed=seed), FollowsScript(switch(100, SECOND)), probes=True)

    assert outcome(3) == outcome(3)
    assert outcome(3).total_s != outcome(4).total_s


def test_links_are_probed_before_the_first_step_under_a_new_plan():
    """Several times if their speed has changed: otherwise readings from before the switch would be
    applied to the steps after it.
    """
    made, policy = (
        truth(QUARTER, misfit=EXACT, steps=2000, switching={**QUICK, "probe_s": 1.0}),
        FollowsScript(),
    )
    first = made.world.step_time_s(PlacedPlan(made.setup.start, tuple(range(16))), NORMAL, 0)
    # it is ready when the link has just become slow
    step = int((QUARTER["start_s"] - 0.95 * QUICK["compile_s"]) / first)
    policy.decisions = switch(step, SECOND)
    outcome = run(made, policy, probes=True)
    after = next(
        observation
        for observation in policy.observations
        if observation.step > outcome.run_events[0].step
    )
    assert after.reading("link_slowdown/inter_host").value == pytest.approx(4.0, rel=0.01)
    assert after.reading("link_slowdown/inter_host").quality == "good"


def test_noise_has_spikes_and_drift():
    noise = truth(steps=20000, misfit={"spikes": 0.01}).noise
    assert 100 < (noise > 2).sum() < 300
    assert statistics.stdev(noise[:2000][noise[:2000] < 2]) == pytest.approx(0.02, rel=0.2)
    assert (truth(steps=2000, misfit=EXACT).noise == 1).all()


@cache
def worst_and_normal(name):
    """Step times of the first plan in a scenario of the library: the slowest (infinite if it cannot
    continue), and without events.
    """
    given = library()[name]
    batches = {
        "seq_len": given.seq_len and given.seq_len // 2,
        "global_batch": given.global_batch and max(16, given.global_batch // 8),
    }
    events = tuple(
        replace(event, global_batch=event.global_batch and max(16, event.global_batch // 8))
        if isinstance(event, PhaseEvent)
        else event
        for event in given.events
    )
    made = Truth(Setup.of(replace(given, events=events, **batches), PRICING), 0)
    place = PlacedPlan(made.setup.start, tuple(range(16)))
    times_s = [
        made.world.step_time_s(place, made.timeline.conditions(index), phase)
        for index in range(len(made.timeline.bounds_s))
        for phase in range(len(made.setup.nominal))
    ]
    return max(times_s), made.world.step_time_s(place, NORMAL, 0)


@pytest.mark.parametrize(
    "name",
    [
        "link-quarter",
        "link-flapping",
        "straggler-10-minutes",
        "straggler-for-ever",
        "longer-sequences",
        "batch-ramp",
        "device-lost",
        "host-lost-in-switch",
        "missing-metrics",
        "failing-switch",
        "slow-data",
        "host-slow-15-minutes",
        "host-drift",
        "costly-switch-link-quarter",
        "frozen-before-straggler",
        "frozen-during-straggler",
        "frozen-skew",
        "late-longer-sequences",
        "link-improves",
    ],
)
def test_disturbing_scenarios_slow_the_first_plan(name):
    worst, normal = worst_and_normal(name)
    assert worst > 1.1 * normal


@pytest.mark.parametrize("name", ["stationary", "short", "default-start", "lying-metrics"])
def test_undisturbed_scenarios_do_not_slow_the_first_plan(name):
    worst, normal = worst_and_normal(name)
    assert worst == normal


def test_late_batches_are_loaded_beside_steps_so_that_a_faster_plan_waits_longer():
    made = truth(misfit=EXACT)
    world, first = made.world, made.world.first
    late = replace(NORMAL, wait_s=0.5)
    slower = replace(late, slow=tuple((device, 3.0) for device in first.devices))
    usual_s = world.step_time_s(first, NORMAL, 0)
    assert world.step_time_s(first, late, 0) == pytest.approx(usual_s + 0.5)
    assert world.data_wait_s(first, late, 0) == pytest.approx(0.5)
    plans = [each.plan for each in search(PRICING).best]
    for plan in plans:
        place = PlacedPlan(plan, tuple(range(plan.num_devices)))
        own_s = world.step_time_s(place, NORMAL, 0)
        step_s = world.step_time_s(place, late, 0)
        assert step_s == pytest.approx(max(own_s, usual_s + 0.5))
        assert world.data_wait_s(place, late, 0) == pytest.approx(step_s - own_s)
    slow_s = world.step_time_s(first, replace(slower, wait_s=0.0), 0)
    assert world.step_time_s(first, slower, 0) == pytest.approx(max(slow_s, usual_s + 0.5))


def test_a_straggler_slows_plans_that_include_its_host():
    made = truth(
        {"kind": "compute", "factor": 1.5, "devices": [3], "start_s": 10}, misfit=EXACT
    ).world
    slow = truth({"kind": "compute", "factor": 1.5, "devices": [3], "start_s": 10}).timeline.at(
        20.0
    )
    assert made.slowness(PlacedPlan(OTHER, tuple(range(16))), slow, 0) == 1.5
    half = default_plans(PRICING, 8)[0]
    assert made.devices_for(half, slow) == tuple(range(8, 16))
    assert made.slowness(PlacedPlan(half, tuple(range(8, 16))), slow, 0) == 1.0


def test_a_straggler_in_a_stage_with_fewer_layers_costs_less():
    pipelined = next(
        candidate.plan
        for candidate in search(PRICING, top=20).best
        if candidate.plan.axes.pipe == 2 and candidate.plan.pipeline.repeats == 1
    )
    uneven = replace(pipelined, pipeline=replace(pipelined.pipeline, layers_per_stage=(20, 28)))
    world, devices = truth().world, tuple(range(16))
    early = replace(NORMAL, slow=((3, 1.5),))
    assert world.slowness(PlacedPlan(pipelined, devices), early, 0) == 1.5
    assert world.slowness(PlacedPlan(uneven, devices), early, 0) == pytest.approx(30 / 28)


def test_a_straggler_in_the_stage_of_an_encoder_costs_what_its_layers_take():
    """Nine of whisper-small's 24 layers take longer than the other 15."""
    pricing = replace(PRICING, config=make_config("whisper-small", {"global_batch": 128}))
    world = World(scenario(), (pricing,), seed=0)
    stages = next(each.plan for each in search(PRICING, top=20).best if each.plan.axes.pipe == 2)
    plan = replace(stages, pipeline=replace(stages.pipeline, layers_per_stage=(9, 15), repeats=1))
    encoder, decoder = pricing.workload.layer_shares[0], pricing.workload.layer_shares[-1]
    first, second = 9 * encoder, 3 * encoder + 12 * decoder
    for device, slowest in ((3, 1.5 * first), (12, 1.5 * second)):
        slow = replace(NORMAL, slow=((device, 1.5),))
        found = world.slowness(PlacedPlan(plan, tuple(range(16))), slow, 0)
        assert found == pytest.approx(slowest / first)


# Time


def test_simulating_by_intervals_equals_step_by_step():
    """Skipping from one change of conditions to the next gives the same time as going step
    by step.
    """
    made = truth(
        QUARTER, {"kind": "compute", "factor": 1.3, "start_s": 50, "for_s": 7, "every_s": 20}
    )
    by_step = run(made, FollowsScript(), every=1).total_s
    assert static_s(made) == pytest.approx(by_step, rel=1e-12)


def test_a_slow_link_costs_the_expected_time():
    made = truth(QUARTER, misfit=EXACT)
    normal_s, slow_s = (
        made.world.step_time_s(PlacedPlan(START, tuple(range(16))), conditions, 0)
        for conditions in (NORMAL, made.timeline.at(60.0))
    )
    assert slow_s > 1.3 * normal_s
    # Steps are slower for 60 s; a step at either end is off by one at most.
    assert static_s(made) == pytest.approx(
        400 * normal_s + 60 * (1 - normal_s / slow_s), abs=slow_s
    )


# Signals


def observations(*events, every=1, **fields):
    made, policy = truth(*events, **fields), FollowsScript()
    Simulation(made, policy, SimulationOptions(every=every)).run()
    return policy.observations


def test_every_step_time_is_observed():
    seen = observations(QUARTER, misfit=EXACT)
    assert len(seen) == 399
    assert all(len(each.step_times_s) == 1 for each in seen)
    assert [each.step for each in seen] == list(range(1, 400))


def test_probe_readings_are_late_noisy_and_nearly_right():
    seen = observations(QUARTER, misfit={"links": 0, "probe_bias": 0})
    inter_host = [
        (each.time_s, each.reading("link_slowdown/inter_host")) for each in seen if each.step > 3
    ]
    before = [reading.value for time_s, reading in inter_host if 10 < time_s < 30]
    late = next(time_s for time_s, reading in inter_host if reading.value > 2)
    within = [reading.value for time_s, reading in inter_host if late <= time_s < 90]
    assert statistics.median(before) == pytest.approx(1.0, rel=0.1)
    assert 31 < late < 75
    assert statistics.median(within) == pytest.approx(4.0, rel=0.15)
    assert len(set(before)) > 1


def test_probes_stay_within_their_budget():
    outcome = Simulation(truth(misfit=EXACT), FollowsScript(), SimulationOptions()).run()
    assert 0 < outcome.probes_s <= 0.002 * outcome.total_s + QUICK["probe_s"]


@pytest.mark.parametrize(("fault", "expected"), [("missing", None), ("lying", 10.0)])
def test_missing_and_wrong_metrics_are_simulated(fault, expected):
    event = {
        "kind": "metrics",
        "names": ["link_slowdown/*"],
        "fault": fault,
        "factor": 10,
        "start_s": 20,
        "for_s": 20,
    }
    seen = observations(event, misfit=EXACT)
    readings = {
        time_s: next(
            each.reading("link_slowdown/inter_host").value for each in seen if each.time_s > time_s
        )
        for time_s in (15, 25, 45)
    }
    assert readings == {
        15: pytest.approx(1.0),
        25: expected and pytest.approx(expected),
        45: pytest.approx(1.0),
    }
    assert all(each.reading("step_time_s").value for each in seen)


def test_stale_metrics_keep_their_age():
    event = {
        "kind": "metrics",
        "names": ["step_time_s", "step_times"],
        "fault": "stale",
        "start_s": 40,
        "for_s": 40,
    }
    seen = [each for each in observations(QUARTER, event, misfit=EXACT) if 42 < each.time_s < 78]
    assert len({each.reading("step_time_s") for each in seen}) == 1
    assert seen[-1].time_s - seen[-1].reading("step_time_s").time_s > 30


def test_step_times_may_be_missing():
    seen = observations(
        {"kind": "metrics", "names": ["step_times"], "fault": "missing", "start_s": 40}
    )
    assert all(bool(each.step_times_s) == (each.time_s < 40) for each in seen)


def test_memory_use_and_stragglers_are_observed():
    seen = observations(
        {"kind": "memory", "share": 0.3, "start_s": 50, "for_s": 500},
        {"kind": "compute", "factor": 1.5, "devices": [9], "start_s": 50},
        misfit=EXACT,
    )
    early, late = (next(each for each in seen if each.time_s > time_s) for time_s in (45, 100))
    assert late.reading("memory_share").value > early.reading("memory_share").value + 0.1
    assert early.reading("process_time/1").value == pytest.approx(1.0, abs=0.05)
    assert late.reading("process_time/1").value == pytest.approx(1.5, abs=0.06)
    assert late.reading("process_time/0").value == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("lost", [frozenset(), frozenset({12})])
def test_a_host_that_is_out_is_probed_unless_it_is_lost(lost):
    made = truth(misfit=EXACT)
    telemetry = Telemetry(made.world, made.setup.assumed[0], made.setup.settings, seed=0)
    now = Now(
        step=100,
        time_s=1000.0,
        place=PlacedPlan(START, tuple(range(8))),
        phase=0,
        conditions=ClusterConditions(slow=((9, 1.5),), lost=lost, reported=lost),
    )
    telemetry.probe_s(now, asked=True)
    out = telemetry.observation([], now).reading("process_time/1")
    assert out is UNKNOWN if lost else out.value == pytest.approx(1.5, abs=0.06)


# Switches


def test_a_switch_costs_the_time_of_its_phases():
    made = truth(misfit=EXACT)
    policy = FollowsScript(switch(100, OTHER))
    outcome = run(made, policy, canary=False)
    [run_event] = outcome.run_events
    assert (run_event.kind, run_event.plan, outcome.plan) == ("switch", OTHER, OTHER)
    assert set(run_event.delay_s) == set(PHASES)
    first_s, second_s = (
        made.world.step_time_s(PlacedPlan(plan, tuple(range(16))), NORMAL, 0)
        for plan in (START, OTHER)
    )
    expected_s = (
        run_event.step * first_s
        + (400 - run_event.step) * second_s
        + sum(run_event.delay_s.values())
    )
    # Steps during compilation overshoot its end by a part of one.
    assert outcome.total_s == pytest.approx(expected_s, abs=0.04 * first_s)
    assert run_event.time_s - run_event.decided_s >= QUICK["compile_s"]
    [(_, plan, told_s)] = policy.calls
    assert plan == OTHER
    assert set(told_s) == {*PHASES, "compile_tax_s"} - {"prepare", "first_steps"}
    assert told_s["compile_tax_s"] == pytest.approx(run_event.delay_s["prepare"], rel=0.05)


def test_another_executable_moves_no_state():
    made = truth(misfit=EXACT)
    # smaller microbatches
    again = replace(START, microbatches=2 * START.microbatches)
    [run_event] = run(made, FollowsScript(switch(50, again)), canary=False).run_events
    assert set(run_event.delay_s) == {"prepare", "quiesce", "first_steps"}


def test_switching_back_needs_no_compilation():
    made = truth(misfit=EXACT)
    there, back = run(
        made, FollowsScript(switch(50, OTHER) | switch(200, START)), canary=False
    ).run_events
    assert there.delay_s["prepare"] > 0
    assert back.delay_s["prepare"] == 0
    assert back.step == 200


def test_true_switch_costs_vary_with_the_seed():
    made = [
        TrueSwitchCosts(truth(seed=seed, switching=QUICK | {"spread": 0.4}).world)
        for seed in range(5)
    ]
    assert len({each.compile_s for each in made}) == 5


def test_every_phase_of_a_switch_may_cost_more():
    usual, dear = (
        truth(switching=QUICK | {"spread": 0.4, "cost_factor": factor}).world for factor in (1, 10)
    )
    places = PlacedPlan(START, tuple(range(16))), PlacedPlan(OTHER, tuple(range(16)))

    def costs(world):
        costs = TrueSwitchCosts(world)
        return {
            **costs.switch_s(*places, NORMAL, 0),
            **costs.restart_s(OTHER, 0, saves=True),
            "compile": costs.compile_s,
        }

    assert set(costs(usual)) == set(COST_PHASES)
    assert costs(dear) == pytest.approx(
        {phase: 10 * time_s for phase, time_s in costs(usual).items()}
    )


def test_a_slow_link_makes_moving_slow():
    world = truth(misfit=EXACT).world
    # Each host has the layers of one stage, and needs parts of the other's.
    places = PlacedPlan(SECOND, tuple(range(16))), PlacedPlan(OTHER, tuple(range(16)))
    costs = [
        TrueSwitchCosts(world).switch_s(*places, replace(NORMAL, inter_host=inter_host), 0)["move"]
        for inter_host in (1.0, 0.5, 0.25)
    ]
    assert costs[2] - costs[1] == pytest.approx(2 * (costs[1] - costs[0])), (
        "what crosses it takes as much longer as it is slower"
    )
    assert costs[2] > 2 * costs[0]


def test_a_slower_plan_is_taken_back():
    slow = replace(OTHER, microbatches=8)
    policy = FollowsScript(switch(50, slow))
    made = truth(misfit=EXACT)
    outcome = run(made, policy)
    there, back_again = outcome.run_events
    assert (there.kind, back_again.kind) == ("switch", "rollback")
    assert back_again.step == there.step + constants.NUM_COMPARED_STEPS + 1, "it is far slower"
    assert outcome.plan == START
    _, first, failed, back = policy.calls
    assert first == ("charged", pytest.approx(QUICK["first_steps_s"]))
    assert failed[:2] == ("failed", slow)
    extra_s = back_again.delay_s["first_steps"]
    assert back == ("charged", pytest.approx(sum(back_again.delay_s.values()) - extra_s, abs=1e-9))


@pytest.mark.parametrize("phase", ["prepare", "move", "verify", "canary"])
def test_a_failed_switch_keeps_the_old_plan_and_costs_more_later(phase):
    made = truth({"kind": "switch", "phase": phase}, misfit=EXACT)
    policy = FollowsScript(switch(50, SECOND))
    outcome = run(made, policy)
    assert outcome.plan == START
    assert ("failed", SECOND) in [call[:2] for call in policy.calls]
    assert num_switches(outcome) == 1
    before = {"prepare": -1.0, "move": "prepare", "verify": "move", "canary": "verify"}[phase]
    if phase != "prepare":
        earlier = run(
            truth({"kind": "switch", "phase": before}, misfit=EXACT),
            FollowsScript(switch(50, SECOND)),
        )
        assert outcome.total_s > earlier.total_s
    assert outcome.total_s > static_s(made)


def test_a_decision_to_stay_withdraws_the_preparation():
    policy = FollowsScript(
        switch(50, OTHER) | {55: Decision(step=55, action="stay", why="changed its mind")}
    )
    outcome = run(truth(misfit=EXACT), policy)
    assert [run_event.kind for run_event in outcome.run_events] == ["withdrawn"]
    assert num_switches(outcome) == 0
    assert policy.calls == [
        ("charged", pytest.approx(outcome.run_events[0].delay_s["prepare"], rel=0.1))
    ], "what compiling has taken from steps"


def test_a_planned_switch_waits_for_its_step():
    [run_event] = run(
        truth(misfit=EXACT), FollowsScript(switch(50, SECOND, at_step=300)), canary=False
    ).run_events
    assert run_event.step == 300


def test_too_little_memory_is_found_before_moving():
    policy, capacity = FollowsScript(switch(50, SECOND)), CLUSTER.accelerator.memory_bytes
    needed, present = (PRICING.memory(plan).total for plan in (SECOND, OTHER))
    assert needed > present
    outcome = run(
        truth(
            {
                "kind": "memory",
                "share": 1 - (needed + present) / 2 / capacity,
                "start_s": 0.0,
                "for_s": 1e4,
            },
            misfit=EXACT,
            start="default",
        ),
        policy,
    )
    assert policy.calls[0][0] == "failed"
    assert "memory" in policy.calls[0][2]
    assert outcome.plan == OTHER


def test_a_policy_that_always_switches_is_slower():
    class Restless(FollowsScript):
        def decide(self, observation):
            return switch(observation.step, SECOND if observation.step % 80 < 40 else START)[
                observation.step
            ]

    outcome = run(truth(), Restless(), canary=False)
    assert num_switches(outcome) >= 8
    assert outcome.total_s > 1.1 * static_s(truth())


# Faults


def test_after_a_device_loss_the_run_restarts_on_the_rest_and_returns():
    made = truth({"kind": "lost", "devices": [11], "start_s": 40, "for_s": 60}, misfit=EXACT)
    outcome = run(made, Static(START, 16), every=None)
    assert [run_event.kind for run_event in outcome.run_events] == ["restart", "switch"]
    assert outcome.run_events[0].plan.num_devices == 8
    assert outcome.run_events[0].time_s >= 40 + QUICK["detect_s"] + QUICK["restart_s"]
    assert outcome.run_events[0].step % made.setup.checkpoint_steps == 0
    assert outcome.plan == START
    assert outcome.total_s > static_s(truth(misfit=EXACT)) + 60


def test_the_policy_chooses_the_plan_of_a_restart():
    eight = default_plans(PRICING, 8)[0]
    wanted = replace(eight, remat="none", microbatches=4)

    class Advised(FollowsScript):
        def decide(self, observation):
            return (
                Decision(
                    step=observation.step, action="switch", plan=wanted, why="lost", mandatory=True
                )
                if observation.lost_devices
                else None
            )

    outcome = run(truth({"kind": "lost", "devices": [11], "start_s": 40}, misfit=EXACT), Advised())
    assert outcome.plan == wanted


@pytest.mark.parametrize("during", ["move", "verify", "canary"])
def test_at_a_restart_the_policy_repeats_an_unexecuted_decision(during):
    """The policy decides once, and the run dies before that is carried out: it does not restart
    with the default plan.
    """
    wanted = replace(default_plans(PRICING, 8)[0], remat="none", microbatches=4)

    class DecidesOnce(FollowsScript):
        has_asked = False

        def notices(self, observation, state):
            if not observation.lost_devices:
                return super().notices(observation, state)
            is_first, self.has_asked = not self.has_asked, True
            asked = News(question=Question(trigger="lost", mandatory=True))
            return [asked] * is_first

        def answer(self, question, observation, state, *, blocked):
            if not question.mandatory:
                stays = Decision(step=observation.step, action="stay", why="it is fine")
                return Decided(decision=stays)
            return Decided(
                decision=Decision(
                    step=observation.step, action="switch", plan=wanted, why="lost", mandatory=True
                )
            )

    # With notice, the loss happens during the switch that leaves the host.
    event = {
        "kind": "lost",
        "host": 1,
        "start_s": 60,
        "notice_s": 0 if during == "canary" else 30,
        "during": during,
    }
    outcome = run(
        truth(event, misfit=EXACT), DecidesOnce(switch(20, OTHER) if during == "canary" else {})
    )
    assert outcome.run_events[-1].kind == "restart"
    assert outcome.plan == wanted


def test_a_host_loss_during_a_move_restarts_the_run():
    event = {"kind": "lost", "host": 1, "start_s": 1e6, "for_s": 100, "during": "move"}
    policy = FollowsScript(switch(50, OTHER))
    outcome = run(truth(event, misfit=EXACT), policy)
    assert [run_event.kind for run_event in outcome.run_events][:2] == ["failed", "restart"]
    assert "lost in move" in outcome.run_events[0].why
    assert outcome.run_events[1].plan.num_devices == 8
    assert run(truth(event, misfit=EXACT), FollowsScript()).run_events == ()


def test_with_notice_a_run_can_leave_before_the_loss():
    event = {"kind": "lost", "host": 0, "start_s": 60, "notice_s": 30}
    eight = default_plans(PRICING, 8)[0]

    class Careful(FollowsScript):
        def decide(self, observation):
            leaves = observation.lost_devices and not self.calls
            return (
                Decision(
                    step=observation.step,
                    action="switch",
                    plan=eight,
                    why="reported",
                    without=observation.lost_devices,
                )
                if leaves
                else None
            )

    outcome = run(truth(event, misfit=EXACT), Careful())
    assert [run_event.kind for run_event in outcome.run_events] == ["switch"]
    assert outcome.run_events[0].time_s < 60 + QUICK["restart_s"]


def test_a_run_out_of_memory_restarts_with_a_smaller_plan():
    made = truth({"kind": "memory", "share": 0.8, "start_s": 40, "for_s": 2000}, misfit=EXACT)
    outcome = run(made, Static(START, 16), every=None)
    assert outcome.run_events[0].why == "memory ran out"
    assert made.world.memory_bytes(outcome.plan, 0) <= 0.2 * CLUSTER.accelerator.memory_bytes


def test_a_batch_phase_that_the_plan_cannot_run_causes_a_restart():
    made = truth(
        {"kind": "phase", "start_share": 0.5, "global_batch": 24},
        {"kind": "phase", "start_share": 0.75, "global_batch": 128},
        misfit=EXACT,
        start="data=16",
    )
    outcome = run(made, Static(made.setup.start, 16), every=None)
    assert outcome.run_events[0].why == "the new phase's batch does not divide"
    assert outcome.run_events[0].step == 200


def test_the_slowdown_depends_on_which_link_the_event_names():
    intra_host, inter_host = (
        static_s(truth({"kind": "link", "link": link, "factor": 0.1}, misfit=EXACT))
        for link in ("intra_host", "inter_host")
    )
    assert inter_host > 1.1 * intra_host > 1.1 * static_s(truth(misfit=EXACT))


def test_slowdowns_are_relative_to_what_the_planner_was_told():
    """The planner was told a quarter of the speed that the link has."""
    seen = observations(misfit={**EXACT, "links": 0}, prior={"inter_host": 0.25, "compute": 0.5})
    last = seen[-1]
    assert last.reading("link_slowdown/inter_host").value == pytest.approx(0.25, rel=0.01)
    assert last.reading("link_slowdown/intra_host").value in (None, pytest.approx(1.0, rel=0.01))
    assert last.reading("compute_slowdown").value == pytest.approx(0.5, rel=0.05)


def test_memory_readings_start_anew_after_a_switch():
    policy = FollowsScript(switch(100, SECOND))
    run(truth(misfit=EXACT), policy, probes=True)
    world = truth(misfit=EXACT).world
    shares = [each.reading("memory_peak_share").value for each in policy.observations]
    needed = [
        world.memory_bytes(plan, 0) / CLUSTER.accelerator.memory_bytes for plan in (START, SECOND)
    ]
    assert needed[0] != pytest.approx(needed[1])
    # A median of samples of both plans would lie between them.
    assert [value for value in dict.fromkeys(shares) if value is not None] == [
        pytest.approx(each) for each in needed
    ]


class Late(FollowsScript):
    """Decides 7 s before the link becomes slow at 30 s, so that a plan that takes 8 s to compile is
    entered just after it.
    """

    knows_steps_alike = True

    @property
    def steps_alike(self):
        return (
            sum(each.time_s > 30.5 for each in self.observations)
            if self.knows_steps_alike
            else None
        )

    def decide(self, observation):
        self.observations.append(observation)
        is_due = observation.time_s >= 23 and not self.decisions
        self.decisions |= {0: None} if is_due else {}
        return (
            Decision(step=observation.step, action="switch", plan=AS_FAST, why="a test")
            if is_due
            else None
        )


class Ignorant(Late):
    knows_steps_alike = False


@pytest.mark.parametrize(
    ("policy", "kinds"), [(Late, ["switch"]), (Ignorant, ["switch", "rollback"])]
)
def test_a_new_plan_is_compared_with_steps_in_the_same_conditions_only(policy, kinds):
    """Steps before the link became slow were faster than any plan can be now."""
    outcome = run(truth({**QUARTER, "for_s": 1000}, misfit=EXACT), policy())
    assert [run_event.kind for run_event in outcome.run_events] == kinds


def test_a_failed_decision_is_asked_again_at_the_next_step():
    """By a policy that is asked at one step only, and foresees everything except the failure."""
    again = Decision(step=101, action="switch", plan=AS_FAST, why="a test")
    outcome = run(
        truth({"kind": "switch", "phase": "prepare"}, misfit=EXACT),
        FollowsScript(switch(100, AS_FAST) | {101: again}),
        every=None,
        asked_at=(100,),
        compiles_ahead=True,
    )
    assert [(run_event.kind, run_event.step) for run_event in outcome.run_events] == [
        ("failed", 100),
        ("switch", 101),
    ]
