"""`find_plans`: rank the layouts of a model on a cluster by predicted step time.

The cluster need not exist.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.data import SEQUENCES_PER_DEVICE
from optimus_jax.config.phases import TrainingPhase, in_phase
from optimus_jax.config.request import dotted, make_config
from optimus_jax.config.run_checkpoint import INIT_FROM
from optimus_jax.devices.cpu import use_cpu_devices
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, PlanError, explain
from optimus_jax.mesh.build import discover
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.cost import Prediction
from optimus_jax.planning.cost.memory import MemoryEstimate
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.local_cluster import LocalCluster, measure_devices
from optimus_jax.planning.profiles.cluster import INTER_HOST, INTRA_HOST, Cluster
from optimus_jax.planning.search.assemble import check_settings
from optimus_jax.planning.search.divisibility import (
    Divisibility,
    SizeAlternative,
    divisibility,
    reasons_of,
)
from optimus_jax.planning.search.explain import (
    explained,
    flags,
    gib,
    layout_settings,
    seconds,
    why_best,
    why_not,
)
from optimus_jax.planning.search.layouts import Rejection
from optimus_jax.planning.search.phase_plans import plans_ahead
from optimus_jax.planning.search.search import Pricing, Ranking, ReportStatus, search
from optimus_jax.system.paths import UserPath
from optimus_jax.training.config_checks import check_config
from optimus_jax.training.tasks import kept_model
from optimus_jax.weights.published import MODEL, PublishedSource
from optimus_jax.weights.published_adapters import (
    PublishedAdapters,
    adapters_named,
    model_with_adapters,
)


@dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """A plan with its rank; all figures are predictions."""

    rank: int
    """1 is the best."""
    plan: Plan
    prediction: Prediction
    memory: MemoryEstimate
    why: str
    """Why it is the best, or why it is slower than the best."""
    batch_advice: tuple[SizeAlternative, ...] = ()
    """Nearby batches that divide better over the devices, with their best plans. The same for every
    plan of a ranking."""
    cluster_advice: tuple[SizeAlternative, ...] = ()
    """Smaller clusters that run the same batch faster. The same for every plan of a ranking."""
    lost: "DeviceLoss | None" = None
    """Throughput lost by leaving devices out (`without`); None if none were left out."""
    later: "tuple[LaterPhase, ...]" = ()
    """Plans of later training phases; only set for the best plan."""

    @property
    def axes(self) -> AxisSizes:
        """Devices along each mesh axis."""
        return self.plan.axes

    @property
    def schedule(self) -> str | None:
        """Name of the pipeline schedule; None without pipeline stages."""
        return None if self.plan.pipeline is None else self.plan.pipeline.schedule

    @property
    def step_time_s(self) -> float:
        """Predicted seconds per step."""
        return self.prediction.step_time_s

    @property
    def memory_bytes(self) -> int:
        """Predicted bytes on the most loaded device."""
        return self.memory.total

    def explain(self) -> str:
        """Where the predicted time and memory go: lines of text, one for each term."""
        return explained(self.plan, self.prediction, self.memory, self.why)

    @property
    def flags(self) -> str:
        """Flags of `train.py` that ask for this layout; batch, length and precision go beside
        them."""
        return flags(self.plan)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `train` that ask for this layout, by dotted name: `train(model,
        **best.settings)`; batch, length and precision go beside them."""
        return layout_settings(self.plan) | {"parallel.mesh": str(self.axes)}

    def as_json(self) -> dict[str, Any]:
        """What `optimus plan --json` prints."""
        pipeline, prediction = self.plan.pipeline, self.prediction
        return {
            "rank": self.rank,
            "axes": dataclasses.asdict(self.axes),
            "schedule": self.schedule,
            "repeats": 1 if pipeline is None else pipeline.repeats,
            "microbatches": self.plan.microbatches,
            "remat": self.plan.remat,
            "kept_layers": self.plan.kept_layers,
            "overlap": self.plan.overlap,
            "offload": self.plan.offload,
            "stage_residuals": (
                None if pipeline is None else "keep" if pipeline.keep_residuals else "recompute"
            ),
            "zero": self.plan.zero,
            "rules": {name: list(axes) for name, axes in self.plan.rules},
            "precision": self.plan.precision,
            "moments": self.plan.moments,
            "step_time_s": prediction.step_time_s,
            "step_time_interval_s": [prediction.low_s, prediction.high_s],
            "tokens_per_s": prediction.tokens_per_s,
            "mfu": prediction.mfu,
            "memory_bytes": self.memory_bytes,
            "memory": dataclasses.asdict(self.memory),
            "bubble": prediction.bubble,
            "communication": prediction.communication,
            "terms_s": {term.name: term.time_s for term in prediction.terms},
            "why": self.why,
            "flags": flags(self.plan),
            "batch_advice": [other.as_json() for other in self.batch_advice],
            "cluster_advice": [other.as_json() for other in self.cluster_advice],
            "later_phases": [phase.as_json() for phase in self.later],
            "lost": self.lost and self.lost.as_json(),
        }


