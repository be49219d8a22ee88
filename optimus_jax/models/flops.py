"""Floating-point operations of a decoder in closed form: what counts for MFU, and what a device
really computes.

Convention: only products of matrices count, a multiplication and an addition as two; backward
counts twice forward. All else (norms, nonlinearities, softmax, rows of the embedding, the
optimizer) is bound by memory, so its price is bytes, not FLOPs. Attention is causal: a query counts
for half of the keys of its sequence, seq_len^2 / 2 pairs in all. Papers that count attention
without its mask have twice that term.

What is *computed* differs from what counts in two ways: a kernel of attention computes pairs that
the mask then hides, and remat computes parts of forward again.
`tests/planning/test_model_profile.py` holds both to the products in compiled programs.

Source: FLOP counts of Narayanan et al. 2021 (arXiv:2104.04473), for grouped heads and gates.
"""

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.models.families import family_of
from optimus_jax.models.kernels import block_size

FORWARD_CORE_MATMULS = 2
"""Products of a query block in attention's core: queries with keys, weights with values. Backward
has twice as many."""
CUDNN_BACKWARD_AGAIN = 1
"""The fused kernel keeps no weights, so its backward computes queries with keys again
(arXiv:2205.14135, algorithm 4)."""


def attention_params(model: ModelConfig) -> int:
    """Elements of one layer's projections to queries, keys and values and back, biases not
    counted."""
    return model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)


def mlp_matrices(model: ModelConfig) -> int:
    """Matrices of the feed-forward block that lead to its hidden width: two with a gate."""
    return 2 if family_of(model.family).activation == "swiglu" else 1


def feed_forward_params(model: ModelConfig) -> int:
    """Elements of one layer's feed-forward matrices, biases not counted."""
    return model.embed_dim * model.mlp_dim * (mlp_matrices(model) + 1)


def head_params(model: ModelConfig) -> int:
    """Elements of the head's matrix, which may be the embedding's."""
    return model.embed_dim * model.vocab_size


def matmul_params(model: ModelConfig) -> int:
    """Parameters that every token is multiplied by: projections, feed-forward and head; not the
    embedding's rows.
    """
    return model.num_layers * (attention_params(model) + feed_forward_params(model)) + head_params(
        model
    )


def causal_pairs(seq_len: int) -> float:
    """Pairs of query and key that count, in one sequence; documents not regarded."""
    return seq_len**2 / 2


def computed_pairs(seq_len: int, kernel: AttentionKernel) -> float:
    """Pairs that `kernel` computes in one sequence.

    `xla` computes whole blocks: a block of queries with every key up to its last query
    (models/kernels.py). `cudnn` is taken to skip all that the mask hides; what its tiles compute
    beyond that is not published.
    """
    if kernel == "cudnn":
        return causal_pairs(seq_len)
    num_blocks = seq_len // block_size(seq_len)
    return seq_len**2 * (num_blocks + 1) / (2 * num_blocks)


def core_flops(model: ModelConfig, pairs: float) -> float:
    """Forward of one layer's attention core, for that many pairs of query and key."""
    return 2.0 * FORWARD_CORE_MATMULS * model.num_heads * model.head_dim * pairs


def recomputed_core_flops(
    model: ModelConfig, pairs: float, remat: RematPolicy, kernel: AttentionKernel
) -> float:
    """What backward of one layer's attention core computes a second time.

    Every policy but `none` runs its forward again.
    """
    in_kernel = CUDNN_BACKWARD_AGAIN / FORWARD_CORE_MATMULS if kernel == "cudnn" else 0
    return core_flops(model, pairs) * (in_kernel + (remat != "none"))


def recomputed_params(model: ModelConfig, remat: RematPolicy) -> tuple[int, int]:
    """Elements of one layer's matrices, of attention and of feed-forward, whose products backward
    computes a second time.

    Under `full` these are all but the last matrix's: its product is added to the residual, which
    backward does not need.
    """
    if remat != "full":
        return 0, 0
    return attention_params(model), model.embed_dim * model.mlp_dim * mlp_matrices(model)


def step_flops(model: ModelConfig, *, num_sequences: int, seq_len: int) -> float:
    """FLOPs of one training step that count for MFU: 6 per parameter and token, and attention;
    nothing twice.
    """
    attention = 3 * model.num_layers * core_flops(model, num_sequences * causal_pairs(seq_len))
    return 6.0 * matmul_params(model) * num_sequences * seq_len + attention
