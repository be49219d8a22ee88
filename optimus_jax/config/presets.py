"""Published models, and small ones for laptops.

Sizes are those of the `config.json` that each model was released with on huggingface.co.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from optimus_jax.config import Features, Generator, ModelConfig, RopeScaling
from optimus_jax.config.model import REPLACEMENT_LABELS
from optimus_jax.errors import ConfigError, explain, nearest


def _gpt(family: str, vocab_size: int, max_length: int, **more: Any) -> Callable[..., ModelConfig]:
    """Models of a family with a feed-forward of four times the width, and as many key as query
    heads.
    """

    make = _like(family, vocab_size, max_length, **more)
    return lambda name, num_layers, embed_dim, num_heads, **own: make(
        name, num_layers, embed_dim, num_heads, num_heads, 4 * embed_dim, **own
    )


def _like(family: str, vocab_size: int, max_length: int, **more: Any) -> Callable[..., ModelConfig]:
    """Models of a family with the same vocabulary, length and further fields."""

    def make(
        name: str,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        mlp_dim: int,
        **own: Any,
    ) -> ModelConfig:
        shared = {"vocab_size": vocab_size, "max_length": max_length}
        return ModelConfig(
            name=name,
            family=family,
            num_layers=num_layers,
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            mlp_dim=mlp_dim,
            **{**shared, "head_dim": embed_dim // num_heads, **more, **own},
        )

    return make


_gpt2 = _gpt("gpt2", 50257, 1024)
_gpt_neo = _gpt("gpt_neo", 50257, 2048)
_opt = _gpt("opt", 50272, 2048)
_bert = _gpt("bert", 28996, 512, norm_epsilon=1e-12)
_electra = _gpt(
    "electra",
    30522,
    512,
    norm_epsilon=1e-12,
    labels=REPLACEMENT_LABELS,
    labelled="replacement",
)
_vit = _gpt("vit", 1, 197, norm_epsilon=1e-12, tied=False, image_size=224)
_whisper = _gpt("whisper", 51865, 1948, frames=1500)
_llama2 = _like("llama", 32000, 4096, tied=False)
_llama3 = _like("llama", 128256, 131072, tied=False, rope_theta=500_000.0)
_qwen2 = _like("qwen2", 152064, 131072, tied=False, rope_theta=1e6, norm_epsilon=1e-6)
_qwen3 = _like("qwen3", 151936, 40960, head_dim=128, tied=False, rope_theta=1e6, norm_epsilon=1e-6)
_olmo2 = _like("olmo2", 100352, 4096, tied=False, rope_theta=500_000.0, norm_epsilon=1e-6)
_gemma2 = _like("gemma2", 256000, 8192, head_dim=256, norm_epsilon=1e-6)
_gemma3 = _like(
    "gemma3_text",
    262208,
    131072,
    head_dim=256,
    rope_theta=1e6,
    rope_scaling=RopeScaling(kind="linear", factor=8.0),
    norm_epsilon=1e-6,
)


def _gemma2_features(scale: float) -> Features:
    return Features(
        window=4096, attention_scale=scale**-0.5, attention_softcap=50.0, head_softcap=30.0
    )


def _gemma3_features(window: int, scale: float = 256.0) -> Features:
    return Features(window=window, attention_scale=scale**-0.5)


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    # Byte-level, for laptops: 3.3 and 3.0 million parameters, trained in minutes.
    "gpt2-nano": partial(_gpt2, "gpt2-nano", 4, 256, 8, vocab_size=257, max_length=256),
    "llama-nano": partial(_llama2, "llama-nano", 4, 256, 8, 2, 704, vocab_size=257, max_length=256),
    # Bytes, the end of a document and the mask token.
    "bert-nano": partial(_bert, "bert-nano", 4, 256, 8, vocab_size=258, max_length=256),
    "gpt2": partial(_gpt2, "gpt2", 12, 768, 12),
    "gpt2-medium": partial(_gpt2, "gpt2-medium", 24, 1024, 16),
    "gpt2-large": partial(_gpt2, "gpt2-large", 36, 1280, 20),
    "gpt2-xl": partial(_gpt2, "gpt2-xl", 48, 1600, 25),
    "gpt-neo-125m": partial(_gpt_neo, "gpt-neo-125m", 12, 768, 12),
    "gpt-neo-1.3b": partial(_gpt_neo, "gpt-neo-1.3b", 24, 2048, 16),
    "gpt-neo-2.7b": partial(_gpt_neo, "gpt-neo-2.7b", 32, 2560, 20),
    "gpt-j-6b": partial(_gpt("gptj", 50400, 2048, tied=False), "gpt-j-6b", 28, 4096, 16),
    "opt-125m": partial(_opt, "opt-125m", 12, 768, 12),
    "opt-350m": partial(
        _opt,
        "opt-350m",
        24,
        1024,
        16,
        features=Features(norm_place="post", final_norm=False, table_dim=512),
    ),
    "opt-1.3b": partial(_opt, "opt-1.3b", 24, 2048, 32),
    "opt-2.7b": partial(_opt, "opt-2.7b", 32, 2560, 32),
    "opt-6.7b": partial(_opt, "opt-6.7b", 32, 4096, 32),
    "opt-13b": partial(_opt, "opt-13b", 40, 5120, 40),
    "opt-30b": partial(_opt, "opt-30b", 48, 7168, 56),
    "opt-66b": partial(_opt, "opt-66b", 64, 9216, 72),
    "bert-base-cased": partial(_bert, "bert-base-cased", 12, 768, 12),
    "bert-large-cased": partial(_bert, "bert-large-cased", 24, 1024, 16),
    "electra-base-generator": partial(
        _gpt("electra", 30522, 512, norm_epsilon=1e-12),
        "electra-base-generator",
        12,
        256,
        4,
        features=Features(table_dim=768),
    ),
    "electra-nano": partial(
        _electra,
        "electra-nano",
        4,
        256,
        8,
        vocab_size=258,
        max_length=256,
        generator=Generator(num_layers=4, embed_dim=64, num_heads=2, mlp_dim=256),
    ),
    "electra-small-discriminator": partial(
        _electra,
        "electra-small-discriminator",
        12,
        256,
        4,
        features=Features(table_dim=128),
        generator=Generator(num_layers=12, embed_dim=64, num_heads=1, mlp_dim=256),
    ),
    "electra-base-discriminator": partial(
        _electra,
        "electra-base-discriminator",
        12,
        768,
        12,
        generator=Generator(num_layers=12, embed_dim=256, num_heads=4, mlp_dim=1024),
    ),
    # Grey images of 8 x 8 pixels.
    "vit-nano": partial(
        _vit, "vit-nano", 4, 64, 4, image_size=8, patch_size=2, num_channels=1, max_length=17
    ),
    "vit-base-patch16-224": partial(_vit, "vit-base-patch16-224", 12, 768, 12),
    "vit-large-patch16-224": partial(_vit, "vit-large-patch16-224", 24, 1024, 16),
    # Two seconds of sound, and texts of 28 bytes.
    "whisper-nano": partial(
        _whisper,
        "whisper-nano",
        4,
        64,
        4,
        encoder_layers=2,
        frames=100,
        max_length=128,
        vocab_size=320,
    ),
    "whisper-tiny": partial(_whisper, "whisper-tiny", 8, 384, 6, encoder_layers=4),
    "whisper-base": partial(_whisper, "whisper-base", 12, 512, 8, encoder_layers=6),
    "whisper-small": partial(_whisper, "whisper-small", 24, 768, 12, encoder_layers=12),
    "whisper-medium": partial(_whisper, "whisper-medium", 48, 1024, 16, encoder_layers=24),
    "whisper-large-v3": partial(
        _whisper,
        "whisper-large-v3",
        64,
        1280,
        20,
        encoder_layers=32,
        vocab_size=51866,
        mel_bins=128,
    ),
    "llama2-7b": partial(_llama2, "llama2-7b", 32, 4096, 32, 32, 11008),
    "llama2-13b": partial(_llama2, "llama2-13b", 40, 5120, 40, 40, 13824),
    "llama2-70b": partial(_llama2, "llama2-70b", 80, 8192, 64, 8, 28672),
    "llama3-8b": partial(_llama3, "llama3-8b", 32, 4096, 32, 8, 14336, max_length=8192),
    "llama3-70b": partial(_llama3, "llama3-70b", 80, 8192, 64, 8, 28672, max_length=8192),
    "llama3.1-8b": partial(
        _llama3, "llama3.1-8b", 32, 4096, 32, 8, 14336, rope_scaling=RopeScaling(factor=8.0)
    ),
    "llama3.1-70b": partial(
        _llama3, "llama3.1-70b", 80, 8192, 64, 8, 28672, rope_scaling=RopeScaling(factor=8.0)
    ),
    "llama3.1-405b": partial(
        _llama3, "llama3.1-405b", 126, 16384, 128, 8, 53248, rope_scaling=RopeScaling(factor=8.0)
    ),
    "llama3.2-1b": partial(
        _llama3,
        "llama3.2-1b",
        16,
        2048,
        32,
        8,
        8192,
        tied=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "llama3.2-3b": partial(
        _llama3,
        "llama3.2-3b",
        28,
        3072,
        24,
        8,
        8192,
        tied=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "llama3.3-70b": partial(
        _llama3, "llama3.3-70b", 80, 8192, 64, 8, 28672, rope_scaling=RopeScaling(factor=8.0)
    ),
    "mistral-7b": partial(
        _like("mistral", 32768, 32768, tied=False, rope_theta=1e6),
        "mistral-7b",
        32,
        4096,
        32,
        8,
        14336,
    ),
    "phi3-mini": partial(
        _like("phi3", 32064, 4096, tied=False),
        "phi3-mini",
        32,
        3072,
        32,
        32,
        8192,
        features=Features(window=2047),
    ),
    "qwen2.5-0.5b": partial(
        _qwen2, "qwen2.5-0.5b", 24, 896, 14, 2, 4864, vocab_size=151936, tied=True, max_length=32768
    ),
    "qwen2.5-1.5b": partial(
        _qwen2, "qwen2.5-1.5b", 28, 1536, 12, 2, 8960, vocab_size=151936, tied=True
    ),
    "qwen2.5-7b": partial(_qwen2, "qwen2.5-7b", 28, 3584, 28, 4, 18944),
    "qwen2.5-14b": partial(_qwen2, "qwen2.5-14b", 48, 5120, 40, 8, 13824, norm_epsilon=1e-5),
    "qwen2.5-32b": partial(_qwen2, "qwen2.5-32b", 64, 5120, 40, 8, 27648, norm_epsilon=1e-5),
    "qwen2.5-72b": partial(_qwen2, "qwen2.5-72b", 80, 8192, 64, 8, 29568, norm_epsilon=1e-5),
    "qwen3-0.6b": partial(_qwen3, "qwen3-0.6b", 28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": partial(_qwen3, "qwen3-1.7b", 28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": partial(_qwen3, "qwen3-4b", 36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": partial(_qwen3, "qwen3-8b", 36, 4096, 32, 8, 12288),
    "qwen3-14b": partial(_qwen3, "qwen3-14b", 40, 5120, 40, 8, 17408),
    "qwen3-32b": partial(_qwen3, "qwen3-32b", 64, 5120, 64, 8, 25600),
    "gemma2-2b": partial(
        _gemma2, "gemma2-2b", 26, 2304, 8, 4, 9216, features=_gemma2_features(256)
    ),
    "gemma2-9b": partial(
        _gemma2, "gemma2-9b", 42, 3584, 16, 8, 14336, features=_gemma2_features(256)
    ),
    "gemma2-27b": partial(
        _gemma2, "gemma2-27b", 46, 4608, 32, 16, 36864, head_dim=128, features=_gemma2_features(144)
    ),
    "gemma3-270m": partial(
        _gemma3,
        "gemma3-270m",
        18,
        640,
        4,
        1,
        2048,
        vocab_size=262144,
        max_length=32768,
        rope_scaling=None,
        features=_gemma3_features(512),
    ),
    "gemma3-1b": partial(
        _gemma3,
        "gemma3-1b",
        26,
        1152,
        4,
        1,
        6912,
        vocab_size=262144,
        max_length=32768,
        rope_scaling=None,
        features=_gemma3_features(512),
    ),
    "gemma3-4b": partial(
        _gemma3, "gemma3-4b", 34, 2560, 8, 4, 10240, features=_gemma3_features(1024)
    ),
    "gemma3-12b": partial(
        _gemma3, "gemma3-12b", 48, 3840, 16, 8, 15360, features=_gemma3_features(1024)
    ),
    "gemma3-27b": partial(
        _gemma3,
        "gemma3-27b",
        62,
        5376,
        32,
        16,
        21504,
        head_dim=128,
        features=_gemma3_features(1024, 168),
    ),
    "olmo2-1b": partial(_olmo2, "olmo2-1b", 16, 2048, 16, 16, 8192),
    "olmo2-7b": partial(_olmo2, "olmo2-7b", 32, 4096, 32, 32, 11008),
    "olmo2-13b": partial(_olmo2, "olmo2-13b", 40, 5120, 40, 40, 13824),
    "olmo2-32b": partial(_olmo2, "olmo2-32b", 64, 5120, 40, 8, 27648),
}
"""Model presets by the name that `--model` takes."""
_OWNERS = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "EleutherAI": ("gpt-neo-125m", "gpt-j-6b"),
    "facebook": (
        "opt-125m",
        "opt-350m",
        "opt-1.3b",
        "opt-2.7b",
        "opt-6.7b",
        "opt-13b",
        "opt-30b",
        "opt-66b",
    ),
    "google-bert": ("bert-base-cased", "bert-large-cased"),
    "google": (
        "electra-base-generator",
        "electra-small-discriminator",
        "electra-base-discriminator",
        "vit-base-patch16-224",
        "vit-large-patch16-224",
    ),
    "openai": (
        "whisper-tiny",
        "whisper-base",
        "whisper-small",
        "whisper-medium",
        "whisper-large-v3",
    ),
}
PUBLISHED: dict[str, str] = {
    **{name: f"{owner}/{name}" for owner, names in _OWNERS.items() for name in names},
    "gpt-neo-1.3b": "EleutherAI/gpt-neo-1.3B",
    "gpt-neo-2.7b": "EleutherAI/gpt-neo-2.7B",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama3.1-405b": "meta-llama/Llama-3.1-405B",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "phi3-mini": "microsoft/Phi-3-mini-4k-instruct",
    **{
        f"qwen2.5-{size}b": f"Qwen/Qwen2.5-{size}B"
        for size in ("0.5", "1.5", "7", "14", "32", "72")
    },
    **{f"qwen3-{size}b": f"Qwen/Qwen3-{size}B" for size in ("0.6", "1.7", "4", "8", "14", "32")},
    **{f"gemma2-{size}b": f"google/gemma-2-{size}b" for size in (2, 9, 27)},
    "gemma3-270m": "google/gemma-3-270m",
    **{f"gemma3-{size}b": f"google/gemma-3-{size}b-pt" for size in (1, 4, 12, 27)},
    "olmo2-1b": "allenai/OLMo-2-0425-1B",
    "olmo2-7b": "allenai/OLMo-2-1124-7B",
    "olmo2-13b": "allenai/OLMo-2-1124-13B",
    "olmo2-32b": "allenai/OLMo-2-0325-32B",
}
"""Names on huggingface.co of the presets that are published models."""
MODEL_HELP = "gpt2-nano, ... (`--model list` names all), DIR of a published model, or ORG/NAME"
"""Help of `--model`."""


def model_preset(name: str) -> ModelConfig:
    """The preset called `name`. Raises ConfigError that suggests the closest name."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            explain(f"unknown model {name!r}", given=name, do=nearest(str(name), PRESETS))
        )
    return PRESETS[name]()
