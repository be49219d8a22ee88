"""The devices that there are, as data."""

from dataclasses import dataclass

from optimus_jax.mesh.accelerators import accelerator_of_kind


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices of a run; all of one kind."""

    num_devices: int
    num_processes: int
    num_hosts: int | None = None
    """Machines that the devices are in; None: not known (a process may have a machine to itself, or part of one)."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    device_kind: str
    """The maker's name of the device."""
    bytes_per_device: int | None
    """Memory that a device may use; virtual CPU devices share the host's. None: unknown."""

    def __str__(self) -> str:
        hosts = f" in {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"{self.num_devices} x {self.device_kind} ({self.platform}){hosts}"

    def dense_peak_flops(self, precision: str) -> float | None:
        """Peak FLOP/s of one device in 16-bit matmuls; None where it is not known (never a guess)."""
        if precision not in ("bf16", "f16"):
            return None
        accelerator = accelerator_of_kind(self.device_kind)
        return None if accelerator is None else accelerator.dense_peak_flops
