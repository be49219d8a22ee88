"""Assemble a whole Plan from axis sizes and the user's settings; open fields get plain defaults.

This module does not compare layouts; planning/search/search.py does.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from optimus_jax.config import REMAT_POLICIES, Config, Offload, Overlap, Precision, RematPolicy
from optimus_jax.config.axes import TENSOR, AxisSizes
from optimus_jax.devices.accelerators import AMPERE
from optimus_jax.errors import PlanError, explain, nearest
from optimus_jax.mesh.axes import LENGTH, VOCAB
from optimus_jax.mesh.rules import Rules, make_rules
from optimus_jax.mesh.topology import Topology
from optimus_jax.mesh.xla_options import GPU
from optimus_jax.models.flops import layer_shares
from optimus_jax.models.kernels import choose_kernel
from optimus_jax.pipeline.partition import balanced_layers, layers_per_stage
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import REPEATING, SCHEDULES
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.search.divisors import divisors
from optimus_jax.store.local_copies import local_file

LOSS_CHUNK_TOKENS = 2048
"""Tokens per chunk of the loss if the vocabulary is not split; n times as many if it is split n
ways. GPUs need large matmuls."""
LOSS_CHUNK_TOKENS_CPU = {False: 256, True: 128}
"""The same on a CPU, by whether there are several virtual devices. They share the CPU's caches,
into which a chunk's logits should fit (docs/decisions/0003)."""
RECOMPUTE_LEAST: RematPolicy = "none"
OFFLOAD_FALLBACKS: tuple[Offload, ...] = ("none", "activations", "optimizer", "all")
"""In the order in which they are tried: copies of layer inputs overlap with compute, copies of
moments do not."""
DEFAULT_ZERO = 3
"""Default ZeRO stage with fsdp: parameters are sharded too."""
DEFAULT_REPEATS = 2
"""Default repeats of interleaved schedules: half the bubble for twice the sends."""
SPLIT_LENGTH = f"{LENGTH}={TENSOR}"
"""The rule of sequence parallelism."""
TABLE_SUFFIX = ".json"
"""Suffix of `--schedule` values that name a file."""
MICROBATCHES_PER_STAGE = 4
"""Default microbatches per stage. 1F1B with p stages then idles (p - 1) / (5p - 1) of its time, at
most a fifth."""


def check_settings(config: Config, topology: Topology) -> None:
    """Raise PlanError for a setting that is malformed or impossible under every layout."""
    make_rules(config.model, rule_changes(config))
    _check_schedule_name(config.parallel.schedule)
    if config.parallel.schedule.endswith(TABLE_SUFFIX):
        _read_table(config.parallel.schedule)
    choose_kernel(config, topology, compute_precision(config, topology))
    if config.parallel.offload not in ("auto", "none") and not can_offload(topology.platform):
        raise PlanError(
            explain(
                "offloading needs devices with memory separate from the host's",
                given=f"parallel.offload={config.parallel.offload} on {topology}",
                do="leave parallel.offload out, or train on GPUs",
            )
        )


def can_offload(platform: str) -> bool:
    """Whether devices of a platform have memory separate from their host's."""
    return platform in ("gpu", "cuda")


