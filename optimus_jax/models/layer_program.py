"""What a device computes, exchanges and saves for one layer, read from the layer's own program.

A layer is traced forward and backward on an abstract mesh that splits every logical axis it can,
once for each kind of model, remat policy, precision and kernel. Primes stand for its sizes: the
factors of a traced number then say which sizes it is a product of, and its value for other sizes,
or for a device that has a part of them, follows without tracing again. Mesh axes of the abstract
mesh are named like the logical axes that they split, so a plan's rules turn every traced collective
into one of its own, or into nothing.

Nothing here names a family. A block of any parts that name their logical axes is read alike.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from optimus_jax.config import AttentionKernel, ModelConfig, Precision, RematPolicy
from optimus_jax.config.axes import FSDP
from optimus_jax.mesh import axes as logical
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.mesh.leaf import trained_of, with_trained
from optimus_jax.mesh.sharding import layouts_of, map_trained
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.blockwise_attention import blocks_of
from optimus_jax.models.families import features_of, has_window, rotated_dims
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.program_reader import (
    PRIMES,
    Amount,
    Product,
    ProgramPart,
    ProgramReader,
    needed,
    traced_on_device,
)
from optimus_jax.models.shapes import Params, model_shapes


class LayerSizes(NamedTuple):
    """The sizes of a layer on one device."""

    rows: float
    """Sequences of a microbatch."""
    embed: float
    """Width of the residual stream."""
    kv_heads: float
    """Key/value heads that its query heads use."""
    group: float
    """Query heads for each of them."""
    stored_kv_heads: float
    """Key/value heads whose weights it stores, where devices share them."""
    half_head: float
    """Half of a head's width."""
    mlp: float
    """Hidden width of the feed-forward."""
    rank: float
    """Inner width of low-rank adapters, if there are any."""

    @property
    def heads(self) -> float:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def head_dim(self) -> float:
        """Width of a head."""
        return 2 * self.half_head


ROWS, EMBED, KV_HEADS, GROUP, STORED_KV_HEADS, HALF_HEAD, MLP, RANK = range(len(LayerSizes._fields))
"""Positions in `LayerSizes`."""
WAYS = 2
"""Devices along each axis of the abstract mesh."""


def matrix_products(part: ProgramPart, *, of_feed_forward: bool) -> list[Product]:
    """Products with matrices of the feed-forward, or with those of attention."""
    return [
        product
        for product in part.products
        if not product.is_batched
        and any(MLP in amount.factors for amount in product.amounts) == of_feed_forward
    ]


def core_products(part: ProgramPart) -> list[Product]:
    """Products of attention's core."""
    return [product for product in part.products if product.is_batched]


def scores(part: ProgramPart, sizes: LayerSizes) -> float:
    """Elements of the products of queries with keys; 0 if a fused kernel computes them."""
    return sum(
        product.runs * product.rows.of(sizes) * product.columns.of(sizes) * product.count.of(sizes)
        for product in core_products(part)
        if HALF_HEAD in product.inner.factors
    )


def is_of_heads(saved: Amount) -> bool:
    """Whether a saved array holds values of heads: queries, keys, values, or the core's results."""
    return HALF_HEAD in saved.factors and MLP not in saved.factors


@dataclass(frozen=True)
class LayerProgram:
    """One layer of one microbatch on one device: the mean layer, where some have a window or are an
    encoder's."""

    forward: ProgramPart
    backward: ProgramPart
    """Including what it computes again under the remat policy."""
    largest_forward: ProgramPart
    """Forward of the layers that compute most, whose working memory is the largest."""
    saved: tuple[Amount, ...]
    """Bytes of the arrays that forward saves for backward."""
    saved_once: tuple[Amount, ...]
    """Bytes of those that all layers share, such as angles of rotary positions and masks. In these,
    `half_head` is half of the dimensions that positions rotate."""

    def mixed_with(
        self, other: "LayerProgram", share: float, *, largest: "LayerProgram"
    ) -> "LayerProgram":
        """The mean layer, of which `share` are this one, and the rest another.

        Args:
          largest: the one whose working memory is larger.
        """
        both = ((self, share), (other, 1 - share))
        return LayerProgram(
            forward=self.forward.times(share) + other.forward.times(1 - share),
            backward=self.backward.times(share) + other.backward.times(1 - share),
            largest_forward=largest.largest_forward,
            saved=tuple(
                amount._replace(constant=amount.constant * part)
                for program, part in both
                for amount in program.saved
            ),
            saved_once=self.saved_once + other.saved_once,
        )

    def saved_bytes(self, sizes: LayerSizes) -> float:
        """Bytes saved for each layer."""
        return sum(amount.of(sizes) for amount in self.saved)

    def saved_once_bytes(self, model: ModelConfig, sizes: LayerSizes) -> float:
        """Bytes saved once for all layers."""
        rotated = sizes._replace(half_head=rotated_dims(model) / 2)
        return sum(amount.of(rotated) for amount in self.saved_once)


