"""Choose the Plan that a run starts with: the user's settings, and the planner's choices for the
rest.

A given mesh is used as it is, with the least recomputation that is estimated to fit. With
`--mesh auto`, all legal layouts are ranked (planning/search/search.py) if the speed of the devices
is known from a profile of this machine or from data sheets. Otherwise a simple rule decides: all
devices along `data` if each can hold a copy of the training state, else along `fsdp`. The result
includes the reason, so that it can be shown to the user.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from optimus_jax.config import Config
from optimus_jax.config.axes import DATA, FSDP, PIPE, TENSOR, AxisSizes, check_devices
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.memory import MemoryEstimate, memory_of_run
from optimus_jax.planning.search.assemble import (
    DEFAULT_ZERO,
    can_offload,
    check_settings,
    memory_fallbacks,
    plan_for,
)
from optimus_jax.planning.search.divisibility import divisibility, near_batches, no_better
from optimus_jax.planning.search.divisors import divisors
from optimus_jax.planning.search.explain import gib, why_best
from optimus_jax.planning.search.search import (
    USABLE_SHARE,
    Candidate,
    Pricing,
    fits,
    host_memory_note,
    search,
)
from optimus_jax.planning.search.suggestions import with_suggestions

GLOBAL_BATCH = "data.global_batch"
RANKED = 10
"""Number of candidates ranked at the start of a run."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A Plan, and the reason for choosing it."""

    plan: Plan
    memory: MemoryEstimate
    why: str
    ranked: tuple[Candidate, ...] = ()
    """The planner's best candidates, `plan` first; empty if nothing was ranked."""
    tried_s: Mapping[Plan, float] = field(default_factory=dict)
    """Measured step time of each plan tried before the run; only on the first process."""


def choose_plan(
    config: Config,
    topology: Topology,
    pricing: Pricing | None = None,
    *,
    fixed: tuple[str, ...] = (),
) -> Choice:
    """The Plan that a run of `config` on `topology` starts with.

    Args:
      pricing: the cost model for this config; None if the speed of the devices is unknown.
      fixed: names, or prefixes of names, of settings that an error must not suggest changing.
    Raises:
      PlanError: the fixed settings are not legal, or no plan is estimated to fit into memory; the
        message suggests settings that would be accepted.
    """
    check_settings(config, topology)
    try:
        return _choice(
            config, topology, pricing, may_change_batch=not GLOBAL_BATCH.startswith(fixed)
        )
    except PlanError as error:
        # Without the pricing: the search accepts whatever the rule accepts, and the rule is faster.
        raise with_suggestions(
            error,
            config,
            topology,
            lambda other, devices: _choice(other, devices, None),
            fixed=fixed,
        ) from error


def _choice(
    config: Config, topology: Topology, pricing: Pricing | None, *, may_change_batch: bool = False
) -> Choice:
    if (axes := config.parallel.axes) is not None:
        check_devices(axes, topology.num_devices)
        return _on_axes(config, axes, topology, "the mesh was given")
    if topology.num_devices == 1:
        return _on_axes(config, AxisSizes(), topology, "auto: there is one device")
    return (
        _by_rule(config, topology, may_change_batch=may_change_batch)
        if pricing is None
        else _by_search(config, topology, pricing, may_change_batch=may_change_batch)
    )


def _on_axes(config: Config, axes: AxisSizes, topology: Topology, why: str) -> Choice:
    """The plan with these axis sizes and the least recomputation that is estimated to fit."""
    least = plan_for(config, axes, topology)
    least.validate(
        config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
    )
    for plan in memory_fallbacks(config, least, topology.platform):
        memory = memory_of_run(config, plan)
        if fits(memory, topology):
            return Choice(plan=plan, memory=memory, why=why)
    raise PlanError(_no_room(config, plan, memory, topology))


def _by_rule(config: Config, topology: Topology, *, may_change_batch: bool) -> Choice:
    """Choose without rates: data parallelism if it fits, else fsdp.

    If the batch does not divide over the devices, the reason names nearby batches that do.
    """
    choice = _by_plain_rule(config, topology)
    if not may_change_batch or choice.plan.axes.tensor * choice.plan.axes.pipe == 1:
        return choice
    near = near_batches(config.data.global_batch, topology.num_devices)
    if not near and config.data.global_batch % topology.num_devices:
        return dataclasses.replace(
            choice,
            why=(
                f"{choice.why};"
                f" {no_better(config.data.global_batch, topology.num_devices, tried=near)}"
            ),
        )
    over = " or ".join(
        f"--global-batch {batch} over {math.gcd(batch, topology.num_devices)}" for batch in near
    )
    return dataclasses.replace(choice, why=f"{choice.why}; {over} of them") if near else choice


