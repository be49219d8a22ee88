"""Losses and perplexities, also those of a run that diverges, as people can read them."""

import math

_LARGE = 1e6
"""From here on digits behind the point, and soon those before it, say nothing."""


def perplexity_of(loss: float) -> float:
    """e to the loss per token; infinite where a float ends."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def short(value: float, digits: int) -> str:
    """A number with `digits` digits behind the point, or by its order: `12.34`, `1.2e+30`,
    `inf`."""
    return f"{value:.{digits}f}" if abs(value) < _LARGE else f"{value:.2g}"
