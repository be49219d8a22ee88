"""What a device computes and exchanges for embedding, head and loss, read from their program.

They are traced forward and backward on an abstract mesh that splits the vocabulary, once for each
kind of model, task and precision, as a layer is (models/layer_program.py).
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from optimus_jax.config import ModelConfig, Precision
from optimus_jax.config.axes import PIPE, AxisSizes
from optimus_jax.mesh.axes import LENGTH, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.mesh.leaf import trained_of, with_trained
from optimus_jax.mesh.rules import Rules, active_rules, padded_vocab
from optimus_jax.mesh.sharding import layouts_of, map_trained
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.families import features_of, table_width
from optimus_jax.models.program_reader import (
    PRIMES,
    Amount,
    ProgramPart,
    ProgramReader,
    needed,
    traced_on_device,
)
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.models.transformer import Decoder
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.training.task import POLICY, REFERENCE, Batch, LossInputs, Task, embedded

WAYS = 2
"""Devices of the abstract mesh that split the vocabulary and not the tokens of the stream."""


class HeadSizes(NamedTuple):
    """The sizes of embedding and head on one device."""

    stream_tokens: float
    """Tokens of the residual stream of a microbatch; with an encoder, of the text alone."""
    embed: float
    """Width of the residual stream."""
    table: float
    """Width of the embedding's rows."""
    vocab: float
    """Rows of the vocabulary that a device with a head computes."""
    length_ways: float
    """Devices that share the tokens of the residual stream."""
    frames: float = 0.0
    """Frames of sound beside each of these tokens."""


STREAM_TOKENS, FRAMES = map(HeadSizes._fields.index, ("stream_tokens", "frames"))


@dataclass(frozen=True, eq=False)
class HeadProgram:
    """Embedding, head and loss of a microbatch, forward and backward; compared by identity."""

    embed: ProgramPart
    """Forward of the embedding."""
    saved: tuple[Amount, ...]
    """Bytes of the floating arrays of frames that forward of the embedding saves for its
    backward."""
    rest: ProgramPart
    """All else.

    Collectives over LENGTH span the mesh axes that split the tokens of the stream; those over VOCAB
    the other ones that split the vocabulary."""


class VocabSplit(NamedTuple):
    """How devices share the vocabulary."""

    axes: tuple[str, ...]
    """Mesh axes that split it."""
    rows: int
    """Rows that a device with a head computes."""


def head_sizes(
    model: ModelConfig, plan: Plan, layer: LayerShape, implementation: ImplementationProfile
) -> HeadSizes:
    """The sizes for a microbatch under `plan`; `layer` is one device's part of a layer."""
    rows = vocab_split(model, plan, implementation).rows
    width, length_ways = table_width(model), layer.programs.length_ways
    seq_len = layer.programs.seq_len
    of_text = (seq_len - model.frames) / seq_len
    return HeadSizes(
        layer.stream_tokens * of_text,
        model.embed_dim,
        width,
        rows,
        length_ways,
        model.frames / (seq_len - model.frames),
    )


def vocab_split(
    model: ModelConfig, plan: Plan, implementation: ImplementationProfile
) -> VocabSplit:
    """How the plan's devices share the vocabulary."""
    return _vocab_split(model, plan.rules, plan.axes, implementation)


