"""Settings of a running job: its processes, fault limits, the controller, and an object store."""

import functools
from dataclasses import dataclass, field
from typing import Literal

from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.checks import (
    check_not_negative,
    check_positive,
    is_address,
    is_host_and_port,
)
from optimus_jax.config.settings import SEPARATOR
from optimus_jax.errors import ConfigError, PlanError, explain, first_line
from optimus_jax.system.paths import local_path

MOST_PROCESSES = 10**6
"""Upper limit on processes: an error lists each process that is missing at the rendezvous."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How processes find one another; unset fields are read from the environment
    (cluster/launch_detection.py)."""

    coordinator: str | None = None
    """HOST:PORT of the coordinator, which process 0 runs."""
    num_processes: int | None = None
    """Number of processes in the run."""
    process_id: int | None = None
    """Index of this process, from 0. The only field that differs between processes; not saved."""
    bind: str | None = None
    """Address that process 0 listens on; None: the coordinator's address if that is an IP address,
    else all interfaces."""
    launcher: Literal["auto", "none"] = "auto"
    """Whether to detect from the environment which launcher started this process; none: run as a
    single process regardless."""

    def __post_init__(self) -> None:
        given = [
            value is not None for value in (self.coordinator, self.num_processes, self.process_id)
        ]
        if any(given) and not all(given):
            raise ConfigError(
                explain(
                    "a run of several processes needs all three distributed settings",
                    given=self,
                    do="give --coordinator HOST:PORT --num-processes N --process-id I",
                )
            )
        check_positive(self, "num_processes")
        if (self.num_processes or 0) >= MOST_PROCESSES:
            raise ConfigError(
                explain(
                    "the number of processes is too large",
                    given=f"--num-processes {self.num_processes}",
                    do="give the number of processes that are started, one per host or device",
                )
            )
        if self.coordinator is not None and not is_host_and_port(self.coordinator):
            raise ConfigError(
                explain(
                    "--coordinator names a host and a port",
                    given=self.coordinator,
                    do="give HOST:PORT, such as 10.0.0.1:1234",
                )
            )
        if self.bind is not None and not is_address(self.bind):
            raise ConfigError(
                explain(
                    "distributed.bind is an address of the machine of process 0",
                    given=self.bind,
                    do="give one such as 10.0.0.1 or ::1; 0.0.0.0 for all of IPv4",
                )
            )
        if (
            self.num_processes is not None
            and self.process_id is not None
            and not 0 <= self.process_id < self.num_processes
        ):
            raise ConfigError(
                explain(
                    "--process-id must lie below --num-processes",
                    given=self,
                    do=f"choose 0 to {self.num_processes - 1}",
                )
            )

    @property
    def listens_on(self) -> str | None:
        """Address that process 0 listens on; None: all of its interfaces.

        A host name is not used: it may resolve to another address on that host itself.
        """
        host = (self.coordinator or "").rpartition(":")[0].strip("[]")
        return self.bind or (
            "127.0.0.1" if host == "localhost" else host if is_address(host) else None
        )


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """When a process that makes no progress is ended and restarted (docs/faults.md)."""

    watch: Literal["auto", "on", "off"] = "auto"
    """Whether a watchdog checks progress; auto: in runs of several processes. A single process may
    be paused in a debugger."""
    floor_s: float = 60.0
    """Shortest time limit on a step, an evaluation or a save, however fast they have been."""
    ceiling_s: float = 900.0
    """Longest such limit, and the limit while too few durations have been measured."""
    connect_s: float = 300.0
    """Limit on the rendezvous of all processes."""
    start_s: float = 3600.0
    """Limit on one-time work: restoring, measuring devices, compiling."""
    silence_s: float = 30.0
    """Time without a heartbeat after which another process counts as lost (dead, stopped or cut
    off). At least LEAST_SILENCE_S."""
    stop_s: float = 20.0
    """Time after SIGTERM for the current step to finish; after that the process exits without
    saving."""
    grace_s: float = 90.0
    """The same limit for work of unknown duration: a first evaluation, the first step of a plan.
    Launchers kill a process that exceeds their own grace period."""
    heartbeat_s: int = 100
    """Time without a heartbeat after which JAX itself aborts a process (exit code 134): the
    fallback where the run directory shows no heartbeats."""

    def __post_init__(self) -> None:
        check_positive(
            self,
            "floor_s",
            "ceiling_s",
            "connect_s",
            "start_s",
            "silence_s",
            "stop_s",
            "grace_s",
            "heartbeat_s",
        )
        if self.floor_s > self.ceiling_s:
            raise ConfigError(
                explain(
                    "the floor of the time limits exceeds their ceiling",
                    given=f"faults.floor_s={self.floor_s}, faults.ceiling_s={self.ceiling_s}",
                    do="choose floor_s <= ceiling_s",
                )
            )
        if self.silence_s < LEAST_SILENCE_S:
            raise ConfigError(
                explain(
                    "a healthy process on a busy host would be considered lost",
                    given=f"faults.silence_s={self.silence_s:g}",
                    do=f"choose {LEAST_SILENCE_S:g} or more: heartbeats come once a second",
                )
            )


