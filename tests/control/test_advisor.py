"""The advisor drives a run without knowing its true step times: it switches when that pays, and not
otherwise.
"""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fleet import CLUSTER, CONFIG, MESHES, PRICING, Truth, plan_on, ranked

from optimus_jax.config import ControlConfig
from optimus_jax.config.phases import TrainingPhase
from optimus_jax.control import constants, policy
from optimus_jax.control.advisor import Advisor
from optimus_jax.control.commands import Command
from optimus_jax.control.deciding.candidates import Searches, is_legal, leaving_out
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.memory_watch import MemoryWatch
from optimus_jax.control.deciding.options import ObservedCluster, Options, PlanInUse
from optimus_jax.control.deciding.prices import Prices, query, setting
from optimus_jax.control.deciding.rebalancing import rebalanced
from optimus_jax.control.deciding.switch_costs import CostModel, SwitchCosts
from optimus_jax.control.learnt_file import LearntFile
from optimus_jax.control.machine import resumed
from optimus_jax.control.policy import Decision, SwitchCandidate, decide
from optimus_jax.control.predictor import Predictor
from optimus_jax.control.runtime import Runtime
from optimus_jax.control.signals import Observation, SignalSummary
from optimus_jax.control.switch_state import PendingSwitch, SwitchRules
from optimus_jax.errors import PlanError
from optimus_jax.plan import Plan
from optimus_jax.planning.learning.calibrate import Calibration
from optimus_jax.planning.search.search import Pricing, Ranking

SLOW = Conditions(inter_host=16.0)
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
    """The best of a few plans: a search over all plans takes too long."""
    mesh = pricing.config.parallel.mesh
    return ranked(
        pricing, [plan for plan in [*PLANS, *SMALLER] if mesh in ("auto", str(plan.axes))]
    )


BEST = search(PRICING).best[0].plan
POOR = plan_on("pipe=8,fsdp=8")


STRAGGLING = frozenset(range(16, 24))
"""Devices of process 2."""


def straggler(factor: float) -> Conditions:
    """Conditions in which process 2 is slower by this factor."""
    return Conditions(slow=((2, factor),))


class Job:
    """A run: steps with hidden true durations, probes of its conditions, and what the runtime's
    commands lead to. Switches take time.
    """

    def __init__(
        self,
        start: Plan = BEST,
        *,
        seed: int = 0,
        num_steps: int = 3000,
        switch_s: float = 5.0,
        prepare_steps: int = 5,
        settings: ControlConfig | None = None,
        searcher: Callable[[Pricing], Ranking | None] = search,
        **fields,
    ) -> None:
        self.truth, self.random, self.plan = Truth(seed), np.random.default_rng(seed), start
        settings = settings or ControlConfig()
        self.advisor = Advisor(
            pricing=PRICING,
            plan=start,
            num_steps=num_steps,
            settings=settings,
            searcher=searcher,
            **fields,
        )
        self.commands, self.decisions = deque(), list[Decision]()
        self.rules = SwitchRules(settings=settings, num_steps=num_steps)
        self.runtime = Runtime(
            self.advisor, self.rules, send=self.commands.append, announce=self.decisions.append
        )
        self.step, self.time_s, self.switch_s, self.prepare_steps = 0, 0.0, switch_s, prepare_steps
        self.switches: list[tuple[int, Plan]] = []
        self.prepares: Command | None = None
        self.ready_step, self.may_go = 0, False
        self.before = start, frozenset[int]()
        self.fails, self.without = 0, frozenset[int]()

    def readings(
        self, reported: Conditions | None, more: dict[str, float]
    ) -> dict[str, SignalSummary]:
        values = dict(more)
        if reported is not None:
            values |= {
                "link_slowdown/intra_host": reported.intra_host,
                "link_slowdown/inter_host": reported.inter_host,
                "compute_slowdown": reported.compute,
            }
            values |= {
                f"process_time/{process}": reported.factor(f"process_time/{process}")
                for process in range(CLUSTER.num_hosts)
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
        reported: Conditions | str | None = "truth",
        *,
        noise: float = 0.01,
        lost: frozenset[int] = frozenset(),
        batch: tuple[int, int] = (512, 4096),
        factor: float = 1.0,
        wait_s: float = 0.0,
        **more: float,
    ) -> "Job":
        true = true or Conditions()
        for _ in range(count):
            step_time_s = wait_s + factor * math.exp(
                self.truth.log_time(self.plan, true, self.without)
                + noise * self.random.standard_normal()
            )
            more |= {"data_wait_s": wait_s, "step_time_s": step_time_s}
            self.step, self.time_s = self.step + 1, self.time_s + step_time_s
            readings = self.readings(
                true if reported == "truth" else reported,
                {name.replace("_slowdown_", "_slowdown/"): value for name, value in more.items()},
            )
            self.runtime.boundary(
                Observation(
                    step=self.step,
                    time_s=self.time_s,
                    step_times_s=(step_time_s,),
                    readings=readings,
                    global_batch=batch[0],
                    seq_len=batch[1],
                    lost_devices=lost,
                    data_waits_s=(wait_s,),
                ),
                times_s=(step_time_s,),
                data_waits_s=(wait_s,),
                losses=(1.0,),
                is_compiled=lambda: self.prepares is not None and self.step >= self.ready_step,
            )
            while self.commands:
                self.obey(self.commands.popleft())
            self.switch_if_ready()
        return self

    def obey(self, command: Command) -> None:
        if command.kind == "prepare":
            self.prepares, self.ready_step = command, self.step + self.prepare_steps
            self.may_go = False
        elif command.kind == "withdraw":
            self.prepares = None
        elif command.kind == "switch":
            self.may_go = True
        elif command.kind == "keep":
            self.runtime.trial_over()
        elif command.kind == "roll_back":
            slower, (self.plan, self.without) = self.plan, self.before
            self.switches.append((self.step, self.plan))
            self.runtime.move_begun()
            self.runtime.failed(slower, command.why, costs_s=self.switch_s, is_back=True)

    def switch_if_ready(self) -> None:
        command = self.prepares
        if command is None or self.step < self.ready_step or self.runtime.state.trial is not None:
            return
        if not self.may_go if command.at_step is None else self.step < command.at_step:
            return
        plan = command.plan
        assert plan is not None
        self.prepares, self.time_s = None, self.time_s + self.switch_s
        self.runtime.move_begun()
        if self.fails:
            self.fails -= 1
            self.runtime.failed(plan, "it did not compile")
            return
        self.before = self.plan, self.without
        self.plan, self.without = plan, command.without
        self.switches.append((self.step, plan))
        costs_s = {"move": 0.6 * self.switch_s, "verify": 0.4 * self.switch_s}
        self.runtime.moved(plan, costs_s)

    def has_only_improved(self) -> bool:
        """Whether the run has stayed or switched once: to a plan that is faster in truth, or back
        from one that was not, after a canary's few steps or, if noise hides it, the next look.
        """
        if not self.switches:
            return True
        (tried_step, tried), *taken_back = self.switches
        if self.true_s(tried) < self.true_s(BEST):
            return not taken_back
        return [plan for _, plan in taken_back] == [BEST] and taken_back[0][0] <= tried_step + 40

    def true_s(self, plan: Plan, conditions: Conditions | None = None) -> float:
        return math.exp(self.truth.log_time(plan, conditions))


