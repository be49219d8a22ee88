"""All plans worth weighing at a moment, each on devices that can be used there.

Where devices are lost, what is left; where a process is slow, also all but it; where one was left out, also all with
it, as if it had recovered.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from optimus_jax.control.candidates import Searches, executables, has_room, is_legal, leaving_out, relaxed
from optimus_jax.control.conditions import Conditions
from optimus_jax.control.left_out import LeftOut
from optimus_jax.control.memory_watch import MemoryWatch
from optimus_jax.control.prices import Batch, Prices, setting
from optimus_jax.plan import Plan
from optimus_jax.planning.calibrate import Calibration
from optimus_jax.planning.search import Pricing


@dataclass(frozen=True, kw_only=True)
class Place:
    """Devices that can be used."""

    pricing: Pricing
    """What plans cost there in present conditions."""
    setting: str
    """Names those conditions, and the batch."""
    normal: Pricing
    """What they cost there in normal conditions."""
    without: frozenset[int]
    """Ids of the other devices."""
    likely: float = 1.0
    """Probability that conditions there are as priced."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A plan, and the devices that it would use."""

    plan: Plan
    place: Place


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a run is under."""

    plan: Plan
    without: frozenset[int] = frozenset()
    """Ids of devices that it does not use."""
    left_out: LeftOut | None = None
    """Of these, a slow process."""


@dataclass(frozen=True, kw_only=True)
class View:
    """All that says which devices can be used, and what plans cost there."""

    batch: Batch
    time_s: float
    conditions: Conditions
    """Present ones."""
    normal: Conditions
    lost: frozenset[int]
    """Ids of devices."""
    slow: frozenset[int]
    """Ids of a slow process's devices that the run uses."""
    left_out: LeftOut | None
    memory: MemoryWatch


class Options:
    """Finds offers for one run.

    Args:
      prices: of the run.
      searches: what is best on given devices.
    """

    def __init__(self, prices: Prices, searches: Searches) -> None:
        self._prices, self._searches = prices, searches

    def all(self, view: View, standing: Standing, known: list[Plan], learnt: Calibration, *, mandatory: bool) -> list[Offer] | None:
        """Every plan worth weighing; None: a search is still at work.

        Args:
          known: plans that the run was under.
          learnt: how far off the cost model's terms are.
          mandatory: what the user fixed is given up where nothing else can be had.
        """
        offers: dict[tuple[str, frozenset[int]], Offer] = {}
        for place in self._places(view):
            found = self._found(place, view, learnt, mandatory=mandatory)
            if found is None:
                return None
            more = self._known(place, view, standing, known)
            for plan in [*found, *more]:
                if (plan, place.without) != (standing.plan, standing.without):
                    offers.setdefault((plan.digest, place.without), Offer(plan=plan, place=place))
        return list(offers.values())

    def back(self, view: View, before: Standing) -> list[Offer]:
        """The plan that the run was under, on the devices that it used; empty if that cannot be had."""
        priced, conditions = self._prices.of(view.batch), view.conditions
        if view.left_out is not None and not view.left_out.devices <= before.without:
            conditions = replace(conditions, skew=view.left_out.skew)
        elif before.left_out is not None or (view.slow and view.slow <= before.without):
            conditions = conditions.without_skew()
        size = priced.cluster.devices_per_host
        num_hosts, rest = divmod(before.plan.num_devices, size)
        cluster = replace(priced.cluster, num_hosts=max(1, num_hosts), devices_per_host=rest or size, between=priced.cluster.between if num_hosts > 1 else None)
        place = self._place(replace(priced, cluster=cluster), conditions, before.without, view)
        can_be = view.lost <= before.without and is_legal(before.plan, priced.config) and has_room(before.plan, place.pricing)
        return [Offer(plan=before.plan, place=place)] if can_be else []

    def _places(self, view: View) -> Iterator[Place]:
        """Sets of devices that can be used."""
        priced, conditions, lost = self._prices.of(view.batch), view.conditions, view.lost
        places = [(lost, conditions, 1.0)]
        if view.left_out is not None:
            places = [(lost | view.left_out.devices, conditions, 1.0), (lost, conditions, view.left_out.recovered(view.time_s))]
        elif view.slow - lost:
            places.append((lost | view.slow, conditions.without_skew(), 1.0))
        for unusable, there, likely in places:
            whole = [(priced.cluster, frozenset[int]())]
            for cluster, without in leaving_out(priced.cluster, unusable, priced.config) if unusable else whole:
                yield self._place(replace(priced, cluster=cluster), there, without, view, likely)

    @staticmethod
    def _place(priced: Pricing, conditions: Conditions, without: frozenset[int], view: View, likely: float = 1.0) -> Place:
        return Place(pricing=view.memory.applied(conditions.applied(priced)), setting=setting(view.batch, conditions),
                     normal=view.memory.applied(view.normal.applied(priced)), without=without, likely=likely)

    def _found(self, place: Place, view: View, learnt: Calibration, *, mandatory: bool) -> list[Plan] | None:
        key = (place.setting, place.pricing.cluster.num_devices, round(view.memory.taken, 2))
        pricing = replace(place.pricing, calibration=learnt)
        found = self._searches.best(key, pricing)
        if mandatory and found is not None and not found:
            found = self._searches.best((*key, "relaxed"), replace(pricing, config=relaxed(pricing.config)))
        return None if found is None else list(found)

    @staticmethod
    def _known(place: Place, view: View, standing: Standing, known: list[Plan]) -> list[Plan]:
        """Plans that the run was under, and other executables for its state, that fit there."""
        here = [plan for plan in known if plan.num_devices == place.pricing.cluster.num_devices and is_legal(plan, place.pricing.config)
                and has_room(plan, place.pricing)]
        return here + (executables(standing.plan, place.pricing) if place.without == standing.without else [])
