"""The start table: settings of a run, given and derived, shown before its first step."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from optimus_jax.cluster.launch_detection import Launch
from optimus_jax.config import Config, ModelConfig, OptimizerConfig
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.config.model import Medium
from optimus_jax.config.phases import TrainingPhase
from optimus_jax.data.dataset import Data
from optimus_jax.errors import counted
from optimus_jax.mesh.axes import LENGTH
from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.mesh.sharding import layouts_of
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.shapes import ModelShapes
from optimus_jax.plan import OFFLOADED, OVERLAPPED, ZERO_STAGES, Plan
from optimus_jax.reshard.restack import is_stacked
from optimus_jax.run.learning_rate_change import describe_schedule
from optimus_jax.training.optimizer import peak_learning_rate
from optimus_jax.training.step import Program
from optimus_jax.training.tasks import task_name, task_of
from optimus_jax.training.watchers import Display

MAX_TENSORS = 8
"""Number of tensors in the table of the largest tensors."""
_EXAMPLES: dict[Medium, str] = {
    "text": "sequences",
    "images": "images",
    "sound": "recordings",
}


def show_start_table(
    display: Display,
    *,
    config: Config,
    topology: Topology,
    why: str,
    program: Program,
    data: Data,
    compile_s: float,
    step_bytes: int,
    run_dir: Path,
    launch: Launch,
    evaluation: str,
    weights: str | None = None,
    later_phases: Sequence[tuple[TrainingPhase, Plan]] = (),
) -> None:
    """Show the run's settings, given and derived, what matters most first; with `log.verbose` also
    XLA's options and the sharding of its largest tensors.

    Args:
      why: reason for the plan.
      compile_s: compile time of the training step in seconds.
      step_bytes: bytes per device that the compiled step needs, including its arguments.
      launch: how this process was started.
      evaluation: description of the evaluation set and interval.
      weights: where the parameters came from; None: the run's own checkpoint.
      later_phases: later phases with their plans.
    """
    plan, shapes = program.plan, program.shapes
    padding = shapes.vocab_rows - config.model.vocab_size
    peak = peak_learning_rate(config.optimizer, shapes.num_params)
    fsdp = f"zero={plan.zero}: {ZERO_STAGES[plan.zero]}" + (
        "; gradients by exchange" if plan.scatter == "exchange" else ""
    )
    several = topology.num_processes > 1
    rows = [
        ["run", str(run_dir)],
        [
            "model",
            f"{config.model.name}, {shapes.num_params:,} parameters"
            + (f" (+ {padding} rows of vocabulary padding)" if padding else "")
            + (f", drawn at random ({weights})" if weights and not config.init_from else ""),
        ],
        ["task", _task_text(config)],
        *_tuning_rows(shapes),
        ["data", data.description],
        ["documents end with", data.tokenizer.end],
        [
            "batch",
            _batch_text(config.model, program.config.data.global_batch, program.config.seq_len)
            + f", {plan.microbatches} microbatch(es)"
            + _documents_text(config),
        ],
        *_phase_rows(plan, later_phases, config),
        [
            "learning rate",
            "that of the optimizer given in Python"
            if config.optimizer.name == IN_PYTHON
            else f"{peak:g} peak, {describe_schedule(config)}, of {config.steps} steps",
        ],
        *_rate_factor_rows(config.optimizer),
        ["evaluation", evaluation],
        ["processes", f"{launch.num_processes} ({launch})"],
        ["devices", str(topology)],
        ["mesh", f"{plan.axes} ({why})"],
        *([["mesh and links", topology.describe_crossed(plan.axes)]] if several else []),
        ["sharded over fsdp", fsdp if plan.axes.fsdp > 1 else "nothing (fsdp=1)"],
        *(
            [["between blocks", f"tokens split over tensor={plan.axes.tensor}"]]
            if LENGTH in plan.active_rules(config.model)
            else []
        ),
        *_pipeline_rows(plan, config.model),
        ["attention kernel", plan.attention],
        [
            "precision",
            f"{plan.precision} compute, {plan.moments} moments, f32 master weights and"
            " gradient sums",
        ],
        [
            "remat",
            plan.remat + (f" but for {plan.kept_layers} layers" if plan.kept_layers else ""),
        ],
        *([["overlap", OVERLAPPED[plan.overlap]]] if plan.overlap != "none" else []),
        *([["in host memory", OFFLOADED[plan.offload]]] if plan.offload != "none" else []),
        [
            "compiled step",
            f"{step_bytes / 2**20:,.0f} MiB per device, {compile_s:.1f} s to compile",
        ],
        ["plan", plan.digest],
    ]
    display.table("run configuration", rows)
    if not config.log.verbose:
        return
    if program.options:
        display.table(
            "XLA options (all others have XLA's defaults; XLA_FLAGS takes precedence)",
            [[option.text, f"{option.why} ({option.source})"] for option in program.options],
        )
    display.table(
        "largest tensors: shape, and bytes per device of parameter, summed gradient and moments",
        _tensor_rows(program),
    )


def _task_text(config: Config) -> str:
    """What is learnt."""
    name, task = task_name(config), task_of(config)
    if task.labelled is not None and not task.has_generator:
        labels = config.model.labels
        shown = ", ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "")
        return f"{name}: {len(labels)} labels of a {task.labelled}: {shown}"
    if task.medium == "images":
        share, square = config.patch_masking.share, config.patch_masking.square
        return f"{name}: {share:.0%} of each image, in squares of {square} x {square} patches"
    if task.corrupt is not None:
        masking = config.masking
        words = "words" if masking.whole_words else "tokens"
        weight = (
            f"; finding those that the generator replaces weighs {masking.discriminator_weight:g}"
            if task.has_generator
            else ""
        )
        return (
            f"{name}: {masking.share:.0%} of the {words}, of which {masking.masked:.0%} are seen as"
            f" token {config.mask_token} and {masking.random:.0%} as random ones{weight}"
        )
    return name


def _tuning_rows(shapes: ModelShapes) -> list[list[str]]:
    """What is trained, if not all of the model."""
    tuning = shapes.config.tuning
    if not (tuning.frozen or tuning.freeze_layers or tuning.has_adapters):
        return []
    adapters = {
        "none": "",
        "lora": f": lora of rank {tuning.rank}, times {tuning.scale:g}",
        "ia3": ": ia3",
    }
    text = f"{shapes.num_trained:,} parameters{adapters[tuning.method]}"
    if tuning.has_adapters:
        text += f", on {', '.join(tuning.targets)}"
    if tuning.method == "lora" and tuning.rank > (full := _full_rank(shapes)):
        text += f" (a rank above {full} adds nothing to the narrowest of these matrices)"
    formats: dict[str, list[str]] = {}
    for group in tuning.frozen:
        stored = "f32" if group == "norm" else tuning.stored_format(group)
        is_head = group == "embedding" and shapes.config.tied and tuning.trains("head")
        formats.setdefault(stored, []).append(f"{group} (also the head)" if is_head else group)
    for stored, groups in formats.items():
        text += f"; frozen, in {stored}: {', '.join(groups)}"
    if tuning.freeze_layers:
        text += f"; frozen layers: the lowest {tuning.freeze_layers}"
    return [["trained", text]]


def _full_rank(shapes: ModelShapes) -> int:
    """The least rank that the adapted matrices can have."""
    adapters = (
        param
        for param, leaf in zip(
            jax.tree.leaves(shapes.params), jax.tree.leaves(shapes.leaves), strict=True
        )
        if leaf.group == "adapter"
    )
    # each is the rank by the width of one side of a matrix, stacked over layers
    return min(math.prod(param.shape[1:]) for param in adapters) // shapes.config.tuning.rank


def _rate_factor_rows(optimizer: OptimizerConfig) -> list[list[str]]:
    """Factors on the learning rate, where they are not 1."""
    factors = [
        f"{factor:g} for {group}"
        for group, factor in vars(optimizer.lr_factors).items()
        if factor != 1
    ]
    if optimizer.layer_lr_decay != 1:
        factors.append(f"{optimizer.layer_lr_decay:g} from each layer to the one below")
    return [["learning rate times", ", ".join(factors)]] if factors else []


def _phase_rows(
    plan: Plan, later_phases: Sequence[tuple[TrainingPhase, Plan]], config: Config
) -> list[list[str]]:
    """A row for each later phase: its batch, and its plan if that changes."""
    rows, before = [], plan
    for phase, later in later_phases:
        under = "" if later == before else f", under {later.describe()}"
        unreached = "" if phase.steps_before < config.steps else " (not reached in this run)"
        rows.append(
            [
                f"batch after step {phase.steps_before}",
                _batch_text(config.model, phase.global_batch, phase.seq_len) + under + unreached,
            ]
        )
        before = later
    return rows


def _batch_text(model: ModelConfig, global_batch: int, seq_len: int) -> str:
    return f"{global_batch} {_EXAMPLES[model.reads]} x {seq_len} tokens"


def _documents_text(config: Config) -> str:
    """Which documents attention sees; nothing if an example is none."""
    if not config.model.reads_documents:
        return ""
    return f", attention {'within' if config.separates_documents else 'across'} documents"


def _pipeline_rows(plan: Plan, model: ModelConfig) -> list[list[str]]:
    """Rows about pipeline stages, schedule and memory; none without stages."""
    if plan.pipeline is None:
        return []
    pipeline, schedule = plan.pipeline, plan.schedule()
    table = " from a custom table" if pipeline.table is not None else ""
    visits = (
        f", each visited {pipeline.repeats} times (layers by visit, in order)"
        if pipeline.repeats > 1
        else ""
    )
    # Recomputing the stage in backward costs another forward.
    bubble = schedule.bubble(backward_s=2.0 if pipeline.keep_residuals else 3.0)
    slack = ", a tick of slack for sends" if schedule.latency > 1 else ""
    longest = pipeline.most_layers
    uneven = ""
    if longest > min(pipeline.layers_per_stage):
        # Layers of an encoder and a decoder take unequal times, and empty slots of theirs none.
        has = "stage has memory for" if model.encoder_layers else "tick takes as long as"
        uneven = f"; each {has} {counted(longest, 'layer')}"
    return [
        [
            "stages",
            (
                f"{plan.axes.pipe} with {'+'.join(map(str, pipeline.layers_per_stage))}"
                f" layers{visits}{uneven}"
            ),
        ],
        [
            "schedule",
            (
                f"{pipeline.schedule}{table}, {plan.microbatches} microbatches in"
                f" {schedule.num_ticks} ticks{slack}: bubble {bubble:.1%} of the busy time"
            ),
        ],
        [
            "in flight",
            f"at most {schedule.in_flight().max()} tasks per stage, each storing "
            + (
                "its residuals"
                if pipeline.keep_residuals
                else "the stage's input (residuals are recomputed)"
            ),
        ],
    ]


def _tensor_rows(program: Program) -> list[list[str]]:
    plan = program.plan
    leaves = jax.tree_util.tree_leaves_with_path(program.shapes.params)
    layouts = jax.tree.leaves(
        layouts_of(program.shapes.leaves, plan.active_rules(program.config.model), plan.zero)
    )
    params = jax.tree.leaves(program.state_shardings.params)
    rows = []
    for (path, leaf), layout, param in zip(leaves, layouts, params, strict=True):
        # Gradients of parameters shared by all stages are summed unsplit and scattered afterwards
        # (training/gradients.py).
        split = plan.zero >= 2 and (plan.pipeline is None or is_stacked(leaf_path(path)))
        gradient = NamedSharding(program.mesh, layout.spec(split=split))
        rows.append(
            [
                leaf_path(path),
                "x".join(map(str, leaf.shape)),
                str(param.spec),
                _bytes(leaf, param, leaf.dtype.itemsize),
                _bytes(leaf, gradient) if layout.leaf.trained else "none",
                _bytes(leaf, param, plan.moment_bytes) if layout.leaf.trained else "none",
            ]
        )
    order = sorted(range(len(rows)), key=lambda i: -leaves[i][1].size)
    return [
        ["tensor", "shape", "spec", "parameter", "gradient", "each moment"],
        *(rows[i] for i in order[:MAX_TENSORS]),
    ]


def _bytes(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, itemsize: int = 4) -> str:
    size = math.prod(sharding.shard_shape(leaf.shape)) * itemsize
    return f"{size / 2**20:,.2f} MiB"
