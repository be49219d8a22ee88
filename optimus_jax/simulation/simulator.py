"""Simulates a run: the runtime of a real one (control/runtime.py) on a simulated cluster.

Time advances by whole steps. Nothing is modelled within a step, so many steps under one plan and
constant conditions are one sum. Here are the parts of a run that the runtime gives commands to:
programs are compiled in the background, while steps go on a little slower; at a step boundary the
state is moved and verified. Every phase can fail. A run that cannot go on restarts from its last
checkpoint.
"""

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from optimus_jax.control.commands import Command
from optimus_jax.control.runtime import Policy, Runtime
from optimus_jax.control.switch_state import Stage, SwitchRules
from optimus_jax.errors import PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.simulation.events import LostEvent, MetricsEvent, SwitchEvent, SwitchPhase
from optimus_jax.simulation.outcome import Outcome, OutcomeKind, RunEvent, SimulationOptions
from optimus_jax.simulation.setup import Truth
from optimus_jax.simulation.telemetry import Now, Telemetry
from optimus_jax.simulation.timeline import NORMAL, ClusterConditions
from optimus_jax.simulation.true_switch_costs import TrueSwitchCosts
from optimus_jax.simulation.world import PlacedPlan

STUCK = 200
"""Number of restarts after which the simulation fails."""


