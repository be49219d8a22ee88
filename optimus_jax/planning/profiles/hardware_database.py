"""The usual hosts of accelerators, with their intra-host and inter-host links.

Speeds are published peaks per device in one direction (NVIDIA publishes the sum of both
directions). Latencies are not published; the time model has defaults for them.
"""

from dataclasses import dataclass, replace

from optimus_jax.planning.profiles.links import Link


@dataclass(frozen=True, kw_only=True)
class Host:
    """The usual host of an accelerator. For GPUs of an NVL72 it is the rack: all that is joined by
    NVLink, whatever the number of operating systems."""

    intra_host: Link
    """Link between its devices."""
    inter_host: Link
    """Link to other hosts, with one device's share of its speed."""
    to_host: Link
    """Link from each device to the host's memory."""
    memory_bytes: int | None = None
    """Host memory from the data sheet (for a DGX A100 the smaller option); None if it depends on
    the site."""


NETWORK = Link.unknown("network")
"""Inter-host link of unknown speed: it depends on the site."""


def host_of(accelerator: str) -> Host:
    """The usual host of the named accelerator."""
    return HOSTS.get(accelerator, UNKNOWN_HOST)


def _link(name: str, gb_per_s: float, source: str) -> Link:
    return Link(name=name, bytes_per_s=gb_per_s * 1e9, latency_s=None, source=source)


def _ndr(dgx: str, url: str) -> Link:
    return _link(
        "InfiniBand NDR 400", 50, f"NVIDIA {dgx} data sheet, a port of 400 Gb/s for each GPU: {url}"
    )


_PCIE_3 = _link(
    "PCIe 3 x16", 15.75, "PCI Express Base Specification 3.0: 8 GT/s, 16 lanes, 128b/130b"
)
_PCIE_4 = _link(
    "PCIe 4 x16", 31.5, "PCI Express Base Specification 4.0: 16 GT/s, 16 lanes, 128b/130b"
)
_PCIE_5 = _link(
    "PCIe 5 x16", 63.0, "PCI Express Base Specification 5.0: 32 GT/s, 16 lanes, 128b/130b"
)
_NVLINK_2 = _link(
    "NVLink 2", 150, "NVIDIA V100 data sheet: 300 GB/s both ways, summed over its neighbours"
)
_NVLINK_3 = _link("NVLink 3", 300, "NVIDIA A100 data sheet: 600 GB/s both ways")
_NVLINK_4 = _link("NVLink 4", 450, "NVIDIA H100 and H200 data sheets: 900 GB/s both ways")
_NVLINK_5 = _link("NVLink 5", 900, "NVIDIA DGX B200 data sheet: 14.4 TB/s both ways for 8 GPUs")
_NVLINK_72 = _link(
    "NVLink 5", 900, "NVIDIA GB200 and GB300 NVL72 specifications: 130 TB/s both ways for 72 GPUs"
)
_XGMI = replace(
    _link(
        "Infinity Fabric",
        448,
        "AMD Instinct MI300X specifications: 7 links of 128 GB/s both ways, one to each other GPU",
    ),
    peers=7,
)
_EDR = _link(
    "InfiniBand EDR 100",
    6.25,
    "NVIDIA DGX-1 With Tesla V100 System Architecture white paper, 4 ports of 100 Gb/s for 8 GPUs: "
    "https://images.nvidia.com/content/pdf/dgx1-v100-system-architecture-whitepaper.pdf",
)
_EDR_DGX_2 = _link(
    "InfiniBand EDR 100",
    6.25,
    "NVIDIA DGX-2 data sheet, 8 ports of 100 Gb/s for 16 GPUs: "
    "https://images.nvidia.com/content/pdf/dgx-2-print-datasheet-738070-nvidia-a4-web-uk.pdf",
)
_HDR = _link(
    "InfiniBand HDR 200",
    25,
    "NVIDIA DGX A100 data sheet, a port of 200 Gb/s for each GPU: "
    "https://images.nvidia.com/aem-dam/Solutions/Data-Center/nvidia-dgx-a100-datasheet.pdf",
)