def plan_for(config: Config, axes: AxisSizes, topology: Topology) -> Plan:
    """The Plan with these axis sizes, and everything else from the config or from defaults."""
    parallel, model = config.parallel, config.model
    precision = compute_precision(config, topology)
    zero = parallel.zero if parallel.zero is not None else DEFAULT_ZERO if axes.fsdp > 1 else 0
    pipeline = pipelining(config, axes)
    rules = make_rules(model, rule_changes(config))
    if parallel.sequence_parallel and axes.tensor == 1:
        raise PlanError(
            explain(
                "there is no tensor axis to split the tokens of the residual stream over",
                given=f"parallel.sequence_parallel=true on mesh {axes}",
                do="use tensor=2 or more, or leave the setting out",
            )
        )
    return Plan(
        axes=axes,
        rules=rules,
        zero=zero,
        pipeline=pipeline,
        microbatches=fixed_microbatches(config, pipeline)
        or _microbatches(
            config.data.global_batch,
            axes,
            interleaved=pipeline is not None and pipeline.repeats > 1,
        ),
        remat=least_remat(config),
        precision=precision,
        moments=config.precision.moments,
        attention=choose_kernel(config, topology, precision),
        loss_chunk_tokens=loss_chunk_tokens(config, axes, rules, topology),
        offload=least_offload(config),
        kept_layers=kept_layers(config, least_remat(config)),
        overlap=overlaps(config, axes, topology.platform)[0],
        scatter=parallel.scatter,
    )


def rule_changes(config: Config) -> tuple[str, ...]:
    """The user's changes to the default rules.

    Raises PlanError if one contradicts `parallel.sequence_parallel`.
    """
    parallel = config.parallel
    by_rule = [rule for rule in parallel.rules if rule.partition("=")[0].strip() == LENGTH]
    if by_rule and parallel.sequence_parallel is not None:
        raise PlanError(
            explain(
                f"{LENGTH!r} has a rule and a setting",
                given=(
                    f"parallel.rules={','.join(by_rule)},"
                    f" parallel.sequence_parallel={str(parallel.sequence_parallel).lower()}"
                ),
                do="give parallel.sequence_parallel alone",
            )
        )
    return (*parallel.rules, *((SPLIT_LENGTH,) if parallel.sequence_parallel else ()))


def compute_precision(config: Config, topology: Topology) -> Precision:
    """The number format of activations and matmuls.

    Raises PlanError if the devices do not support the requested one.
    """
    wanted, capability = config.precision.compute, topology.compute_capability
    has_bf16 = capability is None or capability >= AMPERE
    if wanted == "bf16" and not has_bf16:
        raise PlanError(
            explain(
                f"a {topology.device_kind} has no bf16",
                given="precision bf16",
                do="use --precision f16 or f32",
            )
        )
    if wanted == "auto":
        return "f32" if topology.platform == "cpu" else "bf16" if has_bf16 else "f16"
    return wanted


def overlaps(config: Config, axes: AxisSizes, platform: str) -> tuple[Overlap, ...]:
    """The overlaps to try, the least first. Virtual devices share a processor: nothing there runs
    beside compute.
    """
    parallel = config.parallel
    if config.model.encoder_layers:
        if parallel.overlap not in ("auto", "none") or parallel.kept_layers:
            raise PlanError(
                explain(
                    f"{config.model.name} has an encoder, whose layers do not run in loops that"
                    " exchange beside compute",
                    given=f"parallel.overlap={parallel.overlap},"
                    f" kept_layers={parallel.kept_layers}",
                    do="use parallel.overlap=none, and leave parallel.kept_layers out",
                )
            )
        return ("none",)
    if parallel.overlap != "auto":
        return (parallel.overlap,)
    least: tuple[Overlap, ...] = ("layers",) if parallel.kept_layers else ("none",)
    if platform not in GPU or least_offload(config) in ("activations", "all"):
        return least
    both: tuple[Overlap, ...] = tuple(dict.fromkeys((*least, "layers")))
    return (*both, "halves") if axes.tensor > 1 else both


def least_offload(config: Config) -> Offload:
    """The least offloading that the config allows."""
    return "none" if config.parallel.offload == "auto" else config.parallel.offload


def least_remat(config: Config) -> RematPolicy:
    """The least recomputation that the config allows."""
    if config.parallel.remat != "auto":
        return config.parallel.remat
    return "full" if least_offload(config) in ("activations", "all") else RECOMPUTE_LEAST


def kept_layers(config: Config, remat: RematPolicy) -> int:
    """The layers that the user keeps from recomputation, under a policy that recomputes some."""
    return 0 if remat == "none" else config.parallel.kept_layers or 0


