"""Published throughputs of dense decoders in 16 bits, compared with the time model.

The rows are in published.json. Each has its source, and the layout as far as it was published. Only
numbers were copied. If a row does not state the microbatch or the repeats of stages, the fastest
predicted value is used. A row whose recomputation is between two of our remat policies names both,
and is priced halfway between them.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from optimus_jax.config import Config, DataConfig, ModelConfig, RematPolicy
from optimus_jax.config.axes import DATA, TENSOR, AxisSizes
from optimus_jax.errors import OptimusError
from optimus_jax.mesh.rules import make_rules
from optimus_jax.models.flops import step_flops
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.cost.cost import term_times
from optimus_jax.planning.cost.implementation_profile import MEGATRON, OURS, ImplementationProfile
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Candidate, Pricing, search

FILE = Path(__file__).with_name("published.json")
GUESSED_ROWS = (1, 2, 4, 8, 16)
"""Sequences per microbatch that are tried if a row does not state it."""
FLASH_2_SHARE = {"h100": 0.35, "h200": 0.35}
"""Share of the dense peak that FlashAttention 2, written for A100s, reaches on newer GPUs
(arXiv:2407.08608, abstract)."""
SHARE_SLOPE = 0.75
"""Approximate slope of the logarithm of throughput over that of the matmul rate. It only affects
how fast the fit converges."""
BEST = 8
"""Number of best plans that a search keeps."""

EAGER = replace(
    MEGATRON,
    name="PyTorch FSDP, eager",
    stream_passes=(18.0, 22.0),
    gradient_bytes=4,
    fsdp_hides=True,
)
"""llm-foundry: 10 forward passes over memory for norms and residuals, and 8 for packing and
unpacking attention's four arrays (`bert_padding`); backward likewise."""
COMPILED = replace(
    OURS,
    name="PyTorch FSDP, compiled",
    lockstep=False,
    waits_for_sends=True,
    head_shared=False,
    repeats_last=True,
    scheduled_by_xla=False,
    fsdp_combines=True,
)
COMPILED_16 = replace(COMPILED, name="PyTorch FSDP, compiled, gradients in bf16", gradient_bytes=2)
"""The mixed precision of fms-fsdp."""
MAXTEXT = replace(OURS, name="MaxText", fsdp_combines=True)
"""The benchmarks let XLA combine gathers of up to 2 GiB, which is more than a layer's
(https://github.com/NVIDIA/dgxc-benchmarking/blob/0b71cfda/maxtext/configure.sh)."""
WITHOUT_SEQUENCE_PARALLELISM = {"MaxText", "Megatron-LM 2021"}
"""Software that does not split the tokens of the residual stream over tensor."""
OVERLAPPED = {"megatron-core": (TENSOR, DATA), "fsdp-compiled": (DATA,)}
"""Cost terms that overlap with compute in these, which the time model does not know."""


@cache
def megatron_core(tensor: int, data: int) -> ImplementationProfile:
    """Megatron-Core of 2024.

    Residuals are split over the tensor axis (sequence parallelism) and moments over data. Gradients
    and parameters are exchanged in bf16. Stages with repeats compute while they send, unless
    `--no-overlap-p2p-communication` is given.
    """
    passes = MEGATRON.stream_passes[0] / tensor, MEGATRON.stream_passes[1] / tensor
    return replace(
        MEGATRON,
        name="Megatron-Core",
        stream_passes=passes,
        optimizer_bytes=MEGATRON.optimizer_bytes / data,
        waits_for_sends=False,
    )


