"""What a switch would truly have saved in a simulated run: the label of a candidate.

A label is the time at which the run would end if it kept its present plan, less the time at which
it would end if it switched now. Both follow the true step times through all events that are still
to come. The switch pays its true costs: the tax of compiling, the stall, and the way back where a
return pays. The run returns after the trial if the plan is slower by then, or when conditions
change so that the plan before is the faster one, with the delay of a run that has to notice it.

Only two plans are compared: what the run would do besides, at later decisions, is left out. So are
probes after the switch and switches that fail by a scenario's event.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus_jax.control.policy import Situation, SwitchCandidate
from optimus_jax.simulation.simulator import Simulation
from optimus_jax.simulation.timeline import NORMAL, ClusterConditions
from optimus_jax.simulation.true_switch_costs import TrueSwitchCosts
from optimus_jax.simulation.world import PlacedPlan

RETURN_STEPS = 10
"""Steps after a change of conditions before a run returns: it has to notice the change."""
MAX_RETURNS = 3
"""Number of changes of conditions at which a return is considered, the first ones."""
MAX_RESTARTS = 20
"""Restarts after which a run is taken never to end."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """True values of the candidates of one decision; times in seconds."""

    net_s: np.ndarray
    """[candidates]: what the switch to each would save; negative: it would lose."""
    left_s: float
    """Time until the run would end under its present plan."""
    whole_s: float
    """Time of the whole run under that plan, from its beginning."""


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """A run at a step boundary."""

    step: int
    time_s: float
    place: PlacedPlan


class Hindsight:
    """The truth of one simulated run, for labels.

    Args:
      simulation: the run, which is read and never changed.
    """

    def __init__(self, simulation: Simulation):
        self._run, self._truth = simulation, simulation.truth
        self._setup, self._world = simulation.setup, simulation.world
        self._costs = TrueSwitchCosts(simulation.world)
        self._timeline = simulation.timeline
        self._steps_s: dict[PlacedPlan, dict[tuple[int, int], float]] = {}
        """Step times by plan, then by interval of the timeline and phase."""

    def labels(self, situation: Situation, candidates: Sequence[SwitchCandidate]) -> Labels:
        """The labels of a decision that is made now."""
        now = self._begin(situation)
        stay_s = self._end_s(now)
        net_s = [self._net_s(now, stay_s, situation, each) for each in candidates]
        left_s = stay_s - now.time_s
        return Labels(net_s=np.array(net_s), left_s=left_s, whole_s=stay_s)

    def with_true_ratios(self, situation: Situation, candidate: SwitchCandidate) -> SwitchCandidate:
        """The candidate as a perfect predictor sees it: true ratios, without a deviation. One that
        does not fit is barred.
        """
        step = self._run.step if situation.at_step is None else situation.at_step
        phase = self._setup.phase_at(min(step, self._setup.num_steps - 1))
        conditions = self._run.timeline.at(self._run.time_s)
        ratio = self._log_ratio(candidate, conditions, phase)
        if ratio is None:
            return replace(candidate, barred=candidate.barred or "it does not fit")
        after = self._log_ratio(candidate, replace(NORMAL, lost=conditions.lost), phase)
        return replace(
            candidate,
            log_ratio=ratio,
            deviation=0.0,
            log_ratio_after=None if candidate.log_ratio_after is None else after,
        )

    def _log_ratio(
        self, candidate: SwitchCandidate, conditions: ClusterConditions, phase: int
    ) -> float | None:
        """True logarithm of the ratio of step times; None: one of the two cannot run."""
        target = self._target(candidate, self._run.place, conditions)
        times_s = [
            math.inf if place is None else self._world.step_time_s(place, conditions, phase)
            for place in (target, self._run.place)
        ]
        return None if math.inf in times_s else math.log(times_s[0] / times_s[1])

    def _begin(self, situation: Situation) -> _Moment:
        """The boundary at which the switch would be made, or begin to be prepared."""
        run = self._run
        now = _Moment(step=run.step, time_s=run.time_s, place=run.place)
        return now if situation.at_step is None else self._walked(now, last=situation.at_step)

    def _net_s(
        self, now: _Moment, stay_s: float, situation: Situation, candidate: SwitchCandidate
    ) -> float:
        conditions = self._run.timeline.at(now.time_s)
        target = self._target(candidate, now.place, conditions)
        if target is None or not math.isfinite(stay_s):
            return 0.0
        tax_s = 0.0
        if situation.at_step is None and set(target.devices) == set(now.place.devices):
            slowdown = self._setup.scenario.switching.compile_slowdown
            compile_s = self._costs.compile_s if candidate.prepare_s > 0 else 0.0
            tax_s = compile_s * (slowdown - 1)
            ready = self._walked(
                replace(now, time_s=now.time_s + tax_s), until_s=now.time_s + compile_s
            )
        else:
            ready = now
        if ready.step >= self._setup.num_steps or ready.place != now.place:
            return stay_s - self._end_s(ready)
        moved = self._switched(ready, target)
        if moved is None:  # refused once it is compiled
            return -tax_s
        ends_s = [self._end_s(back) for back in self._returns(ready, moved)]
        return stay_s - min(self._end_s(moved), *ends_s) if ends_s else stay_s - self._end_s(moved)

    def _target(
        self, candidate: SwitchCandidate, place: PlacedPlan, conditions: ClusterConditions
    ) -> PlacedPlan | None:
        """The candidate on its devices, as the simulator chooses them."""
        if (
            not candidate.without
            and candidate.plan.num_devices == place.plan.num_devices
            and conditions.lost.isdisjoint(place.devices)
        ):
            return PlacedPlan(candidate.plan, place.devices)
        devices = self._world.devices_for(candidate.plan, conditions, candidate.without)
        return None if devices is None else PlacedPlan(candidate.plan, devices)

    def _switched(self, now: _Moment, target: PlacedPlan) -> _Moment | None:
        """The run after a switch; None: the plan cannot run now."""
        conditions, phase = self._run.timeline.at(now.time_s), self._phase(now)
        if math.isinf(self._world.step_time_s(target, conditions, phase)):
            return None
        cost_s = sum(self._costs.switch_s(now.place, target, conditions, phase).values())
        return replace(now, time_s=now.time_s + cost_s, place=target)

    def _returns(self, before: _Moment, moved: _Moment) -> Iterator[_Moment]:
        """The run after each return that is considered."""
        if self._is_faster(before.place, moved):
            trial_steps = self._setup.settings.canary_steps
            yield from self._returned(before, self._walked(moved, last=moved.step + trial_steps))
        for again in itertools.islice(self._slower_since(before.place, moved), MAX_RETURNS):
            yield from self._returned(before, self._walked(again, last=again.step + RETURN_STEPS))

    def _slower_since(self, place: PlacedPlan, now: _Moment) -> Iterator[_Moment]:
        """The run after each change of conditions with which steps on `place` are faster."""
        timeline, target = self._run.timeline, now.place
        for bound_s in timeline.bounds_s[timeline.index(now.time_s) + 1 :]:
            now = self._walked(now, until_s=bound_s)
            if now.place != target or now.step >= self._setup.num_steps:
                return
            if self._is_faster(place, now):
                yield now

    def _returned(self, before: _Moment, again: _Moment) -> Iterator[_Moment]:
        back = self._switched(again, before.place)
        if back is not None:
            yield back

    def _is_faster(self, place: PlacedPlan, now: _Moment) -> bool:
        """Whether steps on `place` would be faster than those of the run."""
        key = self._run.timeline.index(now.time_s), self._phase(now)
        return self._times(place)(*key) < self._times(now.place)(*key)

    def _times(self, place: PlacedPlan) -> Callable[[int, int], float]:
        """Step times of the plan by interval of the timeline and phase."""
        if self._timeline is not self._run.timeline:  # a phase of a switch has begun an event
            self._timeline = self._run.timeline
            self._steps_s.clear()
        known = self._steps_s.setdefault(place, {})  # a plan's hash is slow

        def step_time_s(index: int, phase: int) -> float:
            if (index, phase) not in known:
                conditions = self._timeline.conditions(index)
                known[index, phase] = self._world.step_time_s(place, conditions, phase)
            return known[index, phase]

        return step_time_s

    def _phase(self, now: _Moment) -> int:
        return self._setup.phase_at(min(now.step, self._setup.num_steps - 1))

    def _end_s(self, now: _Moment) -> float:
        """When the run ends if it switches no more."""
        return self._walked(now).time_s

    def _walked(
        self, now: _Moment, *, last: int | None = None, until_s: float = math.inf
    ) -> _Moment:
        """The run after `last` steps (None: all), or at the first boundary after `until_s`. Time
        is infinite if it cannot go on.
        """
        step, time_s, place = now.step, now.time_s, now.place
        last = min(self._setup.num_steps, self._setup.num_steps if last is None else last)
        sums, num_restarts = self._truth.noise_sums, 0
        timeline, times_s = self._run.timeline, self._times(place)
        while step < last and time_s < until_s:
            index, phase = timeline.index(time_s), self._setup.phase_at(step)
            step_s = times_s(index, phase)
            if math.isinf(step_s):
                num_restarts += 1
                restarted = self._restarted(_Moment(step=step, time_s=time_s, place=place))
                if restarted is None or num_restarts > MAX_RESTARTS:
                    return _Moment(step=last, time_s=math.inf, place=place)
                step, time_s, place = restarted.step, restarted.time_s, restarted.place
                times_s = self._times(place)
                continue
            limit = min([last, *[first for first in self._setup.first_steps if first > step]])
            end_s = min(timeline.end_s(index), until_s)
            done = int(np.searchsorted(sums, sums[step] + (end_s - time_s) / step_s))
            done = max(step + 1, min(limit, done))
            time_s, step = time_s + step_s * float(sums[done] - sums[step]), done
        return _Moment(step=step, time_s=time_s, place=place)

    def _restarted(self, now: _Moment) -> _Moment | None:
        """The run after a restart from its last checkpoint; None: nothing can run any more.

        It keeps its plan if that fits on other devices; else it takes the usual default.
        """
        timeline, phase = self._run.timeline, self._phase(now)
        is_lost = not timeline.at(now.time_s).lost.isdisjoint(now.place.devices)
        time_s = now.time_s + (self._setup.scenario.switching.detect_s if is_lost else 0.0)
        conditions = timeline.at(time_s)
        devices = self._world.devices_for(now.place.plan, conditions)
        place = None if devices is None else PlacedPlan(now.place.plan, devices)
        if place is None or math.isinf(self._world.step_time_s(place, conditions, phase)):
            place = self._truth.fallback(conditions, phase)
        if place is None:
            end_s = timeline.end_s(timeline.index(time_s))
            return None if math.isinf(end_s) else replace(now, time_s=end_s)
        every = self._setup.checkpoint_steps
        step = max(now.step // every * every, self._setup.first_steps[phase])
        cost_s = sum(self._costs.restart_s(place.plan, phase, saves=False).values())
        return _Moment(step=step, time_s=time_s + cost_s, place=place)
