"""What the user fixes of how it is laid out and computed."""

import functools
import typing
from dataclasses import dataclass, replace
from typing import Literal

from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.checks import check_positive
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.paths import user_path

Precision = Literal["f32", "bf16", "f16"]
PrecisionChoice = Literal["auto", "f32", "bf16", "f16"]
MomentPrecision = Literal["f32", "bf16"]
RematPolicy = Literal["none", "selective", "dots", "full"]
REMAT_POLICIES: tuple[RematPolicy, ...] = typing.get_args(RematPolicy)
"""From the least recomputing to the most."""
RematChoice = Literal["auto", "none", "selective", "dots", "full"]
AttentionKernel = Literal["auto", "xla", "cudnn"]
Offload = Literal["none", "activations", "optimizer", "all"]
OFFLOADS: tuple[Offload, ...] = typing.get_args(Offload)
"""What lies in the host's memory instead of the device's: the optimizer's moments, or what layers
keep for backward."""
OffloadChoice = Literal["auto", "none", "activations", "optimizer", "all"]


AUTO = "auto"
"""Of `mesh` and `schedule`: the planner chooses."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """What the user fixes of the layout; the rest of the Plan is chosen and printed."""

    mesh: str = AUTO
    """`auto`, or sizes such as `data=2,fsdp=2,tensor=2`; axes left out have size 1."""
    zero: int | None = None
    """Split over fsdp: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters; None: 3 if fsdp
    > 1, else 0."""
    rules: tuple[str, ...] = ()
    """Changes to the logical-to-mesh rules, such as `mlp=none` (keep whole over tensor)."""
    microbatches: int | None = None
    """Parts of a step's batch run one after the other, their gradients added locally; None: 1, with
    stages about 4 for each."""
    schedule: str = AUTO
    """Pipeline schedule: gpipe, 1f1b, interleaved, or a table in a JSON file; auto is 1f1b, and
    none while pipe=1."""
    repeats: int | None = None
    """Interleaved only: visits of a microbatch to each device; None: 2."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage (with repeats: of each visit, in order); empty: as even as they
    divide."""
    send_slack: bool = False
    """A tick between sending and use, so that sends between stages overlap compute, for more ticks
    and memory."""
    stage_residuals: Literal["auto", "keep", "recompute"] = "auto"
    """Whether a stage's backward reads what forward has kept (remat says what), or computes the
    stage again; auto keeps if that fits."""
    remat: RematChoice = "auto"
    """Computed again: none (only norms and activations), selective (+ attention), dots (all but
    matmuls), full (layers); auto: the least that fits."""
    offload: OffloadChoice = "auto"
    """In the host's memory (GPUs only): optimizer (its moments), activations (layer inputs, with
    remat=full), all; auto: none, unless nothing else fits."""
    attention: AttentionKernel = "auto"
    """Attention kernel; auto is cudnn on a GPU in bf16 or f16, else xla."""
    loss_chunk_tokens: int | None = None
    """Tokens of a device whose logits exist at the same time; None: 2048, on a CPU 128 (one device:
    256), times the vocabulary's shards."""
    trials: int = 3
    """With mesh=auto: how many of the planner's best are run for a few steps at the start, where
    that is expected to pay; 1: none."""

    def __post_init__(self) -> None:
        _ = self.axes  # a mesh that cannot be read is an error here, not when a plan is made
        check_positive(self, "microbatches", "loss_chunk_tokens", "repeats", "trials")
        if self.zero not in (None, 0, 1, 2, 3):
            raise ConfigError(
                explain("parallel.zero is a ZeRO stage", given=self.zero, do="choose 0, 1, 2 or 3")
            )
        user_path(self.schedule, what="--schedule")

    @functools.cached_property
    def axes(self) -> AxisSizes | None:
        """The mesh that the user fixed; None: the planner chooses one. Raises PlanError."""
        return None if self.mesh == AUTO else AxisSizes.parse(self.mesh)

    def with_open_layout(self) -> "ParallelConfig":
        """A copy that leaves mesh, ZeRO stage, microbatches and schedule to the planner."""
        default = ParallelConfig()
        return replace(self, **{name: getattr(default, name) for name in LAYOUT_FIELDS})


LAYOUT_FIELDS = ("mesh", "zero", "microbatches", "schedule", "repeats", "layers_per_stage")
"""What depends on the number of devices."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Master weights and gradient sums are always float32."""

    compute: PrecisionChoice = "auto"
    """Format of activations and of weights in matmuls; auto: f32 on a CPU, bf16 elsewhere, f16 on
    GPUs without it."""
    moments: MomentPrecision = "f32"
    """Format in which AdamW's moments are kept between steps; bf16 halves them, and needs betas
    below 0.996."""
    loss_scale: float = 2.0**16
    """f16 only: first factor on the loss."""
    loss_scale_growth_steps: int = 2000
    """f16 only: clean steps before the factor doubles."""
    loss_scale_hysteresis: int = 2
    """f16 only: overflows in a row before the factor halves."""

    def __post_init__(self) -> None:
        check_positive(self, "loss_scale", "loss_scale_growth_steps", "loss_scale_hysteresis")
