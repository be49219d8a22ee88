"""Finds plans that may be best in a simulated run, with searches that are reused.

A search over all layouts takes a second for a large cluster, and a benchmark asks for thousands. So
the layouts are searched once for each coarse combination of link and device speeds. The best plans
of that search, many more than requested, are then priced exactly.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from optimus_jax.control.deciding.options import STAGED
from optimus_jax.control.deciding.rebalancing import rebalanced
from optimus_jax.plan import Plan
from optimus_jax.planning.learning.calibrate import Calibration
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.search.search import Candidate, Pricing, Ranking, search
from optimus_jax.simulation.setup import Setup, default_plans
from optimus_jax.simulation.timeline import ClusterConditions, Timeline

POOL = 48
"""Number of plans of each coarse search that are priced exactly."""
COARSE = math.log(2.0)
"""Spacing of the coarse grid of speeds, as a logarithm."""
TOP = 10
SAMPLED = 40
"""Largest number of different conditions of a run that are searched."""


class PooledSearch:
    """A caching searcher for `control.advisor.Advisor`, shared by many runs on one cluster."""

    def __init__(self) -> None:
        self._pools: dict[object, tuple[Plan, ...]] = {}

    def __call__(self, pricing: Pricing) -> Ranking:
        """The best plans of the coarse search, priced exactly."""
        candidates = [
            Candidate(plan=plan, prediction=pricing.predicted(plan), memory=pricing.memory(plan))
            for plan in self.plans(pricing)
        ]
        ranked = sorted(candidates, key=lambda candidate: candidate.prediction.step_time_s)
        return Ranking(best=tuple(ranked[:TOP]), rejections=(), num_priced=len(ranked))

    def plans(self, pricing: Pricing) -> tuple[Plan, ...]:
        """Many of the best plans, in no particular order."""
        cluster, rates = pricing.cluster, pricing.rates
        coarse_cluster = replace(
            cluster,
            intra_host=_coarse(cluster.intra_host),
            inter_host=cluster.inter_host and _coarse(cluster.inter_host),
        )
        coarse_rates = replace(
            rates,
            matmul_flops_per_s=_rounded(rates.matmul_flops_per_s),
            f32_matmul_flops_per_s=_rounded(rates.f32_matmul_flops_per_s),
            memory_bytes_per_s=_rounded(rates.memory_bytes_per_s),
            launch_s=type(rates).launch_s,
        )
        key = (pricing.config, coarse_cluster, coarse_rates)
        if key not in self._pools:
            found = search(
                Pricing(pricing.config, coarse_cluster, coarse_rates, Calibration()), top=POOL
            )
            self._pools[key] = tuple([candidate.plan for candidate in found.best])
        return self._pools[key]


def candidate_plans(setup: Setup, timeline: Timeline, searcher: PooledSearch) -> list[Plan]:
    """All plans that a run with full knowledge should consider: the best in each of its conditions,
    the first plan and the default.
    """
    plans = dict.fromkeys(
        [setup.start, *default_plans(setup.nominal[0], setup.nominal[0].cluster.num_devices)[:1]]
    )
    for pricing in setup.nominal:
        shares = pricing.workload.layer_shares
        for conditions in _different(timeline):
            for cluster in _clusters(pricing.cluster, conditions):
                scaled = replace(
                    cluster,
                    intra_host=cluster.intra_host.scaled(conditions.intra_host),
                    inter_host=cluster.inter_host
                    and cluster.inter_host.scaled(conditions.inter_host),
                )
                there = replace(pricing, cluster=scaled)
                found = searcher.plans(there)
                staged = [
                    plan
                    for schedule in STAGED
                    if conditions.slow
                    for plan in searcher.plans(
                        replace(
                            there, config=there.config.with_values({"parallel.schedule": schedule})
                        )
                    )
                ]
                plans |= dict.fromkeys([*found, *_sparing([*found, *staged], conditions, shares)])
    return list(plans)


def _sparing(
    plans: Sequence[Plan], conditions: ClusterConditions, shares: tuple[float, ...]
) -> list[Plan]:
    """These plans with less to compute in stages whose devices are slow.

    Args:
      shares: as of `rebalanced`.
    """
    slow = {device: factor for device, factor in conditions.slow if factor > 1}
    found = [
        rebalanced(plan, [slow.get(device, 1.0) for device in range(plan.num_devices)], shares)
        for plan in plans
        if slow and plan.num_devices > max(slow)
    ]
    return [plan for plan in found if plan is not None]


def _different(timeline: Timeline) -> list[ClusterConditions]:
    """The distinct conditions of a run, with the taken memory rounded up to quarters."""
    occurring = [timeline.conditions(index) for index in range(len(timeline.bounds_s))]
    return list(
        dict.fromkeys(
            replace(each, taken=min(0.95, math.ceil(4 * each.taken) / 4), wait_s=0.0)
            for each in occurring
        )
    )[:SAMPLED]


def _clusters(cluster: Cluster, conditions: ClusterConditions) -> Iterator[Cluster]:
    """The whole cluster, then the clusters without the hosts of lost devices and of lost or slow
    devices. Memory that is taken is subtracted from all.
    """
    slow = {device for device, factor in conditions.slow if factor > 1}
    memory = cluster.accelerator.memory_bytes
    if conditions.taken and memory is not None:
        cluster = replace(
            cluster,
            accelerator=replace(
                cluster.accelerator, memory_bytes=int(memory * (1 - conditions.taken))
            ),
        )
    yield cluster
    for bad in (conditions.lost, conditions.lost | slow):
        hosts = {device // cluster.devices_per_host for device in bad}
        if hosts and len(hosts) < cluster.num_hosts:
            yield from _smaller(cluster, cluster.num_hosts - len(hosts))
        elif hosts and cluster.num_hosts == 1 and len(bad) < cluster.devices_per_host:
            yield replace(cluster, devices_per_host=cluster.devices_per_host - len(bad))
            yield replace(
                cluster, devices_per_host=2 ** int(math.log2(cluster.devices_per_host - len(bad)))
            )


def _smaller(cluster: Cluster, num_hosts: int) -> Sequence[Cluster]:
    """The cluster with so many hosts, and with the power of two below, which divides batches."""
    counts = {num_hosts, 2 ** int(math.log2(num_hosts))}
    return [cluster.with_hosts(count) for count in sorted(counts, reverse=True)]


def _coarse(link: Link) -> Link:
    return (
        link if link.bytes_per_s is None else replace(link, bytes_per_s=_rounded(link.bytes_per_s))
    )


def _rounded(speed: float) -> float:
    return math.exp(round(math.log(speed) / COARSE) * COARSE)
