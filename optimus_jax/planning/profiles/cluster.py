"""Describe a cluster by its hosts, their devices and their links. It need not exist.

Devices are numbered host by host and laid out in mesh order (pipe, data, fsdp, tensor; tensor
fastest), as in mesh/build.py. So the plan's axis sizes determine which links a mesh axis crosses.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.devices.accelerators import Accelerator, accelerator_named, accelerator_of_kind
from optimus_jax.devices.backend import HOST_MEMORY_SHARE
from optimus_jax.errors import ConfigError, PlanError, explain, nearest
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.profiles.hardware_database import MEMORY_OF_HOST, host_of
from optimus_jax.planning.profiles.links import Link, with_speed

INTRA_HOST, INTER_HOST, TO_HOST = LINKS = ("intra_host", "inter_host", "host")
"""Names of a cluster's links, as in `--link inter_host=50GB/s`."""
OLD_LINK_NAMES = {"inside": INTRA_HOST, "between": INTER_HOST}
"""Earlier names of links, still accepted by `--link` and in scenarios."""
MOST_DEVICES = 2**16
"""Largest supported cluster. A larger number is probably a typo, and has too many layouts to
enumerate."""
_SHAPE = re.compile(r"(?:([1-9]\d{0,8})x)?([1-9]\d{0,8})")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Identical hosts, each with the same number of identical devices."""

    num_hosts: int
    """Number of machines."""
    devices_per_host: int
    """Number of devices per host."""
    accelerator: Accelerator
    """Kind of the devices."""
    intra_host: Link
    """Link between the devices of a host."""
    inter_host: Link | None
    """Link between hosts, with one device's share of its speed; None with one host."""
    to_host: Link = MEMORY_OF_HOST
    """Link from each device to its host's memory."""
    host_bytes_per_device: int | None = None
    """Usable host memory per device; None: unknown."""

    @property
    def bytes_per_device(self) -> int | None:
        """Usable memory of a device; None: unknown."""
        return self.accelerator.memory_bytes

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def knows_speeds(self, *, to_host: bool) -> bool:
        """Whether the speeds of all links are known, with that to the host's memory or without."""
        links = [self.intra_host, self.inter_host, self.to_host if to_host else None]
        return all(link is None or link.bytes_per_s is not None for link in links)

    @property
    def shape(self) -> str:
        """The text that `parse` reads, such as `h100:8x8`."""
        return (
            f"{self.accelerator.name}:"
            + (f"{self.num_hosts}x" if self.num_hosts > 1 else "")
            + str(self.devices_per_host)
        )

    def __str__(self) -> str:
        devices = f"{self.num_devices} x {self.accelerator.name}, {self.intra_host}"
        return (
            devices
            if self.inter_host is None
            else f"{devices}; {self.num_hosts} hosts, {self.inter_host}"
        )

    @classmethod
    def parse(cls, text: str, links: Iterable[str] = ()) -> "Cluster":
        """Parse `h100:8x8` (8 hosts of 8 devices) or `h100:8` (one host).

        Links are those of the accelerator's usual host.

        Args:
          text: name of an accelerator (devices/accelerators.py) and a shape.
          links: speeds that replace the usual ones: `intra_host=`, `inter_host=` or `host=`,
            followed by a speed as `with_speed` (planning/profiles/links.py) reads it.
        Raises:
          ConfigError: a name is unknown, or a shape or a speed cannot be read.
        """
        name, _, shape = text.strip().partition(":")
        accelerator, match = accelerator_named(name.strip()), _SHAPE.fullmatch(shape.strip())
        if match is None:
            raise ConfigError(
                explain(
                    "a cluster needs its numbers of hosts and devices",
                    given=f"--cluster {text}",
                    do=(
                        f"write hosts x devices per host, such as {accelerator.name}:2x8, or"
                        f" {accelerator.name}:8 for one host"
                    ),
                )
            )
        num_hosts, host = int(match[1] or 1), host_of(accelerator.name)
        if num_hosts * int(match[2]) > MOST_DEVICES:
            raise ConfigError(
                explain(
                    f"layouts are enumerated for up to {MOST_DEVICES:,} devices",
                    given=f"--cluster {text}",
                    do="give fewer hosts",
                )
            )
        cluster = cls(
            num_hosts=num_hosts,
            devices_per_host=int(match[2]),
            accelerator=accelerator,
            intra_host=host.intra_host,
            inter_host=host.inter_host if num_hosts > 1 else None,
            to_host=host.to_host,
            host_bytes_per_device=host.memory_bytes
            and int(HOST_MEMORY_SHARE * host.memory_bytes) // int(match[2]),
        )
        return cluster.with_links(links)

    @classmethod
    def of(cls, topology: Topology) -> "Cluster":
        """The cluster that this run's devices form.

        Links have the usual speeds of this kind of device until they are measured.

        If the number of machines is unknown, each process counts as one. Links may then be faster
        than predicted, but not slower.

        Raises:
          ConfigError: some machines have more devices than others.
        """
        num_hosts = topology.num_hosts or topology.num_processes
        if topology.num_devices % num_hosts:
            raise ConfigError(
                explain(
                    "every host needs as many devices as the others",
                    given=f"{topology.num_devices} devices on {num_hosts} hosts",
                    do="start the run on hosts with equal numbers of devices",
                )
            )
        known = accelerator_of_kind(topology.device_kind) or Accelerator.unlisted(
            topology.device_kind, topology.platform
        )
        # JAX may use less memory than the data sheet states.
        accelerator = replace(
            known,
            memory_bytes=topology.bytes_per_device or known.memory_bytes,
            compute_capability=topology.compute_capability or known.compute_capability,
        )
        host = host_of(known.name)
        return cls(
            num_hosts=num_hosts,
            devices_per_host=topology.num_devices // num_hosts,
            accelerator=accelerator,
            intra_host=host.intra_host,
            inter_host=host.inter_host if num_hosts > 1 else None,
            to_host=host.to_host,
            host_bytes_per_device=topology.host_bytes_per_device,
        )

    def with_links(self, links: Iterable[str]) -> "Cluster":
        """The cluster with other link speeds, such as `inter_host=50GB/s,5us`.

        Raises:
          ConfigError: a link is unknown, given twice or absent, or its speed cannot be read.
        """
        speeds: dict[str, Link] = {}
        for text in links:
            given, _, speed = (part.strip() for part in text.partition("="))
            name = OLD_LINK_NAMES.get(given, given.replace("-", "_"))
            if name not in LINKS or name in speeds:
                raise ConfigError(
                    explain(
                        f"a cluster has three links: {INTRA_HOST}, {INTER_HOST} and {TO_HOST} (each"
                        " device to its host's memory)",
                        given=f"--link {text}",
                        do=f"give {given!r} once" if name in speeds else nearest(given, LINKS),
                    )
                )
            link = {
                INTRA_HOST: self.intra_host,
                INTER_HOST: self.inter_host,
                TO_HOST: self.to_host,
            }[name]
            if link is None:
                raise ConfigError(
                    explain(
                        "one host has no link to others",
                        given=f"--link {text}",
                        do="leave it out, or give more hosts",
                    )
                )
            speeds[name] = with_speed(link, speed)
        return replace(
            self,
            intra_host=speeds.get(INTRA_HOST, self.intra_host),
            inter_host=speeds.get(INTER_HOST, self.inter_host),
            to_host=speeds.get(TO_HOST, self.to_host),
        )

    def without(self, number: int) -> "Cluster":
        """The cluster after losing `number` hosts, or devices if there is one host.

        With several hosts, losing a device means losing its host.

        Raises:
          ConfigError: nothing is left, or nothing is lost.
        """
        units, unit = (
            (self.num_hosts, "host") if self.num_hosts > 1 else (self.devices_per_host, "device")
        )
        if not 0 < number < units:
            raise ConfigError(
                explain(
                    f"--without takes a number of {unit}s that leaves some",
                    given=f"--without {number} of {units} {unit}{'s' * (units > 1)}",
                    do=(
                        f"give 1 to {units - 1}"
                        if units > 1
                        else f"leave it out: there is one {unit}"
                    ),
                )
            )
        if unit == "device":
            return replace(self, devices_per_host=units - number)
        return self.with_hosts(units - number)

    def with_hosts(self, num_hosts: int) -> "Cluster":
        """The cluster with so many of its hosts."""
        inter_host = self.inter_host if num_hosts > 1 else None
        return replace(self, num_hosts=num_hosts, inter_host=inter_host)

    def topology(self) -> Topology:
        """The topology of a run on this cluster, with one process per host."""
        return Topology(
            num_devices=self.num_devices,
            num_processes=self.num_hosts,
            num_hosts=self.num_hosts,
            platform=self.accelerator.platform,
            device_kind=self.accelerator.device_kind,
            compute_capability=self.accelerator.compute_capability,
            bytes_per_device=self.bytes_per_device,
            host_bytes_per_device=self.host_bytes_per_device,
        )

    def hosts_crossed(self, axes: AxisSizes, names: tuple[str, ...]) -> int:
        """Number of hosts that a collective over the mesh axes `names` spans, in its widest group.

        Raises:
          PlanError: the mesh has more devices than the cluster.
        """
        return self._spread(axes, names)[0]

    def link_of(self, axes: AxisSizes, axis: str) -> Link:
        """The slowest link that a collective over `axis` crosses; unknown speed counts as slowest.

        Raises:
          PlanError: the mesh has more devices than the cluster.
        """
        hosts, neighbours = self._spread(axes, (axis,))
        if hosts == 1 or self.inter_host is None:
            return self.intra_host
        crossed = (self.inter_host, self.intra_host) if neighbours > 1 else (self.inter_host,)
        return min(crossed, key=lambda link: link.bytes_per_s or 0.0)

    def _spread(self, axes: AxisSizes, names: tuple[str, ...]) -> tuple[int, int]:
        return _spread(axes, names, self.num_hosts, self.devices_per_host)