@pytest.mark.parametrize("seed", range(6))
def test_steady_conditions_cause_no_switch_but_to_a_plan_that_is_faster(seed):
    """No plan was tried before the run, so the best one as predicted need not be the fastest."""
    job = Job(seed=seed).go(1500)
    assert job.has_only_improved()
    # Decisions are recorded, but not one for every step.
    assert 1 <= len(job.decisions) <= 8


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_spikes_do_not_cause_a_switch(seed):
    job = Job(seed=seed)
    for number in range(60):
        job.go(19, noise=0.06).go(1, factor=6.0 if number % 3 else 1.0)
    assert job.has_only_improved()
    assert all(step < 60 for step, _ in job.switches), "none for any of forty spikes"


@pytest.mark.parametrize("seed", range(4))
def test_a_poor_initial_plan_is_replaced_early(seed):
    job = Job(POOR, seed=seed).go(600)
    assert 1 <= len(job.switches) <= 4
    assert job.switches[0][0] < 40
    assert job.switches[-1][0] < 150, "plans that may be better are tried soon, or not at all"
    best_s = min(job.true_s(each.plan) for each in search(PRICING).best)
    assert job.true_s(job.plan) < 0.85 * job.true_s(POOR)
    assert job.true_s(job.plan) < 1.1 * best_s


def test_a_poor_plan_is_kept_while_steps_take_as_long_as_their_data():
    job = Job(POOR).go(100, wait_s=1.0)
    assert [decision.action for decision in job.decisions] == ["stay"]
    assert "steps wait for data" in job.decisions[0].why
    assert job.go(100).switches, "it is asked again once data come in time"


def test_waits_for_data_are_no_change_of_conditions():
    job = Job().go(100)
    switches = [*job.switches]
    for _ in range(5):
        job.go(20, wait_s=2.0).go(20).go(1, wait_s=30.0)
    assert job.advisor.changed_s is None
    assert job.switches == switches
    assert job.go(40, factor=1.3).advisor.changed_s is not None


def test_step_times_of_plans_tried_before_the_run_are_used():
    """The cost model ranks the plan low, and in truth it is the fastest."""
    job = Job(seed=2)
    other = plan_on("fsdp=16,tensor=4")
    tried_s = {BEST: job.true_s(BEST), other: 0.7 * job.true_s(BEST)}
    assert other not in [plan for _, plan in job.go(30).switches]
    assert Job(seed=2, tried_s=tried_s).go(30).switches[0][1] == other


