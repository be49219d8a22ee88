"""Who trains it, what happens when one of them fails, and when the run may move to another plan."""

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
from optimus_jax.errors import ConfigError, PlanError, explain
from optimus_jax.system.paths import local_path

MOST_PROCESSES = 10**6
"""Each of them is named if it does not come."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How processes find one another; what is left open, the environment says
    (cluster/launch.py)."""

    coordinator: str | None = None
    """HOST:PORT that process 0 listens on."""
    num_processes: int | None = None
    """Processes of the whole run."""
    process_id: int | None = None
    """This process, from 0. The one field that differs between processes; it is not saved."""
    bind: str | None = None
    """Address of process 0's machine on which it listens; None: the coordinator's, if the user has
    named that as an address, else all."""
    engine: Literal["auto", "none"] = "auto"
    """Whether to ask the environment which cluster engine has started this process; none: it is
    alone, whatever that says."""

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
                    "no run has so many processes",
                    given=f"--num-processes {self.num_processes}",
                    do="give the number that is started, one for each host or device",
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
        """Address of process 0's machine; None: all that it has.

        A host's name may mean another address there than elsewhere.
        """
        host = (self.coordinator or "").rpartition(":")[0].strip("[]")
        return self.bind or (
            "127.0.0.1" if host == "localhost" else host if is_address(host) else None
        )


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """When a process that gets no further is ended, to be started again (docs/faults.md)."""

    watch: Literal["auto", "on", "off"] = "auto"
    """Whether progress is watched; auto: in runs of several processes. Alone, a process may be held
    in a debugger."""
    floor_s: float = 60.0
    """Least limit on a step, an evaluation or a save, however short they have been."""
    ceiling_s: float = 900.0
    """Largest limit on them, and the limit while too few are known."""
    connect_s: float = 300.0
    """For all processes to find one another."""
    start_s: float = 3600.0
    """Limit on what happens once: restoring, measuring devices, compiling."""
    silence_s: float = 30.0
    """Without a heartbeat from another process before it counts as lost; it may be dead, stopped or
    cut off. At least LEAST_SILENCE_S."""
    stop_s: float = 20.0
    """After SIGTERM, for the step under way to end; without that the process ends and does not
    save."""
    grace_s: float = 90.0
    """The same where nobody knows how long it takes: a first evaluation, a first step under a plan.
    Engines end a process that takes longer than they give."""
    heartbeat_s: int = 100
    """Without a heartbeat before JAX itself aborts a process (exit code 134): the second line,
    where the run directory shows no heartbeats."""

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
                    "a limit cannot lie below its floor and above its ceiling",
                    given=f"faults.floor_s={self.floor_s}, faults.ceiling_s={self.ceiling_s}",
                    do="choose floor_s <= ceiling_s",
                )
            )
        if self.silence_s < LEAST_SILENCE_S:
            raise ConfigError(
                explain(
                    "a process that is well, on a host that is busy, would be taken for a lost one",
                    given=f"faults.silence_s={self.silence_s:g}",
                    do=f"choose {LEAST_SILENCE_S:g} or more: heartbeats come once a second",
                )
            )


LEAST_SILENCE_S = 5.0
"""What the fault table was measured with (docs/faults.md)."""


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """When the controller may move a running job to another plan."""

    min_gain: float = 0.05
    """Least share of a step's time that another plan has to save."""
    min_probability: float = 0.9
    """Least probability that a switch saves time at all."""
    gain_over_cost: float = 2.0
    """Least expected gain over the rest of the run, in costs of the switch."""
    budget_share: float = 0.01
    """Of the run's wall time, were it to stay under its plan, what all switches together may
    take."""
    max_switches: int | None = None
    """Of a run; None: as many as the budget allows. 0 freezes the plan, as long as it can be
    kept."""
    cooldown_steps: int = 30
    """Steps after a switch without another one."""
    window_steps: int = 20
    """Steps that a reading looks back on."""
    canary_steps: int = 5
    """Steps under a new plan, after which it is kept or taken back."""
    probe_share: float = 0.002
    """Of wall time, what probes of links and compute may take; 0: none."""
    allow: tuple[str, ...] = field(default=(), metadata={SEPARATOR: ";"})
    """Meshes that may be switched to, such as `data=4,tensor=2;fsdp=8`; empty: all legal ones."""
    move_bytes: int = 256 * 2**20
    """Of state on the way at the same time on a device while it is moved."""
    executables: int = 3
    """Compiled plans kept in memory, so that going back is cheap."""

    def __post_init__(self) -> None:
        check_positive(
            self, "gain_over_cost", "window_steps", "canary_steps", "move_bytes", "executables"
        )
        for name in ("min_gain", "min_probability", "budget_share", "probe_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    explain(
                        f"controller.{name} is a share",
                        given=getattr(self, name),
                        do="choose 0 or more and less than 1",
                    )
                )
        check_not_negative(self, "max_switches", "cooldown_steps")
        _ = self.allowed_axes  # what cannot be read is an error here

    @functools.cached_property
    def allowed_axes(self) -> tuple[AxisSizes, ...]:
        """The meshes of `allow`. Raises PlanError."""
        try:
            return tuple(map(AxisSizes.parse, self.allow))
        except PlanError as error:
            raise PlanError(
                explain(
                    "controller.allow does not list meshes",
                    given=f"controller.allow={';'.join(self.allow)}: {str(error).splitlines()[0]}",
                    do="write them as data=4,tensor=2;fsdp=8",
                )
            ) from error


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How a run whose --run-dir is a URL is kept in that store (docs/stores.md)."""

    local_dir: str | None = None
    """Directory that it works in, shared by its processes; None: one for each URL, under
    `optimus_jax/runs` in XDG_CACHE_HOME."""
    every_s: float = 30.0
    """Seconds between two uploads of its logs; a checkpoint is uploaded as soon as it is whole."""

    def __post_init__(self) -> None:
        check_positive(self, "every_s")
        if self.local_dir is not None:
            local_path(
                self.local_dir,
                what="store.local_dir",
                do="name a directory of this machine; the store is what --run-dir names",
            )
