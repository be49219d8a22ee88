"""What a step puts on the wire, counted in the compiled program: how often, how much, along which
axis.

Every collective is a line of our code and the planner's costs rest on these counts, so they are
exact. Programs here have no dropout, which sends nothing.
"""

import functools
import math
from collections import Counter
from dataclasses import replace

import hlo
import jax
import jax.numpy as jnp
import plans
import pytest
from hlo import Moved

NUM_LAYERS = 3
ONE_CHUNK = plans.GLOBAL_BATCH * plans.SEQ_LEN
"""Tokens of a single chunk: with no loop over chunks, only the loop over layers has three trips."""
F32 = 4
"""Bytes."""
REMAT_POLICIES = ("none", "selective", "dots", "full")
ALL_AXES = "data=2,fsdp=2,tensor=2"


@functools.cache
def compiled(model_name: str, case: plans.PlanCase) -> tuple[plans.Built, str]:
    """A case and the text of its compiled step."""
    model = replace(plans.model_for(case, model_name), dropout=0.0, num_layers=NUM_LAYERS)
    built = plans.build(model, case)
    return built, plans.compiled_step(built).as_text() or ""


def moved_by(
    model_name: str,
    case: plans.PlanCase,
    kind: str | None = None,
    axes: tuple[str, ...] | None = None,
) -> list[Moved]:
    built, text = compiled(model_name, case)
    everything = hlo.collectives(text, built.program.mesh)
    assert everything
    return [
        moved for moved in everything if kind in (None, moved.kind) and axes in (None, moved.axes)
    ]


def in_layers(moved: Moved) -> bool:
    """Whether it happens in the loop over layers: no other loop here has as many trips."""
    return NUM_LAYERS in moved.loops


def is_backward(moved: Moved) -> bool:
    return "transpose(" in moved.source