def test_no_decision_before_the_typical_step_time_is_known():
    """With readings alone, plans would be compared without a measured step time."""
    job = Job(POOR).go(constants.NUM_SKIPPED_STEPS + constants.MIN_LEVEL_STEPS - 1, SLOW)
    assert job.decisions == []
    assert job.go(1, SLOW).decisions[0].trigger == "step times are known"


def test_a_short_run_is_not_switched():
    assert Job(POOR, num_steps=16).go(16).switches == []


def test_a_slow_link_causes_a_switch_and_its_recovery_a_switch_back():
    job = Job(num_steps=5000).go(200)
    before = job.plan
    job.go(400, SLOW)
    assert len(job.switches) == 1
    assert job.true_s(job.plan, SLOW) < 0.9 * job.true_s(before, SLOW)
    assert any("exchanges between hosts" in each.why for each in job.decisions)
    job.go(400)
    assert len(job.switches) == 2
    assert job.true_s(job.plan) == pytest.approx(job.true_s(before), rel=0.06)


def test_switch_costs_are_learnt_with_the_link_speeds_at_the_switch(monkeypatch):
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


def test_a_switch_waits_until_the_slow_link_has_cost_as_much_as_the_switch():
    """At first it is unknown how long the slow link will last."""
    job = Job(num_steps=10000, switch_s=120.0, costs=SwitchCosts(stop_s=120.0)).go(200)
    while not any(each.wait_s for each in job.decisions):
        assert job.switches == [], "a slow link is waited for before it causes a switch"
        job.go(1, SLOW)
    assert "worth more if conditions last" in job.decisions[-1].why
    job.go(100, SLOW)
    assert len(job.switches) == 1


def test_a_flapping_link_causes_few_switches():
    job = Job(num_steps=8000, switch_s=30.0).go(200)
    for _ in range(25):
        job.go(15, SLOW).go(15)
    assert len(job.switches) <= 2


@pytest.mark.parametrize(
    "false_reading",
    [
        Conditions(inter_host=10.0, intra_host=10.0),
        Conditions(inter_host=0.3),
        Conditions(compute=3.0),
        straggler(2.0),
    ],
)
@pytest.mark.parametrize("from_the_start", [True, False])
def test_readings_that_step_times_contradict_cause_no_switch(false_reading, from_the_start):
    job = Job().go(1 if from_the_start else 100).go(500, reported=false_reading)
    assert job.switches == []


def test_slow_steps_without_readings_ask_for_a_probe_and_do_not_switch():
    job = Job(num_steps=5000).go(100, reported=None).go(300, SLOW, reported=None)
    assert job.switches == []
    assert job.advisor.wants_probe
    assert any("time than before" in each.why for each in job.decisions)
    assert job.decisions[-1].inputs["unexplained"] is True
    job.go(100, reported=None)
    assert not job.advisor.wants_probe


def test_changed_step_times_are_unexplained_until_readings_explain_them():
    job = Job(num_steps=5000).go(100)
    since_s = 0.0
    assert not job.advisor.is_puzzled(since_s)
    assert job.go(2, SLOW, reported=None).advisor.is_puzzled(since_s), "two look different"
    assert job.go(40, SLOW, reported=None).advisor.is_puzzled(since_s), (
        "they are different, and nobody knows why"
    )
    assert not job.go(20, SLOW).advisor.is_puzzled(since_s)


def test_no_switch_during_the_cooldown():
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
    ],
)
def test_settings_can_forbid_a_switch(settings):
    assert all(plan.axes == POOR.axes for _, plan in Job(POOR, settings=settings).go(300).switches)
    assert Job(POOR, settings=ControlConfig(max_switches=0)).go(300).switches == []


def test_what_a_switch_has_cost_is_owed_until_its_savings_have_paid_for_it():
    """1% of some 4 hours are 150 s. A switch of 100 s is made, and its savings are measured."""
    job = Job(POOR, num_steps=5000, switch_s=100.0, costs=SwitchCosts(stop_s=50.0)).go(30)
    assert len(job.switches) == 1
    owed_s = job.advisor._account.allowance.owed_s
    assert 0 < owed_s < 100
    job.go(400)
    assert job.advisor._account.allowance.owed_s < owed_s / 2


def test_a_switch_is_paid_for_in_conditions_that_came_after_it():
    """There the plan that was left is known by what it is expected to take."""
    job = Job(POOR, num_steps=5000, switch_s=100.0, costs=SwitchCosts(stop_s=50.0)).go(30)
    account = job.advisor._account
    assert len(job.switches) == 1
    job.go(5, SLOW)
    assert job.advisor._watch.is_disturbed
    owed_s = account.allowance.owed_s
    assert owed_s > 0
    job.go(5, SLOW)
    assert account.allowance.owed_s < owed_s


