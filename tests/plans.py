"""The plans that tests of plans share, and the tiny models they train.

A new plan, or a new kind of plan, is tested by adding it to PLANS: every test that is parametrised
over the list then compares it with one device and checks its shardings and collectives.
"""

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import ADAM_EPSILON, fitted

from optimus_jax.config import (
    Config,
    DataConfig,
    Features,
    Generator,
    ModelConfig,
    OptimizerConfig,
)
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.model import REPLACEMENT_LABELS
from optimus_jax.data.batch import synthetic_batch
from optimus_jax.mesh.build import discover
from optimus_jax.models.families import FAMILIES, features_of
from optimus_jax.plan import Plan
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Batch, Program, build_program

SEQ_LEN = 16
GLOBAL_BATCH = 48
"""Divides over 8, 6 and 4 devices, two microbatches and more."""
VOCAB_SIZE = 101
"""Not divisible by any mesh axis: the embedding table is padded, for tensor=3 with more rows."""

GPT = ModelConfig(
    name="test-gpt",
    family="gpt2",
    vocab_size=VOCAB_SIZE,
    num_layers=3,
    embed_dim=48,
    num_heads=24,
    num_kv_heads=24,
    head_dim=4,
    mlp_dim=96,
    max_length=SEQ_LEN,
    tied=True,
    dropout=0.1,
)
LLAMA = ModelConfig(
    name="test-llama",
    family="llama",
    vocab_size=VOCAB_SIZE,
    num_layers=3,
    embed_dim=48,
    num_heads=24,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=96,
    max_length=SEQ_LEN,
    tied=False,
    dropout=0.1,
)
FAMILY_MODELS = {
    family: replace(
        LLAMA if FAMILIES[family].positions == "rotary" else GPT,
        name=f"test-{family}",
        family=family,
        num_layers=2,
        num_heads=8,
        num_kv_heads=8 if FAMILIES[family].norm == "layer" else 2,
        head_dim=8,
        dropout=0.0,
        features=features,
    )
    for family, features in {
        "gpt_neo": Features(window=5),
        "gptj": Features(rope_dims=4),
        "opt": Features(norm_place="post", final_norm=False, table_dim=24),
        "bert": Features(),
        "electra": Features(table_dim=24),
        "mistral": Features(window=6),
        "phi3": Features(),
        "qwen2": Features(),
        "qwen3": Features(),
        "olmo2": Features(),
        "gemma2": Features(window=5, attention_softcap=2.0, head_softcap=3.0),
        "gemma3_text": Features(window=5, attention_scale=0.3),
    }.items()
}
"""A small model of every further family, with features that show. `make parity` can compare it."""
INPUT_MODELS = {
    "vit": replace(
        GPT,
        name="test-vit",
        family="vit",
        vocab_size=1,
        tied=False,
        image_size=8,
        patch_size=2,
        max_length=17,
        labels=("cat", "dog", "fish"),
    ),
    "whisper": replace(
        GPT,
        name="test-whisper",
        family="whisper",
        num_layers=4,
        encoder_layers=2,
        frames=12,
        mel_bins=8,
        max_length=20,
    ),
    "electra-joint": replace(
        GPT,
        name="test-electra-joint",
        family="electra",
        labels=REPLACEMENT_LABELS,
        labelled="replacement",
        generator=Generator(num_layers=2, embed_dim=24, num_heads=24, mlp_dim=48),
    ),
}
"""Models that read images, sound, and what another model wrote. `make parity` can compare them."""
MODELS = {"gpt": GPT, "llama": LLAMA}
"""Widths divide by 8, 6 and 3. The Llama has fewer key/value heads than tensor=4 and 8 have
devices."""

KV_HEADS_OVER_3 = 6
"""Two key/value heads can be neither split nor replicated over tensor=3, so the Llama has this many
there.
"""

LAYERS_IN_STAGES = 10
"""Layers of models under pipelined plans: 3, 4 and 8 do not divide them."""
LAYERS_IN_VISITS = 17
"""Layers under plans with eight stages and two repeats."""


