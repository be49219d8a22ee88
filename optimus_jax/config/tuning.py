"""Settings of what is trained: all of a model, some groups of its parameters, or adapters."""

from dataclasses import dataclass
from typing import Literal, get_args

from optimus_jax.config.checks import check_counts, check_not_negative, check_positive
from optimus_jax.errors import ConfigError, explain

ParameterGroup = Literal["embedding", "attention", "mlp", "norm", "head", "adapter"]
"""Part of a model to which a parameter belongs: the embedding's tables, the projections of
attention, those of the feed-forward, norms, the output head where it is not the embedding, or an
adapter. Biases of projections belong to their block."""
BaseGroup = Literal["embedding", "attention", "mlp", "norm", "head"]
"""The groups of a model without adapters."""
BASE_GROUPS: tuple[BaseGroup, ...] = get_args(BaseGroup)

Projection = Literal["query", "key", "value", "out", "gate", "up", "down"]
"""The projections of a layer, each of which may have an adapter."""
Target = Literal["all", "qkvo", "mlp", "query", "key", "value", "out", "gate", "up", "down"]
"""A projection, or those of attention, of the feed-forward, or both."""
Method = Literal["none", "lora", "ia3"]
QuantisedFormat = Literal["nf4", "int8"]
"""Formats of 4 and 8 bits (mesh/quantised.py)."""
QUANTISED: tuple[QuantisedFormat, ...] = get_args(QuantisedFormat)
BasePrecision = Literal["f32", "bf16", "nf4", "int8"]

PROJECTIONS: dict[Method, dict[Target, tuple[Projection, ...]]] = {
    "none": {},
    "lora": {"qkvo": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")},
    "ia3": {"qkvo": ("key", "value"), "mlp": ("down",)},
}
"""The projections that a method can adapt, by block."""
SETTINGS_OF: dict[Method, tuple[str, ...]] = {
    "none": (),
    "lora": ("rank", "alpha", "rank_scaling", "dropout", "targets"),
    "ia3": ("targets",),
}
"""Fields of `Tuning` that say which adapters a method has."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What is trained: the whole model, all but some groups of its parameters, or adapters."""

    method: Method = "none"
    """Adapters: lora (arXiv:2106.09685), ia3 (arXiv:2205.05638), or none."""
    rank: int = 16
    """lora: inner width of an adapter."""
    alpha: float = 32.0
    """lora: an adapter's result is multiplied by alpha / rank."""
    rank_scaling: Literal["rank", "sqrt_rank"] = "rank"
    """lora: whether alpha is divided by rank, or by its square root (rsLoRA, arXiv:2312.03732)."""
    dropout: float = 0.0
    """lora: probability of dropout on an adapter's input."""
    targets: tuple[Target, ...] = ("all",)
    """Projections with an adapter: all, qkvo, mlp, or query, key, value, out, gate, up, down. ia3
    has key, value and down."""
    freeze: tuple[BaseGroup, ...] | None = None
    """Groups that are not trained: embedding, attention, mlp, norm, head; empty (`freeze=`):
    nothing is frozen; None (`freeze=none`): all of these with adapters, otherwise nothing."""
    freeze_layers: int = 0
    """Number of layers, from the lowest, that are not trained, nor are their adapters."""
    base_precision: BasePrecision = "f32"
    """Format in which matrices that are trained in no layer are stored; nf4 (arXiv:2305.14314) and
    int8 are those of attention and the feed-forward, with embedding and head in bf16."""

    def __post_init__(self) -> None:
        check_positive(self, "rank", "alpha")
        check_not_negative(self, "freeze_layers")
        check_counts(self, "rank", "freeze_layers")
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                explain(
                    "model.tuning.dropout is a probability",
                    given=self.dropout,
                    do="choose 0 <= dropout < 1",
                )
            )
        if self.dropout and self.method != "lora":
            raise ConfigError(
                explain(
                    "dropout on the input of adapters needs adapters that have an input",
                    given=f"model.tuning.dropout={self.dropout}, method={self.method}",
                    do="use model.tuning.method=lora, or model.dropout for all methods",
                )
            )
        known = {name for names in PROJECTIONS[self.method].values() for name in names}
        for target in self.targets if self.method != "none" else ():
            if target not in {"all", "qkvo", "mlp", *known}:
                raise ConfigError(
                    explain(
                        f"{self.method} has no adapter for {target!r}",
                        given=f"model.tuning.targets={','.join(self.targets)}",
                        do=f"choose from all, qkvo, mlp, {', '.join(sorted(known))}",
                    )
                )
        if self.method != "none" and not self.targets:
            raise ConfigError(
                explain(
                    "adapters need a projection",
                    given=f"model.tuning.method={self.method}, and no targets",
                    do="set model.tuning.targets=all, or name projections",
                )
            )
        if self.base_precision != "f32" and not self.frozen:
            raise ConfigError(
                explain(
                    f"only matrices that are not trained can be stored in {self.base_precision}:"
                    " the others are master weights",
                    given=f"model.tuning.base_precision={self.base_precision}, and nothing frozen",
                    do="set model.tuning.method=lora, or name groups in model.tuning.freeze, or"
                    " set model.tuning.base_precision=f32",
                )
            )

    def check_trains(self) -> None:
        """Raise ConfigError if nothing is trained."""
        if self.method == "none" and set(self.frozen) == set(BASE_GROUPS):
            raise ConfigError(
                explain(
                    "nothing would be trained",
                    given=f"model.tuning.freeze={','.join(self.frozen)}",
                    do="leave out a group, or add adapters with model.tuning.method=lora",
                )
            )

    @property
    def without_adapters(self) -> "Tuning":
        """The same base, with the same groups frozen and stored alike."""
        if not self.has_adapters:
            return self
        return Tuning(freeze=self.frozen, base_precision=self.base_precision)

    def stored_format(self, group: ParameterGroup) -> BasePrecision:
        """The format in which matrices of a group are stored."""
        if self.trains(group):
            return "f32"
        if self.base_precision in QUANTISED and group not in ("attention", "mlp"):
            return "bf16"
        return self.base_precision

    @property
    def is_quantised(self) -> bool:
        """Whether matrices are stored in 8 or 4 bits."""
        return any(self.stored_format(group) in QUANTISED for group in BASE_GROUPS)

    @property
    def has_adapters(self) -> bool:
        """Whether there are adapters."""
        return self.method != "none"

    def describe_adapters(self) -> str:
        """The settings that decide what adapters compute."""
        text = f"method={self.method}"
        if self.method == "lora":
            text += f" rank={self.rank} alpha={self.alpha:g} rank_scaling={self.rank_scaling}"
        return f"{text} targets={','.join(self.targets)}"

    @property
    def frozen(self) -> tuple[BaseGroup, ...]:
        """The groups that are not trained."""
        if self.freeze is not None:
            return self.freeze
        return BASE_GROUPS if self.has_adapters else ()

    def trains(self, group: ParameterGroup) -> bool:
        """Whether the parameters of a group are trained."""
        return group not in self.frozen

    def adapts(self, projection: Projection) -> bool:
        """Whether a projection has an adapter, if the model has the projection."""
        return any(
            projection in names and {"all", block, projection} & set(self.targets)
            for block, names in PROJECTIONS[self.method].items()
        )

    @property
    def scale(self) -> float:
        """lora: factor of an adapter's result."""
        return self.alpha / (self.rank if self.rank_scaling == "rank" else self.rank**0.5)