def test_a_run_that_is_back_under_its_first_plan_saves_and_loses_nothing():
    """Not even where that plan takes longer than expected."""
    job = Job(POOR, num_steps=5000, settings=ControlConfig(max_switches=0)).go(30)
    decision = Decision(step=30, action="switch", why="a test", plan=BEST, step_time_s=1.0)
    made = PendingSwitch(decision=decision, question=None, decided_s=job.time_s, before_s=())
    job.advisor.switched(BEST, {"move_s": 5.0}, made)
    job.advisor.failed(BEST, "it is slow", trial_s=[])
    job.go(40, SLOW, factor=1.3)
    assert job.advisor._watch.is_disturbed
    assert job.advisor._account.allowance.owed_s == 5.0


def test_fast_steps_are_not_learnt_of_a_link_that_was_whole_again():
    job = Job(num_steps=3000, settings=ControlConfig(max_switches=0)).go(60)
    while not job.advisor._watch.is_disturbed:
        job.go(1, SLOW)
    job.go(8, reported=SLOW).go(12)  # readings are late
    assert not job.advisor._watch.is_disturbed
    known = [each for each in job.advisor._experience._levels if not each.regime]
    assert known
    assert all(each.conditions.inter_host < 2 for each in known)


@pytest.mark.parametrize(("factor", "is_learnt"), [(1.5, True), (12.0, False), (0.1, False)])
def test_steps_that_no_plan_explains_teach_nothing_about_one(factor, is_learnt):
    """A link was cut while a plan was on trial."""
    job = Job(POOR, num_steps=5000, settings=ControlConfig(max_switches=0)).go(30)
    job.advisor.switched(BEST, {"move_s": 1.0})
    before, step_s = len(job.advisor._predictor.evidence), factor * job.true_s(BEST)
    job.advisor.failed(BEST, "it is slow", trial_s=[9.0, *[step_s] * 3])
    assert (len(job.advisor._predictor.evidence) > before) == is_learnt


def test_a_trial_teaches_nothing_about_a_plan_that_is_known_better():
    """A link flapped while the plan was on trial."""
    job = Job(num_steps=5000, settings=ControlConfig(max_switches=0)).go(60)
    job.advisor.switched(POOR, {"move_s": 1.0})
    job.advisor.switched(BEST, {"move_s": 1.0})
    job.advisor.failed(BEST, "it is slow", trial_s=[1.3 * job.true_s(BEST)] * 6)
    expected_s = math.exp(job.advisor._expected_of(PlanInUse(plan=BEST), Conditions()))
    assert expected_s == pytest.approx(job.true_s(BEST), rel=0.05)


def test_a_restart_without_a_slow_process_is_paid_for_while_that_process_is_slow():
    job = Job(num_steps=30000, costs=SwitchCosts(restart_s=20.0)).go(100)
    job.go(300, straggler(3.0))
    assert job.without >= STRAGGLING
    account = job.advisor._account
    account.charge(100.0)
    owed_s = account.allowance.owed_s
    job.go(5, straggler(3.0))
    assert account.allowance.owed_s < owed_s - 5 * job.true_s(BEST)


def test_normal_conditions_of_an_option_are_those_of_its_devices_as_they_affect_its_plan():
    """A process has been slow from the start, and the link gets slow."""
    prices, slow = Prices(PRICING), straggler(1.5)
    staged = plan_on("pipe=8,fsdp=8", microbatches=8)
    even = rebalanced(staged, [1.0] * 16 + [1.5] * 8 + [1.0] * 40, PRICING.workload.layer_shares)
    assert even is not None
    observed = ObservedCluster(
        batch=prices.first_batch,
        time_s=0.0,
        conditions=replace(slow, inter_host=4.0),
        normal=slow,
        lost=frozenset(),
        memory=MemoryWatch(),
    )
    found = Options(prices, Searches(search)).all(
        observed, PlanInUse(plan=staged), [even], PRICING.calibration, mandatory=False
    )
    assert found
    for each in found:
        normal, without = each.devices.normal, each.devices.without
        expected = prices.query_of(each.plan, observed.batch, slow, without)
        assert query(each.plan, normal, each.devices.normal_setting).terms_s == expected.terms_s
        assert each.devices.normal_setting == expected.setting
    assert {each.devices.normal_setting for each in found} == {
        setting(observed.batch, Conditions()),
        setting(observed.batch, slow),
    }


