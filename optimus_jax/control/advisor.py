"""The advisor: what is known beyond one plan, from observations to decisions. Real and simulated runs share it.

At most step boundaries nothing is up for decision, and `decide` only takes note of what is new. A decision is up when
conditions have changed, devices are lost or back, memory runs short, a phase is near, the level of step times under a plan has
become known, or when the time has come that an earlier decision waited for.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimus_jax.config import ControlConfig
from optimus_jax.control import policy
from optimus_jax.control.candidates import Searcher, Searches, has_room, is_allowed, is_legal, rung_of
from optimus_jax.control.changes import LEAST
from optimus_jax.control.conditions import Conditions, claims
from optimus_jax.control.left_out import LeftOut
from optimus_jax.control.memory_watch import MemoryWatch
from optimus_jax.control.options import Offer, Options, Standing, View
from optimus_jax.control.phases import Phase, Phases
from optimus_jax.control.policy import Candidate, Decision, Regime, Situation
from optimus_jax.control.predictor import Predictor, Query
from optimus_jax.control.prices import Batch, Prices, query, setting
from optimus_jax.control.quarantine import Quarantine
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_costs import CostModel, SwitchCosts
from optimus_jax.control.watch import Watch
from optimus_jax.plan import Plan
from optimus_jax.planning.search import Pricing

LEAD_S = 180.0
"""Before a phase begins, its plan is chosen: time enough to compile."""
ABANDONED = 10
"""Cool-downs after which a switch that was decided and never made is no longer waited for."""
REMEMBERED = 8
"""Plans that the run was under, which are always candidates."""
FORGOTTEN_S = 3600.0
"""Time in which caution after going to and fro falls to a third."""
LEVELS = 30
"""Levels of step times of this run that are kept by name, the newest."""
LOOK_AGAIN = 0.1
"""Of the time that conditions have lasted: at least so much lies between two looks at what their duration speaks against."""
SPARE = 0.02
"""Beyond the least probability: that a process which was left out has recovered, before it is tried again."""
TRIAL = "the first steps under the new plan are done"
"""Puts up for decision whether to go back."""


Level = tuple[float, float, int]
"""Of step times: logarithm, its noise, and the steps that it rests on."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What a level was measured of."""

    plan: Plan
    batch: Batch
    conditions: Conditions
    regime: int


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What is up for decision."""

    trigger: str
    """In words."""
    batch: Batch
    """That it is about."""
    mandatory: bool = False
    """The present plan cannot be kept."""
    at_step: int | None = None
    """Boundary that it is about; None: as soon as can be."""
    only: Standing | None = None
    """The one plan that is asked about; None: all."""


class Advisor:
    """Turns observations into decisions.

    Args:
      pricing: of the run's config, cluster and rates as they are believed to be.
      plan: that the run is under.
      num_steps: of the whole run.
      settings: thresholds.
      phases: batches planned ahead, in order; empty: those of pricing.config all the time.
      searcher: finds candidates; None: planning.search.search, at once.
      memory: file of what was learnt about this hardware (JSON); None: nothing is read or kept.
      costs: what switches are expected to cost before any was made.
      num_processes: that devices are dealt out to, in order; None: one for each host.
    Raises:
      PlanError: `plan` sends over a link of unknown speed, so that nothing can be predicted.
    """

    def __init__(self, *, pricing: Pricing, plan: Plan, num_steps: int, settings: ControlConfig, phases: Sequence[Phase] = (),
                 searcher: Searcher | None = None, memory: Path | None = None, costs: SwitchCosts | None = None,
                 num_processes: int | None = None):
        self._prices, self._cluster, self._settings, self._num_steps = Prices(pricing), pricing.cluster, settings, num_steps
        self._phases, self._options, self._memory = Phases(phases, num_steps), Options(self._prices, Searches(searcher)), memory
        self._num_processes = num_processes or pricing.cluster.num_hosts
        self._predictor, self._costs, self._watch, self._memory_watch = Predictor(pricing.calibration), CostModel(costs), Watch(), MemoryWatch()
        self._quarantine = Quarantine(settings.cooldown_steps)
        if memory is not None:
            self._predictor.load(memory)
        self._batch = self._prices.first_batch
        self._prices.log_time(plan, self._batch, Conditions())
        self._standing, self._before = Standing(plan=plan), Standing(plan=plan)
        """What the run is under, and what it was under before the last switch."""
        self._plans = OrderedDict({plan.digest: plan})
        self._levels: dict[_Known, tuple[Level, int]] = {}
        """What was learnt in this run, with the step at which."""
        self._left: dict[str, tuple[str, int]] = {}
        """By digest of a plan that was left: conditions and regime at the time."""
        self._returned_s: list[float] = []
        """When the run went back to a plan that it had left."""
        self._step, self._time_s, self._began_s = 0, 0.0, None
        self._lost: frozenset[int] = frozenset()
        self._looked, self._on_trial, self._num_switches, self._cool_until = False, False, 0, 0
        self._pending: Decision | None = None
        """A switch that was decided and is being prepared."""
        self._answering: _Question | None = None
        """The question that this was the answer to."""
        self._question: _Question | None = None
        self._forced: _Question | None = None
        """The question whose answer had to be a switch, until it is made."""
        self._review_step, self._review_s = math.inf, math.inf

    @property
    def wants_probe(self) -> bool:
        """Whether step times have changed and readings of links and compute do not say why: a probe now would help."""
        return self._watch.wants_probe

    def decide(self, observation: Observation) -> Decision | None:
        """What to do at this step boundary; None: nothing was up for decision. Call it at every boundary."""
        if self._began_s is None:
            self._began_s = observation.time_s - sum(observation.step_times_s)
        self._step, self._time_s = observation.step, observation.time_s
        is_new_batch = self._enter_batch(observation)
        news = self._watched(observation)
        self._question = self._asked(observation, is_new_batch, news) or self._question
        return None if self._question is None else self._answered(self._question, observation)

    def switched(self, plan: Plan, costs_s: Mapping[str, float]) -> None:
        """The run is now under `plan`. `costs_s`: by phase of the switch, how long the run was delayed by it."""
        decided = self._pending if self._pending is not None and self._pending.plan == plan else None
        is_return, by_choice = decided is not None and decided.trigger == TRIAL, decided is not None and not decided.mandatory
        old, older = self._standing, self._before
        # A plan that nobody decided on is on the devices that are there.
        without = decided.without if decided else self._lost if plan.num_devices < self._cluster.num_devices else frozenset()
        self._learn_level()
        self._costs.learn(self._rung(plan, without), plan, self._prices.of(self._batch), compiled=plan.digest in self._compiled,
                          delay_s=sum(costs_s.values()), counts=by_choice and not self._undoes_loss(without))
        if is_return:
            self._quarantine.add(old.plan, self._step)
        self._left[old.plan.digest], has_been = self._now, plan.digest in self._left
        left_out = older.left_out.still_slow(self._time_s) if is_return and older.left_out else self._left_out_by(without)
        self._under(Standing(plan=plan, without=without, left_out=left_out))
        self._before, self._on_trial, self._forced = old, by_choice and not is_return, None
        self._num_switches += by_choice
        self._returned_s += [self._time_s] * (by_choice and has_been)
        self._cool()

    def failed(self, plan: Plan, why: str) -> None:
        """The switch to `plan` did not happen or was taken back: it is left alone for a while, longer each time."""
        self._quarantine.add(plan, self._step, why)
        if plan == self._standing.plan and self._before.plan != plan:
            left_out = self._before.left_out
            self._under(replace(self._before, left_out=left_out and left_out.still_slow(self._time_s)))
        self._on_trial = False
        self._cool()
        self._question = self._forced

    def save(self) -> None:
        """Keep what was learnt about this hardware for later runs."""
        if self._memory is not None:
            self._learn_level()
            self._predictor.save(self._memory)

    # Taking note.

    @property
    def _now(self) -> tuple[str, int]:
        """Names the present conditions."""
        return setting(self._batch, self._watch.conditions), self._watch.regime

    @property
    def _straggling(self) -> frozenset[int]:
        """Ids of the slow process's devices."""
        index, each = self._watch.straggler, self._cluster.num_devices // self._num_processes
        return frozenset() if index is None else frozenset(range(index * each, (index + 1) * each))

    def _enter_batch(self, observation: Observation) -> bool:
        """Whether another batch has begun."""
        batch = (observation.global_batch, observation.seq_len)
        if batch == self._batch:
            return False
        self._learn_level()
        self._batch, self._looked = batch, False
        self._watch.restart()
        self._memory_watch.restart()
        return True

    def _watched(self, observation: Observation) -> str:
        """News of conditions, in words. What was learnt in the old ones is kept."""
        watch, plan = self._watch, self._standing.plan
        before, level = (watch.conditions, watch.regime), self._level()
        news = watch.observe(observation, claims(observation, self._cluster, plan.axes),
                             lambda conditions: self._prices.log_time(plan, self._batch, conditions))
        if watch.was_so:
            self._call_anew(watch.was_so)
        elif before != (watch.conditions, watch.regime):
            if level is not None:
                self._learn(*before, level)
            if before[1] and before[1] != watch.regime:
                self._predictor.forget_regime(before[1])
        return news

    def _level(self) -> Level | None:
        """Of step times under the plan: logarithm, its noise, and the steps that it rests on."""
        detector = self._watch.detector
        return None if detector.level is None or detector.count < self._settings.canary_steps else (detector.level, detector.noise, detector.count)

    def _learn_level(self) -> None:
        if (level := self._level()) is not None:
            self._learn(self._watch.conditions, self._watch.regime, level)

    def _learn(self, conditions: Conditions, regime: int, level: Level) -> None:
        known = _Known(plan=self._standing.plan, batch=self._batch, conditions=conditions, regime=regime)
        self._levels.pop(known, None)
        self._levels[known] = (level, self._step)
        while len(self._levels) > LEVELS:
            self._levels.pop(next(iter(self._levels)))
        self._tell(known, level, self._step)

    def _tell(self, known: _Known, level: Level, step: int) -> None:
        self._predictor.learn(self._query_of(known), log_time=level[0], noise=level[1], count=level[2], step=step)

    def _query_of(self, known: _Known) -> Query:
        return query(known.plan, known.conditions.applied(self._prices.of(known.batch)), setting(known.batch, known.conditions), known.regime)

    def _call_anew(self, was_so: Mapping[str, float]) -> None:
        """Conditions have turned out to be other ones all the time: so they were when levels were learnt."""
        levels, self._levels = self._levels, {}
        for known in levels:
            self._predictor.forget(self._query_of(known))
        for known, (level, step) in levels.items():
            renamed = replace(known, conditions=replace(known.conditions, **was_so))
            self._levels[renamed] = (level, step)
            self._tell(renamed, level, step)

    def _left_out_by(self, without: frozenset[int]) -> LeftOut | None:
        """The slow process that a run without these devices does without."""
        slow, left_out, watch = self._straggling, self._standing.left_out, self._watch
        if slow and slow <= without:
            found = LeftOut(devices=slow, skew=watch.conditions.skew, regime=watch.regime_at(self._time_s), at_s=self._time_s)
            watch.leave_out(self._time_s)
            return found
        return left_out if left_out is not None and left_out.devices <= without else None

    def _under(self, standing: Standing) -> None:
        plan = standing.plan
        self._standing = standing
        self._plans[plan.digest] = plan
        self._plans.move_to_end(plan.digest)
        while len(self._plans) > REMEMBERED:
            self._plans.popitem(last=False)
        self._watch.restart()
        self._memory_watch.restart()

    def _cool(self) -> None:
        self._pending = self._question = None
        self._cool_until = self._step + max(self._settings.cooldown_steps, self._settings.window_steps)
        self._review_step, self._review_s = self._cool_until, math.inf
        self._look_at_left_out()

    def _look_at_left_out(self) -> None:
        """Once it is likely enough that a slow process has recovered."""
        if (left_out := self._standing.left_out) is not None:
            due_s = left_out.due_s(self._time_s, min(1 - SPARE, self._settings.min_probability + SPARE))
            self._review_s = min(self._review_s, math.inf if due_s is None else due_s)

    # What is up for decision.

    def _asked(self, observation: Observation, is_new_batch: bool, news: str) -> _Question | None:
        """The most urgent question; None: there is no new one."""
        plan, lost = self._standing.plan, self._lost
        self._lost = observation.lost_devices
        memory = self._memory_watch.observe(observation, self._prices.memory_share(plan, self._batch))
        if self._lost != lost and not self._lost <= self._standing.without:
            return self._must("devices are lost")
        if is_new_batch and not is_legal(plan, self._prices.of(self._batch).config):
            return self._must("the batch has changed, and cannot be dealt out under this plan")
        if memory == "pressed":
            return self._must("memory runs short")
        if (question := self._about_phase()) is not None:
            return question
        others = ["devices are back"] * bool(lost - self._lost) + [news] * bool(news) + ["memory is free again"] * (memory == "relieved")
        if not others:
            return self._asked_by_time()
        # A switch that has to be, or belongs to a boundary, is not withdrawn for something else; but another plan may be better for it now.
        asked = self._answering if self._pending is not None else None
        return asked if asked is not None and (asked.mandatory or asked.at_step is not None) else self._may("; ".join(others))

    def _asked_by_time(self) -> _Question | None:
        if self._pending is not None:
            given_up = self._pending.step + ABANDONED * max(self._settings.cooldown_steps, self._settings.window_steps)
            self._pending = None if self._step > given_up else self._pending
            return None
        count = self._watch.detector.count
        if self._on_trial and count >= self._settings.canary_steps:
            self._on_trial = False
            return _Question(trigger=TRIAL, batch=self._batch, only=self._before)
        if not self._looked and count >= LEAST:
            self._looked = True
            return self._may("step times are known")
        if self._step >= self._review_step or self._time_s >= self._review_s:
            self._review_step = self._review_s = math.inf
            return self._may("it is time to look again")
        return None

    def _may(self, trigger: str) -> _Question:
        return _Question(trigger=trigger, batch=self._batch)

    def _must(self, trigger: str) -> _Question:
        return _Question(trigger=trigger, batch=self._batch, mandatory=True)

    def _about_phase(self) -> _Question | None:
        """About a phase that is near enough to prepare for."""
        level, plan = self._watch.detector.level, self._standing.plan
        phase = self._phases.near(self._step, max(self._settings.cooldown_steps, LEAD_S / math.exp(level) if level is not None else 0.0))
        if phase is None:
            return None
        batch = (phase.global_batch, phase.seq_len)
        priced = self._prices.of(batch)
        cannot_go_on = not is_legal(plan, priced.config) or not has_room(plan, self._memory_watch.applied(priced))
        return _Question(trigger=f"the phase that begins at step {phase.first_step}", batch=batch, at_step=phase.steps_before, mandatory=cannot_go_on)

    # Answers.

    def _answered(self, question: _Question, observation: Observation) -> Decision | None:
        """Weigh it; None: it says nothing new, or a search is still at work, and the question stays."""
        blocked = "" if question.mandatory else self._blocked(question)
        self._learn_level()
        offers = [] if blocked else self._offers(question)
        if offers is None:
            return None
        self._question = None
        self._forced = question if question.mandatory else self._forced
        self._answering = question
        return self._noted(self._weighed(question, offers, blocked, observation))

    def _blocked(self, question: _Question) -> str:
        settings = self._settings
        if settings.max_switches is not None and self._num_switches >= settings.max_switches:
            return f"{settings.max_switches} switches are the most that the settings allow"
        if question.only is None and (question.at_step or self._step) < self._cool_until:
            self._review_step = self._cool_until
            return f"cooling down after a switch, until step {self._cool_until}"
        return ""

    def _offers(self, question: _Question) -> list[Offer] | None:
        """What could be switched to; None: a search is still at work."""
        watch = self._watch
        view = View(batch=question.batch, time_s=self._time_s, conditions=watch.conditions, normal=watch.normal, lost=self._lost, slow=self._straggling,
                    left_out=self._standing.left_out, memory=self._memory_watch)
        if question.only is not None:
            return self._options.back(view, question.only)
        return self._options.all(view, self._standing, list(self._plans.values()), self._predictor.calibration(), mandatory=question.mandatory)

    def _weighed(self, question: _Question, offers: Sequence[Offer], blocked: str, observation: Observation) -> Decision:
        watch, plan, priced = self._watch, self._standing.plan, self._memory_watch.applied(self._prices.of(question.batch))
        asked = [query(plan, watch.conditions.applied(priced), setting(question.batch, watch.conditions), watch.regime)]
        asked += [query(offer.plan, offer.place.pricing, offer.place.setting, watch.regime) for offer in offers]
        if watch.is_disturbed:
            normal = setting(question.batch, watch.normal)
            asked += [query(plan, watch.normal.applied(priced), normal)] + [query(offer.plan, offer.place.normal, normal) for offer in offers]
        forecast, after = self._predictor.foretell(asked), len(offers) + 1
        candidates = [
            self._candidate(offer, question, *forecast.ratio(index, 0), forecast.ratio(after + index, after)[0] if watch.is_disturbed else None)
            for index, offer in enumerate(offers, start=1)]
        step_time_s, usual_s = forecast.step_time_s(0), forecast.step_time_s(after if watch.is_disturbed else 0)
        steps_left = self._phases.steps_left(self._step if question.at_step is None else question.at_step)
        # Whether to go back does not depend on how long conditions last: the same ones hold for both plans.
        regime = watch.regime_at(self._time_s) if question.only is None else Regime(elapsed_s=0.0, durations=None)
        situation = Situation(
            step=self._step, trigger=question.trigger, step_time_s=step_time_s, horizon_s=steps_left * step_time_s, regime=regime, blocked=blocked,
            caution=1.0 if question.only is not None else self._caution(), budget_s=self._budget_s(usual_s), mandatory=question.mandatory, at_step=question.at_step,
            inputs=self._inputs(question, observation, forecast.interval_s(0), steps_left))
        return policy.decide(situation, candidates, self._settings)

    def _candidate(self, offer: Offer, question: _Question, log_ratio: float, deviation: float, log_ratio_after: float | None) -> Candidate:
        plan, place = offer.plan, offer.place
        rung = self._rung(plan, place.without)
        is_listed = is_allowed(plan, self._settings.allow)
        return Candidate(
            plan=plan, rung=rung, log_ratio=log_ratio, deviation=deviation, log_ratio_after=log_ratio_after, without=place.without, likely=place.likely,
            barred=self._quarantine.why(plan, self._step) if is_listed else "not on the list of meshes that may be switched to",
            cost_s=self._costs.expected_s(rung, plan, place.pricing, compiled=plan.digest in self._compiled),
            return_s=self._costs.expected_s(rung, plan, place.pricing, compiled=True), is_free=self._undoes_loss(place.without),
            was_left=question.only is None and self._left.get(plan.digest) == self._now)

    def _noted(self, decision: Decision) -> Decision | None:
        """Remember what was decided; None: it says nothing new."""
        if decision.action == "switch":
            is_old = self._pending is not None and (self._pending.plan, self._pending.at_step) == (decision.plan, decision.at_step)
            self._pending = self._pending if is_old else decision
            return None if is_old else decision
        self._pending = None
        self._look_at_left_out()
        if decision.wait_s is not None:
            least_s = max(LEAST * (decision.step_time_s or 0.0), LOOK_AGAIN * self._watch.regime_at(self._time_s).elapsed_s)
            self._review_s = min(self._review_s, self._time_s + max(decision.wait_s, least_s))
        return None if decision.trigger == TRIAL else decision

    # What answers rest on.

    def _rung(self, plan: Plan, without: frozenset[int]) -> policy.Rung:
        same_devices = without == self._standing.without and plan.num_devices == self._standing.plan.num_devices
        return rung_of(self._standing.plan, plan, same_devices=same_devices, same_hosts=self._cluster.num_hosts == 1)

    def _undoes_loss(self, without: frozenset[int]) -> bool:
        """Whether a plan without these devices uses some that were lost and have come back."""
        left_out, used_again = self._standing.left_out, self._standing.without - without
        return without < self._standing.without and not used_again <= (left_out.devices if left_out is not None else frozenset())

    @property
    def _compiled(self) -> list[str]:
        """Digests of plans whose executables are still there."""
        return list(self._plans)[-self._settings.executables:]

    def _caution(self) -> float:
        """Twice as much for every time that the run went back to a plan, as long as that is not forgotten."""
        return 2.0 ** sum(math.exp(-(self._time_s - time_s) / FORGOTTEN_S) for time_s in self._returned_s)

    def _budget_s(self, step_time_s: float) -> float:
        """What switches may still take, of the time that the whole run takes if the steps that are left take so long."""
        whole_s = self._time_s - (self._began_s or 0.0) + max(0, self._num_steps - self._step) * step_time_s
        return self._settings.budget_share * whole_s - self._costs.spent_s

    def _inputs(self, question: _Question, observation: Observation, interval_s: tuple[float, float], steps_left: int) -> dict[str, Any]:
        watch = self._watch
        readings = {name: reading.value for name, reading in sorted(observation.readings.items())
                    if reading.quality in ("good", "few") and reading.value is not None and math.isfinite(reading.value)}
        return {
            "plan": self._standing.plan.digest, "global_batch": question.batch[0], "seq_len": question.batch[1], "step_time_low_s": interval_s[0],
            "step_time_high_s": interval_s[1], "conditions": watch.conditions.as_json(), "unexplained": watch.regime != 0,
            "distrusted": sorted(watch.distrusted), "held_s": watch.regime_at(self._time_s).elapsed_s, "steps_left": steps_left,
            "spent_s": self._costs.spent_s, "memory_taken": self._memory_watch.taken, "lost_devices": sorted(self._lost), **readings}
