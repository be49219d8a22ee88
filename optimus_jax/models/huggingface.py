"""Converts the weights and sizes of Hugging Face's models to ours and back.

Which of their tensors hold which of our leaves is in `models/huggingface_tensors.py`, and all
differences between families are in `models/huggingface_formats.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from optimus_jax.config import Features, ModelConfig
from optimus_jax.config.model import FIXED_LABELS
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.models.families import FAMILIES
from optimus_jax.models.huggingface_checks import check_tied_head, model_tensors
from optimus_jax.models.huggingface_features import HfConfig, not_supported, read_rotary
from optimus_jax.models.huggingface_format import HuggingFaceFormat
from optimus_jax.models.huggingface_formats import family_format, format_of
from optimus_jax.models.huggingface_keys import check_keys, check_task, labels_of
from optimus_jax.models.huggingface_tensors import leaf_sources, tensor_shapes
from optimus_jax.models.shapes import Params, model_shapes

UNSUPPORTED = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "no_rope_layers",
)
"""Keys of config.json that change arithmetic in a way that ours does not have."""


def config_from_huggingface(hf_config: HfConfig) -> ModelConfig:
    """The ModelConfig for a config.json.

    Dropout stays 0: it is a setting of a training run, not a property of the weights.

    Raises:
      ConfigError: a size is missing, or the model has a feature that ours do not support.
    """
    if not isinstance(family := hf_config.get("model_type"), str):
        raise ConfigError(
            explain(
                "a config.json does not say of which family the model is",
                given=f"model_type={family!r:.80}",
                do="use the config.json that came with the weights",
            )
        )
    hf_format = family_format(family)
    check_keys(hf_config, hf_format)
    check_task(hf_config, hf_format)
    for key, values in hf_format.only.items():
        if (given := hf_config.get(key, values[0])) not in values:
            raise not_supported(key, given, values)
    for key in UNSUPPORTED:
        if hf_config.get(key) is not None:
            raise not_supported(key, hf_config[key], (None,))
    if (codes := hf_config.get("quantization_config")) is not None:
        raise ConfigError(
            explain(
                "the published model is quantised, in a format that is not read",
                given=f"quantization_config={codes!r}",
                do="name the model from which it was made; model.tuning.method=lora with"
                " model.tuning.base_precision=nf4 quantises it while it is read",
            )
        )
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
        elif key not in hf_format.defaults and field != "init_std":  # concerns new weights alone
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
    rotary = read_rotary(hf_config) if FAMILIES[family].positions == "rotary" else {}
    own = {
        name: value
        for keys in hf_format.features
        for name, value in keys.read(hf_config).items()
        if value != getattr(FAMILIES[family], name)
    }
    sizes |= hf_format.derived(sizes)
    more = rotary | _labels_of(hf_config, hf_format) | dict(hf_format.fixed)
    return ModelConfig(family=family, features=Features(**own), **(derived | sizes | more))


def _labels_of(hf_config: HfConfig, hf_format: HuggingFaceFormat) -> dict[str, Any]:
    """The ModelConfig fields of labels; none if the head is over the vocabulary."""
    for name in hf_config.get("architectures") or ():
        if (labelled := labels_of(name, hf_format)) is not None:
            given = hf_config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
            if labelled in FIXED_LABELS:
                given = dict(enumerate(FIXED_LABELS[labelled]))
            names = {int(number): str(name) for number, name in given.items()}
            return {
                "labels": _different(names[number] for number in range(len(names))),
                "labelled": labelled,
            }
    return {}


def _different(names: Iterable[str]) -> tuple[str, ...]:
    """Names of labels, of which those that repeat an earlier one get their number: ImageNet has two
    labels `crane`."""
    found: list[str] = []
    for number, name in enumerate(names):
        found.append(f"{name} ({number})" if name in found else name)
    return tuple(found)


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
    tensors = model_tensors(state_dict, config)
    check_tied_head(tensors, config)
    shapes = model_shapes(config, vocab_rows)
    sources = leaf_sources(shapes)
    return jax.tree.map_with_path(
        lambda path, _: sources[leaf_path(path)].block(tensors),
        shapes.params,
    )


def to_huggingface(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `from_huggingface`, without padding rows, and without a head if it is tied."""
    hf_format, table = format_of(config), params["embedding"]["table"]
    sources = leaf_sources(model_shapes(config, len(table)))
    # safetensors writes an array's memory as it is and ignores its strides.
    tensors = {name: np.empty(shape, table.dtype) for name, shape in tensor_shapes(config).items()}
    for path, array in jax.tree.leaves_with_path(params):
        sources[leaf_path(path)].write(np.asarray(array), tensors)
    shapes = hf_format.file_shapes(config)
    tensors |= hf_format.constants(config)
    return {
        hf_format.full_name(name): tensor.reshape(shapes.get(name, tensor.shape))
        for name, tensor in tensors.items()
    }
