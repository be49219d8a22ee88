"""Formats losses and perplexities, including the large ones of a diverging run."""

import math

_LARGE = 1e6
"""Values from here on are written in scientific notation."""


def perplexity_of(loss: float) -> float:
    """exp(loss per token); infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def short(value: float, digits: int) -> str:
    """A number with `digits` decimals, or a large one in scientific notation: `12.34`, `1.2e+30`,
    `inf`."""
    return f"{value:.{digits}f}" if abs(value) < _LARGE else f"{value:.2g}"
