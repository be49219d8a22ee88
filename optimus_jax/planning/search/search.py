"""Find the best layouts of a model on a cluster: predict all legal layouts, rank those that fit.

To *price* a layout is to predict its step time. A layout is first priced with minimal
recomputation, which gives a lower bound on its step time. In rising order of that bound, each
layout gets the least recomputation that fits into memory. The search ends when no layout that
remains can enter the ranking, so the result equals that of an exhaustive search. Before a layout is
priced, the time of its layers alone bounds its step time, so most slow layouts are never priced.
"""

import bisect
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from optimus_jax.config import Config
from optimus_jax.errors import PlanError, first_line
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.cost import TERMS, Prediction, StepTimes, predict_with
from optimus_jax.planning.cost.implementation_profile import OURS
from optimus_jax.planning.cost.memory import MemoryEstimate, estimate_memory
from optimus_jax.planning.cost.mesh_costs import ClusterCosts
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.learning.calibrate import Calibration
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import (
    least_offload,
    memory_fallbacks,
    with_kept_layers,
)
from optimus_jax.planning.search.explain import gib
from optimus_jax.planning.search.layouts import LayoutGroup, Rejection, layout_groups

ReportStatus = Callable[[str], None]
"""Called with a description of what is priced next."""
REPORT_EVERY_S = 1.0
"""Seconds between reports on a search. The first search of a model in a process takes a few seconds
more, for the traces of its layers."""
BOUND_MARGIN = 1 - 1e-9
"""Factor on a lower bound of a step time, for the rounding of sums."""
USABLE_SHARE = 0.9
"""Usable share of a device's memory; the rest covers the runtime and estimation errors."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A Plan with its predicted step time and memory."""

    plan: Plan
    prediction: Prediction
    memory: MemoryEstimate


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search."""

    best: tuple[Candidate, ...]
    """Fastest first, with only the fastest plan of each (mesh, rules, repeats). Empty if nothing
    fits."""
    rejections: tuple[Rejection, ...]
    """Layouts that are illegal or do not fit, among those examined."""
    num_priced: int
    """Number of legal layouts that were priced, or found to be slower than `best` without it."""


@dataclass(frozen=True)
class Pricing:
    """Predicts the time and memory of plans for one run on one cluster."""

    config: Config
    cluster: Cluster
    rates: Rates
    calibration: Calibration = field(default_factory=Calibration)
    """Corrections learnt from earlier measurements on these devices."""

    @cached_property
    def workload(self) -> Workload:
        """What a step of the run computes."""
        return Workload.of(self.config)

    @cached_property
    def costs(self) -> ClusterCosts:
        """What the plans priced so far share."""
        return ClusterCosts(self.workload, self.cluster, self.rates, OURS)

    def predicted(self, plan: Plan) -> Prediction:
        """The prediction for a plan. Raises PlanError if it uses a link of unknown speed."""
        return self.calibration.applied(self.uncalibrated(plan))

    def step_time_s(self, plan: Plan) -> float:
        """The step time of `predicted`, computed faster, without explanations."""
        return self.calibration.step_time_s(StepTimes(self.costs, plan).times(plan.zero))

    def uncalibrated(self, plan: Plan) -> Prediction:
        """The prediction without corrections learnt from measurements."""
        return predict_with(self.costs, plan)

    def memory(self, plan: Plan) -> MemoryEstimate:
        """Estimated peak bytes on the most loaded device."""
        return estimate_memory(self.workload, plan)

    def fitting(self, layout: Plan) -> tuple[Plan, MemoryEstimate] | Rejection:
        """The layout with the least recomputation that fits, layer by layer (`with_kept_layers`),
        and its memory, or why none does.
        """
        found: dict[Plan, MemoryEstimate] = {}
        for plan in memory_fallbacks(self.config, layout, self.cluster.accelerator.platform):
            memory = self.memory(plan)
            first = next(iter(found), plan)
            if (plan.offload, plan.pipeline) != (first.offload, first.pipeline):
                break
            if fits(memory, self.cluster):
                fuller = with_kept_layers(
                    self.config, plan, lambda other: fits(self.memory(other), self.cluster)
                )
                found[fuller] = memory if fuller is plan else self.memory(fuller)
                if not fuller.kept_layers:
                    break
        if found:
            # More recomputing in fewer layers may be faster than less in more of them.
            fastest = min(found, key=self.step_time_s) if len(found) > 1 else next(iter(found))
            return fastest, found[fastest]
        return Rejection(
            layouts=layout.describe(),
            needs_bytes=memory.total,
            reason=(
                f"needs about {gib(memory.total)} even with maximal recomputation;"
                f" {USABLE_SHARE:.0%} of {gib(self.cluster.bytes_per_device or 0)} may be used"
            )
            + host_memory_note(memory, self.cluster),
        )


def search(pricing: Pricing, *, top: int = 10, progress: ReportStatus | None = None) -> Ranking:
    """The `top` best plans for the run and cluster of `pricing`, respecting fixed settings.

    Deterministic.

    Args:
      progress: called at the beginning, when the layers of a model that is new to this process are
        traced, and every REPORT_EVERY_S.
    Raises:
      PlanError: the settings that the config fixes are impossible under every layout.
    """
    rejections: list[Rejection] = []
    queue, num_priced = _Queue(pricing, rejections), 0
    reported_s = time.monotonic()
    if progress is not None:
        progress(f"reading the layers of {pricing.config.model.name}")
    for group in layout_groups(pricing.config, pricing.cluster.topology()):
        if isinstance(group, Rejection):
            rejections.append(group)
            continue
        num_priced += queue.add(group)
        if progress is not None and time.monotonic() - reported_s >= REPORT_EVERY_S:
            reported_s = time.monotonic()
            progress(f"pricing layouts of {pricing.config.model.name}: {num_priced:,} so far")
    best: dict[object, Candidate] = {}
    slowest_s: list[float] = []
    for least_s, layout in queue.in_order():
        if len(best) >= top and least_s >= slowest_s[top - 1]:
            break
        if layout is None:
            continue
        kind = (layout.axes, layout.rules, layout.pipeline and layout.pipeline.repeats)
        found = pricing.fitting(layout)
        if isinstance(found, Rejection):
            rejections.append(found)
            continue
        plan, memory = found
        fastest = best.get(kind)
        if (
            fastest is not None
            and BOUND_MARGIN * pricing.step_time_s(plan) >= fastest.prediction.step_time_s
        ):
            continue  # it needs no explanations
        candidate = Candidate(plan=plan, prediction=pricing.predicted(plan), memory=memory)
        if fastest is None or candidate.prediction.step_time_s < fastest.prediction.step_time_s:
            if fastest is not None:
                slowest_s.remove(fastest.prediction.step_time_s)
            best[kind] = candidate
            bisect.insort(slowest_s, candidate.prediction.step_time_s)
    ranked = sorted(best.values(), key=lambda candidate: candidate.prediction.step_time_s)
    return Ranking(best=tuple(ranked[:top]), rejections=tuple(rejections), num_priced=num_priced)


class _Entry(NamedTuple):
    """A layout, or a group of layouts that waits to be priced."""

    time_s: float
    """Its step time, or a lower bound of the group's."""
    number: int
    """Place in the enumeration, which decides among equal times."""
    group: LayoutGroup
    steps: StepTimes | None = None
    """The step times of a group whose bound includes all but the end of a step."""
    zero: int | None = None
    """ZeRO stage of a layout that is priced; None for a group."""


