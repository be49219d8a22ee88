"""The advisor: what is known of a run's conditions and plans, and decisions based on that.

Real and simulated runs share it. What there is to decide, and when, is in deciding/questions.py.
When a question is asked again, and what becomes of a decision, is the state machine's part
(machine.py).
"""

import math
import statistics
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from optimus_jax.config import ControlConfig
from optimus_jax.config.phases import TrainingPhase
from optimus_jax.control import constants
from optimus_jax.control.deciding.account import Account
from optimus_jax.control.deciding.candidate_evaluator import CandidateEvaluator
from optimus_jax.control.deciding.candidates import Searcher, Searches, is_legal
from optimus_jax.control.deciding.conditions import Conditions, claims
from optimus_jax.control.deciding.experience import Experience, Known, Level
from optimus_jax.control.deciding.memory_watch import MemoryWatch
from optimus_jax.control.deciding.options import ObservedCluster, Options, PlanInUse, PlanOption
from optimus_jax.control.deciding.phases import Phases
from optimus_jax.control.deciding.plan_history import PlanHistory
from optimus_jax.control.deciding.prices import Prices, setting
from optimus_jax.control.deciding.questions import Questions
from optimus_jax.control.deciding.run_progress import RunProgress
from optimus_jax.control.deciding.step_levels import sane
from optimus_jax.control.deciding.switch_costs import CostModel, SwitchCosts
from optimus_jax.control.deciding.watch import Watch
from optimus_jax.control.learnt_file import LearntFile
from optimus_jax.control.policy import Decision
from optimus_jax.control.predictor import Predictor
from optimus_jax.control.runtime import Policy
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_state import (
    BatchChanged,
    Decided,
    Event,
    News,
    PendingSwitch,
    Question,
    SwitchState,
)
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan
from optimus_jax.planning.search.search import Pricing
from optimus_jax.robust import deviation_from