@dataclass(frozen=True)
class PlanCase:
    """Settings that make one plan."""

    mesh: str
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join(
            [
                self.mesh,
                *(f"{name.rpartition('.')[2]}={_text(value)}" for name, value in self.settings),
            ]
        )

    @classmethod
    def parse(cls, text: str) -> "PlanCase":
        """The inverse of `str`: a mesh, then `name=value` of ParallelConfig's fields."""
        mesh, *settings = text.split()
        pairs = (setting.partition("=") for setting in settings)
        return cls(
            mesh, tuple((f"parallel.{name}", value.replace("+", ",")) for name, _, value in pairs)
        )

    @property
    def axes(self) -> AxisSizes:
        return AxisSizes.parse(self.mesh)


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def case(mesh: str, **parallel: Any) -> PlanCase:
    """A mesh, and fields of ParallelConfig that differ from its defaults."""
    return PlanCase(mesh, tuple((f"parallel.{name}", value) for name, value in parallel.items()))


ONE_DEVICE = case("data=1", zero=0)

PLANS = [
    # Every way to divide eight devices over data, fsdp and tensor, with every ZeRO stage.
    case("data=8", microbatches=2, remat="dots", loss_chunk_tokens=20),
    case("fsdp=8", zero=3, remat="selective", loss_chunk_tokens=40),
    case("tensor=8", remat="selective", microbatches=4),
    case("data=4,fsdp=2", zero=2, microbatches=2),
    case("data=2,fsdp=4", zero=3, microbatches=2, remat="dots"),
    case("data=4,tensor=2", rules=("vocab=none",), microbatches=4),
    case("data=2,tensor=4", rules=("mlp=none",), remat="full"),
    case("fsdp=4,tensor=2", zero=1, remat="dots"),
    case("fsdp=2,tensor=4", zero=3, rules=("heads=none",), microbatches=4, loss_chunk_tokens=100),
    case("data=2,fsdp=2,tensor=2", zero=2, remat="selective", microbatches=4),
    case("data=2,fsdp=2,tensor=2", zero=3, remat="full", microbatches=2),
    # The residual stream's tokens split over tensor.
    case("fsdp=2,tensor=4", zero=3, sequence_parallel=True, microbatches=2),
    case("pipe=2,data=2,tensor=2", microbatches=4, sequence_parallel=True),
    case(
        "pipe=2,fsdp=2,tensor=2",
        schedule="interleaved",
        microbatches=4,
        stage_residuals="recompute",
        sequence_parallel=True,
        zero=2,
    ),
    # Exchanges beside the compute of other layers, and of halves of a microbatch.
    case("data=8", overlap="layers"),
    case(
        "data=2,fsdp=4", zero=3, remat="full", overlap="layers", kept_layers=1, scatter="exchange"
    ),
    case("fsdp=2,tensor=4", zero=2, sequence_parallel=True, overlap="halves", microbatches=3),
    case("data=2,fsdp=2,tensor=2", zero=1, remat="selective", overlap="halves"),
    case(
        "pipe=2,data=2,fsdp=2",
        microbatches=4,
        zero=3,
        remat="full",
        overlap="layers",
        kept_layers=2,
    ),
    case(
        "pipe=2,fsdp=2,tensor=2",
        schedule="interleaved",
        microbatches=4,
        stage_residuals="recompute",
        overlap="halves",
        zero=2,
        scatter="exchange",
    ),
    # Six devices: axes that are not powers of two.
    case("data=3,fsdp=2", zero=1),
    case("data=2,fsdp=3", zero=0, microbatches=4),
    case("fsdp=3,tensor=2", zero=2),
    case("data=2,tensor=3", microbatches=2),
    # Four of the eight devices.
    case("fsdp=2,tensor=2", zero=3, rules=("vocab=none", "mlp=none")),
    # Offload to host memory: the optimizer's moments, and residuals that layers keep for backward.
    case("fsdp=4,tensor=2", zero=1, offload="all", microbatches=2),
    case("data=2,fsdp=4", zero=3, offload="optimizer"),
    # Pipelines: every schedule with 2, 4 and 8 stages, alone and with every other axis; most have
    # stages of unequal length.
    case("pipe=2,data=2,tensor=2", microbatches=4),
    case("pipe=4,data=2", microbatches=8, stage_residuals="recompute", remat="full"),
    case("pipe=8", microbatches=16),
    case("pipe=2,data=2,fsdp=2", microbatches=4, zero=3, remat="selective"),
    case("pipe=3,tensor=2", microbatches=3, layers_per_stage=(2, 5, 3), loss_chunk_tokens=50),
    case("pipe=4,data=2", microbatches=3, send_slack=True),
    case("pipe=2,fsdp=4", schedule="gpipe", microbatches=2, zero=2),
    case(
        "pipe=4,tensor=2",
        schedule="gpipe",
        microbatches=6,
        rules=("vocab=pipe",),
        stage_residuals="recompute",
    ),
    case("pipe=8", schedule="gpipe", microbatches=1),
    case("pipe=2,fsdp=2,tensor=2", schedule="interleaved", microbatches=6, zero=1, remat="dots"),
    case(
        "pipe=4,fsdp=2", schedule="interleaved", microbatches=4, zero=3, stage_residuals="recompute"
    ),
    case(
        "pipe=2,tensor=4",
        schedule="interleaved",
        repeats=4,
        microbatches=16,
        send_slack=True,
        rules=("mlp=none",),
    ),
    case("pipe=8", schedule="interleaved", microbatches=8, zero=0),
    case("pipe=2,fsdp=4", microbatches=4, zero=2, offload="optimizer"),
]


