"""Events of a simulated run. A scenario lists each event with its `kind`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from optimus_jax.config.checks import check_not_negative, check_positive
from optimus_jax.errors import ConfigError, explain

SwitchPhase = Literal["prepare", "move", "verify", "canary"]
"""Phases of a switch that may fail, in order."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """When an event holds, in seconds on the run's clock."""

    start_s: float = 0.0
    """When the event begins."""
    for_s: float | None = None
    """How long it lasts; None: to the end of the run."""
    every_s: float | None = None
    """Period of repetition; None: it happens once."""
    until_s: float | None = None
    """When repetition ends; None: at the end of the run."""
    jitter: float = 0.0
    """Largest share of `every_s` by which a repetition is early or late, drawn by the seed."""
    ramp_s: float = 0.0
    """How long it takes to grow to its full size; 0: no time."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_not_negative(self, "start_s", "for_s", "every_s", "until_s", "ramp_s")
        if self.every_s is not None and (self.for_s is None or self.every_s <= self.for_s):
            raise ConfigError(
                explain(
                    f"repetitions of {name} overlap",
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
    """A link changes its speed."""

    link: Literal["intra_host", "inter_host"] = "inter_host"
    """The link inside hosts or the one between hosts."""
    factor: float
    """Factor on its speed: 0.25 is a quarter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")


@dataclass(frozen=True, kw_only=True)
class ComputeEvent(Timed):
    """Devices compute more slowly: all of them, or stragglers."""

    factor: float
    """Factor on the compute time: 1.5 takes half as long again."""
    devices: tuple[int, ...] = ()
    """Ids of slow devices; empty, and no host: all devices."""
    host: int | None = None
    """All devices of this host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")


@dataclass(frozen=True, kw_only=True)
class MemoryEvent(Timed):
    """Something else than the run takes memory on every device."""

    share: float
    """Share of a device's memory that is taken."""

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
    """Batches come late. They are loaded beside the steps before, so that steps take as long as
    their loading, unless the plan is slower.
    """

    wait_s: float
    """How much longer a batch takes, in seconds, than a step of the run's first plan in normal
    conditions: for so long each of its steps waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "wait_s")


@dataclass(frozen=True, kw_only=True)
class LostEvent(Timed):
    """Devices are lost. A run that uses them ends, and restarts from its last checkpoint."""

    devices: tuple[int, ...] = ()
    """Ids of lost devices."""
    host: int | None = None
    """All devices of this host."""
    notice_s: float = 0.0
    """How long before the loss they are reported bad, while they still work."""
    during: Literal["none", "prepare", "move", "verify", "canary"] = "none"
    """The event begins before `start_s` if a switch reaches this phase earlier, and lasts `for_s`
    from then."""

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
    """The batch shape changes as planned: the next phase of a curriculum or a ramp."""

    start_share: float
    """Share of the run's steps at which the phase begins."""
    seq_len: int | None = None
    """Tokens per example from here on; None: as before."""
    global_batch: int | None = None
    """Examples per step from here on; None: as before."""

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
    """Signal readings are faulty."""

    names: tuple[str, ...]
    """Names of readings, with the wildcards `*` and `?`; "step_times" is the run's own record of
    its step times."""
    fault: Literal["missing", "stale", "lying"]
    """missing: there is no reading. stale: the reading and its time stay as they were. lying: the
    value is multiplied by `factor`, and its quality is good."""
    factor: float = 1.0
    """Factor on the value of a lying reading."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "factor")


@dataclass(frozen=True, kw_only=True)
class SwitchEvent:
    """Switches fail in this phase."""

    phase: SwitchPhase
    count: int = 1
    """Number of switches that fail, the first ones."""

    def __post_init__(self) -> None:
        check_positive(self, "count")


ScenarioEvent = (
    LinkEvent
    | ComputeEvent
    | MemoryEvent
    | DataEvent
    | LostEvent
    | PhaseEvent
    | MetricsEvent
    | SwitchEvent
)
EVENTS: Mapping[str, type[ScenarioEvent]] = {
    "link": LinkEvent,
    "compute": ComputeEvent,
    "memory": MemoryEvent,
    "data": DataEvent,
    "lost": LostEvent,
    "phase": PhaseEvent,
    "metrics": MetricsEvent,
    "switch": SwitchEvent,
}
"""Event classes by `kind`."""
