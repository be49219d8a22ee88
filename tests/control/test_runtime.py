"""The runtime of process 0: what the policy is asked and told, and what is sent."""

from dataclasses import replace

import pytest
from fleet import PLANS

from optimus_jax.config import ControlConfig
from optimus_jax.control import constants
from optimus_jax.control.policy import Decision
from optimus_jax.control.runtime import Policy, Runtime
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_state import Decided, News, Question, Stage, SwitchRules

OLD, NEW = PLANS[:2]
SETTINGS = ControlConfig(cooldown_steps=30, window_steps=20, canary_steps=5)


class Scripted(Policy):
    """Decides by step, and records what it is shown and told."""

    def __init__(self, script=()):
        self.script, self.seen, self.told = dict(script), [], []

    def notices(self, observation, state):
        self.seen.append(observation)
        return super().notices(observation, state)

    def decide(self, observation):
        return self.script.pop(observation.step, None)

    def switched(self, plan, costs_s, made):
        self.told.append(("switched", plan, dict(costs_s), made))

    def failed(self, plan, why, *, trial_s=None):
        self.told.append(("failed", plan, why, trial_s))

    def charge(self, time_s):
        self.told.append(("charged", time_s))


def switch(plan=NEW):
    return Decision(step=0, action="switch", plan=plan, why="a test")


class Run:
    """A runtime with what it sends and announces."""

    def __init__(self, policy, **rules):
        self.sent, self.announced, self.failures, self.step = [], [], [], 0
        self.policy = policy
        self.runtime = Runtime(
            policy,
            SwitchRules(settings=SETTINGS, num_steps=1000, **rules),
            send=self.sent.append,
            announce=self.announced.append,
            fail=lambda why, trace: self.failures.append((why, trace)),
        )

    def go(self, count, time_s=1.0, *, is_compiled=False):
        for _ in range(count):
            self.step += 1
            self.runtime.boundary(
                Observation(
                    step=self.step,
                    time_s=float(self.step),
                    step_times_s=(time_s,),
                    readings={},
                    global_batch=8,
                    seq_len=32,
                    lost_devices=frozenset(),
                ),
                times_s=(time_s,),
                losses=(1.0,),
                is_compiled=lambda: is_compiled,
            )
        return self

    @property
    def kinds(self):
        return [command.kind for command in self.sent]


@pytest.mark.parametrize("tax", [1.15, constants.MAX_COMPILE_SLOWDOWN])
def test_the_policy_sees_steps_without_the_runs_own_compilation(tax):
    run = Run(Scripted({20: switch()})).go(20).go(10, tax)
    assert run.runtime.state.stage is Stage.PREPARING
    shown = [each.step_times_s for each in run.policy.seen[20:]]
    assert shown[:2] == [(), ()], "too few steps to know how much it takes"
    assert shown[2:] == [(pytest.approx(1.0),)] * 8


def test_more_than_a_compilation_explains_is_shown():
    run = Run(Scripted({20: switch()})).go(20).go(10, 2.0)
    assert run.policy.seen[-1].step_times_s == (2.0,)


def test_a_switch_is_told_with_what_compiling_has_cost():
    run = Run(Scripted({20: switch()})).go(20).go(4, 1.1).go(1, is_compiled=True)
    assert run.kinds == ["prepare", "switch"]
    run.runtime.move_begun()
    run.runtime.moved(NEW, {"move_s": 2.0})
    [(_, plan, costs_s, made)] = run.policy.told
    assert (plan, made.decision.plan) == (NEW, NEW)
    assert costs_s == {"move_s": 2.0, "compile_tax_s": pytest.approx(0.4)}
    run.go(6)
    assert run.kinds[2:] == ["keep"]
    run.runtime.trial_over()
    assert run.runtime.state.stage is Stage.COOLDOWN


def test_a_plan_that_nobody_decided_on_is_told_as_such():
    run = Run(Scripted()).go(5)
    run.runtime.moved(NEW, {}, begins_phase=True)
    assert run.policy.told == [("switched", NEW, {}, None)]


def test_an_open_question_is_asked_until_it_is_answered():
    class Searching(Scripted):
        asked = 0

        def notices(self, observation, state):
            return [News(question=Question(trigger="news"))] if observation.step == 3 else []

        def answer(self, question, observation, state, *, blocked):
            self.asked += 1
            return Decided(decision=switch()) if self.asked == 4 else None

    run = Run(Searching()).go(10)
    assert run.policy.asked == 4
    assert [decision.plan for decision in run.announced] == [NEW]
    pending = run.runtime.state.pending
    assert pending is not None
    assert pending.question == Question(trigger="news")


