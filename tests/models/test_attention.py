"""Attention: which keys a query sees, its hand-written gradient against plain autodiff, and which
kernel may run.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, MATMUL_RELATIVE, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import PlanError
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.topology import Topology
from optimus_jax.models import blockwise_attention
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.kernels import Visibility, attend, choose_kernel
from optimus_jax.models.layers import keep_mask
from optimus_jax.models.shapes import model_shapes
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import compute_precision


def arrays(
    length, num_keys=None, *, batch=2, heads=4, groups=2, head_dim=4, dtype=jnp.float32, seed=0
):
    """Queries, keys and values."""
    random = np.random.default_rng(seed)
    shapes = (batch, length, heads, head_dim), *[(batch, num_keys or length, groups, head_dim)] * 2
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def plain(
    q,
    k,
    v,
    *,
    segments=None,
    offset=0,
    keep=None,
    causal=True,
    window=None,
    scale=None,
    softcap=0.0,
):
    """Attention by its definition, every query head with a key/value head of its own; its gradient
    is autodiff's.
    """
    length, num_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    sees = np.ones((length, num_keys), bool)
    if causal:
        sees = (offset + np.arange(length))[:, None] >= np.arange(num_keys)[None, :]
    if window is not None:
        sees &= (offset + np.arange(length))[:, None] - np.arange(num_keys)[None, :] < window
    sees = jnp.broadcast_to(sees, (q.shape[0], length, num_keys))
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None, :])
    k, v = (jnp.repeat(part, group, axis=2) for part in (k, v))
    scores = jnp.einsum("blhk,bthk->bhlt", q, k)
    scores = scores / np.float32(q.shape[-1]) ** 0.5 if scale is None else scores * scale
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhlt,bthk->blhk", weights if keep is None else weights * keep, v)


def assert_same(ours, theirs, inputs, tolerance=F32_RELATIVE):
    """Compare values, and gradients of a weighted sum of all outputs."""
    weight = jnp.asarray(np.random.default_rng(9).standard_normal(inputs[0].shape), jnp.float32)

    def values_and_gradients(attention):
        def loss(*x):
            out = attention(*x)
            return (out.astype(jnp.float32) * weight).sum(), out

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs))

    for found, expected in zip(
        values_and_gradients(ours), values_and_gradients(theirs), strict=True
    ):
        assert (
            relative_error(np.asarray(found, np.float32), np.asarray(expected, np.float32))
            <= tolerance
        )


@settings(max_examples=10)
@given(
    length=st.integers(1, 12),
    groups=st.sampled_from((1, 2, 4)),
    documents=st.booleans(),
    hidden=st.one_of(
        st.just({"causal": False}),
        st.fixed_dictionaries({"window": st.one_of(st.none(), st.integers(1, 12))}),
    ),
    how=st.sampled_from(({}, {"scale": 1.0}, {"scale": 0.3, "softcap": 1.5}, {"softcap": 0.5})),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_those_of_the_definition(
    length, groups, documents, hidden, how, seed
):
    inputs = arrays(length, groups=groups, seed=seed)
    begins = np.random.default_rng(seed).random((2, length)) < 0.3
    segments = jnp.asarray(np.cumsum(begins, axis=1), jnp.int32) if documents else None
    visibility = Visibility(segments, **hidden)
    ours = functools.partial(attend, visibility=visibility, kernel="xla", **how)
    assert_same(ours, functools.partial(plain, segments=segments, **hidden, **how), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [False, True])
def test_blockwise_attention_equals_attention_at_once(documents, causal, monkeypatch):
    length = 48
    segments = (
        jnp.asarray(np.arange(length)[None, :] // 20 + np.zeros((2, 1)), jnp.int32)
        if documents
        else None
    )
    monkeypatch.setattr(blockwise_attention, "MIN_BLOCK", 8)
    assert blockwise_attention.block_size(length) == 8
    assert_same(
        functools.partial(attend, visibility=Visibility(segments, causal=causal), kernel="xla"),
        functools.partial(plain, segments=segments, causal=causal),
        arrays(length),
    )


def test_block_size_for_every_length():
    assert [
        blockwise_attention.block_size(length)
        for length in (1, 64, 127, 128, 192, 256, 512, 1024, 4096, 1000)
    ] == [1, 64, 127, 64, 64, 64, 64, 128, 512, 125]


def test_blocks_skip_keys_that_none_of_their_queries_sees():
    def multiplies(length):
        blocks = functools.partial(attend, visibility=Visibility(), kernel="xla")
        text = str(jax.make_jaxpr(blocks)(*arrays(length, batch=1, heads=1, groups=1)))
        return text.count("dot_general"), f"[1,1,{length},{length}]" in text

    assert multiplies(64) == (2, True)
    assert multiplies(512) == (16, False)


def test_queries_with_an_offset_see_all_earlier_keys():
    q, k, v = arrays(3, 8)
    ours = functools.partial(attend, visibility=Visibility(query_offset=jnp.int32(2)), kernel="xla")
    assert_same(ours, functools.partial(plain, offset=2), [q, k, v])
    changed = ours(q, k.at[:, 5:].set(7.0), v.at[:, 5:].set(7.0))
    np.testing.assert_array_equal(ours(q, k, v), changed)
    assert (ours(q, k.at[:, 4].set(7.0), v) != changed).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_in_16_bits_scores_and_softmax_are_float32(dtype):
    inputs = arrays(32, dtype=dtype)
    ours = functools.partial(attend, visibility=Visibility(), kernel="xla")
    assert ours(*inputs).dtype == dtype
    exact = lambda *x: plain(*(part.astype(jnp.float32) for part in x))  # noqa: E731
    assert_same(ours, exact, inputs, MATMUL_RELATIVE[jnp.dtype(dtype).name])
    large = [inputs[0] * dtype(200), inputs[1] * dtype(200), inputs[2]]
    assert jnp.isfinite(ours(*large)).all()


def test_dropout_is_the_same_in_forward_and_backward_and_keeps_the_mean():
    q, k, v = arrays(16)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(
        jax.random.split(jax.random.key(0), 2), jnp.arange(4)
    )
    ours = functools.partial(
        attend, visibility=Visibility(), kernel="xla", dropout=0.5, keys_BH=keys
    )
    drawn = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys, 0).reshape(-1)
    keep = keep_mask(drawn, (16, 16), 0.5).reshape(2, 4, 16, 16)
    assert 0.4 < keep.mean(dtype=jnp.float32) < 0.6
    assert_same(ours, functools.partial(plain, keep=keep.astype(jnp.float32) / 0.5), [q, k, v])
    assert (ours(q, k, v) != attend(q, k, v, Visibility(), kernel="xla")).any()


@pytest.mark.parametrize("offset", [0, 3])
def test_visibility_mask_is_causal_and_within_documents(offset):
    segments = None if offset else jnp.asarray([[0, 0, 1, 1, 1]], jnp.int32)
    mask = np.asarray(Visibility(segments, offset).mask(slice(0, 5), slice(0, 5 + offset)))
    assert mask.shape == (1, 5, 5 + offset)
    for query in range(5):
        for key in range(5 + offset):
            same = offset or (query < 2) == (key < 2)
            assert mask[0, query, key] == (key <= query + offset and bool(same))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_logits_do_not_depend_on_other_documents(name):
    """Other tokens in the first document leave the second one's logits as they are, bit by bit."""
    model = plans.MODELS[name]
    shapes = model_shapes(model, 104)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(
            np.random.default_rng(leaf.size).standard_normal(leaf.shape) * 0.2, leaf.dtype
        ),
        shapes.params,
    )
    comm, border, length = Collectives(jnp.dtype(jnp.float32)), 6, plans.SEQ_LEN
    index = np.arange(length, dtype=np.int32)[None, :]
    positions = jnp.asarray(np.where(index < border, index, index - border))

    @jax.jit
    def logits(tokens, segments):
        run = ForwardContext(comm=comm, visibility=Visibility(segments))
        decoder = shapes.module(params, comm)
        return decoder.logits(decoder.hidden(tokens, positions, run), run)

    tokens = np.random.default_rng(0).integers(0, plans.VOCAB_SIZE, (1, length), dtype=np.int32)
    others = np.where(index < border, (tokens + 1) % plans.VOCAB_SIZE, tokens)
    separate, together = (index >= border).astype(np.int32), np.zeros_like(index)
    before, after = logits(tokens, separate), logits(others, separate)
    np.testing.assert_array_equal(before[:, border:], after[:, border:])
    assert (before[:, :border] != after[:, :border]).any(-1).all()
    leaked = logits(tokens, together)[:, border:] != logits(others, together)[:, border:]
    assert leaked.any(-1).all(), "without documents everything after it is changed"
    later = np.where(index >= border, (tokens + 1) % plans.VOCAB_SIZE, tokens)
    np.testing.assert_array_equal(
        logits(later, together)[:, :border], logits(tokens, together)[:, :border]
    )


