"""Bytes that forward saves for backward, per token and layer, read from the layer's own vjp.

A layer is traced once for each kind of model, remat policy and kernel, with primes for its sizes:
the factors of a saved array's size then say which sizes it is a product of, and its bytes in a
model of other sizes, or on a device that has a part of them, follow without tracing again. What
else XLA allocates while it computes a layer is not included (planning/cost/memory.py).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.families import rotated_dims
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.shapes import model_shapes
from optimus_jax.models.transformer import ForwardContext

SIZES = EMBED, KV_HEADS, GROUP, HALF_HEAD, MLP = ("embed", "kv_heads", "group", "half_head", "mlp")
"""Sizes of a layer that primes stand for: the width of the stream, key/value heads, query heads for
each of them, half of a head's width, and the feed-forward's width."""
PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173)
"""Of these, those that do not divide the sequence length are taken: five, whatever it is below
10^20."""
ROWS = 7
"""Sequences of the traced layer: a prime that divides the size of no weight."""
FLOATS = {4: jnp.float32, 2: jnp.bfloat16}
"""Format of activations by the bytes of a value; bf16 and f16 are alike here."""


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Bytes saved per token, in one layer on one device."""

    stream: float
    """Values as wide as the residual stream, such as the inputs of norms."""
    attention: float
    """Queries, keys, values, and the results of the core."""
    weights: float
    """Attention weights, or the softmax statistics that replace them; masks of one layer."""
    feed_forward: float
    """Hidden values before the nonlinearity."""

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return self.stream + self.attention + self.weights + self.feed_forward


@dataclass(frozen=True, kw_only=True)
class _SavedArray:
    """Bytes of one token in a saved array, as a product."""

    num_bytes: float
    """What is left without the sizes below."""
    factors: tuple[str, ...]
    """Those of SIZES that its size is a product of."""

    def of(self, sizes: dict[str, float]) -> float:
        """Bytes of one token in a layer of these sizes."""
        return self.num_bytes * math.prod(sizes[factor] for factor in self.factors)


def saved_bytes(
    model: ModelConfig,
    remat: RematPolicy,
    *,
    kernel: AttentionKernel,
    seq_len: int,
    itemsize: int,
    heads_ways: int = 1,
    mlp_ways: int = 1,
) -> SavedBytes:
    """The bytes that forward saves for backward.

    Args:
      kernel: attention kernel, xla or cudnn.
      seq_len: tokens of an example.
      itemsize: bytes of a value in the format of activations.
      heads_ways: devices that share the heads; each has at least one key/value head.
      mlp_ways: devices that share the feed-forward block's hidden width.
    """
    heads, kv_heads = model.num_heads // heads_ways, max(1, model.num_kv_heads // heads_ways)
    sizes = {
        EMBED: model.embed_dim,
        KV_HEADS: kv_heads,
        GROUP: heads / kv_heads,
        HALF_HEAD: model.head_dim / 2,
        MLP: model.mlp_dim // mlp_ways,
    }
    found = dict.fromkeys(("stream", "attention", "weights", "feed_forward"), 0.0)
    for array in _traced(_kind(model, seq_len), remat, kernel, seq_len, itemsize)[0]:
        if MLP in array.factors:
            part = "feed_forward"
        elif HALF_HEAD in array.factors:
            part = "attention"
        else:
            part = "stream" if EMBED in array.factors else "weights"
        found[part] += array.of(sizes)
    return SavedBytes(**found)


def saved_once_bytes(
    model: ModelConfig,
    remat: RematPolicy,
    *,
    kernel: AttentionKernel,
    seq_len: int,
    itemsize: int,
    respect_documents: bool,
) -> float:
    """Bytes saved per token once for all layers; arguments as in `saved_bytes`.

    Such as cosines and sines of rotary positions and, with documents, cuDNN's mask (a bias for
    every pair of query and key) or the document of every token.
    """
    kind = _kind(model, seq_len)
    arrays = _traced(kind, remat, kernel, seq_len, itemsize, respect_documents)[1]
    return sum(array.of({HALF_HEAD: rotated_dims(model) / 2}) for array in arrays)


def _primes(seq_len: int) -> dict[str, int]:
    """The prime for each of SIZES."""
    return dict(zip(SIZES, (prime for prime in PRIMES if seq_len % prime), strict=False))


def _kind(model: ModelConfig, seq_len: int) -> ModelConfig:
    """A model of one layer with primes for sizes, the same for all models with these features."""
    primes = _primes(seq_len)
    group = 1 if model.num_heads == model.num_kv_heads else primes[GROUP]
    return ModelConfig(
        name="traced",
        family=model.family,
        vocab_size=8,
        num_layers=1,
        embed_dim=primes[EMBED],
        num_heads=primes[KV_HEADS] * group,
        num_kv_heads=primes[KV_HEADS],
        head_dim=2 * primes[HALF_HEAD],
        mlp_dim=primes[MLP],
        max_length=8,
        dropout=0.0,
        features=replace(model.features, rope_dims=0),
    )


@lru_cache(maxsize=1 << 8)
def _traced(
    model: ModelConfig,
    remat: RematPolicy,
    kernel: AttentionKernel,
    seq_len: int,
    itemsize: int,
    respect_documents: bool = True,
) -> tuple[tuple[_SavedArray, ...], tuple[_SavedArray, ...]]:
    """What the vjp of a layer closes over besides parameters: arrays of the layer, and those that
    all layers share.
    """
    shapes = model_shapes(model, model.vocab_size)

    def vjp(params, x, positions, segments):
        run = ForwardContext(
            comm=Collectives(jnp.dtype(FLOATS[itemsize])),
            remat=remat,
            kernel="traced_cudnn" if kernel == "cudnn" else kernel,
            visibility=Visibility(segments if respect_documents else None),
        )
        return jax.vjp(
            lambda params, x: shapes.merged(params).run_layers(x, positions, run)[0], params, x
        )[1]

    x = jax.ShapeDtypeStruct((ROWS, seq_len, model.embed_dim), FLOATS[itemsize])
    ids = jax.ShapeDtypeStruct((ROWS, seq_len), jnp.int32)
    leaves = jax.tree.leaves(jax.eval_shape(vjp, shapes.params, x, ids, ids))

    def arrays(*, of_layer: bool) -> Iterator[_SavedArray]:
        for leaf in leaves:
            is_of_layer = leaf.ndim > 0 and leaf.shape[0] == 1
            if leaf.size % ROWS == 0 and is_of_layer == of_layer:
                yield _factored(leaf.size * leaf.dtype.itemsize, seq_len)

    return tuple(arrays(of_layer=True)), tuple(arrays(of_layer=False))


def _factored(num_bytes: int, seq_len: int) -> _SavedArray:
    factors = []
    for size, prime in _primes(seq_len).items():
        while num_bytes % prime == 0:
            num_bytes //= prime
            factors.append(size)
    return _SavedArray(num_bytes=num_bytes / (ROWS * seq_len), factors=tuple(factors))
