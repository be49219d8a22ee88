"""Find nearby batch and cluster sizes that divide better, and predict what they would gain.

A batch is split over data x fsdp, so over at most gcd(batch, number of devices) devices. The
remaining factor goes to tensor and pipe, which cost more. The search that ranked the plans is
repeated for nearby batches that divide over more devices, and for clusters with some hosts idle, at
most MOST_PRICED times.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimus_jax.config import Config
from optimus_jax.errors import PlanError, counted
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.divisors import divisors, prime_factors
from optimus_jax.planning.search.search import Candidate, Pricing, ReportStatus, search

NEAR = 1.25
"""Batches within this factor count as nearby. Larger changes would alter the training run."""
MOST_BATCHES, MOST_CLUSTERS = 3, 2
MOST_PRICED = MOST_BATCHES + MOST_CLUSTERS
"""Maximum number of additional searches. None are made if the batch divides over all devices."""
WORTH_REPORTING = 0.03
"""Minimum relative gain in tokens per second to report. Smaller gains are well within the
prediction error."""


@dataclass(frozen=True, kw_only=True)
class SizeAlternative:
    """Another batch or cluster size with its best plan; all figures are predictions."""

    global_batch: int
    """Examples per step."""
    cluster: Cluster
    """The devices used."""
    plan: Plan
    step_time_s: float
    tokens_per_s: float
    gain: float | None
    """Relative gain in tokens per second over the requested size; None if no plan fits that."""

    @property
    def num_devices(self) -> int:
        """Number of devices used."""
        return self.cluster.num_devices

    def as_json(self) -> dict[str, Any]:
        """What `optimus plan --json` prints."""
        return {
            "global_batch": self.global_batch,
            "num_devices": self.num_devices,
            "mesh": str(self.plan.axes),
            "microbatches": self.plan.microbatches,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "gain": self.gain,
        }

    def describe(self) -> str:
        """One line for people."""
        gain = "" if self.gain is None else f" ({self.gain:+.1%})"
        return (
            f"{self.tokens_per_s:,.0f} tokens/s{gain}, step {self.step_time_s:.3g} s, mesh"
            f" {self.plan.axes}"
        )


@dataclass(frozen=True, kw_only=True)
class Divisibility:
    """How well a batch and a model divide over a number of devices."""

    reasons: tuple[str, ...] = ()
    """A sentence for each size that does not divide; empty if everything divides."""
    batches: tuple[SizeAlternative, ...] = ()
    """Other batches on the same devices that are predicted to be faster, nearest first."""
    clusters: tuple[SizeAlternative, ...] = ()
    """Fewer hosts on which the same batch is predicted to be faster."""
    no_batch: str | None = None
    """Why `batches` is empty although the batch does not divide over all devices. None if it does
    divide, if `batches` is not empty, or if the batch must not change."""
    is_awkward: bool = False
    """Whether a prime factor of the number of devices divides neither the batch nor the heads, so
    that the layout is unusual even if no nearby size is better."""

    @property
    def is_worth_reporting(self) -> bool:
        """Whether to tell the user."""
        return bool(self.batches or self.clusters or self.is_awkward or self.no_batch)


def divisibility(
    pricing: Pricing,
    best: Candidate | None,
    *,
    may_change_batch: bool = True,
    may_leave_hosts: bool = True,
    progress: ReportStatus | None = None,
) -> Divisibility:
    """Find what does not divide in the requested run, and which nearby sizes would be faster.

    Args:
      pricing: the cost model of the requested run and cluster.
      best: the fastest plan found; None if there is none.
      may_change_batch: whether to try other batches. A run that has begun must keep its batch.
      may_leave_hosts: whether to try leaving hosts idle.
      progress: called before each search.
    """
    reasons = tuple(reasons_of(pricing.config, pricing.cluster.num_devices, best and best.plan))
    batch, num_devices = pricing.config.data.global_batch, pricing.cluster.num_devices
    now = None if best is None else best.prediction.tokens_per_s
    near = near_batches(batch, num_devices) if may_change_batch else []
    better = tuple(_priced([_with_batch(pricing, each) for each in near], now, progress))
    leaves_over = batch % num_devices > 0
    clusters = (
        [
            replace(pricing, cluster=each)
            for each in smaller_clusters(pricing.cluster, pricing.config)
        ]
        if may_leave_hosts
        else []
    )
    return Divisibility(
        reasons=reasons,
        is_awkward=bool(_left_over(pricing.config, num_devices)),
        batches=better,
        clusters=tuple(_priced(clusters, now, progress)),
        no_batch=(
            no_better(batch, num_devices, tried=near)
            if may_change_batch and leaves_over and not better
            else None
        ),
    )


def reasons_of(config: Config, num_devices: int, plan: Plan | None) -> Iterator[str]:
    """Yield a sentence for each of batch, heads, model width and layers that does not divide
    evenly.
    """
    batch, model = config.data.global_batch, config.model
    ways = math.gcd(batch, num_devices)
    if ways < num_devices:
        over = (
            f"over {ways:,} of {_factored(num_devices)} devices at most"
            if ways > 1
            else f"over none of {_factored(num_devices)} devices"
        )
        yield (
            f"a batch of {batch:,} can be split {over}, so layers are split {num_devices // ways:,}"
            " ways or more"
        )
    if odd := _left_over(config, num_devices):
        yield (
            f"{_factors(odd)} neither the batch nor the {model.num_heads} heads, which leaves pipe,"
            " or tensor with whole heads"
        )
    if wide := {prime for prime in prime_factors(num_devices) if model.embed_dim % prime}:
        yield (
            f"{_factors(wide, negated=True)} the model's width of {model.embed_dim:,}, which rules"
            " out fsdp"
        )
    # Layers of an encoder and a decoder take unequal times, so their stages are uneven on purpose.
    stages = 1 if plan is None or model.encoder_layers else plan.axes.pipe
    if model.num_layers % stages:
        yield (
            f"{counted(model.num_layers, 'layer')} over pipe={stages} leave stages uneven,"
            " and every tick lasts as long as its largest stage"
        )


def near_batches(batch: int, num_devices: int) -> list[int]:
    """Batches within a factor NEAR of `batch`, nearest first.

    Each divides over more devices than all nearer ones.
    """
    found: list[int] = []
    most = math.gcd(batch, num_devices)
    near = {
        number
        for ways in divisors(num_devices)
        if ways > most
        for number in (batch // ways * ways, batch // ways * ways + ways)
        if number and max(number / batch, batch / number) <= NEAR
    }
    for number in sorted(near, key=lambda number: (abs(math.log(number / batch)), number)):
        if (ways := math.gcd(number, num_devices)) > most:
            found.append(number)
            most = ways
    return found if len(found) <= MOST_BATCHES else [found[0], *found[-(MOST_BATCHES - 1) :]]


def no_better(batch: int, num_devices: int, *, tried: Sequence[int]) -> str:
    """Text saying that no nearby batch is better, and which batch divides over all devices.

    Args:
      tried: nearby batches that divide over more devices but are not predicted to be faster.
    """
    below = batch // num_devices * num_devices
    whole = min(
        (each for each in (below, below + num_devices) if each),
        key=lambda each: (abs(math.log(each / batch)), each),
    )
    first, last = math.ceil(batch / NEAR), math.floor(batch * NEAR)
    near = f"no batch from {first:,} to {last:,}" if last > first else "no batch near it"
    if not tried:
        said = f"{near} can be split over more"
    elif len(tried) == 1:
        said = (
            f"--global-batch {tried[0]} can be split over more, but is not predicted to give"
            f" {WORTH_REPORTING:.0%} more tokens/s"
        )
    else:
        said = (
            f"--global-batch {' or '.join(map(str, tried))} can be split over more, but neither is"
            f" predicted to give {WORTH_REPORTING:.0%} more tokens/s"
        )
    ratio = max(whole / batch, batch / whole)
    return (
        said
        if whole in tried
        else (
            f"{said}; the nearest that all {num_devices:,} devices divide is --global-batch"
            f" {whole}, {ratio:.3g} times {'larger' if whole > batch else 'smaller'}"
        )
    )


def smaller_clusters(cluster: Cluster, config: Config) -> list[Cluster]:
    """The cluster with some hosts idle (or devices, if there is one host), fewest idle first.

    Each divides better over data and fsdp than all larger ones.
    """
    found: list[Cluster] = []
    most = _ways_over_fsdp(config, cluster.num_devices)
    units = cluster.num_hosts if cluster.num_hosts > 1 else cluster.devices_per_host
    for idle in range(1, units - 1):
        if units / (units - idle) > NEAR:
            break
        smaller = cluster.without(idle)
        if (ways := _ways_over_fsdp(config, smaller.num_devices)) > most:
            found.append(smaller)
            most = ways
    return found[-MOST_CLUSTERS:]


def _ways_over_fsdp(config: Config, num_devices: int) -> int:
    """Number of devices over which both the batch and the model's width divide."""
    ways = math.gcd(config.data.global_batch, num_devices)
    return math.prod(
        prime**power
        for prime, power in prime_factors(ways).items()
        if config.model.embed_dim % prime == 0
    )


