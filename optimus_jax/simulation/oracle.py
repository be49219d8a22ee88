"""Bounds for policies: the best static plan in hindsight, and a clairvoyant oracle that pays for
its switches.

The oracle knows the truth, all future events and the cost of each switch. Its path is the shortest
one through (step, plan), found by dynamic programming over the earliest time at which a run can
have done so many steps and be under that plan. An earlier arrival is never worse, since a run that
arrives early could have waited. The reported time is not that bound but that of a simulated run
along the path, so it can be achieved.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from optimus_jax.control.policy import Decision
from optimus_jax.control.runtime import Policy
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_state import PendingSwitch
from optimus_jax.plan import Plan
from optimus_jax.simulation.baseline_policies import Static
from optimus_jax.simulation.outcome import Outcome, SimulationOptions
from optimus_jax.simulation.setup import Truth
from optimus_jax.simulation.simulator import Simulation
from optimus_jax.simulation.timeline import NORMAL, ClusterConditions
from optimus_jax.simulation.true_switch_costs import TrueSwitchCosts
from optimus_jax.simulation.world import PlacedPlan

KEPT = 4
"""Number of best plans that the oracle considers in each combination of conditions and phase."""
STATIC = SimulationOptions(every=None, probes=False, canary=False)


class Scripted(Policy):
    """Switches at given steps.

    Args:
      path: plans by the number of steps done when they begin.
    """

    def __init__(self, path: Mapping[int, Plan]):
        self._path, self._furthest = path, 0
        self._plan: Plan | None = None

    def decide(self, observation: Observation) -> Decision | None:
        """Switch to the path's plan for the furthest step so far, even if steps are repeated."""
        self._furthest = max(self._furthest, observation.step)
        due = [step for step in self._path if step <= self._furthest]
        plan = self._path[max(due)] if due else None
        if plan is None or plan == self._plan:
            return None
        return Decision(step=observation.step, action="switch", plan=plan, why="foreseen")

    def switched(
        self, plan: Plan, costs_s: Mapping[str, float], made: PendingSwitch | None = None
    ) -> None:
        """The run is under `plan`."""
        self._plan = plan

    def failed(self, plan: Plan, why: str, *, trial_s: Sequence[float] | None = None) -> None:
        """Do nothing: the switch is tried again at the next step."""


def run_static(truth: Truth, plan: Plan) -> Outcome:
    """Simulate a run that begins with `plan` and keeps it."""
    return Simulation(truth, Static(plan, truth.world.cluster.num_devices), STATIC, plan).run()


def best_static(truth: Truth, plans: Sequence[Plan]) -> tuple[Plan, Outcome]:
    """The plan, and its outcome, with which the run ends first if it never switches by choice.
    Restarts after faults are included.
    """
    legal = [
        plan
        for plan in plans
        if truth.world.devices_for(plan, NORMAL) and truth.world.fits(plan, NORMAL, 0)
    ]
    outcomes = [(plan, run_static(truth, plan)) for plan in legal]
    return min(outcomes, key=lambda each: each[1].total_s)


def run_oracle(truth: Truth, plans: Sequence[Plan], known: Sequence[Outcome] = ()) -> Outcome:
    """Simulate a run along the shortest path. Returns the best of it and the `known` runs."""
    path = shortest_path(truth, plans)
    walked = Simulation(
        truth,
        Scripted(path),
        SimulationOptions(
            every=None,
            asked_at=tuple(sorted(path)),
            probes=False,
            canary=False,
            compiles_ahead=True,
        ),
    ).run()
    return min([walked, *known], key=lambda each: each.total_s)


def shortest_path(truth: Truth, plans: Sequence[Plan]) -> dict[int, Plan]:
    """The switches of the shortest path: plans by the steps done when they begin."""
    return _Shortest(truth, plans).path()


