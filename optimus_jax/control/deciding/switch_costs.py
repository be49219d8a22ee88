"""What switches cost: how long a run is delayed by one, before any has been made and after.

A delay is the sum of a part that depends on the state that moves and of fixed parts by switch
method. How far off these expectations are is learnt from the switches that were made, as a factor
for each method and one for all.
"""

import math
import statistics
from dataclasses import dataclass

from optimus_jax.config.axes import FSDP, PIPE, TENSOR
from optimus_jax.control.policy import SwitchMethod
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Pricing

MOVE_SHARE = 0.3
"""Of a link's speed, that moving the state is expected to reach."""
MOVE_BYTES_PER_S = 1e9
"""Where the speed of links is unknown."""
CHECKPOINT_BYTES_PER_S = 1e9
"""Each host's, to and from disk."""
REBALANCED = 0.5
"""Of the state, what moves when stages of the same mesh get other layers: neighbours hand over
some."""
OWN = 0.5
"""Weight of a method's own experience against that of all switches: how many of its own switches
count as much as one of all."""


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """Expectations before any switch was made.

    Guesses, to be replaced by what the first switches take.
    """

    prepare_s: float = 30.0
    """From the decision until a switch can be made, where it has to be compiled; steps go on
    meanwhile."""
    compile_tax_s: float = 3.0
    """What compiling in the background takes from the steps that go on meanwhile."""
    stop_s: float = 1.0
    """Until all processes stand at a step boundary, and to go on."""
    verify_s: float = 1.0
    """Checksums."""
    first_steps_s: float = 2.0
    """What the first steps of an executable take beyond their time. Not a part of the delay that a
    switch reports, which ends before them."""
    restart_s: float = 90.0
    """Processes end and start again, restore and compile."""
    subset_restarts: bool = True
    """Whether processes have to start again for other devices; a single one moves the state to them
    in memory."""
    failure: float = 0.05
    """Probability that a switch is taken back, and costs twice for nothing."""


