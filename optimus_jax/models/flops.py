"""FLOPs of a decoder, read from its program.

Convention: only matrix products count; a multiplication and an addition are two FLOPs, and backward
counts twice forward. Everything else (norms, nonlinearities, softmax, embedding lookups, the
optimizer) is bound by memory, so it costs bytes, not FLOPs. Attention is causal: a query counts
half of the keys of its sequence, seq_len^2 / 2 pairs in all. Papers that count attention without
its mask have twice that term.

The FLOPs *computed* differ from those that count in two ways: an attention kernel computes some
pairs that the mask then hides, and remat computes parts of forward again.
`tests/planning/test_model_profile.py` compares both with the products in compiled programs.

Source: FLOP counts of Narayanan et al. 2021 (arXiv:2104.04473), for grouped heads and gates.
"""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.families import features_of, has_window
from optimus_jax.models.layer_program import layer_programs, whole_sizes
from optimus_jax.models.program_reader import ProgramReader
from optimus_jax.models.shapes import model_shapes
from optimus_jax.models.transformer import ForwardContext


def causal_pairs(seq_len: int) -> float:
    """Pairs of query and key that count in one sequence, whatever documents it holds."""
    return seq_len**2 / 2


def counted_pairs(model: ModelConfig, seq_len: int) -> float:
    """The mean over layers of the pairs that count in one sequence: in layers with a window, those
    inside it.
    """
    window = min(features_of(model).window or seq_len, seq_len)
    share = sum(has_window(model)) / model.num_layers
    inside = causal_pairs(seq_len) - (seq_len - window) ** 2 / 2
    return share * inside + (1 - share) * causal_pairs(seq_len)


@lru_cache(maxsize=256)
def layer_flops(model: ModelConfig, seq_len: int) -> tuple[float, float]:
    """Forward FLOPs of one layer for one sequence: of products with its matrices, and of its
    attention core for one pair of query and key.
    """
    # The fused kernel's trace states its products for any pairs, and is the shortest.
    programs = layer_programs(model, seq_len=seq_len, precision="bf16", kernel="cudnn")
    forward, sizes = programs.under("none").forward, whole_sizes(model)
    matrices = sum(product.flops(sizes) for product in forward.products)
    per_pair = sum(
        2.0 * each.num_products * each.matrices.of(sizes) * each.head_dim.of(sizes)
        for each in forward.fused
    )
    return matrices, per_pair


@lru_cache(maxsize=256)
def head_flops(model: ModelConfig) -> float:
    """Forward FLOPs of a token outside the layers: its logits, and projections between the
    embedding's width and the stream's.
    """
    shapes = model_shapes(replace(model, num_layers=1), model.vocab_size)
    run = ForwardContext(comm=Collectives(jnp.dtype(jnp.float32)))

    def logits(params: dict, ids: jax.Array) -> jax.Array:
        whole = shapes.merged(params)
        stream = whole.embed(ids, ids, run)
        return whole.logits(whole.head_input(stream, run.comm), run)

    traced = jax.make_jaxpr(logits)(shapes.params, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return sum(product.flops(()) for product in ProgramReader().part(traced.jaxpr).products)


def step_flops(model: ModelConfig, *, num_sequences: int, seq_len: int) -> float:
    """FLOPs of one training step that count for MFU: 6 per parameter and token, plus attention.

    Recomputation is not counted.
    """
    matrices, per_pair = layer_flops(model, seq_len)
    layer = matrices + per_pair * counted_pairs(model, seq_len)
    return 3.0 * num_sequences * (model.num_layers * layer + seq_len * head_flops(model))
