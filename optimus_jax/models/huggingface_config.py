"""The config.json with which transformers makes the same model as ours.

`models/huggingface_formats.py` has the keys. What they say is read again and compared with the
model, so that a config.json is never written for a model that no class of transformers has.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from optimus_jax.config import ModelConfig
from optimus_jax.errors import ConfigError, explain
from optimus_jax.models.families import features_of, has_window, rotated_dims, table_width
from optimus_jax.models.huggingface import config_from_huggingface
from optimus_jax.models.huggingface_formats import HUGGING_FACE_FORMATS, family_format

IMAGE_SCALING = ("resize", "keep_aspect", "resample")
"""Fields of ModelConfig that say how an image is made as large as the model reads."""
OF_IMAGES = ("pixel_mean", "pixel_std", *IMAGE_SCALING)
NOT_PART_OF_A_MODEL = ("name", "dropout", "family", "features", *OF_IMAGES)
"""Fields of ModelConfig that are compared not at all, by what they mean, or that another file has
(weights/image_processor.py)."""
RELATIVE = 1e-9
"""Difference of two numbers that are meant to be the same: one is a root of the other's square."""


def config_to_huggingface(
    config: ModelConfig,
    *,
    dtype: str = "float32",
    eos: int | None = None,
    start: int | None = None,
) -> dict[str, Any]:
    """The inverse of `config_from_huggingface`: every key that decides a model's arithmetic, but
    for adapters.

    If its own family's class does not have all its features, it is written as a model of another
    family whose class has them; `model_type` then names that one.

    Args:
      dtype: name of the weights' dtype.
      eos: id of the token that ends a document, if there is one. Other special tokens are null,
        where a class would have ids of its own vocabulary.
      start: id of the token with which a decoder beside an encoder begins; None: eos.
    Returns:
      A JSON object that transformers 4.53 and later read.
    Raises:
      ConfigError: no class has such a model. The error names the features that its family's lacks.
    """
    config, differences = config.base, {}
    alike = [
        name for name, hf_format in HUGGING_FACE_FORMATS.items() if hf_format.reads == config.reads
    ]
    for family in sorted(alike, key=lambda name: name != config.family):
        keys = _keys(config, family)
        differences[family] = [*_differences(config, keys)]
        if not differences[family]:
            tokens = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
            if config.frames:
                first = eos if start is None else start
                tokens |= {"pad_token_id": eos, "decoder_start_token_id": first}
                tokens |= {"suppress_tokens": None, "begin_suppress_tokens": None}
            return keys | tokens | {"torch_dtype": dtype, "dtype": dtype}
    nearest = min(differences, key=lambda family: len(differences[family]))
    family = config.family if config.family in differences else nearest
    raise ConfigError(
        explain(
            "no class of transformers has such a model",
            given=f"{'; '.join(differences[family])} in its class for {family}",
            do="train a model with the features of one family to export it",
        )
    )


def _keys(config: ModelConfig, family: str) -> dict[str, Any]:
    """The config.json of a model, written as one of a family."""
    hf_format = family_format(family)
    config = replace(config, family=family, features=features_of(config))
    own = {key: values[0] for key, values in hf_format.only.items() if values[0] is not None}
    sizes = {key: getattr(config, field) for field, key in hf_format.sizes.items()}
    head, labels = hf_format.label_head(config.labelled), dict(enumerate(config.labels))
    head = head if labels else None
    named = {
        "id2label": {str(number): label for number, label in labels.items()},
        "label2id": {label: number for number, label in labels.items()},
    }
    return {
        "model_type": family,
        "architectures": [(head or hf_format).architecture],
        **(named if labels else {}),
        **own,
        **sizes,
        **{key: value for keys in hf_format.features for key, value in keys.write(config).items()},
    }


def _differences(config: ModelConfig, keys: dict[str, Any]) -> Iterator[str]:
    """What a config.json says otherwise than the model, as texts; nothing if they are the same."""
    hf_format = family_format(keys["model_type"])
    if hf_format.head_width_is_whole and config.embed_dim % config.num_heads:
        yield f"model.embed_dim={config.embed_dim}, no multiple of num_heads={config.num_heads},"
        return
    ours, theirs = _meaning(config), _meaning(config_from_huggingface(keys))
    for name, value in ours.items():
        if not _is_same(value, theirs[name]):
            yield f"model.{name} is {value}, and {theirs[name]}"


def _meaning(config: ModelConfig) -> dict[str, Any]:
    """Every value that decides a model's arithmetic, the same for two ways of saying the same."""
    features, windowed = features_of(config), has_window(config)
    is_rotary = features.positions == "rotary"
    sizes = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in NOT_PART_OF_A_MODEL
    }
    if not is_rotary:
        sizes |= {"rope_theta": None, "rope_scaling": None}
    return sizes | {
        **{f"features.{each.name}": getattr(features, each.name) for each in fields(features)},
        "features.window": features.window if any(windowed) else 0,
        "features.layer_types": windowed,
        "features.rope_dims": rotated_dims(config),
        "features.rope_pairs": features.rope_pairs if is_rotary else None,
        "features.window_rope_theta": (
            features.window_rope_theta or config.rope_theta if is_rotary and any(windowed) else 0
        ),
        "features.position_offset": (
            features.position_offset if features.positions == "learned" else 0
        ),
        "features.attention_scale": features.attention_scale or config.head_dim**-0.5,
        "features.table_dim": table_width(config),
        "features.biases": frozenset(features.biases or ()),
    }


def _is_same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=RELATIVE)
    return ours == theirs
