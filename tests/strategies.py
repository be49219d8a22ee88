"""Hypothesis strategies for models, meshes and plans, legal and illegal."""

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.mesh.rules import make_rules
from optimus_jax.pipeline.partition import layers_per_stage
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.plan import Pipelining, Plan

SIZES = st.sampled_from((1, 2, 1, 3, 2, 4, 6, 8))
STAGES = st.sampled_from((2, 1, 4, 3))
RULES_TO_TAKE_AWAY = (
    "heads=none",
    "kv_heads=none",
    "mlp=none",
    "vocab=none",
    "embed=none",
    "batch=data",
    "heads=tensor",
    "vocab=pipe",
)


def axis_sizes() -> st.SearchStrategy[AxisSizes]:
    """Meshes with and without pipeline stages."""
    return st.builds(AxisSizes, pipe=STAGES, data=SIZES, fsdp=SIZES, tensor=SIZES)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Small decoders, many of whose dimensions divide by many meshes."""
    family = draw(st.sampled_from(("gpt2", "llama")))
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    return ModelConfig(
        name="drawn",
        family=family,
        vocab_size=draw(st.integers(2, 6000)),
        num_layers=draw(st.sampled_from((3, 1, 2, 4, 5, 8, 12))),
        embed_dim=draw(st.sampled_from((20, 24, 48, 64))),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3, 4))),
        head_dim=4,
        mlp_dim=draw(st.sampled_from((24, 36, 48))),
        max_length=16,
        tied=draw(st.booleans()),
    )


@st.composite
def pipelines(
    draw: st.DrawFn, num_layers: int, num_stages: int, num_microbatches: int
) -> Pipelining:
    """Pipelines with equal or unequal stages; with a named schedule or a table of their own."""
    schedule = draw(st.sampled_from(("interleaved", "1f1b", "gpipe")))
    takes_repeats = schedule == "interleaved" and num_microbatches % num_stages == 0
    repeats = draw(st.sampled_from(range(num_layers // num_stages, 0, -1))) if takes_repeats else 1
    pieces = num_stages * repeats
    borders = st.sets(st.integers(1, num_layers - 1), min_size=pieces - 1, max_size=pieces - 1).map(
        sorted
    )
    uneven = borders.map(
        lambda ends: tuple(end - start for start, end in itertools.pairwise((0, *ends, num_layers)))
    )
    table = make_schedule(
        schedule, num_stages, num_microbatches, repeats, draw(st.sampled_from((1, 2)))
    ).to_json()
    own_table = draw(st.integers(0, 3)) == 0
    return Pipelining(
        schedule=schedule,
        repeats=repeats,
        layers_per_stage=draw(st.one_of(st.just(layers_per_stage(num_layers, pieces)), uneven)),
        send_slack=not own_table and draw(st.booleans()),
        keep_residuals=draw(st.booleans()),
        table=table if own_table else None,
    )


@st.composite
def plans(draw: st.DrawFn, model: ModelConfig) -> Plan:
    """Plans, at least a third of which are legal for `model` and a global batch of 144."""
    overrides = draw(
        st.lists(
            st.sampled_from(RULES_TO_TAKE_AWAY),
            max_size=2,
            unique_by=lambda rule: rule.partition("=")[0],
        )
    )
    axes = draw(axis_sizes())
    axes = replace(axes, pipe=min(axes.pipe, model.num_layers))
    microbatches = draw(st.sampled_from((1, 2, 3, 4))) * draw(st.sampled_from((axes.pipe, 1)))
    plan = Plan(
        axes=axes,
        rules=make_rules(model, overrides),
        zero=draw(st.integers(0, 3)),
        microbatches=microbatches,
        pipeline=draw(pipelines(model.num_layers, axes.pipe, microbatches))
        if axes.pipe > 1
        else None,
        remat=draw(st.sampled_from(("none", "selective", "dots", "full"))),
        precision=draw(st.sampled_from(("f32", "bf16", "f16"))),
        attention="xla",
        loss_chunk_tokens=draw(st.integers(1, 4096)),
    )
    return plan if axes.fsdp > 1 or draw(st.booleans()) else replace(plan, zero=0)
