"""Measured signals of a running job at a step boundary, summarised over windows of samples.

A *sample* is one measured number. A *summary* of a window of the newest samples has their median
and a spread that a single outlier (a checkpoint, a compilation) does not move. A signal that was
not measured is UNKNOWN, never a placeholder. Times are on the run's clock: seconds of a monotonic
clock with any origin.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from optimus_jax.planning.profiles.cluster import OLD_LINK_NAMES
from optimus_jax.robust import deviation_from, median_of_sorted

Quality = Literal["good", "few", "stale", "unknown"]
"""good: enough recent samples; few: recent samples, but fewer than FEW (if the window can hold that
many); stale: the newest sample is older than its source should let it become; unknown: no
sample."""
FEW = 3
"""Smallest number of samples whose median a single outlier does not move."""

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
"""Prefix of signal names; `intra_host`, `inter_host` or the name of a mesh axis follows."""
OLD_SIGNAL_NAMES = {LINK_SLOWDOWN + old: LINK_SLOWDOWN + new for old, new in OLD_LINK_NAMES.items()}
"""Earlier names of signals, in runs of older versions and in scenarios."""
PROCESS_TIME = "process_time/"
"""Prefix of signal names; the number of a process follows: its time for a piece of computing, over
that of the median process. In a run of one process it is the id of a device that the run leaves
out, and the time is over that of devices in use."""
REPLACED_SIGNALS = dict.fromkeys(("process_skew", "straggler"), PROCESS_TIME + "*")
"""Signals of earlier versions, in scenarios, with those that have replaced them."""
PADDING_SHARE = "padding_share"
LENGTH_MEDIAN = "length_median"
LOSS_SLOPE = "loss_slope"
HEARTBEAT_AGE_S = "heartbeat_age_s"


@dataclass(frozen=True, kw_only=True)
class SignalSummary:
    """Summary of the newest samples of one signal: median, spread, count, age and quality."""

    value: float | None
    """Median of the samples, in the signal's unit; None if and only if it is unknown."""
    spread: float | None
    """Robust standard deviation of a sample (1.4826 times the median absolute deviation), in the
    same unit; None: there are fewer than two samples."""
    count: int
    """Number of samples."""
    time_s: float | None
    """When the newest sample was taken, on the run's clock; None: there is none."""
    quality: Quality
    """How far the value can be trusted."""


UNKNOWN = SignalSummary(value=None, spread=None, count=0, time_s=None, quality="unknown")
"""Summary of a signal that has not been measured."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All measured signals at a step boundary."""

    step: int
    """The last step done."""
    time_s: float
    """Time of the observation, on the run's clock."""
    step_times_s: tuple[float, ...]
    """Times of the steps done since the last observation, in seconds; may be empty."""
    readings: Mapping[str, SignalSummary]
    """Summaries by signal name; a missing signal is unknown."""
    global_batch: int
    """Examples of a step in the present phase."""
    seq_len: int
    """Tokens of an example in the present phase."""
    lost_devices: frozenset[int]
    """Ids of devices that were reported bad."""
    data_waits_s: tuple[float, ...] = ()
    """For how long of each of the step times devices may have waited for a batch, in seconds;
    empty: unknown."""

    def reading(self, name: str) -> SignalSummary:
        """Summary of a signal; UNKNOWN: it has none."""
        return self.readings.get(name, UNKNOWN)


class Window:
    """The newest samples of one signal.

    Args:
      size: largest number of samples.
    """

    def __init__(self, size: int) -> None:
        self._samples: deque[float] = deque(maxlen=size)
        self._enough = min(FEW, size)
        self._stale_s: float | None = None
        self._time_s: float | None = None
        self._reading: SignalSummary | None = None

    def add(self, value: float, time_s: float, stale_s: float | None = None) -> None:
        """Add a sample. `stale_s`: age in seconds beyond which it is stale; None: never stale."""
        self._samples.append(value)
        self._time_s, self._stale_s, self._reading = time_s, stale_s, None

    def clear(self) -> None:
        """Forget all samples, before those of another plan or phase."""
        self._samples.clear()
        self._time_s = self._reading = None

    def reading(self, now_s: float) -> SignalSummary:
        """Summary of the samples at time `now_s`."""
        if self._time_s is None:
            return UNKNOWN
        stale = self._stale_s is not None and now_s - self._time_s > self._stale_s
        # Most signals have no new sample in most steps, so the summary is cached until it changes.
        if self._reading is None or stale != (self._reading.quality == "stale"):
            quality: Quality = (
                "stale" if stale else "few" if len(self._samples) < self._enough else "good"
            )
            self._reading = summary(self._samples, self._time_s, quality)
        return self._reading


def summary(samples: Iterable[float], time_s: float, quality: Quality) -> SignalSummary:
    """Summarise one or more samples."""
    ordered = sorted(samples)
    value, spread = median_of_sorted(ordered), None
    if len(ordered) > 1:
        spread = deviation_from(value, ordered)
    return SignalSummary(
        value=value, spread=spread, count=len(ordered), time_s=time_s, quality=quality
    )
