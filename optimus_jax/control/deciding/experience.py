"""What this run has learnt of step times, by plan, batch and conditions, and kept by these names so
that it can be named anew.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.prices import Batch, Prices, query, setting
from optimus_jax.control.predictor import Predictor
from optimus_jax.plan import Plan
from optimus_jax.planning.learning.beliefs import Query

CONTRADICTS = math.log(1.25)
"""From a level that was learnt before of the very same: a few steps so far off were done in other
conditions than these."""
PERSISTS = 40
"""Steps that are believed against it."""
LEVELS = 30
"""Levels of step times that are kept by name, the newest."""

Level = tuple[float, float, int]
"""Of step times: logarithm, its noise, and the steps that it rests on."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a level was measured of."""

    plan: Plan
    batch: Batch
    conditions: Conditions
    regime: int
    """Unexplained; 0: none."""


class Experience:
    """Levels of step times, told to a predictor.

    Args:
      predictor: learns from them.
      prices: what plans cost by the cost model.
    """

    def __init__(self, predictor: Predictor, prices: Prices) -> None:
        self._predictor, self._prices = predictor, prices
        self._levels: dict[Known, tuple[Level, int]] = {}
        """With the step at which each was learnt."""

    def learn(self, known: Known, level: Level, step: int) -> None:
        """Steps have this level; it replaces what was known of the same, unless a few steps speak
        against many.
        """
        before = self._levels.get(known)
        if (
            before is not None
            and abs(level[0] - before[0][0]) > CONTRADICTS
            and level[2] < min(PERSISTS, before[0][2])
        ):
            return
        self._levels.pop(known, None)
        self._levels[known] = (level, step)
        while len(self._levels) > LEVELS:
            self._levels.pop(next(iter(self._levels)))
        self._tell(known, level, step)

    def relabel(self, was_so: Mapping[str, float]) -> None:
        """Conditions have turned out to be other ones all the time: so they were when levels were
        learnt.
        """
        levels, self._levels = self._levels, {}
        for known in levels:
            self._predictor.forget(self._query_of(known))
        for known, (level, step) in levels.items():
            renamed = replace(known, conditions=replace(known.conditions, **was_so))
            self._levels[renamed] = (level, step)
            self._tell(renamed, level, step)

    def _tell(self, known: Known, level: Level, step: int) -> None:
        self._predictor.learn(
            self._query_of(known), log_time=level[0], noise=level[1], count=level[2], step=step
        )

    def _query_of(self, known: Known) -> Query:
        pricing = known.conditions.felt_by(known.plan).applied(self._prices.of(known.batch))
        return query(known.plan, pricing, setting(known.batch, known.conditions), known.regime)
