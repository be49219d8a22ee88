"""Weighted sources, as `--data` takes them: NAME=WEIGHT:PATH."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from optimus_jax.errors import ConfigError, explain

_WEIGHTED = re.compile(r"(?P<name>[A-Za-z][\w-]*)=(?P<weight>[-+.\deE]+):(?P<path>.+)", re.DOTALL)
_LARGEST_EXPONENT = 12
"""Weights lie between ten to the power of minus this and of this."""


@dataclass(frozen=True, kw_only=True)
class WeightedSource:
    """One source of a mixture."""

    name: str
    """Its name in messages."""
    weight: str
    """Its share of the examples, relative to the other weights, as given: a decimal number."""
    path: str
    """A data source without a weight."""

    def __str__(self) -> str:
        return f"{self.name}={self.weight}:{self.path}"

    @property
    def exact_weight(self) -> Fraction:
        """The weight without rounding."""
        return Fraction(self.weight)


def weighted_sources(sources: Sequence[str]) -> tuple[WeightedSource, ...]:
    """The sources of a mixture; empty if no source has a weight.

    Raises:
      ConfigError: only some have a weight, a weight is not a positive number, or a name occurs
        twice.
    """
    matches = [_WEIGHTED.fullmatch(source) for source in sources]
    found = [WeightedSource(**match.groupdict()) for match in matches if match]
    if not found:
        return ()
    if len(found) < len(sources):
        without = sources[matches.index(None)]
        raise ConfigError(
            explain(
                "only some sources of a mixture have a weight",
                given=f"{found[0]} and {without}",
                do="give each as NAME=WEIGHT:PATH, or none (./ before a file of such a name)",
            )
        )
    names = [source.name for source in found]
    for source in found:
        if not _is_weight(source.weight):
            raise ConfigError(
                explain(
                    "a weight must be a positive number",
                    given=str(source),
                    do="write it as 0.8 or 3; only its ratio to the other weights matters",
                )
            )
        if names.count(source.name) > 1:
            raise ConfigError(
                explain(
                    "two sources of a mixture have the same name",
                    given=" ".join(str(one) for one in found if one.name == source.name),
                    do="give each its own name; a glob or folder names several files",
                )
            )
    return tuple(found)


def _is_weight(text: str) -> bool:
    try:
        value = Decimal(text)
    except ArithmeticError:
        return False
    return value.is_finite() and value > 0 and abs(value.adjusted()) <= _LARGEST_EXPONENT
