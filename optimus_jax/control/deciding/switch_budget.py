"""Which switches a run may still make: how many, how soon after the last, for how much time, and
for how large a gain.
"""

import math

from optimus_jax.config import ControlConfig

FRO = 10.0
"""What a gain has to be worth more after each going to and fro."""
FORGOTTEN_S = 3600.0
"""Time in which caution after going to and fro falls to a third, as a power of FRO."""


class SwitchBudget:
    """Of one run.

    Args:
      settings: of the user.
    """

    def __init__(self, settings: ControlConfig) -> None:
        self._settings = settings
        self.num_switches = 0
        """That the run had a choice about."""
        self._last_step, self._cool_steps = 0, 0
        self._returned_s: list[float] = []

    def cool(self, step: int, *, by_choice: bool) -> None:
        """One was made or failed after this step.

        After one that had to be, the next may come as soon as step times are known.
        """
        self._last_step = step
        self._cool_steps = (
            max(self._settings.cooldown_steps, self._settings.window_steps)
            if by_choice
            else 2 * self._settings.canary_steps
        )

    def rewind(self, step: int) -> None:
        """The run goes on after this step, from a checkpoint: what was done later is done once
        more, and cooling down begins here.
        """
        self._last_step = min(self._last_step, step)

    def cool_until(self, slowed: float = 1.0) -> int:
        """Step before which no other is made by choice.

        Args:
          slowed: what a step takes over what it takes in normal conditions: cooling down is meant
            to last as long as so many normal steps.
        """
        return self._last_step + max(
            min(2 * self._settings.canary_steps, self._cool_steps),
            math.ceil(self._cool_steps / max(1.0, slowed)),
        )

    def switched(self, time_s: float, *, by_choice: bool, is_return: bool) -> None:
        """One was made.

        Args:
          is_return: to a plan that the run had left of its own accord.
        """
        self.num_switches += by_choice
        self._returned_s += [time_s] * (by_choice and is_return)

    def too_many(self) -> str:
        """Why there may be no more; empty: there may."""
        most = self._settings.max_switches
        return (
            f"{most} switches are the most that the settings allow"
            if most is not None and self.num_switches >= most
            else ""
        )

    def too_soon(self, step: int, slowed: float = 1.0) -> str:
        """Why there may be none after this step; empty: there may. `slowed` as for `cool_until`."""
        until = self.cool_until(slowed)
        return f"cooling down after a switch, until step {until}" if step < until else ""

    def caution(self, time_s: float) -> float:
        """FRO times as much for every time that the run went back to a plan, as long as that is not
        forgotten.
        """
        return FRO ** sum(
            math.exp(-(time_s - returned_s) / FORGOTTEN_S) for returned_s in self._returned_s
        )

    def budget_s(self, whole_s: float, spent_s: float) -> float:
        """What switches may still take of a run that takes `whole_s`."""
        return self._settings.budget_share * whole_s - spent_s
