"""Windows: keys that a window hides are not read, and the result is that of a mask over all."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, MATMUL_RELATIVE, relative_error
from plans import FAMILY_MODELS
from test_attention import arrays, assert_same, plain

from optimus_jax.models import blockwise_attention
from optimus_jax.models.families import has_window
from optimus_jax.models.flops import layer_flops
from optimus_jax.models.fused_attention import causal_pairs
from optimus_jax.models.kernels import Visibility, attend
from optimus_jax.models.layer_program import (
    core_products,
    layer_programs,
    scores,
    whole_sizes,
)
from optimus_jax.models.program_reader import ProgramReader

LAYERS_DIFFER = (None, True, False)
"""Whether the window applies: known to be so, or a value in the program."""


def visible(window, is_windowed=None, segments=None):
    value = None if is_windowed is None else jnp.bool(is_windowed)
    return Visibility(segments, window=window, is_windowed=value)


def gradients(attention, inputs):
    """The result, and gradients of a weighted sum of it."""
    weight = jnp.asarray(np.random.default_rng(9).standard_normal(inputs[0].shape), jnp.float32)

    def loss(*x):
        out = attention(*x)
        return (out.astype(jnp.float32) * weight).sum(), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def products(attention, inputs, share=None):
    """FLOPs of the products of forward and backward."""
    traced = jax.make_jaxpr(gradients(attention, inputs))(*inputs).jaxpr
    part = ProgramReader(share=share).part(traced)
    return sum(product.flops(()) for product in part.products)


@pytest.mark.parametrize("is_windowed", LAYERS_DIFFER)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("length", "window", "min_block", "how"),
    [
        pytest.param(48, 1, 8, {}, marks=pytest.mark.nightly),
        (48, 9, 8, {"softcap": 1.5}),
        pytest.param(48, 17, 4, {"scale": 0.3}, marks=pytest.mark.nightly),
        (40, 13, 3, {}),
        pytest.param(24, 23, 3, {}, marks=pytest.mark.nightly),
        (13, 5, 4, {}),  # one block
    ],
)
def test_blocks_with_a_window_equal_a_mask(
    length, window, min_block, how, documents, is_windowed, monkeypatch
):
    monkeypatch.setattr(blockwise_attention, "MIN_BLOCK", min_block)
    segments = jnp.asarray(np.arange(length)[None, :] // 20 + [[0], [7]]) if documents else None
    applies = window if is_windowed in (None, True) else None
    assert_same(
        functools.partial(
            attend, visibility=visible(window, is_windowed, segments), kernel="xla", **how
        ),
        functools.partial(plain, segments=segments, window=applies, **how),
        arrays(length),
    )


@pytest.mark.parametrize("is_windowed", [True, False])
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.nightly)]
)
def test_a_branch_equals_the_program_that_it_takes(dtype, is_windowed, monkeypatch):
    """With dropout, and with keys and values that are rounded in the core."""
    monkeypatch.setattr(blockwise_attention, "MIN_BLOCK", 4)
    q, k, v = arrays(32)
    inputs = q.astype(dtype), k, v
    keys = jax.random.split(jax.random.key(0), (2, 4))

    def run(visibility):
        ours = functools.partial(
            attend, visibility=visibility, kernel="xla", dropout=0.5, keys_BH=keys
        )
        return gradients(jax.checkpoint(ours), inputs)(*inputs)

    either, alone = run(visible(7, is_windowed)), run(visible(7 if is_windowed else None))
    other = run(visible(None if is_windowed else 7))
    tolerance = {**MATMUL_RELATIVE, "float32": F32_RELATIVE}[jnp.dtype(dtype).name]
    for leaves in zip(*map(jax.tree.leaves, (either, alone, other)), strict=True):
        assert len({leaf.dtype for leaf in leaves}) == 1
        found, expected, unlike = (np.asarray(leaf, np.float32) for leaf in leaves)
        assert relative_error(found, expected) <= tolerance < relative_error(found, unlike)


@pytest.mark.parametrize(("length", "window"), [(512, 64), (512, 65), (1024, 128), (768, 200)])
def test_products_are_those_of_the_keys_near_a_window(length, window):
    inputs = arrays(length, batch=1, heads=1, groups=1)

    def flops(visibility, share=None):
        return products(
            functools.partial(attend, visibility=visibility, kernel="xla"), inputs, share
        )

    size = blockwise_attention.block_size(length)
    pairs = 0
    for start in range(0, length, size):
        first = max(0, start - window + 1)
        pairs += size * (start + size - first // 64 * 64)
    head_dim, num_products = inputs[0].shape[-1], 6
    windowed, full = flops(visible(window)), flops(visible(None))
    assert windowed == 2 * num_products * head_dim * pairs < full
    assert flops(visible(window, True), share=0.25) == pytest.approx(
        0.25 * windowed + 0.75 * full, rel=1e-12
    )


def test_a_window_of_the_whole_length_is_no_window():
    inputs = arrays(256)

    def program(visibility, kernel):
        ours = functools.partial(attend, visibility=visibility, kernel=kernel)
        return str(jax.make_jaxpr(gradients(ours, inputs))(*inputs))

    for kernel in ("xla", "traced_cudnn"):
        for is_windowed in (None, True):
            assert program(visible(256, is_windowed), kernel) == program(visible(None), kernel)
        assert program(visible(255), kernel) != program(visible(None), kernel)


@pytest.mark.parametrize(
    ("length", "window", "branches"), [(64, 7, False), (512, 400, False), (512, 64, True)]
)
def test_a_branch_that_saves_little_work_is_a_mask(length, window, branches):
    inputs = arrays(length)
    ours = functools.partial(attend, visibility=visible(window, True), kernel="xla")
    assert ("cond[" in str(jax.make_jaxpr(ours)(*inputs))) == branches
    assert_same(ours, functools.partial(plain, window=window), inputs)


@pytest.mark.parametrize("is_windowed", LAYERS_DIFFER)
def test_queries_after_a_cache_see_their_window(is_windowed):
    q, k, v = arrays(3, 256)
    visibility = replace(visible(5, is_windowed), query_offset=jnp.int32(200))
    ours = functools.partial(attend, visibility=visibility, kernel="xla")
    window = None if is_windowed is False else 5
    assert_same(ours, functools.partial(plain, offset=200, window=window), [q, k, v])


@pytest.mark.parametrize("kernel", ["xla", "traced_cudnn"])
def test_a_branch_saves_what_one_side_saves(kernel):
    inputs = arrays(512, dtype=jnp.bfloat16)

    def saved(visibility):
        ours = functools.partial(attend, visibility=visibility, kernel=kernel)
        leaves = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(ours, *x)[1], *inputs))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim)

    assert saved(visible(64, True)) == saved(visible(None))
    assert (saved(visible(64)) < saved(visible(None))) == (kernel == "xla")


def fused_calls(visibility, monkeypatch):
    """Window of cuDNN's calls in the gradient of attention, and whether they have a mask."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )
    inputs = arrays(128, head_dim=8, dtype=jnp.bfloat16)
    ours = functools.partial(attend, visibility=visibility, kernel="cudnn")
    text = str(jax.make_jaxpr(gradients(ours, inputs))(*inputs))
    calls = re.findall(r"sliding_window_length=(\w+)\s+variadic_args=\((\w+),", text)
    return sorted((window, mask == "True") for window, mask in calls)


