"""Cost model prices of one run's plans, by batch and conditions, in the form that the predictor and
the search take.
"""

import hashlib
import math
from collections.abc import Sequence
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
      process_of: the process of each device; None: one process per host, in order.
    """

    def __init__(self, base: Pricing, process_of: Sequence[int] | None = None) -> None:
        self.base = base
        cluster = base.cluster
        self.process_of = tuple(
            process_of
            or [device // cluster.devices_per_host for device in range(cluster.num_devices)]
        )
        """The process of each device, numbered in the order of hosts."""
        self._of: dict[BatchShape, Pricing] = {}
        self._log_times: dict[tuple[Plan, BatchShape, Conditions, frozenset[int]], float] = {}
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

    def processes(self, num_devices: int, without: frozenset[int]) -> tuple[int, ...]:
        """The process of each device of a plan, in mesh order.

        Args:
          num_devices: number of devices that the plan uses.
          without: ids of devices that it does not use.
        """
        used = [device for device in range(len(self.process_of)) if device not in without]
        return tuple([self.process_of[device] for device in used[:num_devices]])

    def seen_by(
        self,
        plan: Plan,
        batch: BatchShape,
        conditions: Conditions,
        without: frozenset[int] = frozenset(),
    ) -> Conditions:
        """The conditions as they affect the plan on devices other than these."""
        if not conditions.slow:
            return conditions
        processes = self.processes(plan.num_devices, without)
        return conditions.as_seen_by(plan, processes, self.of(batch).workload.layer_shares)

    def query_of(
        self,
        plan: Plan,
        batch: BatchShape,
        conditions: Conditions,
        without: frozenset[int] = frozenset(),
        regime: int = 0,
    ) -> Query:
        """The predictor's query for a plan on devices other than these.

        Raises PlanError if the speed of a link is unknown.
        """
        in_use = conditions.among(self.processes(plan.num_devices, without))
        pricing = self.seen_by(plan, batch, in_use, without).applied(self.of(batch))
        return query(plan, pricing, setting(batch, in_use), regime)

    def log_time(
        self,
        plan: Plan,
        batch: BatchShape,
        conditions: Conditions,
        without: frozenset[int] = frozenset(),
    ) -> float:
        """Logarithm of the step time in seconds on devices other than these, by the cost model.

        Raises PlanError if the speed of a link is unknown.
        """
        key = (plan, batch, conditions, without)
        if key not in self._log_times:
            pricing = self.seen_by(plan, batch, conditions, without).applied(self.of(batch))
            self._log_times[key] = math.log(sum(times(plan, pricing).values()))
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