def chosen_kernel(wanted, *, device, settings):
    config = Config(model=ModelConfig(head_dim=64)).with_values(
        {"precision.compute": "bf16", **settings, "parallel.attention": wanted}
    )
    topology = Cluster.parse(f"{device}:1").topology()
    return choose_kernel(config, topology, compute_precision(config, topology))


@pytest.mark.parametrize(
    ("device", "settings", "why"),
    [
        ("cpu", {}, "it runs on GPUs, and this platform is cpu"),
        (
            "v100",
            {"precision.compute": "f16"},
            r"compute capability 8\.0 or higher, and that of Tesla V100-SXM2-32GB is 7\.0",
        ),
        (
            "h100",
            {"precision.compute": "f32"},
            "it computes in bf16 or f16, and the precision is f32",
        ),
        (
            "h100",
            {"model.dropout": 0.1},
            "no dropout on attention weights, and model.dropout is 0.1",
        ),
        ("h100", {"model.head_dim": 20}, "head_dim is 20"),
        ("a100", {"model.head_dim": 256}, "up to 128 wide on this GPU, and head_dim is 256"),
        ("h100", {"model.head_dim": 264}, "up to 256 wide on this GPU, and head_dim is 264"),
        ("h100", {"model.features.attention_softcap": 50.0}, "it has no cap on scores"),
        ("h100", {"data.seq_len": 129}, "even numbers of tokens, and data.seq_len is 129"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_and_never_chosen(device, settings, why):
    with pytest.raises(
        PlanError,
        match=f"cuDNN attention kernel cannot run here(.|\\n)*{why}(.|\\n)*parallel.attention=xla",
    ):
        chosen_kernel("cudnn", device=device, settings=settings)
    assert (
        chosen_kernel("auto", device=device, settings=settings)
        == chosen_kernel("xla", device=device, settings=settings)
        == "xla"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision.compute": "f16"},
        {
            "data.seq_len": 129,
            "data.respect_documents": False,
            "model.features.window": 64,
        },
    ],
)
@pytest.mark.parametrize("device", ["a100", "h200", "b200", "rtx3090"])
def test_the_fused_kernel_is_chosen_where_it_runs(device, settings):
    assert chosen_kernel("auto", device=device, settings=settings) == "cudnn"
    assert chosen_kernel("xla", device=device, settings=settings) == "xla"


def test_images_and_sound_need_no_documents_for_the_fused_kernel():
    for name in ("vit-base-patch16-224", "whisper-small"):
        config = Config(model=model_preset(name))
        for odd in ({}, {"data.seq_len": config.seq_len - 1}):
            assert not config.separates_documents
            settings = {"precision.compute": "bf16", **odd}
            topology = Cluster.parse("h100:1").topology()
            assert choose_kernel(config.with_values(settings), topology, "bf16") == "cudnn"


@pytest.mark.parametrize("device_kind", ["AMD Instinct MI300X", "NVIDIA H100 80GB HBM3"])
def test_gpu_of_unknown_compute_capability_uses_xla_attention(device_kind):
    """AMD GPUs are such: JAX calls their platform gpu too."""
    config = Config(model=ModelConfig(head_dim=64))
    topology = Topology(
        num_devices=1,
        num_processes=1,
        platform="gpu",
        device_kind=device_kind,
        bytes_per_device=None,
    )
    assert choose_kernel(config, topology, "bf16") == "xla"
    assert choose_kernel(config, replace(topology, compute_capability=(9, 0)), "bf16") == "cudnn"
