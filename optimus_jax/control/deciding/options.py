"""Finds the plans worth considering now, each on a set of usable devices.

If devices are lost, the remaining ones are considered; if processes are slow, also those without
the slowest ones. A process that is left out is measured on, so its own condition says what it would
be worth to use it again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.parallel import AUTO
from optimus_jax.control import constants
from optimus_jax.control.deciding.candidates import (
    Searches,
    has_room,
    is_legal,
    leaving_out,
    times,
)
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.memory_watch import MemoryWatch
from optimus_jax.control.deciding.prices import Prices, setting
from optimus_jax.control.deciding.rebalancing import rebalanced
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan
from optimus_jax.planning.learning.calibrate import Calibration
from optimus_jax.planning.search.search import Pricing

STAGED = ("1f1b", "interleaved")
"""Pipeline schedules, which are searched separately: few large stages, whose layers can be divided
finely, or many small ones."""


@dataclass(frozen=True, kw_only=True)
class UsableDevices:
    """A set of usable devices, with its conditions and the pricing of plans on it."""

    conditions: Conditions
    """Present conditions of these devices."""
    profiled: Pricing
    """Pricing by the hardware profile, with all the memory."""
    pricing: Pricing
    """Pricing in present conditions."""
    setting: str
    """Name of those conditions and the batch."""
    normal_conditions: Conditions
    """Normal conditions of these devices."""
    normal: Pricing
    """Pricing in those."""
    normal_setting: str
    """Name of those and the batch."""
    without: frozenset[int]
    """Ids of the devices that are not in the set."""
    probability: float = 1.0
    """Probability that conditions are as priced."""


@dataclass(frozen=True, kw_only=True)
class PlanOption:
    """A plan and the devices that it would use."""

    plan: Plan
    devices: UsableDevices


@dataclass(frozen=True, kw_only=True)
class PlanInUse:
    """The plan of a run, and the devices that it does not use."""

    plan: Plan
    without: frozenset[int] = frozenset()
    """Ids of devices that the run does not use."""


@dataclass(frozen=True, kw_only=True)
class ObservedCluster:
    """What decides which devices can be used, and what plans cost on them."""

    batch: BatchShape
    time_s: float
    conditions: Conditions
    """Present conditions of all processes, also of those that are left out."""
    normal: Conditions
    lost: frozenset[int]
    """Ids of lost devices."""
    memory: MemoryWatch
    recovered: Mapping[str, float] = field(default_factory=dict)
    """Factors that are not normal and were not seen of late, with the probability that each is
    normal again."""


class Options:
    """Finds options for one run.

    Args:
      prices: the prices of the run's plans.
      searches: find the best plans on given devices.
      keeps_devices: whether all devices stay in use whatever is wrong with them, because a process
        without devices would have nothing to run.
      allow: meshes that the user allows; empty: all.
    """

    def __init__(
        self,
        prices: Prices,
        searches: Searches,
        *,
        keeps_devices: bool = False,
        allow: Sequence[AxisSizes] = (),
    ) -> None:
        self._prices, self._searches, self._keeps_devices, self._allow = (
            prices,
            searches,
            keeps_devices,
            allow,
        )

    def all(
        self,
        observed: ObservedCluster,
        current: PlanInUse,
        known: list[Plan],
        learnt: Calibration,
        *,
        mandatory: bool,
    ) -> list[PlanOption] | None:
        """Every plan worth considering; None: a search is still running.

        Args:
          observed: the usable devices and present conditions.
          current: the present plan and devices, which are left out of the result.
          known: plans that the run was under, or that were tried.
          learnt: learnt corrections of the cost model's terms.
          mandatory: ignore the layout that the user fixed if no plan is found with it.
        """
        options: dict[tuple[str, frozenset[int], float], PlanOption] = {}
        for devices in self._device_sets(observed, current):
            found = self._found(devices, observed, learnt, mandatory=mandatory)
            if found is None:
                return None
            plans = [*found, *self._known(devices, known)]
            rebalanced_plans = self._rebalanced([current.plan, *plans], devices, observed, learnt)
            if rebalanced_plans is None:
                return None
            for plan in [*plans, *rebalanced_plans]:
                if (plan, devices.without) != (current.plan, current.without):
                    options.setdefault(
                        (plan.digest, devices.without, devices.probability),
                        PlanOption(plan=plan, devices=self._as_affected(devices, plan, observed)),
                    )
        return list(options.values())

    def _device_sets(
        self, observed: ObservedCluster, current: PlanInUse
    ) -> Iterator[UsableDevices]:
        """The sets of devices that can be used."""
        priced = self._prices.of(observed.batch)
        found = dict[tuple[frozenset[int], float], UsableDevices]()
        for unusable, conditions, probability in self._unusable(observed, current):
            whole = [(priced.cluster, frozenset[int]())]
            for cluster, without in (
                leaving_out(priced.cluster, unusable, priced.config) if unusable else whole
            ):
                devices = self._priced(
                    replace(priced, cluster=cluster), conditions, without, observed, probability
                )
                found.setdefault((without, probability), devices)
        yield from found.values()

    def _unusable(
        self, observed: ObservedCluster, current: PlanInUse
    ) -> Iterator[tuple[frozenset[int], Conditions, float]]:
        """Sets of devices not to use, each with the conditions to assume and their probability."""
        conditions = observed.conditions
        lost = frozenset[int]() if self._keeps_devices else observed.lost
        yield lost, conditions, 1.0
        if not self._keeps_devices:
            for unusable in self._left_out(conditions, lost, current):
                yield unusable, conditions, 1.0
        if observed.recovered:
            well = {name: observed.normal.factor(name) for name in observed.recovered}
            yield lost, conditions.with_factors(well), min(observed.recovered.values())

    def _left_out(
        self, conditions: Conditions, lost: frozenset[int], current: PlanInUse
    ) -> Iterator[frozenset[int]]:
        """Sets of devices that a run may leave out because their processes are slow."""
        slow = [
            (factor, self._devices_of(process))
            for process, factor in conditions.slow
            if factor > 1 and not self._devices_of(process) <= lost
        ]
        # To leave out a process gains nothing while one that is as slow stays.
        for least in sorted({factor for factor, _ in slow}, reverse=True)[
            : constants.MAX_LEFT_OUT_SETS
        ]:
            slowest = [devices for factor, devices in slow if factor >= least]
            yield lost.union(*slowest)
        if current.without and lost <= current.without:
            yield current.without

    def _devices_of(self, process: int) -> frozenset[int]:
        return frozenset(
            device for device, each in enumerate(self._prices.process_of) if each == process
        )

    def _rebalanced(
        self,
        plans: list[Plan],
        devices: UsableDevices,
        observed: ObservedCluster,
        learnt: Calibration,
    ) -> list[Plan] | None:
        """These plans and the best plans with stages, rebalanced to give slow processes less to
        compute; None: a search is still running.
        """
        config, num_devices = devices.pricing.config, devices.pricing.cluster.num_devices
        factors = devices.conditions.device_factors(
            self._prices.processes(num_devices, devices.without)
        )
        if min(factors) == max(factors):
            return []
        staged = [plan for plan in plans if plan.pipeline and plan.num_devices == num_devices]
        for schedule in (
            STAGED if config.parallel.schedule == AUTO and config.parallel.axes is None else ()
        ):
            best = self._best(devices, observed, learnt, schedule=schedule)
            if best is None:
                return None
            staged += best
        shares = devices.profiled.workload.layer_shares
        found = dict.fromkeys(rebalanced(plan, factors, shares) for plan in staged)
        legal = [
            plan
            for plan in found
            if plan is not None and is_legal(plan, config) and has_room(plan, devices.pricing)
        ]
        return sorted(
            legal,
            key=lambda plan: learnt.step_time_s(
                times(plan, self._as_affected(devices, plan, observed).pricing)
            ),
        )[: constants.MAX_REBALANCED_PLANS]

    def _as_affected(
        self, devices: UsableDevices, plan: Plan, observed: ObservedCluster
    ) -> UsableDevices:
        """The devices with the skew that affects this plan, which is less if slow stages have less
        to compute.
        """

        def priced(conditions: Conditions) -> Pricing:
            seen = self._prices.seen_by(plan, observed.batch, conditions, devices.without)
            return observed.memory.applied(seen.applied(devices.profiled))

        if devices.conditions.slow:
            devices = replace(devices, pricing=priced(devices.conditions))
        if devices.normal_conditions.slow:
            devices = replace(devices, normal=priced(devices.normal_conditions))
        return devices

    def _priced(
        self,
        priced: Pricing,
        conditions: Conditions,
        without: frozenset[int],
        observed: ObservedCluster,
        probability: float = 1.0,
    ) -> UsableDevices:
        processes = set(self._prices.processes(priced.cluster.num_devices, without))
        conditions, normal = conditions.among(processes), observed.normal.among(processes)
        return UsableDevices(
            conditions=conditions,
            profiled=priced,
            pricing=observed.memory.applied(conditions.applied(priced)),
            setting=setting(observed.batch, conditions),
            normal_conditions=normal,
            normal=observed.memory.applied(normal.applied(priced)),
            normal_setting=setting(observed.batch, normal),
            without=without,
            probability=probability,
        )

    def _found(
        self,
        devices: UsableDevices,
        observed: ObservedCluster,
        learnt: Calibration,
        *,
        mandatory: bool,
    ) -> list[Plan] | None:
        num_devices, found = devices.pricing.cluster.num_devices, list[Plan]()
        for mesh in (
            [axes for axes in self._allow if axes.num_devices == num_devices]
            if self._allow
            else [None]
        ):
            best = self._best(devices, observed, learnt, mesh=mesh)
            if best is None:
                return None
            found += best
        return (
            self._best(devices, observed, learnt, free=True) if mandatory and not found else found
        )

    def _best(
        self,
        devices: UsableDevices,
        observed: ObservedCluster,
        learnt: Calibration,
        *,
        mesh: AxisSizes | None = None,
        schedule: str = "",
        free: bool = False,
    ) -> list[Plan] | None:
        """The plans that a search finds on these devices; None: it is still running.

        Args:
          mesh: only plans with this mesh; None: all.
          schedule: only plans with this schedule; empty: all.
          free: ignore the layout that the user fixed.
        """
        pricing = replace(devices.pricing, calibration=learnt)
        only = {"parallel.mesh": mesh and str(mesh), "parallel.schedule": schedule}
        config = (
            pricing.config.with_open_layout()
            if free
            else pricing.config.with_values({name: value for name, value in only.items() if value})
        )
        key = (
            devices.setting,
            pricing.cluster.num_devices,
            observed.memory.left,
            mesh,
            schedule,
            free,
        )
        found = self._searches.best(key, replace(pricing, config=config))
        return None if found is None else list(found)

    @staticmethod
    def _known(devices: UsableDevices, known: list[Plan]) -> list[Plan]:
        """Known plans that are legal and fit on these devices."""
        return [
            plan
            for plan in known
            if plan.num_devices == devices.pricing.cluster.num_devices
            and is_legal(plan, devices.pricing.config)
            and has_room(plan, devices.pricing)
        ]
