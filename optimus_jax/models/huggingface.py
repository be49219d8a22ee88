"""Converts the weights and sizes of Hugging Face's models to ours and back.

Both sides hold the same matrices. Ours have one leaf for matrices that are used together (key and
value, gate and up), and the layers are stacked. Theirs have other names and one tensor per layer;
GPT-2 has queries, keys and values in one tensor. All differences between families are in
`HUGGING_FACE_FORMATS`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import jax
import numpy as np

from optimus_jax.config import ModelConfig, RopeScaling
from optimus_jax.errors import CheckpointError, ConfigError, explain, nearest
from optimus_jax.mesh.axes import EMBED, LAYERS, VOCAB
from optimus_jax.models.families import family_of
from optimus_jax.models.shapes import ModelShapes, Params, model_shapes

HEAD = "lm_head.weight"
"""The head's matrix. Where weights are tied, a file may leave it out or repeat the embedding."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFormat:
    """How Hugging Face stores the models of one family."""

    sizes: Mapping[str, str]
    """Field of ModelConfig -> key of config.json."""
    optional: tuple[str, ...]
    """Fields in `sizes` that a config.json may leave out."""
    tied: bool
    """Whether weights are tied if a config.json does not say."""
    only: Mapping[str, tuple[Any, ...]]
    """Key of config.json -> the values that our models support; the first is the default of a
    missing key."""
    prefix: str
    """Prefix of every tensor name except the head's; some released files leave it out."""
    tensors: Mapping[str, str]
    """Our leaves -> their tensors. Several names on one side are concatenated along `out` into one
    matrix."""
    out_dim: int
    """Dimension of a layer's matrices that is `out`: 0 for torch's Linear, -1 for GPT-2's
    Conv1D."""
    buffers: tuple[str, ...]
    """Name endings of constants that older files store among the weights."""


