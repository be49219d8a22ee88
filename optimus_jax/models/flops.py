"""FLOPs of a decoder, read from its program.

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
def head_flops(model: ModelConfig) -> Passes:
    """FLOPs of a token outside the layers: its logits, and projections between the embedding's
    width and the stream's.
    """
    shapes = model_shapes(replace(model, num_layers=1), model.vocab_size)
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

    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    d_logits = jax.ShapeDtypeStruct((1, 1, model.num_outputs), jnp.float32)
    values = (1, 1, model.patch_values)
    patches = jax.ShapeDtypeStruct(values, jnp.float32) if model.image_size else None
    jaxpr = jax.make_jaxpr(both_passes)(shapes.params, token, d_logits, patches).jaxpr
    forward, whole = (
        sum(product.flops(()) for product in ProgramReader().part(needed(jaxpr, results)).products)
        for results in (1, None)
    )
    return Passes(forward, whole - forward)


def step_flops(
    model: ModelConfig, *, num_sequences: int, seq_len: int, num_references: int = 0
) -> float:
    """FLOPs of one training step that count for MFU: 6 per parameter and token, 4 if the parameter
    is frozen, 2 if nothing below it is trained either, plus attention.

    Recomputation is not counted.

    Args:
      num_references: how often the tokens also run forward through the model without its adapters
        (`Task.num_references`).
    """
    num_frozen, num_tokens = model.tuning.freeze_layers, float(num_sequences * seq_len)
    layers = (model.num_layers - num_frozen) * sum(layer_passes(model, seq_len))
    layers += num_frozen * sum(_frozen_layer_passes(model, seq_len))
    flops = num_sequences * layers + num_tokens * sum(head_flops(model))
    if num_references:
        base = model.base
        layers = float(model.num_layers) * layer_passes(base, seq_len).forward
        forward = num_sequences * layers + num_tokens * head_flops(base).forward
        flops += num_references * forward
    return flops


def _frozen_layer_passes(model: ModelConfig, seq_len: int) -> Passes:
    """`layer_passes` of one of the lowest layers that are not trained."""
    matrices, core = layer_flops(model, seq_len)
    reaches_embedding = model.tuning.trains("embedding")
    return Passes(matrices + core, matrices + 2.0 * core if reaches_embedding else 0.0)
