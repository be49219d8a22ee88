"""What makes the policy switch, and what keeps it from switching."""

import dataclasses
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config.axes import AxisSizes
from optimus_jax.control import constants
from optimus_jax.control.deciding.account import Allowance
from optimus_jax.control.deciding.changes import Durations
from optimus_jax.control.deciding.value import Regime, Worth
from optimus_jax.control.policy import SWITCH_METHODS, Decision, Situation, SwitchCandidate, decide
from optimus_jax.plan import Plan

LASTING = Regime(elapsed_s=100.0, durations=None)


def plan(number: int = 1) -> Plan:
    return Plan(
        axes=AxisSizes(data=number),
        rules=(),
        zero=0,
        microbatches=1,
        pipeline=None,
        remat="none",
        precision="f32",
        attention="xla",
        loss_chunk_tokens=128,
    )


def situation(**fields) -> Situation:
    given = {
        "step": 100,
        "trigger": "conditions changed",
        "step_time_s": 1.0,
        "horizon_s": 3000.0,
        "regime": LASTING,
        "account": Allowance(share=0.01),
        "whole_s": 1e9,
    }
    return Situation(**{**given, **fields})


def candidate(gain: float = 0.3, number: int = 2, **fields) -> SwitchCandidate:
    given = {
        "plan": plan(number),
        "switch_method": "remesh",
        "log_ratio": math.log(1 - gain),
        "deviation": 0.05,
        "cost_s": 10.0,
        "return_s": 10.0,
    }
    return SwitchCandidate(**{**given, **fields})


def unknown_duration(elapsed_s: float) -> Regime:
    return Regime(elapsed_s=elapsed_s, durations=Durations(prior_s=1.0))


def decided(*candidates: SwitchCandidate, **fields) -> Decision:
    return decide(situation(**fields), candidates)


CANDIDATES = st.builds(
    candidate,
    gain=st.floats(-1.0, 0.9) | st.floats(0.1, 0.7),
    deviation=st.floats(0.0, 0.5) | st.floats(0.0, 0.1),
    cost_s=st.floats(0.01, 1000.0) | st.floats(0.01, 20.0),
    return_s=st.floats(0.0, 20.0),
    switch_method=st.sampled_from(SWITCH_METHODS),
    barred=st.sampled_from(["", "", "it failed"]),
    usable_probability=st.floats(0.1, 1.0),
    number=st.integers(2, 5),
    log_ratio_after=st.none() | st.floats(-1.0, 1.0),
)
SITUATIONS = st.builds(
    situation,
    horizon_s=st.floats(0.0, 1e5),
    account=st.builds(Allowance, share=st.just(0.01), owed_s=st.floats(0.0, 1000.0)),
    whole_s=st.floats(10.0, 1e5) | st.just(1e9),
    step_time_s=st.floats(0.01, 10.0),
    regime=st.just(LASTING) | st.builds(unknown_duration, st.floats(0.0, 1e4)),
)


def test_a_large_likely_and_lasting_gain_causes_a_switch():
    decision = decided(candidate(0.3))
    assert (decision.action, decision.plan, decision.switch_method) == ("switch", plan(2), "remesh")
    assert decision.alternatives[0].verdict == "chosen"
    assert "30%" in decision.why


def test_a_risk_that_the_account_refuses_is_weighed_again_if_conditions_may_last():
    """The longer conditions have lasted, the longer they are expected to last."""
    poor = {"whole_s": 100.0, "account": Allowance(share=0.001)}
    risky = candidate(0.2, deviation=0.3, cost_s=60.0, return_s=60.0)
    assert (
        decided(risky, regime=unknown_duration(500.0), **poor).wait_s
        == constants.REVIEW_AFTER_SHARE * 500.0
    )
    assert decided(risky, **poor).wait_s is None


def test_a_switch_that_is_refused_for_what_is_owed_is_weighed_again_when_steps_may_have_paid():
    risky = candidate(0.2, deviation=0.1, cost_s=60.0, return_s=60.0)
    owed = {"whole_s": 10_000.0, "account": Allowance(share=0.001, owed_s=30.0)}
    assert decided(risky, **owed).action == "stay"
    assert decided(risky, **owed).wait_s == constants.DEBT_REVIEW * 30.0


def test_a_risk_is_taken_once_conditions_have_cost_as_much_whatever_is_owed():
    dear = candidate(0.2, deviation=0.1, cost_s=100.0, return_s=100.0)
    conditions = {"horizon_s": 2e4, "whole_s": 1000.0}
    young, old = unknown_duration(900.0), unknown_duration(1100.0)
    assert "the account allows" in decided(dear, regime=young, **conditions).why
    assert decided(dear, regime=old, **conditions).action == "switch"
    overdrawn = Allowance(share=0.01, owed_s=11.0)
    assert decided(dear, regime=old, **conditions, account=overdrawn).action == "switch"
    assert decided(dear, regime=young, **conditions, account=overdrawn).action == "stay"
    entered = "they have cost nothing under a plan that the run has just entered"
    assert decided(dear, regime=old, **conditions, under_plan_s=5.0).action == "stay", entered