@dataclass(kw_only=True)
class _Preparation:
    """A plan that is being compiled."""

    plan: Plan
    command: Command
    decided_s: float
    ready_s: float
    tax_s: float
    """Time that compiling costs the steps meanwhile."""
    may_go: bool = False
    """Whether the runtime has told the run to move."""


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
        self._commands: deque[Command] = deque()
        self._runtime = Runtime(
            policy,
            SwitchRules(
                settings=self.setup.settings,
                num_steps=self.setup.num_steps,
                phase_ends=tuple([phase.steps_before for phase in self.setup.phases]),
                has_trials=options.canary,
            ),
            send=self._commands.append,
            announce=lambda decision: None,
        )
        self._preparation: _Preparation | None = None
        self._before: PlacedPlan | None = None
        """The plan before the one on trial; None: none is on trial."""
        self._trial_fails = False
        self._first_step_s = 0.0
        """Extra time of the next step, the first one under its plan."""
        self._wants_probe = False
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
        self._waits_s: list[float] = []
        """For how long each of these waited for data."""
        self._new_s: list[float] = []
        """Times of the steps since the last boundary."""
        self._new_wait_s = 0.0
        """For how long each step since the last boundary waited for data."""
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
            self._boundary()
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
        wait_s = self.world.data_wait_s(self.place, self.timeline.conditions(index), self.phase)
        preparation = self._preparation
        if preparation is not None and self.time_s < preparation.ready_s:
            own_s = (base_s - wait_s) * self.setup.scenario.switching.compile_slowdown
            wait_s = max(0.0, base_s - own_s)
            base_s = own_s + wait_s
            end_s = min(end_s, preparation.ready_s)
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
        self.time_s += base_s * float(sums[last] - sums[first]) + self._first_step_s
        self.step = last
        window = self.setup.settings.window_steps
        times_s = (base_s * self.truth.noise[max(first, last - window) : last]).tolist()
        if last - first <= window:
            times_s[0] += self._first_step_s
        self._first_step_s = 0.0
        self._new_s, self._new_wait_s = times_s, wait_s
        if self.options.every is not None:
            self._times_s += times_s
            self._waits_s += [self._new_wait_s] * len(times_s)
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
        if self._runtime.state.stage in (Stage.READY, Stage.CANARY):
            return self.step + 1
        if (
            self._preparation is not None
            and (at_step := self._preparation.command.at_step) is not None
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

    def _boundary(self) -> None:
        """Let the runtime decide, and carry out its commands."""
        now, new_s, self._new_s = self.now, self._new_s, []
        new_waits_s = [self._new_wait_s] * len(new_s)
        losses = [math.nan] if self._trial_fails else []
        if self._is_asked():
            if self.options.every is not None:
                self.telemetry.steps(self._times_s, now)
            if self.options.probes:
                probe_s = self.telemetry.probe_s(now, asked=self._wants_probe)
                self.time_s, self.probes_s = self.time_s + probe_s, self.probes_s + probe_s
                self._wants_probe = False
            times_s, self._times_s, self._tries_again = self._times_s, [], False
            waits_s, self._waits_s = self._waits_s, []
            self._runtime.boundary(
                self.telemetry.observation(times_s, now, waits_s),
                times_s=new_s,
                data_waits_s=new_waits_s,
                losses=losses,
                is_compiled=self._is_compiled,
            )
        else:
            self._runtime.steps_done(
                self.step, self.time_s, new_s, losses, data_waits_s=new_waits_s
            )
            if self._is_compiled():
                self._runtime.compiled()
        self._obey_all()

    def _is_compiled(self) -> bool:
        """Whether the switch that is pending is compiled."""
        pending, preparation = self._runtime.state.pending, self._preparation
        return (
            pending is not None
            and preparation is not None
            and preparation.command.target == pending.decision.target
            and self.time_s >= preparation.ready_s
        )

    def _obey_all(self) -> None:
        """Carry out all commands, also those that come meanwhile, and move if a plan is ready."""
        while self._commands:
            command = self._commands.popleft()
            if command.kind == "prepare":
                self._prepare(command)
            elif command.kind == "withdraw":
                self._withdraw(command.why)
            elif command.kind == "switch" and self._preparation is not None:
                self._preparation.may_go = True
            elif command.kind == "keep":
                self._before, self._trial_fails = None, False
                self._runtime.trial_over()
            elif command.kind == "roll_back":
                self._take_back(command.why)
            elif command.kind == "probe":
                self._wants_probe = True
        self._move_if_ready()

    def _withdraw(self, why: str) -> None:
        if self._preparation is not None:
            spent_s, plan = self._spent(self._preparation), self._preparation.plan
            self._preparation = None
            self._note("withdrawn", plan, {"prepare": spent_s}, why)

    def _prepare(self, command: Command) -> None:
        """Begin to prepare a switch by compiling in the background. A restart compiles later."""
        plan = command.plan
        assert plan is not None, "the command names the plan"
        self._start_phase_events("prepare")
        at_step = command.at_step
        phase = self.phase if at_step is None else self.setup.phase_at(at_step)
        restarts = (
            not self.options.in_memory
            or plan.num_devices != self.place.plan.num_devices
            or bool(command.without & set(self.place.devices))
        )
        compile_s = 0.0 if restarts or (plan, phase) in self._compiled else self.costs.compile_s
        tax_s = compile_s * (self.setup.scenario.switching.compile_slowdown - 1)
        if self.options.compiles_ahead:
            self.time_s, compile_s = self.time_s + tax_s, 0.0
        self._preparation = _Preparation(
            plan=plan,
            command=command,
            decided_s=self.time_s,
            ready_s=self.time_s + compile_s,
            tax_s=tax_s,
        )
        if not compile_s:
            self._runtime.compiled(at_once=True)

    def _spent(self, preparation: _Preparation) -> float:
        whole_s = preparation.ready_s - preparation.decided_s
        return (
            preparation.tax_s * min(1.0, (self.time_s - preparation.decided_s) / whole_s)
            if whole_s > 0
            else preparation.tax_s
        )

    def _move_if_ready(self) -> None:
        preparation = self._preparation
        if preparation is None or self._before is not None:
            return  # during a trial it must stay possible to go back
        at_step, phase = preparation.command.at_step, self.setup.phase_at(self.step)
        if not preparation.may_go if at_step is None else self.step < at_step:
            return
        if self.time_s < preparation.ready_s:
            if self.world.is_legal(self.place.plan, phase):
                return
            self.time_s = preparation.ready_s  # the new phase cannot begin under the old plan
        self._preparation = None
        self._runtime.move_begun()
        self._switch(preparation, phase)

    def _switch(self, preparation: _Preparation, phase: int) -> None:
        """Make a prepared switch: check that it is possible, move, verify, commit."""
        plan, command, conditions = (
            preparation.plan,
            preparation.command,
            self.timeline.at(self.time_s),
        )
        if (
            not command.without
            and plan.num_devices == self.place.plan.num_devices
            and conditions.lost.isdisjoint(self.place.devices)
        ):
            devices: tuple[int, ...] | None = self.place.devices
        else:
            devices = self.world.devices_for(plan, conditions, command.without)
        compiled_s = {"prepare": preparation.tax_s}
        if (why := self._refused(plan, devices, conditions, phase)) or devices is None:
            self._fail(preparation, compiled_s, why)
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
            self._fail(preparation, compiled_s | back_s, f"its {fails} failed")
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
                    preparation.decided_s,
                )
                return
        before = self.place
        self._arrive(new, costs_s, phase)
        self._note("switch", plan, compiled_s | costs_s, command.why, preparation.decided_s)
        costs_s.pop("first_steps", 0.0)
        self._runtime.moved(plan, costs_s, begins_phase=changes_phase)
        self._start_phase_events("canary")
        if self._runtime.state.trial is not None:
            self._before, self._trial_fails = before, fails == "canary"

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
        self._first_step_s = costs_s.get("first_steps", 0.0)
        self.time_s += sum(costs_s.values()) - self._first_step_s
        self.place = new
        self._compiled[new.plan, phase] = None
        self._compiled.move_to_end((new.plan, phase))
        while len(self._compiled) > self.setup.settings.executables:
            self._compiled.popitem(last=False)
        self._times_s, self._waits_s, self._new_s = [], [], []
        self.telemetry.forget()
        if (
            self.options.probes
            and self.setup.settings.probe_share
            and self.step < self.setup.num_steps
        ):
            probes_s = self.telemetry.settle_s(self.now)
            self.time_s, self.probes_s = self.time_s + probes_s, self.probes_s + probes_s

    def _fail(self, preparation: _Preparation, costs_s: Mapping[str, float], why: str) -> None:
        paused_s = sum(costs_s.values()) - costs_s.get("prepare", 0.0)
        self.time_s += paused_s
        self._note("failed", preparation.plan, costs_s, why, preparation.decided_s)
        self._tries_again = True
        self._runtime.failed(preparation.plan, why, costs_s=paused_s)

    def _take_back(self, why: str) -> None:
        """Go back to the plan before."""
        before, taken_back = self._before, self.place.plan
        assert before is not None, "a plan is on trial"
        self._before, self._trial_fails = None, False
        conditions = self.timeline.at(self.time_s)
        phase = self.setup.phase_at(min(self.step, self.setup.num_steps - 1))
        if self.world.step_time_s(before, conditions, phase) == math.inf:
            self._runtime.trial_over()  # there is no way back
            return
        self._runtime.move_begun()
        self._withdraw("the run goes back")
        costs_s = self._costs_s(before, conditions, phase)
        self._arrive(before, costs_s, phase)
        self._note("rollback", self.place.plan, costs_s, why)
        paused_s = sum(costs_s.values()) - costs_s.get("first_steps", 0.0)
        self._runtime.failed(taken_back, why, costs_s=paused_s, is_back=True)

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
        self._preparation = self._before = None
        self._trial_fails = False
        # If memory ran out, do not reopen the question: a plan chosen while less memory was taken
        # would not last.
        self._runtime.interrupted(reopens=is_lost)
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
        self._runtime.moved(place.plan, costs_s, begins_phase=True)

    def count_restarts(self) -> int:
        """Number of restarts after faults so far."""
        return sum(run_event.kind == "restart" for run_event in self.run_events)

    def _restart_plan(self, conditions: ClusterConditions) -> PlacedPlan | None:
        """The plan that the policy wants to restart with; None: it names none, or it cannot run."""
        self._reported = conditions.reported
        self._times_s, self._waits_s, self._new_s = [], [], []
        self._runtime.boundary(
            self.telemetry.observation([], self.now), times_s=(), is_compiled=lambda: False
        )
        named = [command for command in self._commands if command.kind == "prepare"]
        self._commands.clear()
        if not named or named[-1].plan is None:
            return None
        plan = named[-1].plan
        devices = self.world.devices_for(plan, conditions, named[-1].without)
        if (why := self._refused(plan, devices, conditions, self.phase)) or devices is None:
            self._runtime.failed(plan, why)
            return None
        return PlacedPlan(plan, devices)

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
