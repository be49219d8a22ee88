"""Expected costs of switches: how long a switch delays the run.

A delay is the sum of fixed parts, which depend on the switch method, and a part that depends on the
size of the state to move. Measured switches correct these expectations by a factor for each method,
and one for all methods with which processes restart or do not: what a restart takes says nothing
of a move in memory, nor the other way round. What compiling takes from the steps beside it has a
factor of its own: a switch to a plan that is compiled is not paid for it.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimus_jax.config.axes import FSDP, PIPE, TENSOR
from optimus_jax.control import constants
from optimus_jax.control.learnt_file import finite_numbers
from optimus_jax.control.policy import SWITCH_METHODS, SwitchMethod
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Pricing


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """Expected costs before any switch was made.

    These are guesses, which the first measured switches correct.
    """

    prepare_s: float = 30.0
    """Time from the decision until a switch that has to be compiled can be made. Steps continue
    meanwhile."""
    compile_tax_s: float = 3.0
    """Time that compiling in the background costs the steps that run meanwhile."""
    stop_s: float = 1.0
    """Time to stop all processes at a step boundary, and to resume."""
    verify_s: float = 1.0
    """Time to verify checksums."""
    first_steps_s: float = 2.0
    """Extra time of an executable's first steps. It is no part of the delay that a switch reports,
    which ends before them."""
    restart_s: float = 90.0
    """Time for processes to end, start again, restore and compile."""
    subset_restarts: bool = True
    """Whether processes have to restart to use another set of devices. A single process moves the
    state in memory."""
    failure: float = 0.05
    """Probability that a switch is rolled back, which costs its time again for nothing."""


class CostModel:
    """Expected delays of switches, corrected by measured ones.

    Args:
      costs: the expectations to begin with; None: the defaults.
    """

    def __init__(self, costs: SwitchCosts | None = None) -> None:
        self._costs = costs or SwitchCosts()
        self._seen: dict[SwitchMethod, list[float]] = {}
        """Logarithms of measured over expected delay, by switch method."""
        self._taxed: list[float] = []
        """Logarithms of measured over expected time that compiling took from steps."""
        self._prepared_s: list[float] = []

    def expected_s(
        self,
        switch_method: SwitchMethod,
        old: Plan,
        plan: Plan,
        pricing: Pricing,
        *,
        compiled: bool,
    ) -> float:
        """Expected delay by a switch, including the risk of a rollback.

        Args:
          switch_method: the method of the switch.
          old: the plan to switch from.
          plan: the plan to switch to.
          pricing: pricing on the devices that `plan` uses.
          compiled: whether the executable of `plan` is still kept.
        """
        delay_s = self._prior_s(switch_method, old, plan, pricing) * self._factor(switch_method)
        if not (compiled or self._restarts(switch_method)):
            factor = math.exp(_drawn(self._taxed, 0.0, constants.PRIOR_COST_WEIGHT))
            delay_s += self._costs.compile_tax_s * factor
        return (delay_s + self._costs.first_steps_s) * (1 + self._costs.failure)

    def prepare_s(self, switch_method: SwitchMethod, *, compiled: bool) -> float:
        """Expected time from a decision until its switch can be made, while steps continue. It is 0
        if processes restart, since they compile then.
        """
        if compiled or self._restarts(switch_method):
            return 0.0
        return statistics.median(self._prepared_s) if self._prepared_s else self._costs.prepare_s

    def prepared(self, time_s: float) -> None:
        """Record the time until a switch that had to be compiled was ready."""
        if 0 <= time_s < math.inf:
            self._prepared_s.append(time_s)

    def learn(
        self,
        switch_method: SwitchMethod,
        old: Plan,
        plan: Plan,
        pricing: Pricing,
        *,
        delay_s: float,
        compile_tax_s: float | None = None,
    ) -> None:
        """Learn from a measured switch. Impossible times are ignored.

        Args:
          switch_method, old, plan, pricing: as in `expected_s`.
          delay_s: measured delay, without the extra time of the first steps.
          compile_tax_s: what compiling took from the steps beside it; None: nothing was compiled.
            A restart compiles beside none, and says nothing of it.
        """
        if 0 <= delay_s < math.inf:
            prior_s = self._prior_s(switch_method, old, plan, pricing)
            self._seen.setdefault(switch_method, []).append(_log_ratio(delay_s, prior_s))
        if compile_tax_s is None or self._restarts(switch_method):
            return
        prior_s = self._costs.compile_tax_s
        if prior_s > 0 and 0 <= compile_tax_s < math.inf:
            self._taxed.append(_log_ratio(compile_tax_s, prior_s))

    def learnt(self) -> dict[str, object]:
        """What the newest switches have cost, as JSON: logarithms of measured over expected delay
        by switch method, and of what compiling took from steps, and seconds of preparing.
        """
        seen = {
            method: offs[-constants.MAX_RECALLED_SWITCHES :] for method, offs in self._seen.items()
        }
        return {
            "delay_log_ratios": seen,
            "compile_tax_log_ratios": self._taxed[-constants.MAX_RECALLED_SWITCHES :],
            "prepare_s": self._prepared_s[-constants.MAX_RECALLED_SWITCHES :],
        }

    def recall(self, value: Mapping[str, Any]) -> None:
        """Take over what `learnt` has returned in an earlier run.

        Raises ValueError, TypeError, KeyError or AttributeError if it is damaged.
        """
        if "log_ratios" in value:
            return  # of a version that did not measure compiling apart
        found = value["delay_log_ratios"]
        seen: dict[SwitchMethod, list[float]] = {
            method: finite_numbers(found[method])[-constants.MAX_RECALLED_SWITCHES :]
            for method in SWITCH_METHODS
            if method in found
        }
        taxed = finite_numbers(value["compile_tax_log_ratios"])
        prepared_s = [each for each in finite_numbers(value["prepare_s"]) if each >= 0]
        self._seen, self._taxed = seen, taxed[-constants.MAX_RECALLED_SWITCHES :]
        self._prepared_s = prepared_s[-constants.MAX_RECALLED_SWITCHES :]

    def _restarts(self, switch_method: SwitchMethod) -> bool:
        return switch_method == "restart" or (
            switch_method == "subset" and self._costs.subset_restarts
        )

    def _prior_s(
        self, switch_method: SwitchMethod, old: Plan, plan: Plan, pricing: Pricing
    ) -> float:
        """Expected delay before any switch was measured, without first steps. That of a restart
        includes compiling, which others do beside steps.
        """
        costs = self._costs
        if switch_method == "executable":
            return costs.stop_s
        fixed_s, state_bytes = costs.stop_s + costs.verify_s, pricing.memory(plan).states
        if switch_method == "rebalance":
            share = constants.REBALANCED_STATE_SHARE
            return fixed_s + share * _move_s(state_bytes, old, pricing)
        if not self._restarts(switch_method):
            return fixed_s + _move_s(state_bytes, old, pricing)
        disk_s = 2 * _host_bytes(plan, pricing) / constants.CHECKPOINT_BYTES_PER_S
        return fixed_s + costs.compile_tax_s + costs.restart_s + disk_s

    def _factor(self, switch_method: SwitchMethod) -> float:
        """Measured over expected cost of the method, shrunk towards that of all methods of its
        kind, which is itself shrunk towards 1.
        """
        kin = [
            off
            for method, offs in self._seen.items()
            for off in offs
            if self._restarts(method) == self._restarts(switch_method)
        ]
        return math.exp(
            _drawn(
                self._seen.get(switch_method, []),
                _drawn(kin, 0.0, constants.PRIOR_COST_WEIGHT),
                constants.ALL_METHODS_WEIGHT,
            )
        )


def _log_ratio(measured_s: float, prior_s: float) -> float:
    return math.log(max(measured_s, constants.LEAST_COST_S) / max(prior_s, constants.LEAST_COST_S))


def _drawn(offs: list[float], towards: float, weight: float) -> float:
    """Mean of the values, drawn towards another one that counts as so many of them."""
    return (sum(offs) + weight * towards) / (len(offs) + weight)


def _host_bytes(plan: Plan, pricing: Pricing) -> float:
    """Bytes that a host writes to a checkpoint, and reads from it: the state on its devices, each
    copy counted once.
    """
    size, memory, axes = pricing.cluster.devices_per_host, pricing.memory(plan), plan.axes
    # devices of a host with the same part of each layer: tensor is innermost in a mesh
    beyond_tensor = max(1, size // axes.tensor)

    copies = (
        min(max(1, beyond_tensor // axes.fsdp), axes.data)
        if plan.zero
        else min(beyond_tensor, axes.fsdp * axes.data)
    )
    return size * (memory.params + memory.moments) / copies


def from_other_hosts(old: Plan, cluster: Cluster) -> float:
    """Share of the bytes a device receives in a move that are not on its host under `old`: 0 if
    each host holds a whole copy of the state.
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
        num_bytes / (constants.MOVE_LINK_SHARE * link.bytes_per_s)
        if link.bytes_per_s
        else num_bytes / constants.DEFAULT_MOVE_BYTES_PER_S
        for num_bytes, link in (
            (far_bytes, inter_host),
            (state_bytes - far_bytes, cluster.intra_host),
        )
    )
    return sum(seconds)
