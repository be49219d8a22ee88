"""How many switches a run may make, and how soon after each other."""

from optimus_jax.config import ControlConfig
from optimus_jax.control.deciding.switch_limits import SwitchLimits

SETTINGS = ControlConfig(cooldown_steps=30, window_steps=20, canary_steps=5, max_switches=2)


def test_too_many_switches_are_named():
    limits = SwitchLimits(SETTINGS)
    limits.num_switches = 1
    assert not limits.too_many()
    limits.num_switches = 2
    assert "2 switches" in limits.too_many()
    assert not SwitchLimits(ControlConfig()).too_many()
    assert SwitchLimits(ControlConfig(max_switches=0)).too_many()


def test_the_cooldown_after_a_forced_switch_is_shorter():
    limits = SwitchLimits(SETTINGS)
    limits.cool(100, by_choice=True)
    assert limits.too_soon(129)
    assert not limits.too_soon(130)
    limits.cool(100, by_choice=False)
    assert limits.too_soon(109)
    assert not limits.too_soon(110)


def test_the_cooldown_has_fewer_steps_where_steps_are_slow():
    limits = SwitchLimits(ControlConfig(cooldown_steps=30, window_steps=8, canary_steps=3))
    limits.cool(100, by_choice=True)
    assert [limits.cool_until(slowed) for slowed in (0.5, 1.0, 2.0, 100.0)] == [130, 130, 115, 106]
    assert limits.too_soon(120)
    assert not limits.too_soon(120, 2.0)
