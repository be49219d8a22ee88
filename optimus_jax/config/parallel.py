"""Settings of the layout (mesh, pipeline, remat, offload) and of number formats."""

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
"""What is kept in host memory instead of device memory: the optimizer's moments, or the layer
inputs that backward needs."""
OffloadChoice = Literal["auto", "none", "activations", "optimizer", "all"]
Overlap = Literal["none", "layers", "halves"]
"""Whose compute the exchanges of a layer run beside: its own as far as possible, the next layer's
(models/layer_loop.py), or in addition the other half's of the rows."""
OverlapChoice = Literal["auto", "none", "layers", "halves"]
Scatter = Literal["sum", "exchange"]
"""How fsdp's devices add up a gradient of which each keeps a shard: in float32 on the way, or by
sending every other device its part, in the format of the products, to be added in float32 there."""


AUTO = "auto"
"""Value of `mesh` and `schedule` that leaves the choice to the planner."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout settings that the user fixes; the planner chooses and prints the rest of the Plan."""

    mesh: str = AUTO
    """`auto`, or sizes such as `data=2,fsdp=2,tensor=2`; axes left out have size 1."""
    zero: int | None = None
    """Split over fsdp: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters; None: the
    planner's choice; with a given mesh 3 if fsdp > 1, else 0."""
    rules: tuple[str, ...] = ()
    """Changes to the logical-to-mesh rules, such as `mlp=none` (keep whole over tensor)."""
    sequence_parallel: bool | None = None
    """Split the tokens of the residual stream over tensor, between the blocks of a layer; None: the
    planner's choice; with a given mesh false."""
    microbatches: int | None = None
    """Parts of a step's batch that run one after another, gradients accumulated locally; None: the
    planner's choice; with a given mesh 1, or about 4 per pipeline stage."""
    schedule: str = AUTO
    """Pipeline schedule: gpipe, 1f1b, interleaved, or a table in a JSON file; auto: the planner's
    choice; with a given mesh 1f1b, and none while pipe=1."""
    repeats: int | None = None
    """Interleaved only: how often a microbatch visits each device; None: the planner's choice; with
    a given mesh 2."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage (with repeats: of each visit, in order); empty: split as evenly as
    possible."""
    send_slack: bool = False
    """Put one tick between sending and use, so that sends between stages overlap compute; costs
    ticks and memory."""
    stage_residuals: Literal["auto", "keep", "recompute"] = "auto"
    """Whether a stage's backward reads the residuals that forward stored (remat says which) or
    recomputes the stage; auto keeps them if they fit in memory."""
    remat: RematChoice = "auto"
    """Recomputed in backward: none (only norms and activations), selective (+ attention), dots (all
    but matmuls), full (whole layers); auto: the least that fits."""
    kept_layers: int | None = None
    """Layers of which backward recomputes only norms and activations, whatever remat says (with
    stages: of each visit); None: the planner's choice; with a given mesh 0."""
    overlap: OverlapChoice = "auto"
    """What a layer's exchanges run beside: layers (the next layer's compute), halves (also the
    other half of the rows), none (what the compiler finds); auto: the planner's choice on GPUs;
    with a given mesh none."""
    scatter: Scatter = "sum"
    """How gradients are scattered over fsdp: sum (float32, added on the way), exchange (ZeRO 2 and
    3: in the format of the matmuls, added in float32 by the receiver: half of the bytes in bf16;
    for devices of one host)."""
    offload: OffloadChoice = "auto"
    """Kept in host memory (GPUs only): optimizer (its moments), activations (layer inputs, with
    remat=full), all; auto: none, unless nothing else fits."""
    attention: AttentionKernel = "auto"
    """Attention kernel; auto is cudnn on a GPU in bf16 or f16, else xla."""
    loss_chunk_tokens: int | None = None
    """Tokens per device whose logits are held at the same time; None: 2048, on a CPU 128 (one
    device: 256), times the shards of the vocabulary."""
    trials: int = 3
    """With mesh=auto: how many of the planner's best plans are timed for a few steps at the start,
    if that is expected to pay off; 1: no trials."""

    def __post_init__(self) -> None:
        _ = self.axes  # an invalid mesh is an error when the config is made, not later
        check_positive(self, "microbatches", "loss_chunk_tokens", "repeats", "trials")
        if self.kept_layers is not None and self.kept_layers < 0:
            raise ConfigError(
                explain(
                    "parallel.kept_layers must not be negative",
                    given=self.kept_layers,
                    do="give a number of layers, or leave it out",
                )
            )
        if self.kept_layers and "none" in (self.remat, self.overlap):
            raise ConfigError(
                explain(
                    "nothing is recomputed, so that no layer is to be kept from it"
                    if self.remat == "none"
                    else "some layers are kept and others recomputed only in the loops of"
                    " overlap=layers",
                    given=f"parallel.kept_layers={self.kept_layers}, remat={self.remat},"
                    f" overlap={self.overlap}",
                    do="leave parallel.kept_layers out, or choose another "
                    + ("remat" if self.remat == "none" else "overlap"),
                )
            )
        if self.zero not in (None, 0, 1, 2, 3):
            raise ConfigError(
                explain(
                    "parallel.zero must be a ZeRO stage", given=self.zero, do="choose 0, 1, 2 or 3"
                )
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
"""Settings that depend on the number of devices."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Master weights and gradient sums are always float32."""

    compute: PrecisionChoice = "auto"
    """Format of activations and of weights in matmuls; auto: f32 on a CPU, bf16 elsewhere, f16 on
    GPUs without it."""
    moments: MomentPrecision = "f32"
    """Format of AdamW's moments between steps; bf16 halves their memory and needs betas below
    0.996."""
    loss_scale: float = 2.0**16
    """f16 only: initial factor on the loss."""
    loss_scale_growth_steps: int = 2000
    """f16 only: steps without overflow before the factor doubles."""
    loss_scale_hysteresis: int = 2
    """f16 only: overflows in a row before the factor halves."""

    def __post_init__(self) -> None:
        check_positive(self, "loss_scale", "loss_scale_growth_steps", "loss_scale_hysteresis")
