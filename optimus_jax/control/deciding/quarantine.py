"""Plans that failed: each is left alone for a while, twice as long after every further failure."""

import math

from optimus_jax.plan import Plan

LONGEST = 10
"""Doublings after which it does not become longer."""


class Quarantine:
    """Which plans are not to be tried now.

    Args:
      steps: of the first quarantine.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._failures: dict[str, tuple[int, int, str]] = {}

    def add(self, plan: Plan, step: int, why: str = "it was slower than the plan before") -> None:
        """It failed at this step."""
        number = self._failures.get(plan.digest, (0, 0, ""))[0] + 1
        self._failures[plan.digest] = (number, step + self._steps * 2 ** min(number, LONGEST), why)

    def first_end(self, step: int) -> float:
        """The first step after this one from which on a plan may be tried that may not be now;
        infinite: there is none.
        """
        return min(
            (until for _, until, _ in self._failures.values() if until > step), default=math.inf
        )

    def why(self, plan: Plan, step: int) -> str:
        """Why it is not to be tried at this step; empty: it may be."""
        number, until, why = self._failures.get(plan.digest, (0, 0, ""))
        return (
            f"failed {number} times ({why}), not again before step {until}" if step < until else ""
        )
