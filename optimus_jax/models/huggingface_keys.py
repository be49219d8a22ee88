"""What a config.json may hold: the types and ranges of the keys that we read.

A file from outside may have a text where a number belongs, or a number that would make the code
that reads it loop for ever. All of them are checked here, before any is used.
"""

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_type_hints

from optimus_jax.config import ModelConfig
from optimus_jax.config.checks import LARGEST_COUNT
from optimus_jax.config.model import MOST_LAYERS, Labelled
from optimus_jax.errors import ConfigError, explain
from optimus_jax.models.huggingface_features import HfConfig
from optimus_jax.models.huggingface_format import HuggingFaceFormat

KeyType = type | UnionType

KEY_TYPES: dict[str, KeyType] = {
    "model_type": str,
    "architectures": list | None,
    "id2label": dict | None,
    # attention
    "attention_bias": bool | None,
    "mlp_bias": bool | None,
    "enable_bias": bool,
    "layer_types": list | None,
    "attention_layers": list,
    "attention_types": list,
    "use_sliding_window": bool | None,
    "sliding_window": int | None,
    "max_window_layers": int,
    "sliding_window_pattern": int,
    "_sliding_window_pattern": int,
    "window_size": int,
    "query_pre_attn_scalar": float,
    "attn_logit_softcapping": float | None,
    "final_logit_softcapping": float | None,
    # positions
    "rotary_dim": int,
    "partial_rotary_factor": float | None,
    "rope_theta": float | None,
    "rope_local_base_freq": float,
    "rope_parameters": dict | None,
    "rope_scaling": dict | None,
    # BERT and ELECTRA
    "hidden_act": str,
    "type_vocab_size": int,
    "embedding_size": int,
    # OPT
    "activation_function": str,
    "do_layer_norm_before": bool,
    "_remove_final_layer_norm": bool,
    "word_embed_proj_dim": int | None,
    # Whisper
    "decoder_attention_heads": int,
    "decoder_ffn_dim": int,
}
"""Keys, apart from sizes, that `config_from_huggingface` reads. None: null, which is as absent."""
ROPE_TYPES: dict[str, KeyType] = {
    "rope_type": str,
    "type": str,
    "rope_theta": float | None,
    "factor": float,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "original_max_position_embeddings": int,
    "partial_rotary_factor": float | None,
}
"""Keys inside `rope_parameters` and `rope_scaling`."""
POSITIVE = ("query_pre_attn_scalar", "sliding_window_pattern", "_sliding_window_pattern")
"""Keys, besides those of sizes, that something is divided by."""
LISTS_OF_TEXTS = ("architectures", "layer_types", "attention_layers")
OTHER_HEADS = ("DoubleHeadsModel",)
"""Classes with an ending of `HuggingFaceFormat.architectures` and another head."""


TYPE_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def check_keys(hf_config: HfConfig, hf_format: HuggingFaceFormat) -> None:
    """Raise ConfigError for the first key with a value of the wrong type or out of range."""
    hints = get_type_hints(ModelConfig)
    for field, key in hf_format.sizes.items():
        if hf_config.get(key) is not None:
            _check(key, hf_config[key], hints[field], is_positive=hints[field] is int)
    for key, kind in KEY_TYPES.items():
        if key in hf_config:
            _check(key, hf_config[key], kind, is_positive=key in POSITIVE)
    layers = hf_format.sizes["num_layers"]
    num_layers = hf_config.get(layers) or 0
    if num_layers > MOST_LAYERS:
        raise _wrong(layers, num_layers, f"a number up to {MOST_LAYERS:,}")
    for key in LISTS_OF_TEXTS:
        if (given := hf_config.get(key)) is None:
            continue
        if not _are_texts(given):
            raise _wrong(key, given, "a list of texts")
        if key != "architectures" and len(given) != num_layers:
            raise _wrong(f"number of {key}", len(given), f"{num_layers}, as {layers}")
    names = hf_config.get("id2label") or {}
    numbers = [str(number) for number in range(len(names))]
    if sorted(map(str, names)) != sorted(numbers) or not _are_texts([*names.values()]):
        raise _wrong("id2label", names, "a text for every whole number from 0 on")
    for each in (repeated := hf_config.get("attention_types", [])):
        if not (
            isinstance(each, list)
            and len(each) == 2
            and isinstance(each[0], list)
            and _are_texts(each[0])
            and type(each[1]) is int
        ):
            raise _wrong("attention_types", each, "a list of [types, how often]")
    if (total := sum(len(kinds) * times for kinds, times in repeated)) > MOST_LAYERS:
        raise _wrong("number of attention_types", total, f"{num_layers}, as {layers}")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(key, hf_config.get(key) or {})


def check_task(hf_config: HfConfig, hf_format: HuggingFaceFormat) -> None:
    """Raise ConfigError if a config.json is of a model with another head than ours."""
    *endings, _ = hf_format.architectures
    for name in hf_config.get("architectures") or ():
        if (
            labels_of(name, hf_format) is None and not name.endswith(hf_format.architectures)
        ) or name.endswith(OTHER_HEADS):
            raise ConfigError(
                explain(
                    f"a config.json is of a model with another task than {hf_format.architecture}",
                    given=f"architectures={name[:80]}",
                    do=f"choose a model whose architecture ends in {' or '.join(endings)}",
                )
            )


def labels_of(architecture: str, hf_format: HuggingFaceFormat) -> str | None:
    """`ModelConfig.labelled` of the models of a class; None: it has no labels."""
    for labelled in get_args(Labelled):
        head = hf_format.label_head(labelled)
        if head is not None and head.architecture == architecture:
            return labelled
    return None


def _check_rope(key: str, rope: Mapping[str, Any]) -> None:
    """Check a mapping of rotary positions, or one for each type of layer."""
    for name, value in rope.items():
        if isinstance(value, dict):
            if "." in key:
                raise _wrong(f"{key}.{name}", value, "a number or a text")
            _check_rope(f"{key}.{name}", value)
        elif name in ROPE_TYPES:
            _check(f"{key}.{name}", value, ROPE_TYPES[name], is_positive=False)


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(each, str) for each in values)


def _check(key: str, value: object, kind: KeyType, *, is_positive: bool) -> None:
    options: tuple[Any, ...] = get_args(kind) or (kind,)
    wanted, *null = options
    if value is None and null:
        return
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        raise _wrong(key, value, TYPE_WORDS[wanted] + (" or null" if null else ""))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= LARGEST_COUNT:  # NaN too
            raise _wrong(key, value, f"a number from 0 to {LARGEST_COUNT:,}")
        if is_positive and value == 0:
            raise _wrong(key, value, "a number above 0")


def _wrong(key: str, given: object, wanted: str) -> ConfigError:
    text = repr(given)
    return ConfigError(
        explain(
            "a config.json has a value that cannot be meant",
            given=f"{key}={text if len(text) <= 80 else text[:77] + '...'}, wanted {wanted}",
            do="use the config.json that came with the weights",
        )
    )