LEAST_SILENCE_S = 5.0
"""The smallest value with which the fault table was measured (docs/faults.md)."""


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """When the controller may move a running job to another plan."""

    budget_share: float = 0.01
    """Fraction of the run's wall time (predicted without switching) that switches may lose in all:
    what they have cost, less what they have saved since, and the expected loss of the next one."""
    max_switches: int | None = None
    """Most switches in a run; None: any number. 0 keeps the plan as long as
    possible."""
    cooldown_steps: int = 30
    """Steps after a switch before another is allowed."""
    window_steps: int = 20
    """Number of recent steps that a measurement covers."""
    canary_steps: int = 5
    """Trial steps under a new plan, after which it is kept or reverted."""
    probe_share: float = 0.002
    """Fraction of wall time that probes of links and compute may take; 0: no probes."""
    allow: tuple[str, ...] = field(default=(), metadata={SEPARATOR: ";"})
    """Meshes that the controller may switch to, such as `data=4,tensor=2;fsdp=8`; empty: all legal
    meshes."""
    move_bytes: int = 256 * 2**20
    """Bytes of state in flight at the same time per device during a move."""
    executables: int = 3
    """Compiled plans cached in memory, so that switching back is cheap."""

    def __post_init__(self) -> None:
        check_positive(self, "window_steps", "canary_steps", "move_bytes", "executables")
        for name in ("budget_share", "probe_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    explain(
                        f"controller.{name} must be a fraction",
                        given=getattr(self, name),
                        do="choose 0 or more and less than 1",
                    )
                )
        check_not_negative(self, "max_switches", "cooldown_steps")
        _ = self.allowed_axes  # an invalid list is an error when the config is made

    @functools.cached_property
    def allowed_axes(self) -> tuple[AxisSizes, ...]:
        """The meshes of `allow`. Raises PlanError."""
        try:
            return tuple(map(AxisSizes.parse, self.allow))
        except PlanError as error:
            raise PlanError(
                explain(
                    "controller.allow does not list meshes",
                    given=f"controller.allow={';'.join(self.allow)}: {first_line(error)}",
                    do="write them as data=4,tensor=2;fsdp=8",
                )
            ) from error


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How a run whose --run-dir is a URL is mirrored to that object store (docs/stores.md)."""

    local_dir: str | None = None
    """Local working directory of the run, shared by its processes; None: one per URL, under
    `optimus_jax/runs` in XDG_CACHE_HOME."""
    every_s: float = 30.0
    """Seconds between uploads of the logs; a checkpoint is uploaded as soon as it is complete."""

    def __post_init__(self) -> None:
        check_positive(self, "every_s")
        if self.local_dir is not None:
            local_path(
                self.local_dir,
                what="store.local_dir",
                do="name a directory of this machine; the store is what --run-dir names",
            )
