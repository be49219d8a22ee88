"""A slow process that the run does without: how likely it is to have recovered, and when to try it
again.
"""

from dataclasses import dataclass, replace

from optimus_jax.control.policy import Regime

LOOK_AGAIN = 0.1
"""Of the time that it has been left out: at least so much lies between two looks."""


@dataclass(frozen=True, kw_only=True)
class ExcludedDevices:
    """One that was too slow to wait for. Once it is left out, nothing tells how slow it is."""

    devices: frozenset[int]
    """Its ids."""
    skew: float
    """How slow it was, as a factor on the time of computing."""
    regime: Regime
    """For how long it had been slow when it was last known to be, and how long that lasts."""
    at_s: float
    """When that was."""

    def recovered(self, time_s: float) -> float:
        """Probability that it is as fast as others again."""
        return 1.0 - self.regime.survival(time_s - self.at_s)

    def due_s(self, time_s: float, probability: float) -> float | None:
        """When it will have recovered with this probability; None: never."""
        durations = self.regime.durations
        if durations is None:
            return None
        return max(
            self.at_s + durations.over_s(self.regime.elapsed_s, probability),
            time_s + LOOK_AGAIN * (time_s - self.at_s),
        )

    def still_slow(self, time_s: float) -> "ExcludedDevices":
        """It was tried again, in vain: it has been slow for longer than was known, and is expected
        to be so for longer.
        """
        return replace(
            self,
            regime=replace(self.regime, elapsed_s=self.regime.elapsed_s + time_s - self.at_s),
            at_s=time_s,
        )
