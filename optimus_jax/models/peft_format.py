"""Adapters in PEFT's format: its adapter_config.json, and its tensors.

PEFT has one adapter for each of Hugging Face's matrices, ours one for each projection. Where one of
their matrices holds several projections (GPT-2's `c_attn`, Phi-3's `qkv_proj` and `gate_up_proj`),
ours become one adapter of as many times the rank: the rows of A one after another, and B with a
block for each projection. That is exact. In the other direction an adapter of such a matrix becomes
one for each projection, with equal A unless B has such blocks: it computes the same, and is another
parametrisation from the first step on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.config.tuning import Projection
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.models.adapters import ROW_PARALLEL
from optimus_jax.models.huggingface_formats import format_of
from optimus_jax.models.huggingface_tensors import leaf_sources
from optimus_jax.models.merging import adapter_name, all_places, places_of
from optimus_jax.models.shapes import Params, model_shapes

Leaves = Mapping[str, np.ndarray]
"""The leaves of an adapter: `a` and `b`, or `scale`."""
PREFIX = "base_model.model."
"""What PEFT puts before the names of Hugging Face's modules."""


@dataclass(frozen=True)
class Module:
    """One of Hugging Face's matrices of a layer, and the projections that it holds."""

    name: str
    """With the family's prefix, and `{}` for the number of the layer."""
    in_size: int
    out_size: int
    rows: Mapping[Projection, slice]
    """The range of every projection along its results."""

    @property
    def short_name(self) -> str:
        """The end of its name that no other module of a layer has."""
        return self.name.partition("{}.")[2]


def modules_of(model: ModelConfig) -> tuple[Module, ...]:
    """The matrices of a layer that hold projections."""
    shapes, hf_format = model_shapes(model.base, model.vocab_size), format_of(model)
    sources = leaf_sources(shapes)
    found: dict[str, Module] = {}
    for projection, (block, leaf, part) in all_places(model).items():
        source = sources[f"{LAYERS}/{block}/{leaf}"]
        row_size = source.out_size // source.shape[source.out_start]
        for held in source.parts:
            first, last = held.rows.start, held.rows.stop
            if part is not None:
                first, last = max(first, part), min(last, part + 1)
            if first >= last:
                continue
            start = held.out.start + (first - held.rows.start) * row_size
            stop = start + (last - first) * row_size
            name = hf_format.prefix + held.tensor.removesuffix(".weight")
            known = found.get(name, Module(name, prod(source.shape) // source.out_size, 0, {}))
            rows: dict[Projection, slice] = {**known.rows}
            rows[projection] = slice(start, stop)
            found[name] = replace(known, rows=rows, out_size=max(known.out_size, stop))
    return tuple(found.values())


def to_peft(
    params: Params, model: ModelConfig, base: str | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The adapter_config.json and the tensors of the adapters among `params`.

    Args:
      params: whole leaves on the host, layers in order; others than adapters may be missing.
      base: name or directory of the model without adapters.
    Raises:
      ConfigError: the model has no adapters.
    """
    tuning = model.tuning
    if not tuning.has_adapters:
        raise ConfigError(
            explain(
                "the run has no adapters",
                given=f"model.tuning.method={tuning.method}",
                do="export the whole model, or train with model.tuning.method=lora",
            )
        )
    places, adapted, tensors = places_of(model), [], {}
    for module in modules_of(model):
        leaves: dict[Projection, Leaves] = {}
        for name in module.rows:
            if name in places:
                arrays = params[LAYERS][places[name].block][adapter_name(name)]
                leaves[name] = {leaf: np.asarray(each, np.float32) for leaf, each in arrays.items()}
        if not leaves:
            continue
        adapted.append((module, list(leaves)))
        for layer in range(model.num_layers):
            found = _lora(module, leaves, layer) if tuning.method == "lora" else None
            for name, tensor in (found or _ia3(module, leaves, layer)).items():
                tensors[f"{PREFIX}{module.name.format(layer)}.{name}"] = tensor
    return _config(model, base, adapted), tensors


def _lora(module: Module, leaves: Mapping[Projection, Leaves], layer: int) -> dict[str, np.ndarray]:
    """A [R, in] and B [out, R] of one layer's matrix; R is the rank of its adapters together."""
    a_RI = np.concatenate([_matrices(name, each, layer)[0] for name, each in leaves.items()])
    b_OR, first = np.zeros((module.out_size, len(a_RI)), np.float32), 0
    for name, each in leaves.items():
        b = _matrices(name, each, layer)[1]
        b_OR[module.rows[name], first : first + b.shape[1]] = b
        first += b.shape[1]
    return {"lora_A.weight": a_RI, "lora_B.weight": b_OR}


def _matrices(projection: Projection, leaves: Leaves, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and B [out, rank] of one layer's projection."""
    a, b = leaves["a"][layer], leaves["b"][layer]
    if projection in ROW_PARALLEL:
        return a.reshape(len(a), -1), b
    return a.T, b.reshape(len(b), -1).T


def _ia3(module: Module, leaves: Mapping[Projection, Leaves], layer: int) -> dict[str, np.ndarray]:
    """The factors of one layer's matrix, [out, 1] or [1, in]; 1 for projections without."""
    [first, *_] = leaves
    if first in ROW_PARALLEL:
        return {"ia3_l": leaves[first]["scale"][layer].reshape(1, -1)}
    factors = np.ones((module.out_size, 1), np.float32)
    for name, each in leaves.items():
        factors[module.rows[name], 0] = each["scale"][layer].reshape(-1)
    return {"ia3_l": factors}


def _config(
    model: ModelConfig, base: str | None, adapted: list[tuple[Module, list[Projection]]]
) -> dict[str, Any]:
    tuning = model.tuning
    names = sorted(module.short_name for module, _ in adapted)
    common = {
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "target_modules": names,
        "fan_in_fan_out": format_of(model).out_dim != 0,
    }
    if tuning.method == "ia3":
        forward = [module.short_name for module, [first, *_] in adapted if first in ROW_PARALLEL]
        return common | {"peft_type": "IA3", "feedforward_modules": sorted(forward)}
    several = {
        module.short_name: len(projections)
        for module, projections in adapted
        if len(projections) > 1
    }
    # The factor of a larger rank is that of the others.
    power = 1.0 if tuning.rank_scaling == "rank" else 0.5
    return common | {
        "peft_type": "LORA",
        "r": tuning.rank,
        "lora_alpha": tuning.alpha,
        "lora_dropout": tuning.dropout,
        "use_rslora": tuning.rank_scaling == "sqrt_rank",
        "bias": "none",
        "rank_pattern": {name: tuning.rank * n for name, n in several.items()},
        "alpha_pattern": {name: tuning.alpha * n**power for name, n in several.items()},
    }