def fixed_microbatches(config: Config, pipeline: Pipelining | None) -> int | None:
    """The number of microbatches set by the user or by the user's schedule table; None if left
    open.
    """
    own_table = (
        None if pipeline is None or pipeline.table is None else Schedule.from_json(pipeline.table)
    )
    return config.parallel.microbatches or (own_table and own_table.num_microbatches)


def loss_chunk_tokens(config: Config, axes: AxisSizes, rules: Rules, topology: Topology) -> int:
    """Tokens per device in a chunk of the loss: their logits exist at the same time."""
    whole = (
        LOSS_CHUNK_TOKENS_CPU[axes.num_devices > 1]
        if topology.platform == "cpu"
        else LOSS_CHUNK_TOKENS
    )
    return config.parallel.loss_chunk_tokens or whole * math.prod(
        axes[axis] for axis in dict(rules).get(VOCAB, ())
    )


def memory_fallbacks(config: Config, plan: Plan, platform: str) -> Iterator[Plan]:
    """`plan`, then variants of it with more recomputation or offloading if the user left these
    open.

    Variants are in rising order of step time: first all remat policies, each needing less memory,
    then all of them again with more offloading, which is slow and therefore a last resort.
    """
    policies: tuple[RematPolicy, ...] = (
        REMAT_POLICIES if config.parallel.remat == "auto" else (plan.remat,)
    )
    offloads = (
        OFFLOAD_FALLBACKS
        if config.parallel.offload == "auto" and can_offload(platform)
        else (plan.offload,)
    )
    pipelines = [plan.pipeline]
    if plan.pipeline is not None and config.parallel.stage_residuals == "auto":
        # If the whole stage is recomputed, recomputing single layers as well saves memory only
        # within a tick.
        pipelines.append(dataclasses.replace(plan.pipeline, keep_residuals=False))
    is_any = False
    for offload, pipeline, remat in itertools.product(offloads, pipelines, policies):
        other = dataclasses.replace(plan, remat=remat, offload=offload, pipeline=pipeline)
        if config.parallel.kept_layers is not None:
            other = dataclasses.replace(other, kept_layers=kept_layers(config, remat))
        if not other.offloads_activations or (
            remat == "full" and pipeline is None and other.overlap == "none"
        ):
            is_any = True
            yield other
    if not is_any:
        yield plan


def with_kept_layers(config: Config, plan: Plan, fits: Callable[[Plan], bool]) -> Plan:
    """A plan that fits, with as many layers as fit beside it that recompute nothing, if the user
    left that open.
    """
    if config.parallel.kept_layers is not None or plan.overlap == "none" or plan.remat == "none":
        return plan
    most = plan.pipeline.most_layers if plan.pipeline else config.model.num_layers
    # The memory rises with each. One layer less than all: all are another plan, which did not fit.
    number = bisect.bisect(
        range(1, most), False, key=lambda more: not fits(replace(plan, kept_layers=more))
    )
    return replace(plan, kept_layers=number)