class _Shortest:
    """Dynamic programming over steps and plans."""

    def __init__(self, truth: Truth, plans: Sequence[Plan]):
        self.truth, self.setup, self.world = truth, truth.setup, truth.world
        self.timeline, self.costs = truth.timeline, TrueSwitchCosts(truth.world)
        self._tables: dict[tuple[int, int], tuple[list[float], np.ndarray, np.ndarray]] = {}
        self._known: dict[
            tuple[ClusterConditions, int], tuple[list[float], np.ndarray, np.ndarray]
        ] = {}
        self.plans = self._promising(list(dict.fromkeys([self.setup.start, *plans])))

    def _promising(self, plans: list[Plan]) -> list[Plan]:
        """The first plan, and the best few in each of the conditions that occur."""
        kept = {self.setup.start: None}
        for phase in range(len(self.setup.nominal)):
            for conditions in dict.fromkeys(
                map(self.timeline.conditions, range(len(self.timeline.bounds_s)))
            ):
                times_s = {plan: self._step_time_s(plan, conditions, phase) for plan in plans}
                kept |= dict.fromkeys(
                    [
                        plan
                        for plan in sorted(times_s, key=lambda plan: times_s[plan])[:KEPT]
                        if times_s[plan] < math.inf
                    ]
                )
        return list(kept)

    def path(self) -> dict[int, Plan]:
        """Find the earliest end of each step under each plan, then trace the path back.

        The first step is done under the first plan.
        """
        count, num_steps = len(self.plans), self.setup.num_steps
        ends_s, columns = [0.0] + [math.inf] * (count - 1), np.arange(count)
        came_from = np.tile(np.arange(count), (num_steps, 1))
        for step in range(num_steps):
            phase, noise = self.setup.phase_at(step), self.truth.noise[step]
            if step:
                begins_s = np.array(
                    [
                        self._arrivals_s(source, time_s, step, phase)
                        for source, time_s in enumerate(ends_s)
                    ]
                )
                came_from[step] = begins_s.argmin(axis=0)
                ends_s = begins_s[came_from[step], columns].tolist()
            ends_s = [
                time_s + noise * self._table(self.timeline.index(time_s), phase)[0][place]
                if time_s < math.inf
                else math.inf
                for place, time_s in enumerate(ends_s)
            ]
        return self._walked_back(came_from, int(np.argmin(ends_s)))

    def _walked_back(self, came_from: np.ndarray, last: int) -> dict[int, Plan]:
        path: dict[int, Plan] = {}
        for step in range(self.setup.num_steps - 1, 0, -1):
            source = int(came_from[step, last])
            if source != last:
                path[step] = self.plans[last]
            last = source
        return path

    def _arrivals_s(self, source: int, time_s: float, step: int, phase: int) -> np.ndarray:
        """When a run that has done `step` steps under `source` by `time_s` can continue under each
        plan.
        """
        if time_s == math.inf:
            return np.full(len(self.plans), math.inf)
        index, before = self.timeline.index(time_s), self.setup.phase_at(step - 1)
        times_s, stalls_s, restarts_s = self._table(index, phase)
        if self._table(index, before)[0][source] < math.inf:
            return time_s + stalls_s[source]
        # The run cannot continue: it restarts, and repeats the steps since the last checkpoint.
        lost = self.timeline.conditions(index).lost
        again_s = step % self.setup.checkpoint_steps * np.where(np.isinf(times_s), 0.0, times_s)
        return (
            time_s
            + restarts_s
            + again_s
            + (self.setup.scenario.switching.detect_s if lost else 0.0)
        )

    def _table(self, index: int, phase: int) -> tuple[list[float], np.ndarray, np.ndarray]:
        """Times in an interval and phase: step time of each plan, [plans]; stall by a switch from
        each plan to each, [plans, plans]; stall by a restart with each plan, [plans].
        """
        if (index, phase) not in self._tables:
            conditions = self.timeline.conditions(index)
            if (conditions, phase) not in self._known:
                self._known[conditions, phase] = self._made(conditions, phase)
            self._tables[index, phase] = self._known[conditions, phase]
        return self._tables[index, phase]

    def _made(
        self, conditions: ClusterConditions, phase: int
    ) -> tuple[list[float], np.ndarray, np.ndarray]:
        times_s = [self._step_time_s(plan, conditions, phase) for plan in self.plans]
        places = [self._placed(plan, conditions) for plan in self.plans]
        tax_s = self.costs.compile_s * (self.setup.scenario.switching.compile_slowdown - 1)
        stalls_s = np.array(
            [
                [self._stall_s(source, target, conditions, phase, tax_s) for target in places]
                for source in places
            ]
        )
        restarts_s = np.array(
            [
                sum(self.costs.restart_s(plan, phase, saves=False).values())
                if time_s < math.inf
                else math.inf
                for plan, time_s in zip(self.plans, times_s, strict=True)
            ]
        )
        return times_s, stalls_s, restarts_s

    def _stall_s(
        self,
        source: PlacedPlan | None,
        target: PlacedPlan | None,
        conditions: ClusterConditions,
        phase: int,
        tax_s: float,
    ) -> float:
        if source is None or target is None:
            return 0.0 if source is target else math.inf
        if source.plan == target.plan:
            return 0.0
        return sum(self.costs.switch_s(source, target, conditions, phase).values()) + (
            tax_s if target.plan != self.setup.start else 0.0
        )

    def _step_time_s(self, plan: Plan, conditions: ClusterConditions, phase: int) -> float:
        place = self._placed(plan, conditions)
        return math.inf if place is None else self.world.step_time_s(place, conditions, phase)

    def _placed(self, plan: Plan, conditions: ClusterConditions) -> PlacedPlan | None:
        """The plan on usable devices; None: there are too few. Devices that are only reported bad
        are usable.
        """
        devices = self.world.devices_for(plan, replace(conditions, reported=conditions.lost))
        return None if devices is None else PlacedPlan(plan, devices)
