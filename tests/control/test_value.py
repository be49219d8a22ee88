"""What a switch is worth: against a simulation, and how it changes with what it depends on."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.control.deciding.changes import Durations
from optimus_jax.control.deciding.value import Bet, Regime, worth

FOREVER = Regime(elapsed_s=100.0, durations=None)
DRAWS = 200_000
ERROR = 0.02
"""Tolerated difference to a mean over DRAWS, as a share of the horizon: quantiles are coarse."""


def bet(gain: float = 0.2, **fields) -> Bet:
    given = {
        "log_ratio": math.log(1 - gain),
        "deviation": 0.1,
        "log_ratio_after": None,
        "cost_s": 10.0,
        "return_s": 8.0,
        "prepare_s": 0.0,
        "trial_s": 5.0,
        "usable": 1.0,
        "counts_return": True,
    }
    return Bet(**{**given, **fields})


def lasted(elapsed_s: float, *past_s: float) -> Regime:
    durations = Durations(prior_s=1.0)
    for each in past_s:
        durations.ended(each)
    return Regime(elapsed_s=elapsed_s, durations=durations)


BETS = st.builds(
    bet,
    gain=st.floats(-0.5, 0.7),
    deviation=st.floats(0.0, 0.5),
    log_ratio_after=st.none() | st.floats(-0.5, 0.5),
    cost_s=st.floats(0.1, 100.0),
    return_s=st.floats(0.0, 100.0),
    prepare_s=st.floats(0.0, 100.0),
    usable=st.floats(0.1, 1.0),
)
REGIMES = st.just(FOREVER) | st.builds(lasted, st.floats(0.0, 1e4))


@pytest.mark.parametrize("gain", [-0.1, 0.05, 0.3])
@pytest.mark.parametrize("regime", [FOREVER, lasted(300.0), lasted(50.0, 200.0, 400.0)])
def test_value_probability_and_risk_are_those_of_drawn_runs(gain, regime):
    """Ratios and durations are drawn; a run goes back once, if conditions end before it does or if
    the plan is slower, in conditions that last after its trial.
    """
    horizon_s, one = 2000.0, bet(gain)
    random = np.random.default_rng(0)
    ratio = np.exp(random.normal(one.log_ratio, one.deviation, DRAWS))
    left_s = horizon_s - one.cost_s
    lasting_s = (
        np.full(DRAWS, left_s)
        if regime.durations is None
        else np.minimum(left_s, [regime.over_s(each) for each in random.random(DRAWS)])
    )
    ends = lasting_s < left_s
    found = worth(one, regime, horizon_s)
    back_s = one.return_s * (ends | (ratio > 1))
    is_tried = regime.durations is None
    used_s = np.where((ratio > 1) & is_tried, one.trial_s, lasting_s)
    net_s = used_s * (1 - ratio) - one.cost_s - back_s
    assert found.net_s == pytest.approx(net_s.mean(), abs=ERROR * horizon_s)
    without_s = lasting_s * (1 - ratio) - one.cost_s - one.return_s * ends
    assert found.probability == pytest.approx((without_s > 0).mean(), abs=0.03)
    most_s = one.cost_s + one.return_s + one.trial_s
    lost_s = np.clip(-without_s, 0.0, most_s)
    assert found.risk_s == pytest.approx(lost_s.mean(), abs=0.03 * most_s)


@given(BETS, REGIMES, st.floats(0.0, 1e4))
def test_worth_is_finite_and_its_parts_are_ordered(one, regime, horizon_s):
    found = worth(one, regime, horizon_s)
    assert math.isfinite(found.net_s)
    assert 0 <= found.probability <= 1
    assert one.cost_s <= found.cost_s <= one.cost_s + one.return_s + 1e-9
    assert 0 <= found.risk_s <= one.cost_s + one.return_s + one.trial_s + 1e-9
    assert found.wait_s >= 0


@given(BETS, REGIMES, st.floats(0.0, 1e4), st.floats(0.0, 0.5))
def test_a_faster_plan_is_worth_no_less_and_risks_no_more(one, regime, horizon_s, more):
    after = one.log_ratio_after
    faster = replace(
        one,
        log_ratio=one.log_ratio - more,
        log_ratio_after=None if after is None else after - more,
    )
    before, now = worth(one, regime, horizon_s), worth(faster, regime, horizon_s)
    assert now.net_s >= before.net_s - 1e-6 * max(1.0, abs(before.net_s))
    assert now.risk_s <= before.risk_s + 1e-9


@pytest.mark.parametrize("gain_after", [0.02, 0.2])
@pytest.mark.parametrize("elapsed_s", [50.0, 1000.0])
def test_a_plan_that_is_better_afterwards_saves_as_drawn_runs_do(gain_after, elapsed_s):
    """Its error is the same then. Steps are shorter then, too, and the run goes back if it pays."""
    horizon_s, regime = 2000.0, lasted(elapsed_s)
    one = bet(0.5, log_ratio_after=math.log(1 - gain_after), usual=0.6, cost_s=200.0)
    random = np.random.default_rng(0)
    error = np.exp(random.normal(0.0, one.deviation, DRAWS))
    left_s = horizon_s - one.cost_s
    lasting_s = np.minimum(left_s, [regime.over_s(each) for each in random.random(DRAWS)])
    after_s = (left_s - lasting_s) * one.usual
    saved_s = lasting_s * (1 - 0.5 * error)
    stays_s = after_s * (1 - (1 - gain_after) * error)
    back_s = one.return_s * (lasting_s < left_s)
    found = worth(one, regime, horizon_s)
    net_s = saved_s + stays_s - one.cost_s
    assert found.net_s == pytest.approx(net_s.mean(), abs=ERROR * horizon_s)
    without_s = saved_s + np.maximum(stays_s, -back_s) - one.cost_s
    assert found.probability == pytest.approx((without_s > 0).mean(), abs=0.03)
    most_s = one.cost_s + one.return_s + one.trial_s
    assert found.risk_s == pytest.approx(np.clip(-without_s, 0.0, most_s).mean(), abs=0.03 * most_s)


def test_a_plan_without_a_trial_risks_all_that_it_may_lose():
    slow = bet(-0.5, deviation=0.01)
    assert worth(slow, FOREVER, 1000.0).risk_s <= slow.cost_s + slow.return_s + slow.trial_s
    untried = worth(replace(slow, counts_return=False), FOREVER, 1000.0)
    assert untried.risk_s == pytest.approx(0.5 * 990 + slow.cost_s, rel=0.05)


def test_a_sure_saving_risks_nothing_however_much_it_costs():
    dear = worth(bet(0.5, deviation=0.01, cost_s=500.0), FOREVER, 10_000.0)
    assert dear.net_s > 4000
    assert dear.risk_s == pytest.approx(0.0, abs=1e-6)
    gamble = worth(bet(0.01, deviation=0.1), FOREVER, 10_000.0)
    assert gamble.risk_s > 3.0


def test_the_less_is_known_of_a_plan_the_more_a_trial_is_worth_in_conditions_that_last():
    def net_s(deviation, regime):
        slower = bet(log_ratio=0.02 - deviation**2 / 2, deviation=deviation)
        return worth(slower, regime, 10_000.0).net_s

    assert net_s(0.01, FOREVER) < 0 < net_s(0.1, FOREVER) < net_s(0.2, FOREVER)
    assert net_s(0.2, lasted(300.0)) < 0
    unknown = bet(-0.02, deviation=0.2)
    assert worth(replace(unknown, counts_return=False), FOREVER, 10_000.0).net_s < 0


def test_waiting_pays_while_conditions_are_young_and_ends():
    waits_s = [worth(bet(), lasted(elapsed_s), 5000.0).wait_s for elapsed_s in (5.0, 20.0, 2000.0)]
    assert waits_s[0] > 0
    assert waits_s[-1] == 0
    assert worth(bet(), FOREVER, 5000.0).wait_s == 0


def test_a_plan_that_is_better_only_afterwards_is_no_reason_to_switch_now():
    worse_now = bet(-0.1, log_ratio_after=math.log(0.7), deviation=0.01)
    assert worth(worse_now, lasted(300.0), 5000.0).net_s < 0
    both = bet(0.1, log_ratio_after=math.log(0.7), deviation=0.01)
    assert worth(both, lasted(300.0), 5000.0).net_s > worth(bet(0.1), lasted(300.0), 5000.0).net_s
