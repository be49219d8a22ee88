"""The devices that there are, as data."""

from dataclasses import dataclass

DENSE_PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""bf16 and f16 FLOP/s without sparsity, by the beginning of the device's name; from NVIDIA's data sheets."""


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

    def dense_peak_flops(self, precision: str) -> float | None:
        """Peak FLOP/s of one device in 16-bit matmuls; None where it is not known (never a guess)."""
        if precision not in ("bf16", "f16"):
            return None
        return next((peak for name, peak in DENSE_PEAK_FLOPS.items() if self.device_kind.startswith(name)), None)
