"""Steps that waited for their data say nothing about a plan."""

import math
from dataclasses import replace

import pytest
from fleet import PLANS

from optimus_jax.config import ControlConfig
from optimus_jax.control.data_waits import DataWaits, waited
from optimus_jax.control.policy import Decision
from optimus_jax.control.runtime import Policy, Runtime
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_state import Decided, Question, SwitchRules

OLD, NEW = PLANS[:2]


@pytest.mark.parametrize(
    ("waits_s", "flags"),
    [
        ((0.0, 0.04, 0.06, 2.0), (False, False, True, True)),
        ((), (False,) * 4),
        ((math.nan,) * 4, (False,) * 4),
    ],
)
def test_a_step_waited_if_its_wait_is_a_part_of_it(waits_s, flags):
    assert waited([1.0] * 4, waits_s) == flags


def test_the_loader_sets_the_pace_from_most_steps_on_until_most_do_not_wait():
    waits = DataWaits()
    waits.add([True, False] * 20)
    assert not waits.is_late
    waits.add([True] * 4)
    assert waits.is_late
    waits.add([True, False] * 20)
    assert waits.is_late
    waits.add([False] * 4)
    assert not waits.is_late


class Scripted(Policy):
    """Decides by step, and records step times and the steps at which it is asked."""

    def __init__(self, **at_step):
        self.script, self.times_s, self.asked = at_step, [], []

    def notices(self, observation, state):
        self.times_s += observation.step_times_s
        return super().notices(observation, state)

    def decide(self, observation):
        return self.script.pop(f"step_{observation.step}", None)

    def answer(self, question, observation, state, *, blocked):
        self.asked.append((observation.step, question.trigger))


class Run:
    """A runtime whose plan is compiled from step `ready` on."""

    def __init__(self, policy, ready=8):
        self.sent, self.announced, self.step, self.ready = [], [], 0, ready
        self.loads_more = False
        self.runtime = Runtime(
            policy,
            SwitchRules(settings=ControlConfig(canary_steps=5), num_steps=1000),
            send=lambda each: self.sent.append(each.kind),
            announce=lambda decision: self.announced.append(decision.why),
        )

    def go(self, count, time_s, wait_s=0.0):
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
                    data_waits_s=(wait_s,),
                ),
                times_s=(time_s,),
                data_waits_s=(wait_s,),
                loads_more=self.loads_more,
                losses=(1.0,),
                is_compiled=lambda: self.step >= self.ready,
            )
        return self


def switch(**fields):
    return Decision(step=8, action="switch", plan=NEW, why="a test", **fields)


@pytest.mark.parametrize(("wait_s", "command"), [(0.75, "keep"), (0.0, "roll_back")])
def test_a_plan_is_not_taken_back_for_waits_for_data(wait_s, command):
    run = Run(Scripted(step_8=switch())).go(9, 1.0)
    assert run.sent[:2] == ["prepare", "switch"]
    run.runtime.move_begun()
    run.runtime.moved(NEW, {"move_s": 1.0})
    run.go(6, 1.5, wait_s)
    assert run.sent[-1] == command


def test_a_plan_is_judged_by_the_steps_of_its_trial_that_did_not_wait():
    run = Run(Scripted(step_8=switch())).go(9, 1.0)
    run.runtime.move_begun()
    run.runtime.moved(NEW, {"move_s": 1.0})
    run.go(2, 5.0, 4.5).go(4, 1.3)
    assert run.sent[-1] == "roll_back"
    trial = run.runtime.state.trial
    assert trial is not None
    assert trial.verdict is not None
    assert "1.3 s per step" in trial.verdict.why


def test_the_policy_sees_no_steps_that_waited():
    policy = Scripted()
    Run(policy).go(3, 1.0).go(3, 2.0, 1.0).go(1, 1.1)
    assert policy.times_s == [1.0, 1.0, 1.0, 1.1]


@pytest.mark.parametrize("fields", [{}, {"mandatory": True}, {"at_step": 90}])
def test_a_switch_that_was_decided_on_goes_on(fields):
    """Steps beside a compilation say nothing: it may have slowed the loader."""
    run = Run(Scripted(step_8=switch(**fields)), ready=100).go(8, 1.0).go(8, 2.0, 1.0)
    assert run.sent == ["prepare"]
    assert not run.announced[1:]


def test_what_a_mandatory_question_is_answered_by_choice_is_not_done_while_data_are_late():
    policy = Scripted()
    policy.answer = lambda *_, **__: Decided(decision=switch())
    run = Run(policy).go(8, 2.0, 1.0)
    question = Question(trigger="a test", mandatory=True)
    run.runtime.state = replace(run.runtime.state, questions=(question,))
    assert run.go(1, 2.0, 1.0).sent == []


def test_waits_count_against_a_plan_that_makes_processes_load_more():
    run = Run(Scripted(step_8=switch())).go(9, 1.0)
    run.runtime.move_begun()
    run.runtime.moved(NEW, {"move_s": 1.0})
    run.loads_more = True
    assert run.go(6, 1.5, 0.75).sent[-1] == "roll_back"


@pytest.mark.parametrize(
    ("fields", "is_asked"), [({}, False), ({"mandatory": True}, True), ({"at_step": 90}, True)]
)
def test_questions_stay_open_while_steps_wait_for_data(fields, is_asked):
    policy = Scripted()
    run = Run(policy).go(8, 2.0, 1.0)
    question = Question(trigger="a test", **fields)
    run.runtime.state = replace(run.runtime.state, questions=(question,))
    run.go(4, 2.0, 1.0)
    assert bool(policy.asked) == is_asked
    run.go(8, 1.0)
    assert policy.asked
    assert len(run.announced) == 1, "it is said once"


def test_the_run_looks_again_once_data_come_in_time():
    policy = Scripted()
    Run(policy).go(8, 2.0, 1.0).go(8, 1.0)
    assert policy.asked[0] == (14, "data come in time again")