class CostModel:
    """Expected delays, corrected by those that were measured."""

    def __init__(self, costs: SwitchCosts | None = None) -> None:
        self._costs = costs or SwitchCosts()
        self._seen: dict[SwitchMethod | None, list[float]] = {}
        """Logarithms of measured over expected, by switch method; None: all."""
        self._prepared_s: list[float] = []
        self.spent_s = 0.0
        """On the switches so far that the run had a choice about, and on what came to nothing."""

    def expected_s(
        self,
        switch_method: SwitchMethod,
        old: Plan,
        plan: Plan,
        pricing: Pricing,
        *,
        compiled: bool,
    ) -> float:
        """Delay by a switch, the risk that it fails included.

        Args:
          old: to switch from.
          plan: to switch to.
          pricing: of the devices that it uses.
          compiled: its executable is still there.
        """
        delay_s = self._prior_s(
            switch_method, old, plan, pricing, compiled=compiled
        ) * self._factor(switch_method)
        return (delay_s + self._costs.first_steps_s) * (1 + self._costs.failure)

    def prepare_s(self, switch_method: SwitchMethod, *, compiled: bool) -> float:
        """Expected from a decision until its switch can be made, steps going on meanwhile: nothing
        where processes start again, which compile then.
        """
        if compiled or self._restarts(switch_method):
            return 0.0
        return statistics.median(self._prepared_s) if self._prepared_s else self._costs.prepare_s

    def prepared(self, time_s: float) -> None:
        """One that had to be compiled was ready after this time."""
        if 0 <= time_s < math.inf:
            self._prepared_s.append(time_s)

    def learn(
        self,
        switch_method: SwitchMethod,
        old: Plan,
        plan: Plan,
        pricing: Pricing,
        *,
        compiled: bool,
        delay_s: float,
        counts: bool = True,
    ) -> None:
        """A switch took so long, what compiling took from steps included and its first steps not.

        What makes no sense is left out.

        Args:
          counts: the run had a choice, so that its budget pays for it.
        """
        if not math.isfinite(delay_s) or delay_s < 0:
            return
        self.charge(delay_s if counts else 0.0)
        off = math.log(
            max(delay_s, 1e-3) / self._prior_s(switch_method, old, plan, pricing, compiled=compiled)
        )
        for key in (switch_method, None):
            self._seen.setdefault(key, []).append(off)

    def charge(self, time_s: float) -> None:
        """So much more was spent."""
        self.spent_s += time_s if math.isfinite(time_s) else 0.0

    def _restarts(self, switch_method: SwitchMethod) -> bool:
        return switch_method == "restart" or (
            switch_method == "subset" and self._costs.subset_restarts
        )

    def _prior_s(
        self,
        switch_method: SwitchMethod,
        old: Plan,
        plan: Plan,
        pricing: Pricing,
        *,
        compiled: bool,
    ) -> float:
        costs = self._costs
        fixed_s = costs.stop_s + (0.0 if compiled else costs.compile_tax_s)
        if switch_method == "executable":
            return fixed_s
        state_bytes = pricing.memory(plan).states
        if switch_method == "rebalance":
            return fixed_s + costs.verify_s + REBALANCED * _move_s(state_bytes, old, pricing)
        if not self._restarts(switch_method):
            return fixed_s + costs.verify_s + _move_s(state_bytes, old, pricing)
        host_bytes = _host_bytes(plan, pricing)
        return fixed_s + costs.verify_s + costs.restart_s + 2 * host_bytes / CHECKPOINT_BYTES_PER_S

    def _factor(self, switch_method: SwitchMethod) -> float:
        """Measured over expected cost of this method, shrunk towards that of all methods, which is
        shrunk towards 1: one switch corrects half of the error.
        """

        def drawn(offs: list[float], towards: float, weight: float) -> float:
            return (sum(offs) + weight * towards) / (len(offs) + weight)

        return math.exp(
            drawn(self._seen.get(switch_method, []), drawn(self._seen.get(None, []), 0.0, 1.0), OWN)
        )


def _host_bytes(plan: Plan, pricing: Pricing) -> float:
    """What a host writes to a checkpoint, and reads: what its devices hold, copies of the same
    once.
    """
    size, memory, axes = pricing.cluster.devices_per_host, pricing.memory(plan), plan.axes
    # devices of a host with the same part of each layer, for tensor is innermost in a mesh
    beyond_tensor = max(1, size // axes.tensor)

    def copies(is_split: bool) -> int:
        return (
            min(max(1, beyond_tensor // axes.fsdp), axes.data)
            if is_split
            else min(beyond_tensor, axes.fsdp * axes.data)
        )

    return size * (memory.params / copies(plan.zero >= 3) + memory.moments / copies(plan.zero >= 1))


def from_other_hosts(old: Plan, cluster: Cluster) -> float:
    """Share of what a device gets in a move that is not on its host under `old`: none where each
    host holds a whole copy of the state.
    """
    return 1 - 1 / cluster.hosts_crossed(
        old.axes, (PIPE, TENSOR, FSDP) if old.zero else (PIPE, TENSOR)
    )


def _move_s(state_bytes: int, old: Plan, pricing: Pricing) -> float:
    cluster = pricing.cluster
    inter_host = cluster.inter_host or cluster.intra_host
    far_bytes = (
        state_bytes * from_other_hosts(old, cluster)
        if old.num_devices == cluster.num_devices
        else state_bytes
    )
    seconds = (
        num_bytes / (MOVE_SHARE * link.bytes_per_s)
        if link.bytes_per_s
        else num_bytes / MOVE_BYTES_PER_S
        for num_bytes, link in (
            (far_bytes, inter_host),
            (state_bytes - far_bytes, cluster.intra_host),
        )
    )
    return sum(seconds)