def _by_plain_rule(config: Config, topology: Topology) -> Choice:
    zero = config.parallel.zero
    if zero:
        return _on_legal(
            config,
            _legal(config, topology, FSDP),
            topology,
            f"auto: zero={zero} was requested, and is over fsdp",
        )
    whole = _legal(config, topology, DATA)
    if fits(memory_of_run(config, plan_for(config, whole, topology)), topology):
        return _on_legal(
            config,
            whole,
            topology,
            "auto: a whole training state fits on each device, and plain data parallelism"
            " communicates least",
        )
    config = config.with_values({"parallel.zero": zero if zero is not None else DEFAULT_ZERO})
    return _on_legal(
        config,
        _legal(config, topology, FSDP),
        topology,
        "auto: a whole training state does not fit on a device, so it is split over all of them",
    )


def _on_legal(config: Config, axes: AxisSizes, topology: Topology, why: str) -> Choice:
    """`_on_axes`, with a reason that also explains why layers are split over tensor or pipe."""
    rest = axes.tensor * axes.pipe
    if rest > 1:
        why += (
            f"; the batch can be split over {topology.num_devices // rest} of"
            f" {topology.num_devices} devices, so layers are split {rest} ways"
        )
    return _on_axes(config, axes, topology, why)


def _legal(config: Config, topology: Topology, axis: str) -> AxisSizes:
    """Axis sizes with as many devices along `axis` as the batch divides over.

    The rest are along tensor within a host, or along pipe if heads cannot be split.

    Raises:
      PlanError: no mesh is legal; the message is that of the mesh with all devices along `axis`.
    """
    num_devices, first = topology.num_devices, None
    on_host = num_devices // (topology.num_hosts or topology.num_processes)
    for ways in reversed(divisors(num_devices)):
        for tensor in reversed(divisors(math.gcd(num_devices // ways, on_host))):
            axes = AxisSizes(**{axis: ways, TENSOR: tensor, PIPE: num_devices // ways // tensor})
            try:
                plan_for(config, axes, topology).validate(
                    config.model, global_batch=config.data.global_batch
                )
            except PlanError as error:
                first = first or error
            else:
                return axes
    assert first is not None
    raise first


def _by_search(
    config: Config, topology: Topology, pricing: Pricing, *, may_change_batch: bool
) -> Choice:
    """Choose the fastest of all legal layouts that fit."""
    ranking = search(pricing, top=RANKED)
    if not ranking.best:
        plan = plan_for(config, AxisSizes(fsdp=topology.num_devices), topology)
        plan.validate(
            config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
        )
        raise PlanError(_no_room(config, plan, memory_of_run(config, plan), topology))
    best = ranking.best[0]
    best.plan.validate(
        config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
    )
    divided = divisibility(pricing, best, may_change_batch=may_change_batch, may_leave_hosts=False)
    said = (
        "".join(f"; {reason}" for reason in divided.reasons) if divided.is_worth_reporting else ""
    )
    said += "".join(
        f"; --global-batch {other.global_batch} is predicted to give {other.describe()}"
        for other in divided.batches
    )
    said += "" if divided.no_batch is None else f"; {divided.no_batch}"
    return Choice(
        plan=best.plan,
        memory=best.memory,
        ranked=ranking.best,
        why=(
            f"auto: predicted to be {why_best(best.prediction, ranking.num_priced)}; rates:"
            f" {pricing.rates.source}{said}"
        ),
    )


def _no_room(config: Config, plan: Plan, memory: MemoryEstimate, topology: Topology) -> str:
    """The error for a model that does not fit: memory needed and available, and what would help."""
    devices = topology.num_devices
    split = dataclasses.replace(
        plan,
        axes=AxisSizes(fsdp=devices),
        zero=DEFAULT_ZERO if devices > 1 else 0,
        pipeline=None,
        remat="full",
        offload=(
            "all"
            if config.parallel.offload == "auto" and can_offload(topology.platform)
            else plan.offload
        ),
    )
    numbers = (1, max(1, config.data.global_batch // devices))
    least, halved = (
        min(
            (
                memory_of_run(
                    config, dataclasses.replace(split, microbatches=number, moments=moments)
                )
                for number in numbers
            ),
            key=lambda estimate: estimate.total,
        )
        for moments in (plan.moments, "bf16")
    )
    return explain(
        f"{config.model.name} does not fit: about {gib(memory.total)} per device is needed,"
        f" {gib(topology.bytes_per_device or 0)} is available, of which {USABLE_SHARE:.0%} is"
        " usable" + host_memory_note(memory, topology),
        given=(
            f"{plan.describe()} on {topology}; parameters {gib(memory.params)}, optimizer"
            f" {gib(memory.moments)}, gradients {gib(memory.gradients)}, activations"
            f" {gib(memory.activations)}, logits {gib(memory.logits)}, batch {gib(memory.batch)}"
            " (estimates)"
        ),
        do=(
            "split more over fsdp, or use more microbatches"
            if fits(least, topology)
            else (
                "keep moments in bf16 (the setting"
                f" precision.moments){' and split more over fsdp' * (devices > 1)}: with"
                f" fully sharded state and full remat, about"
                f" {gib(halved.total)} per device are then needed"
                if fits(halved, topology)
                else (
                    "use more devices or a smaller model: with fully sharded state and full remat,"
                    f" about {gib(least.total)} per device are needed"
                )
                + host_memory_note(least, topology)
            )
        ),
    )
