"""Count what one device computes for one layer and for the head, and predict how long it takes."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from optimus_jax.config import RematPolicy
from optimus_jax.models.layer_program import (
    EMBED,
    ROWS,
    core_products,
    matrix_products,
    scores,
)
from optimus_jax.models.program_reader import Product, ProgramPart
from optimus_jax.planning.cost.head_program import HeadProgram, HeadSizes
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.work import Work, matmul

ALIGNMENT = 8
"""Rows whose length is not a multiple of this many values cannot be read 16 bytes at a time, which
tensor cores need."""
STREAM_PASSES_OF_HEAD = 12.0
"""Passes of embedding and final norm over [tokens, embed], forward and backward together."""
EMBED_PASSES = 5.0
"""Passes of an embedding's forward in a tick of a pipeline: rows are read and written, and one of
two arrays is taken."""


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


class LayerWork(NamedTuple):
    """What a device computes for one layer: (forward, backward without recomputation) per block."""

    attention: tuple[Work, Work]
    feed_forward: tuple[Work, Work]
    again: Work
    """What backward computes a second time under the remat policy."""


@lru_cache(maxsize=1 << 14)
def layer_work(
    shape: LayerShape, remat: RematPolicy, implementation: ImplementationProfile
) -> LayerWork:
    """The work of one layer of this shape."""
    sizes = shape.sizes
    plain, program = shape.programs.under("none"), shape.programs.under(remat)
    core = _core(shape, plain.forward, plain.backward, implementation)
    attention, feed_forward = (
        _block(
            shape, plain.forward, plain.backward, implementation, of_feed_forward=of_feed_forward
        )
        for of_feed_forward in (False, True)
    )
    again = Work()
    if program is not plain:
        # Norms and activation functions are not included: backward's own passes contain them.
        if implementation.repeats_last and remat == "full":
            again = attention[0] + feed_forward[0] + core[0]
        else:
            again = core[0]
            if remat != "selective":
                passes = attention[0] + feed_forward[0]
                again += Work(num_bytes=passes.num_bytes, kernels=passes.kernels)
            for part, sign in ((program.backward, 1.0), (plain.backward, -1.0)):
                for of_feed_forward in (False, True):
                    products = matrix_products(part, of_feed_forward=of_feed_forward)
                    again += _products(products, sizes).times(sign)
    return LayerWork(
        (attention[0] + core[0], attention[1] + core[1]),
        feed_forward,
        again,
    )


def _products(products: Iterable[Product], sizes: Sequence[float]) -> Work:
    work = Work()
    for product in products:
        work += matmul(*product.of(sizes)).times(product.runs)
    return work


def _block(
    shape: LayerShape,
    forward: ProgramPart,
    backward: ProgramPart,
    implementation: ImplementationProfile,
    *,
    of_feed_forward: bool,
) -> tuple[Work, Work]:
    """Forward and backward work of one of a layer's two blocks, without attention's core.

    Counts its products with matrices, and half of the layer's kernels and passes over the residual
    stream.
    """
    sizes = shape.sizes
    products, hidden = matrix_products(forward, of_feed_forward=of_feed_forward), 0.0
    weights = sum(product.inner.of(sizes) * product.columns.of(sizes) for product in products)
    for product in products:
        if EMBED not in product.columns.factors:
            hidden += product.columns.of(sizes)
    if not of_feed_forward and (core_products(forward) or forward.fused):
        hidden += sizes.heads * sizes.head_dim  # the core's result
    works = []
    for way, part in enumerate((forward, backward)):
        works.append(
            Work(
                num_bytes=implementation.stream_passes[way] / 2 * shape.stream_bytes
                + implementation.hidden_passes[way] * shape.tokens * shape.width * hidden,
                kernels=implementation.layer_kernels[way] / 2,
            )
            + _products(matrix_products(part, of_feed_forward=of_feed_forward), sizes)
        )
    # A product that sums over tokens gives the gradient of a matrix.
    trained = sum(
        product.rows.of(sizes) * product.columns.of(sizes)
        for product in matrix_products(backward, of_feed_forward=of_feed_forward)
        if ROWS in product.inner.factors
    )
    moved = implementation.weight_bytes * weights - implementation.gradient_bytes_per_weight * (
        weights - trained
    )
    return works[0], works[1] + Work(num_bytes=moved)


def _core(
    shape: LayerShape,
    forward: ProgramPart,
    backward: ProgramPart,
    implementation: ImplementationProfile,
) -> tuple[Work, Work]:
    """Forward and backward work of softmax(q k) v."""
    sizes, length = shape.sizes, shape.programs.seq_len
    matrices, head_dim = sizes.rows * sizes.heads, sizes.head_dim
    if forward.fused:
        both = [
            Work(fused_flops=sum(each.flops(sizes) for each in part.fused))
            for part in (forward, backward)
        ]
        return both[0], both[1]
    if not core_products(forward):
        return Work(), Work()
    share = (
        scores(forward, sizes) / (matrices * length**2)
        if implementation.causal_share is None
        else implementation.causal_share
    )
    products = (
        matmul(length, head_dim, length, matrices) + matmul(length, length, head_dim, matrices)
    ).times(share)
    score_bytes = matrices * length**2 * share * shape.width / 2
    plain = matrices % implementation.softmax_multiple != 0
    more = (
        Work(
            num_bytes=score_bytes * implementation.plain_softmax_bytes,
            kernels=implementation.plain_softmax_kernels,
        )
        if plain
        else Work()
    )
    return (
        products + more + Work(num_bytes=score_bytes * implementation.score_bytes[0]),
        products.times(2.0) + more + Work(num_bytes=score_bytes * implementation.score_bytes[1]),
    )


@lru_cache(maxsize=1 << 14)
def head_work(
    program: HeadProgram, sizes: HeadSizes, width: int, implementation: ImplementationProfile
) -> Work:
    """Work of embedding, head and loss of a microbatch, forward and backward together.

    `width` is the number of bytes of an activation.
    """
    return _products((*program.embed.products, *program.rest.products), sizes) + Work(
        num_bytes=sizes.stream_tokens
        * (
            sizes.length_ways * sizes.vocab * implementation.logit_bytes
            + STREAM_PASSES_OF_HEAD * sizes.embed * width * (1 + sizes.frames)
        ),
        kernels=implementation.head_kernels,
    )


def embed_work(program: HeadProgram, sizes: HeadSizes, width: int) -> Work:
    """Work of an embedding's forward alone, as in a tick that needs none."""
    return _products(program.embed.products, sizes) + Work(
        num_bytes=EMBED_PASSES * sizes.stream_tokens * (1 + sizes.frames) * sizes.embed * width
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
        pass_time(work.num_bytes, rates),
    )


def pass_time(num_bytes: float, rates: Rates) -> float:
    """Seconds of passes with arithmetic over memory."""
    return num_bytes / (rates.memory_bytes_per_s * rates.pass_share)


def with_launches(
    device_s: float, kernels: float, rates: Rates, implementation: ImplementationProfile
) -> float:
    """Seconds of work including launches by the host.

    At least the longer of device and launch time, at most their sum.

    The host launches ahead of the device only while nothing waits for results, so a p-norm of the
    two times, which lies between these bounds, combines them.
    """
    host_s = kernels * (
        rates.interpreter_launch_s if implementation.launched_by_interpreter else rates.launch_s
    )
    power = rates.launch_overlap
    return (
        (device_s**power + host_s**power) ** (1 / power)
        if host_s and device_s
        else device_s + host_s
    )