@dataclass(frozen=True, eq=False)
class LayerPrograms:
    """The programs of a kind of layer, by remat policy; compared by identity."""

    kind: ModelConfig
    windowed_share: float
    """Share of the model's layers that have a window."""
    encoder_share: float
    """Share of those that are an encoder's."""
    seq_len: int
    precision: Precision
    kernel: AttentionKernel
    separates_documents: bool
    shares_kv_heads: bool
    length_ways: int
    splits_alike: bool
    code_bytes: float
    """Bytes of an element of a quantised matrix, with its scales."""
    traced: "LayerPrograms | None" = None
    """The same with fewer devices that share the stream's tokens, whose traces serve for these;
    None: these are traced."""

    def under(self, remat: RematPolicy) -> LayerProgram:
        """The program under a remat policy; traced on the first call."""
        return _traced(self, remat)

    def of_sides(self, remat: RematPolicy) -> tuple[LayerProgram, ...]:
        """Those of a layer of the encoder and of one of the decoder; or that of all layers."""
        return _tracer(self.traced or self).of_sides(remat, self.length_ways)


@lru_cache(maxsize=1 << 12)
def layer_programs(
    model: ModelConfig,
    *,
    seq_len: int,
    precision: Precision,
    kernel: AttentionKernel,
    respect_documents: bool = True,
    shares_kv_heads: bool = False,
    length_ways: int = 1,
    splits_alike: bool = True,
) -> LayerPrograms:
    """The programs of a model's layers; models with the same features share them.

    Args:
      seq_len: tokens of an example.
      kernel: attention kernel, xla or cudnn.
      shares_kv_heads: whether key/value heads are fewer than the devices among which the query
        heads are split, so that several devices use the same one.
      length_ways: devices that share the tokens of the residual stream, and then also the heads and
        the feed-forward's width.
      splits_alike: whether the same devices share the heads and the feed-forward's width.
    """
    splits_alike, windowed = splits_alike or length_ways > 1, has_window(model)
    fewest = length_ways
    if kernel == "cudnn" and length_ways > 1:
        # A fused kernel has no blocks of tokens, so the fewest devices stand for any number.
        unit = model.num_kv_heads if shares_kv_heads else 1
        fewest = unit * min(n for n in range(2, length_ways + 1) if length_ways // unit % n == 0)
    kind = _kind(model, seq_len, shares_kv_heads, fewest, splits_alike)

    def programs(ways: int, traced: LayerPrograms | None = None) -> LayerPrograms:
        return _of_kind(
            kind,
            sum(windowed) / len(windowed),
            model.encoder_layers / model.num_layers,
            seq_len,
            precision,
            kernel,
            respect_documents and model.reads_documents,
            shares_kv_heads,
            ways,
            splits_alike,
            _code_bytes(model),
            traced,
        )

    return programs(fewest) if fewest == length_ways else programs(length_ways, programs(fewest))


_of_kind = lru_cache(maxsize=1 << 9)(LayerPrograms)


def whole_sizes(model: ModelConfig, rows: float = 1) -> LayerSizes:
    """The sizes of a layer on one device that has all of it."""
    return sizes_on_device(
        model, rows=rows, heads=model.num_heads, kv_heads=model.num_kv_heads, mlp=model.mlp_dim
    )


def sizes_on_device(
    model: ModelConfig, *, rows: float, heads: int, kv_heads: int, mlp: int
) -> LayerSizes:
    """The sizes of a layer on a device with these query heads, key/value heads and hidden width."""
    return LayerSizes(
        rows=rows,
        embed=model.embed_dim,
        kv_heads=kv_heads,
        group=heads / kv_heads,
        stored_kv_heads=model.num_kv_heads,
        half_head=model.head_dim / 2,
        mlp=mlp,
        rank=model.tuning.rank,
    )


@lru_cache(maxsize=1 << 6)
def _code_bytes(model: ModelConfig) -> float:
    """Bytes of an element of a model's quantised matrices, with the scales that fsdp gathers; 1 if
    there are none.
    """
    if "nf4" not in map(model.tuning.stored_format, ("attention", "mlp")):
        return 1.0
    shapes = model_shapes(replace(model, num_layers=1, vocab_size=8), 8)
    parts = [
        (array, leaf)
        for array, leaf in zip(
            jax.tree.leaves(shapes.params), jax.tree.leaves(shapes.leaves), strict=True
        )
        if array.dtype == jnp.uint8
    ]
    num_bytes = sum(array.size for array, _ in parts)
    return num_bytes / sum(array.size * leaf.values for array, leaf in parts)


def _primes(seq_len: int, model: ModelConfig) -> list[int]:
    """The prime that stands for each of `LayerSizes`: none divides a length in the program."""
    streams, window = _stream_lengths(seq_len, model), features_of(model).window or None
    blocks = [block for length in streams for block in blocks_of(length, length, window)]
    lengths = {*streams, *(block.end_key - block.first_key for block in blocks)}
    usable = (prime for prime in PRIMES if all(length % prime for length in lengths))
    return list(itertools.islice(usable, len(LayerSizes._fields)))


def _stream_lengths(seq_len: int, model: ModelConfig) -> tuple[int, ...]:
    """Tokens of the residual stream, and of its parts if there is an encoder."""
    frames = model.frames
    return (seq_len, frames, seq_len - frames) if frames else (seq_len,)


def _kind(
    model: ModelConfig, seq_len: int, shares_kv_heads: bool, length_ways: int, splits_alike: bool
) -> ModelConfig:
    """A model of one layer of each type, the same for all models with these features: on each
    device of the abstract mesh, primes are its sizes.
    """
    windowed = has_window(model)
    primes, differ = _primes(seq_len, model), any(windowed) and not all(windowed)
    has_encoder = bool(model.encoder_layers)
    has_groups = shares_kv_heads or model.num_heads != model.num_kv_heads
    group = primes[GROUP] if has_groups else 1
    # The number of devices is given, and no multiple of a prime, if they share tokens.
    if not shares_kv_heads:
        heads_ways = length_ways if length_ways > 1 else WAYS
        kv_heads = heads_ways * primes[KV_HEADS]
        heads = kv_heads * group
    else:
        kv_heads = model.num_kv_heads if length_ways > 1 else primes[STORED_KV_HEADS]
        heads_ways = length_ways if length_ways > 1 else WAYS * kv_heads
        heads = heads_ways * group
    return ModelConfig(
        name="traced",
        family=model.family,
        vocab_size=8,
        num_layers=2 if differ or has_encoder else 1,
        encoder_layers=int(has_encoder),
        frames=model.frames,
        embed_dim=WAYS * primes[EMBED],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2 * primes[HALF_HEAD],
        mlp_dim=(heads_ways if splits_alike else WAYS) * primes[MLP],
        max_length=model.frames + 8,
        dropout=0.0,
        features=replace(
            model.features,
            rope_dims=0,
            layer_types=("window", "full")
            if differ
            else ("window",)
            if any(windowed)
            else ("full",),
        ),
        tuning=replace(
            model.tuning,
            rank=primes[RANK],
            alpha=1.0,
            dropout=0.0,
            # Of primes there are no blocks.
            base_precision="int8"
            if model.tuning.base_precision == "nf4"
            else model.tuning.base_precision,
        ),
    )


class _Tracer:
    """Traces a layer of one kind, on one device of an abstract mesh; with an encoder, one of each
    side.
    """

    def __init__(self, programs: LayerPrograms):
        model = programs.kind
        self.primes = primes = _primes(programs.seq_len, model)
        self.programs = programs
        self.traced: dict[tuple[RematPolicy, int], Any] = {}
        # A device has the whole width of the stream, of which fsdp stores a part.
        sizes = [
            (prime, WAYS * prime if size == EMBED else prime) for size, prime in enumerate(primes)
        ]
        self.read = ProgramReader(sizes, programs.windowed_share, programs.code_bytes)
        self.read_full = ProgramReader(sizes, 0.0, programs.code_bytes)
        """Reads a layer without a window."""
        rules = {
            logical.BATCH: (FSDP,),
            logical.EMBED: (FSDP,),
            logical.HEADS: (logical.HEADS,),
            logical.MLP: (logical.MLP,),
        }
        if not programs.shares_kv_heads:
            rules[logical.KV_HEADS] = (logical.HEADS,)
        if programs.splits_alike:
            rules[logical.MLP] = (logical.HEADS,)
        if programs.length_ways > 1:
            rules[logical.LENGTH] = (logical.HEADS,)
        local_heads = (
            primes[GROUP]
            if programs.shares_kv_heads
            else primes[KV_HEADS] * (model.num_heads // model.num_kv_heads)
        )
        self.axes = {FSDP: WAYS, logical.HEADS: model.num_heads // local_heads, logical.MLP: WAYS}
        # One layer is traced, and which type it has is a value in the program; but what one of an
        # encoder computes is another program than what one of a decoder does.
        layers = range(model.num_layers if model.encoder_layers else 1)
        self.shapes = [model_shapes(model, model.vocab_size, slots=(layer,)) for layer in layers]
        self.layouts = layouts_of(self.shapes[0].leaves, rules, 3)
        dtype = COMPUTE_DTYPES[programs.precision]
        self.comm = Collectives(jnp.dtype(dtype), rules, 3)
        self.stream = jax.ShapeDtypeStruct(
            (WAYS * primes[ROWS], programs.seq_len, model.embed_dim), dtype
        )

    def under(self, remat: RematPolicy, length_ways: int) -> LayerProgram:
        """The program under a remat policy, where that many devices share the stream's tokens."""
        layers = self.of_sides(remat, length_ways)
        if len(layers) == 1:
            return layers[0]
        encoder, decoder = layers
        share = self.programs.encoder_share
        return encoder.mixed_with(decoder, share, largest=max(layers, key=self._forward_flops))

    def of_sides(self, remat: RematPolicy, length_ways: int) -> tuple[LayerProgram, ...]:
        """`LayerPrograms.of_sides`, where that many devices share the stream's tokens."""
        return tuple(self._of(layer, remat, length_ways) for layer in range(len(self.shapes)))

    def _forward_flops(self, layer: LayerProgram) -> float:
        return sum(product.flops(self.primes) for product in layer.forward.products)

    def _of(self, layer: int, remat: RematPolicy, length_ways: int) -> LayerProgram:
        """The program of one of the traced layers."""
        if (remat, layer) not in self.traced:
            self.traced[remat, layer] = self._jaxpr(layer, remat)
        traced, seq_len = self.traced[remat, layer], self.programs.seq_len
        own = {
            length // self.programs.length_ways: length
            for length in _stream_lengths(seq_len, self.programs.kind)
        }
        whole, first = needed(traced), needed(traced, results=2)
        forward = self.read.part(first)
        saved, saved_once = [], []
        # The first results are the layer's output, its auxiliary sums, and the gradients of trained
        # parameters and input.
        shapes = self.shapes[layer]
        num_trained = len(jax.tree.leaves(trained_of(shapes.leaves, shapes.params)))
        for variable in whole.outvars[3 + num_trained :]:
            shape = list(variable.aval.shape[1:])
            # Of the stream [layer, row, token, ...] a device has its own tokens.
            if shape[2:] and shape[2] in own:
                shape[2] = own[shape[2]] // length_ways
            amount = self.read.amount(math.prod(shape) * variable.aval.dtype.itemsize)
            # Others are weights, and numbers of a layer, such as whether it has a window.
            if ROWS in amount.factors:
                (saved if shape[0] == 1 else saved_once).append(amount)
        backward = self.read.part(whole).without(forward)
        largest = self.read_full.part(first) if self.programs.kind.num_layers > 1 else forward
        return LayerProgram(forward, backward, largest, tuple(saved), tuple(saved_once))

    def _jaxpr(self, layer: int, remat: RematPolicy) -> Any:
        """A traced layer: its output, the total of its auxiliary sums, the gradients of trained
        parameters and input, and what forward saves.
        """
        kernel, shapes = self.programs.kernel, self.shapes[layer]

        def on_device(
            params: Params, positions: Array, segments: Array, x: Array, cotangent: Array
        ) -> Any:
            run = ForwardContext(
                comm=self.comm,
                remat=remat,
                kernel="traced_cudnn" if kernel == "cudnn" else kernel,
                visibility=Visibility(segments if self.programs.separates_documents else None),
            )
            trained = map_trained(
                lambda layout, param: layout.differentiated(param), self.layouts, params
            )

            def layer(trained: Params, x: Array) -> tuple[Array, Array]:
                out = shapes.merged(with_trained(trained, params)).run_some_layers(
                    x, positions, run, jnp.asarray(shapes.slots), all_full=True
                )
                return out.x_BLD, sum(out.auxiliary.values(), jnp.float32(0))

            (out, auxiliary), pull = jax.vjp(layer, trained, x)
            gradients = pull((cotangent, jnp.ones_like(auxiliary)))
            return out, auxiliary, gradients, jax.tree.leaves(pull)

        specs = jax.tree.map(lambda layout: layout.param_spec, self.layouts)
        rows = PartitionSpec(FSDP)
        stream = PartitionSpec(FSDP, logical.HEADS) if self.programs.length_ways > 1 else rows
        ids = jax.ShapeDtypeStruct(self.stream.shape[:2], jnp.int32)
        return traced_on_device(
            on_device,
            self.axes,
            (specs, rows, rows, stream, stream),
            *(shapes.params, ids, ids, self.stream, self.stream),
        )


_tracer = lru_cache(maxsize=1 << 7)(_Tracer)


@lru_cache(maxsize=1 << 9)
def _traced(programs: LayerPrograms, remat: RematPolicy) -> LayerProgram:
    return _tracer(programs.traced or programs).under(remat, programs.length_ways)
