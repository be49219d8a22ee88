"""Choosing a Plan: what the user fixed, and a simple rule for the rest.

The rule: all devices along `data` if a whole copy of the training state fits on each, else along
`fsdp`. What it chose and why is part of the answer, so that it can be shown.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from optimus_jax.config import Config
from optimus_jax.errors import PlanError, explain, nearest
from optimus_jax.mesh.axes import VOCAB, AxisSizes
from optimus_jax.mesh.rules import make_rules
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.kernels import choose_kernel
from optimus_jax.pipeline.partition import layers_per_stage
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import SCHEDULES
from optimus_jax.plan import Pipelining, Plan, check_devices
from optimus_jax.planning.memory import MemoryEstimate, estimate_memory

USABLE_SHARE = 0.9
"""Of a device's memory; the rest is for the runtime and for what an estimate misses."""
LOSS_CHUNK_TOKENS = 2048
"""For a whole vocabulary; as many times more for a part of it. A GPU wants large matmuls."""
LOSS_CHUNK_TOKENS_CPU = {False: 256, True: 128}
"""A CPU wants a chunk's logits near its caches (docs/decisions/0003), and several virtual devices share its memory."""
DEFAULT_ZERO = 3
"""fsdp means sharded parameters unless the user says otherwise."""
DEFAULT_REPEATS = 2
"""Of an interleaved schedule: halves the bubble for twice the sends."""
TABLE_SUFFIX = ".json"
"""Of what --schedule names, when it is a file."""
MICROBATCHES_PER_STAGE = 4
"""1F1B then idles (p - 1) / 4p of its time, a fifth at most."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A Plan, and the sentence that says where it comes from."""

    plan: Plan
    memory: MemoryEstimate
    why: str


def choose_plan(config: Config, topology: Topology) -> Choice:
    """The Plan that a run of `config` on `topology` starts with.

    Raises:
      PlanError: what the user fixed is not legal, or no plan is estimated to fit into memory.
    """
    if config.parallel.mesh == "auto":
        plan, why = _automatic(config, topology)
    else:
        plan, why = plan_for(config, AxisSizes.parse(config.parallel.mesh), topology), "the mesh was given"
        check_devices(plan.axes, topology.num_devices)
    plan.validate(config.model, global_batch=config.data.global_batch)
    memory = _estimate(config, plan)
    if not fits(memory, topology):
        raise PlanError(_no_room(config, plan, memory, topology))
    return Choice(plan=plan, memory=memory, why=why)


def plan_for(config: Config, axes: AxisSizes, topology: Topology) -> Plan:
    """The Plan with these axis sizes and everything else as the config says."""
    parallel, model = config.parallel, config.model
    zero = parallel.zero if parallel.zero is not None else DEFAULT_ZERO if axes.fsdp > 1 else 0
    pipeline = _pipelining(config, axes)
    rules = make_rules(model, parallel.rules)
    vocab_ways = math.prod(axes[axis] for axis in dict(rules).get(VOCAB, ()))
    return Plan(
        axes=axes, rules=rules, zero=zero, pipeline=pipeline,
        microbatches=parallel.microbatches or _microbatches(config.data.global_batch, axes, interleaved=pipeline is not None and pipeline.repeats > 1),
        remat=parallel.remat, precision=config.precision.compute,
        attention=choose_kernel(parallel.attention, platform=topology.platform, precision=config.precision.compute, model=model),
        loss_chunk_tokens=parallel.loss_chunk_tokens or vocab_ways * (
            LOSS_CHUNK_TOKENS_CPU[axes.num_devices > 1] if topology.platform == "cpu" else LOSS_CHUNK_TOKENS))


def _pipelining(config: Config, axes: AxisSizes) -> Pipelining | None:
    """What the user fixed of the pipeline; the rest is 1F1B on stages as even as the layers divide."""
    parallel = config.parallel
    _check_schedule_name(parallel.schedule)
    if axes.pipe == 1:
        given = {"schedule": parallel.schedule not in ("auto", "none"), "repeats": parallel.repeats is not None,
                 "layers_per_stage": bool(parallel.layers_per_stage), "send_slack": parallel.send_slack,
                 "stage_residuals": parallel.stage_residuals != "keep"}
        if any(given.values()):
            raise PlanError(explain(
                "there are no pipeline stages to schedule", given=f"{', '.join(name for name in given if given[name])} on mesh {axes}",
                do="add pipe=2 or more to --mesh, or leave these settings out"))
        return None
    table, name, repeats = None, parallel.schedule, parallel.repeats
    if name == "none":
        raise PlanError(explain("pipeline stages need a schedule", given=f"--schedule none on mesh {axes}",
                                do="leave --schedule out, or use pipe=1"))
    if name.endswith(TABLE_SUFFIX):
        table, own = _read_table(name)
        name, repeats = own.name, repeats or own.num_repeats
    elif name == "auto":
        name = "1f1b" if (repeats or 1) == 1 else "interleaved"
    repeats = repeats or (DEFAULT_REPEATS if name == "interleaved" else 1)
    if axes.pipe * repeats > config.model.num_layers:
        raise PlanError(_too_few_layers(config, axes, repeats))
    return Pipelining(
        schedule=name, repeats=repeats, send_slack=parallel.send_slack, table=table,
        keep_residuals=parallel.stage_residuals == "keep",
        layers_per_stage=parallel.layers_per_stage or layers_per_stage(config.model.num_layers, axes.pipe * repeats))


def _check_schedule_name(name: str) -> None:
    if name not in ("auto", "none", *SCHEDULES) and not name.endswith(TABLE_SUFFIX):
        raise PlanError(explain(f"unknown schedule {name!r}", given=f"--schedule {name}",
                                do=nearest(name, ("auto", *SCHEDULES)) + f" (or name a table in a {TABLE_SUFFIX} file)"))


