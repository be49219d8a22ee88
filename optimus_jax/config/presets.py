"""Published models, and small ones for laptops, as functions that return a `ModelConfig`.

Sizes are those of the `config.json` that each model was released with.
"""

from collections.abc import Callable

from optimus_jax.config import ModelConfig, RopeScaling
from optimus_jax.errors import ConfigError, explain, nearest


def _gpt2(name: str, *, num_layers: int, embed_dim: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="gpt2",
        vocab_size=50257,
        max_length=1024,
        tied=True,
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=4 * embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_dim // num_heads,
    )


def gpt2() -> ModelConfig:
    """GPT-2, 124M parameters."""
    return _gpt2("gpt2", num_layers=12, embed_dim=768, num_heads=12)


def gpt2_medium() -> ModelConfig:
    """GPT-2, 355M parameters."""
    return _gpt2("gpt2-medium", num_layers=24, embed_dim=1024, num_heads=16)


def gpt2_large() -> ModelConfig:
    """GPT-2, 774M parameters."""
    return _gpt2("gpt2-large", num_layers=36, embed_dim=1280, num_heads=20)


def gpt2_xl() -> ModelConfig:
    """GPT-2, 1.56B parameters."""
    return _gpt2("gpt2-xl", num_layers=48, embed_dim=1600, num_heads=25)


def gpt2_nano() -> ModelConfig:
    """A byte-level GPT-2, 3.3M parameters: trains in minutes on a laptop."""
    return ModelConfig(
        name="gpt2-nano",
        family="gpt2",
        vocab_size=257,
        max_length=256,
        tied=True,
        num_layers=4,
        embed_dim=256,
        mlp_dim=1024,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
    )


def _llama(
    name: str,
    *,
    vocab_size: int,
    max_length: int,
    num_layers: int,
    embed_dim: int,
    mlp_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int = 128,
    tied: bool = False,
    rope_theta: float = 500_000.0,
    rope_factor: float | None = None,
) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="llama",
        vocab_size=vocab_size,
        max_length=max_length,
        tied=tied,
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=mlp_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rope_scaling=None if rope_factor is None else RopeScaling(factor=rope_factor),
    )


def llama2_7b() -> ModelConfig:
    """Llama 2, 6.7B parameters."""
    return _llama(
        "llama2-7b",
        vocab_size=32000,
        max_length=4096,
        num_layers=32,
        embed_dim=4096,
        mlp_dim=11008,
        num_heads=32,
        num_kv_heads=32,
        rope_theta=10_000.0,
    )


def llama2_13b() -> ModelConfig:
    """Llama 2, 13.0B parameters."""
    return _llama(
        "llama2-13b",
        vocab_size=32000,
        max_length=4096,
        num_layers=40,
        embed_dim=5120,
        mlp_dim=13824,
        num_heads=40,
        num_kv_heads=40,
        rope_theta=10_000.0,
    )


def llama3_8b() -> ModelConfig:
    """Llama 3, 8.0B parameters."""
    return _llama(
        "llama3-8b",
        vocab_size=128256,
        max_length=8192,
        num_layers=32,
        embed_dim=4096,
        mlp_dim=14336,
        num_heads=32,
        num_kv_heads=8,
    )


def llama3_2_1b() -> ModelConfig:
    """Llama 3.2, 1.24B parameters."""
    return _llama(
        "llama3.2-1b",
        vocab_size=128256,
        max_length=131072,
        num_layers=16,
        embed_dim=2048,
        mlp_dim=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        tied=True,
        rope_factor=32.0,
    )


def llama3_3_70b() -> ModelConfig:
    """Llama 3.3, 70.6B parameters."""
    return _llama(
        "llama3.3-70b",
        vocab_size=128256,
        max_length=131072,
        num_layers=80,
        embed_dim=8192,
        mlp_dim=28672,
        num_heads=64,
        num_kv_heads=8,
        rope_factor=8.0,
    )


def llama_nano() -> ModelConfig:
    """A byte-level Llama, 3.0M parameters, grouped-query attention: trains in minutes on a
    laptop."""
    return _llama(
        "llama-nano",
        vocab_size=257,
        max_length=256,
        num_layers=4,
        embed_dim=256,
        mlp_dim=704,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2-nano": gpt2_nano,
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "gpt2-xl": gpt2_xl,
    "llama-nano": llama_nano,
    "llama2-7b": llama2_7b,
    "llama2-13b": llama2_13b,
    "llama3-8b": llama3_8b,
    "llama3.2-1b": llama3_2_1b,
    "llama3.3-70b": llama3_3_70b,
}


def model_preset(name: str) -> ModelConfig:
    """The preset called `name`. Raises ConfigError that suggests the closest name."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            explain(f"unknown model {name!r}", given=name, do=nearest(str(name), PRESETS))
        )
    return PRESETS[name]()
