"""Rates: the time model's speed parameters of one kind of device, with their sources."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optimus_jax.devices.accelerators import Accelerator, accelerator_of_kind
from optimus_jax.errors import PlanError, explain
from optimus_jax.planning.cost.work import matmul
from optimus_jax.planning.profiles.hardware import HardwareProfile
from optimus_jax.planning.profiles.measurements import ALL_REDUCE, PERMUTE, MatmulTime

UNKNOWN_LATENCY_S = 5e-6
"""Latency of one step of a collective if none was measured or published: the usual order of
magnitude between GPUs."""

MATMUL_SHARE = 0.75
"""Share of the dense peak that large matmuls reach: that of A100s in the steps measured by vTrain
(benchmarks/planner.py)."""
MATMUL_SHARES: Mapping[str, float] = {
    "h100": 0.71,
    "h100-pcie": 0.71,
    "h200": 0.71,
    "b200": 0.67,
    "gb200": 0.63,
    "gb300": 0.63,
    "mi300x": 0.44,
}
"""The same share, for accelerators where it is known to be lower.

H100: 86 published steps of five implementations, 0.71 on average, 0.68 to 0.75 with one of them
left out (benchmarks/published.py). H200: the same chip. PCIe H100s, with half of the power limit,
have no measurement of their own. B200: no measured step; the A100's share times the ratio of the
best published matmuls, 77.6% of peak on the B200 to 86.9% on the A100 (the same rule gives 0.69 for
the H100, at 80.3%). GB200 and MI300X: the same rule, 72.9 and 51.4%. GB300: as the GB200, whose
16-bit peak it has.


https://github.com/stas00/ml-engineering/blob/744d01e18b79512572f64a6bbd8b5f4a725203a7/compute/accelerator/README.md"""
MEMORY_SHARE = 0.85
"""Share of the memory bandwidth that passes over memory reach."""

F32 = "f32"
CPU_PASS_SHARE = 0.25
"""Share of a CPU's memory bandwidth that passes with exp, tanh or sums reach, measured in the steps
of benchmarks/cpu_step.py."""
UNSEEN_SPREAD = 0.2
"""`Rates.spread` if parts of a step were measured but no whole step."""

