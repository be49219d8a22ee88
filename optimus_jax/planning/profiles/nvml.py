"""Read what NVIDIA's driver reports about the GPUs of this host (NVML, through nvidia-ml-py).

All GPUs of the host are read, including those that CUDA_VISIBLE_DEVICES hides from JAX, in the
driver's order (by PCI address). Whatever a GPU or driver does not report is None. API:
https://docs.nvidia.com/deploy/nvml-api/.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

SWITCH = "switch"
"""`NvLink.peer` in a host with NVSwitch."""
PATHS = {
    "INTERNAL": "same board",
    "SINGLE": "one PCIe switch",
    "MULTIPLE": "several PCIe switches",
    "HOSTBRIDGE": "one PCIe host bridge",
    "NODE": "one NUMA node",
    "SYSTEM": "between NUMA nodes",
}
"""NVML_TOPOLOGY_...: where two GPUs' PCIe paths meet, nearest first (`nvidia-smi topo -m`)."""


@dataclass(frozen=True, kw_only=True)
class NvLink:
    """One NVLink of a GPU."""

    port: int
    """Port number on the GPU."""
    active: bool
    """Whether the link is up."""
    version: int | None
    """NVLink generation."""
    peer: str | None
    """The other end: SWITCH, or the PCI address of a GPU or a processor."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str | None
    """The driver's name of the GPU."""
    pci_address: str | None
    """PCI address, such as `00000000:1B:00.0`."""
    memory_bytes: int | None
    """Total memory, including the driver's own share."""
    core_clock_hz: float | None
    """Current clock of the multiprocessors."""
    max_core_clock_hz: float | None
    """Highest possible clock of the multiprocessors."""
    memory_clock_hz: float | None
    """Current clock of the memory."""
    max_memory_clock_hz: float | None
    """Highest possible clock of the memory."""
    power_w: float | None
    """Current power draw, in watts."""
    power_limit_w: float | None
    """Power limit; the device slows down to stay under it."""
    pcie_generation: int | None
    """Current PCIe generation: an idle GPU may have lowered it."""
    max_pcie_generation: int | None
    """Highest PCIe generation that GPU and slot support."""
    pcie_lanes: int | None
    """Current number of PCIe lanes."""
    max_pcie_lanes: int | None
    """Highest number of PCIe lanes that GPU and slot support."""
    ecc: bool | None
    """Whether memory errors are corrected (ECC), which costs bandwidth on GDDR."""
    nvlinks: tuple[NvLink, ...] = ()
    """NVLinks in port order; empty if the GPU has none."""


@dataclass(frozen=True, kw_only=True)
class NvmlFacts:
    """The driver's information about this host."""

    missing: str | None
    """Why there is no information; None if the driver answered."""
    driver: str | None = None
    """Driver version."""
    cuda: str | None = None
    """Newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs in the driver's order."""
    paths: tuple[tuple[str | None, ...], ...] = ()
    """PCIe path from GPU (row) to GPU (column): a value of PATHS; None on the diagonal. NVLinks are
    in `gpus`."""


