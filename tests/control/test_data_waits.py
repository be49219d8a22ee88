"""What waits for data explain of step times."""

import pytest
from fleet import PLANS
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import ControlConfig
from optimus_jax.control.data_waits import DataWaits, is_data_bound
from optimus_jax.control.policy import Decision
from optimus_jax.control.runtime import Policy, Runtime
from optimus_jax.control.signals import Observation, SignalSummary
from optimus_jax.control.switch_state import SwitchRules

OLD, NEW = PLANS[:2]
TIMES_S = st.floats(0.01, 100.0)


def waits(usual_s=0.1):
    found = DataWaits()
    found.learn([1.0] * 8, [usual_s] * 8, [1.0] * 8)
    return found


@pytest.mark.parametrize(
    ("time_s", "wait_s", "own_s"),
    [
        (1.0, 0.1, 1.0),
        (1.5, 0.6, 1.0),  # all of it is explained
        (1.5, 0.4, 1.2),  # a part
        (1.5, 0.1, 1.5),  # nothing
        (1.5, 0.0, 1.5),
        (1.0, 0.9, 1.0),  # the wait was beside the devices' work
        (0.8, 0.5, 0.8),  # a step that is faster stays so
    ],
)
def test_a_wait_explains_why_a_step_is_slow_and_makes_none_fast(time_s, wait_s, own_s):
    assert waits().own_times_s([time_s], [wait_s], 1.0) == (pytest.approx(own_s),)


@given(TIMES_S, st.floats(0.0, 100.0), TIMES_S, st.floats(0.0, 1.0))
def test_own_times_are_between_what_is_possible(time_s, wait_s, usual_s, usual_wait_s):
    (own_s,) = waits(usual_wait_s).own_times_s([time_s], [wait_s], usual_s)
    assert max(min(time_s, usual_s), time_s - wait_s) <= own_s <= time_s


def test_nothing_is_taken_out_while_nothing_is_known():
    assert waits().own_times_s([1.5], [0.6], None) == (1.5,)
    assert DataWaits().own_times_s([1.5], [0.6], 1.0) == (1.5,)


def test_waits_that_slowed_a_step_are_not_usual():
    found = waits()
    for _ in range(100):
        own_s = found.own_times_s([1.5], [0.6], 1.0)
        found.learn([1.5], [0.6], own_s)
    assert found.own_times_s([1.5], [0.6], 1.0) == (pytest.approx(1.0),)


def reading(value, quality="good"):
    return SignalSummary(value=value, spread=0.0, count=8, time_s=1.0, quality=quality)


def observed(step=1, step_time_s=1.0, readings=None, wait_s=None):
    return Observation(
        step=step,
        time_s=float(step),
        step_times_s=(step_time_s,),
        readings=readings or {},
        global_batch=8,
        seq_len=32,
        lost_devices=frozenset(),
        data_waits_s=() if wait_s is None else (wait_s,),
    )


@pytest.mark.parametrize(
    ("wait", "is_bound"),
    [
        (reading(0.95), True),
        (reading(0.5), False),
        (reading(0.95, "stale"), False),
        (reading(0.95, "few"), False),
        (reading(None, "unknown"), False),
    ],
)
def test_steps_that_wait_most_of_their_time_are_bound_by_data(wait, is_bound):
    readings = {"data_wait_s": wait, "step_time_s": reading(1.0)}
    assert is_data_bound(observed(readings=readings)) == is_bound
    assert not is_data_bound(observed(readings={"data_wait_s": wait}))


class Once(Policy):
    """Switches after the eighth step, to a plan of which it expects 0.9 s per step."""

    usual_step_s = 1.0

    def decide(self, observation):
        if observation.step != 8:
            return None
        return Decision(step=8, action="switch", plan=NEW, why="a test", step_time_s=1.0)

    def switched(self, plan, costs_s, made=None):
        self.usual_step_s = 0.9


@pytest.mark.parametrize(
    ("time_s", "wait_s", "command"), [(1.5, 0.75, "keep"), (1.5, 0.0, "roll_back")]
)
def test_a_plan_is_not_taken_back_for_waits_for_data(time_s, wait_s, command):
    sent = []
    runtime = Runtime(
        Once(),
        SwitchRules(settings=ControlConfig(canary_steps=5), num_steps=1000),
        send=lambda each: sent.append(each.kind),
        announce=lambda decision: None,
    )

    def go(step, step_time_s, wait_s):
        runtime.boundary(
            observed(step, step_time_s, wait_s=wait_s),
            times_s=(step_time_s,),
            data_waits_s=(wait_s,),
            losses=(1.0,),
            is_compiled=lambda: step >= 8,
        )

    for step in range(1, 10):
        go(step, 1.0, 0.01)
    assert "switch" in sent
    runtime.move_begun()
    runtime.moved(NEW, {"move_s": 1.0})
    for step in range(10, 20):
        go(step, time_s, wait_s)
    assert sent[-1] == command