LAYER, HEAD = OPERATORS = ("layer", "head")
"""What a correction applies to: all operators of a layer, or all of embedding, head and loss."""
ShapePoint = tuple[float, float, float]
"""Base-2 logarithms of a microbatch's tokens, the width of the residual stream, and the devices
along mesh axis tensor."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The correction of an operator's predicted time at a measured shape
    (planning/cost/corrections.py).
    """

    operator: str
    """One of OPERATORS."""
    place: ShapePoint
    """The measured shape."""
    weight: float
    """Weight of this shape in the logarithm of the factor."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed parameters of one kind of device."""

    accelerator: str
    """Name of the accelerator."""
    source: str
    """Source of the figures."""
    matmul_flops_per_s: float
    """Rate of large 16-bit matmuls."""
    f32_matmul_flops_per_s: float
    """Rate of large float32 matmuls."""
    memory_bytes_per_s: float
    """Bandwidth of passes over memory, reads and writes together."""
    pass_share: float = 1.0
    """Share of that bandwidth that passes with arithmetic reach."""
    num_cores: float
    """Cores among which a matmul's tiles are divided. 0: matmuls are not tiled."""
    wave: float = 0.5
    """Fraction of a wave of tiles that each matmul loses, because cores idle in its last wave."""
    inner: float = 100.0
    """Inner dimension at which a matmul reaches half of its rate."""
    unaligned_share: float = 0.35
    """Share of the rate that matmuls reach if a row's length is not a multiple of 8 values."""
    fused_attention_share: float = 0.7
    """Share of the matmul rate that fused attention reaches."""
    saved_copies: float = 0.0
    """Times that what forward saves for backward is copied, to the stacks of a loop over layers and
    from them; 0: it is written and read in place."""
    again_share: float = 1.0
    """Time of recomputing over that of the forward that it repeats: less where what it gives is
    still in the cache when it is used."""
    launch_s: float = 3e-6
    """Seconds to launch a kernel from a compiled program."""
    interpreter_launch_s: float = 30e-6
    """Seconds to launch a kernel from an interpreter, including its overhead."""
    launch_overlap: float = 2.0
    """Exponent of the norm that combines launch and compute time: 1 adds them, large exponents
    overlap them."""
    collective_share: float = 0.7
    """Share of an intra-host link's speed that collectives reach."""
    inter_host_share: float = 0.8
    """The same between hosts."""
    send_share: float = 0.7
    """Share of an intra-host link's speed that a send to the next stage reaches."""
    host_share: float = 0.83
    """Share of the link to host memory that large copies reach: 26.2 of 31.5 GB/s on an A100
    (https://github.com/jdh4/della-gpu-A100)."""
    latency_s: float = UNKNOWN_LATENCY_S
    """Latency of each step of a collective inside a host, for links without a known latency."""
    inter_host_latency_s: float = 2 * UNKNOWN_LATENCY_S
    """The same between hosts."""
    arrival_s: float = 0.0
    """Additional seconds of a collective because devices reach it at different times."""
    overlap_slowdown: float = 1.3
    """Slowdown of compute and a collective while they overlap (Galvatron's default,
    arXiv:2211.13878)."""
    overlap_share: float = 0.5
    """Share of the collectives' time that overlaps with compute, among those that can, where
    planning/cost/overlap.py does not know the order of instructions."""
    step_s: float = 2e-3
    """Fixed seconds per step: scalars and the host's work."""
    shares_processor: bool = False
    """Whether the devices of a host are virtual ones of a processor. One that waits then leaves its
    share of the speed to the others."""
    spread: float = 0.25
    """Standard deviation of the logarithm of measured over predicted step times, for shapes far
    from measured ones."""
    spread_nearby: float = 0.05
    """The same at measured shapes (those of `corrections`)."""
    corrections: tuple[Correction, ...] = ()
    """Corrections at measured shapes."""
    width_octaves: float = 0.2
    """Distance in doublings of the width at which the influence of a correction falls to 1/e."""

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Rates":
        """Expected rates of a GPU from its data sheet: the usual shares of its peaks.

        With these rates, the predicted step times are off by 9% on average for Megatron on A100s
        (benchmarks/planner.py), and by 2% to 16% for other implementations' published steps on
        H100s (benchmarks/published.py). GPUs without measurements are assumed to reach the A100's
        shares.

        Raises:
          PlanError: the data sheet's figures are unknown.
        """
        peak, f32_peak = accelerator.dense_peak_flops, accelerator.f32_peak_flops
        if (
            peak is None
            or f32_peak is None
            or accelerator.memory_bytes_per_s is None
            or accelerator.num_cores is None
        ):
            raise PlanError(
                explain(
                    f"the speed of a {accelerator.name} is unknown",
                    given="no figures in devices/accelerators.py",
                    do="profile it where it is, or plan for a listed accelerator",
                )
            )
        return cls(
            accelerator=accelerator.name,
            source=(
                f"{accelerator.name}'s data sheet and the shares of it that GPUs usually reach; not"
                " measured"
            ),
            matmul_flops_per_s=MATMUL_SHARES.get(accelerator.name, MATMUL_SHARE) * peak,
            f32_matmul_flops_per_s=MATMUL_SHARE * f32_peak,
            memory_bytes_per_s=MEMORY_SHARE * accelerator.memory_bytes_per_s,
            num_cores=accelerator.num_cores,
        )

    @classmethod
    def from_profile(cls, profile: HardwareProfile) -> "Rates":
        """Rates measured on the devices of `profile`. Use them with `profile.cluster(...)`, whose
        links are measured too.

        Everything was measured with all devices busy. Virtual devices share one processor, so each
        gets a share of its speed, and a plan with more of them is not predicted to be faster.

        Raises:
          PlanError: matmuls or memory passes were not measured for lack of time.
        """
        probed, setting = profile.probed, profile.setting
        if not probed.matmuls or not probed.passes:
            raise PlanError(
                explain(
                    "the hardware profile is not complete",
                    given=f"{probed.num_left_out} probes were left out for want of time",
                    do="profile this machine again while nothing else runs on it",
                )
            )
        on_gpu, known = setting.platform == "gpu", accelerator_of_kind(setting.device_kind)
        cores = float(known.num_cores or 0) if known else 0.0
        by_dtype = {
            dtype: _matmul_rate([each for each in probed.matmuls if each.dtype == dtype], cores)
            for dtype in dict.fromkeys(each.dtype for each in probed.matmuls)
        }
        in_f32 = by_dtype.get(F32) or next(iter(by_dtype.values()))
        # A processor without 16-bit matmuls computes 16-bit inputs in float32.
        in_16_bits = next((rate for dtype, rate in by_dtype.items() if dtype != F32), in_f32)
        return cls(
            accelerator=setting.device_kind,
            source=(
                f"measured on {setting.num_devices} x {setting.device_kind}, {profile.measured_at}"
            ),
            matmul_flops_per_s=in_16_bits[0],
            f32_matmul_flops_per_s=in_f32[0],
            inner=in_16_bits[1],
            num_cores=cores,
            memory_bytes_per_s=max(probed.passes, key=lambda each: each.num_bytes).bytes_per_s,
            pass_share=1.0 if on_gpu else CPU_PASS_SHARE,
            unaligned_share=cls.unaligned_share if on_gpu else 1.0,
            collective_share=1.0,
            inter_host_share=1.0,
            host_share=1.0 if probed.host_copies else cls.host_share,
            send_share=_send_share(profile),
            step_s=probed.launch_s or cls.step_s,
            shares_processor=not on_gpu and setting.num_devices > setting.num_hosts,
            overlap_slowdown=probed.overlap.slowdown if probed.overlap else cls.overlap_slowdown,
            spread=UNSEEN_SPREAD,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(dataclasses.astuple(self))

    def __hash__(self) -> int:
        """Computed once, because rates are cache keys."""
        return self._hash


def _matmul_rate(times: Sequence[MatmulTime], cores: float) -> tuple[float, float]:
    """FLOP/s of large matmuls, and the inner dimension at which a matmul runs at half of that."""
    works = [matmul(each.m, each.k, each.n) for each in times]
    whole = np.array([work.flops + Rates.wave * cores * work.wave for work in works])
    short = np.array([work.short + Rates.wave * cores * work.short_wave for work in works])
    seconds = np.array([each.time_s for each in times])
    # Least squares on the relative error, so that small matmuls count as much as large ones.
    (per_flop, per_short), *_ = np.linalg.lstsq(
        np.stack([whole, short], axis=1) / seconds[:, None], np.ones_like(seconds), rcond=None
    )
    if per_short < 0 or per_flop <= 0:
        per_flop, per_short = np.sum(whole / seconds) / np.sum((whole / seconds) ** 2), 0.0
    return float(1 / per_flop), float(per_short / per_flop)


def _send_share(profile: HardwareProfile) -> float:
    """Ratio of a send's speed to an all-reduce's, between the same devices; 1 if unknown."""
    size = profile.setting.num_devices // profile.setting.num_hosts
    send, reduced = profile.fit(PERMUTE, size), profile.fit(ALL_REDUCE, size)
    if send is None or reduced is None or not send.bytes_per_s or not reduced.bytes_per_s:
        return 1.0
    return send.bytes_per_s / reduced.bytes_per_s
