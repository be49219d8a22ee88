"""Sources of candidate plans: cached searches, and clusters without their unusable devices."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.control import constants
from optimus_jax.control.policy import SwitchMethod
from optimus_jax.errors import PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.cost import term_times
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Pricing, Ranking, fits, search

Searcher = Callable[[Pricing], Ranking | None]
"""Finds the best plans; None: it is still searching in the background, ask again later."""


def search_now(pricing: Pricing) -> Ranking:
    """Search synchronously, the default. Takes up to half a second for a thousand devices."""
    return search(pricing, top=constants.NUM_RANKED_PLANS)


class Searches:
    """A cache of search results.

    Args:
      searcher: runs a search; None: `search_now`.
    """

    def __init__(self, searcher: Searcher | None) -> None:
        self._searcher = searcher or search_now
        self._found: dict[object, tuple[Plan, ...]] = {}

    def best(self, key: object, pricing: Pricing) -> Sequence[Plan] | None:
        """The best plans by this pricing; None: the search is not done yet.

        `key` is the cache key. It leaves out what was learnt since, so a cached result may rest on
        an older calibration than `pricing`.
        """
        if key not in self._found:
            try:
                found = self._searcher(pricing)
            except PlanError:
                found = Ranking(best=(), rejections=(), num_priced=0)
            if found is None:
                return None
            if len(self._found) >= constants.MAX_CACHED_SEARCHES:
                self._found.pop(next(iter(self._found)))
            self._found[key] = tuple(candidate.plan for candidate in found.best)
        return list(self._found[key])


def times(plan: Plan, pricing: Pricing) -> dict[str, float]:
    """Seconds of each term of a step, by the uncalibrated cost model. Terms of 0 s are left out.

    Raises PlanError if the speed of a link is unknown.
    """
    found = term_times(pricing.workload, plan, pricing.cluster, pricing.rates)
    return {name: time_s for name, time_s in found.items() if time_s > 0}


def is_legal(plan: Plan, config: Config) -> bool:
    """Whether the model can be trained under the plan with the config's global batch."""
    try:
        plan.validate(
            config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
        )
    except PlanError:
        return False
    return True


def has_room(plan: Plan, pricing: Pricing) -> bool:
    """Whether the plan is estimated to fit into a device's memory."""
    return fits(pricing.memory(plan), pricing.cluster)


def check_allowed(allow: Sequence[AxisSizes], num_devices: int) -> None:
    """Raise PlanError unless the run has enough devices for every mesh on the user's list."""
    for axes in allow:
        if axes.num_devices > num_devices:
            raise PlanError(
                explain(
                    f"controller.allow names a mesh of {axes.num_devices} devices, and this run has"
                    f" {num_devices}",
                    given=f"controller.allow={axes}",
                    do="name meshes of as many devices as there are",
                )
            )


def is_allowed(plan: Plan, allow: Sequence[AxisSizes]) -> bool:
    """Whether the plan's mesh is on the user's list; an empty list allows all."""
    return not allow or plan.axes in allow


def switch_method_of(
    plan: Plan, other: Plan, *, same_devices: bool, same_hosts: bool = True
) -> SwitchMethod:
    """The cheapest switch method that gets from one plan to the other."""
    if not same_devices:
        return "subset" if same_hosts else "restart"

    def layout(each: Plan) -> tuple[object, ...]:
        return (
            each.axes,
            each.rules,
            each.zero,
            each.offloads_moments,
            each.pipeline and len(each.pipeline.layers_per_stage),
        )

    if layout(plan) != layout(other):
        return "remesh"
    is_alike = (
        plan.pipeline is None
        or other.pipeline is None
        or plan.pipeline.layers_per_stage == other.pipeline.layers_per_stage
    )
    return "executable" if is_alike else "rebalance"


def leaving_out(
    cluster: Cluster, unusable: frozenset[int], config: Config
) -> Iterator[tuple[Cluster, frozenset[int]]]:
    """Clusters without the unusable devices, each with the ids of all devices that it leaves out.

    Whole hosts are left out, or single devices if there is only one host. The largest cluster comes
    first, then smaller ones that divide better: 127 hosts would have to be 127 stages.
    """
    size = cluster.devices_per_host
    unit = 1 if cluster.num_hosts == 1 else size
    broken = {device // unit for device in unusable}
    sound = [place for place in range(cluster.num_devices // unit) if place not in broken]
    for count in _sizes(len(sound), config):
        used = {place * unit + device for place in sound[:count] for device in range(unit)}
        kept = replace(cluster, devices_per_host=count) if unit == 1 else cluster.with_hosts(count)
        yield kept, frozenset(range(cluster.num_devices)) - used


def _sizes(most: int, config: Config) -> list[int]:
    """The largest few counts, up to `most`, that the model can be divided over: the factor of a
    count that divides neither batch nor heads becomes pipeline stages, one layer or more each.
    """

    def num_stages(count: int) -> int:
        return count // math.gcd(count, config.data.global_batch * config.model.num_heads)

    return [count for count in range(most, 0, -1) if num_stages(count) <= config.model.num_layers][
        : constants.MAX_CLUSTER_SIZES
    ]
