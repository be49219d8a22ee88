"""Time of one layer, and of embedding and head, for one microbatch on one device, without
communication.

A *place* is the point of an operator's sizes from which its correction is looked up
(planning/cost/corrections.py).
"""

from functools import lru_cache
from typing import NamedTuple

from optimus_jax.config import RematPolicy
from optimus_jax.planning.cost.corrections import factor
from optimus_jax.planning.cost.head_program import HeadProgram, HeadSizes
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape
from optimus_jax.planning.cost.operators import (
    ALIGNMENT,
    device_time,
    embed_work,
    head_work,
    layer_work,
    pass_time,
    with_launches,
)
from optimus_jax.planning.cost.rates import HEAD, LAYER, Rates, ShapePoint
from optimus_jax.planning.cost.work import Work

F32_BYTES = 4
BUFFER_COPIES = 3
"""Further copies of what a pipeline's stage saves, where `Rates.saved_copies` counts: into its
buffer, from it, and of the buffer's beginning. By measured plans of three machines (decision 39);
with 2 and with 4 predictions are about as good."""


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


@lru_cache(maxsize=1 << 14)
def layer_time(
    shape: LayerShape,
    place: ShapePoint,
    remat: RematPolicy,
    twice: bool,
    buffered: bool,
    collectives: tuple[float, float],
    rates: Rates,
    implementation: ImplementationProfile,
) -> LayerTime:
    """The time of one layer, corrected by measurements nearby.

    Args:
      twice: whether backward recomputes the whole stage.
      buffered: whether a pipeline keeps what a stage saves, in a buffer.
      collectives: how many collectives the host launches in forward and in backward.
    """
    work, f32 = layer_work(shape, remat, implementation), shape.width == F32_BYTES
    attention, feed_forward = work.attention, work.feed_forward
    forward, backward = attention[0] + feed_forward[0], attention[1] + feed_forward[1]
    again = work.again + (forward if twice else Work())
    parts = [
        device_time(part, rates, f32=f32)
        for part in (attention[0], feed_forward[0], attention[1], feed_forward[1], again)
    ]
    again_s = rates.again_share * parts[4].total
    alone = parts[0].total + parts[1].total, parts[2].total + parts[3].total + again_s
    kernels = [
        own + implementation.collective_kernels * more
        for own, more in zip(
            (forward.kernels, backward.kernels + again.kernels), collectives, strict=True
        )
    ]
    saved_s = 0.0
    if rates.saved_copies:
        saved_bytes = shape.programs.under(remat).saved_bytes(shape.sizes)
        copies = rates.saved_copies + BUFFER_COPIES * buffered
        saved_s = copies * pass_time(saved_bytes, rates)
    launched = [
        with_launches(device_s, number, rates, implementation) + saved_s / 2
        for device_s, number in zip(alone, kernels, strict=True)
    ]
    scale = factor(rates, LAYER, place)
    return LayerTime(
        attention=scale * (parts[0].matmuls + parts[2].matmuls),
        feed_forward=scale * (parts[1].matmuls + parts[3].matmuls),
        memory=scale * (sum(part.passes for part in parts[:4]) + saved_s),
        again=scale * again_s,
        launching=scale * (sum(launched) - sum(alone) - saved_s),
        forward=scale * launched[0],
        backward=scale * launched[1],
    )


@lru_cache(maxsize=1 << 14)
def embed_time(
    program: HeadProgram, sizes: HeadSizes, width: int, place: ShapePoint, rates: Rates
) -> float:
    """Seconds of an embedding's forward, in a tick of a pipeline that needs none."""
    work = embed_work(program, sizes, width)
    return factor(rates, HEAD, place) * device_time(work, rates, f32=width == F32_BYTES).total


@lru_cache(maxsize=1 << 14)
def head_time(
    program: HeadProgram,
    sizes: HeadSizes,
    width: int,
    place: ShapePoint,
    rates: Rates,
    implementation: ImplementationProfile,
) -> float:
    """Seconds of embedding, head and loss of one microbatch, forward and backward together.

    `width` is the number of bytes of an activation.
    """
    work = head_work(program, sizes, width, implementation)
    device_s = device_time(
        work, rates, f32=width == F32_BYTES, aligned=sizes.vocab % ALIGNMENT == 0
    ).total
    return factor(rates, HEAD, place) * with_launches(device_s, work.kernels, rates, implementation)
