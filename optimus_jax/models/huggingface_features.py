"""The keys of Hugging Face's config.json that decide a model's features and rotary positions.

They come in groups (`FeatureKeys`), of which a family's class has some. What is read from what was
written is the same model (`config_to_huggingface` checks it).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_jax.config import ModelConfig, RopeScaling
from optimus_jax.errors import ConfigError, explain
from optimus_jax.models.families import features_of, has_window, rotated_dims

HfConfig = Mapping[str, Any]
"""A config.json."""

LAYER_TYPES = {"sliding_attention": "window", "full_attention": "full"}
"""Their types of layers -> ours."""
GPT_NEO_LAYER_TYPES = {"local": "window", "global": "full"}
"""The same in GPT-Neo's config.json."""
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
"""Their names of nonlinearities -> ours."""
ROPE_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Field of RopeScaling -> key of a config.json's `rope_scaling`."""


@dataclass(frozen=True)
class FeatureKeys:
    """Keys of config.json that belong together, read and written."""

    read: Callable[[HfConfig], dict[str, Any]]
    """Fields of Features that the keys decide. Raises ConfigError for values that our models do not
    support."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The inverse: keys and their values, for a model with all its features in its config."""


def read_rotary(hf: HfConfig) -> dict[str, Any]:
    """The ModelConfig fields of rotary positions.

    A config.json has them in one mapping since transformers 5, or in one for each type of layer;
    before, a number and a mapping.

    Raises ConfigError for a scaling that our models do not have.
    """
    given = hf.get("rope_parameters") or {}
    given = given.get("full_attention", given)
    rope = {**given, **(hf.get("rope_scaling") or {})}
    theta = float(rope.get("rope_theta", hf.get("rope_theta") or ModelConfig.rope_theta))
    match kind := rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return {"rope_theta": theta}
        case "linear" if "factor" in rope:
            scaling = RopeScaling(kind="linear", factor=float(rope["factor"]))
            return {"rope_theta": theta, "rope_scaling": scaling}
        case "llama3" if rope.keys() >= set(ROPE_SCALING.values()):
            scaling = RopeScaling(**{field: rope[key] for field, key in ROPE_SCALING.items()})
            return {"rope_theta": theta, "rope_scaling": scaling}
        case "linear" | "llama3":
            needed = ["factor"] if kind == "linear" else ROPE_SCALING.values()
            raise ConfigError(
                explain(
                    f"rope_type={kind} lacks numbers",
                    given=rope,
                    do="give " + ", ".join(needed),
                )
            )
    raise not_supported("rope_type", kind, ("default", "linear", "llama3"))


