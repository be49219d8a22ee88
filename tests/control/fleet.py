"""A cluster, plans for it and simulated true step times, shared by tests of the predictor and the
advisor.

A `Truth` is the cost model with other rates and links, and with random errors in each term and each
plan: the cost model is neither exact nor useless, as on a real machine.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.request import make_config
from optimus_jax.control.deciding.candidates import is_legal, times
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.prices import Prices
from optimus_jax.mesh.rules import make_rules
from optimus_jax.pipeline.partition import layers_per_stage
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.learning.beliefs import Query
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Candidate, Pricing, Ranking, fits

CONFIG = make_config(
    "llama3-8b",
    {"data.global_batch": 512, "data.seq_len": 4096, "precision.compute": "bf16", "steps": 1000},
)
CLUSTER = Cluster.parse("h100:8x8")
PRICING = Pricing(CONFIG, CLUSTER, Rates.of(CLUSTER.accelerator))


def plan_on(mesh: str, **fields: Any) -> Plan:
    """A legal plan on `mesh`; `fields` are the Plan's own."""
    axes, model = AxisSizes.parse(mesh), CONFIG.model
    pipeline = (
        None
        if axes.pipe == 1
        else Pipelining(
            schedule="1f1b",
            layers_per_stage=layers_per_stage(model.num_layers, axes.pipe),
            repeats=1,
            send_slack=False,
            keep_residuals=True,
        )
    )
    plan = Plan(
        axes=axes,
        rules=make_rules(model),
        zero=3 if axes.fsdp > 1 else 0,
        microbatches=8 if axes.pipe > 1 else 1,
        pipeline=pipeline,
        remat="full",
        precision="bf16",
        attention="cudnn",
        loss_chunk_tokens=2048,
    )
    return replace(plan, **fields)


MESHES = (
    "fsdp=64",
    "data=2,fsdp=32",
    "data=8,fsdp=8",
    "data=8,tensor=8",
    "fsdp=8,tensor=8",
    "fsdp=16,tensor=4",
    "fsdp=32,tensor=2",
    "pipe=8,data=8",
    "pipe=8,fsdp=8",
    "pipe=2,fsdp=32",
    "pipe=4,fsdp=16",
    "pipe=2,fsdp=8,tensor=4",
    "pipe=4,data=4,tensor=4",
    "pipe=8,tensor=8",
)
PLANS = tuple([plan_on(mesh) for mesh in MESHES])


def query(plan: Plan, conditions: Conditions | None = None, regime: int = 0) -> Query:
    """The predictor's query for a plan."""
    conditions = conditions or Conditions()
    return Query(
        plan=plan.digest,
        setting=str(conditions.as_json()),
        regime=regime,
        terms_s=times(plan, conditions.applied(PRICING)),
    )


def ranked(pricing: Pricing, plans: Iterable[Plan]) -> Ranking:
    """The best of these plans by the cost model, as if a search knew no others."""
    fitting = [
        plan
        for plan in plans
        if plan.num_devices == pricing.cluster.num_devices
        and is_legal(plan, pricing.config)
        and fits(pricing.memory(plan), pricing.cluster)
    ]
    found = [
        Candidate(plan=plan, prediction=pricing.predicted(plan), memory=pricing.memory(plan))
        for plan in fitting
    ]
    return Ranking(
        best=tuple(sorted(found, key=lambda each: each.prediction.step_time_s)[:8]),
        rejections=(),
        num_priced=len(found),
    )


class Truth:
    """The true step times.

    Args:
      seed: draws by how much everything is off.
      rates, links: share that devices and links are faster or slower than they are called.
      terms, plans: standard deviation of the logarithm that each term, and each plan, is off by
        besides.
    """

    def __init__(
        self,
        seed: int,
        *,
        rates: float = 0.15,
        links: float = 0.3,
        terms: float = 0.1,
        plans: float = 0.02,
    ):
        random = np.random.default_rng(seed)

        def off(share: float) -> float:
            return float(1 + share * random.choice((-1, 1)))

        self._plans, self._seed = plans, seed
        self._links = (off(links), off(links))
        self._rates = (off(rates), off(rates))
        self._terms: dict[str, float] = {}
        for name in sorted({name for plan in PLANS for name in query(plan).terms_s}):
            self._terms[name] = math.exp(terms * random.standard_normal())

    def log_time(
        self,
        plan: Plan,
        conditions: Conditions | None = None,
        without: frozenset[int] = frozenset(),
    ) -> float:
        """Logarithm of the typical step time in seconds on devices other than these."""
        cluster, rates = CLUSTER, PRICING.rates
        assert cluster.inter_host is not None
        assert cluster.inter_host.bytes_per_s is not None
        assert cluster.intra_host.bytes_per_s is not None
        faster = replace(
            cluster,
            intra_host=replace(
                cluster.intra_host, bytes_per_s=cluster.intra_host.bytes_per_s * self._links[0]
            ),
            inter_host=replace(
                cluster.inter_host, bytes_per_s=cluster.inter_host.bytes_per_s * self._links[1]
            ),
        )
        rates = replace(
            rates,
            matmul_flops_per_s=rates.matmul_flops_per_s * self._rates[0],
            memory_bytes_per_s=rates.memory_bytes_per_s * self._rates[1],
        )
        prices = Prices(PRICING)
        seen = prices.seen_by(plan, prices.first_batch, conditions or Conditions(), without)
        found = times(plan, seen.applied(replace(PRICING, cluster=faster, rates=rates)))
        own = np.random.default_rng([self._seed, int(plan.digest[:8], 16)]).standard_normal()
        return math.log(
            sum(time_s * self._terms.get(name, 1.0) for name, time_s in found.items())
        ) + self._plans * float(own)