def leaf_shapes(
    model_name: str, case: plans.PlanCase, *, split_by: tuple[str, ...], matrices: bool
) -> Counter:
    """Shapes of one layer's leaves (without their first dimension) and of the others, split over
    some axes only.
    """
    built, _ = compiled(model_name, case)
    rules = built.plan.active_rules(built.config.model)
    leaves = jax.tree.leaves(built.program.shapes.leaves)
    shapes = Counter()
    for row, leaf in zip(leaves, jax.tree.leaves(built.program.shapes.params), strict=True):
        dims = row.dims
        stored_along = "vocab" if "vocab" in dims else "embed"
        axes = [
            (
                *(axis for axis in rules.get(dim, ()) if axis != "fsdp"),
                *(("fsdp",) if dim == stored_along else ()),
            )
            for dim in dims
        ]
        ways = [
            math.prod(built.plan.axes[axis] for axis in entry if axis in split_by) for entry in axes
        ]
        shape = tuple(size // way for size, way in zip(leaf.shape, ways, strict=True))
        if ("embed" in dims) == matrices:
            shapes[(dims[0] == "layers", shape[1:] if dims[0] == "layers" else shape)] += 1
    return shapes


def shapes_of(moved: list[Moved]) -> Counter:
    """Shapes of collectives, in the loop over layers or not, to compare with `leaf_shapes`."""
    return Counter((in_layers(item), item.shape) for item in moved)


def stacked(shapes: Counter) -> Counter:
    """Shapes of whole stacks, as they are outside the loop over layers."""
    return Counter(
        {
            (False, (NUM_LAYERS, *shape) if in_layer else shape): count
            for (in_layer, shape), count in shapes.items()
        }
    )


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_tensor_two_all_reduces_forward_and_two_backward_per_layer(remat):
    case = plans.case(ALL_AXES, zero=3, microbatches=2, remat=remat)
    built, _ = compiled("gpt", case)
    rows = plans.GLOBAL_BATCH // built.plan.batch_ways() // built.plan.microbatches
    activations = [
        moved for moved in moved_by("gpt", case, "all-reduce", ("tensor",)) if in_layers(moved)
    ]
    assert {(moved.shape, moved.dtype) for moved in activations} == {
        ((rows, plans.SEQ_LEN, built.config.model.embed_dim), "f32")
    }
    # Recomputing a layer as a whole repeats the sum that its middle needs, not the one at its end.
    again = remat in ("dots", "full")
    assert Counter(map(is_backward, activations)) == {False: 2, True: 3 if again else 2}
    assert {moved.loops for moved in activations} == {(2, NUM_LAYERS)}


@pytest.mark.parametrize(
    ("rule", "per_layer"), [("mlp=none", 1), ("heads=none", 1), ("vocab=none", 2)]
)
def test_tensor_collectives_only_where_the_rules_split(rule, per_layer):
    case = plans.case("tensor=8", rules=(rule,), loss_chunk_tokens=ONE_CHUNK)
    everything = moved_by("gpt", case)
    layers = [moved for moved in everything if in_layers(moved)]
    assert Counter(map(is_backward, layers)) == {False: per_layer, True: per_layer}
    others = [moved for moved in everything if not in_layers(moved) and moved.shape]
    assert bool(others) == (rule != "vocab=none"), (
        "outside the layers only the vocabulary is summed over"
    )


def test_tensor_sums_the_gradient_of_shared_key_value_heads_once_per_step():
    case = plans.case("tensor=8", microbatches=2, loss_chunk_tokens=ONE_CHUNK)
    built, _ = compiled("llama", case)
    model = built.config.model
    assert model.num_kv_heads < built.plan.axes.tensor
    key_value = (NUM_LAYERS, model.embed_dim, 2, model.num_kv_heads, model.head_dim)
    everything = moved_by("llama", case)
    assert [moved.loops for moved in everything if moved.shape == key_value] == [()]
    assert not [
        moved
        for moved in everything
        if model.num_kv_heads in moved.shape[1:] and moved.shape != key_value
    ]


@pytest.mark.parametrize("rules", [(), ("mlp=none",)], ids=str)
def test_tensor_sums_the_branches_of_a_parallel_block_together(rules):
    case = plans.case("tensor=2", rules=rules, loss_chunk_tokens=ONE_CHUNK)
    layers = [moved for moved in moved_by("gptj", case) if in_layers(moved)]
    assert Counter(map(is_backward, layers)) == {False: 1, True: 1}


def test_tensor_sums_the_gradient_of_norms_of_heads_once_per_step():
    """All heads share their scales, so devices along tensor have parts of their gradients."""
    case = plans.case("data=2,tensor=2", microbatches=2)
    head_dim = plans.FAMILY_MODELS["qwen3"].head_dim
    sums = [
        moved
        for moved in moved_by("qwen3", case, "all-reduce")
        if moved.shape in ((head_dim,), (NUM_LAYERS, head_dim))
    ]
    assert [(moved.axes, moved.loops) for moved in sums] == [(("data", "tensor"), ())] * 2


def test_tensor_sends_no_logits():
    case = plans.case(ALL_AXES, zero=3, microbatches=2)
    built, _ = compiled("gpt", case)
    rows = built.plan.padded_vocab(built.config.model)
    tables = {
        shape
        for split_by in (("tensor",), ("fsdp", "tensor"))
        for _, shape in leaf_shapes("gpt", case, split_by=split_by, matrices=True)
    }
    with_vocabulary = {
        moved.shape for moved in moved_by("gpt", case) if {rows, rows // 2} & set(moved.shape)
    }
    assert with_vocabulary <= tables

    tokens = (
        plans.GLOBAL_BATCH * plans.SEQ_LEN // built.plan.batch_ways() // built.plan.microbatches
    )
    loss = [
        moved.shape
        for moved in moved_by("gpt", case, "all-reduce", ("tensor",))
        if tokens in moved.shape
    ]
    assert sorted(loss) == sorted([(tokens,), (2, tokens)])


@pytest.mark.parametrize(
    "case",
    [plans.case("data=8", microbatches=2), plans.case("fsdp=8", zero=0, microbatches=2)],
    ids=str,
)
def test_whole_gradients_are_summed_once_per_step(case):
    everything = moved_by("gpt", case)
    built, _ = compiled("gpt", case)
    assert {moved.kind for moved in everything} == {"all-reduce"}
    assert {moved.loops for moved in everything} == {()}, (
        "inside the loop over microbatches it would be once for each"
    )
    gradients = [moved for moved in everything if moved.shape]
    expected = leaf_shapes("gpt", case, split_by=(), matrices=True) + leaf_shapes(
        "gpt", case, split_by=(), matrices=False
    )
    assert shapes_of(gradients) == stacked(expected)
    size = sum(leaf.size for leaf in jax.tree.leaves(built.program.shapes.params))
    assert sum(moved.num_bytes for moved in gradients) == size * F32
    assert Counter(moved.dtype for moved in everything if not moved.shape) == {
        "s32": 1,
        "f32": 1,
    }, "tokens and loss"


@pytest.mark.parametrize("model_name", ["gpt", "llama"])
def test_zero_1_scatters_and_gathers_every_matrix_once_per_step(model_name):
    case = plans.case("fsdp=8", zero=1, microbatches=2)
    everything = moved_by(model_name, case)
    assert {moved.loops for moved in everything} == {()}
    whole = stacked(leaf_shapes(model_name, case, split_by=(), matrices=True))
    shards = stacked(leaf_shapes(model_name, case, split_by=("fsdp",), matrices=True))
    assert shapes_of([moved for moved in everything if moved.kind == "reduce-scatter"]) == shards
    assert shapes_of([moved for moved in everything if moved.kind == "all-gather"]) == whole
    vectors = stacked(leaf_shapes(model_name, case, split_by=(), matrices=False))
    assert (
        shapes_of([moved for moved in everything if moved.kind == "all-reduce" and moved.shape])
        == vectors
    )


def test_zero_2_scatters_layer_by_layer_in_backward():
    case = plans.case("fsdp=8", zero=2, microbatches=2)
    shards = leaf_shapes("gpt", case, split_by=("fsdp",), matrices=True)
    scattered = moved_by("gpt", case, "reduce-scatter")
    assert shapes_of(scattered) == shards
    assert {moved.loops for moved in scattered if in_layers(moved)} == {(2, NUM_LAYERS)}
    assert {moved.loops for moved in scattered if not in_layers(moved)} == {(2,)}
    gathered = moved_by("gpt", case, "all-gather")
    assert shapes_of(gathered) == stacked(leaf_shapes("gpt", case, split_by=(), matrices=True))
    assert {moved.loops for moved in gathered} == {()}


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_zero_3_gathers_twice_and_scatters_once_per_layer(remat):
    case = plans.case(ALL_AXES, zero=3, microbatches=2, remat=remat)
    whole = leaf_shapes("gpt", case, split_by=("tensor",), matrices=True)
    shards = leaf_shapes("gpt", case, split_by=("tensor", "fsdp"), matrices=True)
    gathered, scattered = (
        moved_by("gpt", case, kind, ("fsdp",)) for kind in ("all-gather", "reduce-scatter")
    )
    assert len(gathered) == len(moved_by("gpt", case, "all-gather"))
    assert len(scattered) == len(moved_by("gpt", case, "reduce-scatter"))
    # The layers' matrices again in backward; embedding, head and positions are gathered once.
    assert shapes_of(gathered) == Counter(
        {key: count * (2 if key[0] else 1) for key, count in whole.items()}
    )
    assert shapes_of(scattered) == shards
    assert {moved.loops for moved in gathered + scattered if in_layers(moved)} == {(2, NUM_LAYERS)}


def test_hybrid_sums_shards_over_data_once_per_step():
    case = plans.case(ALL_AXES, zero=3, microbatches=2)
    over_data = moved_by("gpt", case, "all-reduce", ("data",))
    assert shapes_of(over_data) == stacked(
        leaf_shapes("gpt", case, split_by=("tensor", "fsdp"), matrices=True)
    )
    over_both = [
        moved for moved in moved_by("gpt", case, "all-reduce", ("data", "fsdp")) if moved.shape
    ]
    assert shapes_of(over_both) == stacked(
        leaf_shapes("gpt", case, split_by=("tensor", "fsdp"), matrices=False)
    )
    assert {moved.loops for moved in over_data + over_both} == {()}


def test_program_size_does_not_depend_on_depth():
    case = plans.case(ALL_AXES, zero=3, microbatches=2)
    sizes = {}
    for num_layers in (NUM_LAYERS, 4 * NUM_LAYERS):
        built = plans.build(replace(plans.GPT, num_layers=num_layers), case)
        state = jax.eval_shape(built.program.init, jnp.int32(0))
        traced = built.program.train_step.trace(state, built.batch)
        equations, instructions = (
            str(traced.jaxpr).count(" = "),
            traced.lower().as_text("hlo").count(" = "),
        )
        sizes[num_layers] = (equations, instructions)
    assert sizes[NUM_LAYERS] == sizes[4 * NUM_LAYERS]
    assert min(sizes[NUM_LAYERS]) > 100
