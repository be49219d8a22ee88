"""Measured signals of a running job at a step boundary, summarised over windows of samples.

A *sample* is one measured number. A *summary* of a window of the newest samples has their median
and a spread that a single outlier (a checkpoint, a compilation) does not move. What was not
measured is UNKNOWN, never a placeholder. Times are on the run's clock: seconds of a clock that
never jumps, from any origin.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from optimus_jax.robust import deviation_from, median_of_sorted

Quality = Literal["good", "few", "stale", "unknown"]
"""good: enough new samples; few: new ones, but less than FEW (where a window is meant to hold as
many); stale: the newest is older than its source should let it be."""
FEW = 3
"""Samples below which a median still follows a single outlier."""

STEP_TIME_S = "step_time_s"
DATA_WAIT_S = "data_wait_s"
DISPATCH_S = "dispatch_s"
TOKENS_PER_S = "tokens_per_s"
MFU = "mfu"
MEMORY_SHARE = "memory_share"
MEMORY_PEAK_SHARE = "memory_peak_share"
UTILISATION = "utilisation"
CLOCK_SHARE = "clock_share"
THROTTLED_SHARE = "throttled_share"
POWER_W = "power_w"
TEMPERATURE_C = "temperature_c"
ECC_ERRORS = "ecc_errors"
COMPUTE_SLOWDOWN = "compute_slowdown"
LINK_SLOWDOWN = "link_slowdown/"
"""Before `inside`, `between` or the name of a mesh axis."""
PROCESS_SKEW = "process_skew"
STRAGGLER = "straggler"
PADDING_SHARE = "padding_share"
LENGTH_MEDIAN = "length_median"
LOSS_SLOPE = "loss_slope"
HEARTBEAT_AGE_S = "heartbeat_age_s"


@dataclass(frozen=True, kw_only=True)
class SignalSummary:
    """Summary of the newest samples of one signal: median, spread, count, age and quality."""

    value: float | None
    """Their median, in the signal's unit; None exactly if it is unknown."""
    spread: float | None
    """Robust standard deviation of a sample (1.4826 times the median absolute deviation), same
    unit; None below two samples."""
    count: int
    """Number of samples."""
    time_s: float | None
    """When the newest was taken, on the run's clock; None if there is none."""
    quality: Quality
    """How far to trust it."""


UNKNOWN = SignalSummary(value=None, spread=None, count=0, time_s=None, quality="unknown")
"""Summary of a signal that has not been measured."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All measured signals at a step boundary."""

    step: int
    """The last one done."""
    time_s: float
    """Now, on the run's clock."""
    step_times_s: tuple[float, ...]
    """Of the steps done since the last observation, seconds each; may be empty."""
    readings: Mapping[str, SignalSummary]
    """Summaries by signal name; a missing signal is unknown."""
    global_batch: int
    """Examples of a step in the phase that the run is in."""
    seq_len: int
    """Tokens of an example in that phase."""
    lost_devices: frozenset[int]
    """Ids of devices reported bad."""

    def reading(self, name: str) -> SignalSummary:
        """Summary of a signal; UNKNOWN if there is none."""
        return self.readings.get(name, UNKNOWN)


class Window:
    """The newest samples of one signal.

    Args:
      size: how many are kept.
    """

    def __init__(self, size: int) -> None:
        self._samples: deque[float] = deque(maxlen=size)
        self._enough = min(FEW, size)
        self._stale_s: float | None = None
        self._time_s: float | None = None
        self._reading: SignalSummary | None = None

    def add(self, value: float, time_s: float, stale_s: float | None = None) -> None:
        """Take a sample; the reading is stale once it is older than `stale_s` seconds, if that is
        given.
        """
        self._samples.append(value)
        self._time_s, self._stale_s, self._reading = time_s, stale_s, None

    def clear(self) -> None:
        """Forget all: what comes next is of another plan or phase."""
        self._samples.clear()
        self._time_s = self._reading = None

    def reading(self, now_s: float) -> SignalSummary:
        """What the samples say, seen from `now_s`."""
        if self._time_s is None:
            return UNKNOWN
        stale = self._stale_s is not None and now_s - self._time_s > self._stale_s
        # Most signals have no new sample in most steps: the reading is kept until it would be
        # another one.
        if self._reading is None or stale != (self._reading.quality == "stale"):
            quality: Quality = (
                "stale" if stale else "few" if len(self._samples) < self._enough else "good"
            )
            self._reading = summary(self._samples, self._time_s, quality)
        return self._reading


def summary(samples: Iterable[float], time_s: float, quality: Quality) -> SignalSummary:
    """The reading of at least one sample."""
    ordered = sorted(samples)
    value, spread = median_of_sorted(ordered), None
    if len(ordered) > 1:
        spread = deviation_from(value, ordered)
    return SignalSummary(
        value=value, spread=spread, count=len(ordered), time_s=time_s, quality=quality
    )
