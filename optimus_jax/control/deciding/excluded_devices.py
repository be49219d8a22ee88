"""Devices of a slow process that the run excludes: the probability that the process has recovered,
and when to try it again.
"""

from dataclasses import dataclass, replace

from optimus_jax.control.deciding.value import Regime

MIN_RECHECK_WAIT = 0.1
"""Shortest time between two checks, as a share of the time since the exclusion."""


@dataclass(frozen=True, kw_only=True)
class ExcludedDevices:
    """The devices of a process that was too slow. While excluded, its speed is not measured."""

    devices: frozenset[int]
    """Ids of the devices."""
    skew: float
    """Its compute time over that of other processes when it was excluded."""
    regime: Regime
    """How long it had been slow when last measured, and how long slowness is expected to last."""
    at_s: float
    """When it was last known to be slow, on the run's clock."""

    def recovered(self, time_s: float) -> float:
        """Probability that the process has recovered."""
        return 1.0 - self.regime.survival(time_s - self.at_s)

    def due_s(self, time_s: float, probability: float) -> float | None:
        """When the process has recovered with this probability; None: never."""
        durations = self.regime.durations
        if durations is None:
            return None
        return max(
            self.at_s + durations.over_s(self.regime.elapsed_s, probability),
            time_s + MIN_RECHECK_WAIT * (time_s - self.at_s),
        )

    def still_slow(self, time_s: float) -> "ExcludedDevices":
        """The same exclusion after a failed retry at `time_s`. The process has now been slow for
        longer, so it is expected to stay slow for longer.
        """
        return replace(
            self,
            regime=replace(self.regime, elapsed_s=self.regime.elapsed_s + time_s - self.at_s),
            at_s=time_s,
        )
