"""The advisor: turns observations into decisions, with all that is known of the run's plans.

Real and simulated runs share it.

At most step boundaries there is nothing to decide, and `decide` only records what is new. There is
a decision to make when conditions have changed, devices are lost or back, memory runs short, a
phase is near, the level of step times under a plan has become known, or the time that an earlier
decision waited for has come.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from optimus_jax.config import ControlConfig
from optimus_jax.control.deciding.account import Account
from optimus_jax.control.deciding.candidate_evaluator import CandidateEvaluator
from optimus_jax.control.deciding.candidates import Searcher, Searches, has_room, is_legal
from optimus_jax.control.deciding.changes import MIN_STEPS
from optimus_jax.control.deciding.conditions import Conditions, claims
from optimus_jax.control.deciding.experience import Experience, Known, Level
from optimus_jax.control.deciding.memory_watch import MemoryWatch
from optimus_jax.control.deciding.options import ObservedCluster, Options, PlanInUse, PlanOption
from optimus_jax.control.deciding.phases import BatchPhase, BatchPhases
from optimus_jax.control.deciding.plan_history import PlanHistory
from optimus_jax.control.deciding.prices import Prices, query, setting
from optimus_jax.control.deciding.quarantine import Quarantine
from optimus_jax.control.deciding.question_queue import Question, QuestionQueue
from optimus_jax.control.deciding.run_progress import RunProgress
from optimus_jax.control.deciding.switch_costs import CostModel, SwitchCosts
from optimus_jax.control.deciding.switch_limits import SwitchLimits
from optimus_jax.control.deciding.watch import Watch
from optimus_jax.control.policy import Decision
from optimus_jax.control.predictor import Predictor
from optimus_jax.control.signals import Observation
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan
from optimus_jax.planning.search.search import Pricing

LEAD_S = 180.0
"""The plan of a phase is chosen this many seconds before the phase begins: time enough to
compile."""
ABANDON_AFTER_COOLDOWNS = 10
"""Number of cool-downs after which a switch that was decided but never made is given up, counted
from its planned boundary if it has one."""
MIN_REWEIGH_WAIT = 0.1
"""Shortest wait before a switch that was rejected only for the duration of conditions is weighed
again, as a share of the time that conditions have lasted."""
MIN_CHANGED_STEPS = 2
"""If at least this many of the newest steps look different, a switch waits until it is known
whether they are."""
MAX_WAIT_STEPS = 12
"""Largest number of steps that a plan which is ready waits for an explanation, if steps have
changed since it was chosen."""
TRIAL_LOG_STD = 0.03
"""Uncertainty of a step time that was measured in a few trial steps before the run: standard
deviation of its logarithm."""
LEAST_TRIAL_STEPS = 3
"""Steps of a plan that was taken back from which its step time is learnt. A trial ends early if the
plan is far slower, and its very first steps do not count."""
TRIAL = "the first steps under the new plan are done"
"""The trigger of the decision whether to go back to the plan before."""


class Advisor:
    """Turns observations into decisions.

    Args:
      pricing: the run's config, cluster and believed rates, from which step times are predicted.
      plan: the plan that the run begins with.
      num_steps: number of steps of the whole run.
      settings: thresholds of the controller.
      phases: batches planned ahead, in order; empty: those of pricing.config throughout.
      searcher: finds candidates; None: planning.search.search, called directly.
      memory: JSON file with what was learnt about this hardware; None: nothing is read or saved.
      costs: what switches are expected to cost before any was made.
      process_of: the process of each device; None: one process per host, in order.
      keeps_devices: whether all devices stay in use, whatever is wrong with them.
      tried_s: step times, in seconds, of plans that were tried before the run began; may be empty.
      is_compiled: whether the executable of a plan for these batches, without these devices, is in
        the cache; None: the newest plans' executables are.
    Raises:
      PlanError: `plan` sends over a link of unknown speed, so nothing can be predicted.
    """

    def __init__(
        self,
        *,
        pricing: Pricing,
        plan: Plan,
        num_steps: int,
        settings: ControlConfig,
        phases: Sequence[BatchPhase] = (),
        searcher: Searcher | None = None,
        memory: Path | None = None,
        costs: SwitchCosts | None = None,
        process_of: Sequence[int] | None = None,
        keeps_devices: bool = False,
        tried_s: Mapping[Plan, float] = MappingProxyType({}),
        is_compiled: Callable[[Plan, BatchShape, frozenset[int]], bool] | None = None,
    ):
        self._prices, self._cluster, self._settings, self._run_progress = (
            Prices(pricing, process_of),
            pricing.cluster,
            settings,
            RunProgress(num_steps),
        )
        self._phases, self._options, self._memory = (
            BatchPhases(phases, num_steps),
            Options(
                self._prices,
                Searches(searcher),
                keeps_devices=keeps_devices,
                allow=settings.allowed_axes,
            ),
            memory,
        )
        self._is_compiled = is_compiled or (
            lambda plan, batch, without: self._plan_history.is_compiled(plan)
        )
        self._predictor, self._costs, self._watch, self._memory_watch = (
            Predictor(pricing.calibration),
            CostModel(costs),
            Watch(),
            MemoryWatch(),
        )
        self._quarantine = Quarantine(settings.cooldown_steps)
        if memory is not None:
            self._predictor.load(memory)
        self._batch = self._prices.first_batch
        self._prices.log_time(plan, self._batch, Conditions())
        self._plan_history = PlanHistory(
            plan, num_hosts=self._cluster.num_hosts, num_executables=settings.executables
        )
        self._experience, self._switch_limits = (
            Experience(self._predictor, self._prices),
            SwitchLimits(settings),
        )
        self._account = Account(settings.budget_share)
        self._evaluator = CandidateEvaluator(
            run_progress=self._run_progress,
            plan_history=self._plan_history,
            phases=self._phases,
            prices=self._prices,
            predictor=self._predictor,
            watch=self._watch,
            costs=self._costs,
            account=self._account,
            quarantine=self._quarantine,
            settings=settings,
            is_compiled=self._is_compiled,
        )
        self._tried = tuple(tried_s)
        for each, time_s in tried_s.items():
            self._experience.learn(
                Known(plan=each, batch=self._batch, conditions=Conditions(), regime=0),
                (math.log(time_s), TRIAL_LOG_STD, 1),
                0,
            )
        self._lost: frozenset[int] = frozenset()
        self._looked, self._on_trial = False, False
        self._pending: Decision | None = None
        """The switch that was decided and is being prepared."""
        self._decided_s = 0.0
        """When the pending switch was decided, on the run's clock."""
        self._had_compiled = False
        """Whether its plan was already compiled then."""
        self._answering: Question | None = None
        """The question that the newest decision answers."""
        self._questions = QuestionQueue()

    @property
    def wants_probe(self) -> bool:
        """Whether a probe would help now: step times have changed, and readings of links and
        compute do not say why.
        """
        return self._watch.wants_probe

    @property
    def probe_worth_s(self) -> float:
        """Seconds that a probe may take to find out why step times have changed."""
        return self._watch.probe_worth_s

    @property
    def changed_s(self) -> float | None:
        """When step times last changed for a reason that was unknown then, on the run's clock.

        Older probes say nothing about the present.
        """
        return self._watch.changed_s

    @property
    def is_puzzled(self) -> bool:
        """Whether the newest steps differ from those that the pending switch was decided on, and
        it is not known why or what to do about it.
        """
        changed_since = self.changed_s is not None and self.changed_s > self._decided_s
        return (
            self._watch.detector.suspects >= MIN_CHANGED_STEPS
            or self._questions.question is not None
            or (changed_since and self._watch.wants_probe)
        )

    @property
    def steps_alike(self) -> int:
        """Number of newest steps under the plan that were done in present conditions: a new plan's
        first steps are compared with these only.
        """
        return self._watch.steps_alike

    def decide(self, observation: Observation) -> Decision | None:
        """Decide what to do at this step boundary; None: there was nothing to decide.

        Call it at every boundary.
        """
        run_progress = self._run_progress.observe(observation)
        if run_progress != "goes on":
            self._switch_limits.rewind(observation.step)
        if run_progress == "goes back":
            self._questions.postpone(self._switch_limits.cool_until())
        is_new_batch = self._enter_batch(observation)
        news = self._watched(observation)
        self._account.stepped(
            self._circumstances, self._watch.detector.level, len(observation.step_times_s)
        )
        if (asked := self._asked(observation, is_new_batch, news)) is not None:
            self._questions.put(asked)
        return (
            None
            if self._questions.question is None
            else self._answered(self._questions.question, observation)
        )

    def switched(self, plan: Plan, costs_s: Mapping[str, float]) -> None:
        """Record that the run is now under `plan`.

        Args:
          plan: the new plan.
          costs_s: delay of the run by phase of the switch, in seconds, without its first steps.
        """
        decided = (
            self._pending if self._pending is not None and self._pending.plan == plan else None
        )
        is_return, by_choice = (
            decided is not None and decided.trigger == TRIAL,
            decided is not None and not decided.mandatory,
        )
        old = self._plan_history.now
        # A plan that nobody decided on uses the devices that are available.
        without = (
            decided.without
            if decided
            else self._lost
            if plan.num_devices < self._cluster.num_devices
            else frozenset()
        )
        self._learn_level()
        switch_method, compiled = (
            self._plan_history.switch_method(plan, without),
            self._had_compiled
            if decided is not None
            else self._is_compiled(plan, self._batch, without),
        )
        if (
            decided is not None
            and decided.at_step is None
            and self._costs.prepare_s(switch_method, compiled=compiled)
        ):
            self._costs.prepared(self._run_progress.time_s - self._decided_s)
        # A link that is slow now has made the move slow. The way back, once the link has recovered,
        # will not be slow.
        self._costs.learn(
            switch_method,
            old.plan,
            plan,
            self._watch.conditions.applied(self._prices.of(self._batch)),
            compiled=compiled,
            delay_s=sum(costs_s.values()),
        )
        self._account.charge(sum(costs_s.values()) if by_choice else 0.0)
        if by_choice:
            self._account.left(self._circumstances, self._watch.detector.level)
        else:
            self._account.forget()
        if is_return:
            self._watch.confirm(self._run_progress.time_s)
            self._quarantine.add(old.plan, self._run_progress.step)
        self._plan_history.moved(PlanInUse(plan=plan, without=without))
        self._restart()
        self._on_trial, self._questions.forced = by_choice and not is_return, None
        self._switch_limits.num_switches += by_choice
        self._cool(by_choice=by_choice)

    def failed(
        self, plan: Plan, why: str, *, at_step: int | None = None, is_back: bool = False
    ) -> None:
        """Quarantine `plan`, because the switch to it failed or was taken back; longer each time.

        Args:
          plan: the plan of the switch.
          why: what went wrong.
          at_step: the step at which it failed; None: now.
          is_back: the switch was made, and the run is back under the plan before it.
        """
        self._quarantine.add(plan, self._run_progress.step if at_step is None else at_step, why)
        if is_back:
            self._learn_level(LEAST_TRIAL_STEPS)
            self._plan_history.taken_back()
            self._watch.confirm(self._run_progress.time_s)
            self._restart()
        self._on_trial = False
        self._cool()
        self._questions.reopen()

    def charge(self, time_s: float) -> None:
        """Charge the account for time beyond switches: first steps, or failed attempts."""
        self._account.charge(time_s)

    def remember(self, costs_s: Mapping[str, float], *, step: int, by_choice: bool) -> None:
        """Record a switch that the run made after `step`, before this advisor was created.

        Args:
          costs_s: its delay by phase, in seconds.
          step: number of steps done at the switch.
          by_choice: whether the run could have stayed under its plan.
        """
        self._switch_limits.num_switches += by_choice
        self._account.charge(sum(costs_s.values()) if by_choice else 0.0)
        self._switch_limits.cool(step, by_choice=by_choice)

    def dropped(self) -> None:
        """Drop the pending switch: its preparation has become useless, because the batches have
        changed or the run has ended.
        """
        self._pending = None
        self._questions.reopen()

    def save(self) -> None:
        """Save what was learnt about this hardware for later runs."""
        if self._memory is not None:
            self._learn_level()
            self._predictor.save(self._memory)

    # Recording observations.

    @property
    def _circumstances(self) -> tuple[str, int, frozenset[int]]:
        """What step times depend on besides the plan: the setting, the regime, and which devices
        are not used.
        """
        watch = self._watch
        return (
            setting(self._batch, watch.conditions),
            watch.regime,
            self._plan_history.now.without,
        )

    def _enter_batch(self, observation: Observation) -> bool:
        """Note the batch of the observation; returns whether it is a new one."""
        batch = BatchShape(observation.global_batch, observation.seq_len)
        if batch == self._batch:
            return False
        self._learn_level()
        self._batch, self._looked = batch, False
        self._questions.enter(batch)
        self._restart()
        return True

    def _watched(self, observation: Observation) -> str:
        """What is new about conditions, in words; what was learnt in the old ones is kept."""
        watch, plan = self._watch, self._plan_history.now.plan
        before, level = (watch.conditions, watch.regime), self._level()
        news = watch.observe(
            observation,
            claims(observation, self._cluster, plan.axes),
            lambda conditions: self._prices.log_time(
                plan, self._batch, conditions, self._plan_history.now.without
            ),
            self._expected_log_time,
        )
        if watch.was_so:
            self._experience.relabel(watch.was_so)
            self._predictor.forget_earlier_runs()
        elif before != (watch.conditions, watch.regime):
            if level is not None:
                self._learn(*before, level)
            if before[1] and before[1] != watch.regime:
                self._predictor.forget_regime(before[1])
        return news

    def _expected_log_time(self, conditions: Conditions) -> float:
        """Logarithm of the present plan's step time in these conditions, by all that was learnt."""
        now = self._plan_history.now
        pricing = self._prices.seen_by(now.plan, conditions, now.without).applied(
            self._prices.of(self._batch)
        )
        in_use = self._prices.processes(now.plan.num_devices, now.without)
        asked = query(now.plan, pricing, setting(self._batch, conditions.among(in_use)))
        return math.log(self._predictor.predict([asked]).step_time_s(0))

    def _level(self, least_steps: int | None = None) -> Level | None:
        """Level of step times under the plan: logarithm, its noise, and number of steps.

        None: there are fewer steps than `least_steps`, by default those of a trial.
        """
        detector = self._watch.detector
        return (
            None
            if detector.level is None
            or detector.count < (least_steps or self._settings.canary_steps)
            else (detector.level, detector.noise, detector.count)
        )

    def _learn_level(self, least_steps: int | None = None) -> None:
        if (level := self._level(least_steps)) is not None:
            self._learn(self._watch.conditions, self._watch.regime, level)

    def _learn(self, conditions: Conditions, regime: int, level: Level) -> None:
        known = Known(
            plan=self._plan_history.now.plan,
            batch=self._batch,
            conditions=conditions,
            regime=regime,
            without=self._plan_history.now.without,
        )
        self._experience.learn(known, level, self._run_progress.step)

    def _restart(self) -> None:
        """Forget step times and memory readings of the plan that the run has left."""
        now = self._plan_history.now
        self._watch.restart(self._prices.processes(now.plan.num_devices, now.without))
        self._memory_watch.restart()

    def _cool(self, *, by_choice: bool = True) -> None:
        self._pending = None
        self._switch_limits.cool(self._run_progress.step, by_choice=by_choice)
        self._questions.clear(self._switch_limits.cool_until())

    # Questions: what there is to decide.

    def _asked(self, observation: Observation, is_new_batch: bool, news: str) -> Question | None:
        """The most urgent question; None: there is no new one."""
        plan, lost = self._plan_history.now.plan, self._lost
        self._lost = observation.lost_devices
        memory = self._memory_watch.observe(
            observation, self._prices.memory_share(plan, self._batch)
        )
        if self._lost != lost and not self._lost <= self._plan_history.now.without:
            return self._must("devices are lost")
        if is_new_batch and not is_legal(plan, self._prices.of(self._batch).config):
            return self._must("the new batch does not divide evenly under this plan")
        if memory == "pressed":
            return self._must("memory runs short")
        if (question := self._about_phase()) is not None:
            return question
        # News that comes before the level of step times is known waits for that level: otherwise
        # plans would be compared on readings alone, without any measured step time.
        news = news if self._looked else ""
        others = (
            ["devices are back"] * bool(lost - self._lost)
            + [news] * bool(news)
            + ["memory is free again"] * (memory == "relieved")
        )
        if not others:
            return self._asked_by_time()
        # A switch that is mandatory or planned for a boundary is not withdrawn for something else,
        # but another plan may be the better answer to its question now.
        asked = self._answering if self._pending is not None else None
        return asked if asked is not None and asked.is_pressing else self._may("; ".join(others))

    def _asked_by_time(self) -> Question | None:
        if self._pending is not None:
            due_step = (
                self._pending.at_step if self._pending.at_step is not None else self._pending.step
            )
            given_up = due_step + ABANDON_AFTER_COOLDOWNS * max(
                self._settings.cooldown_steps, self._settings.window_steps
            )
            self._pending = None if self._run_progress.step > given_up else self._pending
            return None
        count = self._watch.detector.count
        if self._on_trial and count >= self._settings.canary_steps:
            self._on_trial = False
            return Question(trigger=TRIAL, batch=self._batch, only=self._plan_history.before)
        if not self._looked and count >= MIN_STEPS:
            self._looked = True
            return self._may("step times are known")
        if self._questions.is_review_due(self._run_progress.step, self._run_progress.time_s):
            return self._questions.forced or self._may("it is time to look again")
        return None

    def _may(self, trigger: str) -> Question:
        return Question(trigger=trigger, batch=self._batch)

    def _must(self, trigger: str) -> Question:
        return Question(trigger=trigger, batch=self._batch, mandatory=True)

    def _about_phase(self) -> Question | None:
        """The question about a phase that is near enough to prepare for; None: there is none."""
        level, plan = self._watch.detector.level, self._plan_history.now.plan
        phase = self._phases.near(
            self._run_progress.step,
            max(
                self._settings.cooldown_steps,
                LEAD_S / math.exp(level) if level is not None else 0.0,
            ),
        )
        if phase is None:
            return None
        batch = BatchShape(phase.global_batch, phase.seq_len)
        priced = self._prices.of(batch)
        cannot_go_on = not is_legal(plan, priced.config) or not has_room(
            plan, self._memory_watch.applied(priced)
        )
        return Question(
            trigger=f"the phase that begins at step {phase.first_step}",
            batch=batch,
            at_step=phase.steps_before,
            mandatory=cannot_go_on,
        )

    # Answers.

    def _answered(self, question: Question, observation: Observation) -> Decision | None:
        """Answer the question; None: the answer is not new, or a search is still running and the
        question stays open.
        """
        blocked = "" if question.mandatory else self._blocked(question)
        self._learn_level()
        observed = ObservedCluster(
            batch=question.batch,
            time_s=self._run_progress.time_s,
            conditions=self._watch.believed,
            normal=self._watch.normal,
            lost=self._lost,
            memory=self._memory_watch,
            recovered=self._watch.recovered,
        )
        options = [] if blocked else self._plan_options(question, observed)
        while options == [] and question.mandatory and self._memory_watch.settle_for_less():
            options = self._plan_options(question, observed)
        if options is None:
            return None
        if question.mandatory:
            self._questions.forced = question
        self._answering = question
        decision = self._noted(
            self._evaluator.weigh(
                question, options, observed, observation.readings, blocked=blocked
            )
        )
        self._questions.answer(is_switch=self._pending is not None)
        return decision

    def _blocked(self, question: Question) -> str:
        switch_limits = self._switch_limits
        if question.only is not None or switch_limits.too_many():
            return switch_limits.too_many()
        now, watch = self._plan_history.now, self._watch
        slowed = math.exp(
            self._prices.log_time(now.plan, self._batch, watch.conditions, now.without)
            - self._prices.log_time(now.plan, self._batch, watch.normal, now.without)
        )
        too_soon = switch_limits.too_soon(question.at_step or self._run_progress.step, slowed)
        if too_soon:
            self._questions.postpone(switch_limits.cool_until(slowed))
        return too_soon

    def _plan_options(
        self, question: Question, observed: ObservedCluster
    ) -> list[PlanOption] | None:
        """The plans that could be switched to; None: a search is still running."""
        if question.only is not None:
            return self._options.back(observed, question.only)
        return self._options.all(
            observed,
            self._plan_history.now,
            [*self._plan_history.plans, *self._tried],
            self._predictor.calibration(),
            mandatory=question.mandatory,
        )

    def _noted(self, decision: Decision) -> Decision | None:
        """Record the decision; None: it is the pending one, or keeps a plan after its trial."""
        if decision.action == "switch":
            is_old = self._pending is not None and (self._pending.plan, self._pending.at_step) == (
                decision.plan,
                decision.at_step,
            )
            if not is_old:
                assert decision.plan is not None
                self._pending, self._decided_s = decision, self._run_progress.time_s
                self._had_compiled = self._is_compiled(
                    decision.plan,
                    self._batch if self._answering is None else self._answering.batch,
                    decision.without,
                )
            return None if is_old else decision
        self._pending = None
        # When its quarantine ends, a plan that has failed may be the best one.
        self._questions.look_again(step=self._quarantine.first_end(self._run_progress.step))
        if decision.wait_s is not None:
            least_s = max(
                MIN_STEPS * (decision.step_time_s or 0.0),
                MIN_REWEIGH_WAIT * self._watch.regime_at(self._run_progress.time_s).elapsed_s,
            )
            self._questions.look_again(
                time_s=self._run_progress.time_s + max(decision.wait_s, least_s)
            )
        return None if decision.trigger == TRIAL else decision
