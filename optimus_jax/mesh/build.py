"""Finding the devices, and making the mesh of a Plan from them."""

import os
import warnings

import jax
import numpy as np
from jax._src.xla_bridge import backends_are_initialized
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from optimus_jax.mesh.axes import MESH_AXES
from optimus_jax.mesh.hosts import count_hosts, devices_by_host, hosts_of_processes
from optimus_jax.mesh.topology import HOST_MEMORY_SHARE, Topology
from optimus_jax.plan import Plan, check_devices

GPU_MEMORY_SHARE = "0.92"
"""Of a GPU, for JAX to set aside: by default it takes 75%, and a plan for the whole device would not run. The rest is for contexts and NCCL."""
JAX_OWN_SHARE, JAX_OWN_HOST_GIB = "0.75", "64"
"""What it may use of a GPU and of the host beside it where nobody says otherwise before its first use."""
_FRACTION, _OLDER_FRACTION, _HOST_LIMIT_GIB = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def discover() -> Topology:
    """The devices that JAX sees in all processes. Every process has to call it, and before anything else asks for a device.

    JAX may use GPU_MEMORY_SHARE of a GPU, and HOST_MEMORY_SHARE of the host for it, unless XLA_CLIENT_MEM_FRACTION (or its older name,
    XLA_PYTHON_CLIENT_MEM_FRACTION) and XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB say otherwise. Where JAX has a GPU already, it is too late to say
    anything: a warning tells the user, and JAX's own limits count.
    """
    _limit_memory()
    devices, hosts = devices_by_host(), hosts_of_processes()
    return Topology(
        num_devices=len(devices), num_processes=jax.process_count(), num_hosts=count_hosts(), platform=devices[0].platform,
        device_kind=devices[0].device_kind, compute_capability=_compute_capability(getattr(devices[0], "compute_capability", "")),
        bytes_per_device=_least(_bytes_per_device()),
        host_bytes_per_device=_least(_host_bytes_per_device(hosts)),
        process_of=tuple(device.process_index for device in devices), host_of=tuple(hosts[device.process_index] for device in devices))


def _limit_memory() -> None:
    begun = backends_are_initialized() and jax.default_backend() == "gpu"
    if _FRACTION not in os.environ and _OLDER_FRACTION not in os.environ:
        if begun:
            warnings.warn(f"JAX was used before this run was begun, and so may use {float(JAX_OWN_SHARE):.0%} of a GPU instead of {float(GPU_MEMORY_SHARE):.0%}: "
                          f"set {_FRACTION}={GPU_MEMORY_SHARE}, or begin the run first", stacklevel=3)
        os.environ[_OLDER_FRACTION] = JAX_OWN_SHARE if begun else GPU_MEMORY_SHARE
    os.environ.setdefault(_HOST_LIMIT_GIB, JAX_OWN_HOST_GIB if begun else str(int(HOST_MEMORY_SHARE * _host_bytes() / 2**30)))


def gpu_memory_share() -> float:
    """Of a GPU, what JAX may use."""
    return float(os.environ.get(_FRACTION) or os.environ.get(_OLDER_FRACTION) or GPU_MEMORY_SHARE)


def build_mesh(plan: Plan, devices: list | None = None) -> Mesh:
    """The mesh of `plan` over all devices, those of a host together, or over those given, in their order: neighbours along the last axis,
    tensor, are neighbours in that order, and the first, pipe, is what crosses hosts before any other does.

    Raises:
      PlanError: the plan is for another number of devices.
    """
    devices = devices_by_host() if devices is None else devices
    check_devices(plan.axes, len(devices))
    sizes = tuple(plan.axes[axis] for axis in MESH_AXES)
    # Every axis is manual in the step and automatic outside; JAX alone would make them explicit.
    types = (AxisType.Auto,) * len(MESH_AXES)
    if devices[0].platform == "tpu":  # whose links form a torus, of which JAX knows more than the order of hosts
        return jax.make_mesh(sizes, MESH_AXES, devices=devices, axis_types=types)
    return Mesh(np.asarray(devices, dtype=object).reshape(sizes), MESH_AXES, axis_types=types)  # make_mesh sorts GPUs by their ids


def _compute_capability(said: str) -> tuple[int, int] | None:
    """Of "9.0"; for AMD's GPUs JAX says their own names, such as "gfx942"."""
    major, _, minor = said.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _bytes_per_device() -> int | None:
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return _host_bytes() // len(local)
    stats = local[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def _host_bytes_per_device(hosts: tuple[int, ...]) -> int:
    """Of what may be pinned in all, and of what this process may pin, which is the less if processes share the host."""
    own, here = hosts[jax.process_index()], jax.local_device_count()
    on_host = sum(hosts[device.process_index] == own for device in jax.devices())
    return int(min(HOST_MEMORY_SHARE * _host_bytes() / on_host, int(os.environ[_HOST_LIMIT_GIB]) * 2**30 / here))


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _least(num_bytes: int | None) -> int | None:
    """Of all processes: they choose one plan, and so by the same numbers. None: one does not know."""
    if jax.process_count() == 1:
        return num_bytes
    everyones = np.asarray(multihost_utils.process_allgather(np.array(num_bytes or 0, np.float64)))
    return int(everyones.min()) or None