_DGX_1 = Host(intra_host=_NVLINK_2, inter_host=_EDR, to_host=_PCIE_3, memory_bytes=512 * 10**9)
_DGX_2 = Host(
    intra_host=_NVLINK_2, inter_host=_EDR_DGX_2, to_host=_PCIE_3, memory_bytes=1536 * 10**9
)
_DGX_A100 = Host(intra_host=_NVLINK_3, inter_host=_HDR, to_host=_PCIE_4, memory_bytes=10**12)
_DGX_H100 = Host(
    intra_host=_NVLINK_4,
    inter_host=_ndr("DGX H100", "https://www.nvidia.com/en-us/data-center/dgx-h100/"),
    to_host=_PCIE_5,
    memory_bytes=2 * 10**12,
)
_DGX_H200 = Host(
    intra_host=_NVLINK_4,
    inter_host=_ndr("DGX H200", "https://www.nvidia.com/en-us/data-center/dgx-h200/"),
    to_host=_PCIE_5,
    memory_bytes=2 * 10**12,
)
_DGX_B200 = Host(
    intra_host=_NVLINK_5,
    inter_host=_ndr("DGX B200", "https://www.nvidia.com/en-us/data-center/dgx-b200/"),
    to_host=_PCIE_5,
    memory_bytes=2 * 10**12,
)
_NVL72_GB200 = Host(
    intra_host=_NVLINK_72,
    inter_host=_ndr("DGX GB200", "https://www.nvidia.com/en-us/data-center/dgx-gb200/"),
    to_host=Link.unknown("NVLink-C2C"),
)
_NVL72_GB300 = Host(
    intra_host=_NVLINK_72,
    inter_host=_link(
        "InfiniBand XDR 800",
        100,
        "NVIDIA DGX GB300 data sheet, a ConnectX-8 of 800 Gb/s for each GPU: "
        "https://www.nvidia.com/en-us/data-center/dgx-gb300/",
    ),
    to_host=Link.unknown("NVLink-C2C"),
)
_MI300X = Host(intra_host=_XGMI, inter_host=NETWORK, to_host=_PCIE_5)
_SERVER_PCIE_4 = Host(intra_host=_PCIE_4, inter_host=NETWORK, to_host=_PCIE_4)
_SERVER_PCIE_5 = Host(intra_host=_PCIE_5, inter_host=NETWORK, to_host=_PCIE_5)

MEMORY_OF_HOST = Link.unknown("host memory")
UNKNOWN_HOST = Host(intra_host=Link.unknown("host"), inter_host=NETWORK, to_host=MEMORY_OF_HOST)

HOSTS = {
    "cpu": Host(intra_host=MEMORY_OF_HOST, inter_host=NETWORK, to_host=MEMORY_OF_HOST),
    "a100": _DGX_A100,
    "a100-40gb": _DGX_A100,
    "a100-pcie": _SERVER_PCIE_4,
    "a100-pcie-40gb": _SERVER_PCIE_4,
    "h100": _DGX_H100,
    "h100-pcie": _SERVER_PCIE_5,
    "h200": _DGX_H200,
    "b200": _DGX_B200,
    "gb200": _NVL72_GB200,
    "gb300": _NVL72_GB300,
    "mi300x": _MI300X,
    "l40s": _SERVER_PCIE_4,
    "l4": _SERVER_PCIE_4,
    "rtx4090": _SERVER_PCIE_4,
    "rtx3090": _SERVER_PCIE_4,
    "v100": _DGX_1,
    "v100-16gb": _DGX_1,
    "v100-sxm3": _DGX_2,
    "v100-sxm3-h": _DGX_2,
}
"""Usual hosts by accelerator name. Devices with NVLink are assumed to be in NVIDIA's own DGX or
NVL72, others in a server with a full PCIe slot per device."""
