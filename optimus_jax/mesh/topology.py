"""The available devices, as data."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.devices.accelerators import accelerator_of_kind

HOSTS, PROCESSES = "hosts", "processes"
"""What a mesh axis may cross."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The devices of a run, which are all of one kind."""

    num_devices: int
    num_processes: int
    num_hosts: int | None = None
    """Machines that the devices are in; None: unknown (a process may have a whole machine or a part
    of one)."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    device_kind: str
    """The driver's name of the device, as JAX reports it."""
    compute_capability: tuple[int, int] | None = None
    """NVIDIA's compute capability, such as (9, 0); None: unknown, or not an NVIDIA device."""
    bytes_per_device: int | None
    """Memory that a device may use; virtual CPU devices share the host's. None: unknown."""
    host_bytes_per_device: int | None = None
    """A device's share of the host memory that may hold its offloaded arrays. None: unknown."""
    process_of: tuple[int, ...] | None = None
    """The process of each device, in the order of the mesh; None: every process has the same number
    of devices, one process after the other."""
    host_of: tuple[int, ...] | None = None
    """The host of each device, likewise; None: every host has the same number of devices."""

    def __str__(self) -> str:
        hosts = (
            f" on {self.num_hosts} hosts"
            if self.num_hosts is not None and self.num_hosts > 1
            else ""
        )
        processes = f" in {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"{self.num_devices} x {self.device_kind} ({self.platform}){processes}{hosts}"

    @property
    def processes(self) -> tuple[int, ...]:
        """The process of each device."""
        return tuple(map(int, self._owners(self.process_of, self.num_processes)))

    def crossed(self, axes: AxisSizes) -> Mapping[str, str]:
        """What each axis of a mesh crosses: HOSTS, or only PROCESSES; axes that stay inside a
        process are left out.
        """
        found = {}
        for what, owners in (
            (PROCESSES, self._owners(self.process_of, self.num_processes)),
            (HOSTS, self._owners(self.host_of, self.num_hosts or 1)),
        ):
            grid = owners[: axes.num_devices].reshape([axes[name] for name in MESH_AXES])
            found |= {
                name: what
                for dim, name in enumerate(MESH_AXES)
                if (grid != grid.take([0], dim)).any()
            }
        return {name: found[name] for name in MESH_AXES if name in found}

    def describe_crossed(self, axes: AxisSizes) -> str:
        """`crossed` in words, such as `pipe crosses hosts; data crosses processes`."""
        return (
            "; ".join(f"{name} crosses {what}" for name, what in self.crossed(axes).items())
            or "no axis crosses processes"
        )

    def dense_peak_flops(self, precision: str) -> float | None:
        """Peak FLOP/s of one device in 16-bit matmuls; None: unknown (never a guess)."""
        if precision not in ("bf16", "f16"):
            return None
        accelerator = accelerator_of_kind(self.device_kind)
        return None if accelerator is None else accelerator.dense_peak_flops

    def _owners(self, known: tuple[int, ...] | None, count: int) -> np.ndarray:
        return (
            np.arange(self.num_devices) * count // self.num_devices
            if known is None
            else np.array(known)
        )
