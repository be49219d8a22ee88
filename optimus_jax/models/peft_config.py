"""What an adapter_config.json of PEFT says, and which of it ours can be.

Modules are named as PEFT names them: `model.layers.0.self_attn.q_proj`. A key of PEFT names all
modules whose names end in it. Keys and targets that are regular expressions are not evaluated,
since those of a stranger may take forever.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_jax.config.tuning import Method
from optimus_jax.errors import ConfigError, explain

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
"""Key -> values that ours support; the first is the default."""
NUMBERS = "an object of numbers"
NAMES = "a list of names, or a text"
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number", lambda value: _is_count(value)),
    "lora_alpha": ("a number", lambda value: _is_number(value)),
    "lora_dropout": ("a number", lambda value: _is_number(value)),
    "use_rslora": ("true or false", lambda value: isinstance(value, bool)),
    "rank_pattern": (NUMBERS, lambda value: value is None or _is_object(value, _is_count)),
    "alpha_pattern": (NUMBERS, lambda value: value is None or _is_object(value, _is_number)),
    "target_modules": (NAMES, lambda value: value is None or _is_names(value)),
    "exclude_modules": (NAMES, lambda value: value is None or _is_names(value)),
}
"""Key -> what its value is, unless it is missing."""
DEFAULT_RANK = DEFAULT_ALPHA = 8
"""PEFT's."""
KEEPS_BASE = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` with which the base's matrices are those of the published model."""
ALL_LINEAR = "all-linear"
"""Value of `target_modules`: all matrices but the head."""


@dataclass(frozen=True)
class PeftConfig:
    """The config of adapters that ours can be."""

    method: Method
    values: Mapping[str, Any]
    """By key."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "PeftConfig":
        """The config with the values of an adapter_config.json.

        Raises ConfigError for features that ours do not have, and malformed values.
        """
        kinds: dict[str, Method] = {"LORA": "lora", "IA3": "ia3"}
        if (kind := str(values.get("peft_type"))) not in kinds:
            raise unsupported("peft_type", kind, "LORA or IA3")
        for key, (type_name, is_good) in TYPES.items():
            if key in values and not is_good(values[key]):
                raise unsupported(key, values[key], type_name)
        for key, good in FIXED.items():
            if (given := values.get(key, good[0])) not in good:
                raise unsupported(key, given, repr(good[0]))
        if (given := values.get("init_lora_weights", True)) not in KEEPS_BASE:
            raise unsupported(
                "init_lora_weights", given, "true: others change the model's matrices"
            )
        return cls(kinds[kind], values)

    @property
    def rank(self) -> int:
        """Of modules without a rank of their own."""
        return self.values.get("r", DEFAULT_RANK)

    @property
    def uses_root(self) -> bool:
        """Whether alpha is divided by the square root of the rank (rsLoRA)."""
        return self.values.get("use_rslora", False)

    @property
    def dropout(self) -> float:
        """On an adapter's input."""
        return float(self.values.get("lora_dropout", 0.0))

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return self._own("rank_pattern", module, self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha of a module's adapter."""
        return float(
            self._own("alpha_pattern", module, self.values.get("lora_alpha", DEFAULT_ALPHA))
        )

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Raise ConfigError if a key of a pattern is the end of none of the modules' names: what it
        means is then unknown.
        """
        modules = list(modules)
        for pattern, instead in (
            ("rank_pattern", "one rank for all modules"),
            ("alpha_pattern", "one factor for all modules"),
        ):
            for key in self.values.get(pattern) or {}:
                if not any(_ends_in(module, key) for module in modules):
                    raise unsupported(pattern, self.values[pattern], instead)

    def names(self, module: str) -> bool:
        """Whether `target_modules` names a module."""
        wanted, excluded = (self.values.get(key) for key in ("target_modules", "exclude_modules"))
        return (
            isinstance(wanted, list)
            and _is_named(module, wanted)
            and not (isinstance(excluded, list) and _is_named(module, excluded))
        )

    def targets(self, projection: str) -> bool | None:
        """Whether the config says that a projection of a layer has an adapter; None: unknown."""
        wanted, excluded = (self.values.get(key) for key in ("target_modules", "exclude_modules"))
        if wanted is None or isinstance(excluded, str):
            return None
        if isinstance(wanted, list):
            return self.names(projection)
        is_all = wanted.lower() == ALL_LINEAR
        return not _is_named(projection, excluded or ()) if is_all else None

    def _own(self, pattern: str, module: str, default: Any) -> Any:
        """The value of the first key of a pattern that names a module."""
        values = (self.values.get(pattern) or {}).items()
        return next((value for key, value in values if _ends_in(module, key)), default)


def unsupported(key: str, given: object, instead: str) -> ConfigError:
    """The error for a value of the config that ours cannot have."""
    return ConfigError(
        explain(
            "adapters of this kind cannot be read",
            given=f"{key}={given!r:.80} in adapter_config.json",
            do=f"use adapters with {key}={instead}, or merge them with PEFT",
        )
    )


def _ends_in(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _is_named(module: str, names: Iterable[str]) -> bool:
    return any(_ends_in(module, name) for name in names)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_object(value: object, is_good: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_good, value.values()))


def _is_names(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    )
