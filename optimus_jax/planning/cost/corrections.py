"""What measured operators say beyond the rates: factors on an operator's time, from the nearest
measured shapes.

A Gaussian process on the logarithm of measured over modelled time, over the logarithms of an
operator's sizes: where a shape was measured it says what was measured, an octave away about half of
that, far away nothing. The rates carry over to other shapes, the corrections only as far as shapes
are alike.
"""

import math
from functools import lru_cache

from optimus_jax.planning.cost.rates import Rates, ShapePoint

OCTAVES = 1.5
"""Distance, in doublings of any size, at which measured shapes say 1/e of what they say nearby."""


def likeness(place: ShapePoint, other: ShapePoint) -> float:
    """Covariance of two shapes' factors, 1 where they are the same: exp of their distance in
    octaves (a rough process).
    """
    return math.exp(-sum(abs(a - b) for a, b in zip(place, other, strict=True)) / OCTAVES)


@lru_cache(maxsize=1 << 14)
def factor(rates: Rates, operator: str, place: ShapePoint) -> float:
    """By how much longer than by the rates alone `operator` takes for the sizes whose logarithms
    are `place`.
    """
    return math.exp(
        sum(
            each.weight * likeness(place, each.place)
            for each in rates.corrections
            if each.operator == operator
        )
    )


@lru_cache(maxsize=1 << 14)
def spread(rates: Rates, operator: str, place: ShapePoint) -> float:
    """Standard deviation of the logarithm of measured over predicted step times: the less, the
    nearer a measured shape.
    """
    near = max(
        (likeness(place, each.place) for each in rates.corrections if each.operator == operator),
        default=0.0,
    )
    return math.sqrt(rates.spread_nearby**2 * near**2 + rates.spread**2 * (1 - near**2))