class _Queue:
    """Legal layouts in rising order of step time.

    A group of layouts waits with a lower bound of its step times, first a rough one. It is priced
    when no other entry is faster.

    Args:
      rejections: gets the layouts that cannot be priced.
    """

    def __init__(self, pricing: Pricing, rejections: list[Rejection]) -> None:
        self._pricing, self._rejections = pricing, rejections
        self._entries: list[_Entry] = []
        self._num_layouts = 0
        self._least_factor = BOUND_MARGIN * pricing.calibration.least_factor(TERMS)
        # Otherwise some layouts may use a link of unknown speed, and are rejected at once.
        self._can_wait = pricing.cluster.knows_speeds(
            to_host=least_offload(pricing.config) != "none"
        )

    def add(self, group: LayoutGroup) -> int:
        """Add a group. Returns how many of its layouts can be priced."""
        number, steps = self._num_layouts, StepTimes(self._pricing.costs, group.first)
        self._num_layouts += len(group.zero_stages)
        if not self._can_wait:
            return self._price(group, number, steps)
        bound_s = self._least_factor * steps.layers_s()
        heapq.heappush(self._entries, _Entry(bound_s, number, group))
        return len(group.zero_stages)

    def _price(self, group: LayoutGroup, number: int, steps: StepTimes) -> int:
        num_priced = 0
        for place, zero in enumerate(group.zero_stages):
            try:
                time_s = self._pricing.calibration.step_time_s(steps.times(zero))
            except PlanError as error:  # the layout would use a link of unknown speed
                layout = group.layout(zero).describe()
                self._rejections.append(Rejection(layouts=layout, reason=first_line(error)))
            else:
                entry = _Entry(time_s, number + place, group, zero=zero)
                heapq.heappush(self._entries, entry)
                num_priced += 1
        return num_priced

    def in_order(self) -> Iterator[tuple[float, Plan | None]]:
        """The layouts with their step times, fastest first; None with the bound of a group that is
        looked at next.
        """
        while self._entries:
            time_s, number, group, steps, zero = heapq.heappop(self._entries)
            yield time_s, None if zero is None else group.layout(zero)
            if zero is not None:
                continue
            if steps is None:
                steps = StepTimes(self._pricing.costs, group.first)
                bound_s = self._least_factor * steps.before_end_s()
                heapq.heappush(self._entries, _Entry(bound_s, number, group, steps))
            else:
                self._price(group, number, steps)


def fits(memory: MemoryEstimate, there: Topology | Cluster) -> bool:
    """Whether the estimate fits into device and host memory; unknown memory counts as enough."""
    on_device = (
        there.bytes_per_device is None or memory.total <= USABLE_SHARE * there.bytes_per_device
    )
    return on_device and (
        there.host_bytes_per_device is None or memory.host <= there.host_bytes_per_device
    )


def host_memory_note(memory: MemoryEstimate, there: Topology | Cluster) -> str:
    """Host memory needed and available, to append to a message about device memory.

    Empty if the plan does not use host memory.
    """
    if not memory.host:
        return ""
    usable = there.host_bytes_per_device
    return (
        f"; {gib(memory.host)} would be in the host's memory, where"
        f" {'it is not known what' if usable is None else gib(usable)} may be used"
    )
