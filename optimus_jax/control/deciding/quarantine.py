"""Quarantine of failed plans: exponential backoff, doubled with every failure of a plan."""

import math

from optimus_jax.plan import Plan

LONGEST = 10
"""Largest number of doublings."""


class Quarantine:
    """Tracks plans that must not be tried now.

    Args:
      steps: base length of a quarantine; the first one is twice as long.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._failures: dict[str, tuple[int, int, str]] = {}

    def add(self, plan: Plan, step: int, why: str = "it was slower than the plan before") -> None:
        """Record that the plan failed at this step."""
        number = self._failures.get(plan.digest, (0, 0, ""))[0] + 1
        self._failures[plan.digest] = (number, step + self._steps * 2 ** min(number, LONGEST), why)

    def first_end(self, step: int) -> float:
        """The next step at which the quarantine of a plan ends; infinite: no plan is in
        quarantine.
        """
        return min(
            (until for _, until, _ in self._failures.values() if until > step), default=math.inf
        )

    def why(self, plan: Plan, step: int) -> str:
        """Why the plan must not be tried at this step; empty: it may be tried."""
        number, until, why = self._failures.get(plan.digest, (0, 0, ""))
        return (
            f"failed {number} times ({why}), not again before step {until}" if step < until else ""
        )