def test_a_question_during_the_cool_down_is_asked_again_after_it():
    class Asked(Scripted):
        blocked = ()

        def notices(self, observation, state):
            return [News(question=Question(trigger="news"))] if observation.step == 20 else []

        def answer(self, question, observation, state, *, blocked):
            why_not = blocked(question)
            self.blocked = (*self.blocked, (observation.step, bool(why_not)))
            stay = Decision(step=observation.step, action="stay", why=why_not or "it is best")
            return Decided(decision=stay)

    run = Run(Asked()).go(5)
    run.runtime.failed(NEW, "a test")
    run.go(60)
    assert run.policy.blocked == ((20, True), (35, False), (65, False)), (
        "and once the failed plan may be tried again"
    )


def test_the_answer_to_a_question_that_is_not_mandatory_any_more_may_be_blocked():
    class Relieved(Scripted):
        seen_blocked = ()

        def notices(self, observation, state):
            asked = Question(trigger="devices are lost", mandatory=True)
            return [News(question=asked)] if observation.step == 7 else []

        def answer(self, question, observation, state, *, blocked):
            again = replace(question, mandatory=False)
            self.seen_blocked = (bool(blocked(question)), bool(blocked(again)))
            return Decided(decision=Decision(step=7, action="stay", why=blocked(again)))

    run = Run(Relieved()).go(5)
    run.runtime.failed(NEW, "a test")
    run.go(4)
    assert run.policy.seen_blocked == (False, True)
    assert run.runtime.state.forced is None
    assert run.runtime.state.review_step == 35


@pytest.mark.parametrize(("shares_cores", "waits"), [(False, False), (True, True)])
def test_nothing_is_compiled_by_choice_beside_a_trial_on_shared_cores(shares_cores, waits):
    class Planned(Scripted):
        asked = ()

        def notices(self, observation, state):
            phase = Question(trigger="a phase", at_step=500)
            asked = [News(question=phase)] if observation.step == 26 else []
            return [*super().notices(observation, state), *asked]

        def answer(self, question, observation, state, *, blocked):
            self.asked = (*self.asked, observation.step)
            return Decided(decision=Decision(step=0, action="stay", why="it is best"))

    policy = Planned({20: switch()})
    run = Run(policy, shares_cores=shares_cores).go(24).go(1, is_compiled=True)
    run.runtime.move_begun()
    run.runtime.moved(NEW, {"move_s": 2.0})
    run.go(6)
    run.runtime.trial_over()
    run.go(2)
    assert policy.asked[0] == (32 if waits else 26)


def test_a_probe_is_worth_more_where_something_is_new():
    policy = Scripted()
    policy.wants_probe, policy.probe_worth_s, policy.changed_s = True, 3.0, 1.0
    run = Run(policy).go(2)
    assert [(command.anew, command.worth_s) for command in run.sent] == [(True, 3.0), (False, 0.0)]


def test_a_policy_that_raises_is_not_asked_again():
    class Broken(Scripted):
        def decide(self, observation):
            if self.script.get(observation.step) is not None:
                return super().decide(observation)
            if observation.step == 25:
                raise ZeroDivisionError("no steps")
            assert observation.step < 25
            return None

    run = Run(Broken({20: switch()})).go(40)
    [(why, trace)] = run.failures
    assert "ZeroDivisionError: no steps" in why
    assert "decide" in trace
    assert run.kinds == ["prepare", "withdraw"]
    told = len(run.policy.told)
    run.runtime.failed(NEW, "a test", costs_s=1.0)
    assert len(run.policy.told) == told


@pytest.mark.parametrize("part", ["switched", "failed", "charge", "is_puzzled", "save"])
def test_no_part_of_a_policy_ends_the_run(part):
    def fail(*_, **__):
        raise ZeroDivisionError("no steps")

    policy = Scripted({20: switch()})
    setattr(policy, part, fail)
    run = Run(policy).go(24, 1.1).go(1, is_compiled=True)
    run.runtime.move_begun()
    run.runtime.moved(NEW, {"move_s": 2.0})
    run.go(1).go(6, 2.0)
    run.runtime.failed(NEW, "slower", is_back=True)
    run.runtime.close()
    [(why, _)] = run.failures
    assert "ZeroDivisionError: no steps" in why


def test_a_policy_learns_the_steps_of_a_plan_that_is_taken_back():
    """Also where the trial ends early."""
    run = Run(Scripted({20: switch()})).go(24, 1.1).go(1, is_compiled=True)
    run.runtime.move_begun()
    run.runtime.moved(NEW, {"move_s": 2.0})
    run.go(1, 9.0).go(1, 2.5).go(1, 2.6).go(1, 2.7)
    assert run.sent[-1].kind == "roll_back"
    run.runtime.failed(NEW, "slower", is_back=True)
    assert ("failed", NEW, "slower", (9.0, 2.5, 2.6, 2.7)) in run.policy.told
