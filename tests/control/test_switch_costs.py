"""Costs of switching: the initial estimates, and how soon measurements replace them."""

import math
from dataclasses import replace

import pytest
from fleet import PRICING, plan_on

from optimus_jax.control import constants
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.switch_costs import CostModel, SwitchCosts
from optimus_jax.control.policy import SWITCH_METHODS, SwitchMethod
from optimus_jax.plan import Plan

PLAN, WHOLE = plan_on("fsdp=64"), plan_on("data=8,fsdp=8")
"""The second holds eight times as much of the state on each device."""


def expected(
    model: CostModel,
    switch_method: SwitchMethod = "remesh",
    plan: Plan = PLAN,
    *,
    compiled: bool = False,
) -> float:
    return model.expected_s(switch_method, PLAN, plan, PRICING, compiled=compiled)


def learn(
    model: CostModel, delay_s: float, switch_method: SwitchMethod = "remesh", **fields
) -> None:
    model.learn(switch_method, PLAN, PLAN, PRICING, delay_s=delay_s, **fields)


def test_methods_that_change_more_cost_more():
    costs = [expected(CostModel(), switch_method) for switch_method in SWITCH_METHODS]
    assert costs == sorted(costs)
    assert costs[-1] > 10 * costs[1]


def test_preparation_time_is_learnt():
    model = CostModel(SwitchCosts(prepare_s=30.0))
    assert model.prepare_s("remesh", compiled=False) == 30.0
    assert (
        model.prepare_s("remesh", compiled=True)
        == model.prepare_s("restart", compiled=False)
        == 0.0
    )
    for time_s in (80.0, 90.0, 2000.0, -1.0, math.inf):
        model.prepared(time_s)
    assert model.prepare_s("executable", compiled=False) == 90.0


def test_a_restart_writes_each_hosts_state_once():
    """With ZeRO 0 all eight devices of a host hold the same state; above it each holds a part."""
    free = SwitchCosts(
        failure=0.0, restart_s=0.0, compile_tax_s=0.0, stop_s=0.0, verify_s=0.0, first_steps_s=0.0
    )

    def host_bytes(plan: Plan) -> float:
        return expected(CostModel(free), "restart", plan) * constants.CHECKPOINT_BYTES_PER_S / 2

    split, whole = plan_on("fsdp=64"), plan_on("fsdp=64", zero=0)
    assert host_bytes(split) == pytest.approx(8 * PRICING.memory(split).states)
    assert host_bytes(whole) == pytest.approx(PRICING.memory(whole).states)


def test_moving_more_bytes_costs_more_and_compiled_plans_cost_less():
    model = CostModel()
    assert expected(model, plan=WHOLE) > expected(model) > expected(model, compiled=True)
    assert expected(model, "executable", WHOLE) == expected(model, "executable")


def test_state_already_on_each_host_does_not_wait_for_a_slow_link():
    slow = Conditions(inter_host=100.0).applied(PRICING)
    times_s = {
        mesh: [
            CostModel().expected_s("remesh", plan_on(mesh), PLAN, pricing, compiled=True)
            for pricing in (PRICING, slow)
        ]
        for mesh in ("fsdp=64", "data=8,fsdp=8", "pipe=8,data=8")
    }
    assert times_s["data=8,fsdp=8"][1] == pytest.approx(times_s["data=8,fsdp=8"][0]), (
        "every host holds a whole copy"
    )
    for mesh in ("fsdp=64", "pipe=8,data=8"):
        assert times_s[mesh][1] > 2 * times_s[mesh][0]


def test_the_risk_of_failure_adds_to_the_cost():
    assert expected(CostModel(SwitchCosts(failure=0.5))) == pytest.approx(
        expected(CostModel(SwitchCosts(failure=0.0))) * 1.5
    )


def test_measured_switches_soon_replace_the_estimates():
    free = SwitchCosts(failure=0.0, compile_tax_s=0.0, first_steps_s=0.0)
    model = CostModel(free)
    before, others = expected(model), expected(model, "executable")
    distances = []
    for _ in range(6):
        learn(model, 10 * before)
        distances.append(abs(math.log(expected(model) / (10 * before))))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] < 0.5 * math.log(10)
    assert distances[-1] < 0.05 * math.log(10)
    # The other methods learn what they have in common with it, though less.
    assert 2 * others < expected(model, "executable") < 10 * others


def test_what_compiling_takes_is_no_cost_of_a_plan_that_is_compiled():
    model = CostModel(SwitchCosts(compile_tax_s=3.0))
    compiled_s = expected(model, compiled=True)
    for _ in range(6):
        learn(model, 0.5, compile_tax_s=300.0)
    assert expected(model) > 150.0
    assert expected(model, compiled=True) < compiled_s
    learn(model, math.nan, compile_tax_s=math.nan)
    assert math.isfinite(expected(model))


@pytest.mark.parametrize("one_process", [False, True])
def test_restarts_and_moves_in_memory_teach_each_other_nothing(one_process):
    model = CostModel(SwitchCosts(subset_restarts=not one_process))
    restart, subset = expected(model, "restart"), expected(model, "subset")
    learn(model, 0.1 * expected(model))
    assert expected(model, "restart") == restart
    assert (expected(model, "subset") == subset) == (not one_process)
    move = expected(model)
    learn(model, 3 * restart, "restart", compile_tax_s=0.0)
    assert expected(model) == move
    assert expected(model, "restart") > 2 * restart


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_costs_that_are_negative_or_not_finite_are_ignored(wrong):
    model = CostModel()
    before = expected(model)
    learn(model, wrong)
    assert expected(model) == before


def test_a_link_of_unknown_bandwidth_has_a_finite_cost():
    unknown = replace(
        PRICING.cluster,
        intra_host=replace(PRICING.cluster.intra_host, bytes_per_s=None),
        inter_host=None,
    )
    assert math.isfinite(
        CostModel().expected_s(
            "remesh", PLAN, PLAN, replace(PRICING, cluster=unknown), compiled=False
        )
    )
