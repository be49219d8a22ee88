"""What makes the policy switch, and what keeps it from switching."""

import dataclasses
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.control.deciding.changes import Durations
from optimus_jax.control.policy import (
    REWEIGH_AFTER,
    SWITCH_METHODS,
    Decision,
    Regime,
    Situation,
    SwitchCandidate,
    decide,
)
from optimus_jax.plan import Plan

SETTINGS = ControlConfig()
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
        "budget_s": 1e9,
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


def decided(*candidates: SwitchCandidate, settings: ControlConfig = SETTINGS, **fields) -> Decision:
    return decide(situation(**fields), candidates, settings)


CANDIDATES = st.builds(
    candidate,
    gain=st.floats(-1.0, 0.9) | st.floats(0.1, 0.7),
    deviation=st.floats(0.0, 0.5) | st.floats(0.0, 0.1),
    cost_s=st.floats(0.01, 1000.0) | st.floats(0.01, 20.0),
    return_s=st.floats(0.0, 20.0),
    switch_method=st.sampled_from(SWITCH_METHODS),
    barred=st.sampled_from(["", "", "it failed"]),
    was_left=st.booleans(),
    usable_probability=st.floats(0.1, 1.0),
    number=st.integers(2, 5),
    log_ratio_after=st.none() | st.floats(-1.0, 1.0),
)
SITUATIONS = st.builds(
    situation,
    horizon_s=st.floats(0.0, 1e5),
    budget_s=st.floats(-10.0, 1000.0) | st.just(1e9),
    step_time_s=st.floats(0.01, 10.0),
    regime=st.just(LASTING) | st.builds(unknown_duration, st.floats(0.0, 1e4)),
)


def test_a_large_likely_and_lasting_gain_causes_a_switch():
    decision = decided(candidate(0.3))
    assert (decision.action, decision.plan, decision.switch_method) == ("switch", plan(2), "remesh")
    assert decision.alternatives[0].verdict == "chosen"
    assert "30%" in decision.why


def test_an_exceeded_budget_is_reconsidered_if_the_run_may_become_longer():
    """The longer slow steps have lasted, the longer the run is expected to take, and the more time
    its switches may take.
    """
    assert (
        decided(candidate(), budget_s=9.0, regime=unknown_duration(500.0)).wait_s
        == REWEIGH_AFTER * 500.0
    )
    assert decided(candidate(), budget_s=9.0).wait_s is None


@pytest.mark.parametrize(
    ("fields", "about", "reason"),
    [
        ({"gain": 0.04, "deviation": 0.0}, {}, "is required"),
        ({"deviation": 0.5}, {}, "probability"),
        ({"cost_s": 500.0}, {}, "2 times its cost is required"),
        ({"barred": "failed 1 times"}, {}, "failed 1 times"),
        ({}, {"budget_s": 9.0}, "budget for switches"),
        ({}, {"horizon_s": 30.0}, "would not break even"),
        ({"prepare_s": 1e6}, {}, "the run ends before"),
        ({}, {"blocked": "cooling down"}, "cooling down"),
        ({}, {"regime": unknown_duration(10.0)}, "may end before it breaks even"),
        ({"gain": 0.08, "deviation": 0.0, "was_left": True}, {}, "is required"),
        ({"usable_probability": 0.5}, {}, "probability"),
    ],
)
def test_each_reason_to_stay_suffices_and_is_named(fields, about, reason):
    assert decided(candidate()).action == "switch"
    decision = decided(candidate(**fields), **about)
    assert (decision.action, decision.plan) == ("stay", None)
    assert reason in decision.why


@given(
    SITUATIONS,
    st.lists(CANDIDATES, max_size=5),
    st.sampled_from([0.05, 0.2]),
    st.sampled_from([0.9, 0.99]),
)
def test_a_chosen_plan_meets_every_requirement(about, candidates, min_gain, min_probability):
    settings = replace(SETTINGS, min_gain=min_gain, min_probability=min_probability)
    decision = decide(about, candidates, settings)
    if decision.action == "stay":
        return
    chosen = next(
        each
        for each in candidates
        if each.plan == decision.plan
        and each.switch_method == decision.switch_method
        and not each.barred
    )
    shown = decision.alternatives[0]
    assert shown.probability >= min_probability
    assert shown.gain_s >= settings.gain_over_cost * shown.cost_s
    assert chosen.cost_s <= about.budget_s
    assert max(each.gain for each in candidates if each.plan == decision.plan) > min_gain


@given(SITUATIONS, st.lists(CANDIDATES, max_size=4))
def test_blocked_or_slower_candidates_are_not_chosen(about, candidates):
    assert decide(replace(about, blocked="cooling down"), candidates, SETTINGS).action == "stay"
    worse = [replace(each, log_ratio=abs(each.log_ratio)) for each in candidates]
    assert decide(about, worse, SETTINGS).action == "stay"


