"""The Plan: the whole layout of a training run as one frozen, hashable value.

The trainer accepts nothing else, and only another Plan changes the mesh. A Plan holds numbers
and names, no arrays and no devices, and survives JSON unchanged.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from optimus_jax.config import (
    AttentionKernel,
    Generator,
    ModelConfig,
    MomentPrecision,
    Offload,
    Overlap,
    Precision,
    RematPolicy,
    Scatter,
)
from optimus_jax.config.axes import FSDP, MESH_AXES, AxisSizes
from optimus_jax.config.settings import shown, with_right_types
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.axes import BATCH, EMBED, LENGTH, LOGICAL_AXES
from optimus_jax.mesh.rules import (
    Rules,
    active_rules,
    check_lengths,
    check_rules,
    padded_vocab,
    rules_of_generator,
)
from optimus_jax.mesh.slots import layer_slots
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.system.json_input import parse_json

ZERO_STAGES = {
    0: "nothing",
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "optimizer state, gradients and parameters",
}
"""What each ZeRO stage splits over `fsdp` (arXiv:1910.02054)."""

OFFLOADED: dict[Offload, str] = {
    "none": "nothing",
    "activations": "layers' inputs, until backward needs them",
    "optimizer": "the optimizer's moments",
    "all": "the optimizer's moments, and layers' inputs until backward needs them",
}
"""What each offload choice keeps in host memory."""

OVERLAPPED: dict[Overlap, str] = {
    "none": "as the compiler finds",
    "layers": "a layer's gathers and sums beside the next layer's compute",
    "halves": "the same, and what a layer exchanges within beside the other half of the rows",
}
"""What the exchanges of layers run beside."""


LATER = {"later": True}
"""Metadata of fields that stored plans may lack. They are left out of JSON while they have their
default, so that a plan keeps its digest in versions that know more fields."""


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """The pipeline part of a plan: stages, schedule, and what is kept for backward."""

    schedule: str
    """Name of the schedule (pipeline/tables.py), or of the user's own table."""
    layers_per_stage: tuple[int, ...]
    """Layers of each virtual stage, in the order in which a microbatch visits them."""
    repeats: int
    """How often a microbatch visits each device; above 1: interleaving."""
    send_slack: bool
    """Whether one extra tick lies between sending a result and using it."""
    keep_residuals: bool
    """Whether backward reads residuals that forward stored; otherwise it recomputes the stage."""
    table: str | None = None
    """The user's own schedule table as JSON; None: the built-in schedule called `schedule`."""

    @cached_property
    def most_layers(self) -> int:
        """Layers of the fullest virtual stage."""
        return max(self.layers_per_stage)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model trains on one set of devices."""

    axes: AxisSizes
    """Devices along each mesh axis."""
    rules: Rules
    """Which mesh axes split which logical axis."""
    zero: int
    """ZeRO stage, a key of ZERO_STAGES: what is split over fsdp. Nothing is split over data."""
    microbatches: int
    """Parts of a device's rows of the batch that run one after the other in a step."""
    pipeline: Pipelining | None
    """The pipeline; None if pipe=1."""
    remat: RematPolicy
    """What the backward pass recomputes."""
    precision: Precision
    """Format of activations and of weights in matmuls."""
    attention: AttentionKernel
    """Attention kernel: xla or cudnn."""
    loss_chunk_tokens: int
    """Tokens per device whose logits are held at the same time."""
    offload: Offload = "none"
    """What is kept in host memory."""
    moments: MomentPrecision = "f32"
    """Number format of the optimizer's moments."""
    kept_layers: int = field(default=0, metadata=LATER)
    """Layers of which backward recomputes only norms and activations, whatever `remat` says: the
    last ones, in a pipeline those of each stage's visit."""
    overlap: Overlap = field(default="none", metadata=LATER)
    """What exchanges of layers run beside."""
    scatter: Scatter = field(default="sum", metadata=LATER)
    """How gradients are scattered over fsdp."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.axes.num_devices

    @property
    def moment_bytes(self) -> int:
        """Bytes per element of an optimizer moment."""
        return 4 if self.moments == "f32" else 2

    @property
    def offloads_moments(self) -> bool:
        """Whether the optimizer's moments are kept in host memory."""
        return self.offload in ("optimizer", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether layers' inputs wait for backward in host memory."""
        return self.offload in ("activations", "all")

    @property
    def sums_by_layer(self) -> bool:
        """Whether backward sums the gradients of layers over replicas, layer by layer. It does so
        once per step, so only with one microbatch.
        """
        return self.overlap != "none" and self.microbatches == 1 and self.pipeline is None

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this Plan in logs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def active_rules(self, model: ModelConfig) -> Mapping[str, tuple[str, ...]]:
        """The rules that split something: logical axis -> mesh axes with more than one device."""
        return active_rules(self.rules, self.axes, model)

    def of_generator(self, generator: Generator) -> "Plan":
        """How this plan trains a model's generator, on the same devices and microbatches: without
        stages, as each of them runs all of it.
        """
        return dataclasses.replace(
            self,
            rules=rules_of_generator(self.rules, self.axes, generator),
            pipeline=None,
            offload="optimizer" if self.offloads_moments else "none",
            kept_layers=0,
            overlap="none",
        )

    def padded_vocab(self, model: ModelConfig) -> int:
        """Rows of the embedding, padding included."""
        return padded_vocab(model.vocab_size, self.rules, self.axes)

    def slots(self, model: ModelConfig) -> tuple[int, ...]:
        """The layer in each slot of the stack (mesh/slots.py)."""
        return (
            layer_slots(self.pipeline.layers_per_stage, self.axes.pipe)
            if self.pipeline
            else tuple(range(model.num_layers))
        )

    def batch_ways(self) -> int:
        """Number of shards that the rows of a batch are split into."""
        ways = 1
        for axis in dict(self.rules).get(BATCH, ()):
            ways *= self.axes[axis]
        return ways

    def validate(
        self, model: ModelConfig, *, global_batch: int, lengths: Iterable[int] = ()
    ) -> None:
        """Raise PlanError if `model` cannot be trained this way.

        Args:
          lengths: numbers of tokens of the sequences that are trained on and evaluated.

        The message says which condition is violated. planning/search/suggestions.py, which knows
        the settings that the user fixed, finds what to change.
        """
        check_rules(self.rules, self.axes, model)
        check_lengths(self.rules, self.axes, lengths, model)
        self._check_stages(model)
        self._check_zero()
        self._check_scatter()
        self._check_microbatches(global_batch)
        self._check_schedule()
        self._check_offload()
        self._check_loops(model, global_batch)

    def _check_loops(self, model: ModelConfig, global_batch: int) -> None:
        if self.overlap == "none":
            if self.kept_layers:
                raise PlanError(
                    explain(
                        "some layers are kept and others recomputed only in the loops of"
                        " overlap=layers",
                        given=f"kept_layers={self.kept_layers}, overlap=none",
                        do="use overlap=layers or halves, or leave kept_layers out",
                    )
                )
            return
        if self.offloads_activations:
            raise PlanError(
                explain(
                    "layers' inputs cannot be offloaded from loops with their own backward",
                    given=f"overlap={self.overlap}, offload={self.offload}",
                    do="use overlap=none, or offload=optimizer",
                )
            )
        most = self.pipeline.most_layers if self.pipeline else model.num_layers
        if not 0 <= self.kept_layers <= most:
            where = "a stage's visit has" if self.pipeline else f"{model.name} has"
            raise PlanError(
                explain(
                    f"{where} {most} layers",
                    given=f"kept_layers={self.kept_layers}",
                    do=f"keep {most} or fewer",
                )
            )
        rows = global_batch // (self.batch_ways() * self.microbatches)
        if self.overlap == "halves" and rows % 2:
            raise PlanError(
                explain(
                    "the rows of a microbatch have no halves",
                    given=f"overlap=halves with {rows} rows of a microbatch on each device",
                    do="use fewer microbatches or another batch, or overlap=layers",
                )
            )

    def _check_stages(self, model: ModelConfig) -> None:
        pipe, pipeline = self.axes.pipe, self.pipeline
        if (pipe > 1) != (pipeline is not None):
            raise PlanError(
                explain(
                    "a plan has a schedule exactly if it has pipeline stages",
                    given=f"pipe={pipe}, pipeline={pipeline}",
                    do="use pipe=2 or more with a schedule, pipe=1 without",
                )
            )
        if pipeline is None:
            return
        stages = pipeline.layers_per_stage
        if (
            len(stages) != pipe * pipeline.repeats
            or sum(stages) != model.num_layers
            or min(stages) < 1
        ):
            raise PlanError(
                explain(
                    f"the stages do not share the {model.num_layers} layers of {model.name}",
                    given=(
                        f"layers_per_stage={','.join(map(str, stages))} for pipe={pipe} x"
                        f" repeats={pipeline.repeats}"
                    ),
                    do=(
                        f"give {pipe * pipeline.repeats} numbers above 0 whose sum is"
                        f" {model.num_layers}"
                    ),
                )
            )

    def _check_zero(self) -> None:
        if self.zero and self.axes.fsdp == 1:
            raise PlanError(
                explain(
                    f"zero={self.zero} splits over mesh axis 'fsdp', which has one device",
                    given=f"mesh {self.axes}",
                    do="use two devices or more along fsdp, or zero=0",
                )
            )
        if self.zero and FSDP not in dict(self.rules).get(EMBED, ()):
            raise PlanError(
                explain(
                    f"zero={self.zero} splits {EMBED!r} over mesh axis 'fsdp', and a rule keeps it"
                    " whole",
                    given=f"{EMBED}=none",
                    do=f"use zero=0, or no rule for {EMBED!r}",
                )
            )

    def _check_scatter(self) -> None:
        if self.scatter == "exchange" and self.zero < 2:
            raise PlanError(
                explain(
                    "backward scatters no gradient over mesh axis 'fsdp'",
                    given=f"scatter=exchange, mesh {self.axes}, zero={self.zero}",
                    do="use two devices or more along fsdp and zero=2 or more, or scatter=sum",
                )
            )

    def _check_offload(self) -> None:
        if not self.offloads_activations:
            return
        if self.remat != "full":
            raise PlanError(
                explain(
                    "activations can be offloaded only with remat=full, which keeps nothing but"
                    " layers' inputs",
                    given=f"offload={self.offload}, remat={self.remat}",
                    do="use remat=full, or offload=optimizer",
                )
            )
        if self.pipeline is not None:
            raise PlanError(
                explain(
                    "pipeline stages keep their activations on the devices and cannot offload them",
                    given=f"offload={self.offload}, pipe={self.axes.pipe}",
                    do="use pipe=1, or offload=optimizer",
                )
            )

    def _check_microbatches(self, global_batch: int) -> None:
        pipe, ways, microbatches = self.axes.pipe, self.batch_ways(), self.microbatches
        if (
            self.pipeline is not None
            and self.pipeline.repeats > 1
            and self.pipeline.table is None
            and microbatches % pipe
        ):
            raise PlanError(
                explain(
                    "interleaving needs a multiple of the stages as microbatches",
                    given=f"microbatches={microbatches}, pipe={pipe}",
                    do=(
                        f"choose a number that {pipe} divides, or a schedule that visits each"
                        " device once"
                    ),
                )
            )
        if global_batch % (ways * microbatches):
            raise PlanError(
                explain(
                    "the global batch does not divide evenly over replicas and microbatches",
                    given=(
                        f"global_batch={global_batch} over data*fsdp={ways} x"
                        f" microbatches={microbatches}"
                    ),
                    do=f"choose a global batch that {ways * microbatches} divides",
                )
            )

    def schedule(self) -> Schedule:
        """The schedule table that the pipeline runs.

        Raises PlanError if none exists for these microbatches and stages.
        """
        assert self.pipeline is not None, "one stage has no schedule"
        if self.pipeline.table is not None:
            return Schedule.from_json(self.pipeline.table)
        return make_schedule(
            self.pipeline.schedule,
            num_stages=self.axes.pipe,
            num_microbatches=self.microbatches,
            num_repeats=self.pipeline.repeats,
            latency=2 if self.pipeline.send_slack else 1,
        )

    def _check_schedule(self) -> None:
        """Raise PlanError if no schedule with a backward exists for these stages and
        microbatches."""
        if self.pipeline is None:
            return
        pipe, pipeline, schedule = self.axes.pipe, self.pipeline, self.schedule()
        if schedule.is_forward_only:
            raise PlanError(
                explain(
                    f"schedule {schedule.name!r} does not train",
                    given="a table whose 'backward' is null",
                    do="write every backward task into 'backward'",
                )
            )
        if pipeline.send_slack and schedule.latency == 1:
            raise PlanError(
                explain(
                    "a user's table sets its latency itself, so send_slack cannot change it",
                    given="send_slack, and a table with latency 1",
                    do="use a table with latency 2, or no send_slack",
                )
            )
        asked = (pipe, self.microbatches, pipeline.repeats)
        if (schedule.num_stages, schedule.num_microbatches, schedule.num_repeats) != asked:
            raise PlanError(
                explain(
                    f"the table of schedule {schedule.name!r} is for another pipeline",
                    given="pipe={}, microbatches={}, repeats={}".format(*asked),
                    do=(
                        f"use pipe={schedule.num_stages}, microbatches={schedule.num_microbatches}"
                        f" and repeats={schedule.num_repeats}, or another table"
                    ),
                )
            )

    def describe(self) -> str:
        """The plan in one readable line."""
        parts = [
            f"mesh {self.axes}",
            f"zero {self.zero}",
            f"microbatches {self.microbatches}",
            f"remat {self.remat}",
            self.precision,
            f"attention {self.attention}",
        ]
        if self.axes.tensor > 1 and LENGTH in dict(self.rules):
            parts.insert(1, "sequence parallel")
        if self.kept_layers:
            parts[parts.index(f"remat {self.remat}")] += f" but for {self.kept_layers} layers"
        if self.overlap != "none":
            parts.append(f"overlap {self.overlap}")
        if self.scatter != "sum":
            parts.append("gradients exchanged")
        if self.moments != "f32":
            parts.append(f"moments {self.moments}")
        if self.offload != "none":
            parts.append(f"offload {self.offload}")
        if self.pipeline is not None:
            sizes = self.pipeline.layers_per_stage
            stages = (
                f"{len(sizes)} x {sizes[0]}"
                if len(sizes) > 4 and len(set(sizes)) == 1
                else "+".join(map(str, sizes))
            )
            residuals = "residuals kept" if self.pipeline.keep_residuals else "stages recomputed"
            slack = ", a tick of slack" if self.pipeline.send_slack else ""
            parts.insert(
                1, f"schedule {self.pipeline.schedule} with layers {stages}, {residuals}{slack}"
            )
        return ", ".join(parts)

    def to_json(self) -> str:
        """The Plan as JSON."""
        values = dataclasses.asdict(self)
        for each in dataclasses.fields(self):
            if each.metadata == LATER and values[each.name] == each.default:
                del values[each.name]
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path | None = None) -> "Plan":
        """The inverse of `to_json`. Raises PlanError if the text is not a Plan.

        Args:
          source: the file that the text came from, named in the error.
        """
        try:
            value = parse_json(text)
            if not isinstance(value, dict):
                raise ValueError(
                    f"expected a JSON object with the fields of a plan, got {shown(value)}"
                )
            if lacking := [
                field.name
                for field in dataclasses.fields(cls)
                if field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
                and field.name not in value
            ]:
                raise ValueError(f"missing fields: {', '.join(lacking)}")
            value["axes"] = AxisSizes(**value["axes"])
            value["rules"] = tuple((logical, tuple(axes)) for logical, axes in value["rules"])
            if (pipeline := value["pipeline"]) is not None:
                value["pipeline"] = Pipelining(
                    **{**pipeline, "layers_per_stage": tuple(pipeline["layers_per_stage"])}
                )
            plan = with_right_types(cls(**value))
            for logical, axes in plan.rules:
                if logical not in LOGICAL_AXES or not set(axes) <= set(MESH_AXES):
                    raise ValueError(f"rules has {logical}={','.join(axes)}")
            return plan
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                explain(
                    "this is not a plan",
                    given=("" if source is None else f"{source}: ")
                    + shown(str(error) if type(error) is ValueError else error),
                    do="use a plan.json that this version wrote",
                )
            ) from error