def test_an_unlikely_plan_is_tried_if_that_is_worth_enough():
    few = {"horizon_s": 2e3, "whole_s": 1e6}
    unsure = candidate(0.08, deviation=0.2)
    tried = decided(unsure, **few)
    assert tried.action == "switch"
    assert "is taken back if it is not" in tried.why
    assert decided(unsure, **few, is_unexplained=True).action == "stay"
    unlikely = candidate(0.04, deviation=0.2)
    assert "is required of a first switch" in decided(unlikely, **few).why
    assert decided(unlikely, **few, has_switched=True).action == "switch"
    known = candidate(0.018, deviation=0.03)
    assert "it has to be worth 50 s" in decided(known, **few).why
    assert decided(known, **few, has_switched=True).action == "switch"
    well_known = candidate(0.012, deviation=0.015)
    assert "it has to be worth 20 s" in decided(well_known, **few, has_switched=True).why


@pytest.mark.parametrize("has_switched", [False, True])
def test_a_plan_for_a_phase_is_no_gamble(has_switched):
    unsure = candidate(0.0, deviation=0.2)
    assert decided(unsure, has_switched=True).action == "switch"
    assert decided(unsure, at_step=149, has_switched=has_switched).action == "stay"
    likely = candidate(0.1, deviation=0.3)
    assert decided(likely, at_step=149, has_switched=has_switched).action == "switch"
    hardly = candidate(0.012, deviation=0.05)
    told = decided(hardly, at_step=149, has_switched=has_switched)
    assert "it has to be worth" in told.why


@pytest.mark.parametrize(
    ("fields", "about", "reason"),
    [
        ({"gain": 0.003, "deviation": 0.0}, {}, "would save"),
        ({"cost_s": 1000.0}, {}, "would save"),
        ({"barred": "failed 1 times"}, {}, "failed 1 times"),
        ({"deviation": 0.3}, {"whole_s": 100.0}, "the account allows 1 s of them"),
        (
            {"deviation": 0.3},
            {"account": Allowance(share=0.01, owed_s=1e8), "whole_s": 3000.0},
            "the account allows",
        ),
        ({}, {"horizon_s": 30.0}, "would save"),
        ({"prepare_s": 1e6}, {}, "would save"),
        ({}, {"blocked": "cooling down"}, "cooling down"),
        ({}, {"regime": unknown_duration(10.0)}, "if conditions last"),
        ({"usable_probability": 0.05}, {}, "would save"),
        ({"gain": 0.01, "deviation": 0.02}, {}, "it has to be worth"),
        ({"gain": 0.01}, {"is_unexplained": True}, "is required"),
    ],
)
def test_each_reason_to_stay_suffices_and_is_named(fields, about, reason):
    assert decided(candidate()).action == "switch"
    decision = decided(candidate(**fields), **about)
    assert (decision.action, decision.plan) == ("stay", None)
    assert reason in decision.why


def test_the_setting_that_allows_a_refused_risk_is_named_and_allows_it():
    about = {"whole_s": 100.0, "account": Allowance(share=0.01)}
    risky = candidate(deviation=0.3)
    refused = decided(risky, **about)
    (share,) = re.findall(r"--set controller.budget_share=([\d.]+) allows it", refused.why)
    assert decided(risky, **about | {"account": Allowance(share=float(share))}).action == "switch"


@given(SITUATIONS, st.lists(CANDIDATES, max_size=5))
def test_a_chosen_plan_is_worth_it_and_allowed(about, candidates):
    decision = decide(about, candidates)
    if decision.action == "stay":
        return
    shown = decision.alternatives[0]
    assert shown.gain_s > shown.cost_s
    assert shown.verdict == "chosen"
    assert any(each.plan == decision.plan and not each.barred for each in candidates)


@given(SITUATIONS, st.lists(CANDIDATES, max_size=4))
def test_blocked_or_slower_candidates_are_not_chosen(about, candidates):
    assert decide(replace(about, blocked="cooling down"), candidates).action == "stay"
    worse = [replace(each, log_ratio=abs(each.log_ratio)) for each in candidates]
    assert decide(about, worse).action == "stay"


@given(SITUATIONS, CANDIDATES, st.floats(0.0, 0.5))
def test_more_gain_never_prevents_a_switch(about, one, more):
    better = replace(
        one,
        log_ratio=one.log_ratio - more,
        log_ratio_after=None if one.log_ratio_after is None else one.log_ratio_after - more,
    )
    if decide(about, [one]).action == "switch":
        assert decide(about, [better]).action == "switch"


