"""What is said of how Hugging Face stores a family: keys of config.json, and names of tensors. The
table of families is in models/huggingface_formats.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.config.model import Medium
from optimus_jax.models.huggingface_features import FeatureKeys

HEAD_LEAVES = (
    "head/table",
    "head_bias",
    "table_out",
    "transform_bias",
    "transform_norm/scale",
    "transform_norm/bias",
    "label_table",
    "hidden_patch",
)
"""Leaves of heads, and what stands for a hidden patch, which is used beside the head of patches
only."""


@dataclass(frozen=True, kw_only=True)
class LabelHead:
    """How Hugging Face stores a head of labels."""

    architecture: str
    """Class of transformers."""
    prefix: str
    """Prefix of the head's tensors, which they have in `tensors` too."""
    tensors: Mapping[str, str]
    """Our leaves -> their tensors."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFormat:
    """How Hugging Face stores the models of one family."""

    architecture: str
    """Class of transformers for the task of pretraining."""
    architectures: tuple[str, ...] = ("ForCausalLM", "LMHeadModel", "Model")
    """Endings of the names of classes that have the same head, or none."""
    sizes: Mapping[str, str]
    """Field of ModelConfig -> key of config.json."""
    defaults: Mapping[str, Any]
    """Values of the keys that a config.json may leave out, as the family's class has them."""
    only: Mapping[str, tuple[Any, ...]]
    """Key of config.json -> the values that our models support; the first is the default of a
    missing key."""
    features: tuple[FeatureKeys, ...] = ()
    """Keys of config.json that decide features; a later one may replace keys of an earlier one."""
    head_width_is_whole: bool = True
    """Whether the class refuses an embed_dim that is no multiple of num_heads."""
    prefix: str
    """Prefix of every tensor name except the head's; some released files leave it out."""
    head_prefix: str = "lm_head."
    """Prefix of the names of the head's tensors, which they have in `tensors` too."""
    tensors: Mapping[str, str]
    """Our leaves -> their tensors, whose names have `{}` for a layer's number, and `{side}` for
    encoder or decoder. Several names on one side are concatenated along `out` into one matrix.
    Leaves that a model does not have are passed over."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that no key of config.json has."""
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda sizes: {}
    """Fields of ModelConfig that follow from several of `sizes`, given with their values."""
    file_shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = lambda config: {}
    """Shapes in files of tensors that are no matrices there, by name: with as many elements, in the
    same order."""
    out_dim: int = 0
    """Dimension of a layer's matrices that is `out`: 0 for torch's Linear, -1 for GPT-2's
    Conv1D."""
    buffers: tuple[str, ...] = ()
    """Name endings of what files store among the weights, and our models do not have."""
    constants: Callable[[ModelConfig], Mapping[str, np.ndarray]] = lambda config: {}
    """Those of the buffers that files must have, by name, float32."""
    older_endings: Mapping[str, str] = field(default_factory=dict)
    """Name endings in older files -> those in `tensors`."""
    label_heads: Mapping[str, LabelHead] = field(default_factory=dict)
    """Heads of labels, by `ModelConfig.labelled`, where they are not as decoders have them."""

    @property
    def head(self) -> str | None:
        """The matrix of the head over the vocabulary; None: the head is one of labels. Where
        weights are tied, a file may leave it out or repeat the embedding."""
        return self.tensors.get("head/table")

    def label_head(self, labelled: str) -> LabelHead | None:
        """The head of labels of this kind; None: no class has one."""
        stem = self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        if labelled in self.label_heads or labelled != "sequence" or stem == self.architecture:
            return self.label_heads.get(labelled)
        return LabelHead(
            architecture=f"{stem}ForSequenceClassification",
            prefix="score.",
            tensors={"label_table": "score.weight"},
        )

    def with_label_head(self, head: LabelHead) -> "HuggingFaceFormat":
        """The format of the same models with a head of labels."""
        body = {ours: name for ours, name in self.tensors.items() if ours not in HEAD_LEAVES}
        return replace(
            self,
            architecture=head.architecture,
            architectures=(head.architecture,),
            head_prefix=head.prefix,
            tensors={**body, **head.tensors},
            buffers=tuple(each for each in self.buffers if each not in head.tensors.values()),
        )

    @property
    def reads(self) -> Medium:
        """What its models read."""
        if "image_size" in self.sizes:
            return "images"
        return "sound" if "frames" in self.sizes else "text"

    def full_name(self, name: str) -> str:
        """A name of `tensors` with the prefix that files have."""
        return name if name.startswith(self.head_prefix) else self.prefix + name


def layer_tensors(
    attention: str, mlp: str, norms: Mapping[str, str], layer: str, *, ours: str = ""
) -> dict[str, str]:
    """Our leaves -> their tensors of one layer, each with weight and bias.

    Args:
      attention: their names of query, key, value and output, in this order, separated by spaces.
      mlp: their names of the projections up (two with a gate) and down; empty: there are none.
      norms: our norms -> theirs.
      layer: their prefix of a layer, with `{}` for its number.
      ours: our prefix of the names in a layer.
    """
    query, key, value, out = attention.split()
    modules = {
        "attention/query": query,
        "attention/key_value": f"{key} {value}",
        "attention/out": out,
    }
    if mlp:
        *ups, down = mlp.split()
        modules |= {"mlp/up": " ".join(ups), "mlp/down": down}
    tensors = {f"layers/{ours}attention/value_bias": f"{layer}{value}.bias"}
    for name, theirs in modules.items():
        for suffix, kind in (("", "weight"), ("_bias", "bias")):
            tensors[f"layers/{ours}{name}{suffix}"] = " ".join(
                f"{layer}{each}.{kind}" for each in theirs.split()
            )
    return tensors | {
        f"layers/{ours}{name}/{leaf}": f"{layer}{theirs}.{kind}"
        for name, theirs in norms.items()
        for leaf, kind in (("scale", "weight"), ("bias", "bias"))
    }
