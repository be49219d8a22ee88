"""Compares each candidate plan with the present one: step time, switch cost and uncertainty."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.control import policy
from optimus_jax.control.deciding.account import Account
from optimus_jax.control.deciding.candidates import is_allowed
from optimus_jax.control.deciding.factors import on_grid, process_of
from optimus_jax.control.deciding.options import ObservedCluster, PlanInUse, PlanOption
from optimus_jax.control.deciding.phases import Phases
from optimus_jax.control.deciding.plan_history import PlanHistory
from optimus_jax.control.deciding.prices import Prices, query
from optimus_jax.control.deciding.run_progress import RunProgress
from optimus_jax.control.deciding.switch_costs import CostModel
from optimus_jax.control.deciding.watch import Watch
from optimus_jax.control.policy import Decision, Situation, SwitchCandidate
from optimus_jax.control.predictor import Predictor
from optimus_jax.control.signals import SignalSummary
from optimus_jax.control.switch_state import Question, SwitchState
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan


@dataclass(frozen=True, kw_only=True)
class CandidateEvaluator:
    """Weighs candidates by the state of the run. It reads that state and never changes it."""

    run_progress: RunProgress
    plan_history: PlanHistory
    phases: Phases
    prices: Prices
    predictor: Predictor
    watch: Watch
    costs: CostModel
    account: Account[PlanInUse]
    settings: ControlConfig
    is_compiled: Callable[[Plan, BatchShape, frozenset[int]], bool]
    """Whether the plan's executable for this batch shape, without these devices, is compiled."""

    def weigh(
        self,
        question: Question,
        options: Sequence[PlanOption],
        observed: ObservedCluster,
        readings: Mapping[str, SignalSummary],
        state: SwitchState,
        *,
        blocked: str,
    ) -> Decision:
        """Answer a question with a decision.

        Args:
          question: what to decide.
          options: the candidate plans, each with the devices that it would use.
          observed: the usable devices and the present conditions.
          readings: the newest signal readings, recorded with the decision.
          state: says which plans have failed, and whether the run has switched before.
          blocked: why no switch may be made; empty: one may.
        """
        watch, now = self.watch, self.plan_history.now
        queries = [
            self.prices.query_of(
                now.plan, observed.batch, watch.conditions, now.without, watch.regime
            ),
            *[
                query(each.plan, each.devices.pricing, each.devices.setting, watch.regime)
                for each in options
            ],
        ]
        if watch.is_disturbed:  # the same once conditions have ended
            queries += [
                self.prices.query_of(now.plan, observed.batch, watch.normal, now.without),
                *[
                    query(each.plan, each.devices.normal, each.devices.normal_setting)
                    for each in options
                ],
            ]
        forecast, after = self.predictor.predict(queries), len(options) + 1
        # A mandatory switch goes to a mesh on the user's list if possible, else to any mesh.
        allow = (
            self.settings.allowed_axes
            if not question.mandatory
            or any(is_allowed(option.plan, self.settings.allowed_axes) for option in options)
            else ()
        )
        # Once conditions have ended, the run may go back to a plan that it had before.
        earlier = [
            index
            for index, option in enumerate(options, start=1)
            if option.plan in self.plan_history.plans and option.devices.without == now.without
        ]

        def usual(candidate: int | None = None) -> int:
            """The fastest plan that the run can have then without a switch to the candidate."""
            if not watch.is_disturbed:
                return 0
            others = [after, *[after + index for index in earlier if index != candidate]]
            return min(others, key=lambda index: float(forecast.mean[index]))

        candidates = [
            self._candidate(
                option,
                observed,
                state,
                allow,
                *forecast.ratio(index, 0),
                forecast.ratio(after + index, usual(index))[0] if watch.is_disturbed else None,
                forecast.step_time_s(usual(index)) / forecast.step_time_s(0),
            )
            for index, option in enumerate(options, start=1)
        ]
        step_time_s, usual_s = forecast.step_time_s(0), forecast.step_time_s(usual())
        steps_left = self.phases.steps_left(
            self.run_progress.step if question.at_step is None else question.at_step
        )
        tokens = observed.batch.global_batch * observed.batch.seq_len
        tokens_left = self.phases.tokens_left(self.run_progress.step, tokens)
        situation = Situation(
            step=self.run_progress.step,
            trigger=question.trigger,
            step_time_s=step_time_s,
            horizon_s=steps_left * step_time_s,
            regime=watch.regime_at(observed.time_s),
            blocked=blocked,
            trial_s=(self.settings.canary_steps + 1) * step_time_s,  # and the first step
            account=self.account.allowance,
            whole_s=self.run_progress.whole_s(
                watch.regime_at(self.run_progress.time_s),
                step_time_s,
                usual_s,
                tokens_left / tokens,
            ),
            mandatory=question.mandatory,
            at_step=question.at_step,
            until_s=self._until_s(question, step_time_s),
            is_unexplained=watch.regime != 0,
            has_switched=state.num_switches > 0,
            under_plan_s=(state.step - state.entered_step) * step_time_s,
            inputs=self._inputs(observed, readings, forecast.interval_s(0), steps_left),
        )
        return policy.decide(situation, candidates)

    def _until_s(self, question: Question, step_time_s: float) -> float:
        """Time until the boundary that the question is about; 0: it is about now."""
        if question.at_step is None:
            return 0.0
        level = self.watch.detector.level
        num_steps = max(0, question.at_step - self.run_progress.step)
        return num_steps * (step_time_s if level is None else math.exp(level))

    def _candidate(
        self,
        option: PlanOption,
        observed: ObservedCluster,
        state: SwitchState,
        allow: Sequence[AxisSizes],
        log_ratio: float,
        deviation: float,
        log_ratio_after: float | None,
        usual: float,
    ) -> SwitchCandidate:
        plan, devices, old = option.plan, option.devices, self.plan_history.now.plan
        switch_method, compiled = (
            self.plan_history.switch_method(plan, devices.without),
            self.is_compiled(plan, observed.batch, devices.without),
        )
        is_listed = is_allowed(plan, allow)
        return SwitchCandidate(
            plan=plan,
            switch_method=switch_method,
            log_ratio=log_ratio,
            deviation=deviation,
            log_ratio_after=log_ratio_after,
            usual=usual,
            without=devices.without,
            usable_probability=devices.probability,
            barred=state.why_not(plan)
            if is_listed
            else "not on the list of meshes that may be switched to",
            cost_s=self.costs.expected_s(
                switch_method, old, plan, devices.pricing, compiled=compiled
            ),
            prepare_s=self.costs.prepare_s(switch_method, compiled=compiled),
            return_s=self.costs.expected_s(switch_method, plan, old, devices.normal, compiled=True),
        )

    def _inputs(
        self,
        observed: ObservedCluster,
        readings: Mapping[str, SignalSummary],
        interval_s: tuple[float, float],
        steps_left: int,
    ) -> dict[str, Any]:
        watch = self.watch
        values = {
            name: reading.value
            for name, reading in sorted(readings.items())
            if reading.quality in ("good", "few")
            and reading.value is not None
            and math.isfinite(reading.value)
            and (process_of(name) is None or on_grid(reading.value) != 1)
        }
        return {
            "plan": self.plan_history.now.plan.digest,
            "global_batch": observed.batch[0],
            "seq_len": observed.batch[1],
            "step_time_low_s": interval_s[0],
            "step_time_high_s": interval_s[1],
            "conditions": watch.conditions.as_json(),
            "unexplained": watch.regime != 0,
            "rejected_signals": sorted(watch.rejected_signals),
            "held_s": watch.regime_at(observed.time_s).elapsed_s,
            "steps_left": steps_left,
            "spent_s": self.account.spent_s,
            "memory_taken": observed.memory.taken,
            "lost_devices": sorted(observed.lost),
            **values,
        }
