"""Floating-point operations of the model itself, in closed form.

Convention: a multiply-add counts two; backward counts twice forward; what remat computes again does
not count; attention is counted causally, so for a query only over the keys before it.
"""

from optimus_jax.config import ModelConfig
from optimus_jax.models.families import family_of


def matmul_params(model: ModelConfig) -> int:
    """Parameters that every token is multiplied by: projections, feed-forward and head; not the embedding's rows."""
    embed, head_dim = model.embed_dim, model.head_dim
    attention = embed * head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    feed_forward = embed * model.mlp_dim * (3 if family_of(model.family).activation == "swiglu" else 2)
    return model.num_layers * (attention + feed_forward) + embed * model.vocab_size


def step_flops(model: ModelConfig, *, num_sequences: int, seq_len: int) -> float:
    """Model FLOPs of one training step, documents not regarded: 6 per parameter and token, and attention.

    Source: FLOP counts of Narayanan et al. 2021 (arXiv:2104.04473), for grouped heads and gates.
    """
    causal_pairs = num_sequences * seq_len**2 / 2
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * causal_pairs
    return 6.0 * matmul_params(model) * num_sequences * seq_len + attention
