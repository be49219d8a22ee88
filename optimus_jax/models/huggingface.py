"""Converts the weights and sizes of Hugging Face's models to ours and back.

Both sides hold the same matrices. Ours have one leaf for matrices that are used together (key and
value, gate and up), and the layers are stacked. Theirs have other names and one tensor per layer;
GPT-2 has queries, keys and values in one tensor. All differences between families are in
`models/huggingface_formats.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from optimus_jax.config import Features, ModelConfig, RopeScaling
from optimus_jax.errors import CheckpointError, ConfigError, explain, nearest
from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.models.families import FAMILIES
from optimus_jax.models.huggingface_formats import (
    HEAD,
    HEAD_BIAS,
    HUGGING_FACE_FORMATS,
    HfConfig,
    HuggingFaceFormat,
    not_supported,
)
from optimus_jax.models.shapes import ModelShapes, Params, model_shapes

UNSUPPORTED = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "no_rope_layers",
    "quantization_config",
)
"""Keys of config.json that change arithmetic in a way that ours does not have."""

ROPE_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Field of RopeScaling -> key of a config.json's `rope_scaling`."""


def config_from_huggingface(hf_config: HfConfig) -> ModelConfig:
    """The ModelConfig for a config.json.

    Dropout stays 0: it is a setting of a training run, not a property of the weights.

    Raises:
      ConfigError: a size is missing, or the model has a feature that ours do not support.
    """
    family = hf_config.get("model_type", "")
    hf_format = _format_of(family)
    for key, values in hf_format.only.items():
        if (given := hf_config.get(key, values[0])) not in values:
            raise not_supported(key, given, values)
    for key in UNSUPPORTED:
        if hf_config.get(key) is not None:
            raise not_supported(key, hf_config[key], (None,))
    ropes = hf_config.get("rope_parameters") or {}
    by_layer_type = (part for part in ropes.values() if isinstance(part, Mapping))
    for part in (hf_config, ropes, *by_layer_type):
        partial = part.get("partial_rotary_factor")
        if family != "phi3" and partial not in (None, 1.0):
            raise not_supported("partial_rotary_factor", partial, (1.0,))
    sizes, missing = {}, []
    for field, key in hf_format.sizes.items():
        if (value := hf_config.get(key)) is None:
            value = hf_format.defaults.get(key)
        if value is not None:
            sizes[field] = value
        elif key not in hf_format.defaults:
            missing.append(key)
    if missing:
        raise ConfigError(
            explain(
                f"a config.json of {family} lacks sizes",
                given=f"no {', '.join(missing)}",
                do="use the config.json that came with the weights",
            )
        )
    embed, heads = sizes["embed_dim"], sizes["num_heads"]
    if "head_dim" not in sizes and embed % heads:
        raise ConfigError(
            explain(
                f"the heads of a config.json of {family} have no whole width",
                given=f"{hf_format.sizes['embed_dim']}={embed}, {heads} heads",
                do="use the config.json that came with the weights",
            )
        )
    derived = {"num_kv_heads": heads, "head_dim": embed // heads, "mlp_dim": 4 * embed}
    rotary = _rotary(hf_config) if FAMILIES[family].positions == "rotary" else {}
    own = {
        name: value
        for name, value in hf_format.features(hf_config).items()
        if value != getattr(FAMILIES[family], name)
    }
    return ModelConfig(family=family, features=Features(**own), **(derived | sizes | rotary))


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
            state_dict[name if name in (HEAD, HEAD_BIAS) else hf_format.prefix + name] = (
                np.ascontiguousarray(part)
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
        if _leaf(params, ours.split()[0]) is None:
            continue
        leaves = [(_leaf(params, path), _leaf(shapes.leaves, path)) for path in ours.split()]
        for layer in range(config.num_layers) if "{}" in theirs else (0,):
            views = [
                _as_theirs(array, leaf, layer, config.vocab_size, hf_format.out_dim)
                for array, leaf in leaves
            ]
            yield theirs.replace("{}", str(layer)).split(), views


def _leaf(tree: Params, path: str) -> Any:
    """A leaf by its path; None if the model does not have it."""
    for name in path.split("/"):
        if tree is None or name not in tree:
            return None
        tree = tree[name]
    return tree


def _as_theirs(
    array: np.ndarray, leaf: Leaf, layer: int, vocab_size: int, out_dim: int
) -> np.ndarray:
    """A view of one layer's part of a parameter, without padding: a vector, a table, or a matrix
    whose dimension `out_dim` is that of its results.
    """
    if leaf.is_in_layers:
        array, leaf = array[layer], leaf.last(array.ndim - 1)
    if leaf.dims[0] == VOCAB:
        array = array[:vocab_size]
    if not leaf.is_matrix:
        return array.reshape(-1)
    array = array.reshape(len(array), -1)
    own_out_dim = {"table": out_dim, "matrix": -1, "matrix_back": 0}[leaf.role]
    return array if own_out_dim == out_dim else array.T


def _rotary(hf_config: HfConfig) -> dict[str, Any]:
    """The ModelConfig fields of rotary positions.

    A config.json has them in one mapping since transformers 5, or in one for each type of layer;
    before, a number and a mapping.
    """
    given = hf_config.get("rope_parameters") or {}
    given = given.get("full_attention", given)
    rope = {**given, **(hf_config.get("rope_scaling") or {})}
    theta = float(rope.get("rope_theta", hf_config.get("rope_theta") or ModelConfig.rope_theta))
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
