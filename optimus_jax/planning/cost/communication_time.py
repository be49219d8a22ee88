"""The time of a collective or send along given mesh axes."""

import math
from typing import NamedTuple

from optimus_jax.config.axes import AxisSizes
from optimus_jax.errors import PlanError, explain
from optimus_jax.planning.cost.communication import CommunicationOp
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link


class _PathTime(NamedTuple):
    """Parameters of the time model for communication along given mesh axes."""

    size: int
    """Number of devices."""
    s_per_byte: float
    """Seconds per byte of the slowest link of the ring."""
    latency_s: float
    """Latency of one pass around the ring."""
    tree_latency_s: float = 0.0
    """The same latency with trees between hosts, which NCCL uses for small all-reduces."""
    between_s_per_byte: float = 0.0
    """Seconds per byte of a device's link to other hosts, if the ring leaves the host."""
    hosts: int = 1


class CommunicationTimes:
    """Times of communication ops on one mesh.

    A collective is modelled as a ring through all of its devices. Every link carries the same
    bytes, so the slowest link decides. The number of rings that cross between two hosts is the
    number of participating devices per host. Every step of a ring costs one latency.
    """

    def __init__(self, axes: AxisSizes, cluster: Cluster, rates: Rates):
        self._axes, self._cluster, self._rates = axes, cluster, rates
        self._path_times: dict[tuple[tuple[str, ...], bool], _PathTime] = {}
        self._spans: dict[tuple[str, ...], tuple[int, int]] = {}

    def time(self, exchange: CommunicationOp) -> float:
        """Seconds that one execution takes without overlap.

        Raises PlanError if it crosses a link of unknown speed.
        """
        is_send = exchange.kind == "send"
        path = self._path_times.get((exchange.axes, is_send))
        if path is None:
            path = self._path_times[exchange.axes, is_send] = (
                self._send(exchange.axes) if is_send else self._ring(exchange.axes)
            )
        if is_send:
            return exchange.num_bytes * path.s_per_byte + path.latency_s
        around_s = (path.size - 1) / path.size * exchange.num_bytes * path.s_per_byte
        if exchange.kind == "all-to-all":
            # Every device sends other hosts' parts through its own link: no ring joins them.
            leaving_s = (path.hosts - 1) / path.hosts * exchange.num_bytes * path.between_s_per_byte
            around_s = max(around_s, leaving_s)
        ring_s = (
            2.0 * (around_s + path.tree_latency_s)
            if exchange.kind == "all-reduce"
            else around_s + path.latency_s
        )
        return ring_s + self._rates.arrival_s if path.size > 1 else ring_s

    def span(self, names: tuple[str, ...]) -> tuple[int, int]:
        """The devices and the hosts that communication along these axes spans. On one cluster,
        times depend on them alone.

        Raises PlanError if the mesh is larger than the cluster.
        """
        found = self._spans.get(names)
        if found is None:
            size = math.prod([self._axes[name] for name in names])
            hosts = self._cluster.hosts_crossed(self._axes, names) if size > 1 else 1
            found = self._spans[names] = size, hosts
        return found

    def _ring(self, names: tuple[str, ...]) -> _PathTime:
        cluster, rates, (size, hosts) = self._cluster, self._rates, self.span(names)
        if size == 1:
            return _PathTime(1, 0.0, 0.0, 0.0)
        on_host, speed, latency_s, tree_latency_s = size / hosts, math.inf, 0.0, 0.0
        between_s_per_byte = 0.0
        if on_host > 1:
            speed = speed_of(cluster.intra_host.among(on_host)) * rates.collective_share
            latency_s = tree_latency_s = (on_host - 1) * _latency(
                cluster.intra_host, rates.latency_s
            )
        if hosts > 1:
            assert cluster.inter_host is not None, "several hosts have an inter-host link"
            of_device = speed_of(cluster.inter_host) * rates.inter_host_share
            speed, between_s_per_byte = min(speed, of_device * on_host), 1 / of_device
            hop_s = _latency(cluster.inter_host, rates.inter_host_latency_s)
            latency_s += (hosts - 1) * hop_s
            # NCCL sums small messages along trees; it gathers and scatters in rings.
            tree_latency_s += min(hosts - 1, 2 * math.log2(hosts)) * hop_s
        return _PathTime(size, 1 / speed, latency_s, tree_latency_s, between_s_per_byte, hosts)

    def _send(self, names: tuple[str, ...]) -> _PathTime:
        cluster, rates = self._cluster, self._rates
        _, hosts = self.span(names)
        if hosts == 1:
            return _PathTime(
                2,
                1 / (speed_of(cluster.intra_host.among(2)) * rates.send_share),
                _latency(cluster.intra_host, rates.latency_s),
            )
        assert cluster.inter_host is not None, "several hosts have an inter-host link"
        return _PathTime(
            2,
            1 / (speed_of(cluster.inter_host) * rates.inter_host_share),
            _latency(cluster.inter_host, rates.inter_host_latency_s),
        )


def speed_of(link: Link) -> float:
    """Bytes per second of a link. Raises PlanError if its speed is unknown."""
    if link.bytes_per_s is None:
        raise PlanError(
            explain(
                f"the speed of {link.name} is unknown, and this plan sends over it",
                given=link.source,
                do=(
                    "profile this machine, or give the speed: --link intra_host=100GB/s or"
                    " inter_host=25GB/s"
                ),
            )
        )
    return link.bytes_per_s


def _latency(link: Link, default_s: float) -> float:
    return default_s if link.latency_s is None else link.latency_s
