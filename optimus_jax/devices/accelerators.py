"""Published specifications of accelerators.

Peaks are *dense* (no structured sparsity): data sheets from the A100 on print the sparse figure,
which is twice as high. Memory is the data sheet's number in decimal bytes. Drivers report up to 7%
more (an "80 GB" part has about 80 GiB of chips), so what fits into the published memory fits on the
device. A figure that the vendor does not publish is None, and so is every figure of an unlisted
device.
"""

from dataclasses import dataclass

from optimus_jax.errors import ConfigError, explain, nearest

AMPERE, HOPPER = (8, 0), (9, 0)
"""The first compute capability with bf16, and with cuDNN's fused attention."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of device."""

    name: str
    """Name in this package, as in `--cluster h100:8x8`."""
    device_kind: str
    """The driver's name of the device, as JAX reports it."""
    platform: str
    """JAX's platform: `gpu` or `cpu`."""
    dense_peak_flops: float | None
    """FLOP/s of 16-bit matmuls (bf16; f16 where there is no bf16) that accumulate in float32."""
    f32_peak_flops: float | None
    """FLOP/s of float32 matmuls as JAX runs them by default: in TF32 where the device has it
    (jax.lax.Precision.DEFAULT)."""
    memory_bytes: int | None
    """Memory of one device."""
    memory_bytes_per_s: float | None
    """Bandwidth of that memory, reads and writes together."""
    num_cores: int | None
    """Streaming multiprocessors, or compute units."""
    compute_capability: tuple[int, int] | None = None
    """NVIDIA's compute capability (developer.nvidia.com/cuda-gpus); None: unknown, or not an NVIDIA
    device."""
    rated_power_w: float | None = None
    """Most that the device may draw, in watts; None: unknown."""
    sources: tuple[str, ...]
    """Where the figures are published."""

    @classmethod
    def unlisted(cls, device_kind: str, platform: str) -> "Accelerator":
        """A device of which only the platform and the driver's name are known."""
        return cls(
            name=device_kind,
            device_kind=device_kind,
            platform=platform,
            dense_peak_flops=None,
            f32_peak_flops=None,
            memory_bytes=None,
            memory_bytes_per_s=None,
            num_cores=None,
            sources=(),
        )


def accelerator_named(name: str) -> Accelerator:
    """The listed accelerator of that name.

    Raises:
      ConfigError: there is none; the message suggests the nearest name.
    """
    for accelerator in ACCELERATORS:
        if accelerator.name == name.lower():
            return accelerator
    raise ConfigError(
        explain(
            f"unknown accelerator {name!r}",
            given=name,
            do=nearest(name.lower(), (each.name for each in ACCELERATORS)),
        )
    )


def accelerator_of_kind(device_kind: str) -> Accelerator | None:
    """The listed accelerator that the driver calls `device_kind`; None if there is none.

    The whole name must match: "NVIDIA H200 NVL" and the slice "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    are slower than the devices whose names theirs begin with.
    """
    return next((each for each in ACCELERATORS if each.device_kind == device_kind), None)


def _nvidia(
    name: str,
    device_kind: str,
    *,
    tflops_16: float,
    tflops_32: float,
    memory_gb: int,
    memory_gb_per_s: float,
    num_sms: int,
    capability: tuple[int, int],
    watts: float | None,
    sources: tuple[str, ...],
) -> Accelerator:
    return Accelerator(
        name=name,
        device_kind=device_kind,
        platform="gpu",
        dense_peak_flops=tflops_16 * 1e12,
        f32_peak_flops=tflops_32 * 1e12,
        memory_bytes=memory_gb * 10**9,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        num_cores=num_sms,
        compute_capability=capability,
        rated_power_w=watts,
        sources=sources,
    )


