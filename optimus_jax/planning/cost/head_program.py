"""What a device computes and exchanges for embedding, head and loss, read from their program.

They are traced forward and backward on an abstract mesh that splits the vocabulary, once for each
kind of model and precision, as a layer is (models/layer_program.py).
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
from optimus_jax.mesh.rules import Rules, active_rules, padded_vocab
from optimus_jax.mesh.sharding import layouts_of
from optimus_jax.models.families import features_of, table_width
from optimus_jax.models.program_reader import (
    PRIMES,
    Product,
    ProgramReader,
    TracedCollective,
    needed,
    traced_on_device,
)
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.models.transformer import ForwardContext
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.training.task import Batch, LossInputs, task_named

NEXT_TOKEN = "next_token"
"""The task that is priced."""
WAYS = 2
"""Devices of the abstract mesh."""


class HeadSizes(NamedTuple):
    """The sizes of embedding and head on one device."""

    stream_tokens: float
    """Tokens of the residual stream of a microbatch."""
    embed: float
    """Width of the residual stream."""
    table: float
    """Width of the embedding's rows."""
    vocab: float
    """Rows of the vocabulary that a device with a head computes."""


@dataclass(frozen=True, eq=False)
class HeadProgram:
    """Embedding, head and loss of a microbatch, forward and backward; compared by identity."""

    products: tuple[Product, ...]
    collectives: tuple[TracedCollective, ...]
    """Those over LENGTH span the mesh axes that split the tokens of the stream; those over VOCAB
    the other ones that split the vocabulary."""
    length_ways: int
    """Devices that share the tokens of the residual stream."""


def head_sizes(
    model: ModelConfig, plan: Plan, stream_tokens: float, implementation: ImplementationProfile
) -> HeadSizes:
    """The sizes for a microbatch with that many tokens of the residual stream on one device."""
    _, rows = _vocab(model, plan.rules, plan.axes, implementation)
    return HeadSizes(stream_tokens, model.embed_dim, table_width(model), rows)


def vocab_axes(
    model: ModelConfig, plan: Plan, implementation: ImplementationProfile
) -> tuple[str, ...]:
    """Mesh axes that split the vocabulary."""
    return _vocab(model, plan.rules, plan.axes, implementation)[0]


@lru_cache(maxsize=1 << 12)
def _vocab(
    model: ModelConfig, rules: Rules, sizes: AxisSizes, implementation: ImplementationProfile
) -> tuple[tuple[str, ...], int]:
    """Mesh axes that split the vocabulary, and rows that a device with a head computes."""
    axes = active_rules(rules, sizes, model).get(VOCAB, ())
    if not implementation.head_shared:
        axes = tuple(axis for axis in axes if axis != PIPE)
    ways = math.prod(sizes[axis] for axis in axes)
    whole = padded_vocab(model.vocab_size, rules, sizes)
    return axes, (
        whole if implementation.pads_whole_vocab or ways > 1 else model.vocab_size
    ) // ways


@lru_cache(maxsize=1 << 10)
def head_program(model: ModelConfig, precision: Precision, length_ways: int = 1) -> HeadProgram:
    """The program; models with the same features share one trace."""
    _, embed, table, vocab = PRIMES[: len(HeadSizes._fields)]
    has_table = bool(features_of(model).table_dim)
    kind = ModelConfig(
        name="traced",
        family=model.family,
        vocab_size=WAYS * length_ways * vocab,
        num_layers=1,
        embed_dim=embed,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        mlp_dim=1,
        max_length=8,
        dropout=0.0,
        tied=model.tied,
        features=replace(model.features, rope_dims=0, table_dim=table if has_table else 0),
    )
    return _traced(kind, precision, length_ways)


@lru_cache(maxsize=1 << 7)
def _traced(kind: ModelConfig, precision: Precision, length_ways: int) -> HeadProgram:
    primes, dtype = PRIMES[: len(HeadSizes._fields)], jnp.dtype(COMPUTE_DTYPES[precision])
    rules = {VOCAB: (VOCAB, LENGTH), LENGTH: (LENGTH,)} if length_ways > 1 else {VOCAB: (VOCAB,)}
    shapes = model_shapes(kind, kind.vocab_size)
    layouts, comm = layouts_of(shapes.names, rules, 0), Collectives(dtype, rules)

    task = task_named(NEXT_TOKEN)

    def on_device(params: Params, rows: Batch) -> tuple:
        def loss(whole: Params) -> Array:
            model = shapes.merged(shapes.whole_outside_layers(whole, comm))
            run = ForwardContext(comm=comm)
            stream = model.embed(rows["tokens"], rows["positions"], run)
            inputs = LossInputs(
                model=model,
                value=stream,
                rows=rows,
                comm=comm,
                weight=1.0,
                chunk_tokens=primes[0] * length_ways,
            )
            return task.loss(inputs).loss

        differentiated = jax.tree.map(
            lambda layout, param: layout.differentiated(param), layouts, params
        )
        return jax.value_and_grad(loss)(differentiated)

    specs = jax.tree.map(lambda layout: layout.param_spec, layouts)
    rows = {
        name: jax.ShapeDtypeStruct(array.shape(primes[0], length_ways), array.dtype)
        for name, array in task.arrays.items()
    }
    axes = {VOCAB: WAYS, LENGTH: length_ways}
    jaxpr = traced_on_device(on_device, axes, (specs, PartitionSpec()), shapes.params, rows)
    part = ProgramReader([(prime, prime) for prime in primes]).part(needed(jaxpr))
    return HeadProgram(part.products, part.collectives, length_ways)
