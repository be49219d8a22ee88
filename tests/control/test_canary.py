"""The verdict after the first steps under a new plan."""

import math

import pytest

from optimus_jax.control.canary import has_lost, judge

BEFORE_S = (1.0, 1.02, 0.98, 1.01, 0.99)
GOOD = {
    "losses": (2.0,),
    "before_s": BEFORE_S,
    "predicted_s": 0.8,
    "steps_left": 1000,
    "back_s": 5.0,
}


@pytest.mark.parametrize(
    ("times_s", "changes", "keep", "word"),
    [
        ((3.0, 0.8, 0.82, 0.79), {}, True, "predicted"),  # the first step is not counted
        # slower than predicted, but still faster than before
        ((3.0, 0.95, 0.95, 0.95), {}, True, "0.95 s per step, 0.8 s predicted"),
        ((1.0, 1.3, 1.31, 1.29), {}, False, "1.3 s per step"),
        ((1.0, 1.01, 0.99, 1.02), {}, True, "before"),  # noise
        ((1.0, 1.3, 1.31, 1.29), {"steps_left": 3}, True, "going back would take"),
        ((1.0, 0.8), {"losses": (2.0, math.nan)}, False, "not finite"),
        ((1.3,), {}, False, "1.3"),
        ((), {}, True, "no step"),
    ],
)
def test_the_verdict_follows_step_times_and_losses(times_s, changes, keep, word):
    verdict = judge(times_s, **GOOD | changes)
    assert verdict.keep == keep
    assert word in verdict.why


def test_noisy_step_times_need_a_larger_slowdown():
    restless = {**GOOD, "before_s": (0.6, 1.4, 1.0, 0.7, 1.3)}
    times_s = (9.0, 1.15, 1.55, 0.75, 1.1, 1.3)
    assert judge(times_s, **restless).keep
    assert not judge([2 * time_s for time_s in times_s], **restless).keep


def test_without_a_standard_only_the_losses_are_judged():
    verdict = judge((3.0, 9.0, 9.0), **{**GOOD, "before_s": ()})
    assert verdict.keep
    assert not judge((3.0, 9.0), **{**GOOD, "before_s": (), "losses": (math.inf, 2.0)}).keep


def test_a_run_does_not_go_back_to_a_plan_that_it_had_to_leave():
    forced = GOOD | {"before_s": (), "losses": (math.inf, 2.0), "mandatory": True}
    verdict = judge((3.0, 9.0), **forced)
    assert verdict.keep
    assert "not finite" in verdict.why


@pytest.mark.parametrize(
    ("times_s", "lost"),
    [
        ((20.0, 20.0, 20.0), False),  # the first does not count, and two others may be by chance
        ((1.0, 20.0, 1.0, 1.0), False),
        ((1.0, 20.0, 20.0, 20.0), True),
        ((1.0, 20.0, 1.0, 20.0), True),
        ((1.0, 2.0, 2.0, 2.0), False),  # 3 s; going back takes 5 s
        ((1.0, 2.0, 2.0, 2.0, 2.1, 2.1, 2.1), True),
    ],
)
def test_a_trial_is_lost_once_it_cost_as_much_as_going_back(times_s, lost):
    assert has_lost(times_s, before_s=BEFORE_S, back_s=5.0) == lost
    assert not has_lost(times_s, before_s=(), back_s=5.0)
