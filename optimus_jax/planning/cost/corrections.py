"""Corrections to an operator's predicted time, taken from measured shapes nearby.

A correction is a factor on the time that the rates predict. A Gaussian process models the logarithm
of measured over predicted time as a function of the logarithms of an operator's sizes. At a
measured shape it returns what was measured, one doubling of a size away about half of that (in
logarithm), and far away no correction. So rates apply to all shapes, and corrections only to
similar ones.
"""

import math
from functools import lru_cache

from optimus_jax.planning.cost.rates import Rates, ShapePoint

OCTAVES = 1.5
"""Distance, in doublings of any size, at which a measured shape's influence falls to 1/e."""


def likeness(place: ShapePoint, other: ShapePoint) -> float:
    """Covariance of two shapes' corrections: exp(-distance / OCTAVES), which is 1 for equal shapes.

    The distance is the sum of absolute differences of their base-2 logarithms.
    """
    return math.exp(-sum(abs(a - b) for a, b in zip(place, other, strict=True)) / OCTAVES)


@lru_cache(maxsize=1 << 14)
def factor(rates: Rates, operator: str, place: ShapePoint) -> float:
    """Correction factor for the time that the rates predict for `operator` at the shape `place`."""
    return math.exp(
        sum(
            each.weight * likeness(place, each.place)
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
        (likeness(place, each.place) for each in rates.corrections if each.operator == operator),
        default=0.0,
    )
    return math.sqrt(rates.spread_nearby**2 * near**2 + rates.spread**2 * (1 - near**2))