@pytest.mark.parametrize("lost", [frozenset({11}), frozenset()])
def test_fewer_devices_are_no_loss_of_the_switch_that_was_made_with_all(lost):
    """A run that has left another plan by choice, and then goes on without some devices, owes no
    more than what its switches have cost.
    """
    job = Job(num_steps=30000, costs=SwitchCosts(restart_s=20.0)).go(100)
    advisor, account = job.advisor, job.advisor._account
    level = math.log(job.true_s(BEST))
    account.left(advisor._plan_history.now, advisor._circumstances_of(advisor._batch), level)
    slow = None if lost else straggler(3.0)
    job.go(500, slow, lost=lost)
    assert job.plan.num_devices < BEST.num_devices
    job.go(300, slow, lost=lost)
    # steps before the loss scatter by 1% about the level
    assert account.allowance.owed_s <= account.spent_s + 0.01 * job.true_s(BEST) * 100


def test_a_failed_plan_is_not_retried_at_once():
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


def test_a_failed_plan_is_retried_if_it_is_the_only_one():
    job = Job(POOR, num_steps=5000, settings=ControlConfig(allow=(str(BEST.axes),)))
    job.fails = 6  # each of the three with that mesh, at least once
    job.go(600)
    tried = [decision.plan for decision in job.decisions if decision.action == "switch"]
    assert len(tried) > len(set(tried))
    assert job.plan.axes == BEST.axes


def test_a_plan_slower_than_predicted_is_left_and_not_retried_soon():
    job = Job(POOR)
    job.go(15)
    chosen = job.decisions[0].plan
    assert chosen is not None
    truth = job.truth.log_time
    job.truth.log_time = lambda plan, conditions=None, without=frozenset(): (
        truth(plan, conditions, without) + (1.0 if plan == chosen else 0.0)
    )
    job.go(60)
    assert [plan for _, plan in job.switches][:2] == [chosen, POOR]
    job.go(60)
    assert [plan for _, plan in job.switches].count(chosen) == 1


def test_lost_devices_force_a_switch_and_recovered_devices_are_used_again():
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
    assert all(plan == BEST for _, plan in job.switches[2:]), "known to be faster from before"
    assert job.decisions[-1].step < 400


def test_devices_that_come_back_before_a_plan_without_them_is_found_force_nothing():
    """Neither a question that no plan answers, nor a switch that is being prepared."""

    def whole_only(pricing: Pricing) -> Ranking:
        found = search(pricing)
        return found if pricing.cluster.num_devices == 64 else replace(found, best=())

    job = Job(num_steps=5000, searcher=whole_only).go(100).go(20, lost=frozenset({11}))
    assert job.decisions[-1].mandatory
    job.go(200)
    assert not any(each.mandatory for each in job.decisions if each.step > 120)
    job = Job(num_steps=5000, prepare_steps=30).go(100).go(10, lost=frozenset({11}))
    assert job.prepares is not None
    job.go(60)
    assert (job.plan, job.switches) == (BEST, [])
    assert not job.decisions[-1].mandatory


def test_a_forced_switch_that_fails_is_retried_with_another_plan():
    job = Job(num_steps=5000).go(100)
    job.fails = 1
    job.go(20, lost=frozenset({11}))
    tried = [each.plan for each in job.decisions if each.mandatory]
    assert len(tried) == 2
    assert tried[0] != tried[1] == job.plan


def test_a_device_that_is_lost_while_a_plan_is_prepared_is_not_used():
    job = Job(num_steps=5000, prepare_steps=30).go(100).go(10, lost=frozenset({11}))
    job.go(60, lost=frozenset({11, 60}))
    assert job.without >= frozenset({11, 60})


def test_a_device_that_is_back_and_lost_again_is_not_used():
    job = Job(num_steps=5000, switch_s=1.0, prepare_steps=30).go(100).go(100, lost=frozenset({11}))
    assert 11 in job.without
    while job.runtime.state.pending is None:
        job.go(1)
    job.go(100, lost=frozenset({11}))
    assert 11 in job.without


def test_a_slow_process_is_left_out_for_as_long_as_it_is_measured_to_be_slow():
    settings = ControlConfig(budget_share=0.02)
    job = Job(
        num_steps=30000, switch_s=60.0, settings=settings, costs=SwitchCosts(restart_s=20.0)
    ).go(100)
    job.go(400, straggler(3.0))
    assert len(job.switches) == 1
    assert job.without >= STRAGGLING
    job.go(5000, straggler(3.0))
    assert len(job.switches) == 1, "it is measured, and still slow"
    job.go(200)
    assert job.without == frozenset(), "it is well again"


def test_the_slowest_of_two_slow_processes_is_left_out_alone():
    """The other one is hardly slower than the rest, and an eighth of the devices would be lost."""
    job = Job(num_steps=30000, switch_s=60.0, costs=SwitchCosts(restart_s=20.0)).go(100)
    two = Conditions(slow=((2, 3.0), (5, 1.15)))
    job.go(600, two)
    assert job.without >= STRAGGLING
    assert not job.without & frozenset(range(40, 48))


