"""Step times that this run has learnt, by plan, batch and conditions. They are stored under these
names so that they can be relabelled when conditions turn out to have been others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optimus_jax.control import constants
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.prices import Prices
from optimus_jax.control.predictor import Predictor
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan
from optimus_jax.planning.learning.beliefs import Query

Level = tuple[float, float, int]
"""Level of step times: logarithm of seconds, its noise, and the number of steps behind it."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The names of a level: what it was measured under."""

    plan: Plan
    batch: BatchShape
    conditions: Conditions
    regime: int
    """Number of the unexplained regime; 0: none."""
    without: frozenset[int] = frozenset()
    """Ids of devices that the run did not use."""


class Experience:
    """Stores levels of step times and passes them to a predictor.

    Args:
      predictor: learns from them.
      prices: prices of plans by the cost model.
    """

    def __init__(self, predictor: Predictor, prices: Prices) -> None:
        self._predictor, self._prices = predictor, prices
        self._levels: dict[Known, tuple[Level, int]] = {}
        """Each level with the step at which it was learnt."""

    def learn(self, known: Known, level: Level, step: int) -> None:
        """Learn a level. It replaces the old level under the same names."""
        self._levels.pop(known, None)
        self._levels[known] = (level, step)
        while len(self._levels) > constants.MAX_STORED_LEVELS:
            self._levels.pop(next(iter(self._levels)))
        self._tell(known, level, step)

    def num_steps(self, known: Known) -> int:
        """Number of steps behind the level under these names; 0: there is none."""
        return self._levels[known][0][2] if known in self._levels else 0

    def forget(self, known: Known) -> None:
        """Drop a level that was measured under other conditions than these."""
        if self._levels.pop(known, None) is not None:
            self._predictor.forget(self._query_of(known))

    def relabel(self, was_so: Mapping[str, float]) -> None:
        """Correct the conditions of all learnt levels: these factors are now known to have had
        these values all the time.
        """
        levels, self._levels = self._levels, {}
        for known in levels:
            self._predictor.forget(self._query_of(known))
        for known, (level, step) in levels.items():
            renamed = replace(known, conditions=known.conditions.with_factors(was_so))
            self._levels[renamed] = (level, step)
            self._tell(renamed, level, step)

    def _tell(self, known: Known, level: Level, step: int) -> None:
        self._predictor.learn(
            self._query_of(known), log_time=level[0], noise=level[1], count=level[2], step=step
        )

    def _query_of(self, known: Known) -> Query:
        return self._prices.query_of(
            known.plan, known.batch, known.conditions, known.without, known.regime
        )