@given(SITUATIONS, CANDIDATES, st.floats(0.0, 0.5))
def test_more_gain_never_prevents_a_switch(about, one, more):
    better = replace(
        one,
        log_ratio=one.log_ratio - more,
        log_ratio_after=None if one.log_ratio_after is None else one.log_ratio_after - more,
    )
    if decide(about, [one], SETTINGS).action == "switch":
        assert decide(about, [better], SETTINGS).action == "switch"


@given(SITUATIONS, CANDIDATES, st.floats(0.0, 100.0))
def test_more_cost_never_causes_a_switch(about, one, more):
    if decide(about, [one], SETTINGS).action == "stay":
        assert decide(about, [replace(one, cost_s=one.cost_s + more)], SETTINGS).action == "stay"


@given(SITUATIONS, st.lists(CANDIDATES, max_size=4))
def test_decisions_are_deterministic_and_json(about, candidates):
    decision = decide(about, candidates, SETTINGS)
    assert decide(about, candidates, SETTINGS) == decision
    record = json.loads(json.dumps(decision.as_json(), allow_nan=False))
    assert record["action"] == decision.action
    assert record["why"].startswith("conditions changed")
    assert len(record["alternatives"]) == min(5, len(candidates))
    assert all(each["verdict"] for each in record["alternatives"])


def test_a_cheaper_method_wins_if_it_gains_about_as_much():
    costly, cheap = (
        candidate(0.30, 2),
        candidate(0.29, 3, switch_method="executable", cost_s=2.0, return_s=2.0),
    )
    assert decided(costly, cheap).switch_method == "executable"
    assert decided(candidate(0.45, 2), cheap).switch_method == "remesh"


def test_with_unknown_duration_it_waits_until_staying_has_cost_enough():
    """Switching there and back takes 20 s and saves 30% of the time: the way there breaks even
    after 33 s, and lasting that long is as likely as not after a third of them.
    """
    early = decided(candidate(), regime=unknown_duration(2.0))
    assert early.action == "stay"
    assert early.wait_s == pytest.approx(10 / 0.3 / 3 - 3.0, rel=0.1)
    # Besides even odds, a gain of twice the cost is required.
    assert decided(candidate(), regime=unknown_duration(200.0)).action == "switch"


def test_preparation_may_begin_before_the_wait_is_over():
    """A switch is withdrawn if the conditions end during its preparation. So one that takes 20 s to
    prepare may be decided 20 s earlier, if the conditions are likely to last these 20 s.
    """
    sooner = decided(candidate(prepare_s=20.0), regime=unknown_duration(6.0))
    later = decided(candidate(), regime=unknown_duration(6.0))
    assert (sooner.action, later.action) == ("switch", "stay")
    # A very long preparation does not begin at once.
    waits = decided(candidate(prepare_s=120.0), regime=unknown_duration(6.0))
    assert waits.action == "stay"
    assert waits.wait_s == pytest.approx(120 / 3 - 7.0)


def test_a_restart_waits_longer_for_lasting_conditions():
    """A restart takes as long again to undo."""

    def waits_s(switch_method):
        return decided(candidate(switch_method=switch_method), regime=unknown_duration(2.0)).wait_s

    assert waits_s("restart") > 3 * waits_s("remesh") > 0


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


def test_repeated_switching_raises_the_required_gain():
    """30% of 1000 s for 10 s are 30 times the cost."""
    assert decided(candidate(), horizon_s=1000.0, gain_multiplier=8.0).action == "switch"
    decision = decided(candidate(), horizon_s=1000.0, gain_multiplier=16.0)
    assert decision.action == "stay"
    assert "32 times its cost is required" in decision.why


def test_undoing_a_forced_switch_needs_no_budget():
    assert decided(candidate(is_free=True), budget_s=0.0).action == "switch"


def test_a_mandatory_switch_needs_no_gain():
    slower, slowest = candidate(-0.5, 2, cost_s=100.0), candidate(-3.0, 3)
    decision = decided(slowest, slower, mandatory=True, budget_s=0.0, blocked="cooling down")
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


def test_a_switch_needs_a_budget_for_the_way_back():
    away = candidate(cost_s=10.0, return_s=10.0)
    assert decided(away, regime=unknown_duration(300.0), budget_s=15.0).action == "stay"
    assert decided(away, regime=unknown_duration(300.0), budget_s=25.0).action == "switch"
    # If conditions are permanent, no way back has to be paid for.
    assert decided(away, budget_s=15.0).action == "switch"