def test_two_equally_slow_processes_are_left_out_together():
    job = Job(num_steps=30000, switch_s=60.0, costs=SwitchCosts(restart_s=20.0)).go(100)
    job.go(600, Conditions(slow=((2, 3.0), (5, 3.0))))
    first = next(each for each in job.decisions if each.action == "switch")
    assert first.without >= STRAGGLING | frozenset(range(40, 48))
    assert job.without >= STRAGGLING | frozenset(range(40, 48))


def test_a_slow_stage_gets_fewer_layers_until_it_recovers():
    job = Job(POOR, num_steps=8000, settings=ControlConfig(allow=(str(POOR.axes),))).go(100)
    even, before = job.plan, len(job.switches)
    slow = straggler(2.0)  # the third of eight stages
    job.go(400, slow)
    _, rebalanced = job.switches[before]
    assert rebalanced.pipeline is not None
    assert rebalanced.pipeline.layers_per_stage == (4, 4, 2, 4, 4, 4, 5, 5)
    assert any(
        each.switch_method == "rebalance" and each.plan == rebalanced for each in job.decisions
    )
    assert job.true_s(job.plan, slow) < 0.9 * job.true_s(even, slow)
    job.go(2500)
    assert job.plan.pipeline == even.pipeline


def test_after_a_disturbance_the_run_is_expected_back_under_its_earlier_plan(monkeypatch):
    """Then a plan that is better than the present one, but not than that, saves nothing more."""
    settings = ControlConfig(allow=(str(POOR.axes), "fsdp=64"))
    job = Job(BEST, num_steps=8000, settings=settings).go(100)
    start, slow = job.plan, straggler(2.0)
    job.runtime.moved(POOR, {"move": 1.0})
    job.plan = POOR
    seen = list[SwitchCandidate]()
    monkeypatch.setattr(
        policy, "decide", lambda situation, found: seen.extend(found) or decide(situation, found)
    )
    job.go(60, slow)
    back = [each for each in seen if each.plan == start and each.log_ratio_after is not None]
    assert back, "weighed while the process is slow"
    assert all(each.log_ratio_after < -0.1 for each in back), "beside the plan it would keep"
    others = [each for each in seen if each.plan != start and each.log_ratio_after is not None]
    assert all(each.log_ratio_after > -0.05 for each in others)


def test_a_device_loss_while_a_stage_is_slow_is_handled():
    """The current pipelined plan needs more devices than are left, and is not priced on them."""
    slow = straggler(2.0)
    job = Job(POOR, num_steps=8000, prepare_steps=10_000).go(100).go(60, slow)
    job.go(1, slow, lost=frozenset({60}))
    left = job.decisions[-1]
    assert left.mandatory
    assert left.plan is not None
    assert left.plan.num_devices <= 56


def test_meshes_on_the_allow_list_are_searched_for():
    """However slow they are: a search for the best few would not find them."""
    listed = "pipe=2,fsdp=8,tensor=4"
    assert listed not in [str(each.plan.axes) for each in search(PRICING).best]
    job = Job(POOR, settings=ControlConfig(allow=(listed, "fsdp=16"))).go(40)
    shown = {
        str(each.plan.axes)
        for decision in job.decisions
        for each in decision.alternatives
        if each.verdict != "not on the list of meshes that may be switched to"
    }
    assert shown == {listed}  # the other mesh has too few devices


def test_lost_devices_override_the_allow_list_of_meshes():
    job = (
        Job(settings=ControlConfig(allow=(str(BEST.axes),), max_switches=0))
        .go(30)
        .go(1, lost=frozenset({60}))
    )
    assert job.decisions[-1].mandatory
    assert job.decisions[-1].plan is not None
    assert job.decisions[-1].plan.num_devices <= 56


def test_a_resumed_run_counts_earlier_switches():
    """Their number, and how long ago they were."""

    def at_step_103(**settings) -> Job:
        job = Job(POOR, settings=ControlConfig(**settings))
        job.step = 103
        return job

    job = at_step_103()
    # the first of these was forced
    for step, by_choice in ((60, False), (100, True)):
        job.runtime.state = resumed(job.runtime.state, step, job.rules, by_choice=by_choice)
    job.go(20)
    assert all("cooling down after a switch, until step 130" in each.why for each in job.decisions)
    assert job.go(40).switches
    at_most = at_step_103(max_switches=1)
    at_most.runtime.state = resumed(at_most.runtime.state, 20, at_most.rules, by_choice=True)
    assert at_most.go(60).switches == []
    assert "1 switches are the most" in at_most.decisions[-1].why


def test_cooldown_after_resuming_from_an_older_checkpoint_is_not_longer():
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


