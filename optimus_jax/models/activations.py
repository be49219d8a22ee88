"""Closed-form bytes that forward saves for backward, per token and layer, for each remat policy.

They are exactly the bytes that `jax.vjp` of a layer (models/transformer.py, Block) closes over; a
test compares the two. What else XLA allocates while it computes a layer is not included
(planning/cost/memory.py).
"""

from dataclasses import dataclass

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.models.families import family_of
from optimus_jax.models.flops import computed_pairs, mlp_matrices

SOFTMAX_STATISTICS_BYTES = 4
"""The float32 that cuDNN's attention saves per query and head, from which backward computes the
weights again (arXiv:2205.14135)."""


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Bytes saved per token, in one layer on one device."""

    stream: int
    """The residual stream at the input of each norm, or of a recomputed layer."""
    attention: int
    """Queries, keys, values, and the results of the core or of the output projection."""
    weights: float
    """Attention weights, or the softmax statistics that replace them."""
    feed_forward: int
    """Hidden values before the nonlinearity."""

    @property
    def total(self) -> float:
        """The sum of all fields."""
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
    """The bytes that forward saves for backward.

    Args:
      kernel: attention kernel, xla or cudnn.
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
        # Saves the stream at the layer's input, and the output projection, from which the stream
        # in the middle of the layer is computed again.
        return SavedBytes(
            stream=stream, attention=query + key_value + stream, weights=0, feed_forward=hidden
        )
    # The core's result is saved once as the input of the output projection; without remat, the xla
    # core also saves it in its own layout.
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
    """Bytes saved per token once for all layers; arguments as in `saved_bytes`.

    These are the cosines and sines of rotary positions and, with documents, a part for the mask.
    cuDNN's kernel gets the mask as a bias with a value for every pair of query and key, which is
    saved if remat is "none". With another remat the token's document number is saved instead.
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