@given(SITUATIONS, CANDIDATES, st.floats(0.0, 100.0))
def test_more_cost_never_causes_a_switch(about, one, more):
    if decide(about, [one]).action == "stay":
        assert decide(about, [replace(one, cost_s=one.cost_s + more)]).action == "stay"


@given(SITUATIONS, st.lists(CANDIDATES, max_size=4))
def test_decisions_are_deterministic_and_json(about, candidates):
    decision = decide(about, candidates)
    assert decide(about, candidates) == decision
    record = json.loads(json.dumps(decision.as_json(), allow_nan=False))
    assert record["action"] == decision.action
    assert record["why"].startswith("conditions changed")
    assert len(record["alternatives"]) == min(5, len(candidates))
    assert all(each["verdict"] for each in record["alternatives"])


def test_the_switch_that_is_worth_most_wins():
    """The executable costs 16 s less, there and back."""
    cheap = candidate(0.29, 3, switch_method="executable", cost_s=2.0, return_s=2.0)
    assert decided(candidate(0.30, 2), cheap).switch_method == "remesh"
    assert decided(candidate(0.30, 2), cheap, horizon_s=1000.0).switch_method == "executable"


def test_with_unknown_duration_it_waits_until_conditions_have_lasted():
    """Switching there and back takes 20 s and saves 30% of the time."""
    early = decided(candidate(), regime=unknown_duration(2.0))
    assert early.action == "stay"
    assert early.wait_s is not None
    assert decided(candidate(), regime=unknown_duration(200.0)).action == "switch"


def test_durations_of_past_regimes_count():
    flapping, lasting = Durations(prior_s=1.0), Durations(prior_s=1.0)
    for _ in range(4):
        flapping.ended(60.0)
        lasting.ended(3000.0)
    assert decided(candidate(), regime=Regime(elapsed_s=30.0, durations=flapping)).action == "stay"
    assert decided(candidate(), regime=Regime(elapsed_s=5.0, durations=lasting)).action == "switch"


def test_a_plan_better_under_normal_conditions_too_need_not_wait():
    regime = unknown_duration(1.0)
    assert decided(candidate(), regime=regime).action == "stay"
    assert decided(candidate(log_ratio_after=math.log(0.8)), regime=regime).action == "switch"
    assert decided(candidate(log_ratio_after=math.log(1.2)), regime=regime).action == "stay"


def test_a_gamble_in_conditions_that_may_end_is_worth_a_third_of_what_it_costs():
    sure, may_end = constants.MIN_PROBABILITY, situation(regime=unknown_duration(100.0))

    def objection(probability, net_s, where=may_end):
        found = Worth(
            net_s=net_s,
            saved_s=net_s + 14.0,
            cost_s=14.0,
            probability=probability,
            risk_s=1.0,
            wait_s=0.0,
        )
        return where.too_unlikely(found)

    assert "has to be worth 4.67 s" in objection(sure - 0.01, 4.6)
    assert not objection(sure - 0.01, 4.7)
    assert not objection(0.3, 4.7), "there is no least probability"
    assert not objection(sure, 0.1)
    assert "of what is left" in objection(sure - 0.01, 4.7, situation(horizon_s=1000.0))


def test_a_mandatory_switch_needs_no_gain():
    slower, slowest = candidate(-0.5, 2, cost_s=100.0), candidate(-3.0, 3)
    decision = decided(slowest, slower, mandatory=True, whole_s=0.0, blocked="cooling down")
    assert (decision.action, decision.plan, decision.mandatory) == ("switch", plan(2), True)
    # Near the end of the run the cheaper switch wins, and failed plans are not chosen.
    assert decided(slowest, slower, mandatory=True, horizon_s=10.0).plan == plan(3)
    assert decided(replace(slower, barred="it failed"), slowest, mandatory=True).plan == plan(3)
    failed = decided(replace(slower, barred="it failed"), mandatory=True)
    assert (failed.action, failed.mandatory) == ("stay", True)
    assert "it failed" in failed.why
    assert decided(mandatory=True).action == "stay"


def test_a_decision_records_its_step_and_excluded_devices():
    decision = decided(candidate(without=frozenset({3, 1})), at_step=149)
    assert (decision.at_step, decision.without) == (149, {1, 3})
    record = decision.as_json()
    assert (record["at_step"], record["without"]) == (149, [1, 3])
    assert decided(candidate(0.0), at_step=149).at_step is None


def test_a_decision_record_has_every_field():
    record = decided(
        candidate(), inputs={"step_time_s": 1.23456789, "link_slowdown/inter_host": None}
    ).as_json()
    assert set(record) == {each.name for each in dataclasses.fields(Decision)} - {"step"}
    assert record["inputs"] == {"step_time_s": 1.235, "link_slowdown/inter_host": None}
