"""Finding the devices, and making the mesh of a Plan from them."""

import os

import jax
from jax.sharding import AxisType, Mesh

from optimus_jax.mesh.axes import MESH_AXES
from optimus_jax.mesh.hosts import count_hosts
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan, check_devices

GPU_MEMORY_SHARE = "0.92"
"""Of a GPU, for JAX to set aside: by default it takes 75%, and a plan for the whole device would not run. The rest is for contexts and NCCL."""


def discover() -> Topology:
    """The devices that JAX sees in all processes. Every process has to call it, and before anything else asks for a device.

    JAX may use GPU_MEMORY_SHARE of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_SHARE)
    devices = jax.devices()
    return Topology(
        num_devices=len(devices), num_processes=jax.process_count(), num_hosts=count_hosts(), platform=devices[0].platform,
        device_kind=devices[0].device_kind, bytes_per_device=_bytes_per_device())


def build_mesh(plan: Plan, devices: list | None = None) -> Mesh:
    """The mesh of `plan` over all devices, or over those given.

    Raises:
      PlanError: the plan is for another number of devices.
    """
    devices = jax.devices() if devices is None else devices
    check_devices(plan.axes, len(devices))
    # Every axis is manual in the step and automatic outside; jax.make_mesh alone would make them explicit.
    return jax.make_mesh(tuple(plan.axes[axis] for axis in MESH_AXES), MESH_AXES, devices=devices,
                         axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _bytes_per_device() -> int | None:
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    stats = local[0].memory_stats()
    return stats.get("bytes_limit") if stats else None
