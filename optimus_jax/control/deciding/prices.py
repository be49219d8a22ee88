"""Cost model prices of one run's plans, by batch and conditions, in the form that the predictor and
the search take.
"""

import hashlib
import math
from dataclasses import replace
from functools import lru_cache

from optimus_jax.config import ModelConfig
from optimus_jax.control.deciding.candidates import times
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan
from optimus_jax.planning.learning.beliefs import Query
from optimus_jax.planning.search.search import Pricing


class Prices:
    """Cached prices of one run's plans.

    Args:
      base: pricing of the first phase, in the conditions of the hardware profile.
    """

    def __init__(self, base: Pricing) -> None:
        self.base = base
        self._of: dict[BatchShape, Pricing] = {}
        self._log_times: dict[tuple[Plan, BatchShape, Conditions], float] = {}
        self._memory_shares: dict[tuple[Plan, BatchShape], float | None] = {}

    @property
    def first_batch(self) -> BatchShape:
        """Batch shape of the first phase."""
        return BatchShape(self.base.config.data.global_batch, self.base.config.seq_len)

    def of(self, batch: BatchShape) -> Pricing:
        """The pricing for this batch shape."""
        if batch not in self._of:
            config = self.base.config
            data = replace(config.data, global_batch=batch.global_batch, seq_len=batch.seq_len)
            self._of[batch] = (
                self.base
                if batch == self.first_batch
                else replace(self.base, config=replace(config, data=data))
            )
        return self._of[batch]

    def log_time(self, plan: Plan, batch: BatchShape, conditions: Conditions) -> float:
        """Logarithm of the step time in seconds, by the cost model.

        Raises PlanError if the speed of a link is unknown.
        """
        key = (plan, batch, conditions)
        if key not in self._log_times:
            self._log_times[key] = math.log(
                sum(times(plan, conditions.as_seen_by(plan).applied(self.of(batch))).values())
            )
        return self._log_times[key]

    def memory_share(self, plan: Plan, batch: BatchShape) -> float | None:
        """Estimated share of a device's memory that the plan needs; None: the memory size is
        unknown.
        """
        key = (plan, batch)
        if key not in self._memory_shares:
            pricing, capacity = self.of(batch), self.base.cluster.accelerator.memory_bytes
            self._memory_shares[key] = (
                None if capacity is None else pricing.memory(plan).total / capacity
            )
        return self._memory_shares[key]


def setting(batch: BatchShape, conditions: Conditions) -> str:
    """Name of a batch shape and conditions, for logs and as a key of learnt values."""
    slow = ", ".join(f"{name} x {factor:g}" for name, factor in conditions.as_json().items())
    return f"{batch.global_batch} x {batch.seq_len} tokens" + (f", {slow}" if slow else "")


def query(plan: Plan, pricing: Pricing, named: str, regime: int = 0) -> Query:
    """The predictor's query for a plan. Raises PlanError if the speed of a link is unknown."""
    return Query(
        plan=f"{plan.digest} of {_digest(pricing.config.model)}",
        setting=named,
        regime=regime,
        terms_s=times(plan, pricing),
    )


@lru_cache(maxsize=64)
def _digest(model: ModelConfig) -> str:
    """Name of the model in learnt values: step times under one plan differ between models."""
    return hashlib.sha256(repr(model).encode()).hexdigest()[:12]