@dataclass(frozen=True, kw_only=True)
class DeviceLoss:
    """Throughput lost when a cluster loses some devices and keeps the batch."""

    before: Cluster
    """The whole cluster."""
    num_devices: int
    """Number of devices left out."""
    tokens_per_s_before: float | None
    """Tokens per second with the best plan for the whole cluster; None if no plan was found for
    it."""
    tokens_per_s: float
    """Tokens per second with the best plan for the remaining devices."""

    @property
    def share(self) -> float | None:
        """Share of tokens per second that is lost; None if `tokens_per_s_before` is unknown."""
        return (
            None
            if self.tokens_per_s_before is None
            else 1 - self.tokens_per_s / self.tokens_per_s_before
        )

    def as_json(self) -> dict[str, Any]:
        """What `optimus plan --json` prints."""
        return {
            "num_devices": self.num_devices,
            "tokens_per_s_before": self.tokens_per_s_before,
            "tokens_per_s": self.tokens_per_s,
            "share": self.share,
        }

    def describe(self) -> str:
        """One line for people."""
        devices = (
            f"without {self.num_devices:,} of {self.before.num_devices:,} devices"
            f" ({self.num_devices / self.before.num_devices:.1%})"
        )
        if self.tokens_per_s_before is None:
            return (
                f"{devices}: {self.tokens_per_s:,.0f} tokens/s; with all of them no plan was found"
            )
        return (
            f"{devices}: {self.tokens_per_s_before:,.0f} -> {self.tokens_per_s:,.0f} tokens/s,"
            f" {-(self.share or 0.0):+.1%}"
        )


@dataclass(frozen=True, kw_only=True)
class LaterPhase:
    """The plan of a later training phase; all figures are predictions."""

    phase: TrainingPhase
    plan: Plan
    step_time_s: float
    tokens_per_s: float
    reason: str | None = None
    """Why its batch is not split over all devices; None if it is."""

    def as_json(self) -> dict[str, Any]:
        """What `optimus plan --json` prints."""
        return {
            "after_step": self.phase.steps_before,
            "global_batch": self.phase.global_batch,
            "seq_len": self.phase.seq_len,
            "mesh": str(self.plan.axes),
            "microbatches": self.plan.microbatches,
            "remat": self.plan.remat,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
        }

    def describe(self) -> str:
        """One line for people."""
        plan = self.plan
        return (
            f"{self.phase}: mesh {plan.axes}, {plan.microbatches} microbatch(es), remat"
            f" {plan.remat}, step {seconds(self.step_time_s)}, {self.tokens_per_s:,.0f} tokens/s"
            + (f" ({self.reason})" if self.reason else "")
        )


@dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """The result of a search, with its inputs."""

    config: Config
    """The resolved config of the run."""
    cluster: Cluster
    rates: Rates
    plans: list[RankedPlan]
    """Best first, at least one."""
    rejections: tuple[Rejection, ...]
    num_priced: int
    divisibility: Divisibility
    """Sizes that do not divide, and alternatives that do."""
    lost: DeviceLoss | None = None
    later: tuple[LaterPhase, ...] = ()
    """Plans of the phases after the first. `plans` are ranked for the first phase."""


def find_plans(
    model: UserPath | ModelConfig,
    cluster: str | Cluster | None = None,
    *,
    top: int = 10,
    links: Iterable[str] = (),
    rates: Rates | None = None,
    without: int | None = None,
    **overrides: Any,
) -> list[RankedPlan]:
    """The best plans for a model on a cluster, best first. The cluster need not exist.

    Args:
      model: name of a preset, the directory of a published model or of PEFT's adapters, which name
        their model, or ORG/NAME on the hub; or a ModelConfig.
      cluster: `h100:8x8` (hosts x devices), or a Cluster; None: the devices of this process, which
        are measured once, in one to three minutes.
      top: maximum number of plans to return.
      links: link speeds that replace the usual ones, such as `inter_host=50GB/s`.
      rates: speed of the devices; None: taken from their data sheet.
      without: plan for the cluster without this number of hosts (devices, if it has one host); the
        default global batch is still that of the whole cluster.
      overrides: settings as for `train`. Layout settings among them are respected. The default
        precision is bf16 on GPUs, the default global batch SEQUENCES_PER_DEVICE per device.
        `init_from` may name PEFT's adapters, to be trained beside the model.
    Raises:
      OptimusError: a name is unknown, or no plan is legal and fits; the text says why.
    """
    return search_plans(
        model,
        measured_here(model, links, overrides) if cluster is None else cluster,
        top=top,
        links=links,
        rates=rates,
        without=without,
        overrides=overrides,
    ).plans


def search_plans(
    model: UserPath | ModelConfig,
    cluster: str | Cluster | LocalCluster,
    *,
    top: int,
    links: Iterable[str] = (),
    rates: Rates | None = None,
    without: int | None = None,
    progress: ReportStatus | None = None,
    overrides: dict[str, Any],
) -> PlanSearch:
    """Like `find_plans`, but returns the whole search.

    Args:
      progress: called about every second, and before each search for another size.
    """
    check_jax_settings()
    if top < 1:
        raise ConfigError(
            explain("ranks count from 1", given=f"top={top}", do="ask for at least one plan")
        )
    whole = described(cluster, links)
    where = whole if without is None else whole.without(without)
    config = config_for(model, whole, dotted(overrides))  # a run that loses devices keeps its batch
    pricing = priced(config, where, cluster, rates)
    ranking = search(pricing, top=top, progress=progress)
    divided = divisibility(
        pricing,
        ranking.best[0] if ranking.best else None,
        may_leave_hosts=isinstance(cluster, str),
        progress=progress,
    )
    if not ranking.best:
        raise PlanError(_nothing_found(pricing, ranking, divided))
    lost = None
    if without is not None:
        before = search(dataclasses.replace(pricing, cluster=whole), top=1).best
        lost = DeviceLoss(
            before=whole,
            tokens_per_s_before=before[0].prediction.tokens_per_s if before else None,
            tokens_per_s=ranking.best[0].prediction.tokens_per_s,
            num_devices=whole.num_devices - where.num_devices,
        )
    later = tuple(_later(pricing, ranking.best[0].plan))
    return PlanSearch(
        config=config,
        cluster=where,
        rates=pricing.rates,
        plans=ranked(ranking, divided, lost, later),
        later=later,
        rejections=ranking.rejections,
        num_priced=ranking.num_priced,
        divisibility=divided,
        lost=lost,
    )


def measured_here(
    model: UserPath | ModelConfig, links: Iterable[str], overrides: dict[str, Any]
) -> LocalCluster:
    """This process's devices. Measured once, in one to three minutes, so that wrong settings are
    reported before: raises OptimusError for those.
    """
    if (number := dotted(overrides).get("cpu_devices")) is not None:
        use_cpu_devices(int(number))
    topology = discover()
    config_for(model, Cluster.of(topology).with_links(links), dotted(overrides))
    return measure_devices(topology)