def pipelining(config: Config, axes: AxisSizes) -> Pipelining | None:
    """The pipeline with the user's settings; None without stages.

    By default 1F1B, with layers split over stages as evenly as possible.
    """
    parallel = config.parallel
    _check_schedule_name(parallel.schedule)
    if axes.pipe == 1:
        given = {
            "schedule": parallel.schedule not in ("auto", "none"),
            "repeats": parallel.repeats is not None,
            "layers_per_stage": bool(parallel.layers_per_stage),
            "send_slack": parallel.send_slack,
            "stage_residuals": parallel.stage_residuals == "recompute",
        }
        if any(given.values()):
            raise PlanError(
                explain(
                    "there are no pipeline stages to schedule",
                    given=f"{', '.join(name for name in given if given[name])} on mesh {axes}",
                    do="use pipe=2 or more, or none of these settings",
                )
            )
        return None
    table, name, repeats = None, parallel.schedule, parallel.repeats
    if name == "none":
        raise PlanError(
            explain(
                "pipeline stages need a schedule",
                given=f"--schedule none on mesh {axes}",
                do="use a schedule, or pipe=1",
            )
        )
    if name.endswith(TABLE_SUFFIX):
        table, own = _read_table(name)
        name, repeats = own.name, repeats or own.num_repeats
    elif name == "auto":
        name = "1f1b" if (repeats or 1) == 1 else "interleaved"
    repeats = repeats or (DEFAULT_REPEATS if name == "interleaved" else 1)
    _check_visits(config, axes, name, repeats, own_table=table is not None)
    return Pipelining(
        schedule=name,
        repeats=repeats,
        send_slack=parallel.send_slack,
        table=table,
        keep_residuals=parallel.stage_residuals != "recompute",
        layers_per_stage=parallel.layers_per_stage or layers_of_stages(config, axes.pipe * repeats),
    )


def layers_of_stages(config: Config, num_virtual_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage: equally many, or of an encoder and a decoder such that the
    stage with the most FLOPs has least.
    """
    model = config.model
    if not model.encoder_layers:
        return layers_per_stage(model.num_layers, num_virtual_stages)
    return balanced_layers(layer_shares(model, config.seq_len), num_virtual_stages)


def _check_schedule_name(name: str) -> None:
    if name not in ("auto", "none", *SCHEDULES) and not name.endswith(TABLE_SUFFIX):
        raise PlanError(
            explain(
                f"unknown schedule {name!r}",
                given=f"--schedule {name}",
                do=nearest(name, ("auto", *SCHEDULES))
                + f" (or name a table in a {TABLE_SUFFIX} file)",
            )
        )


def _read_table(path: str) -> tuple[str, Schedule]:
    """The text of a user's schedule table, and the parsed schedule."""
    try:
        text = local_file(path, what="--schedule").read_bytes().decode("utf-8-sig")
        return text, Schedule.from_json(text)
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not text"
        raise PlanError(
            explain(
                "a schedule's table cannot be read",
                given=f"--schedule {path}: {what}",
                do=f"name a file that exists, or a schedule: {', '.join(('auto', *SCHEDULES))}",
            )
        ) from error
    except PlanError as error:
        raise PlanError(f"--schedule {path}: {error}") from error


def _check_visits(
    config: Config, axes: AxisSizes, schedule: str, repeats: int, *, own_table: bool
) -> None:
    """Check that the schedule supports the repeats, and that every virtual stage has a layer."""
    if repeats > 1 and schedule not in REPEATING and not own_table:
        raise PlanError(
            explain(
                f"schedule {schedule!r} visits each device once",
                given=f"--schedule {schedule}, parallel.repeats={repeats}",
                do=f"use repeats=1, or schedule {' or '.join(REPEATING)}",
            )
        )
    if axes.pipe * repeats > config.model.num_layers:
        visits = f" x repeats={repeats}" if repeats > 1 else ""
        raise PlanError(
            explain(
                f"{config.model.name} has fewer layers than there are stages",
                given=f"model.num_layers={config.model.num_layers}, pipe={axes.pipe}{visits}",
                do=f"use {config.model.num_layers} stages at most",
            )
        )


def _microbatches(global_batch: int, axes: AxisSizes, *, interleaved: bool) -> int:
    """The divisor of the batch's rows nearest to MICROBATCHES_PER_STAGE per stage; 1 without
    stages.
    """
    if axes.pipe == 1:
        return 1
    rows = max(1, global_batch // (axes.data * axes.fsdp))
    wanted = MICROBATCHES_PER_STAGE * axes.pipe
    legal = [n for n in divisors(rows) if n % axes.pipe == 0 or not interleaved]
    return min(legal, key=lambda n: (abs(n - wanted), n), default=axes.pipe)