def _with_batch(pricing: Pricing, batch: int) -> Pricing:
    return replace(pricing, config=pricing.config.with_values({"data.global_batch": batch}))


def _priced(
    others: Iterable[Pricing], now: float | None, progress: ReportStatus | None
) -> Iterator[SizeAlternative]:
    """Yield the best plan of each run, if it gains enough to report."""
    for other in others:
        if progress is not None:
            progress(
                f"pricing a batch of {other.config.data.global_batch:,} on"
                f" {other.cluster.num_devices:,} devices"
            )
        try:
            best = search(other, top=1).best
        except PlanError:  # impossible with the user's fixed settings
            continue
        gain = best[0].prediction.tokens_per_s / now - 1 if best and now else None
        if best and (gain is None or gain >= WORTH_REPORTING):
            yield SizeAlternative(
                global_batch=other.config.data.global_batch,
                cluster=other.cluster,
                plan=best[0].plan,
                gain=gain,
                step_time_s=best[0].prediction.step_time_s,
                tokens_per_s=best[0].prediction.tokens_per_s,
            )


def _left_over(config: Config, num_devices: int) -> set[int]:
    """Prime factors of the number of devices that divide neither the batch nor the heads."""
    return {
        prime
        for prime in prime_factors(num_devices // math.gcd(config.data.global_batch, num_devices))
        if config.model.num_heads % prime
    }


def _factored(number: int) -> str:
    """A number with its factors, such as `960 (2^6 x 3 x 5)`."""
    factors = " x ".join(
        f"{prime}^{power}" if power > 1 else str(prime)
        for prime, power in sorted(prime_factors(number).items())
    )
    return f"{number:,} ({factors})" if factors and factors != str(number) else f"{number:,}"


def _factors(primes: Iterable[int], *, negated: bool = False) -> str:
    """The start of a clause, such as `the factors 3 and 5 divide`; the caller appends the
    object.
    """
    ordered = sorted(primes)
    verb = (
        ("does not divide" if negated else "divides")
        if len(ordered) == 1
        else ("do not divide" if negated else "divide")
    )
    return f"the factor{'s' * (len(ordered) > 1)} {' and '.join(map(str, ordered))} {verb}"