def described(cluster: str | Cluster | LocalCluster, links: Iterable[str]) -> Cluster:
    """The cluster, with these speeds of links. Raises ConfigError if it is none."""
    if isinstance(cluster, str):
        return Cluster.parse(cluster, links)
    if isinstance(cluster, Cluster | LocalCluster):
        found = cluster if isinstance(cluster, Cluster) else cluster.cluster
        return found.with_links(links)
    raise ConfigError(
        explain(
            "a cluster is a name and a size, or a Cluster",
            given=f"cluster={cluster!r}",
            do="give one such as h100:8x8, or leave it out for the devices of this process",
        )
    )


def priced(
    config: Config, where: Cluster, given: str | Cluster | LocalCluster, rates: Rates | None
) -> Pricing:
    """The cost model on `where`: with the rates and corrections of devices that were measured, or
    else of data sheets; `rates` replace them.
    """
    if isinstance(given, LocalCluster):
        return Pricing(config, where, rates or given.rates, given.calibration)
    return Pricing(config, where, rates or Rates.of(where.accelerator))


def config_for(model: UserPath | ModelConfig, where: Cluster, overrides: dict[str, Any]) -> Config:
    """The config for a search. Settings that are not given get the defaults for these devices.

    Adapters that `init_from` names are those of the model, as where a run begins with both.

    Raises OptimusError for settings that are impossible under every plan.
    """
    beside = _adapters_beside(overrides)
    defaults = {"global_batch": SEQUENCES_PER_DEVICE * where.num_devices}
    config = make_config(
        model_with_adapters(model, beside),
        ({} if has_global_batch(overrides) else defaults)
        | {name: value for name, value in overrides.items() if name != _INIT},
    )
    config = replace(config, model=kept_model(config))
    if (adapters := beside or adapters_named(model)) is not None:
        adapters.read_for(config.model)  # raises if settings contradict them
    check_config(config, overrides)
    check_settings(config, where.topology())
    return config


def has_global_batch(overrides: dict[str, Any]) -> bool:
    """Whether settings name the number of examples of a step."""
    return not {"global_batch", "data.global_batch"}.isdisjoint(overrides)


_INIT, _ADAPTERS = "init_from", "adapters_from"


def _adapters_beside(overrides: dict[str, Any]) -> PublishedAdapters | None:
    """The adapters that `init_from` names; None: it is not given.

    Raises ConfigError if it names other parameters: a plan would ignore what they are.
    """
    given = {name: str(value) for name in (_INIT, _ADAPTERS) if (value := overrides.get(name))}
    if not given:
        return None
    if given.keys() == {_INIT} and (found := PublishedAdapters.parse(given[_INIT], what=INIT_FROM)):
        return found
    if _ADAPTERS in given:
        do = f"give {MODEL} and {INIT_FROM} {given[_ADAPTERS]}"
    elif PublishedSource.parse(given[_INIT], what=INIT_FROM):
        do = f"give {MODEL} {given[_INIT]}, without {INIT_FROM}"
    else:
        do = (
            f"leave {INIT_FROM} out: name the run's model with {MODEL}, and give its settings, such"
            " as model.tuning.method"
        )
    raise ConfigError(
        explain(
            "a plan reads a model's sizes and adapters, and no other parameters",
            given=", ".join(f"{name}={value}" for name, value in given.items()),
            do=do,
        )
    )


def _later(pricing: Pricing, plan: Plan) -> Iterator[LaterPhase]:
    """Yield plans for the phases after the first, of a run that begins under `plan`.

    Raises PlanError if a phase has no plan.
    """
    config, num_devices = pricing.config, pricing.cluster.num_devices
    for phase, own in plans_ahead(
        config,
        plan,
        0,
        pricing.cluster.topology(),
        lambda config: dataclasses.replace(pricing, config=config),
    ):
        priced = dataclasses.replace(pricing, config=in_phase(config, phase))
        prediction = priced.predicted(own)
        reason = (
            next(reasons_of(priced.config, num_devices, own), None)
            if phase.global_batch % num_devices
            else None
        )
        yield LaterPhase(
            phase=phase,
            plan=own,
            step_time_s=prediction.step_time_s,
            tokens_per_s=prediction.tokens_per_s,
            reason=reason,
        )


