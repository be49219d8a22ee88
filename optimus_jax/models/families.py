"""A table of the differences between decoder families. A new family is a new row."""

from dataclasses import dataclass
from typing import Literal

from optimus_jax.config import ModelConfig
from optimus_jax.errors import ConfigError, explain, nearest


@dataclass(frozen=True, kw_only=True)
class Family:
    """The architecture of a decoder, apart from its sizes, which are in ModelConfig."""

    positions: Literal["learned", "rotary"]
    """How positions are encoded: a table added to the embedding, or rotated queries and keys."""
    norm: Literal["layer", "rms"]
    """LayerNorm with bias, or RMSNorm."""
    activation: Literal["gelu_tanh", "swiglu"]
    """Feed-forward nonlinearity; swiglu has a gate beside the up projection."""
    biases: bool
    """Whether projections have biases."""


FAMILIES: dict[str, Family] = {
    "gpt2": Family(positions="learned", norm="layer", activation="gelu_tanh", biases=True),
    "llama": Family(positions="rotary", norm="rms", activation="swiglu", biases=False),
}


def family_of(name: str) -> Family:
    """The family called `name`. Raises ConfigError naming the nearest one."""
    if name not in FAMILIES:
        raise ConfigError(
            explain(
                f"unknown model family {name!r}",
                given=f"model.family={name}",
                do=nearest(name, FAMILIES),
            )
        )
    return FAMILIES[name]


def check_family(config: ModelConfig) -> None:
    """Raise ConfigError if a model's sizes are impossible for its family."""
    if family_of(config.family).positions == "rotary" and config.head_dim % 2:
        raise ConfigError(
            explain(
                f"rotary positions turn the dimensions of a head in pairs, and {config.name} has an"
                " odd number",
                given=f"model.head_dim={config.head_dim}",
                do=(
                    f"set model.head_dim to {config.head_dim - 1} or {config.head_dim + 1}"
                    if config.head_dim > 1
                    else "set model.head_dim to 2 or more"
                ),
            )
        )
