"""The best plan for the same training on several clusters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimus_jax.config import ModelConfig
from optimus_jax.config.data import SEQUENCES_PER_DEVICE
from optimus_jax.errors import PlanError
from optimus_jax.planning.api import PlanSearch, has_global_batch, search_plans
from optimus_jax.planning.profiles.cluster import INTER_HOST, Cluster
from optimus_jax.planning.search.search import ReportStatus


@dataclass(frozen=True, kw_only=True)
class ComparedCluster:
    """A cluster of a comparison."""

    name: str
    """As it was given."""
    cluster: Cluster
    found: PlanSearch | None
    """Its best plan; None: there is none."""
    why_not: str = ""
    """Why there is none."""


def compare_clusters(
    model: str | ModelConfig,
    names: Sequence[str],
    *,
    links: Sequence[str] = (),
    top: int = 1,
    progress: ReportStatus | None = None,
    overrides: dict[str, Any],
) -> list[ComparedCluster]:
    """The best plan for each cluster, in the order given, all with the same batch.

    Args:
      names: such as `h100:8x8`.
      top: plans to keep for each.
      overrides: settings as for `find_plans`. The default global batch is SEQUENCES_PER_DEVICE for
        each device of the largest cluster.
    Raises:
      OptimusError: a name is unknown, a setting is impossible under every plan, or no cluster has
        a plan.
    """
    links_of = {name: _links_of(name, links) for name in names}
    clusters = [Cluster.parse(name, links_of[name]) for name in names]
    if not has_global_batch(overrides):
        most = max(cluster.num_devices for cluster in clusters)
        overrides = {**overrides, "data.global_batch": SEQUENCES_PER_DEVICE * most}
    compared, errors = [], []
    for name, cluster in zip(names, clusters, strict=True):
        found, why_not = None, ""
        try:
            found = search_plans(
                model, name, top=top, links=links_of[name], progress=progress, overrides=overrides
            )
        except PlanError as error:
            why_not = str(error)
            errors.append(error)
        compared.append(ComparedCluster(name=name, cluster=cluster, found=found, why_not=why_not))
    if len(errors) == len(names):
        raise errors[0]
    return compared


def _links_of(name: str, links: Sequence[str]) -> list[str]:
    """Those links that a cluster has: one host has none to others."""
    is_one_host = Cluster.parse(name).num_hosts == 1
    return [link for link in links if not (is_one_host and link.strip().startswith(INTER_HOST))]
