"""The part of each exchange that runs beside compute.

XLA's GPU compiler puts a program's instructions in order before it runs, and lets one exchange run
at a time. An exchange runs beside the compute that this order has between its start and its end.
The shares below are those of plans compiled for H100s, with durations of this time model
(planning/ahead_of_time/timeline.py; docs/decisions/0035 has some of the plans):

* HIDDEN: of the exchanges of a layer, if there is enough compute.
* USABLE: of a layer's compute, that beside which exchanges run at most.
* HIDDEN_OUTSIDE: of what is exchanged for embedding and head, and at the end of a step.

Without that compiler, as on a CPU or in other implementations, the rates' `overlap_share` of
exchanges that could run beside compute (`CommunicationOp.hides`) is hidden, and nothing of others.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from optimus_jax.config.axes import DATA, FSDP
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import (
    LAYER_PARTS,
    LAYER_SUMS,
    OUTER,
    STEP,
    CommunicationOp,
)
from optimus_jax.planning.cost.communication_time import CommunicationTimes
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.rates import Rates

_, BACKWARD = LAYER_PARTS
FSDP_ALONE = (FSDP,)
MATRICES, VALUES = "matrices", "values"
"""What a layer's exchanges move: its matrices and their gradients, over fsdp; or what flows through
it, over tensor."""

Shares = Mapping[str, tuple[float, float]]
"""Hidden shares by kind of exchange, in a layer's forward and backward."""
HIDDEN: Mapping[tuple[str, str], Shares] = {
    ("none", MATRICES): {"all-gather": (0.95, 0.95), "reduce-scatter": (0.0, 0.86)},
    ("layers", MATRICES): {"all-gather": (0.98, 0.98), "reduce-scatter": (0.0, 0.97)},
    ("halves", MATRICES): {"all-gather": (0.98, 0.98), "reduce-scatter": (0.0, 0.97)},
    ("none", VALUES): {
        "all-reduce": (0.46, 0.9),
        "all-gather": (0.2, 0.68),
        "reduce-scatter": (0.45, 0.55),
    },
    ("layers", VALUES): {
        "all-reduce": (0.37, 0.56),
        "all-gather": (0.12, 0.55),
        "reduce-scatter": (0.4, 0.2),
    },
    ("halves", VALUES): {
        "all-reduce": (0.9, 0.97),
        "all-gather": (0.7, 0.9),
        "reduce-scatter": (0.55, 0.75),
    },
}
"""By overlap and what moves. Products that give gradients run in backward beside the exchange of
what flows through layers; in forward, only one exchange of two finds anything."""
BETWEEN_HOSTS: Shares = {"all-gather": (0.75, 0.95), "reduce-scatter": (0.0, 0.56)}
"""In the place of HIDDEN["none", MATRICES] where fsdp is on several hosts: of small parts, the
compiler joins scatters to one, and puts gathers next to each other."""
MIXED_BETWEEN_HOSTS: Mapping[tuple[str, str], Shares] = {
    ("none", MATRICES): {"all-gather": (0.15, 0.7), "reduce-scatter": (0.0, 0.1)},
    ("layers", MATRICES): {"all-gather": (0.1, 0.8), "reduce-scatter": (0.0, 0.02)},
    ("halves", MATRICES): {"all-gather": (0.15, 0.65), "reduce-scatter": (0.0, 0.2)},
    ("none", VALUES): {
        "all-reduce": (0.1, 0.4),
        "all-gather": (0.1, 0.4),
        "reduce-scatter": (0.1, 0.5),
    },
    ("layers", VALUES): {
        "all-reduce": (0.05, 0.2),
        "all-gather": (0.05, 0.2),
        "reduce-scatter": (0.05, 0.2),
    },
    ("halves", VALUES): {
        "all-reduce": (0.25, 0.5),
        "all-gather": (0.25, 0.5),
        "reduce-scatter": (0.2, 0.2),
    },
}
"""In the place of HIDDEN where fsdp is on several hosts and a layer has exchanges over tensor too:
those in a host wait for those between hosts, and the compute of the layer for them."""
BESIDE_BACKWARD = 0.95
"""Hidden share of sums over replicas that run layer by layer."""
SUMS_BETWEEN_HOSTS = 0.55
"""The same between hosts, if layers have exchanges over fsdp too."""
BEHIND_SUMS = 0.2
"""Hidden share of backward's gathers then: they wait for sums between hosts, and the next layer for
them."""
USABLE = 0.9
"""Share of a layer's compute beside which its exchanges run at most."""
HIDDEN_OUTSIDE: Mapping[tuple[str, str], float] = {
    (OUTER, "all-gather"): 0.8,
    (OUTER, "reduce-scatter"): 0.35,
    (STEP, "all-gather"): 0.42,
    (STEP, "reduce-scatter"): 0.25,
    (STEP, "all-reduce"): 0.05,
}
"""Hidden shares of exchanges outside layers: of the matrices of embedding and head and their
gradients; and at the end of a step."""