class Advisor(Policy):
    """Turns observations into decisions.

    Args:
      pricing: the run's config, cluster and believed rates, from which step times are predicted.
      plan: the plan that the run begins with.
      num_steps: number of steps of the whole run.
      settings: thresholds of the controller.
      phases: batches planned ahead, in order; empty: those of pricing.config throughout.
      searcher: finds candidates; None: planning.search.search, called directly.
      learnt_path: JSON file with what was learnt about this hardware; None: nothing is kept.
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
        phases: Sequence[TrainingPhase] = (),
        searcher: Searcher | None = None,
        learnt_path: Path | None = None,
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
            RunProgress(),
        )
        self._phases = Phases(phases, num_steps)
        self._options = Options(
            self._prices,
            Searches(searcher),
            keeps_devices=keeps_devices,
            allow=settings.allowed_axes,
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
        learners = {
            "evidence": self._predictor,
            "switch_costs": self._costs,
            "disturbances_s": self._watch.regimes,
        }
        self._learnt = None if learnt_path is None else LearntFile(learnt_path, learners)
        if self._learnt is not None:
            self._learnt.read()
        self._batch = self._prices.first_batch
        self._prices.log_time(plan, self._batch, Conditions())
        self._plan_history = PlanHistory(
            plan, num_hosts=self._cluster.num_hosts, num_executables=settings.executables
        )
        self._experience = Experience(self._predictor, self._prices)
        self._account = Account[PlanInUse](settings.budget_share)
        self._evaluator = CandidateEvaluator(
            run_progress=self._run_progress,
            plan_history=self._plan_history,
            phases=self._phases,
            prices=self._prices,
            predictor=self._predictor,
            watch=self._watch,
            costs=self._costs,
            account=self._account,
            settings=settings,
            is_compiled=self._is_compiled,
        )
        self._tried = tuple(tried_s)
        for each, time_s in tried_s.items():
            self._experience.learn(
                Known(plan=each, batch=self._batch, conditions=Conditions(), regime=0),
                (math.log(time_s), constants.TRIED_PLAN_LOG_STD, 1),
                0,
            )
        self._questions = Questions(
            run_progress=self._run_progress,
            plan_history=self._plan_history,
            phases=self._phases,
            prices=self._prices,
            watch=self._watch,
            memory_watch=self._memory_watch,
            cooldown_steps=settings.cooldown_steps,
        )

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

    def is_puzzled(self, since_s: float) -> bool:
        """Whether the newest steps are unlike those in the conditions that are believed, or have
        changed since `since_s`, on the run's clock, and it is not known why.
        """
        changed_since = self.changed_s is not None and self.changed_s > since_s
        return self._watch.is_suspicious or (changed_since and self._watch.wants_probe)

    @property
    def steps_alike(self) -> int:
        """Number of newest steps under the plan that were done in present conditions: a new plan's
        first steps are compared with these only.
        """
        return self._watch.steps_alike

    @property
    def slowed(self) -> float:
        """Expected step time in present conditions over that in normal ones; that of steps is known
        also where nobody knows the conditions.
        """
        now, watch = self._plan_history.now, self._watch
        believed = self._prices.log_time(
            now.plan, self._batch, watch.conditions, now.without
        ) - self._prices.log_time(now.plan, self._batch, watch.normal, now.without)
        return math.exp(max(believed, watch.unexplained))

    def notices(self, observation: Observation, state: SwitchState) -> Sequence[Event]:
        """Record an observation; returns what is new."""
        self._run_progress.observe(observation)
        is_new_batch = self._enter_batch(observation)
        news = self._watched(observation)
        memory = self._memory_watch.observe(
            observation, self._prices.memory_share(self._plan_history.now.plan, self._batch)
        )
        self._pay(len(observation.step_times_s))
        questions = self._questions.new(
            observation,
            is_new_batch=is_new_batch,
            conditions=news,
            memory=memory,
            pending=state.pending,
        )
        return [
            *[BatchChanged()] * is_new_batch,
            *[News(question=each) for each in questions],
        ]

    def answer(
        self,
        question: Question,
        observation: Observation,
        state: SwitchState,
        *,
        blocked: Callable[[Question], str],
    ) -> Decided | None:
        """Answer the question; None: a search is still running.

        Args:
          question: what to decide.
          observation: the newest readings.
          state: the state of the run.
          blocked: says why no switch is allowed as an answer to a question; empty: one is.
        """
        self._learn_level()
        batch = question.batch or self._batch
        if question.mandatory and not self._questions.has_to_move(batch, question.at_step):
            again = "the run can keep its plan again"
            question = replace(question, trigger=again, mandatory=False)
        why_not = blocked(question)
        observed = ObservedCluster(
            batch=batch,
            time_s=self._run_progress.time_s,
            conditions=self._watch.believed,
            normal=self._watch.normal,
            lost=self._questions.lost,
            memory=self._memory_watch,
            recovered=self._watch.recovered,
        )
        options = [] if why_not else self._plan_options(question, observed)
        while options == [] and question.mandatory and self._memory_watch.settle_for_less():
            options = self._plan_options(question, observed)
        if options is None:
            return None
        decision = self._evaluator.weigh(
            question, options, observed, observation.readings, state, blocked=why_not
        )
        if decision.plan is not None:
            is_compiled = self._is_compiled(decision.plan, batch, decision.without)
            return Decided(decision=decision, is_compiled=is_compiled, steps_alike=self.steps_alike)
        review_s = math.inf
        if decision.wait_s is not None:
            least_s = constants.MIN_LEVEL_STEPS * (decision.step_time_s or 0.0)
            review_s = self._run_progress.time_s + max(decision.wait_s, least_s)
        return Decided(decision=decision, review_s=review_s)

    def switched(
        self, plan: Plan, costs_s: Mapping[str, float], made: PendingSwitch | None = None
    ) -> None:
        """Record that the run is now under `plan`.

        Args:
          plan: the new plan.
          costs_s: delay of the run by phase of the switch, in seconds, without its first steps.
          made: the decision behind it; None: nobody decided it.
        """
        decided = made and made.decision
        by_choice = decided is not None and not decided.mandatory
        # A plan that nobody decided on uses the devices of the plan before, if they are as many,
        # or those that are available.
        now = self._plan_history.now
        if decided:
            without = decided.without
        elif plan.num_devices == now.plan.num_devices:
            without = now.without
        else:
            is_whole = plan.num_devices == self._cluster.num_devices
            without = frozenset() if is_whole else self._questions.lost
        self._learn_level()
        self._learn_cost(plan, without, costs_s, made)
        self._account.charge(sum(costs_s.values()) if by_choice else 0.0)
        if decided is None or not by_choice:
            self._account.forget()
        else:
            self._account.left(now, *self._left(decided))
        self._plan_history.moved(PlanInUse(plan=plan, without=without))
        self._restart(on_trial=True)
        if self._learnt is not None:  # a run that is killed has learnt until here
            self._learnt.write()

    def _left(self, decision: Decision) -> tuple[Hashable, float | None]:
        """The circumstances in which this decision leaves the plan, and the plan's level there: the
        one seen, or the one that was expected if few steps or none have shown it.
        """
        level, batch = self._watch.detector.level, self._batch
        if decision.at_step is not None and (phase := self._phases.beginning(decision.at_step)):
            level, batch = None, BatchShape(phase.global_batch, phase.seq_len)
        if level is None and decision.step_time_s:
            level = math.log(decision.step_time_s)
        return self._circumstances_of(batch), level

    def _pay(self, num_steps: int) -> None:
        """Pay for switches with what these steps have saved."""
        watch = self._watch
        # What nobody has explained would slow other plans too, by as much as nobody knows.
        is_explained = not watch.regime
        self._account.stepped(
            self._circumstances_of(self._batch),
            watch.detector.level,
            num_steps,
            used=self._plan_history.now,
            expected=(lambda used: self._expected_of(used, watch.believed))
            if is_explained
            else None,
        )

    def _learn_cost(
        self,
        plan: Plan,
        without: frozenset[int],
        costs_s: Mapping[str, float],
        made: PendingSwitch | None,
    ) -> None:
        switch_method, compiled = (
            self._plan_history.switch_method(plan, without),
            # What nobody decided is entered once it is compiled.
            made.was_compiled if made else True,
        )
        tax_s = costs_s.get("compile_tax_s", 0.0)
        if (
            made is not None
            and made.decision.at_step is None
            and self._costs.prepare_s(switch_method, compiled=compiled)
        ):
            beside_s = self._run_progress.time_s - made.decided_s - max(0.0, made.tax_s)
            self._costs.prepared(max(0.0, beside_s))
        # A link that is slow now has made the move slow. The way back, once the link has recovered,
        # will not be slow.
        self._costs.learn(
            switch_method,
            self._plan_history.now.plan,
            plan,
            self._watch.conditions.applied(self._prices.of(self._batch)),
            delay_s=max(0.0, sum(costs_s.values()) - tax_s),
            compile_tax_s=None if compiled or made is None else tax_s,
        )

    def failed(self, plan: Plan, why: str, *, trial_s: Sequence[float] | None = None) -> None:
        """Record that the run cannot use `plan`, after these steps if it was taken back."""
        if trial_s is not None:
            self._learn_trial(trial_s)
            self._plan_history.taken_back()
            self._watch.confirm(self._run_progress.time_s)
            self._watch.go_back(self._processes_in_use)
            self._memory_watch.restart()

    def _learn_trial(self, times_s: Sequence[float]) -> None:
        """Learn from the steps of a plan that is taken back, so that it is not tried again and
        again. The first one is not typical. Steps that take so much more or less time than expected
        that conditions must be others say nothing about the plan; nor do they if more steps of it
        are known in these conditions.
        """
        logs, conditions = [math.log(each) for each in sane(times_s[1:])], self._watch.conditions
        known = self._experience.num_steps(self._known(conditions, self._watch.regime))
        if len(logs) < constants.NUM_COMPARED_STEPS or known > len(logs):
            return
        level = statistics.median(logs)
        if abs(level - self._expected_log_time(conditions)) > constants.MAX_PLAN_DEVIATION:
            return
        noise = max(constants.MIN_STEP_NOISE, deviation_from(level, logs))
        self._learn(conditions, self._watch.regime, (level, noise, len(logs)))

    def charge(self, time_s: float) -> None:
        """Charge the account for time beyond switches: first steps, or failed attempts."""
        self._account.charge(time_s)

    def save(self) -> None:
        """Save what was learnt about this hardware for later runs."""
        if self._learnt is not None:
            self._learn_level()
            self._learnt.write()

    # Recording observations.

    def _circumstances_of(self, batch: BatchShape) -> tuple[str, int]:
        """What step times depend on besides the plan and its devices: the batch, the conditions,
        those of processes that are left out included, and the regime. Of slow processes the factor
        of the slowest counts, not which one it is.
        """
        return setting(batch, self._watch.believed), self._watch.regime

    def _enter_batch(self, observation: Observation) -> bool:
        """Note the batch of the observation; returns whether it is a new one."""
        batch = BatchShape(observation.global_batch, observation.seq_len)
        if batch == self._batch:
            return False
        self._learn_level()
        self._batch = batch
        first = self._account.first_left
        if first and not is_legal(first.plan, self._prices.of(batch).config):
            self._account.forget_first()
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
            self._otherwise_log_time,
        )
        if watch.was_so:
            self._experience.relabel(watch.was_so)
            self._predictor.forget_earlier_runs()
        elif before != (watch.conditions, watch.regime):
            if watch.since_switch:
                self._experience.forget(self._known(*before))
                if level is not None:
                    self._learn(watch.conditions, watch.regime, level)
            elif level is not None:
                self._learn(*before, level)
            if before[1] and before[1] != watch.regime:
                self._predictor.forget_regime(before[1])
        return news

    def _expected_log_time(self, conditions: Conditions) -> float:
        """Logarithm of the present plan's step time in these conditions, by all that was learnt."""
        return self._expected_of(self._plan_history.now, conditions)

    def _otherwise_log_time(self, conditions: Conditions) -> float:
        """The same without what was learnt of this plan in the conditions that are believed."""
        now, watch = self._plan_history.now, self._watch
        asked, learnt = (
            self._prices.query_of(now.plan, self._batch, each, now.without)
            for each in (conditions, watch.conditions)
        )
        return float(self._predictor.predict([asked], without=learnt).mean[0])

    def _expected_of(self, used: PlanInUse, conditions: Conditions) -> float:
        asked = self._prices.query_of(used.plan, self._batch, conditions, used.without)
        return float(self._predictor.predict([asked]).mean[0])

    def _level(self) -> Level | None:
        """Level of step times under the plan: logarithm, its noise, and number of steps.

        None: there are fewer steps than in a trial, or they are of other conditions than those
        believed.
        """
        detector = self._watch.detector
        return (
            None
            if detector.level is None
            or detector.count < self._settings.canary_steps
            or self._watch.is_contradicted
            else (detector.level, detector.noise, detector.count)
        )

    def _learn_level(self) -> None:
        if (level := self._level()) is not None:
            self._learn(self._watch.conditions, self._watch.regime, level)

    def _learn(self, conditions: Conditions, regime: int, level: Level) -> None:
        self._experience.learn(self._known(conditions, regime), level, self._run_progress.step)

    def _known(self, conditions: Conditions, regime: int) -> Known:
        """The names of a level of the present plan."""
        return Known(
            plan=self._plan_history.now.plan,
            batch=self._batch,
            conditions=conditions,
            regime=regime,
            without=self._plan_history.now.without,
        )

    def _restart(self, *, on_trial: bool = False) -> None:
        """Forget step times and memory readings of the plan that the run has left."""
        is_known = on_trial and not self._watch.regime
        expected = self._expected_log_time(self._watch.believed) if is_known else None
        self._watch.restart(self._processes_in_use, on_trial=on_trial, expected=expected)
        self._memory_watch.restart()

    @property
    def _processes_in_use(self) -> Collection[int]:
        now = self._plan_history.now
        return self._prices.processes(now.plan.num_devices, now.without)

    def _plan_options(
        self, question: Question, observed: ObservedCluster
    ) -> list[PlanOption] | None:
        """The plans that could be switched to; None: a search is still running."""
        return self._options.all(
            observed,
            self._plan_history.now,
            [*self._plan_history.plans, *self._tried],
            self._predictor.calibration(),
            mandatory=question.mandatory,
        )