def ranked(
    ranking: Ranking,
    divided: Divisibility,
    lost: DeviceLoss | None = None,
    later: tuple[LaterPhase, ...] = (),
) -> list[RankedPlan]:
    """The best plans of a ranking, each with a reason."""
    return [
        RankedPlan(
            rank=rank,
            plan=candidate.plan,
            prediction=candidate.prediction,
            memory=candidate.memory,
            batch_advice=divided.batches,
            cluster_advice=divided.clusters,
            lost=lost,
            later=later if rank == 1 else (),
            why=(
                why_best(candidate.prediction, ranking.num_priced)
                if rank == 1
                else why_not(candidate.prediction, ranking.best[0].prediction)
            ),
        )
        for rank, candidate in enumerate(ranking.best, start=1)
    ]


def _nothing_found(pricing: Pricing, ranking: Ranking, divided: Divisibility) -> str:
    """The error for an empty ranking: the most common reasons, and what would help."""
    config, cluster = pricing.config, pricing.cluster
    capacity = cluster.accelerator.memory_bytes
    too_large = [rejection for rejection in ranking.rejections if rejection.needs_bytes is not None]
    if divided.batches or divided.clusters:
        sizes = [f"--global-batch {other.global_batch}" for other in divided.batches]
        sizes += [
            f"--cluster {other.cluster.shape}, which leaves"
            f" {cluster.num_devices - other.num_devices} devices idle"
            for other in divided.clusters
        ]
        return explain(
            f"no layout of {config.model.name} is legal and fits on {cluster.num_devices} devices",
            given="; ".join(divided.reasons),
            do="give what does have a plan: " + ", or ".join(sizes),
        )
    if too_large:
        least = min(too_large, key=lambda rejection: rejection.needs_bytes or 0)
        return explain(
            f"no layout of {config.model.name} fits {cluster.accelerator.name} devices",
            given=(
                f"{ranking.num_priced} legal layouts on {cluster}, {gib(capacity or 0)} per device;"
                f" the least, {least.layouts}, {least.reason}"
            ),
            do=_in_smaller_moments(pricing)
            + "give more devices or larger ones, a smaller --global-batch or --seq-len, or fewer"
            " fixed settings",
        )
    reasons = dict.fromkeys(
        [*divided.reasons, *(rejection.reason for rejection in ranking.rejections)]
    )
    unknown = [
        name
        for name, link in ((INTRA_HOST, cluster.intra_host), (INTER_HOST, cluster.inter_host))
        if link is not None and link.bytes_per_s is None
    ]
    return explain(
        f"no layout of {config.model.name} is legal on {cluster.num_devices} devices",
        given="; ".join(list(reasons)[:3]),
        do=(
            f"change the --global-batch{f' ({divided.no_batch})' if divided.no_batch else ''}, the"
            " number of devices, or the settings that were fixed"
        )
        + "".join(f"; say how fast a link is: --link {name}=25GB/s" for name in unknown),
    )


def _in_smaller_moments(pricing: Pricing) -> str:
    """Advice to keep moments in bf16 if a plan then fits; empty if none fits.

    Worded so that other advice can follow it.
    """
    try:
        config = pricing.config.with_values({"precision.moments": "bf16"})
    except ConfigError:  # moments with these betas cannot be kept in bf16
        return ""
    fits = (
        config != pricing.config and search(dataclasses.replace(pricing, config=config), top=1).best
    )
    return (
        f"keep moments in bf16 (--set precision.moments=bf16), with which mesh {fits[0].plan.axes}"
        " fits; or "
        if fits
        else ""
    )