class OverlapTimes:
    """What runs beside compute on one mesh."""

    def __init__(
        self,
        communication: CommunicationTimes,
        rates: Rates,
        implementation: ImplementationProfile,
        platform: str,
    ):
        self._time_of, self._share = communication.time, rates.overlap_share
        self._by_xla = implementation.scheduled_by_xla and platform == "gpu"
        self._communication = communication

    @cached_property
    def _between_hosts(self) -> bool:
        _, hosts = self._communication.span(FSDP_ALONE)
        return hosts > 1

    @cached_property
    def _sums_between_hosts(self) -> bool:
        """Whether replicas are on several hosts, and devices along fsdp share a replica."""
        size, _ = self._communication.span(FSDP_ALONE)
        _, hosts = self._communication.span((DATA,))
        return size > 1 and hosts > 1

    def behind_sums(self, plan: Plan) -> bool:
        """Whether a layer's exchanges over fsdp share the network with sums between hosts."""
        return plan.sums_by_layer and self._sums_between_hosts

    def usable_s(self, compute_s: float) -> float:
        """Seconds of a layer's compute beside which its exchanges can run."""
        return USABLE * compute_s if self._by_xla else compute_s

    def times(
        self, ops: Sequence[CommunicationOp], plan: Plan, usable_s: float = math.inf
    ) -> tuple[list[float], list[float]]:
        """Seconds of the exchanges of a part of the step, and of these, those beside compute.

        Args:
          usable_s: the compute beside which they can run, together.
        """
        axes = {op.axes for op in ops}
        is_mixed = len(axes) > 1 and FSDP_ALONE in axes
        times = [self._time_of(op) * op.count for op in ops]
        beside = [
            time_s * self._hidden_share(op, plan, is_mixed)
            for op, time_s in zip(ops, times, strict=True)
        ]
        wanted_s = sum(beside)
        if wanted_s > usable_s:
            beside = [usable_s / wanted_s * beside_s for beside_s in beside]
        return times, beside

    def _hidden_share(self, op: CommunicationOp, plan: Plan, is_mixed: bool) -> float:
        """The share of an exchange's time that runs beside compute, if there is enough.

        Args:
          is_mixed: whether that part of the step has exchanges over fsdp and others.
        """
        part, overlap = op.part, plan.overlap
        if not self._by_xla or part == "tick":
            return self._share if op.hides else 0.0
        if part == LAYER_SUMS:
            return SUMS_BETWEEN_HOSTS if self.behind_sums(plan) else BESIDE_BACKWARD
        kind = "reduce-scatter" if op.kind == "all-to-all" else op.kind
        if part not in LAYER_PARTS:
            return HIDDEN_OUTSIDE.get((part, kind), 0.0)
        moves = MATRICES if op.axes == FSDP_ALONE else VALUES
        is_gather = moves == MATRICES and kind == "all-gather"
        if is_gather and part == BACKWARD and self.behind_sums(plan):
            return BEHIND_SUMS
        if self._between_hosts and is_mixed:
            shares = MIXED_BETWEEN_HOSTS[overlap, moves][kind]
        elif self._between_hosts and moves == MATRICES and overlap == "none":
            shares = BETWEEN_HOSTS[kind]
        else:
            shares = HIDDEN[overlap, moves][kind]
        return shares[part == BACKWARD]