def _read_table(path: str) -> tuple[str, Schedule]:
    """The text of a user's own table, and the schedule that it is."""
    try:
        text = Path(path).read_text()
        return text, Schedule.from_json(text)
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not text"
        raise PlanError(explain("a schedule's table cannot be read", given=f"--schedule {path}: {what}",
                                do=f"name a file that exists, or a schedule: {', '.join(('auto', *SCHEDULES))}")) from error
    except PlanError as error:
        raise PlanError(f"--schedule {path}: {error}") from error


def _too_few_layers(config: Config, axes: AxisSizes, repeats: int) -> str:
    """What is asked, and the nearest numbers of repeats and of stages that are legal."""
    model, options = config.model, []
    if repeats > 1 and (fewer := model.num_layers // axes.pipe):
        options.append("--schedule 1f1b" if fewer == 1 and config.parallel.repeats is None else f"--set parallel.repeats={fewer}")
    stages = [n for n in range(2, axes.pipe) if axes.pipe % n == 0 and n * repeats <= model.num_layers]
    if stages or not options:
        pipe = stages[-1] if stages else 1
        options.append(f"--mesh {dataclasses.replace(axes, pipe=pipe, data=axes.data * axes.pipe // pipe)}")
    return explain(
        f"{model.name} has fewer layers than there are stages", do="use " + " or ".join(options),
        given=f"model.num_layers={model.num_layers}, pipe={axes.pipe}" + (f" x repeats={repeats}" if repeats > 1 else ""))


def _microbatches(global_batch: int, axes: AxisSizes, *, interleaved: bool) -> int:
    """About MICROBATCHES_PER_STAGE for each stage, as far as the batch divides; 1 without stages."""
    if axes.pipe == 1:
        return 1
    rows = max(1, global_batch // (axes.data * axes.fsdp))
    wanted = MICROBATCHES_PER_STAGE * axes.pipe
    legal = [n for n in range(1, rows + 1) if rows % n == 0 and (n % axes.pipe == 0 or not interleaved)]
    return min(legal, key=lambda n: (abs(n - wanted), n), default=axes.pipe)


def fits(memory: MemoryEstimate, topology: Topology) -> bool:
    """Whether the estimate leaves room; a device whose memory is unknown is not argued with."""
    return topology.bytes_per_device is None or memory.total <= USABLE_SHARE * topology.bytes_per_device


def _estimate(config: Config, plan: Plan) -> MemoryEstimate:
    return estimate_memory(config.model, plan, seq_len=config.seq_len, global_batch=config.data.global_batch)


def _automatic(config: Config, topology: Topology) -> tuple[Plan, str]:
    num_devices = topology.num_devices
    whole = plan_for(dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, zero=0)),
                     AxisSizes(data=num_devices), topology)
    if num_devices == 1:
        return plan_for(config, AxisSizes(), topology), "auto: there is one device"
    sharded = plan_for(config, AxisSizes(fsdp=num_devices), topology)
    if config.parallel.zero:
        return sharded, f"auto: zero={config.parallel.zero} was asked for, and is over fsdp"
    if fits(_estimate(config, whole), topology):
        return whole, "auto: a whole training state fits on each device, and plain data parallelism communicates least"
    return sharded, "auto: a whole training state does not fit on a device, so it is split over all of them"


def _no_room(config: Config, plan: Plan, memory: MemoryEstimate, topology: Topology) -> str:
    """Needed, present, and the nearest options that are estimated to fit."""
    others = []
    for axes in {plan.axes, AxisSizes(fsdp=topology.num_devices)}:
        zero = DEFAULT_ZERO if axes.fsdp > 1 else 0
        recomputing = dataclasses.replace(plan.pipeline, keep_residuals=False) if plan.pipeline else None
        for microbatches, remat, pipeline in itertools.product(
                {plan.microbatches, max(1, config.data.global_batch // topology.num_devices)}, {plan.remat, "full"},
                {plan.pipeline, recomputing} if axes.pipe > 1 else (None,)):
            other = dataclasses.replace(plan, axes=axes, microbatches=microbatches, remat=remat, zero=zero, pipeline=pipeline)
            try:
                other.validate(config.model, global_batch=config.data.global_batch)
            except PlanError:
                continue
            others.append((_estimate(config, other), other))
    fitting = sorted((p.axes != plan.axes, f"--mesh {p.axes} --zero {p.zero} --microbatches {p.microbatches} --remat {p.remat}"
                      + (" --set parallel.stage_residuals=recompute" if p.pipeline and not p.pipeline.keep_residuals else "")
                      + (" --schedule auto" if plan.pipeline and not p.pipeline else ""))
                     for estimate, p in others if fits(estimate, topology))
    least = min((estimate.total for estimate, _ in others), default=memory.total)
    return explain(
        f"{config.model.name} does not fit: about {gib(memory.total)} per device are needed, {gib(topology.bytes_per_device or 0)} are there",
        given=f"{plan.describe()} on {topology}; parameters {gib(memory.params)}, optimizer {gib(memory.moments)}, "
              f"gradients {gib(memory.gradients)}, activations {gib(memory.activations)}, logits {gib(memory.logits)} (estimates)",
        do="; or ".join(text for _, text in fitting[:3]) if fitting else
           f"no layout of this model fits these devices (the least is about {gib(least)} each): use more devices or a smaller --model")


def gib(num_bytes: float) -> str:
    """Bytes as text with two decimals."""
    return f"{num_bytes / 2**30:.2f} GiB"
