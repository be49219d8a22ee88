"""The best layouts of a model on a cluster: all legal ones priced, those that fit ranked.

Every layout is priced with as little recomputing as can be, which no other policy undercuts. In
rising order of that time, each gets the least recomputing that fits into memory; the search ends
when no layout left could still come among the best. So the ranking is that of an exhaustive search.
"""

import bisect
from dataclasses import dataclass, field

from optimus_jax.config import Config
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.cost import Prediction, predict, term_times
from optimus_jax.planning.cost.memory import MemoryEstimate, estimate_memory
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.learning.calibrate import Calibration
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import memory_fallbacks
from optimus_jax.planning.search.explain import gib
from optimus_jax.planning.search.layouts import Rejection, layouts

USABLE_SHARE = 0.9
"""Of a device's memory; the rest is for the runtime and for what an estimate misses."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A Plan with what is predicted of it."""

    plan: Plan
    prediction: Prediction
    memory: MemoryEstimate


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What a search has found."""

    best: tuple[Candidate, ...]
    """Fastest first; of each mesh with its rules and its repeats, the fastest. Empty: nothing
    fits."""
    rejections: tuple[Rejection, ...]
    """What is not legal, or does not fit, among what was looked at."""
    num_priced: int
    """Legal layouts, each of them priced."""


@dataclass(frozen=True)
class Pricing:
    """What plans cost for one run on one cluster."""

    config: Config
    cluster: Cluster
    rates: Rates
    calibration: Calibration = field(default_factory=Calibration)
    """What earlier measurements on these devices teach."""

    def predicted(self, plan: Plan) -> Prediction:
        """The time of a step. Raises PlanError where it would cross a link of unknown speed."""
        return self.calibration.applied(self.uncalibrated(plan))

    def step_time_s(self, plan: Plan) -> float:
        """Of `predicted`, at less cost: what a search asks of every layout."""
        return self.calibration.step_time_s(
            term_times(
                self.config.model,
                plan,
                self.cluster,
                self.rates,
                seq_len=self.config.seq_len,
                global_batch=self.config.data.global_batch,
            )
        )

    def uncalibrated(self, plan: Plan) -> Prediction:
        """The same without what was learnt from measurements."""
        return predict(
            self.config.model,
            plan,
            self.cluster,
            self.rates,
            seq_len=self.config.seq_len,
            global_batch=self.config.data.global_batch,
        )

    def memory(self, plan: Plan) -> MemoryEstimate:
        """Bytes on the most loaded device."""
        return estimate_memory(
            self.config.model,
            plan,
            seq_len=self.config.seq_len,
            global_batch=self.config.data.global_batch,
        )

    def fitting(self, layout: Plan) -> Candidate | Rejection:
        """The layout with the least recomputing that fits."""
        for plan in memory_fallbacks(self.config, layout, self.cluster.accelerator.platform):
            memory = self.memory(plan)
            if fits(memory, self.cluster):
                return Candidate(plan=plan, prediction=self.predicted(plan), memory=memory)
        return Rejection(
            layouts=layout.describe(),
            needs_bytes=memory.total,
            reason=(
                f"needs about {gib(memory.total)}, whatever is recomputed; {USABLE_SHARE:.0%} of"
                f" {gib(self.cluster.bytes_per_device or 0)} may be used"
            )
            + on_the_host(memory, self.cluster),
        )


def search(pricing: Pricing, *, top: int = 10) -> Ranking:
    """The `top` best plans for the run and cluster of `pricing`; what its config fixes is kept.

    Deterministic.

    Raises:
      PlanError: the config fixes what no layout can have.
    """
    rejections, priced = [], []
    for layout in layouts(pricing.config, pricing.cluster.topology()):
        if isinstance(layout, Rejection):
            rejections.append(layout)
            continue
        try:
            priced.append((pricing.step_time_s(layout), len(priced), layout))
        except PlanError as error:  # it would cross a link of unknown speed
            rejections.append(
                Rejection(layouts=layout.describe(), reason=str(error).splitlines()[0])
            )
    best: dict[object, Candidate] = {}
    slowest_s: list[float] = []
    for least_s, _, layout in sorted(priced):
        if len(best) >= top and least_s >= slowest_s[top - 1]:
            break
        kind = (layout.axes, layout.rules, layout.pipeline and layout.pipeline.repeats)
        found = pricing.fitting(layout)
        if isinstance(found, Rejection):
            rejections.append(found)
        elif kind not in best or found.prediction.step_time_s < best[kind].prediction.step_time_s:
            if kind in best:
                slowest_s.remove(best[kind].prediction.step_time_s)
            best[kind] = found
            bisect.insort(slowest_s, found.prediction.step_time_s)
    ranked = sorted(best.values(), key=lambda candidate: candidate.prediction.step_time_s)
    return Ranking(best=tuple(ranked[:top]), rejections=tuple(rejections), num_priced=len(priced))


def fits(memory: MemoryEstimate, there: Topology | Cluster) -> bool:
    """Whether the estimate leaves room, on the devices and for them on their hosts; a memory that
    is unknown is not argued with.
    """
    on_device = (
        there.bytes_per_device is None or memory.total <= USABLE_SHARE * there.bytes_per_device
    )
    return on_device and (
        there.host_bytes_per_device is None or memory.host <= there.host_bytes_per_device
    )


def on_the_host(memory: MemoryEstimate, there: Topology | Cluster) -> str:
    """What is needed of the host's memory and what is there, to follow such words of the device's;
    nothing where nothing lies there.
    """
    if not memory.host:
        return ""
    usable = there.host_bytes_per_device
    return (
        f"; {gib(memory.host)} would lie in the host's memory, where"
        f" {'it is not known what' if usable is None else gib(usable)} may be used"
    )