@dataclass(frozen=True)
class Built:
    """A plan's program and the batch of its first step; nothing is compiled yet."""

    config: Config
    plan: Plan
    program: Program
    batch: Batch


def model_for(case: PlanCase, name: str) -> ModelConfig:
    """The model called `name`, with layers for the case's stages and key/value heads that its
    tensor axis can have.
    """
    model, settings = (MODELS | FAMILY_MODELS | INPUT_MODELS)[name], dict(case.settings)
    if case.axes.pipe > 1:
        visits = case.axes.pipe * (2 if settings.get("parallel.schedule") == "interleaved" else 1)
        model = replace(
            model, num_layers=LAYERS_IN_STAGES if visits <= LAYERS_IN_STAGES else LAYERS_IN_VISITS
        )
    shared = model.num_kv_heads % case.axes.tensor and case.axes.tensor % model.num_kv_heads
    return replace(model, num_kv_heads=KV_HEADS_OVER_3) if shared else model


def make_config(
    model: ModelConfig, case: PlanCase, settings: Mapping[str, Any] | None = None
) -> Config:
    """The config of test runs, with the case's settings and then `settings`."""
    config = Config(
        model=model,
        steps=8,
        data=DataConfig(
            seq_len=SEQ_LEN if model.reads == "text" else None, global_batch=GLOBAL_BATCH
        ),
        optimizer=OptimizerConfig(lr=0.01, warmup_steps=1, clip_norm=0.5, epsilon=ADAM_EPSILON),
    )
    return config.with_values(
        {"parallel.mesh": case.mesh, **dict(case.settings), **(settings or {})}
    )


def make_plan(config: Config) -> Plan:
    """The plan of a config with a mesh, on as many of the devices as it needs."""
    axes = AxisSizes.parse(config.parallel.mesh)
    plan = plan_for(config, axes, replace(discover(), num_devices=axes.num_devices))
    plan.validate(
        config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
    )
    return plan


def build(model: ModelConfig, case: PlanCase, settings: Mapping[str, Any] | None = None) -> Built:
    """Config, plan, program and batch of a case."""
    config = make_config(model, case, settings)
    plan = make_plan(config)
    program = build_program(config, plan, jax.devices()[: plan.num_devices])
    return Built(config, plan, program, batch_of_step(program, 1))


def compiled_step(built: Built) -> jax.stages.Compiled:
    """The compiled step, without LLVM's optimisation: that takes half of the time, and layouts are
    decided before it.
    """
    state = jax.eval_shape(built.program.init, jnp.int32(0))
    return built.program.train_step.lower(state, built.batch).compile(
        {"xla_backend_optimization_level": 0}
    )


