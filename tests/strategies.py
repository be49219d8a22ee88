"""Hypothesis strategies for layouts: models, meshes and plans, legal and not."""

from dataclasses import replace

from hypothesis import strategies as st

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import AxisSizes
from optimus_jax.mesh.rules import make_rules
from optimus_jax.plan import Plan

SIZES = st.sampled_from((1, 2, 3, 4, 6, 8))
RULES_TO_TAKE_AWAY = ("heads=none", "kv_heads=none", "mlp=none", "vocab=none", "embed=none", "batch=data", "heads=tensor")


def axis_sizes() -> st.SearchStrategy[AxisSizes]:
    """Meshes without pipeline stages."""
    return st.builds(AxisSizes, data=SIZES, fsdp=SIZES, tensor=SIZES)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Small decoders, many of whose dimensions divide by many meshes."""
    family = draw(st.sampled_from(("gpt2", "llama")))
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    return ModelConfig(
        name="drawn", family=family, vocab_size=draw(st.integers(2, 6000)), num_layers=draw(st.integers(1, 4)),
        embed_dim=draw(st.sampled_from((20, 24, 48, 64))), num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3, 4))), head_dim=4, mlp_dim=draw(st.sampled_from((24, 36, 48))),
        max_length=16, tied=draw(st.booleans()))


@st.composite
def plans(draw: st.DrawFn, model: ModelConfig) -> Plan:
    """Plans of which about half are legal for `model` and a global batch of 48."""
    overrides = draw(st.lists(st.sampled_from(RULES_TO_TAKE_AWAY), max_size=2, unique_by=lambda rule: rule.partition("=")[0]))
    axes = draw(axis_sizes())
    plan = Plan(
        axes=axes, rules=make_rules(model, overrides), zero=draw(st.integers(0, 3)), microbatches=draw(st.sampled_from((1, 2, 3))),
        schedule="none", remat=draw(st.sampled_from(("none", "selective", "dots", "full"))),
        precision=draw(st.sampled_from(("f32", "bf16", "f16"))), attention="xla", loss_chunk_tokens=draw(st.integers(1, 4096)))
    return plan if axes.fsdp > 1 or draw(st.booleans()) else replace(plan, zero=0)
