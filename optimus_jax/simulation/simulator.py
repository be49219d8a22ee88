"""Simulates a run: a policy, the protocol of a switch, and a simulated cluster.

Time advances by whole steps. Nothing is modelled within a step, so many steps under one plan and
constant conditions are one sum. A switch has the phases of a real one. Its programs are compiled in
the background, while steps continue a little slower. At a step boundary the state is moved and
verified. The first steps under the new plan (the canary) decide whether it stays. Every phase can
fail. A run that cannot continue restarts from its last checkpoint.
"""

import bisect
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from optimus_jax.control.advisor import MAX_WAIT_STEPS
from optimus_jax.control.canary import is_clearly_slower, judge
from optimus_jax.control.policy import Decision
from optimus_jax.errors import PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.simulation.events import LostEvent, MetricsEvent, SwitchEvent, SwitchPhase
from optimus_jax.simulation.outcome import Outcome, OutcomeKind, Policy, RunEvent, SimulationOptions
from optimus_jax.simulation.setup import Truth
from optimus_jax.simulation.telemetry import Now, Telemetry
from optimus_jax.simulation.timeline import NORMAL, ClusterConditions
from optimus_jax.simulation.true_switch_costs import TrueSwitchCosts
from optimus_jax.simulation.world import PlacedPlan

REMEMBERED = 20
"""Number of earlier steps that the canary is compared with."""
STUCK = 200
"""Number of restarts after which the simulation fails."""


@dataclass
class _Pending:
    """A switch that is being prepared."""

    plan: Plan
    decision: Decision
    decided_s: float
    ready_s: float
    tax_s: float
    """Time that compiling costs the steps meanwhile."""
    ready_step: int | None = None
    """First step boundary after the switch was ready; None: it is not ready yet."""


@dataclass
class _Canary:
    """A new plan on trial."""

    before: PlacedPlan
    before_s: tuple[float, ...]
    """Times of the steps before the switch."""
    until_step: int
    back_s: float
    """Expected time of going back."""
    fails: bool
    times_s: list[float] = field(default_factory=list)


