"""Limits on further switches of a run: their number, and the cooldown after the last one."""

import math

from optimus_jax.config import ControlConfig


class SwitchLimits:
    """The limits on further switches of one run.

    Args:
      settings: the user's settings.
    """

    def __init__(self, settings: ControlConfig) -> None:
        self._settings = settings
        self.num_switches = 0
        """Number of switches made by choice."""
        self._last_step, self._cool_steps = 0, 0

    def cool(self, step: int, *, by_choice: bool) -> None:
        """Begin the cooldown of a switch that was made or failed after this step.

        After a mandatory switch, the next one may come as soon as step times are known.
        """
        self._last_step = step
        self._cool_steps = (
            max(self._settings.cooldown_steps, self._settings.window_steps)
            if by_choice
            else 2 * self._settings.canary_steps
        )

    def rewind(self, step: int) -> None:
        """The run resumes after this step from a checkpoint, and repeats later steps. The cooldown
        begins here if its switch came later.
        """
        self._last_step = min(self._last_step, step)

    def cool_until(self, slowed: float = 1.0) -> int:
        """Step before which no other switch is made by choice.

        Args:
          slowed: step time over that in normal conditions. The cooldown is meant to last as long
            as its number of normal steps.
        """
        return self._last_step + max(
            min(2 * self._settings.canary_steps, self._cool_steps),
            math.ceil(self._cool_steps / max(1.0, slowed)),
        )

    def too_many(self) -> str:
        """Why no further switch is allowed; empty: one is."""
        most = self._settings.max_switches
        return (
            f"{most} switches are the most that the settings allow"
            if most is not None and self.num_switches >= most
            else ""
        )

    def too_soon(self, step: int, slowed: float = 1.0) -> str:
        """Why no switch is allowed yet at this step; empty: one is. `slowed` as in `cool_until`."""
        until = self.cool_until(slowed)
        return f"cooling down after a switch, until step {until}" if step < until else ""
