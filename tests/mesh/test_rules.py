"""Rules map logical axes onto mesh axes without ever using one twice, and refuse what cannot be
split.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from strategies import axis_sizes, models, plans

from optimus_jax.config import ModelConfig, OptimizerConfig
from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import PlanError
from optimus_jax.mesh.axes import LOGICAL_AXES
from optimus_jax.mesh.rules import (
    active_rules,
    check_lengths,
    check_rules,
    make_rules,
    padded_vocab,
)
from optimus_jax.mesh.sharding import batch_spec
from optimus_jax.plan import Plan
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.training.optimizer import make_optimizer
from optimus_jax.training.state import planned_shapes, state_specs

MODEL = ModelConfig(
    name="m",
    family="llama",
    num_heads=24,
    num_kv_heads=2,
    head_dim=4,
    embed_dim=48,
    mlp_dim=96,
    num_layers=3,
)


def is_legal(plan: Plan, model: ModelConfig) -> bool:
    try:
        plan.validate(model, global_batch=144)
    except PlanError:
        return False
    return True


@given(data=st.data())
def test_leaves_of_legal_plans_have_equal_shards_and_distinct_axes(data):
    model = data.draw(models())
    plan = data.draw(plans(model).filter(lambda plan: is_legal(plan, model)))
    shapes = planned_shapes(model, plan)
    specs = state_specs(shapes, make_optimizer(OptimizerConfig(), shapes.leaves), plan)
    mesh = AbstractMesh(tuple(plan.axes[axis] for axis in MESH_AXES), MESH_AXES)
    leaves = named_leaves({"params": shapes.params, "mu": shapes.params, "nu": shapes.params})
    adam: Any = specs.opt_state
    found = named_leaves({"params": specs.params, "mu": adam[0].mu, "nu": adam[0].nu})
    assert found.keys() == leaves.keys()
    for path, leaf in leaves.items():
        axes = [axis for entry in found[path] for axis in axes_of(entry)]
        assert len(axes) == len(set(axes)), path
        ways = [math.prod(plan.axes[axis] for axis in axes_of(entry)) for entry in found[path]]
        shard = NamedSharding(mesh, found[path]).shard_shape(leaf.shape)
        assert tuple(size * way for size, way in zip(shard, ways, strict=True)) == leaf.shape, path
        over_fsdp = plan.axes.fsdp > 1 and "embed" in names_of(shapes, path)
        assert ("fsdp" in axes) == (over_fsdp and plan.zero >= 1), path
        assert ("pipe" in axes) == (
            plan.axes.pipe > 1 and not {"layers", "vocab"}.isdisjoint(names_of(shapes, path))
        ), path
        if "layers" in names_of(shapes, path):
            assert leaf.shape[0] == len(shapes.slots) == slots_of(plan, model), path
    assert sorted(layer for layer in shapes.slots if layer >= 0) == list(range(model.num_layers))
    rows = [axis for entry in batch_spec(plan.active_rules(model)) for axis in axes_of(entry)]
    assert (
        math.prod(plan.axes[axis] for axis in rows)
        == plan.axes.data * plan.axes.fsdp
        == plan.batch_ways()
    )


def slots_of(plan: Plan, model: ModelConfig) -> int:
    """Rows of the stack: every virtual stage has room for the longest."""
    pieces = plan.pipeline.layers_per_stage if plan.pipeline else (model.num_layers,)
    return len(pieces) * max(pieces)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def names_of(shapes, path: str) -> tuple[str, ...]:
    leaf = shapes.leaves
    for key in path.split("/")[1:]:
        leaf = leaf[key]
    return leaf.dims


@given(model=models(), axes=axis_sizes())
def test_active_rules_drop_axes_of_one_device(model, axes):
    active = active_rules(make_rules(model), axes, model)
    assert all(axes[axis] > 1 for entry in active.values() for axis in entry)
    assert set(active) <= set(LOGICAL_AXES)
    assert ("heads" in active) == (axes.tensor > 1)
    assert ("kv_heads" in active) == (axes.tensor > 1 and model.num_kv_heads % axes.tensor == 0)


@given(vocab_size=st.integers(1, 300_000), axes=axis_sizes())
def test_vocabulary_is_padded_to_whole_shards_and_little_more(vocab_size, axes):
    rows = padded_vocab(vocab_size, make_rules(MODEL), axes)
    unit = math.lcm(128 if vocab_size >= 4096 else 8, axes.pipe * axes.tensor * axes.fsdp)
    assert rows % unit == 0
    assert 0 <= rows - vocab_size < unit


def test_padding_does_not_depend_on_the_mesh_for_usual_sizes():
    meshes = (
        [AxisSizes(tensor=n) for n in (1, 2, 4, 8)]
        + [AxisSizes(fsdp=n) for n in (2, 8)]
        + [AxisSizes(pipe=8), AxisSizes(pipe=2, tensor=4)]
    )
    for vocab_size in (257, 50257, 32000, 128256):
        assert len({padded_vocab(vocab_size, make_rules(MODEL), axes) for axes in meshes}) == 1


def test_unsplit_heads_keep_key_value_heads_unsplit():
    assert "kv_heads" in dict(make_rules(MODEL))
    assert "kv_heads" not in dict(make_rules(MODEL, ["heads=none"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mpl=none"], r"unknown logical axis 'mpl'(.|\n)*did you mean 'mlp'"),
        (["mlp=tensr"], r"unknown mesh axis 'tensr'(.|\n)*did you mean 'tensor'"),
        (["mlp"], r"unknown mesh axis ''(.|\n)*choose one of: pipe, data, fsdp, tensor, none"),
        (["mlp=none", "mlp=tensor"], r"two rules for logical axis 'mlp'(.|\n)*mlp=none,mlp=tensor"),
        (["mlp=fsdp"], r"'mlp' cannot be split over 'fsdp'(.|\n)*choose mlp=tensor or none"),
        (["norm=tensor"], r"no rule is for logical axis 'norm'(.|\n)*name one of: batch, length"),
        (["generator_heads=none"], r"no rule is for logical axis 'generator_heads'"),
    ],
)
def test_invalid_rules_are_refused(overrides, message):
    with pytest.raises(PlanError, match=message):
        make_rules(MODEL, overrides)


@pytest.mark.parametrize(
    ("axes", "model", "overrides", "message"),
    [
        (
            AxisSizes(tensor=5),
            MODEL,
            [],
            (
                r"'heads' of m (.|\n)*num_heads=24 over tensor=5(.|\n)*choose tensor so that it"
                r" divides 24, or a rule that keeps 'heads' whole"
            ),
        ),
        (
            AxisSizes(tensor=8),
            replace(MODEL, mlp_dim=100),
            [],
            r"'mlp' of m (.|\n)*mlp_dim=100 over tensor=8(.|\n)*divides 100",
        ),
        (
            AxisSizes(fsdp=5),
            MODEL,
            [],
            r"'embed' of m (.|\n)*embed_dim=48 over fsdp=5(.|\n)*choose fsdp so that it divides 48",
        ),
        (
            AxisSizes(pipe=2),
            MODEL,
            ["layers=none"],
            r"2 devices along mesh axis 'pipe' would(.|\n)*use pipe=1(.|\n)*'layers'",
        ),
        (
            AxisSizes(pipe=2, tensor=2),
            MODEL,
            ["vocab=tensor"],
            r"2 devices along mesh axis 'pipe' would(.|\n)*use pipe=1(.|\n)*'vocab'",
        ),
        (
            AxisSizes(tensor=3),
            MODEL,
            [],
            (
                r"'kv_heads' of m (.|\n)*num_kv_heads=2 over tensor=3(.|\n)*choose tensor so that"
                r" it divides 2 or is a multiple of it"
            ),
        ),
        (
            AxisSizes(data=2),
            MODEL,
            ["batch=none"],
            r"2 devices along mesh axis 'data' would all do the same work",
        ),
        (
            AxisSizes(fsdp=4),
            MODEL,
            ["batch=data"],
            r"4 devices along mesh axis 'fsdp' would(.|\n)*use fsdp=1(.|\n)*'batch'",
        ),
        (
            AxisSizes(tensor=2),
            MODEL,
            ["heads=none", "mlp=none", "vocab=none"],
            r"2 devices along mesh axis 'tensor' would",
        ),
    ],
)
def test_impossible_splits_are_refused(axes, model, overrides, message):
    with pytest.raises(PlanError, match=message):
        check_rules(make_rules(model, overrides), axes, model)


@pytest.mark.parametrize("tensor", [1, 2, 4, 6, 8, 12, 24])
def test_key_value_heads_are_split_or_shared(tensor):
    rules = make_rules(MODEL)
    check_rules(rules, AxisSizes(tensor=tensor), MODEL)
    assert ("kv_heads" in active_rules(rules, AxisSizes(tensor=tensor), MODEL)) == (tensor == 2)


def test_rules_are_checked_without_the_devices():
    """Rules are checked for clusters that are not there."""
    check_rules(make_rules(MODEL), AxisSizes(data=512, fsdp=16, tensor=8), MODEL)
    assert len(jax.devices()) < 512


def test_tokens_are_split_only_where_lengths_and_blocks_allow_it():
    axes = AxisSizes(tensor=4)
    rules = make_rules(MODEL, ["length=tensor"])
    check_lengths(rules, axes, (64, 128), MODEL)
    with pytest.raises(PlanError, match="sequence_parallel=false"):
        check_lengths(rules, axes, (64, 66), MODEL)
    with pytest.raises(PlanError, match="'mlp' whole"):
        check_rules(make_rules(MODEL, ["length=tensor", "mlp=none"]), axes, MODEL)
    assert "length" not in dict(make_rules(MODEL)), "only on request"


@pytest.mark.parametrize(
    ("model", "tensor", "length", "advice"),
    [
        ("gpt2-nano", 4, 66, "choose a length that 4 divides, or keep the stream whole"),
        ("vit-base-patch16-224", 4, 197, "keep the stream whole"),
        ("whisper-small", 8, 1948, "choose tensor=4, or keep the stream whole"),
        ("whisper-small", 4, 1946, "choose a length that 4 divides, or keep the stream whole"),
    ],
)
def test_advice_on_lengths_is_possible(model, tensor, length, advice):
    """An image has one length, and a recording's frames have one too."""
    rules = make_rules(model_preset(model), ["length=tensor"])
    with pytest.raises(PlanError) as raised:
        check_lengths(rules, AxisSizes(tensor=tensor), (length,), model_preset(model))
    assert f"do:    {advice}: --set parallel.sequence_parallel=false" in str(raised.value)
