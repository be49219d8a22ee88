"""What may happen in a simulated run, each kind of event as a value that a scenario lists by its
`kind`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from optimus_jax.config.checks import check_not_negative, check_positive
from optimus_jax.errors import ConfigError, explain

SwitchPhase = Literal["prepare", "move", "verify", "canary"]
"""Parts of a switch that may fail, in their order."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """When something holds, in seconds of the run's clock."""

    start_s: float = 0.0
    """Begins."""
    for_s: float | None = None
    """Lasts; None: to the end of the run."""
    every_s: float | None = None
    """Comes again after this long; None: once."""
    until_s: float | None = None
    """Does not come again from here on; None: to the end of the run."""
    jitter: float = 0.0
    """Share of `every_s` by which each return is early or late, drawn by the seed."""
    ramp_s: float = 0.0
    """Grows to its full size over this long; 0: at once."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_not_negative(self, "start_s", "for_s", "every_s", "until_s", "ramp_s")
        if self.every_s is not None and (self.for_s is None or self.every_s <= self.for_s):
            raise ConfigError(
                explain(
                    f"{name} comes again before it has gone",
                    given=f"every_s={self.every_s}, for_s={self.for_s}",
                    do="give for_s, shorter than every_s",
                )
            )
        if not 0 <= self.jitter <= 0.5:
            raise ConfigError(
                explain(
                    f"{name}.jitter is at most half of every_s",
                    given=self.jitter,
                    do="choose 0 to 0.5",
                )
            )


@dataclass(frozen=True, kw_only=True)
class LinkEvent(Timed):
    """A link has another speed."""

    link: Literal["inside", "between"] = "between"
    """Inside hosts or between them."""
    factor: float
    """On its speed: 0.25 is a quarter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")


@dataclass(frozen=True, kw_only=True)
class ComputeEvent(Timed):
    """Devices compute more slowly; one or some of them are stragglers."""

    factor: float
    """On the time of compute: 1.5 is a straggler by a half."""
    devices: tuple[int, ...] = ()
    """Ids; empty, and no host: all devices."""
    host: int | None = None
    """All devices of this host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")


@dataclass(frozen=True, kw_only=True)
class MemoryEvent(Timed):
    """Something else takes memory on every device."""

    share: float
    """Of a device's memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share < 1:
            raise ConfigError(
                explain(
                    "MemoryEvent.share is a share",
                    given=self.share,
                    do="choose 0 or more and less than 1",
                )
            )


@dataclass(frozen=True, kw_only=True)
class DataEvent(Timed):
    """Every step waits for its batch, which no plan can help."""

    wait_s: float
    """Seconds of a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "wait_s")


@dataclass(frozen=True, kw_only=True)
class LostEvent(Timed):
    """Devices are gone; what used them ends, and restarts from its last checkpoint."""

    devices: tuple[int, ...] = ()
    """Ids."""
    host: int | None = None
    """All devices of this host."""
    notice_s: float = 0.0
    """So long before, they are reported bad while they still work."""
    during: Literal["none", "prepare", "move", "verify", "canary"] = "none"
    """Happens earlier than `start_s` if a switch gets to this phase before, and lasts `for_s` from
    there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "notice_s")
        if not self.devices and self.host is None:
            raise ConfigError(
                explain(
                    "which devices are lost?",
                    given="neither devices nor host",
                    do="give one of them",
                )
            )


@dataclass(frozen=True, kw_only=True)
class PhaseEvent:
    """The data changes, as planned: the curriculum's or the ramp's next phase."""

    start_share: float
    """Of the run's steps."""
    seq_len: int | None = None
    """Tokens of an example from here on; None: as before."""
    global_batch: int | None = None
    """Examples of a step from here on; None: as before."""

    def __post_init__(self) -> None:
        check_positive(self, "seq_len", "global_batch")
        if not 0 < self.start_share < 1:
            raise ConfigError(
                explain(
                    "a phase begins within the run",
                    given=f"start_share={self.start_share}",
                    do="choose a share of its steps between 0 and 1",
                )
            )


@dataclass(frozen=True, kw_only=True)
class MetricsEvent(Timed):
    """Signals are not what they should be."""

    names: tuple[str, ...]
    """Of readings, `*` and `?` as in file names; "step_times" is the run's own record of its
    steps."""
    fault: Literal["missing", "stale", "lying"]
    """missing: not there. stale: stays as it was, its time too. lying: multiplied by `factor`, and
    called good."""
    factor: float = 1.0
    """Of a lie."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")


@dataclass(frozen=True, kw_only=True)
class SwitchEvent:
    """Switches fail in one of their phases."""

    phase: SwitchPhase
    count: int = 1
    """How many, the first ones."""

    def __post_init__(self) -> None:
        check_positive(self, "count")


Event = (
    LinkEvent
    | ComputeEvent
    | MemoryEvent
    | DataEvent
    | LostEvent
    | PhaseEvent
    | MetricsEvent
    | SwitchEvent
)
EVENTS: Mapping[str, type[Event]] = {
    "link": LinkEvent,
    "compute": ComputeEvent,
    "memory": MemoryEvent,
    "data": DataEvent,
    "lost": LostEvent,
    "phase": PhaseEvent,
    "metrics": MetricsEvent,
    "switch": SwitchEvent,
}
"""By `kind`."""
