"""Rates: the speed parameters of one kind of device for the time model, with their sources."""

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
"""Of a step of a collective where no latency was measured or published: the order of what is usual
between GPUs."""

MATMUL_SHARE = 0.75
"""Of the dense peak, for large matmuls: what A100s reached in vTrain's measured steps
(benchmarks/planner.py)."""
MATMUL_SHARES: Mapping[str, float] = {"h100": 0.72, "h100-pcie": 0.72, "h200": 0.72, "b200": 0.67}
"""The same for accelerators that are known to reach less.

H100: 86 published steps of five implementations, 0.72 on average, 0.68 to 0.76 with one of them
left out (benchmarks/published.py). H200: the same chip. PCIe cards, which have half of the power,
have no row of their own. B200: no step; the A100's share times the ratio of the best matmuls that
were published, 77.6% of the B200's peak to 86.9% of the A100's (which gives 0.69 for the H100, with
80.3%):
https://github.com/stas00/ml-engineering/blob/744d01e18b79512572f64a6bbd8b5f4a725203a7/compute/accelerator/README.md
"""
MEMORY_SHARE = 0.85
"""Of the memory's bandwidth."""

F32 = "f32"
CPU_PASS_SHARE = 0.25
"""exp, tanh and sums keep a CPU busy longer than its memory: so much is left in the steps of
benchmarks/cpu_step.py."""
UNSEEN_SPREAD = 0.2
"""Of step times where no step was measured, but all that it consists of."""

LAYER, HEAD = OPERATORS = ("layer", "head")
"""Subjects of corrections: all operators of a layer; all of embedding and head."""
ShapePoint = tuple[float, float, float]
"""Logarithms, base 2, of the tokens of a microbatch, the width of the residual stream, and the
devices along tensor."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """How much longer than by the rates something took where it was measured
    (planning/cost/corrections.py).
    """

    operator: str
    """One of OPERATORS."""
    place: ShapePoint
    """Where it was measured."""
    weight: float
    """Of this place in the logarithm of the factor."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed parameters of one kind of device."""

    accelerator: str
    """Its name."""
    source: str
    """Where the figures come from."""
    matmul_flops_per_s: float
    """Of large 16-bit matmuls."""
    f32_matmul_flops_per_s: float
    """Of large float32 matmuls."""
    memory_bytes_per_s: float
    """Of passes over memory, reads and writes together."""
    pass_share: float = 1.0
    """Of that, what passes with arithmetic in them reach."""
    num_cores: float
    """Cores that share the tiles of a matmul; 0: matmuls are not tiled."""
    wave: float = 0.5
    """Part of a wave of tiles that is lost in each matmul."""
    inner: float = 100.0
    """Inner dimension at which a matmul takes twice its time."""
    unaligned_share: float = 0.35
    """Of the rate that is left where a matmul's rows are no multiple of 8 values."""
    fused_attention_share: float = 0.7
    """Of the matmul rate that fused attention reaches."""
    launch_s: float = 3e-6
    """A kernel's launch by a compiled program."""
    interpreter_launch_s: float = 30e-6
    """A kernel's launch by an interpreter, with what it does around it."""
    launch_overlap: float = 2.0
    """Power of the norm that joins launching and computing: 1, one after the other; large, side by
    side."""
    collective_share: float = 0.7
    """Of a link's speed inside a host that collectives reach."""
    inter_host_share: float = 0.8
    """The same between hosts."""
    send_share: float = 0.7
    """Of a link's speed inside a host that a send to the next stage reaches."""
    host_share: float = 0.83
    """Of the link to the host's memory that large copies reach: 26.2 of 31.5 GB/s on an A100
    (https://github.com/jdh4/della-gpu-A100)."""
    latency_s: float = UNKNOWN_LATENCY_S
    """Of each step of a collective inside a host, where the link does not say."""
    inter_host_latency_s: float = 2 * UNKNOWN_LATENCY_S
    """The same between hosts."""
    arrival_s: float = 0.0
    """That a collective takes beyond its ring, because its devices come to it at different
    times."""
    overlap_slowdown: float = 1.3
    """How much slower compute and a collective are while they run side by side (Galvatron's
    default, arXiv:2211.13878)."""
    overlap_share: float = 0.5
    """Of the collectives that may run beside compute, those that find some to run beside."""
    step_s: float = 2e-3
    """What a step has once: scalars, the host's own work."""
    spread: float = 0.25
    """Standard deviation of the logarithm of measured over predicted step times, for shapes that
    were not measured."""
    spread_nearby: float = 0.05
    """The same for shapes that were (those of `corrections`)."""
    corrections: tuple[Correction, ...] = ()
    """Where operators were measured."""

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Rates":
        """Expected rates of a GPU by its data sheet: usual shares of its peaks.

        With them, steps of Megatron on A100s are missed by 9% on average (benchmarks/planner.py),
        published steps of other implementations on H100s by 2% to 16% (benchmarks/published.py).
        GPUs without measurements are assumed to reach the A100's shares.

        Raises:
          PlanError: its data sheet's figures are unknown.
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
                    f"nothing is known of how fast a {accelerator.name} is",
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
        """Rates of the devices of `profile`; use them with `profile.cluster(...)`, whose links are
        measured too.

        Everything was measured with all devices at work. So virtual devices, which share a
        processor, have a share of its speed each, and a step on more of them is not predicted to be
        faster than they are together.

        Raises:
          PlanError: there was no time to measure matmuls or memory.
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
        # A processor that has no 16-bit matmuls of its own was not asked for them, and computes
        # them in float32.
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
    """FLOP/s of large matmuls, and the inner dimension at which one takes twice its time."""
    works = [matmul(each.m, each.k, each.n) for each in times]
    whole = np.array([work.flops + Rates.wave * cores * work.wave for work in works])
    short = np.array([work.short + Rates.wave * cores * work.short_wave for work in works])
    seconds = np.array([each.time_s for each in times])
    # Least squares of the relative error: small matmuls count as much as large ones.
    (per_flop, per_short), *_ = np.linalg.lstsq(
        np.stack([whole, short], axis=1) / seconds[:, None], np.ones_like(seconds), rcond=None
    )
    if per_short < 0 or per_flop <= 0:
        per_flop, per_short = np.sum(whole / seconds) / np.sum((whole / seconds) ** 2), 0.0
    return float(1 / per_flop), float(per_short / per_flop)


def _send_share(profile: HardwareProfile) -> float:
    """A send's speed over that of an all-reduce, between the same devices."""
    size = profile.setting.num_devices // profile.setting.num_hosts
    send, reduced = profile.fit(PERMUTE, size), profile.fit(ALL_REDUCE, size)
    if send is None or reduced is None or not send.bytes_per_s or not reduced.bytes_per_s:
        return 1.0
    return send.bytes_per_s / reduced.bytes_per_s
