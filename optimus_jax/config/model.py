"""Settings of the model: the sizes of a decoder."""

from dataclasses import dataclass

from optimus_jax.config.checks import check_counts, check_positive
from optimus_jax.errors import ConfigError, explain

MOST_LAYERS = 10_000
"""More are a typo, and too many to assign to stages one by one."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of rotary frequencies (arXiv:2407.21783, `rope_type: llama3`)."""

    factor: float = 8.0
    """How far low frequencies are stretched."""
    low_frequency_factor: float = 1.0
    """Wavelengths above original_length / this are stretched by the whole factor."""
    high_frequency_factor: float = 4.0
    """Wavelengths below original_length / this are left alone."""
    original_length: int = 8192
    """Sequence length, in tokens, of the training before stretching."""

    def __post_init__(self) -> None:
        check_positive(
            self, "factor", "low_frequency_factor", "high_frequency_factor", "original_length"
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder; its family (`models/families.py`) determines the architecture."""

    name: str = "custom"
    """Name of the preset."""
    family: str = "gpt2"
    """Architecture: a key of `models.families.FAMILIES`."""
    vocab_size: int = 50257
    """Number of token ids, before padding to equal shards."""
    num_layers: int = 12
    """Decoder layers."""
    embed_dim: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Query heads."""
    num_kv_heads: int = 12
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int = 64
    """Width of a head."""
    mlp_dim: int = 3072
    """Hidden width of the feed-forward block."""
    max_length: int = 1024
    """Longest sequence, in tokens."""
    tied: bool = True
    """Whether the output head is the embedding."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every norm."""
    rope_theta: float = 10000.0
    """Base of rotary frequencies; unused by families with learned positions."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary frequencies, or None."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections into the residual get / sqrt(2 layers)."""
    dropout: float = 0.0
    """Probability on embeddings, attention weights and both residual branches."""

    def __post_init__(self) -> None:
        counts = (
            "vocab_size",
            "num_layers",
            "embed_dim",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "max_length",
        )
        check_positive(self, *counts, "norm_epsilon", "rope_theta")
        check_counts(self, *counts)
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(
                explain(
                    "model.num_layers is too large",
                    given=self.num_layers,
                    do=f"choose {MOST_LAYERS:,} or less",
                )
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                explain(
                    "model.num_heads must be a multiple of model.num_kv_heads",
                    given=f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
                    do=f"set model.num_kv_heads to a divisor of {self.num_heads}",
                )
            )
        if self.init_std < 0:
            raise ConfigError(
                explain(
                    "model.init_std cannot be negative", given=self.init_std, do="choose 0 or more"
                )
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                explain(
                    "model.dropout is a probability",
                    given=self.dropout,
                    do="choose 0 <= dropout < 1",
                )
            )
