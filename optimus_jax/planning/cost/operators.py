"""What one device computes for one layer and for the head, and how long that takes."""

from functools import lru_cache
from typing import NamedTuple

from optimus_jax.models.flops import computed_pairs
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.work import Work, matmul

ALIGNMENT = 8
"""Values: rows of other lengths cannot be read 16 bytes at a time, which tensor cores want."""
STREAM_PASSES_OF_HEAD = 12.0
"""Passes over [tokens, embed] of embedding and final norm, forward and backward."""


class DeviceTime(NamedTuple):
    """Seconds of a device's work, its kernels one after the other."""

    matmuls: float
    """Fused attention included."""
    passes: float
    """Over memory."""

    @property
    def total(self) -> float:
        """Both."""
        return self.matmuls + self.passes


class LayerShape(NamedTuple):
    """One decoder layer of one microbatch as one device sees it."""

    rows: float
    """Sequences of a microbatch."""
    seq_len: int
    """Tokens of each."""
    embed: int
    """Width of the residual stream."""
    head_dim: int
    """Width of a head."""
    heads: int
    """Query heads, this device's part."""
    kv_heads: int
    """Key and value heads, this device's part."""
    mlp: int
    """Hidden width of the feed-forward, this device's part."""
    gated: bool
    """Whether there are two matrices up."""
    fused_attention: bool
    """Whether scores stay on the chip."""
    width: int
    """Bytes of an activation."""

    @property
    def tokens(self) -> float:
        """Of a microbatch."""
        return self.rows * self.seq_len

    @property
    def stream_bytes(self) -> float:
        """Of the residual stream."""
        return self.tokens * self.embed * self.width

    @property
    def attention_weights(self) -> int:
        """Elements of the attention's matrices."""
        return self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Elements of the feed-forward's matrices."""
        return self.embed * self.mlp * (3 if self.gated else 2)


class LayerWork(NamedTuple):
    """What a device computes for one layer: (forward, backward) of its two blocks, without what is
    computed again.
    """

    attention: tuple[Work, Work]
    feed_forward: tuple[Work, Work]
    core: Work
    """The part of `attention`, forward, between its projections."""
    last: Work
    """The last product of `feed_forward`, forward."""


@lru_cache(maxsize=1 << 14)
def layer_work(shape: LayerShape, style: ImplementationProfile) -> LayerWork:
    """The work of a layer."""
    query, key_value = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    up = shape.mlp * (2 if shape.gated else 1)
    core = _core(shape, style)
    attention = _block(
        shape,
        style,
        ((shape.embed, query), (shape.embed, key_value), (query, shape.embed)),
        hidden=2 * query + key_value,
        weights=shape.attention_weights,
    )
    feed_forward = _block(
        shape,
        style,
        ((shape.embed, up), (shape.mlp, shape.embed)),
        hidden=up,
        weights=shape.mlp_weights,
    )
    return LayerWork(
        (attention[0] + core[0], attention[1] + core[1]),
        feed_forward,
        core[0],
        matmul(shape.tokens, shape.mlp, shape.embed),
    )


def _block(
    shape: LayerShape,
    style: ImplementationProfile,
    matrices: tuple[tuple[int, int], ...],
    *,
    hidden: int,
    weights: int,
) -> tuple[Work, Work]:
    """Forward and backward of products with `matrices`, and of half of a layer's passes over the
    stream and kernels.
    """
    forward, backward = (
        Work(
            num_bytes=shape.tokens
            * shape.width
            * (style.stream_passes[way] / 2 * shape.embed + style.hidden_passes[way] * hidden),
            kernels=style.layer_kernels[way] / 2,
        )
        for way in (0, 1)
    )
    backward += Work(num_bytes=style.weight_bytes * weights)
    for inner, columns in matrices:
        forward += matmul(shape.tokens, inner, columns)
        backward += matmul(shape.tokens, columns, inner) + matmul(inner, shape.tokens, columns)
    return forward, backward


def _core(shape: LayerShape, style: ImplementationProfile) -> tuple[Work, Work]:
    """Softmax(q k) v, forward and backward."""
    matrices, length = shape.rows * shape.heads, shape.seq_len
    if shape.fused_attention:
        # Half of the square is masked and skipped. Backward computes the scores again: five
        # products for forward's two.
        flops = 2.0 * matrices * length**2 * shape.head_dim
        return Work(fused_flops=flops), Work(fused_flops=2.5 * flops)
    share = (
        computed_pairs(length, "xla") / length**2
        if style.causal_share is None
        else style.causal_share
    )
    products = (
        matmul(length, shape.head_dim, length, matrices)
        + matmul(length, length, shape.head_dim, matrices)
    ).times(share)
    scores = matrices * length**2 * share * shape.width / 2
    plain = matrices % style.softmax_multiple != 0
    more = (
        Work(num_bytes=scores * style.plain_softmax_bytes, kernels=style.plain_softmax_kernels)
        if plain
        else Work()
    )
    return (
        products + more + Work(num_bytes=scores * style.score_bytes[0]),
        products.times(2.0) + more + Work(num_bytes=scores * style.score_bytes[1]),
    )


@lru_cache(maxsize=1 << 14)
def head_work(
    tokens: float, embed: int, vocab: int, width: int, style: ImplementationProfile
) -> Work:
    """Embedding, head and loss of a microbatch, forward and backward, with `vocab` of the
    vocabulary's rows.
    """
    products = (
        matmul(tokens, embed, vocab) + matmul(tokens, vocab, embed) + matmul(embed, tokens, vocab)
    )
    return products + Work(
        num_bytes=tokens * (vocab * style.logit_bytes + STREAM_PASSES_OF_HEAD * embed * width),
        kernels=style.head_kernels,
    )


def device_time(work: Work, rates: Rates, *, f32: bool, aligned: bool = True) -> DeviceTime:
    """How long a device takes for `work`; `aligned` says whether its rows are read 16 bytes at a
    time.
    """
    rate = (rates.f32_matmul_flops_per_s if f32 else rates.matmul_flops_per_s) * (
        1.0 if aligned else rates.unaligned_share
    )
    wave = rates.wave * rates.num_cores
    effective = work.flops + wave * work.wave + rates.inner * (work.short + wave * work.short_wave)
    return DeviceTime(
        effective / rate + work.fused_flops / (rate * rates.fused_attention_share),
        work.num_bytes / (rates.memory_bytes_per_s * rates.pass_share),
    )


def with_launches(
    device_s: float, kernels: float, rates: Rates, style: ImplementationProfile
) -> float:
    """Seconds of work on a device whose host launches it: at least the longer of both, at most
    their sum.

    Launches run ahead of the device only while nothing waits for its results: a norm of both times
    lies between.
    """
    host_s = kernels * (
        rates.interpreter_launch_s if style.launched_by_interpreter else rates.launch_s
    )
    power = rates.launch_overlap
    return (
        (device_s**power + host_s**power) ** (1 / power)
        if host_s and device_s
        else device_s + host_s
    )