class Simulation:
    """One simulated run. `run` may be called once.

    Args:
      truth: the true cluster and its events.
      policy: decides about switches.
      options: when the run asks the policy, and what probes and switches do.
      start: first plan; None: the first plan of the setup.
    """

    def __init__(
        self, truth: Truth, policy: Policy, options: SimulationOptions, start: Plan | None = None
    ):
        self.truth, self.policy, self.options = truth, policy, options
        self.setup, self.world = truth.setup, truth.world
        self.costs, self.telemetry = (
            TrueSwitchCosts(truth.world),
            Telemetry(truth.world, self.setup.assumed[0], self.setup.settings, truth.seed),
        )
        self.step, self.phase, self.time_s, self.probes_s = 0, 0, 0.0, 0.0
        self.began_s: dict[LostEvent, float] = {}
        self.timeline = truth.timeline
        start = start or self.setup.start
        self.place = PlacedPlan(start, self.world.devices_for(start, NORMAL) or ())
        self.run_events: list[RunEvent] = []
        self._pending: _Pending | None = None
        self._canary: _Canary | None = None
        self._compiled: OrderedDict[tuple[Plan, int], None] = OrderedDict(
            {(self.place.plan, 0): None}
        )
        self._failing: list[SwitchPhase] = [
            event.phase
            for event in self.setup.scenario.events
            if isinstance(event, SwitchEvent)
            for _ in range(event.count)
        ]
        self._metrics = [
            event for event in self.setup.scenario.events if isinstance(event, MetricsEvent)
        ]
        self._times_s: list[float] = []
        """Times of the steps since the policy was last asked."""
        self._recent_s: list[float] = []
        self._saved_step = 0
        self._tries_again = False
        """Whether to ask a rarely asked policy after the next step, because its switch failed."""
        self._reported: frozenset[int] = frozenset()
        self._base: tuple[tuple[PlacedPlan, int, int], float] | None = None

    def run(self) -> Outcome:
        """Simulate the run to its end. Raises PlanError if what is left cannot train the model."""
        while self.step < self.setup.num_steps:
            self.phase = self.setup.phase_at(self.step)
            if not self._advance():
                self._recover()
                continue
            if self.step == self.setup.num_steps or math.isinf(
                self._step_time_s(self.timeline.index(self.time_s))
            ):
                continue  # the run ends, or has to restart
            self._judge()
            self._switch_if_ready()
            if self._is_asked():
                self._ask()
        return Outcome(
            total_s=self.time_s,
            run_events=tuple(self.run_events),
            probes_s=self.probes_s,
            plan=self.place.plan,
        )

    @property
    def now(self) -> Now:
        """The present state of the run."""
        faults = tuple(
            [
                event
                for event in self._metrics
                if event.start_s <= self.time_s < event.start_s + (event.for_s or math.inf)
            ]
        )
        return Now(
            step=self.step,
            time_s=self.time_s,
            place=self.place,
            phase=self.setup.phase_at(min(self.step, self.setup.num_steps - 1)),
            conditions=self.timeline.at(self.time_s),
            faults=faults,
        )

    def _advance(self) -> bool:
        """Do steps until something may change. Returns False if no step is possible."""
        index = self.timeline.index(self.time_s)
        base_s, end_s = self._step_time_s(index), self.timeline.end_s(index)
        if math.isinf(base_s):
            return False
        if self._pending is not None and self.time_s < self._pending.ready_s:
            base_s *= self.setup.scenario.switching.compile_slowdown
            end_s = min(end_s, self._pending.ready_s)
        sums, first, limit = self.truth.noise_sums, self.step, self._limit()
        # Do the steps that begin before the end. A step in which conditions change keeps the old
        # speed.
        last = (
            first + 1
            if limit == first + 1
            else min(
                limit, int(np.searchsorted(sums, sums[first] + (end_s - self.time_s) / base_s))
            )
        )
        last = max(first + 1, last)
        self.time_s += base_s * float(sums[last] - sums[first])
        self.step = last
        if self.options.every is not None:
            times_s = (base_s * self.truth.noise[max(first, last - REMEMBERED) : last]).tolist()
            self._times_s += times_s
            self._recent_s = (self._recent_s + times_s)[-REMEMBERED:]
            if self._canary is not None:
                self._canary.times_s += times_s
        return True

    def _limit(self) -> int:
        """The step to stop at: the next question or phase, the end of a trial, or a switch at a
        given step.
        """
        limits = [
            self.setup.num_steps,
            *[step for step in self.setup.first_steps if step > self.step],
        ]
        if self.options.every is not None:
            limits.append(self.step // self.options.every * self.options.every + self.options.every)
        elif self._tries_again:
            return self.step + 1
        elif (place := bisect.bisect_right(self.options.asked_at, self.step)) < len(
            self.options.asked_at
        ):
            limits.append(self.options.asked_at[place])
        if self._canary is not None:
            limits.append(self._canary.until_step)
        if (
            self._pending is not None
            and (at_step := self._pending.decision.at_step) is not None
            and at_step > self.step
        ):
            limits.append(at_step)
        return max(self.step + 1, min(limits))

    def _step_time_s(self, index: int) -> float:
        key = (self.place, index, self.phase)
        if self._base is None or self._base[0][1:] != key[1:] or self._base[0][0] is not self.place:
            self._base = (
                key,
                self.world.step_time_s(self.place, self.timeline.conditions(index), self.phase),
            )
        return self._base[1]

    def _is_asked(self) -> bool:
        reported = self.timeline.at(self.time_s).reported
        if reported != self._reported:
            self._reported = reported
            return True
        return (
            (self._tries_again or self.step in self.options.asked_at)
            if self.options.every is None
            else self.step % self.options.every == 0
        )

    def _ask(self) -> None:
        """Ask the policy for a decision, and begin to carry it out."""
        now = self.now
        if self.options.every is not None:
            self.telemetry.steps(self._times_s, now)
        if self.options.probes:
            probe_s = self.telemetry.probe_s(now, asked=self.policy.wants_probe)
            self.time_s, self.probes_s = self.time_s + probe_s, self.probes_s + probe_s
        times_s, self._times_s, self._tries_again = self._times_s, [], False
        decision = self.policy.decide(self.telemetry.observation(times_s, now))
        if decision is None:
            return
        if decision.action == "stay":
            self._withdraw(decision.why)
        elif decision.plan is not None and (
            self._pending is None or self._pending.plan != decision.plan
        ):
            self._prepare(decision.plan, decision)

    def _withdraw(self, why: str) -> None:
        if self._pending is not None:
            spent_s, plan = self._spent(self._pending), self._pending.plan
            self._pending = None
            self._note("withdrawn", plan, {"prepare": spent_s}, why)
            self.policy.charge(spent_s)

    def _prepare(self, plan: Plan, decision: Decision) -> None:
        """Begin to prepare a switch by compiling in the background. A restart compiles later."""
        self._start_phase_events("prepare")
        phase = (
            self.setup.phase_at(decision.at_step) if decision.at_step is not None else self.phase
        )
        restarts = (
            not self.options.in_memory
            or plan.num_devices != self.place.plan.num_devices
            or bool(decision.without & set(self.place.devices))
        )
        compile_s = 0.0 if restarts or (plan, phase) in self._compiled else self.costs.compile_s
        tax_s = compile_s * (self.setup.scenario.switching.compile_slowdown - 1)
        if self.options.compiles_ahead:
            self.time_s, compile_s = self.time_s + tax_s, 0.0
        self._pending = _Pending(
            plan=plan,
            decision=decision,
            decided_s=self.time_s,
            ready_s=self.time_s + compile_s,
            tax_s=tax_s,
        )
        self._switch_if_ready()

    def _spent(self, pending: _Pending) -> float:
        whole_s = pending.ready_s - pending.decided_s
        return (
            pending.tax_s * min(1.0, (self.time_s - pending.decided_s) / whole_s)
            if whole_s > 0
            else pending.tax_s
        )

    def _switch_if_ready(self) -> None:
        pending = self._pending
        if pending is None or self._canary is not None:
            return
        at_step = pending.decision.at_step
        if at_step is not None and self.step < at_step:
            return
        phase = self.setup.phase_at(self.step)
        if self.time_s < pending.ready_s:
            if at_step is None or self.world.is_legal(self.place.plan, phase):
                return
            self.time_s = pending.ready_s  # the new phase cannot begin under the old plan
        pending.ready_step = self.step if pending.ready_step is None else pending.ready_step
        waits = (
            at_step is None
            and not pending.decision.mandatory
            and self.step - pending.ready_step < MAX_WAIT_STEPS
        )
        if waits and self.policy.is_puzzled:
            return
        self._pending = None
        self._switch(pending, phase)

    def _switch(self, pending: _Pending, phase: int) -> None:
        """Make a prepared switch: check that it is possible, move, verify, commit."""
        plan, conditions = pending.plan, self.timeline.at(self.time_s)
        if (
            not pending.decision.without
            and plan.num_devices == self.place.plan.num_devices
            and conditions.lost.isdisjoint(self.place.devices)
        ):
            devices: tuple[int, ...] | None = self.place.devices
        else:
            devices = self.world.devices_for(plan, conditions, pending.decision.without)
        compiled_s = {"prepare": pending.tax_s}
        if (why := self._refused(plan, devices, conditions, phase)) or devices is None:
            self._fail(pending, compiled_s, why)
            return
        new, changes_phase = (
            PlacedPlan(plan, devices),
            phase != self.phase or self.phase != self.setup.phase_at(max(0, self.step - 1)),
        )
        costs_s = self._costs_s(new, conditions, phase)
        fails = self._failing.pop(0) if self._failing else None
        if fails in ("prepare", "move", "verify"):
            back_s = {
                "prepare": {},
                "move": {"quiesce": costs_s["quiesce"], "move": costs_s.get("move", 0.0)},
                "verify": {**costs_s, "back": costs_s.get("move", 0.0)},
            }[fails]
            self._fail(pending, compiled_s | back_s, f"its {fails} failed")
            return
        for name in ("move", "verify"):
            if self._start_phase_events(name):
                self.time_s += costs_s["quiesce"] + costs_s.get("move", 0.0) * (
                    1.0 if name == "verify" else 0.5
                )
                self._note(
                    "failed",
                    plan,
                    compiled_s | {"quiesce": costs_s["quiesce"]},
                    f"devices were lost in {name}",
                    pending.decided_s,
                )
                return
        before, before_s = self.place, self._last_steps_s()
        self._arrive(new, costs_s, phase)
        self._note("switch", plan, compiled_s | costs_s, pending.decision.why, pending.decided_s)
        first_s = costs_s.pop("first_steps", 0.0)
        self.policy.switched(plan, compiled_s | costs_s)
        self.policy.charge(first_s)
        self._start_phase_events("canary")
        if (
            self.options.canary
            and not changes_phase
            and not pending.decision.mandatory
            and before_s
        ):
            self._canary = _Canary(
                before=before,
                before_s=before_s,
                until_step=self.step + self.setup.settings.canary_steps + 1,
                back_s=sum(costs_s.values()),
                fails=fails == "canary",
            )

    def _last_steps_s(self) -> tuple[float, ...]:
        """Times of the last steps that were in present conditions."""
        alike = self.policy.steps_alike
        return tuple(
            self._recent_s
            if alike is None
            else self._recent_s[len(self._recent_s) - min(alike, len(self._recent_s)) :]
        )

    def _refused(
        self, plan: Plan, devices: tuple[int, ...] | None, conditions: ClusterConditions, phase: int
    ) -> str:
        """Why the plan cannot run, as compiling would show; empty if it can."""
        if devices is None:
            return f"{plan.num_devices} devices are not there"
        if not self.world.is_legal(plan, phase):
            return "it is not legal for this batch"
        return (
            ""
            if self.world.fits(plan, conditions, phase)
            else "compiled, it needs more memory than there is"
        )

    def _costs_s(
        self, new: PlacedPlan, conditions: ClusterConditions, phase: int
    ) -> dict[str, float]:
        if self.options.in_memory:
            return self.costs.switch_s(self.place, new, conditions, phase)
        return {
            "quiesce": self.setup.scenario.switching.quiesce_s,
            **self.costs.restart_s(new.plan, phase, saves=True),
        }

    def _arrive(self, new: PlacedPlan, costs_s: Mapping[str, float], phase: int) -> None:
        """Switch the run to another plan and add the costs to its time."""
        if set(new.devices) != set(self.place.devices) or not self.options.in_memory:
            self._compiled.clear()  # new processes have no executables
            self._saved_step = self.step
        self.time_s += sum(costs_s.values())
        self.place = new
        self._compiled[new.plan, phase] = None
        self._compiled.move_to_end((new.plan, phase))
        while len(self._compiled) > self.setup.settings.executables:
            self._compiled.popitem(last=False)
        self._times_s, self._recent_s = [], []
        self.telemetry.forget()
        if (
            self.options.probes
            and self.setup.settings.probe_share
            and self.step < self.setup.num_steps
        ):
            probes_s = self.telemetry.settle_s(self.now)
            self.time_s, self.probes_s = self.time_s + probes_s, self.probes_s + probes_s

    def _fail(self, pending: _Pending, costs_s: Mapping[str, float], why: str) -> None:
        self.time_s += sum(costs_s.values()) - costs_s.get("prepare", 0.0)
        self._note("failed", pending.plan, costs_s, why, pending.decided_s)
        self._tries_again = True
        self.policy.failed(pending.plan, why)
        self.policy.charge(sum(costs_s.values()))

    def _judge(self) -> None:
        """End the trial of a new plan if it is over, and roll back if the plan failed it."""
        canary = self._canary
        if canary is None or (
            self.step < canary.until_step and not is_clearly_slower(canary.times_s, canary.before_s)
        ):
            return
        verdict = judge(
            canary.times_s,
            losses=[math.nan] if canary.fails else [],
            before_s=canary.before_s,
            predicted_s=math.nan,
            steps_left=self.setup.num_steps - self.step,
            back_s=canary.back_s,
        )
        if verdict.keep and self.step < canary.until_step:
            return
        self._canary = None
        if verdict.keep:
            return
        taken_back, conditions, phase = (
            self.place.plan,
            self.timeline.at(self.time_s),
            self.setup.phase_at(min(self.step, self.setup.num_steps - 1)),
        )
        if self.world.step_time_s(canary.before, conditions, phase) == math.inf:
            return  # there is no way back
        self._withdraw("the run goes back")
        costs_s = self._costs_s(canary.before, conditions, phase)
        self._arrive(canary.before, costs_s, phase)
        self._note("rollback", self.place.plan, costs_s, verdict.why)
        self.policy.failed(taken_back, verdict.why, is_back=True)
        self.policy.charge(sum(costs_s.values()))

    def _recover(self) -> None:
        """Restart a run that cannot continue, on the remaining devices."""
        if self.count_restarts() > STUCK:
            raise PlanError(
                explain(
                    "the simulated run restarts again and again",
                    given=self.setup.scenario.name,
                    do="change its scenario",
                )
            )
        conditions, switching = self.timeline.at(self.time_s), self.setup.scenario.switching
        is_lost, is_legal = (
            not conditions.lost.isdisjoint(self.place.devices),
            self.world.is_legal(self.place.plan, self.phase),
        )
        why = (
            "devices were lost"
            if is_lost
            else "memory ran out"
            if is_legal
            else "the new phase's batch does not divide"
        )
        self._pending = self._canary = None
        # If memory ran out, do not reopen the question: a plan chosen while less memory was taken
        # would not last.
        if is_lost:
            self.policy.dropped()
        self.time_s += switching.detect_s if is_lost else 0.0
        conditions = self.timeline.at(self.time_s)
        place = self._restart_plan(conditions) or self.truth.fallback(conditions, self.phase)
        if is_lost or is_legal:
            every = self.setup.checkpoint_steps
            # A phase begins with a checkpoint, so that no step of the phase before is repeated
            # under a plan that was made for this one.
            self.step = max(
                self._saved_step, self.step // every * every, self.setup.first_steps[self.phase]
            )
        if place is None:
            index = self.timeline.index(self.time_s)
            if math.isinf(self.timeline.end_s(index)):
                raise PlanError(
                    explain(
                        "nothing can train the model on what is left",
                        given=self.setup.scenario.name,
                        do="leave more devices or memory to it",
                    )
                )
            self.time_s = self.timeline.end_s(index)
            return
        costs_s = self.costs.restart_s(place.plan, self.phase, saves=False)
        self._arrive(place, costs_s, self.phase)
        self._compiled = OrderedDict({(place.plan, self.phase): None})
        self._note("restart", place.plan, costs_s, why)
        self.policy.switched(place.plan, costs_s)

    def count_restarts(self) -> int:
        """Number of restarts after faults so far."""
        return sum(run_event.kind == "restart" for run_event in self.run_events)

    def _restart_plan(self, conditions: ClusterConditions) -> PlacedPlan | None:
        """The plan that the policy wants to restart with; None: it names none, or it cannot run."""
        self._reported, self._times_s = conditions.reported, []
        decision = self.policy.decide(self.telemetry.observation([], self.now))
        if decision is None or decision.plan is None:
            return None
        devices = self.world.devices_for(decision.plan, conditions, decision.without)
        if (
            why := self._refused(decision.plan, devices, conditions, self.phase)
        ) or devices is None:
            self.policy.failed(decision.plan, why)
            return None
        return PlacedPlan(decision.plan, devices)

    def _start_phase_events(self, phase: SwitchPhase) -> bool:
        """Begin the events that occur in this phase of a switch. Returns whether the run loses
        devices.
        """
        waiting = [
            event
            for event in self.setup.scenario.events
            if isinstance(event, LostEvent)
            and event.during == phase
            and event not in self.began_s
            and self.time_s < event.start_s
        ]
        if not waiting:
            return False
        self.began_s |= dict.fromkeys(waiting, self.time_s)
        self.timeline, self._base = self.setup.timeline(self.truth.seed, self.began_s), None
        return not self.timeline.at(self.time_s).lost.isdisjoint(self.place.devices)

    def _note(
        self,
        kind: OutcomeKind,
        plan: Plan,
        delay_s: Mapping[str, float],
        why: str,
        decided_s: float | None = None,
    ) -> None:
        self.run_events.append(
            RunEvent(
                kind=kind,
                step=self.step,
                time_s=self.time_s,
                plan=plan,
                delay_s=dict(delay_s),
                why=why,
                decided_s=decided_s,
            )
        )
