"""How far a run's estimates of memory are off, learnt from the memory in use under its plans.

True memory is the estimate times a factor. Factors of plans scatter around that of the run, which
is carried from plan to plan. All shares are of a device's memory.
"""

import math
from dataclasses import dataclass

RUN_STD = 0.08
"""Standard deviation of the run's factor before anything was measured. If it is too small, what
estimates lack is taken for memory that something else uses; if too large, the reverse."""
PLAN_STD = 0.03
"""Standard deviation of a plan's factor around that of the run. Estimates are 2.3% off on average
(benchmarks/results/planner-memory.md). If it is too small, the run's factor follows every plan's
own error; if too large, it is learnt slowly."""
READING_STD = 0.01
"""Standard deviation of the share in use under the same plan. A change of less counts as none."""
UNCHANGED_P = 0.9
"""Prior probability that a new plan finds as much memory taken as the plan before. If it is too
large, sudden use by something else is taken for an error of the estimate."""


@dataclass(frozen=True)
class MemoryFactor:
    """Belief about true over estimated memory: a normal distribution."""

    mean: float = 1.0
    variance: float = RUN_STD**2
    """Variance of the run's factor."""

    @property
    def plan_std(self) -> float:
        """Standard deviation of the factor of a plan that has not run."""
        return math.sqrt(self.variance + PLAN_STD**2)

    def learnt(self, needed: float, used: float) -> tuple[float, "MemoryFactor"]:
        """The factor of a plan, and the belief, once the plan's own memory in use is known.

        Args:
          needed: share that the plan is estimated to need.
          used: share that it uses.
        """
        plan_variance, surprise = self.plan_std**2, used / needed - self.mean
        spread = plan_variance + (READING_STD / needed) ** 2
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
        other, std = 1 - UNCHANGED_P, math.hypot(needed * self.plan_std, READING_STD)
        explanations = [
            (prior * _density(used - taken - needed * self.mean, std), taken)
            for prior, taken in ((UNCHANGED_P, expected), (other, 0.0))
        ]
        likelihood, taken = max(explanations)
        # Another share is as likely anywhere from 0 to 1: density 1.
        return self.learnt(needed, used - taken) if likelihood > other else (self.mean, self)


def _density(deviation: float, std: float) -> float:
    """Density of a normal distribution at this distance from its mean."""
    return math.exp(-0.5 * (deviation / std) ** 2) / (std * math.sqrt(2 * math.pi))
