"""Corrections to an operator's predicted time, taken from measured shapes nearby.

A correction is a factor on the time that the rates predict. A Gaussian process models the logarithm
of measured over predicted time as a function of the logarithms of an operator's sizes. At a
measured shape it returns what was measured, one doubling of the tokens or of the devices along
tensor away about half of that (in logarithm), and at another width next to nothing, if many shapes
were measured: there corrections rank plans worse than none (benchmarks/results/planner.md).
So rates apply to all shapes, and corrections only to similar ones. The few reference steps of a
device have to say something of other widths too (`Rates.width_octaves`).
"""

import math
from functools import lru_cache

from optimus_jax.planning.cost.rates import Rates, ShapePoint

OCTAVES = 1.5
"""Distance, in doublings of tokens or of devices along tensor, at which the influence of a measured
shape falls to 1/e."""


def likeness(place: ShapePoint, other: ShapePoint, width_octaves: float) -> float:
    """Covariance of two shapes' corrections: exp(-distance), which is 1 for equal shapes.

    The distance is the sum of absolute differences of their base-2 logarithms, that of widths in
    `width_octaves`, others in OCTAVES.
    """
    octaves = (OCTAVES, width_octaves, OCTAVES)
    distances = (abs(a - b) / c for a, b, c in zip(place, other, octaves, strict=True))
    return math.exp(-sum(distances))


@lru_cache(maxsize=1 << 14)
def factor(rates: Rates, operator: str, place: ShapePoint) -> float:
    """Correction factor for the time that the rates predict for `operator` at the shape `place`."""
    return math.exp(
        sum(
            each.weight * likeness(place, each.place, rates.width_octaves)
            for each in rates.corrections
            if each.operator == operator
        )
    )


@lru_cache(maxsize=1 << 14)
def spread(rates: Rates, operator: str, place: ShapePoint) -> float:
    """Standard deviation of the logarithm of measured over predicted step times.

    It is smaller the nearer `place` is to a measured shape.
    """
    near = max(
        (
            likeness(place, each.place, rates.width_octaves)
            for each in rates.corrections
            if each.operator == operator
        ),
        default=0.0,
    )
    return math.sqrt(rates.spread_nearby**2 * near**2 + rates.spread**2 * (1 - near**2))