def test_a_batch_phase_after_the_last_step_is_ignored():
    phases = (
        TrainingPhase(steps_before=0, global_batch=512, seq_len=4096),
        TrainingPhase(steps_before=200, global_batch=1024, seq_len=4096),
    )
    assert any(
        "the phase that begins at step 201" in each.trigger
        for each in Job(num_steps=201, phases=phases).go(199).decisions
    )
    assert not any(
        "phase" in each.trigger for each in Job(num_steps=200, phases=phases).go(199).decisions
    )


def test_switching_back_is_possible_with_the_account_overdrawn():
    """Conditions are back to normal, so it saves time for sure."""
    job = Job(
        num_steps=3000,
        switch_s=8.0,
        costs=SwitchCosts(stop_s=0.5, verify_s=0.1, first_steps_s=0.1, compile_tax_s=0.1),
    )
    job.go(100).go(400, SLOW)
    assert len(job.switches) == 1
    assert job.advisor._account.spent_s == pytest.approx(8.0, abs=2.0)  # and compile tax
    job.advisor.charge(1e6)
    job.go(600)
    assert len(job.switches) == 2
    assert job.true_s(job.plan) == pytest.approx(job.true_s(BEST), rel=0.06)


def test_memory_pressure_causes_a_switch_to_a_smaller_plan():
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


