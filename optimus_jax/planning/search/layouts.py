"""Enumerate every legal layout of a model on a number of devices, with reasons for rejecting
others.

A layout is a Plan with minimal recomputation; `assemble.memory_fallbacks` adds more. The
enumeration covers axis sizes, which halves of a layer the tensor axis splits, what exchanges run
beside, the ZeRO stage, the schedule with its repeats, and the microbatches: everything that a
homogeneous decoder leaves open.
Settings fixed by the user are respected.

These are left out, because another layout is at least as good in every respect:

* gpipe: 1f1b has the same ticks and fewer microbatches in flight;
* zero=0 with fsdp: it is data parallelism by another name;
* repeats with uneven stages: a device then computes empty slots.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import NamedTuple

from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes, check_devices
from optimus_jax.errors import PlanError, counted, first_line
from optimus_jax.mesh.rules import check_lengths, check_rules, make_rules
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.kernels import choose_kernel
from optimus_jax.pipeline.tables import REPEATING
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.search.assemble import (
    SPLIT_LENGTH,
    compute_precision,
    fixed_microbatches,
    kept_layers,
    layers_of_stages,
    least_offload,
    least_remat,
    loss_chunk_tokens,
    overlaps,
    pipelining,
    rule_changes,
)
from optimus_jax.planning.search.divisors import divisors
from optimus_jax.training.optimizer import check_whole

[INTERLEAVED] = REPEATING
"""The schedule whose microbatches visit each device more than once."""
BLOCK_RULES = ((), ("mlp=none",), ("heads=none",))
"""What the tensor axis splits: both halves of a layer, attention alone, or the feed-forward
alone."""

TENSOR_RULES = (*BLOCK_RULES, (SPLIT_LENGTH,))
"""The same, and both halves with the tokens of the residual stream between them."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A group of layouts that is impossible or does not fit, and why."""

    layouts: str
    """What the rejected layouts have in common."""
    reason: str
    needs_bytes: int | None = None
    """Bytes per device with maximal recomputation; None if rejected for another reason."""


class LayoutGroup(NamedTuple):
    """Layouts that differ only in their ZeRO stage."""

    first: Plan
    """The one with the lowest stage."""
    zero_stages: tuple[int, ...]

    def layout(self, zero: int) -> Plan:
        """The layout with this stage."""
        return self.first if zero == self.first.zero else dataclasses.replace(self.first, zero=zero)


