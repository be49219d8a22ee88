"""Closed-form FLOPs of a decoder: those that count for MFU, and those that a device computes.

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

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.models.families import features_of, has_window, table_width
from optimus_jax.models.kernels import block_size

FORWARD_CORE_MATMULS = 2
"""Matrix products in the core of attention: queries with keys, and weights with values. Backward
has twice as many."""
CUDNN_BACKWARD_AGAIN = 1
"""Matrix products that the backward of the fused kernel computes again: queries with keys, since it
keeps no attention weights (arXiv:2205.14135, algorithm 4)."""


def attention_params(model: ModelConfig) -> int:
    """Elements of one layer's attention projections (query, key, value, output); no biases."""
    return model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)


def mlp_matrices(model: ModelConfig) -> int:
    """Number of feed-forward matrices that lead to the hidden width: 1, or 2 with a gate."""
    return 2 if features_of(model).gated else 1


def feed_forward_params(model: ModelConfig) -> int:
    """Elements of one layer's feed-forward matrices, without biases."""
    return model.embed_dim * model.mlp_dim * (mlp_matrices(model) + 1)


def head_params(model: ModelConfig) -> int:
    """Elements of the head's matrix, which is the embedding if weights are tied; and of the
    projections between the embedding's width and the residual stream's, if these differ.
    """
    width = table_width(model)
    between = 2 * model.embed_dim * width if width != model.embed_dim else 0
    return width * model.vocab_size + between


def matmul_params(model: ModelConfig) -> int:
    """Parameters that every token is multiplied by: attention, feed-forward and head matrices.

    The embedding is not counted: its rows are looked up.
    """
    return model.num_layers * (attention_params(model) + feed_forward_params(model)) + head_params(
        model
    )


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


def computed_pairs(seq_len: int, kernel: AttentionKernel) -> float:
    """Pairs of query and key that `kernel` computes in one sequence.

    `xla` computes whole blocks: a block of queries with every key up to its last query
    (models/kernels.py). `cudnn` is assumed to skip every masked pair; how many its tiles compute
    beyond that is not published.
    """
    if kernel == "cudnn":
        return causal_pairs(seq_len)
    num_blocks = seq_len // block_size(seq_len)
    return seq_len**2 * (num_blocks + 1) / (2 * num_blocks)


def core_flops(model: ModelConfig, pairs: float) -> float:
    """Forward FLOPs of one layer's attention core for `pairs` pairs of query and key."""
    return 2.0 * FORWARD_CORE_MATMULS * model.num_heads * model.head_dim * pairs


def recomputed_core_flops(
    model: ModelConfig, pairs: float, remat: RematPolicy, kernel: AttentionKernel
) -> float:
    """FLOPs of one layer's attention core that backward computes a second time.

    Every remat policy except `none` runs the core's forward again. Without remat, backward needs
    the products of queries and keys where scores are capped, as cuDNN's kernel always does.
    """
    is_capped = bool(features_of(model).attention_softcap)
    again = kernel == "cudnn" or (remat == "none" and is_capped)
    in_kernel = CUDNN_BACKWARD_AGAIN / FORWARD_CORE_MATMULS if again else 0
    return core_flops(model, pairs) * (in_kernel + (remat != "none"))


def recomputed_params(model: ModelConfig, remat: RematPolicy) -> tuple[int, int]:
    """Elements of one layer's matrices whose products backward computes a second time.

    Returns:
      (elements of attention, elements of feed-forward). With remat `full` these are all matrices
      except those whose product is only added to the residual: backward does not need it. These
      are the last matrix, and the last of attention where both are added together, unless a norm
      follows.
    """
    if remat != "full":
        return 0, 0
    features = features_of(model)
    is_normed = features.norm_place != "pre"
    attention, feed_forward = attention_params(model), feed_forward_params(model)
    if not is_normed:
        feed_forward -= model.embed_dim * model.mlp_dim
        if features.parallel:
            attention -= model.embed_dim * model.num_heads * model.head_dim
    return attention, feed_forward


def step_flops(model: ModelConfig, *, num_sequences: int, seq_len: int) -> float:
    """FLOPs of one training step that count for MFU: 6 per parameter and token, plus attention.

    Recomputation is not counted.
    """
    attention = (
        3 * model.num_layers * core_flops(model, num_sequences * counted_pairs(model, seq_len))
    )
    return 6.0 * matmul_params(model) * num_sequences * seq_len + attention