def test_a_batch_phase_is_prepared_early_and_entered_at_its_boundary():
    phases = (
        TrainingPhase(steps_before=0, global_batch=512, seq_len=4096),
        TrainingPhase(steps_before=300, global_batch=32, seq_len=4096),
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


SHORTER = (
    TrainingPhase(steps_before=0, global_batch=512, seq_len=4096),
    TrainingPhase(steps_before=100, global_batch=512, seq_len=1024),
)


def test_a_poor_plan_is_left_before_the_phase_that_is_near():
    """The run begins within three minutes of the phase."""
    job = Job(POOR, num_steps=5000, phases=SHORTER).go(90, factor=0.5)
    assert job.switches, job.decisions
    assert job.switches[0][0] < 30
    about = [each.step for each in job.decisions if "phase" in each.trigger]
    assert about
    assert min(about) >= job.switches[0][0]


@pytest.mark.parametrize("is_for_phase", [True, False])
def test_a_switch_is_paid_for_where_no_step_has_shown_what_it_saves(is_for_phase):
    """In a phase nobody has seen the old plan; nor in a disturbance that it was left for at once,
    if steps beside the compilation do not count.
    """
    settings = ControlConfig(max_switches=0)
    job = Job(POOR, num_steps=5000, phases=SHORTER if is_for_phase else (), settings=settings)
    job.go(99 if is_for_phase else 2)
    factor, batch = (0.25, (512, 1024)) if is_for_phase else (1.0, (512, 4096))
    decision = Decision(
        step=job.step,
        action="switch",
        why="a test",
        plan=BEST,
        at_step=100 if is_for_phase else None,
        step_time_s=job.true_s(POOR) * factor,
    )
    made = PendingSwitch(decision=decision, question=None, decided_s=job.time_s, before_s=())
    job.advisor.switched(BEST, {"move_s": 5.0}, made)
    job.plan = BEST
    account = job.advisor._account
    assert account.allowance.owed_s == 5.0
    job.go(50, batch=batch, factor=factor)
    assert account.allowance.owed_s < 5.0


def test_a_mandatory_switch_is_not_withdrawn_for_other_triggers():
    phases = (
        TrainingPhase(steps_before=0, global_batch=512, seq_len=4096),
        TrainingPhase(steps_before=300, global_batch=32, seq_len=4096),
    )
    job = Job(BEST, num_steps=5000, phases=phases).go(280)
    assert job.runtime.state.pending is not None
    job.go(20, reported=Conditions(inter_host=10.0))  # which step times contradict
    assert [step for step, _ in job.switches] == [300]


def test_a_switch_waits_for_a_boundary_many_quick_steps_away():
    phases = (
        TrainingPhase(steps_before=0, global_batch=512, seq_len=4096),
        TrainingPhase(steps_before=1500, global_batch=32, seq_len=4096),
    )
    job = Job(BEST, num_steps=50_000, phases=phases).go(1480, factor=0.02)
    *ahead, about_now = job.decisions
    assert {(decision.action, decision.at_step) for decision in ahead} == {("switch", 1500)}
    assert (about_now.action, about_now.at_step) == ("stay", None)
    assert ahead[-1].step < 1500 - 300
    job.go(20, reported=Conditions(inter_host=10.0), factor=0.02)
    assert [step for step, _ in job.switches] == [1500]


def test_an_unannounced_batch_change_forces_a_switch():
    job = Job(num_steps=5000).go(100).go(1, batch=(32, 4096))
    assert job.decisions[-1].mandatory
    assert job.decisions[-1].action == "switch"


def test_a_pending_switch_is_withdrawn_when_conditions_recover():
    job = Job(num_steps=5000, prepare_steps=60).go(200).go(50, SLOW)
    assert job.runtime.state.pending is not None
    job.go(30)
    assert job.decisions[-1].action == "stay"
    assert job.switches == []


def test_a_background_search_only_delays_the_decision():
    answers = iter([None] * 7)
    job = Job(POOR, searcher=lambda pricing: next(answers, search(pricing)))
    job.go(16)
    assert job.decisions == []
    job.go(10)
    assert job.decisions[0].action == "switch"


def test_a_mandatory_switch_is_not_forgotten_during_a_background_search():
    waits = iter([None] * 30)
    job = Job(num_steps=5000, searcher=lambda pricing: next(waits, search(pricing)))
    job.go(60, lost=frozenset({11}))
    assert next(waits, "none left") == "none left", (
        "news of step times came while the search was at work"
    )
    assert [each.mandatory for each in job.decisions if each.action == "switch"] == [True]
    assert 11 in job.without


def test_after_every_plan_failed_it_waits_before_retrying():
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


def test_a_plan_that_failed_on_other_devices_remains_the_current_one():
    job = Job().go(100).go(10, lost=frozenset({11}))
    smaller = job.plan
    assert smaller != BEST
    job.advisor.failed(smaller, "it could not be prepared for other devices")
    assert job.advisor._plan_history.now.plan == smaller
    job.advisor.failed(smaller, "it was slower", trial_s=[])
    assert job.advisor._plan_history.now.plan == BEST


def test_without_other_layouts_the_run_keeps_its_mesh():
    def nothing(pricing):
        raise PlanError("no layout has what is fixed")

    job = Job(POOR, searcher=nothing)
    # It may still change what moves no state.
    assert {plan.axes for _, plan in job.go(300).switches} <= {POOR.axes}


def test_every_decision_is_json_with_a_reason():
    job = Job(POOR).go(60).go(200, SLOW)
    for decision in job.decisions:
        record = json.loads(json.dumps(decision.as_json(), allow_nan=False))
        assert record["why"]
        assert record["inputs"]["conditions"] is not None
        assert record["trigger"]


def test_decisions_are_deterministic():
    assert [each.as_json() for each in Job(POOR).go(150).decisions] == [
        each.as_json() for each in Job(POOR).go(150).decisions
    ]


def test_the_next_run_uses_what_was_learnt(tmp_path):
    path = tmp_path / "learnt.json"
    job = Job(POOR, learnt_path=path).go(100)
    job.advisor.save()
    kept = json.loads(path.read_text())["evidence"]
    assert {POOR.digest, job.plan.digest} <= {each["plan"].partition(" of ")[0] for each in kept}
    again = Job(POOR, learnt_path=path).go(40)
    assert job.true_s(again.switches[0][1]) < 1.05 * job.true_s(job.plan)


def test_slow_exchanges_learnt_earlier_do_not_count_twice_for_a_slow_link(
    tmp_path,
):
    """A link of an eighth of its nominal bandwidth: earlier runs learnt that exchanges take long,
    this run that the link is slow.
    """
    poor, earlier, truth = Conditions(inter_host=8.0), Predictor(), Truth(2)
    for plan in PLANS[::6]:
        earlier.learn(
            query(plan, PRICING, "512 x 4096 tokens"),
            log_time=truth.log_time(plan, poor),
            noise=0.02,
            count=20,
            step=5,
        )
    LearntFile(tmp_path / "learnt.json", {"evidence": earlier}).write()
    job = Job(seed=2, learnt_path=tmp_path / "learnt.json").go(60, poor)
    assert job.decisions[-1].inputs["conditions"]["inter_host"] == pytest.approx(8.0, rel=0.1)
    predicted = [
        each.step_time_s / job.true_s(each.plan, poor) for each in job.decisions[-1].alternatives
    ]
    assert predicted == pytest.approx([1.0] * len(predicted), abs=0.1)


def test_devices_of_a_lost_devices_host_are_left_out():
    (cluster, without), *_ = leaving_out(CLUSTER, frozenset({11}), CONFIG)
    assert (cluster.num_devices, without) == (56, frozenset(range(8, 16)))


@pytest.mark.parametrize("keeps_devices", [False, True])
def test_conditions_that_may_be_over_are_weighed_as_over(keeps_devices):
    options = Options(Prices(PRICING), Searches(search), keeps_devices=keeps_devices)
    observed = ObservedCluster(
        batch=Prices(PRICING).first_batch,
        time_s=100.0,
        conditions=SLOW,
        normal=Conditions(),
        lost=frozenset(),
        memory=MemoryWatch(),
        recovered={"inter_host": 0.25},
    )
    found = options.all(observed, PlanInUse(plan=BEST), [], Calibration(), mandatory=False)
    assert {each.devices.probability for each in found} == {1.0, 0.25}
    assert {
        each.devices.conditions.inter_host == 1.0
        for each in found
        if each.devices.probability == 0.25
    } == {True}
