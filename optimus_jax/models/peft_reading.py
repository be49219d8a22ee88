"""Reads adapters in PEFT's format (models/peft_format.py)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, get_args

import numpy as np

from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.config.tuning import PROJECTIONS, Method, Projection
from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.models.adapters import ROW_PARALLEL
from optimus_jax.models.merging import adapter_name, places_of
from optimus_jax.models.peft_format import PREFIX, Leaves, Module, modules_of
from optimus_jax.models.shapes import Params, model_shapes

FIXED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}
"""Key of adapter_config.json -> values that ours support; the first is the default."""
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number", lambda value: type(value) is int and value > 0),
    "lora_alpha": ("a number", lambda value: _is_number(value)),
    "lora_dropout": ("a number", lambda value: _is_number(value)),
    "alpha_pattern": (
        "an object of numbers",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
}
"""Key of adapter_config.json -> what its value is, unless it is missing or null."""
SAME_SCALE = 1e-9
"""Relative difference of factors that are equal but for the rounding of square roots."""
RANK = ALPHA = 8
"""PEFT's defaults."""
KEEPS_BASE = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` with which the base's matrices are those of the published model."""


def from_peft(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], model: ModelConfig
) -> tuple[Tuning, Params]:
    """What the adapters in PEFT's format are here, and their parameters: `layers/...` alone, with
    the layers in order.

    Args:
      config: an adapter_config.json.
      tensors: all tensors, by name.
      model: the model without adapters.
    Raises:
      ConfigError: the adapters have a feature that ours do not.
      CheckpointError: a tensor is missing, unknown, or has another shape.
    """
    method = _method(config)
    rest = {re.sub(r"\.(default\.)?weight$", "", name): array for name, array in tensors.items()}
    suffixes = ("lora_A", "lora_B") if method == "lora" else ("ia3_l",)
    ranks: dict[str, int] = {}
    found: dict[Projection, list[Leaves]] = {}
    for module in modules_of(model):
        of_module: dict[Projection, list[Leaves]] = {}
        for layer in range(model.num_layers):
            names = [f"{PREFIX}{module.name.format(layer)}.{suffix}" for suffix in suffixes]
            held = [np.asarray(rest.pop(name), np.float32) for name in names if name in rest]
            if not held:
                continue
            _check_shapes(module, names, held)
            if method == "lora":
                ranks[module.short_name] = len(held[0])
                split = _split_lora(module, held[0], held[1], config.get("r") or RANK)
            else:
                split = _split_ia3(module, held[0])
            for projection, leaves in split.items():
                of_module.setdefault(projection, []).append(leaves)
        found |= _adapted(of_module)
    if rest or not found:
        raise CheckpointError(
            explain(
                "a file of adapters has other tensors than the model has projections",
                given=f"{sorted(rest)[:3] or 'no tensor'} for {model.name} ({model.family})",
                do="use the model from which the adapters were made",
            )
        )
    tuning = _tuning(method, config, found, ranks)
    return tuning, _stacked(found, replace(model, tuning=tuning))


def _method(config: Mapping[str, Any]) -> Method:
    """lora or ia3. Raises ConfigError for what ours do not have."""
    kinds: dict[str, Method] = {"LORA": "lora", "IA3": "ia3"}
    if (kind := str(config.get("peft_type"))) not in kinds:
        raise _unsupported("peft_type", kind, "LORA or IA3")
    for key, (type_name, good) in TYPES.items():
        if (given := config.get(key)) is not None and not good(given):
            raise _unsupported(key, given, type_name)
    for key, values in FIXED.items():
        if (given := config.get(key, values[0])) not in values:
            raise _unsupported(key, given, repr(values[0]))
    if (given := config.get("init_lora_weights", True)) not in KEEPS_BASE:
        raise _unsupported("init_lora_weights", given, "true: others change the model's matrices")
    return kinds[kind]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unsupported(key: str, given: object, instead: str) -> ConfigError:
    return ConfigError(
        explain(
            "adapters of this kind cannot be read",
            given=f"{key}={given!r:.80} in adapter_config.json",
            do=f"use adapters with {key}={instead}, or merge them with PEFT",
        )
    )


def _check_shapes(module: Module, names: list[str], held: list[np.ndarray]) -> None:
    """Raise CheckpointError unless these are the tensors of the module's adapter."""
    shapes = [array.shape for array in held]
    into, out = module.in_size, module.out_size
    good = (
        len(shapes) == len(names)
        and all(len(shape) == 2 for shape in shapes)
        and (
            (shapes[0][1], shapes[1][0]) == (into, out) and shapes[0][0] == shapes[1][1]
            if len(names) == 2
            else prod(shapes[0]) == (into if _leads_back(module) else out)
        )
    )
    if not good:
        raise CheckpointError(
            explain(
                "an adapter does not fit its matrix",
                given=f"{' and '.join(names)} of shapes {shapes}, for a matrix of {out} x {into}",
                do="use the model from which the adapters were made",
            )
        )


def _leads_back(module: Module) -> bool:
    return any(name in ROW_PARALLEL for name in module.rows)


def _split_lora(
    module: Module, a_RI: np.ndarray, b_OR: np.ndarray, rank: int
) -> dict[Projection, Leaves]:
    """A and B of every projection of a module, as one layer of ours has them but for shapes."""
    num = len(module.rows)
    blocks = np.arange(len(a_RI)) // rank if len(a_RI) == num * rank else None
    split: dict[Projection, Leaves] = {}
    for place, (projection, rows) in enumerate(module.rows.items()):
        a, b = a_RI, b_OR[rows]
        if blocks is not None and num > 1 and not b[:, blocks != place].any():
            a, b = a[blocks == place], b[:, blocks == place]
        is_back = projection in ROW_PARALLEL
        split[projection] = {"a": a, "b": b} if is_back else {"a": a.T, "b": b.T}
    return split


def _adapted(
    of_module: Mapping[Projection, list[Leaves]],
) -> dict[Projection, list[Leaves]]:
    """The projections of one matrix that have an adapter: those whose B is zero in all layers have
    none, if that of another is not.
    """
    used: dict[Projection, list[Leaves]] = {}
    for name, layers in of_module.items():
        if "b" not in layers[0] or any(each["b"].any() for each in layers):
            used[name] = layers
    return used or dict(of_module)


def _split_ia3(module: Module, factors: np.ndarray) -> dict[Projection, Leaves]:
    """The factors of every projection of a module that has some."""
    flat = factors.reshape(-1)
    allowed = {name for names in PROJECTIONS["ia3"].values() for name in names}
    split: dict[Projection, Leaves] = {}
    for name, rows in module.rows.items():
        scale = flat if name in ROW_PARALLEL else flat[rows]
        if name in allowed:
            split[name] = {"scale": scale}
        elif (scale != 1).any():
            raise _unsupported("target_modules", name, "those of keys, values and feed-forward")
    return split


def _tuning(
    method: Method,
    config: Mapping[str, Any],
    found: Mapping[Projection, list[Leaves]],
    ranks: Mapping[str, int],
) -> Tuning:
    """The settings of adapters; `ranks` are those of PEFT's modules."""
    targets = tuple(name for name in get_args(Projection) if name in found)
    if method == "ia3":
        return Tuning(method="ia3", targets=targets)
    sizes = {
        each["a"].shape[0 if name in ROW_PARALLEL else 1]
        for name, layers in found.items()
        for each in layers
    }
    if len(sizes) > 1:
        raise _unsupported("rank_pattern", dict(ranks), "one rank for all modules")
    [rank] = sizes
    alpha, alphas = float(config.get("lora_alpha") or ALPHA), config.get("alpha_pattern") or {}
    uses_root = bool(config.get("use_rslora", False))
    power = 0.5 if uses_root else 1.0
    # The rank of a module may be that of several projections together.
    scales = {alphas.get(name, alpha) / size**power for name, size in ranks.items()}
    if max(scales) - min(scales) > SAME_SCALE * max(scales) or alphas.keys() - ranks.keys():
        raise _unsupported("alpha_pattern", alphas, "one factor for all modules")
    return Tuning(
        method="lora",
        rank=rank,
        alpha=max(scales) * rank**power,
        rank_scaling="sqrt_rank" if uses_root else "rank",
        dropout=float(config.get("lora_dropout") or 0.0),
        targets=targets,
    )


def _stacked(found: Mapping[Projection, list[Leaves]], model: ModelConfig) -> Params:
    """Leaves of all layers in the shapes of ours."""
    likes = model_shapes(model, model.vocab_size).params[LAYERS]
    blocks: Params = {}
    for projection, layers in found.items():
        if len(layers) != model.num_layers:
            raise CheckpointError(
                explain(
                    "some layers have an adapter and others have none",
                    given=f"{len(layers)} of {model.num_layers} layers have one for {projection}",
                    do="use adapters of all layers",
                )
            )
        block, name = places_of(model)[projection].block, adapter_name(projection)
        blocks.setdefault(block, {})[name] = {
            leaf: np.stack([each[leaf] for each in layers]).reshape(like.shape)
            for leaf, like in likes[block][name].items()
        }
    return {LAYERS: blocks}
