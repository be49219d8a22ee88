"""Recipes: published settings of training, by name. A model is named beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimus_jax.errors import ConfigError, explain, nearest


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings that belong together."""

    source: str
    """Where they were published."""
    settings: Mapping[str, Any]
    """By dotted name."""


MEGATRON = "Shoeybi et al. 2019, arXiv:1909.08053, section 4.2"
_MEGATRON: Mapping[str, Any] = {
    "model.dropout": 0.1,
    "model.init_std": 0.02,
    "optimizer.beta2": 0.999,  # which the paper does not give: Adam's usual value
    "optimizer.weight_decay": 0.01,
    "optimizer.clip_norm": 1.0,
}
RECIPES: Mapping[str, Recipe] = {
    "megatron-gpt2": Recipe(
        source=MEGATRON,
        settings={
            **_MEGATRON,
            "data.seq_len": 1024,
            "data.global_batch": 512,
            "steps": 300_000,
            "optimizer.lr": 1.5e-4,
            "optimizer.schedule": "cosine",
            "optimizer.warmup_steps": 3000,
            "optimizer.min_lr_ratio": 1e-5 / 1.5e-4,
        },
    ),
    "electra": Recipe(
        source="Clark et al. 2020, arXiv:2003.10555, table 6 (base)",
        settings={
            "task": "replaced_tokens",
            "model.dropout": 0.1,
            "masking.masked": 0.85,  # the rest stays; their code, not the paper, says so
            "masking.random": 0.0,
            "optimizer.beta2": 0.999,
            "optimizer.epsilon": 1e-6,
            "optimizer.weight_decay": 0.01,
            "optimizer.clip_norm": 1.0,  # as in their code
            "data.seq_len": 512,
            "data.global_batch": 256,
            "steps": 766_000,
            "optimizer.lr": 2e-4,
            "optimizer.schedule": "linear",
            "optimizer.warmup_steps": 10_000,
            "optimizer.min_lr_ratio": 0.0,
        },
    ),
    "megatron-bert": Recipe(
        # Theirs also learns the order of two sentences, which no task here does.
        source=f"{MEGATRON}; 5.3 for the place of norms; without sentence-order prediction",
        settings={
            **_MEGATRON,
            "model.features.norm_place": "pre",
            "model.features.final_norm": True,
            "model.features.embedding_norm": False,
            "masking.whole_words": True,
            "data.seq_len": 512,
            "data.global_batch": 1024,
            "steps": 2_000_000,
            "optimizer.lr": 1e-4,
            "optimizer.schedule": "linear",
            "optimizer.warmup_steps": 10_000,
            "optimizer.min_lr_ratio": 0.0,
        },
    ),
}
"""By the value of the setting `recipe`. Weights before residual additions are drawn from a normal
distribution that is narrower by sqrt(2 layers) in every model (`ModelConfig.init_std`)."""


def recipe_settings(name: str) -> Mapping[str, Any]:
    """The settings of a recipe. Raises ConfigError, with the nearest name, if there is none."""
    if name not in RECIPES:
        raise ConfigError(
            explain(f"unknown recipe {name!r}", given=f"recipe={name}", do=nearest(name, RECIPES))
        )
    return RECIPES[name].settings
