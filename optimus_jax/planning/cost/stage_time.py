"""Seconds of one layer, and of embedding and head, of one microbatch on one device: operators,
without exchanges.

A *place* is where an operator's sizes lie among measured ones (planning/cost/corrections.py).
"""

import math
from functools import lru_cache
from typing import NamedTuple

from optimus_jax.config import ModelConfig, RematPolicy
from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.axes import HEADS, KV_HEADS, MLP, VOCAB
from optimus_jax.models.families import family_of
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.corrections import factor
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.operators import (
    ALIGNMENT,
    LayerShape,
    LayerWork,
    device_time,
    head_work,
    layer_work,
    with_launches,
)
from optimus_jax.planning.cost.rates import HEAD, LAYER, Rates, ShapePoint
from optimus_jax.planning.cost.work import Work

F32_BYTES = 4


class LayerTime(NamedTuple):
    """Seconds of one layer; forward and backward together unless said otherwise."""

    attention: float
    """Matmuls of the attention block, fused attention too."""
    feed_forward: float
    """Matmuls of the feed-forward block."""
    memory: float
    """Passes over memory."""
    again: float
    """What backward computes a second time."""
    launching: float
    """In which the device waits for its host."""
    forward: float
    """All of it, forward."""
    backward: float
    """All of it, backward."""


def layer_shape(model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int) -> LayerShape:
    """A layer of one microbatch as one device sees it."""
    rules, axes = plan.active_rules(model), plan.axes
    heads_ways, kv_ways, mlp_ways = (
        math.prod([axes[axis] for axis in rules.get(logical, ())])
        for logical in (HEADS, KV_HEADS, MLP)
    )
    heads = model.num_heads // heads_ways
    # Where key and value heads are fewer than the devices, each takes those that its query heads
    # need.
    kv_heads = (
        model.num_kv_heads // kv_ways
        if kv_ways > 1
        else max(1, heads * model.num_kv_heads // model.num_heads)
    )
    return LayerShape(
        rows=global_batch / (plan.batch_ways() * plan.microbatches),
        seq_len=seq_len,
        embed=model.embed_dim,
        head_dim=model.head_dim,
        heads=heads,
        kv_heads=kv_heads,
        mlp=model.mlp_dim // mlp_ways,
        gated=family_of(model.family).activation == "swiglu",
        fused_attention=plan.attention == "cudnn",
        width=F32_BYTES if plan.precision == "f32" else 2,
    )


@lru_cache(maxsize=1 << 14)
def layer_time(
    shape: LayerShape,
    place: ShapePoint,
    remat: RematPolicy,
    twice: bool,
    collectives: tuple[float, float],
    rates: Rates,
    style: ImplementationProfile,
) -> LayerTime:
    """The time of a layer.

    Args:
      twice: whether its stage is computed again as a whole.
      collectives: how many the host launches forward and backward.
    """
    work, f32 = layer_work(shape, style), shape.width == F32_BYTES
    attention, feed_forward = work.attention, work.feed_forward
    forward, backward = attention[0] + feed_forward[0], attention[1] + feed_forward[1]
    again = _again(remat, work, forward, style) + (forward if twice else Work())
    parts = [
        device_time(part, rates, f32=f32)
        for part in (attention[0], feed_forward[0], attention[1], feed_forward[1], again)
    ]
    alone = parts[0].total + parts[1].total, parts[2].total + parts[3].total + parts[4].total
    kernels = [
        own + style.collective_kernels * more
        for own, more in zip(
            (forward.kernels, backward.kernels + again.kernels), collectives, strict=True
        )
    ]
    launched = [
        with_launches(device_s, number, rates, style)
        for device_s, number in zip(alone, kernels, strict=True)
    ]
    scale = factor(rates, LAYER, place)
    return LayerTime(
        attention=scale * (parts[0].matmuls + parts[2].matmuls),
        feed_forward=scale * (parts[1].matmuls + parts[3].matmuls),
        memory=scale * sum(part.passes for part in parts[:4]),
        again=scale * parts[4].total,
        launching=scale * (sum(launched) - sum(alone)),
        forward=scale * launched[0],
        backward=scale * launched[1],
    )


def _again(
    remat: RematPolicy, work: LayerWork, forward: Work, style: ImplementationProfile
) -> Work:
    """What backward computes again of a layer, beyond norms and activations, which its own passes
    contain.
    """
    match remat:
        case "selective":
            return work.core
        case "dots":
            return work.core + Work(
                num_bytes=forward.num_bytes - work.core.num_bytes,
                kernels=forward.kernels - work.core.kernels,
            )
        case "full":
            return forward if style.repeats_last else forward + work.last.times(-1.0)
    return Work()


@lru_cache(maxsize=1 << 14)
def head_time(
    tokens: float,
    embed: int,
    vocab: int,
    width: int,
    place: ShapePoint,
    rates: Rates,
    style: ImplementationProfile,
) -> float:
    """Embedding, head and loss of one microbatch, forward and backward, with `vocab` of the
    vocabulary's rows.
    """
    work = head_work(tokens, embed, vocab, width, style)
    device_s = device_time(
        work, rates, f32=width == F32_BYTES, aligned=vocab % ALIGNMENT == 0
    ).total
    return factor(rates, HEAD, place) * with_launches(device_s, work.kernels, rates, style)


def head_rows(model: ModelConfig, plan: Plan, style: ImplementationProfile) -> int:
    """Rows of the vocabulary that a device with a head computes."""
    ways = math.prod(
        [
            plan.axes[axis]
            for axis in plan.active_rules(model).get(VOCAB, ())
            if style.head_shared or axis != PIPE
        ]
    )
    vocab = plan.padded_vocab(model) if style.pads_whole_vocab or ways > 1 else model.vocab_size
    return vocab // ways


def shape_point(shape: LayerShape, tensor_ways: int) -> ShapePoint:
    """Where a layer, and the head that follows it, lie: their tokens, width and devices that share
    them.
    """
    return math.log2(shape.tokens), math.log2(shape.embed), math.log2(tensor_ways)
