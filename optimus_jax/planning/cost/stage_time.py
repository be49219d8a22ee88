"""Time of one layer, and of embedding and head, for one microbatch on one device, without
communication.

A *place* is the point of an operator's sizes from which its correction is looked up
(planning/cost/corrections.py).
"""

import math
from functools import lru_cache
from typing import NamedTuple

from optimus_jax.config import ModelConfig, RematPolicy
from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.axes import HEADS, KV_HEADS, MLP, VOCAB
from optimus_jax.models.families import features_of
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
    """Seconds of one layer, forward and backward together unless stated otherwise."""

    attention: float
    """Matmuls of the attention block, including fused attention."""
    feed_forward: float
    """Matmuls of the feed-forward block."""
    memory: float
    """Passes over memory."""
    again: float
    """Recomputation in backward."""
    launching: float
    """Time in which the device waits for the host to launch kernels."""
    forward: float
    """Forward in total."""
    backward: float
    """Backward in total, including recomputation."""


def layer_shape(model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int) -> LayerShape:
    """The sizes of one layer for one microbatch on one device under `plan`."""
    rules, axes = plan.active_rules(model), plan.axes
    heads_ways, kv_ways, mlp_ways = (
        math.prod([axes[axis] for axis in rules.get(logical, ())])
        for logical in (HEADS, KV_HEADS, MLP)
    )
    heads = model.num_heads // heads_ways
    # If key and value heads are not split, each device computes those that its query heads need.
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
        gated=bool(features_of(model).gated),
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
    """The time of one layer, corrected by measurements nearby.

    Args:
      twice: whether backward recomputes the whole stage.
      collectives: how many collectives the host launches in forward and in backward.
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
    """The work that backward recomputes in a layer under `remat`.

    Norms and activation functions are not included: backward's own passes contain them.
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
    """Seconds of embedding, head and loss of one microbatch, forward and backward together.

    `vocab` is the number of vocabulary rows that this device computes.
    """
    work = head_work(tokens, embed, vocab, width, style)
    device_s = device_time(
        work, rates, f32=width == F32_BYTES, aligned=vocab % ALIGNMENT == 0
    ).total
    return factor(rates, HEAD, place) * with_launches(device_s, work.kernels, rates, style)


def head_rows(model: ModelConfig, plan: Plan, style: ImplementationProfile) -> int:
    """Number of vocabulary rows that a device with a head computes."""
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
    """The place of a layer and of the head: logarithms of tokens, width and devices along
    tensor.
    """
    return math.log2(shape.tokens), math.log2(shape.embed), math.log2(tensor_ways)
