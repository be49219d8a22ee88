"""Baseline policies: each follows its rule, and lacks what the rule does not cover."""

from dataclasses import replace

import pytest
from simulated import PRICING, SEARCHER, scenario, setup_of

from optimus_jax.config import ControlConfig
from optimus_jax.control import signals
from optimus_jax.control.signals import Observation, SignalSummary
from optimus_jax.planning.search.search import search
from optimus_jax.simulation.baseline_policies import CostModelOnly, Greedy, Static, Threshold
from optimus_jax.simulation.setup import default_plans

SETUP = setup_of(scenario())
OTHER = default_plans(PRICING, 16)[0]


def observed(step=100, lost=(), **readings):
    made = {
        name.replace("link_", "link_slowdown/"): SignalSummary(
            value=value, spread=0.0, count=9, time_s=1.0, quality="good"
        )
        for name, value in readings.items()
    }
    return Observation(
        step=step,
        time_s=float(step),
        step_times_s=(0.3,),
        readings=made,
        global_batch=128,
        seq_len=1024,
        lost_devices=frozenset(lost),
    )


def test_static_returns_to_its_plan_when_devices_are_back():
    policy = Static(SETUP.start, 16)
    assert policy.decide(observed()) is None
    policy.switched(OTHER, {})
    assert policy.decide(observed(lost={3})) is None
    assert policy.decide(observed()).plan == SETUP.start


def test_greedy_switches_to_the_plan_predicted_fastest():
    policy = Greedy(SETUP, SEARCHER)
    assert policy.decide(observed(link_intra_host=1.0, link_inter_host=1.0)) is None
    slow = policy.decide(observed(link_intra_host=1.0, link_inter_host=30.0))
    assert slow.plan != SETUP.start
    policy.switched(slow.plan, {})
    assert policy.decide(observed(link_intra_host=1.0, link_inter_host=30.0)) is None
    assert policy.decide(observed(link_intra_host=1.0, link_inter_host=1.0)).plan == SETUP.start


def test_greedy_does_not_retry_a_failed_plan():
    policy = Greedy(SETUP, SEARCHER)
    slow = policy.decide(observed(link_intra_host=1.0, link_inter_host=30.0)).plan
    policy.failed(slow, "no memory")
    again = policy.decide(observed(link_intra_host=1.0, link_inter_host=30.0))
    assert again is None or again.plan != slow


def test_greedy_plans_for_the_remaining_devices():
    decision = Greedy(SETUP, SEARCHER).decide(observed(lost={3}))
    assert decision.plan.num_devices == 8
    assert decision.without == {3}


def test_cost_model_only_switches_if_the_switch_breaks_even():
    slow = {"link_intra_host": 1.0, "link_inter_host": 30.0}
    policy = CostModelOnly(setup_of(scenario(steps=4000)), SEARCHER, ControlConfig())
    assert policy.decide(observed(step=3998, **slow)) is None
    assert policy.decide(observed(step=100, **slow)).plan != SETUP.start
    assert policy.decide(observed(step=110, **slow)) is None, "it has just decided"


@pytest.mark.parametrize(
    ("throughput", "memory", "utilisation", "tensor"),
    [(95.0, 0.95, 0.3, None), (80.0, 0.95, 0.3, 8), (80.0, 0.5, 0.3, 2), (80.0, 0.5, 0.9, None)],
)
def test_a_threshold_policy_resizes_tensor_by_memory_and_utilisation(
    throughput, memory, utilisation, tensor
):
    # 25 heads divide by no power of two: only the feed-forward is split.
    pricing = replace(
        PRICING, config=PRICING.config.with_values({"parallel.rules": ("heads=none",)})
    )
    fixed = replace(
        pricing, config=pricing.config.with_values({"parallel.mesh": "data=4,tensor=4"})
    )
    setup = replace(SETUP, assumed=(pricing,), start=search(fixed, top=1).best[0].plan)
    assert tensor_after(setup, throughput, memory, utilisation) == tensor


def test_a_threshold_policy_stays_if_tensor_size_cannot_double():
    assert tensor_after(SETUP, 80.0, 0.95, 0.3) is None, "25 heads do not divide by 2"


def tensor_after(setup, throughput, memory, utilisation):
    """Tensor axis size of the plan switched to once throughput has fallen from 100; None:
    it stays.
    """
    policy = Threshold(setup)
    for step in range(1, 10):
        assert policy.decide(observed(step, tokens_per_s=100.0)) is None
    decision = policy.decide(
        observed(
            100,
            **{
                signals.TOKENS_PER_S: throughput,
                signals.MEMORY_SHARE: memory,
                signals.UTILISATION: utilisation,
            },
        )
    )
    return decision and decision.plan.axes.tensor
