"""What switches have cost a run so far, less what they have measurably saved.

A switch is charged with the time for which it delayed the run. While the run is in the
circumstances in which it left a plan, every step then pays the difference to that plan's level of
step times. What is owed never falls below zero, so that old savings do not pay for new gambles.
"""

import math
from collections.abc import Hashable

from optimus_jax.config import ControlConfig


class Account:
    """The costs and savings of one run's switches.

    Args:
      settings: the user's settings.
    """

    def __init__(self, settings: ControlConfig) -> None:
        self._share = settings.budget_share
        self.owed_s = 0.0
        """Costs that no saving has paid for yet, in seconds."""
        self.spent_s = 0.0
        """All costs, in seconds."""
        self._levels: dict[Hashable, float] = {}
        """Level of step times of the plan that was left in these circumstances, as a logarithm."""

    def charge(self, time_s: float) -> None:
        """Add a cost."""
        if math.isfinite(time_s):
            self.owed_s = max(0.0, self.owed_s + time_s)
            self.spent_s += time_s

    def left(self, circumstances: Hashable, level: float | None) -> None:
        """Record that the run left a plan with this level of step times (None: unknown). A level
        from an earlier switch in the same circumstances stays.
        """
        if level is not None:
            self._levels.setdefault(circumstances, level)

    def stepped(self, circumstances: Hashable, level: float | None, num_steps: int) -> None:
        """Record steps at this level of step times; None: it is unknown yet."""
        before = self._levels.get(circumstances)
        if before is not None and level is not None:
            saved_s = num_steps * (math.exp(before) - math.exp(level))
            self.owed_s = max(0.0, self.owed_s - saved_s)

    def allows_s(self, whole_s: float) -> float:
        """The loss that the next switch may risk, in a run of `whole_s` seconds."""
        return self._share * whole_s - self.owed_s