_AMPERE = (
    "NVIDIA A100 Tensor Core GPU Architecture white paper: "
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
)
_HOPPER = (
    "NVIDIA H100 Tensor Core GPU Architecture white paper: "
    "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
)
_ADA = (
    "NVIDIA Ada GPU Architecture white paper: "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
_A100 = (
    "NVIDIA A100 data sheet: "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    _AMPERE,
)
_H100 = (
    "NVIDIA H100 data sheet (half of its sparse peaks): "
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
    _HOPPER,
)
_H200 = (
    "NVIDIA H200 data sheet (half of its sparse peaks): "
    "https://www.nvidia.com/en-us/data-center/h200/",
    _HOPPER,
)
_B200 = (
    "NVIDIA DGX B200 data sheet (an eighth of its figures): "
    "https://www.nvidia.com/en-us/data-center/dgx-b200/",
    "NVIDIA HGX specifications (an eighth of its figures): "
    "https://www.nvidia.com/en-us/data-center/hgx/",
    "multiprocessors: as CUDA counts them, in no data sheet; 1000 W: HGX B200, "
    "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview",
)
_GB200 = (
    "NVIDIA GB200 NVL72 specifications (a 72nd of its figures, half of its sparse peaks): "
    "https://www.nvidia.com/en-us/data-center/gb200-nvl72/",
    "186 GB: MIG user guide, "
    "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-gpus.html",
    "1200 W: https://glennklockwood.com/garden/processors/B200; multiprocessors: those of the B200",
)
_GB300 = (
    "NVIDIA GB300 NVL72 specifications (a 72nd of its figures, half of its sparse peaks): "
    "https://www.nvidia.com/en-us/data-center/gb300-nvl72/",
    "279 GB, 1400 W: https://verda.com/blog/gb300-nvl72-architecture",
    "multiprocessors: "
    "https://developer.nvidia.com/blog/inside-nvidia-blackwell-ultra-the-chip-powering-the-ai-factory-era/",
)
_MI300X = (
    "AMD Instinct MI300X specifications (float32: of its matrix cores): "
    "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
)
_L40S = ("NVIDIA L40S data sheet: https://www.nvidia.com/en-us/data-center/l40s/", _ADA)
_L4 = (
    "NVIDIA L4 data sheet (half of its sparse peaks): https://www.nvidia.com/en-us/data-center/l4/",
    _ADA,
)
_GA102 = (
    "NVIDIA Ampere GA102 GPU Architecture white paper: "
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
)
_DGX_2H = (
    "Megatron-LM, arXiv:1909.08053: 39 TFLOP/s are 30% of the peak of a DGX-2H's V100, which may "
    "take 450 W: https://arxiv.org/abs/1909.08053",
)
_V100 = (
    "NVIDIA V100 data sheet: "
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
    "NVIDIA Tesla V100 GPU Architecture white paper: "
    "https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf",
)


def _v100(
    name: str,
    device_kind: str,
    *,
    memory_gb: int = 32,
    tflops_16: float = 125,
    watts: float | None = None,
    sources: tuple[str, ...] = _V100,
) -> Accelerator:
    return _nvidia(
        name,
        device_kind,
        tflops_16=tflops_16,
        tflops_32=15.7,
        memory_gb=memory_gb,
        memory_gb_per_s=900,
        num_sms=80,
        capability=(7, 0),
        watts=watts,
        sources=sources,
    )


ACCELERATORS = (
    Accelerator.unlisted("cpu", "cpu"),
    _nvidia(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        tflops_16=312,
        tflops_32=156,
        memory_gb=80,
        memory_gb_per_s=2039,
        num_sms=108,
        capability=(8, 0),
        watts=400,
        sources=_A100,
    ),
    _nvidia(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        tflops_16=312,
        tflops_32=156,
        memory_gb=40,
        memory_gb_per_s=1555,
        num_sms=108,
        capability=(8, 0),
        watts=400,
        sources=_A100,
    ),
    _nvidia(
        "a100-pcie",
        "NVIDIA A100 80GB PCIe",
        tflops_16=312,
        tflops_32=156,
        memory_gb=80,
        memory_gb_per_s=1935,
        num_sms=108,
        capability=(8, 0),
        watts=300,
        sources=_A100,
    ),
    _nvidia(
        "a100-pcie-40gb",
        "NVIDIA A100-PCIE-40GB",
        tflops_16=312,
        tflops_32=156,
        memory_gb=40,
        memory_gb_per_s=1555,
        num_sms=108,
        capability=(8, 0),
        watts=250,
        sources=_A100,
    ),
    _nvidia(
        "h100",
        "NVIDIA H100 80GB HBM3",
        tflops_16=989,
        tflops_32=494,
        memory_gb=80,
        memory_gb_per_s=3350,
        num_sms=132,
        capability=(9, 0),
        watts=700,
        sources=_H100,
    ),
    _nvidia(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        tflops_16=756,
        tflops_32=378,
        memory_gb=80,
        memory_gb_per_s=2000,
        num_sms=114,
        capability=(9, 0),
        watts=350,
        sources=_H100,
    ),
    _nvidia(
        "h200",
        "NVIDIA H200",
        tflops_16=989,
        tflops_32=494,
        memory_gb=141,
        memory_gb_per_s=4800,
        num_sms=132,
        capability=(9, 0),
        watts=700,
        sources=_H200,
    ),
    _nvidia(
        "b200",
        "NVIDIA B200",
        tflops_16=2250,
        tflops_32=1125,
        memory_gb=180,
        memory_gb_per_s=8000,
        num_sms=148,
        capability=(10, 0),
        watts=1000,
        sources=_B200,
    ),
    _nvidia(
        "gb200",
        "NVIDIA GB200",
        tflops_16=2500,
        tflops_32=1250,
        memory_gb=186,
        memory_gb_per_s=8000,
        num_sms=148,
        capability=(10, 0),
        watts=1200,
        sources=_GB200,
    ),
    _nvidia(
        "gb300",
        "NVIDIA GB300",
        tflops_16=2500,
        tflops_32=1250,
        memory_gb=279,
        memory_gb_per_s=8000,
        num_sms=160,
        capability=(10, 3),
        watts=1400,
        sources=_GB300,
    ),
    Accelerator(
        name="mi300x",
        device_kind="AMD Instinct MI300X",
        platform="gpu",
        dense_peak_flops=1307.4e12,
        f32_peak_flops=163.4e12,
        memory_bytes=192 * 10**9,
        memory_bytes_per_s=5.3e12,
        num_cores=304,
        rated_power_w=750,
        sources=_MI300X,
    ),
    _nvidia(
        "l40s",
        "NVIDIA L40S",
        tflops_16=362.05,
        tflops_32=183,
        memory_gb=48,
        memory_gb_per_s=864,
        num_sms=142,
        capability=(8, 9),
        watts=350,
        sources=_L40S,
    ),
    _nvidia(
        "l4",
        "NVIDIA L4",
        tflops_16=121,
        tflops_32=60,
        memory_gb=24,
        memory_gb_per_s=300,
        num_sms=58,
        capability=(8, 9),
        watts=72,
        sources=_L4,
    ),
    _nvidia(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        tflops_16=165.2,
        tflops_32=82.6,
        memory_gb=24,
        memory_gb_per_s=1008,
        num_sms=128,
        capability=(8, 9),
        watts=450,
        sources=(_ADA,),
    ),
    _nvidia(
        "rtx3090",
        "NVIDIA GeForce RTX 3090",
        tflops_16=71,
        tflops_32=35.6,
        memory_gb=24,
        memory_gb_per_s=936,
        num_sms=82,
        capability=(8, 6),
        watts=350,
        sources=_GA102,
    ),
    _v100("v100", "Tesla V100-SXM2-32GB", watts=300),
    _v100("v100-16gb", "Tesla V100-SXM2-16GB", memory_gb=16, watts=300),
    _v100("v100-sxm3", "Tesla V100-SXM3-32GB"),
    _v100(
        "v100-sxm3-h",
        "Tesla V100-SXM3-32GB-H",
        tflops_16=130,
        watts=450,
        sources=(*_DGX_2H, *_V100),
    ),
)
"""All listed accelerators."""
