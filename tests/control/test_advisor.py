"""The advisor drives a run whose truth it is not told, and switches when that pays, and not
otherwise.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from fleet import CLUSTER, CONFIG, MESHES, PRICING, Truth, plan_on, ranked

from optimus_jax.config import ControlConfig
from optimus_jax.control.advisor import ABANDONED, Advisor, BatchPhase
from optimus_jax.control.deciding.candidates import is_legal, leaving_out
from optimus_jax.control.deciding.changes import LEAST
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.prices import query
from optimus_jax.control.deciding.switch_costs import CostModel, SwitchCosts
from optimus_jax.control.deciding.watch import SETTLING
from optimus_jax.control.policy import Decision
from optimus_jax.control.predictor import Predictor
from optimus_jax.control.signals import Observation, SignalSummary
from optimus_jax.errors import PlanError
from optimus_jax.plan import Plan
from optimus_jax.planning.search.search import Pricing, Ranking

SLOW = Conditions(between=16.0)
PLANS = [
    plan_on(mesh, remat=remat, microbatches=microbatches)
    for mesh in MESHES
    for remat in ("none", "full")
    for microbatches in (1, 2, 8)
]
SMALLER = [
    plan_on(mesh, microbatches=microbatches, remat=remat)
    for microbatches in (1, 8, 64)
    for remat in ("none", "full")
    for mesh in (
        "pipe=7,fsdp=8",
        "pipe=7,data=8",
        "fsdp=32",
        "data=4,fsdp=8",
        "pipe=2,fsdp=16",
        "fsdp=16",
        "fsdp=8",
    )
]


def search(pricing: Pricing) -> Ranking:
    """The best of a few plans: a search over all takes long."""
    mesh = pricing.config.parallel.mesh
    return ranked(
        pricing, [plan for plan in [*PLANS, *SMALLER] if mesh in ("auto", str(plan.axes))]
    )


BEST = search(PRICING).best[0].plan
POOR = plan_on("pipe=8,fsdp=8")


STRAGGLING = frozenset(range(16, 24))
"""Devices of the process that is slow where conditions have a skew."""


class Job:
    """A run: steps of a hidden truth, probes of its conditions, switches that take time."""

    def __init__(
        self,
        start: Plan = BEST,
        *,
        seed: int = 0,
        num_steps: int = 3000,
        switch_s: float = 5.0,
        prepare_steps: int = 5,
        settings: ControlConfig | None = None,
        **fields,
    ) -> None:
        self.truth, self.random, self.plan = Truth(seed), np.random.default_rng(seed), start
        self.advisor = Advisor(
            pricing=PRICING,
            plan=start,
            num_steps=num_steps,
            settings=settings or ControlConfig(),
            searcher=search,
            **fields,
        )
        self.step, self.time_s, self.switch_s, self.prepare_steps = 0, 0.0, switch_s, prepare_steps
        self.decisions: list[Decision] = []
        self.switches: list[tuple[int, Plan]] = []
        self.pending: tuple[int, Decision] | None = None
        self.fails, self.without = 0, frozenset[int]()

    def readings(self, said: Conditions | None, more: dict[str, float]) -> dict[str, SignalSummary]:
        values = dict(more)
        if said is not None:
            values |= {
                "link_slowdown/inside": said.inside,
                "link_slowdown/between": said.between,
                "compute_slowdown": said.compute,
                "process_skew": said.skew,
            }
        return {
            name: SignalSummary(
                value=value, spread=0.0, count=5, time_s=self.time_s, quality="good"
            )
            for name, value in values.items()
        }

    def go(
        self,
        count: int,
        true: Conditions | None = None,
        said: Conditions | str | None = "truth",
        *,
        noise: float = 0.01,
        lost: frozenset[int] = frozenset(),
        batch: tuple[int, int] = (512, 4096),
        factor: float = 1.0,
        **more: float,
    ) -> "Job":
        usual = true or Conditions()
        for _ in range(count):
            true = usual.without_skew() if self.without >= STRAGGLING else usual
            step_time_s = factor * math.exp(
                self.truth.log_time(self.plan, true) + noise * self.random.standard_normal()
            )
            self.step, self.time_s = self.step + 1, self.time_s + step_time_s
            readings = self.readings(
                true if said == "truth" else said,
                {name.replace("_slowdown_", "_slowdown/"): value for name, value in more.items()},
            )
            decision = self.advisor.decide(
                Observation(
                    step=self.step,
                    time_s=self.time_s,
                    step_times_s=(step_time_s,),
                    readings=readings,
                    global_batch=batch[0],
                    seq_len=batch[1],
                    lost_devices=lost,
                )
            )
            if decision is not None:
                self.decisions.append(decision)
                self.pending = (
                    (self.step + self.prepare_steps, decision)
                    if decision.action == "switch"
                    else None
                )
            self.switch_if_ready()
        return self

    def switch_if_ready(self) -> None:
        if self.pending is None or self.step < max(self.pending[0], self.pending[1].at_step or 0):
            return
        decision = self.pending[1]
        plan = decision.plan
        assert plan is not None
        self.pending, self.time_s = None, self.time_s + self.switch_s
        if self.fails:
            self.fails -= 1
            self.advisor.failed(plan, "it did not compile")
            return
        self.plan, self.without = plan, decision.without
        self.switches.append((self.step, plan))
        self.advisor.switched(plan, {"move": 0.6 * self.switch_s, "verify": 0.4 * self.switch_s})

    def true_s(self, plan: Plan, conditions: Conditions | None = None) -> float:
        return math.exp(self.truth.log_time(plan, conditions))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_changes_and_nothing_is_switched(seed):
    job = Job(seed=seed).go(1500)
    assert job.switches == []
    # What was weighed is on record, and no step writes one of its own.
    assert 1 <= len(job.decisions) <= 8


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_spikes_do_not_switch(seed):
    job = Job(seed=seed)
    for number in range(60):
        job.go(19, noise=0.06).go(1, factor=6.0 if number % 3 else 1.0)
    assert job.switches == []


@pytest.mark.parametrize("seed", range(4))
def test_a_poor_start_is_mended_once(seed):
    job = Job(POOR, seed=seed).go(600)
    assert 1 <= len(job.switches) <= 2
    assert job.switches[0][0] < 40
    best_s = min(job.true_s(each.plan) for each in search(PRICING).best)
    assert job.true_s(job.plan) < 0.85 * job.true_s(POOR)
    assert job.true_s(job.plan) < 1.1 * best_s


def test_plans_that_were_tried_before_the_run_are_known():
    """One that the cost model does not think much of, and that is the fastest in truth."""
    job = Job(seed=2)
    other = plan_on("fsdp=16,tensor=4")
    tried_s = {BEST: job.true_s(BEST), other: 0.8 * job.true_s(BEST)}
    assert job.go(30).switches == []
    assert Job(seed=2, tried_s=tried_s).go(30).switches[0][1] == other


def test_nothing_is_weighed_before_the_level_of_step_times_is_known():
    """Readings alone would have plans compared that no step has been held against."""
    job = Job(POOR).go(SETTLING + LEAST - 1, SLOW)
    assert job.decisions == []
    assert job.go(1, SLOW).decisions[0].trigger == "step times are known"


def test_a_short_run_is_left_alone():
    assert Job(POOR, num_steps=30).go(30).switches == []


def test_a_slow_link_is_answered_and_its_end_too():
    job = Job(num_steps=5000).go(200)
    before = job.plan
    job.go(400, SLOW)
    assert len(job.switches) == 1
    assert job.true_s(job.plan, SLOW) < 0.9 * job.true_s(before, SLOW)
    assert "exchanges between hosts" in job.decisions[-2].why + job.decisions[-1].why
    job.go(400)
    assert len(job.switches) == 2
    assert job.true_s(job.plan) == pytest.approx(job.true_s(before), rel=0.06)


def test_a_switch_is_held_against_what_was_expected_of_it_on_links_as_they_were(monkeypatch):
    links = []
    learn = CostModel.learn
    monkeypatch.setattr(
        CostModel,
        "learn",
        lambda self, switch_method, old, plan, pricing, **more: (
            links.append(pricing.cluster.inter_host),
            learn(self, switch_method, old, plan, pricing, **more),
        ),
    )
    job = Job(num_steps=5000).go(200).go(400, SLOW).go(400)
    assert len(job.switches) == 2
    slow, whole = (link.bytes_per_s for link in links)
    assert slow == pytest.approx(CLUSTER.inter_host.bytes_per_s / 16, rel=0.1)
    assert whole == pytest.approx(CLUSTER.inter_host.bytes_per_s, rel=0.1)


def test_it_waits_until_the_slow_link_has_cost_as_much_as_a_switch():
    """Ski rental: at first nobody knows how long it is going to last."""
    job = Job(num_steps=10000, switch_s=60.0, costs=SwitchCosts(stop_s=60.0)).go(200)
    job.go(12, SLOW)
    assert job.switches == []
    waiting = [each for each in job.decisions if each.wait_s]
    assert waiting
    assert "may end before it breaks even" in waiting[-1].why
    job.go(100, SLOW)
    assert len(job.switches) == 1


def test_flapping_is_sat_out():
    job = Job(num_steps=8000, switch_s=30.0).go(200)
    for _ in range(25):
        job.go(15, SLOW).go(15)
    assert len(job.switches) <= 2


@pytest.mark.parametrize(
    "lie",
    [
        Conditions(between=10.0, inside=10.0),
        Conditions(between=0.3),
        Conditions(compute=3.0),
        Conditions(skew=2.0),
    ],
)
@pytest.mark.parametrize("from_the_start", [True, False])
def test_lies_are_harmless(lie, from_the_start):
    job = Job().go(1 if from_the_start else 100).go(500, said=lie)
    assert job.switches == []


def test_missing_readings_are_unknown_and_switch_nothing():
    job = Job(num_steps=5000).go(100, said=None).go(300, SLOW, said=None)
    assert job.switches == []
    assert job.advisor.wants_probe
    assert any("of their time" in each.why for each in job.decisions)
    assert job.decisions[-1].inputs["unexplained"] is True
    job.go(100, said=None)
    assert not job.advisor.wants_probe


def test_steps_that_changed_are_puzzling_until_readings_say_why():
    job = Job(num_steps=5000).go(100)
    assert not job.advisor.is_puzzled
    assert job.go(2, SLOW, said=None).advisor.is_puzzled, "two steps that look different"
    assert job.go(40, SLOW, said=None).advisor.is_puzzled, (
        "they are different, and nobody knows why"
    )
    assert not job.go(20, SLOW).advisor.is_puzzled


def test_during_the_cool_down_nothing_is_switched():
    settings = ControlConfig(cooldown_steps=300)
    job = Job(POOR, settings=settings).go(40)
    assert len(job.switches) == 1
    job.go(30, SLOW)
    assert len(job.switches) == 1
    assert any("cooling down" in each.why for each in job.decisions)
    job.go(370, SLOW)
    assert len(job.switches) == 2


@pytest.mark.parametrize(
    "settings",
    [
        ControlConfig(max_switches=0),
        ControlConfig(allow=("pipe=8,fsdp=8",)),
        ControlConfig(budget_share=1e-4),
        ControlConfig(min_gain=0.9),
    ],
)
def test_settings_keep_the_plan(settings):
    assert all(plan.axes == POOR.axes for _, plan in Job(POOR, settings=settings).go(300).switches)
    assert Job(POOR, settings=ControlConfig(max_switches=0)).go(300).switches == []


def test_the_cost_of_switches_is_learnt_and_counted_against_the_budget():
    """1% of some 4 hours are 150 s: one switch of 100 s, and no second one."""
    job = Job(POOR, num_steps=5000, switch_s=100.0, costs=SwitchCosts(stop_s=50.0)).go(100)
    assert len(job.switches) == 1
    job.go(500, SLOW)
    assert len(job.switches) == 1
    assert any("the budget for switches" in each.why for each in job.decisions)


def test_a_plan_that_failed_is_not_tried_again_at_once():
    job = Job(POOR)
    job.fails = 1
    job.go(60)
    failed = job.decisions[0].plan
    assert failed is not None
    later = [each.plan for each in job.decisions[1:] if each.action == "switch"]
    assert failed not in later
    assert any(
        "did not compile" in each.verdict
        for decision in job.decisions[1:]
        for each in decision.alternatives
    )
    assert job.plan != POOR  # another one was nearly as good


def test_a_plan_that_failed_is_tried_again_where_there_is_no_other():
    job = Job(POOR, num_steps=5000, settings=ControlConfig(allow=(str(BEST.axes),)))
    job.fails = 6  # each of the three with that mesh, at least once
    job.go(600)
    tried = [decision.plan for decision in job.decisions if decision.action == "switch"]
    assert len(tried) > len(set(tried))
    assert job.plan.axes == BEST.axes


def test_a_plan_that_turns_out_slower_is_left_again_and_not_tried_soon():
    job = Job(POOR)
    job.go(15)
    chosen = job.decisions[0].plan
    assert chosen is not None
    truth = job.truth.log_time
    job.truth.log_time = lambda plan, conditions=None: (
        truth(plan, conditions) + (1.0 if plan == chosen else 0.0)
    )
    job.go(60)
    assert [plan for _, plan in job.switches][:2] == [chosen, POOR]
    job.go(60)
    assert [plan for _, plan in job.switches].count(chosen) == 1


def test_lost_devices_have_to_be_left_at_once_and_are_used_again():
    job = Job(num_steps=5000, switch_s=60.0).go(100).go(1, lost=frozenset({11}))
    decision = job.decisions[-1]
    assert (decision.action, decision.mandatory, decision.switch_method) == (
        "switch",
        True,
        "restart",
    )
    assert decision.plan is not None
    assert 11 in decision.without
    assert decision.plan.num_devices + len(decision.without) <= 64
    job.go(200, lost=frozenset({11}))
    assert job.plan.num_devices < 64
    job.go(100)
    assert job.plan.num_devices == 64
    assert len(job.switches) == 2
    assert job.decisions[-1].step < 400


def test_a_forced_move_that_fails_is_decided_anew():
    job = Job(num_steps=5000).go(100)
    job.fails = 1
    job.go(20, lost=frozenset({11}))
    tried = [each.plan for each in job.decisions if each.mandatory]
    assert len(tried) == 2
    assert tried[0] != tried[1] == job.plan


def test_a_straggler_for_hours_is_left_out():
    settings = ControlConfig(budget_share=0.02)
    job = Job(
        num_steps=30000, switch_s=60.0, settings=settings, costs=SwitchCosts(restart_s=20.0)
    ).go(100)
    slow = Conditions(skew=3.0)
    job.go(400, slow, straggler=2.0)
    assert len(job.switches) == 1
    excluded = next(each for each in reversed(job.decisions) if each.action == "switch")
    assert excluded.without >= STRAGGLING
    # The others are as fast as ever. The slow one is tried again once, after many times as long as
    # it was known to be slow, and left out again.
    job.go(250, slow)
    assert len(job.switches) == 1
    job.go(9000, slow)
    assert len(job.switches) == 3
    assert job.without >= STRAGGLING


def test_the_devices_of_the_slow_process_are_those_that_it_has_wherever_they_are():
    """Tasks that are dealt out to nodes in turn: the first host has processes 0 and 2, the second 1
    and 3, each other one of its own.
    """
    process_of_device = (
        [0] * 4
        + [2] * 4
        + [1] * 4
        + [3] * 4
        + [process for process in range(4, 10) for _ in range(8)]
    )
    job = Job(num_steps=200_000, process_of=process_of_device).go(300)
    job.go(30, Conditions(skew=1.5), straggler=2.0)
    assert job.advisor._straggling == {4, 5, 6, 7}


def test_a_slow_stage_gets_fewer_layers_and_its_own_again_when_it_has_recovered():
    job = Job(POOR, num_steps=8000, settings=ControlConfig(allow=(str(POOR.axes),))).go(100)
    even, before = job.plan, len(job.switches)
    slow = Conditions(skew=2.0, slow_part=(16 / 64, 24 / 64))  # the third of eight stages
    job.go(400, slow, straggler=2.0)
    _, spared = job.switches[before]
    assert spared.pipeline is not None
    assert spared.pipeline.layers_per_stage == (4, 4, 2, 4, 4, 4, 5, 5)
    assert any(each.switch_method == "rebalance" and each.plan == spared for each in job.decisions)
    assert job.true_s(job.plan, slow) < 0.9 * job.true_s(even, slow)
    job.go(2500, straggler=2.0)
    assert job.plan.pipeline == even.pipeline


def test_a_device_is_lost_while_a_stage_is_slow():
    """The plan with stages that the run is under needs more devices than are left, and is not
    priced on those.
    """
    slow = Conditions(skew=2.0, slow_part=(16 / 64, 24 / 64))
    job = Job(POOR, num_steps=8000, prepare_steps=10_000).go(100).go(60, slow, straggler=2.0)
    job.go(1, slow, straggler=2.0, lost=frozenset({60}))
    left = job.decisions[-1]
    assert left.mandatory
    assert left.plan is not None
    assert left.plan.num_devices <= 56


def test_meshes_on_the_list_are_searched_for():
    """However far behind others they are: a search for the best few would not find them."""
    listed = "pipe=2,fsdp=8,tensor=4"
    assert listed not in [str(each.plan.axes) for each in search(PRICING).best]
    job = Job(POOR, settings=ControlConfig(allow=(listed, "fsdp=16"))).go(40)
    shown = {
        str(each.plan.axes)
        for decision in job.decisions
        for each in decision.alternatives
        if each.verdict != "not on the list of meshes that may be switched to"
    }
    assert shown == {listed}  # the other one is too small for the devices that are there


def test_a_mesh_that_is_not_on_the_list_is_better_than_devices_that_are_lost():
    job = (
        Job(settings=ControlConfig(allow=(str(BEST.axes),), max_switches=0))
        .go(30)
        .go(1, lost=frozenset({60}))
    )
    assert job.decisions[-1].mandatory
    assert job.decisions[-1].plan is not None
    assert job.decisions[-1].plan.num_devices <= 56


def test_what_a_run_did_before_it_was_resumed_counts():
    """Time that was spent, switches that were made, and how long ago."""

    def resumed(**settings) -> Job:
        job = Job(POOR, settings=ControlConfig(**settings))
        job.step = 103
        return job

    job = resumed()
    # had to be, and is not the budget's
    job.advisor.remember({"move_s": 50.0}, step=60, by_choice=False)
    job.advisor.remember({"move_s": 1.0, "compile_tax_s": 2.0}, step=100, by_choice=True)
    assert job.advisor._costs.spent_s == 3.0
    job.go(20)
    assert all("cooling down after a switch, until step 130" in each.why for each in job.decisions)
    assert job.go(40).switches
    at_most = resumed(max_switches=1)
    at_most.advisor.remember({}, step=20, by_choice=True)
    assert at_most.go(60).switches == []
    assert "1 switches are the most" in at_most.decisions[-1].why


def test_a_run_that_goes_on_from_a_checkpoint_does_not_cool_down_until_where_it_was():
    job = Job(POOR, num_steps=100_000).go(400)
    made = len(job.switches)
    assert made
    job.go(1, lost=frozenset({60}))
    job.go(20, lost=frozenset({60}))
    job.step -= 350
    left_at = job.step
    job.go(60)  # the device is back
    blocked = [
        each.step
        for each in job.decisions
        if each.step > left_at and "cooling down" in each.why and "until step" in each.why
    ]
    assert all(step <= left_at + 40 for step in blocked)
    assert len(job.switches) > made + 1


def test_a_phase_after_the_end_of_the_run_is_none():
    phases = (
        BatchPhase(first_step=1, global_batch=512, seq_len=4096),
        BatchPhase(first_step=201, global_batch=1024, seq_len=4096),
    )
    assert any(
        "the phase that begins at step 201" in each.trigger
        for each in Job(num_steps=201, phases=phases).go(199).decisions
    )
    assert not any(
        "phase" in each.trigger for each in Job(num_steps=200, phases=phases).go(199).decisions
    )


def test_the_way_back_is_made_though_the_budget_is_spent():
    """What it was left for is over, and the way back was reserved."""
    job = Job(
        num_steps=3000,
        switch_s=8.0,
        costs=SwitchCosts(stop_s=0.5, verify_s=0.1, first_steps_s=0.1, compile_tax_s=0.1),
    )
    job.go(100).go(400, SLOW)
    assert len(job.switches) == 1
    assert job.advisor._costs.spent_s == 8.0
    job.advisor._costs.spent_s = 1e6
    job.go(600)
    assert [plan for _, plan in job.switches][1:] == [BEST]


def test_memory_that_runs_short_makes_the_plan_smaller():
    job = Job(num_steps=5000)
    needed = PRICING.memory(BEST).total / CLUSTER.accelerator.memory_bytes
    job.go(50, memory_peak_share=needed)
    for taken in np.linspace(0.0, 0.95 - needed, 30):
        job.go(
            2,
            memory_peak_share=min(
                0.99,
                PRICING.memory(job.plan).total / CLUSTER.accelerator.memory_bytes + float(taken),
            ),
        )
    assert job.switches
    assert PRICING.memory(job.plan).total < PRICING.memory(BEST).total


def test_a_planned_phase_is_prepared_before_it_begins_and_switched_to_at_its_boundary():
    phases = (
        BatchPhase(first_step=1, global_batch=512, seq_len=4096),
        BatchPhase(first_step=301, global_batch=32, seq_len=4096),
    )
    job = Job(BEST, num_steps=5000, phases=phases)
    assert not is_legal(BEST, replace(CONFIG, data=replace(CONFIG.data, global_batch=32)))
    job.go(300)
    decision = job.decisions[-1]
    assert (decision.action, decision.at_step, decision.mandatory) == ("switch", 300, True)
    assert decision.step < 300
    assert job.switches == [(300, decision.plan)]
    job.go(100, batch=(32, 4096))
    assert is_legal(job.plan, replace(CONFIG, data=replace(CONFIG.data, global_batch=32)))


def test_what_has_to_be_is_not_withdrawn_for_other_news():
    phases = (
        BatchPhase(first_step=1, global_batch=512, seq_len=4096),
        BatchPhase(first_step=301, global_batch=32, seq_len=4096),
    )
    job = Job(BEST, num_steps=5000, phases=phases).go(280)
    assert job.pending is not None
    job.go(20, said=Conditions(between=10.0))  # which step times contradict
    assert [step for step, _ in job.switches] == [300]


def test_a_boundary_that_is_many_quick_steps_away_is_waited_for():
    phases = (
        BatchPhase(first_step=1, global_batch=512, seq_len=4096),
        BatchPhase(first_step=1501, global_batch=32, seq_len=4096),
    )
    job = Job(BEST, num_steps=50_000, phases=phases).go(1480, factor=0.02)
    decision = job.decisions[-1]
    assert (decision.action, decision.at_step) == ("switch", 1500)
    assert decision.step < 1500 - ABANDONED * 30
    job.go(20, said=Conditions(between=10.0), factor=0.02)
    assert [step for step, _ in job.switches] == [1500]


def test_a_batch_that_nobody_announced_is_answered():
    job = Job(num_steps=5000).go(100).go(1, batch=(32, 4096))
    assert job.decisions[-1].mandatory
    assert job.decisions[-1].action == "switch"


def test_a_switch_that_is_no_longer_wanted_is_withdrawn():
    job = Job(num_steps=5000, prepare_steps=60).go(200).go(60, SLOW)
    assert job.pending is not None
    job.go(30)
    assert job.decisions[-1].action == "stay"
    assert job.switches == []


def test_a_search_in_the_background_delays_the_decision_only():
    answers = iter([None] * 7)
    job = Job(POOR)
    job.advisor = Advisor(
        pricing=PRICING,
        plan=POOR,
        num_steps=3000,
        settings=ControlConfig(),
        searcher=lambda pricing: next(answers, search(pricing)),
    )
    job.go(16)
    assert job.decisions == []
    job.go(10)
    assert job.decisions[0].action == "switch"


def test_what_has_to_be_is_not_forgotten_while_a_search_is_at_work():
    waits = iter([None] * 30)
    job = Job(num_steps=5000)
    job.advisor = Advisor(
        pricing=PRICING,
        plan=BEST,
        num_steps=5000,
        settings=ControlConfig(),
        searcher=lambda pricing: next(waits, search(pricing)),
    )
    job.go(60, lost=frozenset({11}))
    assert next(waits, "none left") == "none left", (
        "news of step times came while the search was at work"
    )
    assert [each.mandatory for each in job.decisions if each.action == "switch"] == [True]
    assert 11 in job.without


def test_when_everything_has_failed_it_waits_before_it_tries_again():
    job = Job(num_steps=5000).go(100)
    job.fails = 10**6
    job.go(1000, lost=frozenset({11}))
    tried = [(each.plan.digest, each.step) for each in job.decisions if each.plan is not None]
    for number, (digest, step) in enumerate(tried):
        earlier = [at for other, at in tried[:number] if other == digest]
        assert all(step - at > ControlConfig().cooldown_steps for at in earlier), (
            "left alone for a while"
        )
    assert any(each.mandatory and each.action == "stay" for each in job.decisions)
    assert max(step for _, step in tried) > 500, "and tried again"


def test_a_plan_that_could_not_be_prepared_on_other_devices_is_still_the_runs_own():
    job = Job().go(100).go(10, lost=frozenset({11}))
    smaller = job.plan
    assert smaller != BEST
    job.advisor.failed(smaller, "it could not be prepared for other devices")
    assert job.advisor._plan_history.now.plan == smaller
    job.advisor.failed(smaller, "it was slower", is_back=True)
    assert job.advisor._plan_history.now.plan == BEST


def test_a_search_that_finds_nothing_leaves_the_run_as_it_is():
    def nothing(pricing):
        raise PlanError("no layout has what is fixed")

    job = Job(POOR)
    job.advisor = Advisor(
        pricing=PRICING, plan=POOR, num_steps=3000, settings=ControlConfig(), searcher=nothing
    )
    # What it can have without moving its state it still may.
    assert {plan.axes for _, plan in job.go(300).switches} <= {POOR.axes}


def test_every_decision_is_json_and_says_why():
    job = Job(POOR).go(60).go(200, SLOW)
    for decision in job.decisions:
        record = json.loads(json.dumps(decision.as_json(), allow_nan=False))
        assert record["why"]
        assert record["inputs"]["conditions"] is not None
        assert record["trigger"]


def test_the_same_run_is_decided_in_the_same_way():
    assert [each.as_json() for each in Job(POOR).go(150).decisions] == [
        each.as_json() for each in Job(POOR).go(150).decisions
    ]


def test_what_was_learnt_is_there_in_the_next_run(tmp_path):
    path = tmp_path / "learnt.json"
    job = Job(POOR, memory=path).go(100)
    job.advisor.save()
    kept = json.loads(path.read_text())["evidence"]
    assert {POOR.digest, job.plan.digest} <= {each["plan"].partition(" of ")[0] for each in kept}
    again = Job(POOR, memory=path).go(40)
    assert job.true_s(again.switches[0][1]) < 1.05 * job.true_s(job.plan)


def test_what_earlier_runs_took_for_slow_exchanges_does_not_make_a_known_slow_link_slower_still(
    tmp_path,
):
    """Hardware whose link is an eighth of what it is called: earlier runs learnt that exchanges
    take long, this one that the link is slow.
    """
    poor, earlier, truth = Conditions(between=8.0), Predictor(), Truth(2)
    for plan in PLANS[::6]:
        earlier.learn(
            query(plan, PRICING, "512 x 4096 tokens"),
            log_time=truth.log_time(plan, poor),
            noise=0.02,
            count=20,
            step=5,
        )
    earlier.save(tmp_path / "learnt.json")
    job = Job(seed=2, memory=tmp_path / "learnt.json").go(60, poor)
    assert job.decisions[-1].inputs["conditions"]["between"] == pytest.approx(8.0, rel=0.1)
    predicted = [
        each.step_time_s / job.true_s(each.plan, poor) for each in job.decisions[-1].alternatives
    ]
    assert predicted == pytest.approx([1.0] * len(predicted), abs=0.1)


def test_leaving_out_is_what_the_advisor_offers():
    (cluster, without), *_ = leaving_out(CLUSTER, frozenset({11}), CONFIG)
    assert (cluster.num_devices, without) == (56, frozenset(range(8, 16)))
