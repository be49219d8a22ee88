"""The true simulated cluster, which policies do not see.

A plan's true step time is the sum of the planner's terms, priced with the true links and devices.
Each term has a hidden factor, and each plan has one more. A plan's true memory is the planner's
estimate times another hidden factor. A seed draws all of them. So the planner's figures are neither
exact nor useless, as on a real machine.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import PIPE
from optimus_jax.errors import PlanError
from optimus_jax.pipeline.partition import stage_costs
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import VOCABULARY
from optimus_jax.planning.cost.cost import (
    BUBBLE,
    GENERATOR,
    HOST_COPIES,
    REFERENCE_PASS,
    term_times,
)
from optimus_jax.planning.cost.memory import MemoryEstimate, estimate_memory
from optimus_jax.planning.profiles.cluster import INTRA_HOST, Cluster
from optimus_jax.planning.search.search import Pricing
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.simulation.timeline import NORMAL, ClusterConditions

TERMS = (
    "attention",
    "feed-forward",
    "recompute",
    "memory",
    "launching",
    "head",
    "tensor",
    VOCABULARY,
    "fsdp",
    "data",
    PIPE,
    BUBBLE,
    "optimizer",
    "overhead",
    HOST_COPIES,
    REFERENCE_PASS,
)
"""All terms of planning/cost/cost.py but that of a generator. Each has a hidden factor, even if the
first plan lacks the term."""
OPERATORS = (
    "attention",
    "feed-forward",
    "recompute",
    "memory",
    "head",
    "optimizer",
    REFERENCE_PASS,
    GENERATOR,
)
"""Terms that take longer on a slow device."""


@dataclass(frozen=True)
class PlacedPlan:
    """A plan placed on devices of the cluster."""

    plan: Plan
    devices: tuple[int, ...]
    """Devices in mesh order."""


class World:
    """The true cluster of one simulated run.

    Args:
      scenario: says how far the truth differs from what policies assume, and what switches take.
      pricings: nominal pricing of each phase of the run.
      seed: draws everything.
    """

    def __init__(self, scenario: Scenario, pricings: tuple[Pricing, ...], seed: int):
        self.scenario, self.pricings, self.seed = scenario, pricings, seed
        misfit, random = scenario.misfit, np.random.default_rng([seed, 1])

        def off(share: float) -> float:
            """A factor that differs from 1 by this share, up or down."""
            return float(1.0 + share * random.choice((-1.0, 1.0)))

        self.intra_host, self.inter_host = off(misfit.links), off(misfit.links)
        """Factors on the links' nominal speed."""
        self.matmul, self.memory_speed = off(misfit.rates), off(misfit.rates)
        """Factors on the devices' nominal speed."""
        self.terms = {name: math.exp(misfit.terms * random.standard_normal()) for name in TERMS}
        self.terms[GENERATOR] = self.terms["attention"]  # its layers are like the model's
        rates = pricings[0].rates
        self._rates = replace(
            rates,
            matmul_flops_per_s=rates.matmul_flops_per_s * self.matmul,
            f32_matmul_flops_per_s=rates.f32_matmul_flops_per_s * self.matmul,
            memory_bytes_per_s=rates.memory_bytes_per_s * self.memory_speed,
            # What overlap saves, 0.7 to 1.3 times what is planned.
            overlap_slowdown=2.0 - (2.0 - rates.overlap_slowdown) * float(random.uniform(0.7, 1.3)),
        )
        self.cluster = pricings[0].cluster
        self.first: PlacedPlan | None = None
        """The run's first plan, which the loader was chosen for; None: waits are the same whatever
        the plan."""
        self._scale = 1.0
        # The oracle asks for every plan in every condition, and sorting a thousand devices is slow.
        self._devices: dict[
            tuple[int, tuple[tuple[int, float], ...], frozenset[int]], tuple[int, ...] | None
        ] = {}
        self._times: dict[
            tuple[PlacedPlan, float, float, tuple[tuple[int, float], ...], int], float
        ] = {}

    def scale(self, place: PlacedPlan, step_time_s: float) -> None:
        """Scale all times so that an undisturbed step of this plan takes `step_time_s`."""
        self._scale *= step_time_s / self.step_time_s(place, NORMAL, 0)
        self._times.clear()

    def step_time_s(self, place: PlacedPlan, conditions: ClusterConditions, phase: int) -> float:
        """Step time without noise; infinite if the plan cannot run."""
        if not conditions.lost.isdisjoint(place.devices) or not self.fits(
            place.plan, conditions, phase
        ):
            return math.inf
        own_s = self._own_s(place, conditions, phase)
        return own_s + self.data_wait_s(place, conditions, phase) if conditions.wait_s else own_s

    def data_wait_s(self, place: PlacedPlan, conditions: ClusterConditions, phase: int) -> float:
        """For how long each step waits for its batch, which is loaded beside the step before."""
        if not conditions.wait_s or self.first is None or not self.is_legal(self.first.plan, phase):
            return conditions.wait_s
        in_time_s = self._own_s(self.first, NORMAL, phase)
        return max(0.0, in_time_s + conditions.wait_s - self._own_s(place, conditions, phase))

    def _own_s(self, place: PlacedPlan, conditions: ClusterConditions, phase: int) -> float:
        """Step time of a plan that can run, without noise and waits for data."""
        key = (place, conditions.intra_host, conditions.inter_host, conditions.slow, phase)
        if key not in self._times:
            self._times[key] = sum(self.term_times(place, conditions, phase).values())
        return self._times[key]

    def term_times(
        self, place: PlacedPlan, conditions: ClusterConditions, phase: int
    ) -> dict[str, float]:
        """Seconds of each term of a step."""
        plan = place.plan
        slowness, all_of_it = (
            self.slowness(place, conditions, phase),
            self._plan_factor(plan) * self._scale,
        )
        times = term_times(
            self.pricings[phase].workload,
            plan,
            self._true_cluster(conditions.intra_host, conditions.inter_host),
            self._rates,
        )
        waiting = self._computed_share(times) * (slowness - 1) + 1
        slow = {BUBBLE: waiting} | dict.fromkeys(OPERATORS, slowness)
        return {
            name: time_s * self.terms[name] * all_of_it * slow.get(name, 1.0)
            for name, time_s in times.items()
        }

    @staticmethod
    def _computed_share(times: Mapping[str, float]) -> float:
        """Share of compute in the time that stages wait for."""
        computed = sum(times.get(name, 0.0) for name in OPERATORS)
        return computed / max(1e-30, computed + times.get("tensor", 0.0))

    def slowness(self, place: PlacedPlan, conditions: ClusterConditions, phase: int) -> float:
        """Factor on the compute time. All stages wait for the slowest one, which is slow by its
        devices or its layers.
        """
        slow = dict(conditions.slow)
        if not slow:
            return 1.0
        factors = (
            np.array([slow.get(device, 1.0) for device in place.devices])
            .reshape(place.plan.axes.pipe, -1)
            .max(axis=1)
        )
        pipeline = place.plan.pipeline
        if pipeline is None:
            return float(factors[0])
        costs = np.array(
            stage_costs(pipeline.layers_per_stage, self.pricings[phase].workload.layer_shares)
        )
        costs = costs.reshape(pipeline.repeats, -1).max(axis=0)
        return float((costs * factors).max() / costs.max())

    def fits(self, plan: Plan, conditions: ClusterConditions, phase: int) -> bool:
        """Whether the plan is legal for the phase's batch and fits into the free memory."""
        capacity = self.cluster.accelerator.memory_bytes
        return self.is_legal(plan, phase) and (
            capacity is None or self.memory_bytes(plan, phase) <= capacity * (1 - conditions.taken)
        )

    def is_legal(self, plan: Plan, phase: int) -> bool:
        """Whether the model can be trained under the plan with the phase's batch."""
        config = self.pricings[phase].config
        return _is_legal(plan, config.model, config.data.global_batch)

    def memory_bytes(self, plan: Plan, phase: int) -> float:
        """True memory that the plan needs on the most loaded device."""
        return self.estimate(plan, phase).total * math.exp(
            self.scenario.misfit.memory * self._drawn(plan, "memory")
        )

    def estimate(self, plan: Plan, phase: int) -> MemoryEstimate:
        """The planner's estimate of the plan's memory."""
        return _estimate(self.pricings[phase].workload, plan)

    def model_flops(self, phase: int) -> float:
        """Model FLOPs of a step."""
        return self.pricings[phase].workload.step_flops

    def devices_for(
        self, plan: Plan, conditions: ClusterConditions, without: frozenset[int] = frozenset()
    ) -> tuple[int, ...] | None:
        """As many usable devices as the plan needs, in mesh order; None: there are too few.

        Whole hosts are preferred, and slow devices are used last.

        Args:
          plan: the plan to place.
          conditions: say which devices are reported bad or slow.
          without: ids of devices to leave out.
        """
        gone = conditions.reported | without
        key = (plan.num_devices, conditions.slow, gone)
        if key not in self._devices:
            self._devices[key] = self._chosen_devices(*key)
        return self._devices[key]

    def _chosen_devices(
        self, num_devices: int, slow_devices: tuple[tuple[int, float], ...], gone: frozenset[int]
    ) -> tuple[int, ...] | None:
        slow, size = dict(slow_devices), self.cluster.devices_per_host
        alive = [device for device in range(self.cluster.num_devices) if device not in gone]
        if len(alive) < num_devices:
            return None
        missing, slowest = dict[int, int](), dict[int, float]()
        for device in range(self.cluster.num_devices):
            host = device // size
            missing[host] = missing.get(host, 0) + (device in gone)
            slowest[host] = max(slowest.get(host, 1.0), slow.get(device, 1.0))
        order = sorted(
            alive,
            key=lambda device: (
                missing[device // size],
                slowest[device // size],
                device // size,
                slow.get(device, 1.0),
                device,
            ),
        )
        return tuple(sorted(order[:num_devices]))

    def _true_cluster(self, intra_host: float, inter_host: float) -> Cluster:
        return _with_speeds(
            self.cluster, self.intra_host * intra_host, self.inter_host * inter_host
        )

    def link_slowdown(self, link: str, conditions: ClusterConditions) -> float:
        """Nominal speed of a link over its speed now."""
        return 1.0 / (
            (self.intra_host * conditions.intra_host)
            if link == INTRA_HOST
            else (self.inter_host * conditions.inter_host)
        )

    def _plan_factor(self, plan: Plan) -> float:
        return math.exp(self.scenario.misfit.plans * self._drawn(plan, "time"))

    def _drawn(self, plan: Plan, what: str) -> float:
        """Standard normal value for this plan in this run."""
        return _normal(f"{self.seed} {what} {_digest(plan)}")


@lru_cache(maxsize=1 << 12)
def _digest(plan: Plan) -> str:
    return plan.digest


@lru_cache(maxsize=1 << 14)
def _normal(key: str) -> float:
    return float(
        np.random.default_rng(
            int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
        ).standard_normal()
    )


@lru_cache(maxsize=1 << 12)
def _with_speeds(cluster: Cluster, intra_host: float, inter_host: float) -> Cluster:
    return replace(
        cluster,
        intra_host=cluster.intra_host.scaled(intra_host),
        inter_host=cluster.inter_host and cluster.inter_host.scaled(inter_host),
    )


@lru_cache(maxsize=1 << 14)
def _is_legal(plan: Plan, model: ModelConfig, global_batch: int) -> bool:
    try:
        plan.validate(model, global_batch=global_batch)
    except PlanError:
        return False
    return True


_estimate = lru_cache(maxsize=1 << 14)(estimate_memory)