def axis_sizes(num_devices: int) -> Iterator[AxisSizes]:
    """Every way to write `num_devices` as pipe * data * fsdp * tensor."""
    for pipe in divisors(num_devices):
        for data in divisors(num_devices // pipe):
            for fsdp in divisors(num_devices // pipe // data):
                yield AxisSizes(
                    pipe=pipe, data=data, fsdp=fsdp, tensor=num_devices // pipe // data // fsdp
                )


def layouts(config: Config, topology: Topology) -> Iterator[Plan | Rejection]:
    """All layouts and rejections, in a deterministic order.

    Raises what `layout_groups` raises.
    """
    for group in layout_groups(config, topology):
        if isinstance(group, Rejection):
            yield group
        else:
            yield from map(group.layout, group.zero_stages)


def layout_groups(config: Config, topology: Topology) -> Iterator[LayoutGroup | Rejection]:
    """All layouts in groups, and rejections, in a deterministic order.

    Raises:
      PlanError: a setting is wrong whatever the layout, such as a kernel that cannot run.
    """
    parallel = config.parallel
    precision = compute_precision(config, topology)
    kernel = choose_kernel(config, topology, precision)
    if parallel.axes is not None:
        check_devices(parallel.axes, topology.num_devices)
    rules_with = cache(partial(make_rules, config.model))
    for axes in [parallel.axes] if parallel.axes else axis_sizes(topology.num_devices):
        if parallel.sequence_parallel and axes.tensor == 1:
            yield Rejection(layouts=str(axes), reason="sequence_parallel=true needs a tensor axis")
            continue
        for rules, overlap in itertools.product(
            map(rules_with, _rule_changes(config, axes)),
            overlaps(config, axes, topology.platform),
        ):
            common = Plan(
                axes=axes,
                rules=rules,
                zero=0,
                microbatches=1,
                pipeline=None,
                precision=precision,
                moments=config.precision.moments,
                attention=kernel,
                remat=least_remat(config),
                loss_chunk_tokens=loss_chunk_tokens(config, axes, rules, topology),
                offload=least_offload(config),
                kept_layers=kept_layers(config, least_remat(config)),
                overlap=overlap,
                # Nothing is scattered over one device.
                scatter=config.parallel.scatter if axes.fsdp > 1 or parallel.axes else "sum",
            )
            yield from _like(common, config)


def _like(common: Plan, config: Config) -> Iterator[LayoutGroup | Rejection]:
    """The groups of layouts with the mesh and rules of `common`."""
    axes, ways, global_batch = common.axes, common.batch_ways(), config.data.global_batch
    try:
        check_rules(common.rules, axes, config.model)
        check_lengths(common.rules, axes, config.compiled_lengths, config.model)
        check_whole(config.optimizer, axes, zero=1)  # fsdp without ZeRO is data parallelism
    except PlanError as error:
        yield Rejection(layouts=str(axes), reason=first_line(error))
        return
    zero_stages = _zero_stages(config, axes)
    if not zero_stages:
        yield Rejection(
            layouts=str(axes),
            reason=f"zero={config.parallel.zero} "
            + ("splits over fsdp" if config.parallel.zero else "over fsdp is data parallelism"),
        )
        return
    if common.scatter == "exchange":
        zero_stages = tuple(stage for stage in zero_stages if stage >= 2)
        if not zero_stages:
            yield Rejection(
                layouts=str(axes),
                reason="scatter=exchange needs gradients that backward scatters over fsdp (ZeRO 2"
                " or 3)",
            )
            return
    if common.offloads_activations and (axes.pipe > 1 or common.remat != "full"):
        yield Rejection(
            layouts=str(axes),
            reason=f"offload={common.offload} needs pipe=1 and remat=full",
        )
        return
    if global_batch % ways:
        yield Rejection(
            layouts=str(axes),
            reason=f"the global batch of {global_batch} does not divide over data*fsdp={ways}",
        )
        return
    # faster than dataclasses.replace, which looks at every field each time
    values = {each.name: getattr(common, each.name) for each in fields(Plan)}
    layout_with, fixes_pipeline = partial(Plan, **values), _fixes_pipeline(config)
    for pipeline in _pipelines(config, axes):
        if isinstance(pipeline, Rejection):
            yield pipeline
            continue
        wanted = config.parallel.kept_layers or 0
        if pipeline is not None and (most := pipeline.most_layers) < wanted:
            yield Rejection(
                layouts=f"{axes}, repeats={pipeline.repeats}",
                reason=f"kept_layers={wanted}, and a visit has {counted(most, 'layer')}",
            )
            continue
        numbers = _microbatches(config, global_batch // ways, axes, pipeline)
        if isinstance(numbers, Rejection):
            yield numbers
            continue
        if common.overlap == "halves":
            numbers = [number for number in numbers if global_batch // ways // number % 2 == 0]
            if not numbers:
                yield Rejection(
                    layouts=str(axes),
                    reason="overlap=halves, and no microbatch has an even number of rows on each"
                    " device",
                )
        for microbatches in numbers:
            group = LayoutGroup(
                layout_with(zero=zero_stages[0], microbatches=microbatches, pipeline=pipeline),
                zero_stages,
            )
            if fixes_pipeline:
                yield from _checked(group, config)
            else:
                yield group


def _fixes_pipeline(config: Config) -> bool:
    parallel = config.parallel
    return (
        parallel.schedule not in ("auto", INTERLEAVED)
        or parallel.repeats is not None
        or bool(parallel.layers_per_stage)
    )


def _checked(group: LayoutGroup, config: Config) -> Iterator[LayoutGroup | Rejection]:
    """The layouts one by one, or the reasons why they are not valid.

    The check is needed only if the user fixed pipeline settings, which suit only some meshes.
    Layouts that this module enumerates itself are legal.
    """
    for zero in group.zero_stages:
        layout = group.layout(zero)
        try:
            layout.validate(
                config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
            )
        except PlanError as error:
            yield Rejection(layouts=str(layout.axes), reason=first_line(error))
        else:
            yield LayoutGroup(layout, (zero,))


def _rule_changes(config: Config, axes: AxisSizes) -> tuple[tuple[str, ...], ...]:
    """The changes to the default rules that are tried: the user's if there are any."""
    given, parallel = rule_changes(config), config.parallel
    if axes.tensor > 1 and not given:
        return BLOCK_RULES if parallel.sequence_parallel is False else TENSOR_RULES
    return (given,)


def _zero_stages(config: Config, axes: AxisSizes) -> tuple[int, ...]:
    parallel = config.parallel
    if parallel.zero is not None:
        # zero=0 over fsdp equals data parallelism: allow it only if the user gave the mesh.
        return (
            (parallel.zero,)
            if (axes.fsdp > 1) == (parallel.zero > 0)
            or (parallel.zero == 0 and parallel.axes is not None)
            else ()
        )
    return (1, 2, 3) if axes.fsdp > 1 else (0,)


def _pipelines(config: Config, axes: AxisSizes) -> Iterator[Pipelining | Rejection | None]:
    """Yield schedules with their repeats and stages; None without pipeline stages."""
    parallel, num_layers = config.parallel, config.model.num_layers
    if axes.pipe == 1:
        try:
            yield pipelining(config, axes)
        except PlanError as error:
            yield Rejection(layouts=str(axes), reason=first_line(error))
        return
    if parallel.schedule == "none":
        yield Rejection(layouts=str(axes), reason="stages need a schedule")
        return
    if _fixes_pipeline(config):
        try:
            yield pipelining(config, axes)
        except PlanError as error:
            yield Rejection(layouts=str(axes), reason=first_line(error))
        return
    fewest = 2 if parallel.schedule == INTERLEAVED else 1
    if num_layers < axes.pipe * fewest:
        yield Rejection(
            layouts=str(axes),
            reason=f"{counted(num_layers, 'layer')} cannot fill {counted(axes.pipe, 'stage')} x"
            f" {counted(fewest, 'visit')}",
        )
    visits = (
        divisors(num_layers // axes.pipe)
        if num_layers % axes.pipe == 0
        else (1,)
        if num_layers > axes.pipe
        else ()
    )
    for repeats in (each for each in visits if each >= fewest):
        yield Pipelining(
            schedule=INTERLEAVED if repeats > 1 else "1f1b",
            repeats=repeats,
            send_slack=parallel.send_slack,
            table=None,
            keep_residuals=parallel.stage_residuals != "recompute",
            layers_per_stage=layers_of_stages(config, axes.pipe * repeats),
        )


def _microbatches(
    config: Config, rows: int, axes: AxisSizes, pipeline: Pipelining | None
) -> list[int] | Rejection:
    """The numbers of microbatches into which a device's rows of the batch can be split."""
    repeats = 1 if pipeline is None else pipeline.repeats
    unit = axes.pipe if repeats > 1 and pipeline is not None and pipeline.table is None else 1
    asked = fixed_microbatches(config, pipeline)
    legal = [
        number
        for number in ([asked] if asked is not None else divisors(rows))
        if rows % number == 0 and number % unit == 0
    ]
    if legal:
        return legal
    asked_for = "" if asked is None else f", and microbatches={asked} was requested"
    stages = f" and are multiples of {unit} stages" if unit > 1 else ""
    return Rejection(
        layouts=f"{axes}, repeats={repeats}",
        reason=f"microbatches divide {rows} rows{stages}{asked_for}",
    )
