"""The devices that there are, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices of a run; all of one kind."""

    num_devices: int
    num_processes: int
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    device_kind: str
    """The maker's name of the device."""
    bytes_per_device: int | None
    """Memory that a device may use; virtual CPU devices share the host's. None: unknown."""

    def __str__(self) -> str:
        hosts = f" in {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"{self.num_devices} x {self.device_kind} ({self.platform}){hosts}"
