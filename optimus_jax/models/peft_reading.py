"""Reads adapters in PEFT's format (models/peft_format.py)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.config.tuning import PROJECTIONS, Projection
from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.models.adapters import ROW_PARALLEL
from optimus_jax.models.finite_values import is_finite, not_finite
from optimus_jax.models.huggingface_checks import listed
from optimus_jax.models.huggingface_formats import format_of
from optimus_jax.models.huggingface_tensors import leaf_sources
from optimus_jax.models.merging import adapter_name, places_of
from optimus_jax.models.peft_config import PeftConfig, unsupported
from optimus_jax.models.peft_format import PREFIX, Leaves, Module, modules_of
from optimus_jax.models.shapes import Params, model_shapes

SAME_SCALE = 1e-9
"""Relative difference of factors that are equal but for the rounding of square roots."""


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
    peft = PeftConfig.of(config)
    rest = {re.sub(r"\.(default\.)?weight$", "", name): array for name, array in tensors.items()}
    _check_tables(peft, rest, model)
    suffixes = ("lora_A", "lora_B") if peft.method == "lora" else ("ia3_l",)
    modules = modules_of(model)
    numbers = range(model.num_layers)
    peft.check_patterns(module.name.format(layer) for module in modules for layer in numbers)
    scales: dict[str, float] = {}
    absent, unnamed = [], []
    found: dict[Projection, list[Leaves]] = {}
    for module in modules:
        of_module: dict[Projection, list[Leaves]] = {}
        for layer in numbers:
            whole_name = module.name.format(layer)
            names = [f"{PREFIX}{whole_name}.{suffix}" for suffix in suffixes]
            held = [np.asarray(rest.pop(name), np.float32) for name in names if name in rest]
            is_wanted = peft.targets(whole_name)
            if not held:
                absent += [whole_name] if is_wanted else []
                continue
            unnamed += [whole_name] if is_wanted is False else []
            _check_shapes(module, names, held)
            _check_finite(names, held)
            if peft.method == "lora":
                _check_rank(peft, whole_name, len(held[0]))
                power = 0.5 if peft.uses_root else 1.0
                scales[whole_name] = peft.alpha_of(whole_name) / len(held[0]) ** power
                split = _split_lora(module, held[0], held[1], peft.rank)
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
    if absent or unnamed:
        kinds = {"without tensors": absent, "with tensors, and not named": unnamed}
        raise CheckpointError(
            explain(
                "adapter_config.json names other modules than those whose tensors are there",
                given=f"target_modules={config['target_modules']!r:.200}"
                + "".join(f"; {kind}: {listed(names)}" for kind, names in kinds.items() if names),
                do="use the adapter_config.json that was saved with the tensors",
            )
        )
    tuning = _tuning(peft, found, scales)
    return tuning, _stacked(found, replace(model, tuning=tuning))


def _check_tables(peft: PeftConfig, tensors: Iterable[str], model: ModelConfig) -> None:
    """Raise ConfigError if there are adapters, or new values, of the embedding or the head."""
    hf_format, outside = format_of(model), set()
    for path, source in leaf_sources(model_shapes(model.base, model.vocab_size)).items():
        if not path.startswith(LAYERS) and source.leaf.is_matrix:
            outside |= {part.tensor.removesuffix(".weight") for part in source.parts}
    names = {hf_format.full_name(name) for name in outside | {hf_format.head} if name}
    names = {name.removesuffix(".weight") for name in names}
    stored = [
        tensor
        for tensor in tensors
        if any(f"{tensor}.".startswith(f"{PREFIX}{name}.") for name in names)
    ]
    wanted = [name for name in sorted(names) if peft.names(name)]
    if stored or wanted:
        raise ConfigError(
            explain(
                "only projections of layers have adapters here, not the embedding or the head",
                given="; ".join(
                    f"{what}: {listed(each)}"
                    for what, each in (
                        ("in target_modules", wanted),
                        ("in the file", sorted(stored)),
                    )
                    if each
                ),
                do="merge the adapters into their model with PEFT (merge_and_unload), save that,"
                " and begin with it",
            )
        )


def _check_rank(peft: PeftConfig, module: str, rank: int) -> None:
    """Raise CheckpointError unless the config says the rank that an adapter has."""
    if (wanted := peft.rank_of(module)) != rank:
        raise CheckpointError(
            explain(
                "an adapter has another rank than its adapter_config.json says",
                given=f"the matrices of {module} have rank {rank}, r or rank_pattern says {wanted}",
                do="use the adapter_config.json that was saved with the tensors",
            )
        )


def _check_finite(names: list[str], held: list[np.ndarray]) -> None:
    """Raise CheckpointError for values that are not finite in float32."""
    for name, array in zip(names, held, strict=True):
        if not is_finite(array):
            raise not_finite([name], array.dtype)


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
            else shapes[0] == ((1, into) if _leads_back(module) else (out, 1))
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
            raise unsupported("target_modules", name, "those of keys, values and feed-forward")
    return split


def _tuning(
    peft: PeftConfig, found: Mapping[Projection, list[Leaves]], scales: Mapping[str, float]
) -> Tuning:
    """The settings of adapters; `scales` are the factors of PEFT's modules."""
    targets = tuple(name for name in get_args(Projection) if name in found)
    if peft.method == "ia3":
        return Tuning(method="ia3", targets=targets)
    sizes = {
        each["a"].shape[0 if name in ROW_PARALLEL else 1]
        for name, layers in found.items()
        for each in layers
    }
    if len(sizes) > 1:
        raise unsupported(
            "rank_pattern", peft.values.get("rank_pattern"), "one rank for all modules"
        )
    [rank] = sizes
    # The rank of a module may be that of several projections together.
    least, most = min(scales.values()), max(scales.values())
    if most - least > SAME_SCALE * most:
        raise unsupported(
            "alpha_pattern", peft.values.get("alpha_pattern"), "one factor for all modules"
        )
    return Tuning(
        method="lora",
        rank=rank,
        alpha=most * rank ** (0.5 if peft.uses_root else 1.0),
        rank_scaling="sqrt_rank" if peft.uses_root else "rank",
        dropout=peft.dropout,
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