@lru_cache(maxsize=1 << 16)
def _spread(
    axes: AxisSizes, names: tuple[str, ...], num_hosts: int, devices_per_host: int
) -> tuple[int, int]:
    """The largest number of hosts that a group along `names` spans, and the largest number of
    members that a group has on one host.
    """
    num_devices, group_size = axes.num_devices, math.prod(axes[name] for name in names)
    if num_devices > num_hosts * devices_per_host:
        raise PlanError(
            explain(
                f"the mesh has {num_devices} devices, the cluster {num_hosts * devices_per_host}",
                given=str(axes),
                do="give a larger cluster or smaller axes",
            )
        )
    if num_devices <= devices_per_host or group_size == 1:
        return 1, group_size
    host_of_device = (
        np.arange(num_devices).reshape([axes[name] for name in MESH_AXES]) // devices_per_host
    )
    others = [dim for dim, name in enumerate(MESH_AXES) if name not in names]
    members = [dim for dim, name in enumerate(MESH_AXES) if name in names]
    groups = host_of_device.transpose(others + members).reshape(-1, group_size)
    # Host numbers never decrease along a row, so members on one host are adjacent.
    starts = np.concatenate([np.ones((len(groups), 1), bool), np.diff(groups, axis=1) != 0], axis=1)
    members_on_host = np.diff(np.flatnonzero(np.append(starts.ravel(), True)))
    return int(starts.sum(axis=1).max()), int(members_on_host.max())
