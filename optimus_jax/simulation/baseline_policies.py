"""Baseline policies that the advisor is compared with.

*Static* never switches by choice. *Greedy* switches to the plan that the cost model predicts to be
fastest by the newest probes. *Threshold* is the rule of Optimus-Megatron. *Cost model* weighs gains
against costs but learns nothing from step times. *Checkpoint-restart* decides like the advisor, but
every switch is a checkpoint and a restart. The oracle is in simulation/oracle.py.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.control import signals
from optimus_jax.control.deciding.candidates import switch_method_of
from optimus_jax.control.deciding.conditions import Conditions, claims
from optimus_jax.control.deciding.factors import on_grid
from optimus_jax.control.deciding.switch_costs import CostModel
from optimus_jax.control.policy import Decision
from optimus_jax.control.runtime import Policy
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_state import PendingSwitch
from optimus_jax.errors import PlanError
from optimus_jax.plan import Plan
from optimus_jax.planning.search.assemble import memory_fallbacks, plan_for
from optimus_jax.planning.search.search import Candidate, Pricing, fits
from optimus_jax.simulation.candidate_plans import PooledSearch
from optimus_jax.simulation.setup import Setup

MIN_GAIN, GAIN_OVER_COST = 0.05, 2.0
"""Least share of a step that a switch has to save, and least ratio of its saving to its cost, of a
policy that believes the cost model."""
SLOW_SHARE, FULL_SHARE, IDLE_SHARE = 0.9, 0.9, 0.6
"""Thresholds of Optimus-Megatron, as shares: throughput over its average, memory, utilisation."""


class Static(Policy):
    """Keeps its plan, and returns to it when lost devices are available again.

    Args:
      plan: the plan to keep.
      num_devices: number of devices of the cluster.
    """

    def __init__(self, plan: Plan, num_devices: int):
        self._plan, self._num_devices = plan, num_devices
        self._now = plan

    def decide(self, observation: Observation) -> Decision | None:
        """Return to the plan if enough devices are available."""
        if (
            self._now == self._plan
            or self._num_devices - len(observation.lost_devices) < self._plan.num_devices
        ):
            return None
        return Decision(
            step=observation.step,
            action="switch",
            plan=self._plan,
            why="the devices are available again",
        )

    def switched(
        self, plan: Plan, costs_s: Mapping[str, float], made: PendingSwitch | None = None
    ) -> None:
        """The run is under `plan`, after a fault or a return."""
        self._now = plan

    def failed(self, plan: Plan, why: str, *, trial_s: Sequence[float] | None = None) -> None:
        """Keep the present plan from now on."""
        self._plan = self._now


class _ByCostModel(Policy):
    """Common part of `Greedy` and `CostModelOnly`: prices plans by the newest probes."""

    def __init__(self, setup: Setup, searcher: PooledSearch):
        self._setup, self._searcher, self._plan = setup, searcher, setup.start
        self._refused: set[Plan] = set()
        self._ranked: dict[
            tuple[int, Conditions, frozenset[int]], tuple[Pricing, Sequence[Candidate]]
        ] = {}

    def switched(
        self, plan: Plan, costs_s: Mapping[str, float], made: PendingSwitch | None = None
    ) -> None:
        """The run is under `plan`."""
        self._plan = plan

    def failed(self, plan: Plan, why: str, *, trial_s: Sequence[float] | None = None) -> None:
        """Never choose the plan again."""
        self._refused.add(plan)

    def _best(self, observation: Observation) -> tuple[Pricing, Candidate | None]:
        """The pricing by the newest readings, and the fastest plan by it; None: no plan is left."""
        phase = self._setup.phase_at(observation.step)
        assumed = self._setup.assumed[phase]
        found = {
            name: on_grid(reading.value)
            for name, reading in claims(observation, assumed.cluster, self._plan.axes).items()
            if reading.value
        }
        key = (phase, Conditions().with_factors(found), observation.lost_devices)
        if key not in self._ranked:
            pricing = key[1].applied(_without(assumed, observation.lost_devices))
            self._ranked[key] = (pricing, self._searcher(pricing).best)
        pricing, ranked = self._ranked[key]
        return pricing, next((each for each in ranked if each.plan not in self._refused), None)

    def _step_time_s(self, pricing: Pricing) -> float | None:
        """Predicted step time of the present plan; None: the run cannot continue under it."""
        try:
            self._plan.validate(pricing.config.model, global_batch=pricing.config.data.global_batch)
            return pricing.step_time_s(self._plan)
        except PlanError:
            return None


class Greedy(_ByCostModel):
    """Always switches to the plan that the cost model predicts to be fastest, at any cost."""

    def decide(self, observation: Observation) -> Decision | None:
        """Switch to the fastest plan."""
        pricing, best = self._best(observation)
        present_s = self._step_time_s(pricing)
        if (
            best is None
            or best.plan == self._plan
            or (present_s is not None and best.prediction.step_time_s >= present_s)
        ):
            return None
        return Decision(
            step=observation.step,
            action="switch",
            plan=best.plan,
            why="it is predicted to be faster",
            without=observation.lost_devices,
        )


class CostModelOnly(_ByCostModel):
    """Switches if the gain that the cost model predicts pays for the expected switch cost."""

    def __init__(self, setup: Setup, searcher: PooledSearch, settings: ControlConfig):
        super().__init__(setup, searcher)
        self._settings, self._costs, self._last_step = (
            settings,
            CostModel(),
            -settings.cooldown_steps,
        )

    def decide(self, observation: Observation) -> Decision | None:
        """Switch to the fastest plan if the gain pays for the cost."""
        pricing, best = self._best(observation)
        present_s = self._step_time_s(pricing)
        if best is None or best.plan == self._plan:
            return None
        if present_s is not None and not self._pays(best, present_s, pricing, observation):
            return None
        self._last_step = observation.step
        return Decision(
            step=observation.step,
            action="switch",
            plan=best.plan,
            why="it is predicted to be worth the switch",
            without=observation.lost_devices,
        )

    def _pays(
        self, best: Candidate, present_s: float, pricing: Pricing, observation: Observation
    ) -> bool:
        switch_method = switch_method_of(
            self._plan, best.plan, same_devices=best.plan.num_devices == self._plan.num_devices
        )
        cost_s = self._costs.expected_s(
            switch_method, self._plan, best.plan, pricing, compiled=False
        )
        gain_s = (present_s - best.prediction.step_time_s) * (
            self._setup.num_steps - observation.step
        )
        return (
            best.prediction.step_time_s <= (1 - MIN_GAIN) * present_s
            and gain_s >= GAIN_OVER_COST * cost_s
            and observation.step - self._last_step >= self._settings.cooldown_steps
        )


class Threshold(Policy):
    """Optimus-Megatron's rule. When throughput has fallen, it doubles the tensor axis if memory is
    short, and halves it if devices idle.
    """

    def __init__(self, setup: Setup):
        self._setup, self._plan = setup, setup.start
        self._throughputs: deque[float] = deque(maxlen=500)

    def decide(self, observation: Observation) -> Decision | None:
        """Apply the three thresholds."""
        readings = {
            name: observation.reading(name).value
            for name in (signals.TOKENS_PER_S, signals.MEMORY_SHARE, signals.UTILISATION)
        }
        throughput, memory, utilisation = readings.values()
        if throughput is None:
            return None
        self._throughputs.append(throughput)
        if throughput >= SLOW_SHARE * statistics.fmean(self._throughputs):
            return None
        axes = self._plan.axes
        if memory is not None and memory > FULL_SHARE:
            return self._with_tensor(observation, 2 * axes.tensor)
        if utilisation is not None and utilisation < IDLE_SHARE and axes.tensor > 1:
            return self._with_tensor(observation, axes.tensor // 2)
        return None

    def switched(
        self, plan: Plan, costs_s: Mapping[str, float], made: PendingSwitch | None = None
    ) -> None:
        """The run is under `plan`; restart the average of throughput."""
        self._plan = plan
        self._throughputs.clear()

    def failed(self, plan: Plan, why: str, *, trial_s: Sequence[float] | None = None) -> None:
        """Restart the average of throughput. The rule does not react to failures otherwise."""
        self._throughputs.clear()

    def _with_tensor(self, observation: Observation, tensor: int) -> Decision | None:
        """Switch to a plan with this tensor axis size; None: there is none that fits."""
        axes, pricing = self._plan.axes, self._setup.assumed[self._setup.phase_at(observation.step)]
        rest, left = divmod(axes.data * axes.fsdp * axes.tensor, tensor)
        data = min(axes.data, rest)
        if left or rest % data:
            return None
        wanted = AxisSizes(pipe=axes.pipe, data=data, fsdp=rest // data, tensor=tensor)
        plan = _fitting(pricing, wanted, self._plan)
        return plan and Decision(
            step=observation.step, action="switch", plan=plan, why=f"thresholds: tensor={tensor}"
        )


def _fitting(pricing: Pricing, axes: AxisSizes, like: Plan) -> Plan | None:
    """A plan that fits, on these axes, with the microbatches of `like`; None: there is none."""
    try:
        config = pricing.config.with_values(
            {"parallel.mesh": str(axes), "parallel.microbatches": like.microbatches}
        )
        plan = plan_for(config, axes, pricing.cluster.topology())
        plan.validate(
            config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
        )
    except PlanError:
        return None
    return next(
        (
            each
            for each in memory_fallbacks(pricing.config, plan, pricing.cluster.accelerator.platform)
            if fits(pricing.memory(each), pricing.cluster)
        ),
        None,
    )


def _without(pricing: Pricing, lost: frozenset[int]) -> Pricing:
    """The pricing without hosts that lost devices, or without the devices if there is one host."""
    cluster = pricing.cluster
    hosts = {device // cluster.devices_per_host for device in lost}
    if not hosts:
        return pricing
    if cluster.num_hosts == 1:
        return replace(
            pricing,
            cluster=replace(cluster, devices_per_host=max(1, cluster.devices_per_host - len(lost))),
        )
    left = max(1, cluster.num_hosts - len(hosts))
    return replace(pricing, cluster=cluster.with_hosts(left))