def read_nvml(library: ModuleType | None = None) -> NvmlFacts:
    """Read the driver's information, or the reason why there is none.

    Args:
      library: module to use instead of `pynvml`.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError as error:
            return NvmlFacts(missing=str(error))
    try:
        library.nvmlInit()
    except library.NVMLError as error:  # no driver, or one that does not answer
        return NvmlFacts(missing=str(error))
    try:
        return _facts(Driver(library))
    finally:
        Driver(library).ask("nvmlShutdown")


class Driver:
    """Queries that return None if they fail.

    Valid between `nvmlInit` and `nvmlShutdown` of `library`.
    """

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    def ask(self, name: str, *args: object) -> object:
        """The result of `name`; None if the call fails, or if this release of the library lacks the
        function or a constant among its arguments.
        """
        if None in args:
            return None
        try:
            return getattr(self._library, name)(*args)
        except (self._library.NVMLError, AttributeError):
            return None

    def text(self, name: str, *args: object) -> str | None:
        """A result as text."""
        return _text(self.ask(name, *args))

    def whole(self, name: str, *args: object) -> int | None:
        """A result that is an integer."""
        answer = self.ask(name, *args)
        return answer if isinstance(answer, int) else None

    def scaled(self, unit: float, name: str, *args: object) -> float | None:
        """An integer result, given in multiples of `unit`."""
        answer = self.whole(name, *args)
        return None if answer is None else answer * unit

    def constant(self, name: str) -> int | None:
        """A constant of the library; None if this release lacks it."""
        return getattr(self._library, name, None)


def _facts(driver: Driver) -> NvmlFacts:
    handles = [
        handle
        for index in range(driver.whole("nvmlDeviceGetCount") or 0)
        if (handle := driver.ask("nvmlDeviceGetHandleByIndex", index)) is not None
    ]
    cuda = driver.whole("nvmlSystemGetCudaDriverVersion_v2")
    names = {driver.constant(f"NVML_TOPOLOGY_{name}"): words for name, words in PATHS.items()}
    return NvmlFacts(
        missing=None,
        driver=driver.text("nvmlSystemGetDriverVersion"),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(_gpu(driver, handle) for handle in handles),
        paths=tuple(
            tuple(
                None
                if one is other
                else names.get(driver.whole("nvmlDeviceGetTopologyCommonAncestor", one, other))
                for other in handles
            )
            for one in handles
        ),
    )


def _gpu(driver: Driver, handle: object) -> Gpu:
    core, memory = driver.constant("NVML_CLOCK_SM"), driver.constant("NVML_CLOCK_MEM")
    total, ecc = (
        getattr(driver.ask("nvmlDeviceGetMemoryInfo", handle), "total", None),
        driver.ask("nvmlDeviceGetEccMode", handle),
    )
    return Gpu(
        name=driver.text("nvmlDeviceGetName", handle),
        pci_address=_address(driver.ask("nvmlDeviceGetPciInfo", handle)),
        memory_bytes=None if total is None else int(total),
        core_clock_hz=driver.scaled(1e6, "nvmlDeviceGetClockInfo", handle, core),
        max_core_clock_hz=driver.scaled(1e6, "nvmlDeviceGetMaxClockInfo", handle, core),
        memory_clock_hz=driver.scaled(1e6, "nvmlDeviceGetClockInfo", handle, memory),
        max_memory_clock_hz=driver.scaled(1e6, "nvmlDeviceGetMaxClockInfo", handle, memory),
        power_w=driver.scaled(1e-3, "nvmlDeviceGetPowerUsage", handle),
        power_limit_w=driver.scaled(1e-3, "nvmlDeviceGetPowerManagementLimit", handle),
        pcie_generation=driver.whole("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        max_pcie_generation=driver.whole("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_lanes=driver.whole("nvmlDeviceGetCurrPcieLinkWidth", handle),
        max_pcie_lanes=driver.whole("nvmlDeviceGetMaxPcieLinkWidth", handle),
        ecc=ecc[0] == driver.constant("NVML_FEATURE_ENABLED")
        if isinstance(ecc, list | tuple)
        else None,
        nvlinks=tuple(_nvlinks(driver, handle)),
    )


def _nvlinks(driver: Driver, handle: object) -> Iterator[NvLink]:
    for port in range(driver.constant("NVML_NVLINK_MAX_LINKS") or 0):
        active = driver.whole("nvmlDeviceGetNvLinkState", handle, port)
        if active is None:  # no such port
            continue
        kind, switch = (
            driver.whole("nvmlDeviceGetNvLinkRemoteDeviceType", handle, port),
            driver.constant("NVML_NVLINK_DEVICE_TYPE_SWITCH"),
        )
        yield NvLink(
            port=port,
            active=active == driver.constant("NVML_FEATURE_ENABLED"),
            version=driver.whole("nvmlDeviceGetNvLinkVersion", handle, port),
            peer=SWITCH
            if kind is not None and kind == switch
            else _address(driver.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, port)),
        )


def _address(pci_info: object) -> str | None:
    return _text(getattr(pci_info, "busId", None))


def _text(answer: object) -> str | None:
    # bytes or str, depending on the function and on the library's release.
    return (
        answer.decode()
        if isinstance(answer, bytes)
        else answer
        if isinstance(answer, str)
        else None
    )
