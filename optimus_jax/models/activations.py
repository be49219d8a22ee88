"""Bytes that backward keeps of forward, per token and layer, in closed form for each remat policy.

It is what `jax.vjp` of a layer (models/transformer.py, Block) closes over, exactly; a test holds
one to the other. What XLA allocates beside it while it works on a layer is not here
(planning/cost/memory.py).
"""

from dataclasses import dataclass

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.models.families import family_of
from optimus_jax.models.flops import computed_pairs, mlp_matrices

SOFTMAX_STATISTICS_BYTES = 4
"""A query's and head's float32 in cuDNN's attention: backward makes the weights again from it
(arXiv:2205.14135)."""


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Bytes of one token in one layer on one device."""

    stream: int
    """The residual stream where a norm or a recomputed layer begins."""
    attention: int
    """Queries, keys and values, and what the core and the projection back need or give."""
    weights: float
    """Weights of attention, or the statistics that stand for them."""
    feed_forward: int
    """Hidden values before the nonlinearity."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.stream + self.attention + self.weights + self.feed_forward


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
    """What backward keeps.

    Args:
      kernel: of attention: xla or cudnn.
      seq_len: tokens of an example.
      itemsize: bytes of a value in the format of activations.
      heads_ways: devices that share the heads; each has at least one key/value head.
      mlp_ways: devices that share the feed-forward block's hidden width.
    """
    stream = model.embed_dim * itemsize
    if remat == "full":
        return SavedBytes(stream=stream, attention=0, weights=0, feed_forward=0)
    heads, kv_heads = model.num_heads // heads_ways, max(1, model.num_kv_heads // heads_ways)
    query, key_value = heads * model.head_dim * itemsize, 2 * kv_heads * model.head_dim * itemsize
    hidden = mlp_matrices(model) * model.mlp_dim // mlp_ways * itemsize
    if remat == "dots":
        # Of the stream a layer's beginning, and the projection back, from which the middle is made
        # again.
        return SavedBytes(
            stream=stream, attention=query + key_value + stream, weights=0, feed_forward=hidden
        )
    # Attention's result is the core's and the projection's; without remat the core keeps it in its
    # own order too.
    results = query * (2 if remat == "none" and kernel == "xla" else 1)
    return SavedBytes(
        stream=2 * stream,
        attention=query + key_value + results,
        feed_forward=hidden,
        weights=_saved_weights(heads, kernel, seq_len, itemsize) if remat == "none" else 0,
    )


def saved_once_bytes(
    model: ModelConfig,
    remat: RematPolicy,
    *,
    kernel: AttentionKernel,
    seq_len: int,
    itemsize: int,
    respect_documents: bool,
) -> int:
    """What backward keeps of a token once for all layers; arguments as `saved_bytes` has them.

    Cosines and sines of rotary positions. With documents, cuDNN's kernel is given its mask as a
    bias, a value for every pair of a query and a key, which is kept unless it is made again;
    otherwise the document of the token.
    """
    angles = 2 * 4 * model.head_dim // 2 if family_of(model.family).positions == "rotary" else 0
    if not respect_documents:
        return angles
    if remat != "none":
        return angles + 4
    return angles + (seq_len * itemsize if kernel == "cudnn" else 0)


def _saved_weights(heads: int, kernel: AttentionKernel, seq_len: int, itemsize: int) -> float:
    if kernel == "cudnn":
        return heads * SOFTMAX_STATISTICS_BYTES
    return heads * itemsize * computed_pairs(seq_len, kernel) / seq_len