def random_state(program: Program) -> TrainState:
    """A state before step 1 that is the same under every plan, and in which no bias is 0 and no
    scale is 1.

    A bias that is added once per device, or a scale used twice, would not be noticed in an initial
    state.
    """
    stored_minus_one = features_of(program.config.model).norm == "rms_plus_one"

    def leaf(path: Any, like: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.startswith("params/"):
            return np.zeros(like.shape, like.dtype)
        random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
        in_layers, slots = "/layers/" in name, np.array(program.shapes.slots)
        first = (
            program.config.model.vocab_size
            if name.endswith("/table")
            else program.config.model.num_layers
            if in_layers
            else like.shape[0]
        )
        shape = (first, *like.shape[1:])
        mean = 1 if name.endswith("/scale") and not stored_minus_one else 0
        # Quantised matrices are as large as others.
        std = 0.1 / 64 if name.endswith(("/scales", "/steps")) else 0.1
        if np.issubdtype(like.dtype, np.integer):
            values = random.integers(0, 256, shape).astype(np.uint8).view(like.dtype)
        else:
            values = (mean + std * random.standard_normal(shape)).astype(like.dtype)
        return fitted(values[np.maximum(slots, 0)] if in_layers else values, like.shape)

    state = jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(program.init, jnp.int32(0)))
    scale = np.float32(
        program.config.precision.loss_scale if program.plan.precision == "f16" else 1
    )
    state = replace(state, loss_scale=replace(state.loss_scale, scale=scale))
    return jax.device_put(state, program.state_shardings)


def in_order(program: Program, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Whole leaves by path, as `host_leaves` returns them, with the layers of stacked arrays in
    order.
    """
    places = [program.shapes.slots.index(layer) for layer in range(program.config.model.num_layers)]
    return {path: leaf[places] if "/layers/" in path else leaf for path, leaf in leaves.items()}


def batch_of_step(program: Program, step: int) -> Batch:
    """`host_batch`, or images or recordings, on the program's devices."""
    model = program.config.model
    rows = host_batch(step) if model.reads == "text" else host_inputs(model, step)
    return program.put_batch(rows)


@functools.cache
def host_inputs(model: ModelConfig, step: int) -> dict[str, np.ndarray]:
    """A global batch of random images or recordings, of which the first rows have no loss."""
    rows = synthetic_batch(
        vocab_size=model.vocab_size,
        rows=GLOBAL_BATCH,
        seq_len=model.max_length,
        seed=step,
        examples=np.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH,
        patch_values=model.patch_values,
        frames=model.frames,
    )
    counts = rows["loss_mask"].copy()
    counts[: GLOBAL_BATCH // 8] = False
    if model.labels:
        random = np.random.default_rng(step)
        labels = random.integers(0, len(model.labels), (GLOBAL_BATCH, 1), dtype=np.int32)
        rows["targets"] = np.where(rows["loss_mask"], labels, rows["targets"])
    return rows | {"loss_mask": counts}


@functools.cache
def host_batch(step: int) -> dict[str, np.ndarray]:
    """A global batch of random tokens in packed documents, some of whose tokens have no loss.

    The share of tokens that count differs between rows, and is zero for the first rows: a mean over
    each device's own tokens would differ from the mean over all, and a device may have no counted
    token.
    """
    random = np.random.Generator(np.random.PCG64([step, 7]))
    rows, length = GLOBAL_BATCH, SEQ_LEN
    tokens = random.integers(0, VOCAB_SIZE, (rows, length + 1), dtype=np.int32)
    begins = random.random((rows, length)) < 0.15
    begins[:, 0] = False
    index = np.arange(length, dtype=np.int32)
    ends = np.concatenate([begins[:, 1:], np.zeros((rows, 1), bool)], axis=1)
    share = np.linspace(0, 1, rows)[:, None]
    share[: rows // 8] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": index - np.maximum.accumulate(np.where(begins, index, 0), axis=1),
        "segments": np.cumsum(begins, axis=1, dtype=np.int32),
        "loss_mask": (random.random((rows, length)) < share) & ~ends,
        "examples": np.arange(rows, dtype=np.int32) + step * rows,
    }
