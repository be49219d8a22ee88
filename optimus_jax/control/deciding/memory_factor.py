"""How far a run's estimates of memory are off, learnt from the memory in use under its plans.

True memory is the estimate times a factor. Factors of plans scatter around that of the run, which
is carried from plan to plan. All shares are of a device's memory.
"""

import math
from dataclasses import dataclass, field

from optimus_jax.control import constants


def _first_variance() -> float:
    return constants.MEMORY_RUN_STD**2


@dataclass(frozen=True)
class MemoryFactor:
    """Belief about true over estimated memory: a normal distribution."""

    mean: float = 1.0
    variance: float = field(default_factory=_first_variance)
    """Variance of the run's factor."""

    @property
    def plan_std(self) -> float:
        """Standard deviation of the factor of a plan that has not run."""
        return math.sqrt(self.variance + constants.MEMORY_PLAN_STD**2)

    def learnt(self, needed: float, used: float) -> tuple[float, "MemoryFactor"]:
        """The factor of a plan, and the belief, once the plan's own memory in use is known.

        Args:
          needed: share that the plan is estimated to need.
          used: share that it uses.
        """
        plan_variance, surprise = self.plan_std**2, used / needed - self.mean
        spread = plan_variance + (constants.MEMORY_READING_STD / needed) ** 2
        own = self.mean + plan_variance / spread * surprise
        gain = self.variance / spread
        return own, MemoryFactor(self.mean + gain * surprise, self.variance * (1 - gain))

    def explained(
        self, needed: float, used: float, expected: float
    ) -> tuple[float, "MemoryFactor"]:
        """The factor of a plan, and the belief, after the first reading under the plan.

        Three explanations compete: as much is taken as before, nothing is, or any other share.
        The last one teaches nothing about the estimate.

        Args:
          needed: share that the plan is estimated to need.
          used: share in use.
          expected: share that something else has taken if nothing has changed.
        """
        unchanged = constants.MEMORY_UNCHANGED_PROBABILITY
        other, std = 1 - unchanged, math.hypot(needed * self.plan_std, constants.MEMORY_READING_STD)
        explanations = [
            (prior * _density(used - taken - needed * self.mean, std), taken)
            for prior, taken in ((unchanged, expected), (other, 0.0))
        ]
        likelihood, taken = max(explanations)
        # Another share is as likely anywhere from 0 to 1: density 1.
        return self.learnt(needed, used - taken) if likelihood > other else (self.mean, self)


def _density(deviation: float, std: float) -> float:
    """Density of a normal distribution at this distance from its mean."""
    return math.exp(-0.5 * (deviation / std) ** 2) / (std * math.sqrt(2 * math.pi))