@lru_cache(maxsize=1 << 12)
def _vocab_split(
    model: ModelConfig, rules: Rules, sizes: AxisSizes, implementation: ImplementationProfile
) -> VocabSplit:
    axes = active_rules(rules, sizes, model).get(VOCAB, ())
    if not implementation.head_shared:
        axes = tuple(axis for axis in axes if axis != PIPE)
    ways = math.prod(sizes[axis] for axis in axes)
    whole = padded_vocab(model.vocab_size, rules, sizes)
    rows = whole if implementation.pads_whole_vocab or ways > 1 else model.vocab_size
    return VocabSplit(axes, rows // ways)


@lru_cache(maxsize=1 << 10)
def head_program(workload: Workload, precision: Precision, *, splits_length: bool) -> HeadProgram:
    """The program; models with the same features share one trace.

    Args:
      splits_length: whether devices share the tokens of the residual stream.
    """
    model, primes = workload.model, HeadSizes(*PRIMES[: len(HeadSizes._fields)])
    if not splits_length:
        primes = primes._replace(length_ways=1)
    if not model.frames:
        primes = primes._replace(frames=0)
    frames = int(primes.length_ways * primes.frames)
    kind = ModelConfig(
        name="traced",
        family=model.family,
        vocab_size=WAYS * int(primes.length_ways * primes.vocab),
        num_layers=2 if model.frames else 1,
        encoder_layers=1 if model.frames else 0,
        frames=frames,
        mel_bins=model.mel_bins,
        embed_dim=int(primes.embed),
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        mlp_dim=1,
        max_length=2 if model.image_size else frames + 8,
        image_size=model.patch_size if model.image_size else 0,
        patch_size=model.patch_size,
        num_channels=model.num_channels,
        dropout=0.0,
        tied=model.tied,
        labels=model.labels,
        labelled=model.labelled,
        features=replace(
            model.features,
            rope_dims=0,
            table_dim=int(primes.table) if features_of(model).table_dim else 0,
        ),
        tuning=replace(
            model.tuning,
            rank=1,
            alpha=1.0,
            dropout=0.0,
            base_precision="f32" if model.tuning.base_precision == "f32" else "bf16",
        ),
    )
    ways = int(primes.length_ways)
    return _traced(kind, workload.task, precision, int(primes.stream_tokens), ways)


@lru_cache(maxsize=1 << 7)
def _traced(
    kind: ModelConfig, task: Task, precision: Precision, stream_tokens: int, length_ways: int
) -> HeadProgram:
    rules = {VOCAB: (VOCAB, LENGTH), LENGTH: (LENGTH,)} if length_ways > 1 else {VOCAB: (VOCAB,)}
    shapes, comm = (
        model_shapes(kind, kind.vocab_size),
        Collectives(jnp.dtype(COMPUTE_DTYPES[precision]), rules),
    )
    layouts = layouts_of(shapes.leaves, rules, 0)

    def on_device(params: Params, rows: Batch) -> tuple:
        def decoder(trained: Params) -> Decoder:
            return shapes.module(with_trained(trained, params), comm)

        def embed(trained: Params) -> Array:
            run = ForwardContext(comm=comm)
            return embedded(decoder(trained), rows, run)

        def loss(trained: Params, stream: Array) -> Array:
            streams = {POLICY: stream, REFERENCE: jax.lax.stop_gradient(stream)}
            inputs = LossInputs(
                model=decoder(trained),
                value=streams if task.has_reference else stream,
                rows=rows,
                comm=comm,
                weight=1.0,
                chunk_tokens=stream_tokens * length_ways,
            )
            return task.loss(inputs).loss

        trained = map_trained(lambda layout, param: layout.differentiated(param), layouts, params)
        stream, pull_embed = jax.vjp(embed, trained)
        value, pull = jax.vjp(loss, trained, stream)
        d_trained, d_stream = pull(jnp.ones_like(value))
        saved = [each for each in jax.tree.leaves(pull_embed) if jnp.issubdtype(each, jnp.floating)]
        return stream, value, d_trained, d_stream, pull_embed(d_stream), saved

    specs = jax.tree.map(lambda layout: layout.param_spec, layouts)
    rows = {
        name: jax.ShapeDtypeStruct(
            array.shape(stream_tokens, length_ways + kind.frames, kind.patch_values), array.dtype
        )
        for name, array in task.arrays.items()
    }
    axes = {VOCAB: WAYS, LENGTH: length_ways}
    jaxpr = traced_on_device(on_device, axes, (specs, PartitionSpec()), shapes.params, rows)
    read = ProgramReader([(prime, prime) for prime in PRIMES[: len(HeadSizes._fields)]])
    embed = read.part(needed(jaxpr, results=1))
    whole = needed(jaxpr)
    sizes = [math.prod(each.aval.shape) * each.aval.dtype.itemsize for each in whole.outvars]
    # After the stream, the loss and the gradients follow arrays that are saved, weights among them.
    num_trained = len(jax.tree.leaves(trained_of(shapes.leaves, shapes.params)))
    saved = map(read.amount, sizes[3 + 2 * num_trained :])
    saved = tuple(amount for amount in saved if {STREAM_TOKENS, FRAMES} <= {*amount.factors})
    return HeadProgram(embed, saved, read.part(whole).without(embed))
