"""The names of the logical axes.

A *logical axis* is a model's word for a dimension of an array. `mesh/rules.py` maps logical axes
onto mesh axes (`config/axes.py`).
"""

BATCH = "batch"
"""Examples."""
LENGTH = "length"
"""Tokens of the residual stream, between the blocks of a layer."""
LAYERS = "layers"
"""Decoder layers, stacked."""
GENERATOR_LAYERS = "generator_layers"
"""Layers of a generator, stacked; never split."""
GENERATOR_HEADS = "generator_heads"
"""Query heads of a generator."""
GENERATOR_KV_HEADS = "generator_kv_heads"
"""Key and value heads of a generator."""
GENERATOR_MLP = "generator_mlp"
"""Hidden width of a generator's feed-forward block."""
VOCAB = "vocab"
"""Token ids, padded to whole shards."""
EMBED = "embed"
"""Width of the residual stream in a matrix: its first dimension, except in tables. fsdp splits it
for storage."""
TABLE = "table"
"""Width of the embedding's rows where it is not that of the residual stream; never split."""
PATCH = "patch"
"""Values of a patch of an image; never split."""
NORM = "norm"
"""Width of the residual stream in a vector (norms, output biases); never split."""
POSITIONS = "positions"
"""Learned positions."""
HEADS = "heads"
"""Query heads."""
KV_HEADS = "kv_heads"
"""Key and value heads."""
HEAD_DIM = "head_dim"
"""Width of one head."""
MLP = "mlp"
"""Hidden width of the feed-forward block."""
PAIR = "pair"
"""Two matrices kept as one: key and value, or gate and up."""
LABELS = "labels"
"""Labels that a head tells apart; never split."""
RANK = "rank"
"""Inner width of a low-rank adapter; never split."""

LOGICAL_AXES = (
    BATCH,
    LENGTH,
    LAYERS,
    GENERATOR_LAYERS,
    GENERATOR_HEADS,
    GENERATOR_KV_HEADS,
    GENERATOR_MLP,
    VOCAB,
    EMBED,
    TABLE,
    PATCH,
    NORM,
    POSITIONS,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    MLP,
    PAIR,
    LABELS,
    RANK,
)
