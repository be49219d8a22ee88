"""Count what one device computes for one layer and for the head, and predict how long it takes."""

from functools import lru_cache
from typing import NamedTuple

from optimus_jax.models.flops import computed_pairs
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.work import Work, matmul

ALIGNMENT = 8
"""Rows whose length is not a multiple of this many values cannot be read 16 bytes at a time, which
tensor cores need."""
STREAM_PASSES_OF_HEAD = 12.0
"""Passes of embedding and final norm over [tokens, embed], forward and backward together."""


class DeviceTime(NamedTuple):
    """Seconds that a device takes for its work, one kernel after the other."""

    matmuls: float
    """Seconds in matmuls and fused attention."""
    passes: float
    """Seconds in passes over memory."""

    @property
    def total(self) -> float:
        """Seconds in total."""
        return self.matmuls + self.passes


class LayerShape(NamedTuple):
    """The sizes of one decoder layer for one microbatch on one device."""

    rows: float
    """Sequences in a microbatch, this device's part."""
    seq_len: int
    """Tokens per sequence."""
    embed: int
    """Width of the residual stream."""
    head_dim: int
    """Width of an attention head."""
    heads: int
    """Query heads, this device's part."""
    kv_heads: int
    """Key and value heads, this device's part."""
    mlp: int
    """Hidden width of the feed-forward, this device's part."""
    gated: bool
    """Whether the feed-forward has two up projections, as SwiGLU does."""
    fused_attention: bool
    """Whether a fused kernel computes attention, without storing scores in memory."""
    width: int
    """Bytes per element of an activation."""

    @property
    def tokens(self) -> float:
        """Tokens in a microbatch, this device's part."""
        return self.rows * self.seq_len

    @property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream of a microbatch."""
        return self.tokens * self.embed * self.width

    @property
    def attention_weights(self) -> int:
        """Elements of the attention matrices, this device's part."""
        return self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Elements of the feed-forward matrices, this device's part."""
        return self.embed * self.mlp * (3 if self.gated else 2)


class LayerWork(NamedTuple):
    """What a device computes for one layer, without recomputation: (forward, backward) per
    block.
    """

    attention: tuple[Work, Work]
    feed_forward: tuple[Work, Work]
    core: Work
    """The part of attention's forward between its projections."""
    last: Work
    """The last matmul of the feed-forward's forward."""


@lru_cache(maxsize=1 << 14)
def layer_work(shape: LayerShape, style: ImplementationProfile) -> LayerWork:
    """The work of one layer of this shape."""
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
    """Forward and backward work of one of a layer's two blocks.

    Counts matmuls with `matrices` [inner, columns], and half of the layer's kernels and passes over
    the residual stream.
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
    """Forward and backward work of softmax(q k) v."""
    matrices, length = shape.rows * shape.heads, shape.seq_len
    if shape.fused_attention:
        # Half of the square is masked and skipped. Backward recomputes the scores: five matmuls,
        # against two in forward.
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
    """Work of embedding, head and loss of a microbatch, forward and backward together.

    `vocab` is the number of vocabulary rows that this device computes.
    """
    products = (
        matmul(tokens, embed, vocab) + matmul(tokens, vocab, embed) + matmul(embed, tokens, vocab)
    )
    return products + Work(
        num_bytes=tokens * (vocab * style.logit_bytes + STREAM_PASSES_OF_HEAD * embed * width),
        kernels=style.head_kernels,
    )


def device_time(work: Work, rates: Rates, *, f32: bool, aligned: bool = True) -> DeviceTime:
    """How long a device takes for `work`.

    `aligned` says whether matrix rows can be read 16 bytes at a time.
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
    """Seconds of work including launches by the host.

    At least the longer of device and launch time, at most their sum.

    The host launches ahead of the device only while nothing waits for results, so a p-norm of the
    two times, which lies between these bounds, combines them.
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
