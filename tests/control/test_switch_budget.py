"""Caution grows when a run switches back and forth, decays with time, and forced switches do not
count.
"""

import pytest

from optimus_jax.config import ControlConfig
from optimus_jax.control.deciding.switch_budget import RETURN_MEMORY_S, RETURN_PENALTY, SwitchBudget

SETTINGS = ControlConfig(
    cooldown_steps=30, window_steps=20, canary_steps=5, max_switches=2, budget_share=0.01
)


def test_only_switches_by_choice_count_against_the_maximum():
    switch_budget = SwitchBudget(SETTINGS)
    for by_choice in (True, False, False):
        switch_budget.switched(0.0, by_choice=by_choice, is_return=False)
        assert not switch_budget.too_many()
    switch_budget.switched(0.0, by_choice=True, is_return=False)
    assert "2 switches" in switch_budget.too_many()
    assert not SwitchBudget(ControlConfig()).too_many()
    assert SwitchBudget(ControlConfig(max_switches=0)).too_many()


def test_the_cooldown_after_a_forced_switch_is_shorter():
    switch_budget = SwitchBudget(SETTINGS)
    switch_budget.cool(100, by_choice=True)
    assert switch_budget.too_soon(129)
    assert not switch_budget.too_soon(130)
    switch_budget.cool(100, by_choice=False)
    assert switch_budget.too_soon(109)
    assert not switch_budget.too_soon(110)


def test_switching_back_and_forth_raises_the_required_gain_for_a_while():
    switch_budget = SwitchBudget(SETTINGS)
    assert switch_budget.gain_multiplier(0.0) == 1.0
    switch_budget.switched(100.0, by_choice=True, is_return=True)
    assert switch_budget.gain_multiplier(100.0) == RETURN_PENALTY
    assert switch_budget.gain_multiplier(100.0 + 5 * RETURN_MEMORY_S) == pytest.approx(
        1.0, abs=0.02
    )
    switch_budget.switched(200.0, by_choice=True, is_return=True)
    assert switch_budget.gain_multiplier(200.0) > 0.8 * RETURN_PENALTY**2
    switch_budget.switched(200.0, by_choice=False, is_return=True)
    assert switch_budget.gain_multiplier(200.0) < RETURN_PENALTY**2


def test_the_budget_is_a_share_of_the_run():
    assert SwitchBudget(SETTINGS).budget_s(3600.0, spent_s=10.0) == pytest.approx(26.0)


def test_the_cooldown_has_fewer_steps_where_steps_are_slow():
    switch_budget = SwitchBudget(ControlConfig(cooldown_steps=30, window_steps=8, canary_steps=3))
    switch_budget.cool(100, by_choice=True)
    assert [switch_budget.cool_until(slowed) for slowed in (0.5, 1.0, 2.0, 100.0)] == [
        130,
        130,
        115,
        106,
    ]
    assert switch_budget.too_soon(120)
    assert not switch_budget.too_soon(120, 2.0)