def _rotary_keys(config: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` for transformers 4, `rope_parameters` for 5."""
    scaling = _scaling_keys(config)
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            **(scaling or {}),
        },
    }


def _scaling_keys(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    fields = ["factor"] if scaling.kind == "linear" else list(ROPE_SCALING)
    return {
        "rope_type": scaling.kind,
        **{ROPE_SCALING[field]: getattr(scaling, field) for field in fields},
    }


ROTARY = FeatureKeys(lambda hf: {}, _rotary_keys)
"""Rotary positions, which are no features: `read_rotary` reads them."""


def _read_biases(hf: HfConfig) -> dict[str, Any]:
    biases = (("query", "key", "value", "out") if hf.get("attention_bias") else ()) + (
        ("up", "down") if hf.get("mlp_bias") else ()
    )
    return {"biases": biases} if biases else {}


def _attention_bias_keys(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": "out" in (features_of(config).biases or ())}


ATTENTION_BIAS = FeatureKeys(_read_biases, _attention_bias_keys)
"""Biases of all four projections of attention, or none."""
BIASES = FeatureKeys(
    _read_biases,
    lambda config: (
        _attention_bias_keys(config) | {"mlp_bias": "up" in (features_of(config).biases or ())}
    ),
)
"""ATTENTION_BIAS, and the same for the feed-forward."""
WINDOW = FeatureKeys(
    lambda hf: {"window": hf.get("sliding_window", 4096) or 0},
    lambda config: {"sliding_window": features_of(config).window or None},
)
"""A window of all layers."""


def _read_pixels(hf: HfConfig) -> dict[str, Any]:
    """Nothing: a token of a patch restores that patch, unless `encoder_stride` says otherwise."""
    restores = any(
        name.endswith("ForMaskedImageModeling") for name in hf.get("architectures") or ()
    )
    stride, patch_size = hf.get("encoder_stride", 16), hf.get("patch_size", 16)
    if restores and stride != patch_size:
        raise not_supported("encoder_stride", stride, (patch_size,))
    return {}


PIXELS = FeatureKeys(_read_pixels, lambda config: {"encoder_stride": config.patch_size})
"""How many pixels of a side a token of an image restores."""


def _read_phi3(hf: HfConfig) -> dict[str, Any]:
    share = hf.get("partial_rotary_factor")
    share = (hf.get("rope_parameters") or {}).get("partial_rotary_factor", share)
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    return {"window": hf.get("sliding_window") or 0} | (
        {} if share in (None, 1.0) else {"rope_dims": int(head_dim * share)}
    )


def _phi3_keys(config: ModelConfig) -> dict[str, Any]:
    """Linear scaling, which Phi-3 does not know, is left out."""
    dims = rotated_dims(config)
    # int() above must not lose one: 0.29 * 100 is 28.999...
    share = (dims if dims == config.head_dim else dims + 1e-6) / config.head_dim
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": share}
    return {
        "sliding_window": features_of(config).window or None,
        "rope_scaling": None,
        "partial_rotary_factor": share,
        "rope_parameters": rope,
    }


PHI3 = FeatureKeys(_read_phi3, _phi3_keys)
"""A window of all layers that is off by default, and rotated dimensions. Comes after ROTARY."""


def _layer_types(hf: HfConfig, default: Callable[[int], bool]) -> tuple[str, ...]:
    """`window` or `full` for every layer; `default` says whether layer i has a window if the
    config.json does not say.
    """
    theirs = hf.get("layer_types")
    if theirs is not None:
        if other := set(theirs) - LAYER_TYPES.keys():
            raise not_supported(
                "layer_types", sorted(other), ("sliding_attention", "full_attention")
            )
        return tuple(LAYER_TYPES[each] for each in theirs)
    return tuple("window" if default(layer) else "full" for layer in range(hf["num_hidden_layers"]))


def _layer_type_keys(config: ModelConfig, names: Mapping[str, str] = LAYER_TYPES) -> list[str]:
    """Their type of every layer."""
    theirs = {ours: name for name, ours in names.items()}
    return [theirs["window" if windowed else "full"] for windowed in has_window(config)]


def _shortest_pattern(types: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern whose repetition begins with these layer types."""
    return next(
        types[:length]
        for length in range(1, len(types) + 1)
        if types[length:] == types[: len(types) - length]
    )


def _read_qwen_window(hf: HfConfig) -> dict[str, Any]:
    first = hf.get("max_window_layers", 28)
    types = _layer_types(hf, lambda layer: bool(hf.get("use_sliding_window")) and layer >= first)
    if "window" not in types:
        return {}
    if not hf.get("use_sliding_window"):
        raise not_supported("layer_types with use_sliding_window", False, (True,))
    return {"window": hf.get("sliding_window", 4096), "layer_types": _shortest_pattern(types)}


def _qwen_window_keys(config: ModelConfig) -> dict[str, Any]:
    windowed = has_window(config)
    return {
        "use_sliding_window": any(windowed),
        "sliding_window": features_of(config).window if any(windowed) else None,
        "max_window_layers": [*windowed, True].index(True),
        "layer_types": _layer_type_keys(config),
    }


QWEN_WINDOW = FeatureKeys(_read_qwen_window, _qwen_window_keys)
"""A window of the last layers, or of those that layer_types names."""


def _read_gemma2(hf: HfConfig) -> dict[str, Any]:
    return {
        "window": hf.get("sliding_window", 4096) or 0,
        "layer_types": _shortest_pattern(_layer_types(hf, lambda layer: layer % 2 == 0)),
        "attention_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": hf.get("attn_logit_softcapping", 50.0) or 0.0,
        "head_softcap": hf.get("final_logit_softcapping", 30.0) or 0.0,
    }


def _gemma_keys(config: ModelConfig) -> dict[str, Any]:
    """What both generations have."""
    features = features_of(config)
    scale = features.attention_scale or config.head_dim**-0.5
    return {
        "sliding_window": features.window if any(has_window(config)) else None,
        "layer_types": _layer_type_keys(config),
        "query_pre_attn_scalar": round(scale**-2),  # transformers wants a whole number
        "final_logit_softcapping": features.head_softcap or None,
    }


GEMMA2 = FeatureKeys(
    _read_gemma2,
    lambda config: (
        _gemma_keys(config)
        | {"attn_logit_softcapping": features_of(config).attention_softcap or None}
    ),
)
"""A window of every second layer, the scale of scores, and caps."""


def _read_gemma3(hf: HfConfig) -> dict[str, Any]:
    pattern = hf.get("sliding_window_pattern", hf.get("_sliding_window_pattern", 6))
    types = _layer_types(hf, lambda layer: (layer + 1) % pattern != 0)
    ropes = hf.get("rope_parameters") or {}
    local = ropes.get("sliding_attention") or {}
    if (kind := local.get("rope_type", "default")) != "default":
        raise not_supported("rope_parameters.sliding_attention.rope_type", kind, ("default",))
    return {
        "window": hf.get("sliding_window", 4096) or 0,
        "layer_types": _shortest_pattern(types),
        "attention_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
        "head_softcap": hf.get("final_logit_softcapping") or 0.0,
        "window_rope_theta": float(
            local.get("rope_theta", hf.get("rope_local_base_freq", 10_000.0))
        ),
    }


def _gemma3_keys(config: ModelConfig) -> dict[str, Any]:
    local = features_of(config).window_rope_theta or config.rope_theta
    ropes = {
        "full_attention": _rotary_keys(config)["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return _gemma_keys(config) | {"rope_local_base_freq": local, "rope_parameters": ropes}


GEMMA3 = FeatureKeys(_read_gemma3, _gemma3_keys)
"""Windows with rotary positions of their own, the scale of scores, and a cap. Comes after
ROTARY."""


def _read_gpt_neo(hf: HfConfig) -> dict[str, Any]:
    types = [
        kind
        for kinds, times in hf.get("attention_types", [[["global", "local"], 12]])
        for kind in kinds * times
    ]
    types = hf.get("attention_layers", types)
    if len(types) != hf["num_layers"]:
        raise not_supported("attention_types of", len(types), (f"{hf['num_layers']} layers",))
    return {
        "window": hf.get("window_size", 256),
        "layer_types": _shortest_pattern(
            tuple("window" if each == "local" else "full" for each in types)
        ),
    }


def _gpt_neo_keys(config: ModelConfig) -> dict[str, Any]:
    window = features_of(config).window
    return {
        "attention_types": [[_layer_type_keys(config, GPT_NEO_LAYER_TYPES), 1]],
        **({"window_size": window} if window else {}),
    }


GPT_NEO = FeatureKeys(_read_gpt_neo, _gpt_neo_keys)
"""Which layers have a window."""
GPTJ = FeatureKeys(
    lambda hf: {"rope_dims": hf.get("rotary_dim", 64)},
    lambda config: {"rotary_dim": rotated_dims(config)},
)
"""Rotated dimensions."""


def _read_opt(hf: HfConfig) -> dict[str, Any]:
    is_pre, width = hf.get("do_layer_norm_before", True), hf.get("word_embed_proj_dim")
    return {
        "activation": _activation(hf.get("activation_function", "relu")),
        "norm_place": "pre" if is_pre else "post",
        "final_norm": is_pre and not hf.get("_remove_final_layer_norm", False),
        "table_dim": 0 if width in (None, hf["hidden_size"]) else width,
    } | ({} if hf.get("enable_bias", True) else {"biases": ()})


def _opt_keys(config: ModelConfig) -> dict[str, Any]:
    features = features_of(config)
    is_pre = features.norm_place == "pre"
    return {
        "activation_function": _their_activation(features.activation),
        "do_layer_norm_before": is_pre,
        "_remove_final_layer_norm": is_pre and not features.final_norm,
        "word_embed_proj_dim": features.table_dim or config.embed_dim,
        "enable_bias": bool(features.biases),
    }


OPT = FeatureKeys(_read_opt, _opt_keys)
"""The nonlinearity, the place of norms, the width of the table, and biases."""


TOKEN_TYPES = FeatureKeys(
    lambda hf: {"token_types": hf.get("type_vocab_size", 2)},
    lambda config: {"type_vocab_size": features_of(config).token_types},
)
"""The number of token types."""
HIDDEN_ACTIVATION = FeatureKeys(
    lambda hf: {"activation": _activation(hf.get("hidden_act", "gelu"))},
    lambda config: {"hidden_act": _their_activation(features_of(config).activation)},
)
"""The nonlinearity."""


def _read_table_width(hf: HfConfig) -> dict[str, Any]:
    width = hf.get("embedding_size", 128)
    return {"table_dim": 0 if width == hf["hidden_size"] else width}


TABLE_WIDTH = FeatureKeys(
    _read_table_width,
    lambda config: {"embedding_size": features_of(config).table_dim or config.embed_dim},
)
"""The width of the table."""


def _read_decoder_side(hf: HfConfig) -> dict[str, Any]:
    for key in ("attention_heads", "ffn_dim"):
        ours, theirs = (hf.get(f"{side}_{key}") for side in ("encoder", "decoder"))
        if theirs not in (None, ours):
            raise not_supported(f"decoder_{key}", theirs, (ours,))
    return {}


DECODER_SIDE = FeatureKeys(
    _read_decoder_side,
    lambda config: {
        "decoder_layers": config.num_layers - config.encoder_layers,
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.mlp_dim,
        "max_target_positions": config.max_length - config.frames,
    },
)
"""Sizes of a decoder beside an encoder, which are no features. Both sides have equal widths."""


def _activation(theirs: str) -> str:
    if theirs not in ACTIVATIONS:
        raise not_supported("activation", theirs, tuple(ACTIVATIONS))
    return ACTIVATIONS[theirs]


def _their_activation(ours: str | None) -> str:
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def not_supported(key: str, given: object, values: Iterable[Any]) -> ConfigError:
    """The error for a key of config.json that asks for what our models do not have."""
    return ConfigError(
        explain(
            "a config.json asks for what our models have not",
            given=f"{key}={given!r}",
            do=f"choose a model with {key}=" + " or ".join(map(repr, values)),
        )
    )
