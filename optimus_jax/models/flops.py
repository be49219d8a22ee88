"""FLOPs of a model, read from its program.

Convention: only matrix products count, and a multiplication and an addition are two FLOPs. Those of
backward are read from its program too: twice forward, or once where the matrix is not trained.
Attention's core has no matrix, and its backward counts twice forward. Everything else (norms,
nonlinearities, softmax, embedding lookups, the optimizer) is bound by memory, so it costs bytes,
not FLOPs. In causal attention a query counts half of the keys of its sequence, seq_len^2 / 2 pairs
in all, and in layers with a window those inside it (`causal_pairs` in models/fused_attention.py);
in other attention it counts all. Documents do not matter. Papers that count causal attention
without its mask have twice that term.

The FLOPs *computed* differ from those that count in two ways: an attention kernel computes some
pairs that the mask then hides, and remat computes parts of forward again.
`tests/planning/test_model_profile.py` compares both with the products in compiled programs.

Source: FLOP counts of Narayanan et al. 2021 (arXiv:2104.04473), for grouped heads and gates.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.leaf import trained_of, with_trained
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.families import generator_of
from optimus_jax.models.layer_program import layer_programs, whole_sizes
from optimus_jax.models.program_reader import ProgramReader, needed
from optimus_jax.models.shapes import Params, model_shapes


class Passes(NamedTuple):
    """FLOPs of the two passes."""

    forward: float
    backward: float
    """Products with frozen matrices have no gradient of the matrix."""


@lru_cache(maxsize=256)
def layer_flops(model: ModelConfig, seq_len: int) -> tuple[float, float]:
    """Forward FLOPs of the mean layer for one sequence that count: of products with its matrices,
    and of its attention core.
    """
    # The fused kernel's trace states its products for the visible pairs alone, and is the shortest.
    programs = layer_programs(
        model, seq_len=seq_len, precision="bf16", kernel="cudnn", respect_documents=False
    )
    forward, sizes = programs.under("none").forward, whole_sizes(model)
    matrices = sum(product.flops(sizes) for product in forward.products)
    return matrices, sum(each.flops(sizes) for each in forward.fused)


@lru_cache(maxsize=256)
def layer_shares(model: ModelConfig, seq_len: int) -> tuple[float, ...]:
    """Forward FLOPs of each layer, in those of the mean layer: all 1, if there is no encoder."""
    if not model.encoder_layers:
        return (1.0,) * model.num_layers
    programs = layer_programs(
        model, seq_len=seq_len, precision="bf16", kernel="cudnn", respect_documents=False
    )
    sizes, mean = whole_sizes(model), sum(layer_flops(model, seq_len))
    encoder, decoder = (
        sum(each.flops(sizes) for each in (*side.forward.products, *side.forward.fused)) / mean
        for side in programs.of_sides("none")
    )
    return (encoder,) * model.encoder_layers + (decoder,) * (
        model.num_layers - model.encoder_layers
    )


@lru_cache(maxsize=256)
def layer_passes(model: ModelConfig, seq_len: int) -> Passes:
    """FLOPs of the mean layer for one sequence that count."""
    matrices, core = layer_flops(model, seq_len)
    programs = layer_programs(
        model, seq_len=seq_len, precision="bf16", kernel="cudnn", respect_documents=False
    )
    # Under this policy no product with a matrix is computed again.
    backward = programs.under("dots").backward
    of_matrices = sum(product.flops(whole_sizes(model)) for product in backward.products)
    return Passes(matrices + core, of_matrices + 2.0 * core)


@lru_cache(maxsize=256)
def outer_flops(model: ModelConfig, seq_len: int) -> Passes:
    """FLOPs of one sequence outside the layers: its logits, projections between the embedding's
    width and the stream's, and convolutions of sound.
    """
    # Without an encoder all tokens are alike, and one of them is traced.
    length = seq_len if model.frames else 1
    has_encoder = int(model.frames > 0)
    fewest = replace(model, num_layers=1 + has_encoder, encoder_layers=has_encoder)
    shapes = model_shapes(fewest, model.vocab_size)
    run = ForwardContext(comm=Collectives(jnp.dtype(jnp.float32)))

    def both_passes(params: Params, ids: Array, d_logits: Array, patches: Array | None) -> tuple:
        trained = trained_of(shapes.leaves, params)

        def embed(trained: Params) -> Array:
            whole = shapes.merged(with_trained(trained, params))
            return whole.embed(ids, ids, run, patches_BLP=patches)

        def head(trained: Params, stream: Array) -> Array:
            whole = shapes.merged(with_trained(trained, params))
            return whole.logits(whole.head_input(stream, run.comm), run)

        stream, pull_embed = jax.vjp(embed, trained)
        logits, pull_head = jax.vjp(head, trained, stream)
        d_trained, d_stream = pull_head(d_logits)
        return logits, d_trained, d_stream, pull_embed(d_stream)

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    d_logits = jax.ShapeDtypeStruct((1, length - model.frames, model.num_outputs), jnp.float32)
    values = (1, length, model.patch_values)
    patches = jax.ShapeDtypeStruct(values, jnp.float32) if model.patch_values else None
    jaxpr = jax.make_jaxpr(both_passes)(shapes.params, tokens, d_logits, patches).jaxpr
    forward, whole = (
        sum(product.flops(()) for product in ProgramReader().part(needed(jaxpr, results)).products)
        for results in (1, None)
    )
    times = seq_len / length
    return Passes(times * forward, times * (whole - forward))


def step_flops(
    model: ModelConfig, *, num_sequences: int, seq_len: int, num_references: int = 0
) -> float:
    """FLOPs of one training step that count for MFU: 6 per parameter and token, 4 if the parameter
    is frozen, 2 if nothing below it is trained either, plus attention; those of a generator too.

    Recomputation is not counted.

    Args:
      num_references: how often the tokens also run forward through the model without its adapters
        (`Task.num_references`).
    """
    num_frozen, times = model.tuning.freeze_layers, float(num_sequences)
    layers = (model.num_layers - num_frozen) * sum(layer_passes(model, seq_len))
    layers += num_frozen * sum(_frozen_layer_passes(model, seq_len))
    flops = times * (layers + sum(outer_flops(model, seq_len)))
    if num_references:
        base = model.base
        layers = float(model.num_layers) * layer_passes(base, seq_len).forward
        flops += num_references * times * (layers + outer_flops(base, seq_len).forward)
    if (generator := generator_of(model)) is not None:
        flops += step_flops(generator, num_sequences=num_sequences, seq_len=seq_len)
    return flops


def _frozen_layer_passes(model: ModelConfig, seq_len: int) -> Passes:
    """`layer_passes` of one of the lowest layers that are not trained."""
    matrices, core = layer_flops(model, seq_len)
    reaches_embedding = model.tuning.trains("embedding")
    return Passes(matrices + core, matrices + 2.0 * core if reaches_embedding else 0.0)