@cache
def _sending(profile: ImplementationProfile, parts: bool) -> ImplementationProfile:
    """This profile, sending a stage's output in parts or whole."""
    return replace(profile, sends_parts=parts)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A publication that rows come from."""

    name: str
    """Our name of the source."""
    software: str
    """The software that ran."""
    url: str
    """The page or file; in a repository, at a commit."""
    implementation: str
    """How the software computes: a name of `Row.implementation_profile`."""
    note: str = ""
    """Other facts from the source."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published throughput. Exactly one of the last five fields is known."""

    source: Source
    """The publication."""
    model: ModelConfig
    """The model that was trained."""
    accelerator: str
    """Name of the accelerator, as in `--cluster`."""
    devices: int
    """Number of devices."""
    per_host: int = 8
    """Devices per host."""
    tensor: int = 1
    """Size of the tensor axis."""
    pipe: int = 1
    """Number of pipeline stages."""
    repeats: int | None = None
    """Visits of a microbatch to a stage; None: unknown."""
    sends_parts: bool | None = None
    """Whether devices along tensor send a part of a stage's output each (the scatter/gather
    optimization of arXiv:2104.04473); None: as in the implementation profile."""
    fsdp: int = 1
    """Devices that `zero` splits the state over; the rest hold replicas."""
    zero: int = 0
    """ZeRO stage."""
    seq_len: int
    """Tokens per sequence."""
    global_batch: int
    """Sequences per step."""
    microbatch: int | None = None
    """Sequences that a device computes at once; None: unknown."""
    remat: tuple[RematPolicy, ...] = ("none",)
    """Remat policy; two policies: something between them."""
    network: str | None = None
    """Speed between hosts, as in `--link`; None: the usual speed of such hosts."""
    power_w: int | None = None
    """Power limit of a device; None: that of the data sheet."""
    memory_bytes_per_s: float | None = None
    """Memory bandwidth of a device; None: that of the data sheet."""
    step_s: float | None = None
    """Step time."""
    tokens_per_s: float | None = None
    """Tokens per second of one device."""
    model_tflops: float | None = None
    """TFLOP/s of a device, counted as Megatron does: attention as if it had no causal mask."""
    hardware_tflops: float | None = None
    """The same, including what full recomputation repeats."""
    efficiency: float | None = None
    """Throughput of a device in model FLOP/s, over that of the source's first row."""

    def __str__(self) -> str:
        axes = ",".join(
            f"{name}={size}"
            for name, size in (("pipe", self.pipe), ("fsdp", self.fsdp), ("tensor", self.tensor))
            if size > 1
        )
        rows = f", microbatch {self.microbatch}" if self.microbatch else ""
        return (
            f"{self.source.name}, {self.model.name}, {self.seq_len} tokens, {self.devices}"
            f" {self.accelerator}, {axes or 'data'}{rows}"
        )

    @property
    def replicas(self) -> int:
        """Devices along data and fsdp."""
        return self.devices // (self.tensor * self.pipe)

    def cluster(self) -> Cluster:
        """The cluster that it ran on."""
        per_host = min(self.per_host, self.devices)
        hosts = self.devices // per_host
        cluster = Cluster.parse(
            f"{self.accelerator}:{hosts}x{per_host}",
            [self.network] if self.network and hosts > 1 else [],
        )
        speed = self.memory_bytes_per_s or cluster.accelerator.memory_bytes_per_s
        return replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes_per_s=speed))

    def rates(self, share: float | None) -> Rates:
        """Rates of its devices from their data sheet.

        Args:
          share: share of the dense peak that large matmuls reach; None: the usual one.
        """
        accelerator = self.cluster().accelerator
        rates, peak = Rates.of(accelerator), accelerator.dense_peak_flops or math.nan
        if share is not None:
            rates = replace(rates, matmul_flops_per_s=share * peak)
        if self.source.implementation.startswith("fsdp") and accelerator.name in FLASH_2_SHARE:
            rates = replace(
                rates,
                fused_attention_share=FLASH_2_SHARE[accelerator.name]
                * peak
                / rates.matmul_flops_per_s,
            )
        return rates

    def implementation_profile(self) -> ImplementationProfile:
        """The implementation profile of its software."""
        profile = self._profile()
        return profile if self.sends_parts is None else _sending(profile, self.sends_parts)

    def _profile(self) -> ImplementationProfile:
        if self.source.software == "fms-fsdp":
            return COMPILED_16
        named = {
            "maxtext": MAXTEXT,
            "megatron-2021": MEGATRON,
            "fsdp-eager": EAGER,
            "fsdp-compiled": COMPILED,
        }
        return named.get(self.source.implementation) or megatron_core(self.tensor, self.replicas)

    def plans(self, remat: RematPolicy) -> Iterator[Plan]:
        """The plans that it may have run."""
        axes = AxisSizes(
            pipe=self.pipe, data=self.replicas // self.fsdp, fsdp=self.fsdp, tensor=self.tensor
        )
        for rows in [self.microbatch] if self.microbatch else GUESSED_ROWS:
            microbatches, rest = divmod(self.global_batch, self.replicas * rows)
            for pipeline in () if rest else self._pipelines(microbatches):
                yield Plan(
                    axes=axes,
                    rules=make_rules(self.model),
                    zero=self.zero,
                    pipeline=pipeline,
                    microbatches=microbatches,
                    # also for Megatron's f16 of 2021, which sums in two bytes per element
                    remat=remat,
                    precision="bf16",
                    attention="xla" if self.source.implementation == "megatron-2021" else "cudnn",
                    loss_chunk_tokens=self.seq_len,
                )

    def _pipelines(self, microbatches: int) -> Iterator[Pipelining | None]:
        if self.pipe == 1:
            yield None
            return
        layers = self.model.num_layers // self.pipe
        for repeats in [self.repeats] if self.repeats else range(1, layers + 1):
            if layers % repeats == 0 and (repeats == 1 or microbatches % self.pipe == 0):
                yield Pipelining(
                    schedule="interleaved" if repeats > 1 else "1f1b",
                    layers_per_stage=(layers // repeats,) * (self.pipe * repeats),
                    repeats=repeats,
                    send_slack=False,
                    keep_residuals=True,
                )

    def predicted_s(self, share: float | None = None) -> float:
        """Predicted step time in seconds."""
        cluster, rates = self.cluster(), self.rates(share)
        times = [
            min(self._time_s(plan, cluster, rates) for plan in self.plans(remat))
            for remat in self.remat
        ]
        return float(np.mean(times))

    def _time_s(self, plan: Plan, cluster: Cluster, rates: Rates) -> float:
        workload = Workload(model=self.model, seq_len=self.seq_len, global_batch=self.global_batch)
        terms = term_times(workload, plan, cluster, rates, self.implementation_profile())
        hidden = max(0.0, 2.0 - rates.overlap_slowdown) * rates.overlap_share
        return sum(terms.values()) - hidden * sum(
            terms[name] for name in OVERLAPPED.get(self.source.implementation, ())
        )

    def published_s(self) -> float:
        """Step time in seconds, from whichever figure was published."""
        if self.step_s is not None:
            return self.step_s
        if self.tokens_per_s is not None:
            return self.global_batch * self.seq_len / (self.tokens_per_s * self.devices)
        model, tokens = self.model, self.global_batch * self.seq_len
        # Narayanan et al. 2021, equation 3, and Megatron-LM since then: the matrix products of
        # layers count 3 times, or 4 times with full recomputation.
        times, tflops = (
            (3, self.model_tflops)
            if self.model_tflops is not None
            else (4, self.hardware_tflops or math.nan)
        )
        layers = (
            times
            * 24
            * tokens
            * model.num_layers
            * model.embed_dim**2
            * (1 + self.seq_len / (6 * model.embed_dim))
        )
        return (layers + 3 * 2 * tokens * model.embed_dim * model.vocab_size) / (
            tflops * 1e12 * self.devices
        )

    def tflops(self, step_s: float) -> float:
        """Model TFLOP/s of a device, counted as in models/flops.py: half of attention, and no
        recomputation.
        """
        return (
            step_flops(self.model, num_sequences=self.global_batch, seq_len=self.seq_len)
            / (step_s * self.devices)
            / 1e12
        )

    def log_error(self, share: float | None = None) -> float:
        """Logarithm of predicted over published throughput."""
        return math.log(self.published_s() / self.predicted_s(share))


def read(section: Literal["rows", "scaling", "comparisons"] = "rows") -> list[Row]:
    """All published rows of a section: throughputs, tables of weak scaling, or tables and figures
    that compare settings of one layout.
    """
    data = json.loads(FILE.read_text())
    sources = {name: Source(name=name, **about) for name, about in data["sources"].items()}
    return [
        Row(
            **{
                **row,
                "source": sources[row["source"]],
                "remat": tuple(row.get("remat", ("none",))),
                "model": ModelConfig(
                    name=row["model"], max_length=row["seq_len"], **data["models"][row["model"]]
                ),
            }
        )
        for row in data[section]
    ]


def by_software(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each implementation."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.source.software, []).append(row)
    return found


def fitted_share(rows: Sequence[Row]) -> float:
    """The share of the dense peak that makes the mean error zero; implementations weigh equally."""
    share = 0.75
    for _ in range(8):
        share *= math.exp(
            -float(
                np.mean(
                    [
                        np.mean([row.log_error(share) for row in own])
                        for own in by_software(rows).values()
                    ]
                )
            )
            / SHARE_SLOPE
        )
    return share


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Statistics of the errors (predicted over published throughput, minus 1)."""
    size = np.abs(errors)
    return {
        "rows": len(errors),
        "bias": float(np.mean(errors)),
        "mean_error": float(size.mean()),
        "worst": float(size.max()),
        "within_15_percent": float((size <= 0.15).mean()),
    }


def published_report() -> dict[str, Any]:
    """Errors of every row and every implementation without any fit beyond rates.py, and of each
    implementation with a share fitted to the others.
    """
    rows = read()
    report: dict[str, Any] = {"rows": {}, "software": {}, "each software left out": {}}
    for row in rows:
        predicted_s, published_s = row.predicted_s(), row.published_s()
        report["rows"][str(row)] = {
            "url": row.source.url,
            "published_tflops": row.tflops(published_s),
            "predicted_tflops": row.tflops(predicted_s),
            "error": published_s / predicted_s - 1.0,
        }
    for kind, some in _kinds(rows).items():
        report["software"][kind] = summary([math.expm1(row.log_error()) for row in some])
    hoppers = by_software(row for row in rows if row.accelerator == "h100" and row.power_w is None)
    for name, own in hoppers.items():
        share = fitted_share(
            [row for other, some in hoppers.items() if other != name for row in some]
        )
        report["each software left out"][name] = {
            "share_of_peak": share,
            **summary([math.expm1(row.log_error(share)) for row in own]),
        }
    report["share of the H100's peak, fitted to all"] = fitted_share(
        [row for some in hoppers.values() for row in some]
    )
    return report


def scaling_report() -> dict[str, Any]:
    """Published and predicted weak scaling: the throughput of a device over that of each source's
    first row, and what they differ by.
    """
    report: dict[str, Any] = {}
    firsts: dict[str, float] = {}
    for row in read("scaling"):
        tflops = row.tflops(row.predicted_s())
        predicted = tflops / firsts.setdefault(row.source.name, tflops)
        report[str(row)] = {
            "url": row.source.url,
            "predicted_tflops": tflops,
            "published": row.efficiency,
            "predicted": predicted,
            "error": predicted - (row.efficiency or math.nan),
        }
    return report


def _kinds(rows: Iterable[Row]) -> dict[str, list[Row]]:
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        power = f" at {row.power_w} W" if row.power_w else ""
        kinds.setdefault(f"{row.source.software} on {row.accelerator}{power}", []).append(row)
    return kinds


RANKED = {"Megatron-LM 2021", "Megatron-Core", "NeMo", "MaxText"}
"""Implementations whose layouts are looked up in our own ranking, because they were chosen for
speed."""


def rank_report(wanted: Callable[[Row], bool] = lambda row: True) -> dict[str, Any]:
    """The rank of published layouts in this project's own ranking.

    The ranking is for the same model, batch and cluster; only the first row of each model is used.
    """
    firsts = {
        row.model.name: row
        for row in reversed(read())
        if row.source.software in RANKED and wanted(row)
    }
    return {str(row): _ranked(row) for row in reversed(firsts.values())}


AT_THE_END = ("fsdp", "data")
"""Terms of the exchange of gradients and of new parameters, at ZeRO stages 1 and 2."""


def terms_report(software: str = "Megatron-Core") -> dict[str, Any]:
    """Published times of one implementation beside the terms of this project's own best plan with
    the same tensor and pipe axes.
    """
    return {str(row): _terms(row) for row in read() if row.source.software == software}


def _terms(row: Row) -> dict[str, Any]:
    own = _fastest_with(row, _config_of(row), row.cluster())
    if own is None:
        return {"plan": None, "why": "not legal, or too large"}
    times = {term.name: term.time_s for term in own.prediction.terms}
    predicted_s, published_s = own.prediction.step_time_s, row.published_s()
    ends_s = sum(times.get(name, 0.0) for name in AT_THE_END)
    return {
        "plan": own.plan.describe(),
        "published_s": published_s,
        "predicted_s": predicted_s,
        "difference": predicted_s / published_s - 1.0,
        "without the exchange at the end": (predicted_s - ends_s) / published_s - 1.0,
        "terms_s": {name: time_s for name, time_s in times.items() if time_s > 0.01 * predicted_s},
    }


def _config_of(row: Row) -> Config:
    """The config of a run as a row's, in this project's own implementation."""
    config = Config(
        model=row.model, data=DataConfig(global_batch=row.global_batch, seq_len=row.seq_len)
    ).with_values({"precision.compute": "bf16"})
    if row.source.software in WITHOUT_SEQUENCE_PARALLELISM:
        config = config.with_values({"parallel.sequence_parallel": False})
    return config


def _ranked(row: Row) -> dict[str, Any]:
    config = _config_of(row)
    cluster = row.cluster()
    best = search(Pricing(config, cluster, Rates.of(cluster.accelerator)), top=BEST).best
    own = _fastest_with(row, config, cluster)
    if own is None:
        return {"rank": None, "why": "not legal, or too large"}
    pairs = list(dict.fromkeys((each.plan.axes.pipe, each.plan.axes.tensor) for each in best))
    rank = pairs.index((row.pipe, row.tensor)) + 1 if (row.pipe, row.tensor) in pairs else None
    return {
        "rank": rank,
        "best": best[0].plan.describe(),
        "own": own.plan.describe(),
        "slower": own.prediction.step_time_s / best[0].prediction.step_time_s - 1.0,
        "why": _why(own, best[0]),
    }


def _fastest_with(row: Row, config: Config, cluster: Cluster) -> Candidate | None:
    """The fastest plan with the row's pipe and tensor axes, for any split between data and fsdp."""
    found: list[Candidate] = []
    for fsdp in {1, row.replicas, math.gcd(row.replicas, 8), math.gcd(row.replicas, 1 << 20)}:
        mesh = f"pipe={row.pipe},data={row.replicas // fsdp},fsdp={fsdp},tensor={row.tensor}"
        try:
            found += search(
                Pricing(
                    config.with_values({"parallel.mesh": mesh}),
                    cluster,
                    Rates.of(cluster.accelerator),
                ),
                top=1,
            ).best
        except OptimusError:
            continue
    return min(found, key=lambda each: each.prediction.step_time_s, default=None)


def _why(own: Candidate, best: Candidate) -> str:
    """The terms that make it slower than the best plan, in seconds per step."""
    times, others = (
        {term.name: term.time_s for term in each.prediction.terms} for each in (own, best)
    )
    lost = sorted(
        ((time_s - others.get(name, 0.0), name) for name, time_s in times.items()), reverse=True
    )
    return ", ".join(
        f"{name} +{more:.2f} s"
        for more, name in lost[:2]
        if more > 0.01 * best.prediction.step_time_s
    )
