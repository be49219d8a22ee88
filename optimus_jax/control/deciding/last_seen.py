"""When each factor of the conditions was last seen, and the probability that one that was not seen
of late has become normal again.

A factor is seen if it is read, or if step times that it affects agree with it.
"""

from collections.abc import Iterable, Mapping

from optimus_jax.control import constants
from optimus_jax.control.deciding.value import Regime
from optimus_jax.control.signals import SignalSummary


class LastSeen:
    """The times at which factors were last seen, on the run's clock."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._newest_s = 0.0
        """When any factor was last read."""
        self._read_s: float | None = None
        """The newest time of a reading; None: there was none."""
        self._longest_s = 0.0
        """Longest time between two readings."""

    def read(self, claims: Mapping[str, SignalSummary], now_s: float) -> None:
        """Record readings. One whose time stands still while that of others advances is none.

        Args:
          claims: the usable readings, by name of the factor.
          now_s: time of the observation, which counts where there is no reading at all.
        """
        taken_s = {name: each.time_s for name, each in claims.items() if each.time_s is not None}
        read_s = max(taken_s.values(), default=None)
        if read_s is not None and self._read_s is not None and read_s > self._read_s:
            self._longest_s = max(self._longest_s, read_s - self._read_s)
        self._read_s = self._read_s if read_s is None else read_s
        is_silent = (
            read_s is None
            or now_s - read_s > constants.SILENT_AFTER_INTERVALS * self._longest_s > 0
        )
        self._newest_s = now_s if is_silent or read_s is None else read_s
        for name, time_s in taken_s.items():
            self._seen_s[name] = max(time_s, self._seen_s.get(name, time_s))

    def felt(self, names: Iterable[str], time_s: float) -> None:
        """Record that step times agree with these factors."""
        self._seen_s |= dict.fromkeys(names, time_s)

    def over(self, names: Iterable[str], regime: Regime, now_s: float) -> dict[str, float]:
        """The factors that were not seen of late, with the probability that each is normal again.

        Args:
          names: factors that were not normal when last seen.
          regime: the present regime, as it is at `now_s` if it still lasts.
          now_s: the present.
        """
        found = dict[str, float]()
        for name in names:
            seen_s = self._seen_s.get(name, self._newest_s)
            if seen_s < self._newest_s:
                elapsed_s = max(0.0, regime.elapsed_s - (now_s - seen_s))
                then = Regime(elapsed_s=elapsed_s, durations=regime.durations)
                found[name] = 1.0 - then.survival(self._newest_s - seen_s)
        return found
