"""Closed forms of parameter sizes against the abstract parameters of the traced model, leaf by
leaf.
"""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import PlanError
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.rules import check_rules, make_rules
from optimus_jax.mesh.sharding import layouts_of
from optimus_jax.pipeline.partition import layers_per_stage
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.cost.parameters import params_on_device
from optimus_jax.training.state import planned_shapes


def plan_of(
    model: ModelConfig,
    axes: AxisSizes,
    *,
    rules: tuple[str, ...] = (),
    stages: tuple[int, ...] = (),
    repeats: int = 1,
) -> Plan:
    pipeline = None
    if axes.pipe > 1:
        pipeline = Pipelining(
            schedule="interleaved" if repeats > 1 else "1f1b",
            repeats=repeats,
            send_slack=False,
            keep_residuals=True,
            layers_per_stage=stages or layers_per_stage(model.num_layers, axes.pipe * repeats),
        )
    return Plan(
        axes=axes,
        rules=make_rules(model, rules),
        zero=0,
        microbatches=1,
        pipeline=pipeline,
        remat="none",
        precision="bf16",
        attention="xla",
        loss_chunk_tokens=256,
    )


def traced(model: ModelConfig, plan: Plan, *, split: bool) -> tuple[int, int]:
    """Elements on a device of the whole stack, empty slots included, and of everything else."""
    shapes = planned_shapes(model, plan)

    def elements(shape, layout) -> int:
        return shape.size // math.prod(
            plan.axes[axis] for axes in layout.axes(split=split) for axis in axes
        )

    layouts = layouts_of(shapes.leaves, plan.active_rules(model), 3)
    parts = {
        name: sum(jax.tree.leaves(jax.tree.map(elements, part, layouts[name])))
        for name, part in shapes.params.items()
    }
    return parts.pop(LAYERS), sum(parts.values())


def assert_equal(model: ModelConfig, plan: Plan) -> None:
    sizes = params_on_device(model, plan.rules, plan.axes)
    slots = len(plan.slots(model)) // plan.axes.pipe
    assert (slots * sizes.layer_whole, sizes.outer_whole) == traced(model, plan, split=False)
    assert (slots * sizes.layer_split, sizes.outer_split) == traced(model, plan, split=True)


@pytest.mark.parametrize(
    ("name", "axes", "settings"),
    [
        ("gpt2-xl", {}, {}),
        ("gpt2", {"fsdp": 8}, {}),
        ("gpt2", {"fsdp": 3, "data": 2}, {}),
        ("llama3-8b", {"fsdp": 4, "tensor": 8}, {}),
        ("llama3-8b", {"tensor": 16, "fsdp": 2}, {}),
        ("llama-nano", {"tensor": 8}, {}),
        ("llama3.2-1b", {"pipe": 3, "tensor": 2, "fsdp": 2}, {}),
        ("gpt2", {"pipe": 4}, {"stages": (4, 4, 3, 1)}),
        ("gpt2", {"pipe": 2, "fsdp": 2}, {"stages": (1, 5, 4, 2), "repeats": 2}),
        ("gpt2-xl", {"tensor": 2, "fsdp": 2}, {"rules": ("heads=none",)}),
        ("llama3-8b", {"tensor": 4, "fsdp": 2}, {"rules": ("mlp=none", "vocab=none")}),
        ("llama3.3-70b", {"pipe": 7, "tensor": 8, "fsdp": 32}, {}),
    ],
)
def test_closed_form_sizes_equal_the_traced_parameters(name, axes, settings):
    model = model_preset(name)
    assert_equal(model, plan_of(model, AxisSizes(**axes), **settings))


@given(st.data())
def test_closed_form_sizes_hold_for_any_model_and_mesh(data):
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    heads = pick(4, 6, 8)
    model = ModelConfig(
        family=pick("gpt2", "llama"),
        vocab_size=pick(257, 5000, 50257),
        num_layers=pick(2, 3, 5),
        embed_dim=pick(48, 96),
        num_heads=heads,
        num_kv_heads=pick(1, 2, heads),
        head_dim=pick(8, 16),
        mlp_dim=pick(96, 192),
        max_length=pick(16, 48),
        tied=pick(True, False),
    )
    axes = AxisSizes(pipe=pick(1, 2), data=pick(1, 2), fsdp=pick(1, 2, 3, 4), tensor=pick(1, 2, 4))
    plan = plan_of(model, axes)
    try:
        check_rules(plan.rules, axes, model)
    except PlanError:
        return
    assert_equal(model, plan)
