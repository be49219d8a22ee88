"""FLOPs of a decoder, read from its program.

Convention: only matrix products count; a multiplication and an addition are two FLOPs, and backward
counts twice forward, or once where the matrix is not trained. Everything else (norms,
nonlinearities, softmax, embedding lookups, the optimizer) is bound by memory, so it costs bytes,
not FLOPs. Attention is causal: a query counts half of the keys of its sequence, seq_len^2 / 2 pairs
in all. In layers with a window it counts those inside it (`causal_pairs` in
models/fused_attention.py). Documents do not matter. Papers that count attention without its mask
have twice that term.

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
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.layer_program import layer_programs, whole_sizes
from optimus_jax.models.program_reader import ProgramReader
from optimus_jax.models.shapes import model_shapes


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
def _backward_flops(model: ModelConfig, seq_len: int) -> float:
    """Backward FLOPs of the products with a layer's matrices for one sequence. Products with frozen
    matrices have no gradient of the matrix.
    """
    programs = layer_programs(
        model, seq_len=seq_len, precision="bf16", kernel="cudnn", respect_documents=False
    )
    # Under this policy no product with a matrix is computed again.
    backward = programs.under("dots").backward
    return sum(product.flops(whole_sizes(model)) for product in backward.products)


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
    """FLOPs of one training step that count for MFU: 6 per parameter and token, 4 if the parameter
    is frozen, 2 if nothing below it is trained either, plus attention.

    Recomputation is not counted.
    """
    num_frozen, trains_embedding = model.tuning.freeze_layers, model.tuning.trains("embedding")
    if not model.tuning.frozen and not num_frozen:
        layers = model.num_layers * sum(layer_flops(model, seq_len))
        return 3.0 * num_sequences * (layers + seq_len * head_flops(model))
    matrices, core = layer_flops(model, seq_len)
    layer = matrices + _backward_flops(model, seq_len) + 3.0 * core
    frozen_layer = 2.0 * matrices + 3.0 * core if trains_embedding else matrices + core
    layers = (model.num_layers - num_frozen) * layer + num_frozen * frozen_layer
    trains_head = model.tuning.trains("embedding" if model.tied else "head")
    head = (3.0 if trains_head else 2.0) * seq_len * head_flops(model)
    return num_sequences * (layers + head)