def test_cudnn_has_a_window_and_no_mask(monkeypatch):
    windowed, full = [("32", False)] * 2, [("None", False)] * 2
    assert fused_calls(visible(32), monkeypatch) == windowed
    assert fused_calls(visible(None), monkeypatch) == full
    assert fused_calls(visible(128), monkeypatch) == full
    assert fused_calls(visible(32, True), monkeypatch) == windowed + full


@pytest.mark.parametrize("is_windowed", LAYERS_DIFFER)
def test_cudnn_has_a_mask_of_documents_and_window(is_windowed, monkeypatch):
    segments = jnp.zeros((2, 128), jnp.int32)
    assert fused_calls(visible(32, is_windowed, segments), monkeypatch) == [("None", True)] * 2


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_neo"])
@pytest.mark.parametrize("kernel", ["xla", "cudnn"])
def test_a_mean_layer_is_that_of_its_model(family, kernel):
    """Pairs that the core computes: the planner's mean layer, and by layer."""
    length, window, layers = 512, 70, 7
    model = FAMILY_MODELS[family]
    features = replace(model.features, window=window)
    model = replace(model, num_layers=layers, features=features)
    sizes, share = whole_sizes(model), sum(has_window(model)) / layers
    program = layer_programs(
        model, seq_len=length, precision="bf16", kernel=kernel, respect_documents=False
    ).under("none")

    def pairs(of_window):
        if kernel == "cudnn":
            return causal_pairs(length, of_window)
        blocks = blockwise_attention.blocks_of(length, length, of_window)
        return sum(block.num_pairs for block in blocks)

    per_pair = 2 * model.num_heads * model.head_dim
    expected = share * pairs(window) + (1 - share) * pairs(None)
    for part, num_products in ((program.forward, 2), (program.backward, 5)):
        found = sum(each.flops(sizes) for each in (*core_products(part), *part.fused))
        # Without a fused kernel, backward computes scores again only if they are capped.
        fewer = kernel == "xla" and num_products == 5 and not features.attention_softcap
        assert found == pytest.approx(per_pair * (num_products - fewer) * expected, rel=1e-12)
    if kernel == "xla":
        largest = pairs(None) if share < 1 else pairs(window)
        assert scores(program.largest_forward, sizes) == model.num_heads * largest
    counted = share * causal_pairs(length, window) + (1 - share) * causal_pairs(length)
    assert layer_flops(model, length)[1] == pytest.approx(2 * per_pair * counted)
