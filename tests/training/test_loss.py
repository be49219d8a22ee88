"""The chunked cross-entropy, whose gradient is written by hand, against plain autodiff of
log_softmax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, MATMUL_RELATIVE, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.head import Head
from optimus_jax.training.loss import cross_entropy, cross_entropy_and_draws

EMBED = 8


def chunked(hidden, head, targets, weights, *, vocab_size, chunk_tokens, bias=None, softcap=0.0):
    return cross_entropy(
        hidden,
        Head(head, bias, softcap),
        targets,
        weights,
        comm=Collectives(head.dtype),
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
    )


def plain(hidden, head, targets, weights, *, vocab_size, bias=None, softcap=0.0):
    """All logits at once, in float32."""
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T
    logits = logits if bias is None else logits + bias[None]
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    logits = logits[:, :vocab_size]
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -(jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0] * weights).sum()


def arrays(num_tokens, rows, vocab_size, seed, dtype=np.float32, scale=1.0):
    random = np.random.default_rng(seed)
    hidden = jnp.asarray(random.standard_normal((num_tokens, EMBED)) * scale, dtype)
    head = np.zeros((rows, EMBED))
    head[:vocab_size] = random.standard_normal((vocab_size, EMBED))
    targets = jnp.asarray(random.integers(0, vocab_size, num_tokens), jnp.int32)
    weights = jnp.asarray(
        random.random(num_tokens) * (random.random(num_tokens) < 0.7), jnp.float32
    )
    return hidden, jnp.asarray(head, dtype), targets, weights


def chunked_and_plain(inputs, *, vocab_size, chunk_tokens, times=1.0):
    """(loss, gradients) of hidden and head, chunked and plain; `times` is the cotangent of the
    loss.
    """
    sides = (
        lambda h, w: (
            times * chunked(h, w, *inputs[2:], vocab_size=vocab_size, chunk_tokens=chunk_tokens)
        ),
        lambda h, w: times * plain(h, w, *inputs[2:], vocab_size=vocab_size),
    )
    return [jax.jit(jax.value_and_grad(side, (0, 1)))(*inputs[:2]) for side in sides]


@settings(max_examples=15)
@given(
    num_tokens=st.integers(1, 40),
    vocab_size=st.integers(1, 30),
    padding=st.integers(0, 7),
    chunk_tokens=st.integers(1, 50),
    times=st.sampled_from((1.0, 0.25, -3.0)),
    seed=st.integers(0, 2**31),
)
def test_loss_and_gradients_equal_those_of_log_softmax(
    num_tokens, vocab_size, padding, chunk_tokens, times, seed
):
    inputs = arrays(num_tokens, vocab_size + padding, vocab_size, seed)
    (loss, (d_hidden, d_head)), (loss_, (d_hidden_, d_head_)) = chunked_and_plain(
        inputs, vocab_size=vocab_size, chunk_tokens=chunk_tokens, times=times
    )
    assert relative_error(np.asarray(loss), np.asarray(loss_)) <= F32_RELATIVE
    # One token id has no alternative: the plain gradient is then rounding alone.
    scale = abs(times) * float(inputs[3].sum()) if vocab_size == 1 else 0.0
    for found, expected in ((d_hidden, d_hidden_), (d_head, d_head_)):
        assert np.abs(found - expected).max() <= F32_RELATIVE * max(
            float(np.abs(expected).max()), scale
        )
    assert not np.asarray(d_head)[vocab_size:].any(), "rows of padding"
    assert not np.asarray(d_hidden)[np.asarray(inputs[3]) == 0].any(), "tokens without weight"


@pytest.mark.parametrize("chunk_tokens", [7, 64])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_heads_with_a_bias_and_a_cap_equal_plain_autodiff(chunk_tokens, softcap):
    inputs = arrays(40, 24, 21, seed=2)
    bias = jnp.asarray(np.random.default_rng(3).standard_normal(24), jnp.float32)

    def side(loss, **more):
        def function(h, w, b):
            return loss(h, w, *inputs[2:], vocab_size=21, bias=b, softcap=softcap, **more)

        return jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*inputs[:2], bias)

    ours, theirs = side(chunked, chunk_tokens=chunk_tokens), side(plain)
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert relative_error(np.asarray(found), np.asarray(expected)) <= F32_RELATIVE


@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_loss_without_its_gradient_is_the_same(chunk_tokens):
    inputs = arrays(64, 24, 21, seed=1)
    loss = chunked(*inputs, vocab_size=21, chunk_tokens=chunk_tokens)
    (with_gradient, _), (expected, _) = chunked_and_plain(
        inputs, vocab_size=21, chunk_tokens=chunk_tokens
    )
    assert loss == pytest.approx(float(with_gradient), rel=F32_RELATIVE)
    assert loss == pytest.approx(float(expected), rel=F32_RELATIVE)


def test_large_logits_do_not_overflow():
    inputs = arrays(16, 24, 21, seed=2, scale=1e4)
    (loss, gradients), (expected, gradients_) = chunked_and_plain(
        inputs, vocab_size=21, chunk_tokens=5
    )
    assert np.isfinite(loss)
    assert loss > 1e4
    assert loss == pytest.approx(float(expected), rel=F32_RELATIVE)
    for found, plain_ in zip(gradients, gradients_, strict=True):
        assert relative_error(np.asarray(found), np.asarray(plain_)) <= F32_RELATIVE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_in_16_bits_only_the_matmuls_operands_are_rounded(dtype):
    inputs = arrays(512, 104, 101, seed=3, dtype=dtype)
    (loss, gradients), (expected, gradients_) = chunked_and_plain(
        inputs, vocab_size=101, chunk_tokens=100
    )
    assert loss.dtype == jnp.float32
    assert loss == pytest.approx(float(expected), rel=F32_RELATIVE), (
        "logits and softmax are float32"
    )
    for found, exact in zip(gradients, gradients_, strict=True):
        assert found.dtype == dtype
        assert (
            relative_error(np.asarray(found, np.float32), np.asarray(exact, np.float32))
            <= MATMUL_RELATIVE[jnp.dtype(dtype).name]
        )


def test_logits_exist_for_one_chunk_at_a_time():
    num_tokens, rows, chunk_tokens = 96, 24, 8
    inputs = arrays(num_tokens, rows, rows, seed=4)
    gradient = jax.grad(
        lambda h: chunked(h, *inputs[1:], vocab_size=rows, chunk_tokens=chunk_tokens)
    )
    text = str(jax.make_jaxpr(gradient)(inputs[0]))
    assert f"[{chunk_tokens},{rows}]" in text
    assert f"[{num_tokens},{rows}]" not in text
    whole = jax.grad(lambda h: chunked(h, *inputs[1:], vocab_size=rows, chunk_tokens=num_tokens))
    assert f"[{num_tokens},{rows}]" in str(jax.make_jaxpr(whole)(inputs[0]))


def test_draws_are_as_frequent_as_likely_however_the_vocabulary_is_split():
    """Evenly spaced numbers: no token is drawn once more or less often than its p says."""
    num_draws, rows, vocab_size = 1000, 24, 21
    hidden, head, targets, weights = arrays(1, rows, vocab_size, 3)
    every = [jnp.repeat(each, num_draws, 0) for each in (hidden, targets, weights)]
    uniform = (jnp.arange(num_draws, dtype=jnp.float32) + 0.5) / num_draws

    def drawn(rules, hidden, head, targets, weights):
        return cross_entropy_and_draws(
            hidden,
            Head(head, None, 0.0),
            targets,
            weights,
            uniform,
            comm=Collectives(jnp.dtype(jnp.float32), rules),
            vocab_size=vocab_size,
            chunk_tokens=300,
        )

    inputs = (every[0], head, *every[1:])
    loss, whole = jax.jit(lambda *given: drawn({}, *given))(*inputs)
    p = np.asarray(jax.nn.softmax(hidden @ head[:vocab_size].T))[0]
    assert np.abs(np.bincount(np.asarray(whole), minlength=vocab_size) - p * num_draws).max() < 1.01
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.jit(
        jax.shard_map(
            lambda *given: drawn({VOCAB: ("tensor",)}, *given),
            mesh=mesh,
            in_specs=(P(), P("tensor"), P(), P()),
            out_specs=P(),
        )
    )
    loss_, parts = split(*inputs)
    np.testing.assert_array_equal(parts, whole)
    assert float(loss_) == pytest.approx(float(loss), rel=F32_RELATIVE)
    assert float(loss) == pytest.approx(
        float(chunked(*inputs, vocab_size=vocab_size, chunk_tokens=300)), rel=F32_RELATIVE
    )