HUGGING_FACE_FORMATS: dict[str, HuggingFaceFormat] = {
    "gpt2": HuggingFaceFormat(
        sizes={
            "vocab_size": "vocab_size",
            "num_layers": "n_layer",
            "embed_dim": "n_embd",
            "num_heads": "n_head",
            "mlp_dim": "n_inner",
            "max_length": "n_positions",
            "tied": "tie_word_embeddings",
            "norm_epsilon": "layer_norm_epsilon",
            "init_std": "initializer_range",
        },
        optional=("mlp_dim", "tied"),
        tied=True,
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        prefix="transformer.",
        tensors={
            "embedding/table": "wte.weight",
            "positions": "wpe.weight",
            "layers/attention_norm/scale": "h.{}.ln_1.weight",
            "layers/attention_norm/bias": "h.{}.ln_1.bias",
            "layers/attention/query layers/attention/key_value": "h.{}.attn.c_attn.weight",
            "layers/attention/query_bias layers/attention/key_value_bias": "h.{}.attn.c_attn.bias",
            "layers/attention/out": "h.{}.attn.c_proj.weight",
            "layers/attention/out_bias": "h.{}.attn.c_proj.bias",
            "layers/mlp_norm/scale": "h.{}.ln_2.weight",
            "layers/mlp_norm/bias": "h.{}.ln_2.bias",
            "layers/mlp/up": "h.{}.mlp.c_fc.weight",
            "layers/mlp/up_bias": "h.{}.mlp.c_fc.bias",
            "layers/mlp/down": "h.{}.mlp.c_proj.weight",
            "layers/mlp/down_bias": "h.{}.mlp.c_proj.bias",
            "final_norm/scale": "ln_f.weight",
            "final_norm/bias": "ln_f.bias",
            "head/table": HEAD,
        },
        out_dim=-1,
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "llama": HuggingFaceFormat(
        sizes={
            "vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "embed_dim": "hidden_size",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "mlp_dim": "intermediate_size",
            "max_length": "max_position_embeddings",
            "tied": "tie_word_embeddings",
            "norm_epsilon": "rms_norm_eps",
            "init_std": "initializer_range",
        },
        optional=("num_kv_heads", "head_dim", "tied"),
        tied=False,
        only={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        prefix="model.",
        tensors={
            "embedding/table": "embed_tokens.weight",
            "layers/attention_norm/scale": "layers.{}.input_layernorm.weight",
            "layers/attention/query": "layers.{}.self_attn.q_proj.weight",
            "layers/attention/key_value": (
                "layers.{}.self_attn.k_proj.weight layers.{}.self_attn.v_proj.weight"
            ),
            "layers/attention/out": "layers.{}.self_attn.o_proj.weight",
            "layers/mlp_norm/scale": "layers.{}.post_attention_layernorm.weight",
            "layers/mlp/up": "layers.{}.mlp.gate_proj.weight layers.{}.mlp.up_proj.weight",
            "layers/mlp/down": "layers.{}.mlp.down_proj.weight",
            "final_norm/scale": "norm.weight",
            "head/table": HEAD,
        },
        out_dim=0,
        buffers=("rotary_emb.inv_freq",),
    ),
}

STORED_TRANSPOSED = ("layers/attention/out", "layers/mlp/down")
"""Our matrices whose result has the width `embed`: stored [out, in]; all others are [in, out]."""

ROPE_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Field of RopeScaling -> key of a config.json's `rope_scaling`."""


def config_from_huggingface(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig for a config.json.

    Dropout stays 0: it is a setting of a training run, not a property of the weights.

    Raises:
      ConfigError: a size is missing, or the model has a feature that ours do not support.
    """
    family = hf_config.get("model_type", "")
    hf_format = _format_of(family)
    for key, values in hf_format.only.items():
        if (given := hf_config.get(key, values[0])) not in values:
            raise _not_ours(key, given, values)
    sizes = {
        field: hf_config[key]
        for field, key in hf_format.sizes.items()
        if hf_config.get(key) is not None
    }
    missing = [
        key
        for field, key in hf_format.sizes.items()
        if field not in sizes and field not in hf_format.optional
    ]
    if missing:
        raise ConfigError(
            explain(
                f"a config.json of {family} lacks sizes",
                given=f"no {', '.join(missing)}",
                do="use the config.json that came with the weights",
            )
        )
    embed, heads = sizes["embed_dim"], sizes["num_heads"]
    derived = {
        "num_kv_heads": heads,
        "head_dim": embed // heads,
        "mlp_dim": 4 * embed,
        "tied": hf_format.tied,
    }
    rotary = _rotary(hf_config) if family_of(family).positions == "rotary" else {}
    return ModelConfig(family=family, **(derived | sizes | rotary))


def from_huggingface(
    state_dict: Mapping[str, np.ndarray], config: ModelConfig, vocab_rows: int
) -> Params:
    """Our float32 parameters from Hugging Face's tensors.

    Args:
      state_dict: every tensor of the model, by name, with or without the family's prefix.
      vocab_rows: rows of the embedding; those past `config.vocab_size` become zero.
    Raises:
      CheckpointError: a tensor is missing, unknown or has another shape, or a tied head differs
        from the embedding.
    """
    hf_format, shapes = _format_of(config.family), model_shapes(config, vocab_rows)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.params)
    blocks = list(_blocks(params, shapes))
    tensors = {
        name.removeprefix(hf_format.prefix): tensor
        for name, tensor in state_dict.items()
        if not name.endswith(hf_format.buffers)
    }
    tied_head = tensors.pop(HEAD, None) if config.tied else None
    _check_names(tensors, {name for theirs, _ in blocks for name in theirs}, config)
    for theirs, ours in blocks:
        _check_shapes(tensors, theirs, ours, hf_format.out_dim)
        matrix = np.concatenate([tensors[name] for name in theirs], hf_format.out_dim)
        ends = np.cumsum([view.shape[hf_format.out_dim] for view in ours])
        for view, part in zip(ours, np.split(matrix, ends[:-1], hf_format.out_dim), strict=True):
            view[...] = part
    if tied_head is not None and not np.array_equal(
        tied_head, params["embedding"]["table"][: config.vocab_size]
    ):
        raise CheckpointError(
            explain(
                f"weights are tied, but {HEAD} is not the embedding",
                given="model.tied=True",
                do="set tie_word_embeddings=false in config.json, or model.tied=false",
            )
        )
    return params


def to_huggingface(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `from_huggingface`, without padding rows, and without a head if it is tied."""
    hf_format, params = _format_of(config.family), jax.tree.map(np.asarray, params)
    state_dict = {}
    for theirs, ours in _blocks(params, model_shapes(config, len(params["embedding"]["table"]))):
        matrix = np.concatenate(ours, hf_format.out_dim)
        for name, part in zip(
            theirs, np.split(matrix, len(theirs), hf_format.out_dim), strict=True
        ):
            # safetensors writes an array's memory as it is and ignores its strides.
            state_dict[name if name == HEAD else hf_format.prefix + name] = np.ascontiguousarray(
                part
            )
    return state_dict


def _format_of(family: str) -> HuggingFaceFormat:
    if family not in HUGGING_FACE_FORMATS:
        raise ConfigError(
            explain(
                "Hugging Face models of this type are not among ours",
                given=f"model_type={family!r}",
                do=nearest(family, HUGGING_FACE_FORMATS),
            )
        )
    return HUGGING_FACE_FORMATS[family]


def _blocks(params: Params, shapes: ModelShapes) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Yield (names of Hugging Face's tensors, views of our leaves) that hold the same matrix.

    Either side, concatenated along `out_dim`, is that matrix; the views have the orientation of
    Hugging Face's tensors.
    """
    config, hf_format = shapes.config, _format_of(shapes.config.family)
    for ours, theirs in hf_format.tensors.items():
        if theirs == HEAD and config.tied:
            continue
        leaves = [
            (_leaf(params, path), _leaf(shapes.names, path), path in STORED_TRANSPOSED)
            for path in ours.split()
        ]
        in_layers = "{}" in theirs
        for layer in range(config.num_layers) if in_layers else (0,):
            views = [
                _matrix(leaf, names, layer, config.vocab_size, back) for leaf, names, back in leaves
            ]
            if in_layers and hf_format.out_dim == 0:
                views = [view.T for view in views]
            yield theirs.replace("{}", str(layer)).split(), views


def _leaf(tree: Params, path: str) -> Any:
    return reduce(getitem, path.split("/"), tree)


def _matrix(
    leaf: np.ndarray, names: tuple[str, ...], layer: int, vocab_size: int, back: bool
) -> np.ndarray:
    """A view of one layer's part of a leaf, without padding.

    It is [in, out], where one of the two is `embed`, or a vector if `embed` is not a dimension.
    """
    if names[0] == LAYERS:
        leaf, names = leaf[layer], names[1:]
    if names[0] == VOCAB:
        leaf = leaf[:vocab_size]
    if EMBED not in names:
        return leaf.reshape(-1)
    matrix = leaf.reshape(len(leaf), -1)
    return matrix.T if back else matrix


def _rotary(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of rotary positions.

    A config.json has them in one mapping since transformers 5; before, a number and a mapping.
    """
    rope = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", hf_config.get("rope_theta", ModelConfig.rope_theta))
    match kind := rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return {"rope_theta": theta}
        case "llama3" if rope.keys() >= set(ROPE_SCALING.values()):
            scaling = RopeScaling(**{field: rope[key] for field, key in ROPE_SCALING.items()})
            return {"rope_theta": theta, "rope_scaling": scaling}
        case "llama3":
            raise ConfigError(
                explain(
                    "rope_type=llama3 lacks numbers",
                    given=rope,
                    do="give " + ", ".join(ROPE_SCALING.values()),
                )
            )
    raise _not_ours("rope_type", kind, ("default", "llama3"))


def _not_ours(key: str, given: object, values: tuple[Any, ...]) -> ConfigError:
    return ConfigError(
        explain(
            "a config.json asks for what our models have not",
            given=f"{key}={given!r}",
            do=f"choose a model with {key}=" + " or ".join(map(repr, values)),
        )
    )


def _check_names(given: Mapping[str, np.ndarray], wanted: set[str], config: ModelConfig) -> None:
    missing, unknown = sorted(wanted - given.keys()), sorted(given.keys() - wanted)
    if missing or unknown:
        raise CheckpointError(
            explain(
                f"these are not the weights of {config.family} with {config.num_layers} layers",
                given=f"missing: {_listed(missing)}; unknown: {_listed(unknown)}",
                do="use the config.json that came with the weights",
            )
        )


def _listed(names: list[str]) -> str:
    return (", ".join(names[:5]) or "none") + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


def _check_shapes(
    tensors: Mapping[str, np.ndarray], theirs: list[str], ours: list[np.ndarray], out_dim: int
) -> None:
    wanted = list(ours[0].shape)
    wanted[out_dim] = sum(view.shape[out_dim] for view in ours) // len(theirs)
    for name in theirs:
        if tensors[name].shape != tuple(wanted):
            raise CheckpointError(
                explain(
                    f"tensor {name!r} does not fit the model's sizes",
                    given=f"shape {tensors[name].shape}, wanted {tuple(wanted)}",
                    do="use the config.json that came with the weights",
                )
            )
