"""Caution grows with going to and fro, fades with time, and what had to be is not held against a
run.
"""

import pytest

from optimus_jax.config import ControlConfig
from optimus_jax.control.deciding.switch_budget import FORGOTTEN_S, FRO, Allowance

SETTINGS = ControlConfig(
    cooldown_steps=30, window_steps=20, canary_steps=5, max_switches=2, budget_share=0.01
)


def test_switches_by_choice_are_counted():
    allowance = Allowance(SETTINGS)
    for by_choice in (True, False, False):
        allowance.switched(0.0, by_choice=by_choice, is_return=False)
        assert not allowance.too_many()
    allowance.switched(0.0, by_choice=True, is_return=False)
    assert "2 switches" in allowance.too_many()
    assert not Allowance(ControlConfig()).too_many()
    assert Allowance(ControlConfig(max_switches=0)).too_many()


def test_after_a_switch_that_had_to_be_the_next_may_come_sooner():
    allowance = Allowance(SETTINGS)
    allowance.cool(100, by_choice=True)
    assert allowance.too_soon(129)
    assert not allowance.too_soon(130)
    allowance.cool(100, by_choice=False)
    assert allowance.too_soon(109)
    assert not allowance.too_soon(110)


def test_to_and_fro_teaches_caution_which_fades():
    allowance = Allowance(SETTINGS)
    assert allowance.caution(0.0) == 1.0
    allowance.switched(100.0, by_choice=True, is_return=True)
    assert allowance.caution(100.0) == FRO
    assert allowance.caution(100.0 + 5 * FORGOTTEN_S) == pytest.approx(1.0, abs=0.02)
    allowance.switched(200.0, by_choice=True, is_return=True)
    assert allowance.caution(200.0) > 0.8 * FRO**2
    allowance.switched(200.0, by_choice=False, is_return=True)
    assert allowance.caution(200.0) < FRO**2


def test_the_budget_is_a_share_of_the_run():
    assert Allowance(SETTINGS).budget_s(3600.0, spent_s=10.0) == pytest.approx(26.0)


def test_cooling_down_takes_fewer_steps_where_they_are_slow():
    allowance = Allowance(ControlConfig(cooldown_steps=30, window_steps=8, canary_steps=3))
    allowance.cool(100, by_choice=True)
    assert [allowance.cool_until(slowed) for slowed in (0.5, 1.0, 2.0, 100.0)] == [
        130,
        130,
        115,
        106,
    ]
    assert allowance.too_soon(120)
    assert not allowance.too_soon(120, 2.0)
