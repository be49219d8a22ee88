"""Discovers the available devices and builds a mesh from them."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from optimus_jax.config.axes import MESH_AXES, AxisSizes, check_devices
from optimus_jax.devices.backend import (
    HOST_MEMORY_SHARE,
    host_bytes,
    host_limit_bytes,
    start_backend,
)
from optimus_jax.devices.hosts import count_hosts, devices_by_host, hosts_of_processes
from optimus_jax.mesh.topology import Topology


def discover() -> Topology:
    """The devices that JAX sees in all processes.

    Every process must call it, before anything else asks for a device.

    Raises:
      ConfigError, FaultError: as in `start_backend`, which also limits the memory that JAX may use.
    """
    start_backend()
    devices, hosts = devices_by_host(), hosts_of_processes()
    return Topology(
        num_devices=len(devices),
        num_processes=jax.process_count(),
        num_hosts=count_hosts(),
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        compute_capability=_compute_capability(getattr(devices[0], "compute_capability", "")),
        bytes_per_device=_minimum_over_processes(_bytes_per_device()),
        host_bytes_per_device=_minimum_over_processes(_host_bytes_per_device(hosts)),
        process_of=tuple(device.process_index for device in devices),
        host_of=tuple(hosts[device.process_index] for device in devices),
    )


def build_mesh(axes: AxisSizes, devices: list | None = None) -> Mesh:
    """A mesh of these sizes over the given devices, in their order, or over all devices, host by
    host.

    Neighbours along the last axis, tensor, are neighbours in that order. The first axis, pipe,
    crosses hosts before any other axis does.

    Raises:
      PlanError: the sizes do not multiply to the number of devices.
    """
    devices = devices_by_host() if devices is None else devices
    check_devices(axes, len(devices))
    sizes = tuple(axes[axis] for axis in MESH_AXES)
    # Every axis is manual in the step and automatic outside; JAX alone would make them explicit.
    types = (AxisType.Auto,) * len(MESH_AXES)
    # TPU links form a torus, along which JAX's own function orders the devices
    if devices[0].platform == "tpu":
        return jax.make_mesh(sizes, MESH_AXES, devices=devices, axis_types=types)
    # not make_mesh, which sorts GPUs by their ids
    return Mesh(np.asarray(devices, dtype=object).reshape(sizes), MESH_AXES, axis_types=types)


def _compute_capability(said: str) -> tuple[int, int] | None:
    """(9, 0) from "9.0"; None for AMD GPUs, for which JAX reports a name such as "gfx942"."""
    major, _, minor = said.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _bytes_per_device() -> int | None:
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return host_bytes() // len(local)
    stats = local[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def _host_bytes_per_device(hosts: tuple[int, ...]) -> int:
    """Host memory that may be pinned for each device, in bytes: HOST_MEMORY_SHARE of the host's
    memory divided over all its devices (processes may share the host), or this process's limit
    divided over its own devices, whichever is less.
    """
    own, here = hosts[jax.process_index()], jax.local_device_count()
    on_host = sum(hosts[device.process_index] == own for device in jax.devices())
    return int(min(HOST_MEMORY_SHARE * host_bytes() / on_host, host_limit_bytes() / here))


def _minimum_over_processes(num_bytes: int | None) -> int | None:
    """The minimum over all processes, so that they choose a plan by the same numbers. None: one
    process does not know its number."""
    if jax.process_count() == 1:
        return num_bytes
    all_values = np.asarray(multihost_utils.process_allgather(np.array(num_bytes or 0, np.float64)))
    return int(all_values.min()) or None
