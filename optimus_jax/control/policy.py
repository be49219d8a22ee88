"""The switching policy: decides whether to switch plans, and to which one.

It is a pure function: the decision depends on its arguments only, and records its reasons.

A *candidate* is a plan that the run could switch to. Its *gain* is the time it would save until the
end of the *horizon*; its *cost* is the time the run stands still for the switch. The *switch
method* is the kind of switch, ordered from cheapest to most expensive. A switch must pass every
test: it saves at least `min_gain` of each step, saves more than it costs with at least
`min_probability`, saves several times its cost in expectation, and fits the budget. While the
duration of present conditions is unknown, a switch waits until it breaks even with a probability of
one half (ski rental).
"""

import math
import statistics
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from optimus_jax.config import ControlConfig
from optimus_jax.control.deciding.changes import Durations
from optimus_jax.plan import Plan
from optimus_jax.planning.search.explain import flags, seconds

SwitchMethod = Literal["executable", "rebalance", "remesh", "subset", "restart"]
SWITCH_METHODS: tuple[SwitchMethod, ...] = typing.get_args(SwitchMethod)
"""Cheapest first: `executable` moves no state, `rebalance` moves some layers to neighbours, the
others move more (docs/control.md)."""
DecisionAction = Literal["stay", "switch"]
CHOSEN = "chosen"
MIN_SHARE_OF_BEST_GAIN = 0.9
"""A cheaper switch method is preferred if its net gain is at least this share of the largest."""
MIN_BREAK_EVEN = 0.5
"""Required break-even probability of a switch while the duration of conditions is unknown."""
MIN_BREAK_EVEN_RESTART = 0.7
"""Required break-even probability of a restart. It is higher because undoing a restart takes as
long again, and excluded devices are not measured, so nothing shows when to undo it."""
REWEIGH_AFTER = 0.25
"""A switch that was rejected only for the duration of conditions is weighed again after this share
of the time that conditions have lasted so far."""
RETURN_GAIN_FACTOR = 2.0
"""Factor on the required gain of a plan that the run has left, while nothing has changed since."""
MAX_ALTERNATIVES = 5
"""Largest number of alternatives in the record of a decision."""
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True, kw_only=True)
class SwitchCandidate:
    """A plan that could be switched to; all times are predictions."""

    plan: Plan
    switch_method: SwitchMethod
    log_ratio: float
    """Expected logarithm of (its step time / the present one's), in present conditions."""
    deviation: float
    """Standard deviation of `log_ratio`."""
    log_ratio_after: float | None = None
    """Expected `log_ratio` once present conditions have ended; None: conditions return to what they
    were, so the present plan is better then."""
    cost_s: float
    """Expected delay by the switch, in seconds."""
    return_s: float = 0.0
    """Expected delay by switching back, in seconds."""
    prepare_s: float = 0.0
    """Expected time to prepare the switch. The run continues meanwhile; if conditions end
    first, the switch is dropped."""
    without: frozenset[int] = frozenset()
    """Ids of devices that the plan does not use."""
    usable_probability: float = 1.0
    """Probability that the conditions assumed by `log_ratio` hold."""
    barred: str = ""
    """Why the plan may not be used (not allowed, or it failed); empty: it may be used."""
    is_free: bool = False
    """Whether it is exempt from the budget, because it undoes a forced switch."""
    was_left: bool = False
    """Whether the run used this plan, left it, and nothing has changed since."""

    @property
    def gain(self) -> float:
        """Expected saving, as a share of the step time."""
        return _gain(self.log_ratio, self.deviation)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How long present conditions have lasted, and how long they are expected to last."""

    elapsed_s: float
    """Seconds since they began."""
    durations: Durations | None
    """Durations of regimes of this kind; None: these conditions are permanent."""

    def expected_s(self, horizon_s: float) -> float:
        """Expected remaining time of the regime within the horizon, in seconds."""
        return (
            horizon_s
            if self.durations is None
            else self.durations.expected_s(self.elapsed_s, horizon_s)
        )

    def survival(self, further_s: float) -> float:
        """Probability that the regime lasts `further_s` longer."""
        return 1.0 if self.durations is None else self.durations.survival(self.elapsed_s, further_s)

    def wait_s(self, further_s: float, probability: float = MIN_BREAK_EVEN) -> float:
        """Seconds until the regime, if it still holds then, has at least this probability of
        lasting another `further_s`.
        """
        return (
            0.0
            if self.durations is None
            else self.durations.wait_s(self.elapsed_s, further_s, probability)
        )


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The inputs of a decision."""

    step: int
    """Number of steps done."""
    trigger: str
    """What caused the decision, in words."""
    step_time_s: float
    """Expected step time under the present plan in present conditions."""
    horizon_s: float
    """Remaining time of the run, or of its phase, at that step time."""
    regime: Regime
    budget_s: float
    """Seconds that switches may still cost."""
    gain_multiplier: float = 1.0
    """Factor on the required ratio of gain to cost; above 1 if the run has switched back and
    forth."""
    blocked: str = ""
    """Why no switch is allowed now, whatever it gains; empty: switches are allowed."""
    mandatory: bool = False
    """The present plan cannot be kept."""
    at_step: int | None = None
    """Boundary that a switch is planned for; None: now."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The measurements and settings behind these values, for the record."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A candidate with its predicted gain and cost, as recorded in a decision."""

    plan: Plan
    switch_method: SwitchMethod
    step_time_s: float
    """Expected step time under this plan."""
    gain_s: float
    """Expected saving until the horizon, before costs."""
    cost_s: float
    """Expected delay by the switch, and by switching back where conditions may end."""
    probability: float
    """Probability that it saves more than it costs."""
    verdict: str
    """`chosen`, or the reason against it."""

    def as_json(self) -> dict[str, Any]:
        """One entry of the record."""
        return {
            "plan": self.plan.digest,
            "flags": flags(self.plan),
            "switch_method": self.switch_method,
            "step_time_s": _rounded(self.step_time_s),
            "gain_s": _rounded(self.gain_s),
            "cost_s": _rounded(self.cost_s),
            "probability": round(self.probability, 3),
            "verdict": self.verdict,
        }


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision with its reasons.

    A `stay` that comes while a switch is being prepared withdraws it.
    """

    step: int
    """Number of steps done when it was made."""
    action: DecisionAction
    why: str
    """The reason, in one sentence."""
    plan: Plan | None = None
    """The plan to switch to; None: stay."""
    switch_method: SwitchMethod | None = None
    """The kind of switch."""
    at_step: int | None = None
    """The switch is made at the boundary after this step, and prepared before; None: as soon as it
    is prepared."""
    without: frozenset[int] = frozenset()
    """Ids of devices that `plan` must not use."""
    mandatory: bool = False
    """The run cannot continue, or not for long, under the present plan."""
    trigger: str = ""
    """What caused the decision, in words."""
    step_time_s: float | None = None
    """Expected step time under the present plan in present conditions."""
    wait_s: float | None = None
    """Seconds after which a switch that was rejected only for the duration of conditions has to be
    weighed again; None: there is none."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The measurements and settings behind the decision, by name; None: unknown."""
    alternatives: tuple[Alternative, ...] = ()
    """The candidates that were weighed, best first."""

    def as_json(self) -> dict[str, Any]:
        """The content of a `decision` event in events.jsonl, without its step and time."""
        return {
            "action": self.action,
            "why": self.why,
            "trigger": self.trigger,
            "plan": self.plan and self.plan.digest,
            "switch_method": self.switch_method,
            "at_step": self.at_step,
            "without": sorted(self.without),
            "mandatory": self.mandatory,
            "step_time_s": self.step_time_s and _rounded(self.step_time_s),
            "wait_s": self.wait_s and _rounded(self.wait_s),
            "inputs": {
                name: _rounded(value) if isinstance(value, float) else value
                for name, value in self.inputs.items()
            },
            "alternatives": [each.as_json() for each in self.alternatives],
        }


def decide(
    situation: Situation, candidates: Sequence[SwitchCandidate], settings: ControlConfig
) -> Decision:
    """Stay, or switch to one of the candidates. A pure function of its arguments."""
    if situation.mandatory:
        return _move_away(situation, candidates)
    weighed = sorted(
        (_weigh(situation, each, settings) for each in candidates), key=lambda each: -each.net_s
    )
    passed = [] if situation.blocked else [each for each in weighed if not each.objection]
    best = min(
        [each for each in passed if each.net_s >= MIN_SHARE_OF_BEST_GAIN * passed[0].net_s],
        key=lambda each: SWITCH_METHODS.index(each.candidate.switch_method),
        default=None,
    )
    if best is None:
        waits = [each.wait_s for each in weighed if each.wait_s is not None]
        return _decision(
            situation,
            weighed,
            None,
            why=_why_stay(situation, weighed),
            wait_s=min(waits, default=None),
        )
    if len(passed) > 1 and best is not passed[0]:
        return _decision(
            situation,
            weighed,
            best,
            why=(
                f"{_why_switch(situation, best)}; a cheaper switch than the best plan's gains about"
                " as much"
            ),
        )
    return _decision(situation, weighed, best, why=_why_switch(situation, best))


@dataclass(frozen=True, kw_only=True)
class _Weighed:
    """A candidate with its expected gain and cost."""

    candidate: SwitchCandidate
    gain_s: float
    cost_s: float
    probability: float
    objection: str
    """The first test that it fails; empty: it passes all."""
    wait_s: float | None = None
    """Seconds to wait, if it fails only for the duration of conditions."""

    @property
    def net_s(self) -> float:
        return self.gain_s - self.cost_s


def _weigh(situation: Situation, candidate: SwitchCandidate, settings: ControlConfig) -> _Weighed:
    regime = situation.regime
    if (
        candidate.log_ratio_after is not None
        and _gain(candidate.log_ratio_after, candidate.deviation) > settings.min_gain
    ):
        # It is better now and afterwards, so it does not matter how long present conditions last.
        regime = replace(regime, durations=None)
        candidate = replace(
            candidate, log_ratio=max(candidate.log_ratio, candidate.log_ratio_after)
        )
    unprepared = regime
    if candidate.prepare_s and situation.at_step is None:
        # Nothing is gained while it is prepared. If conditions end before it is ready, it is
        # withdrawn; so what counts is how long conditions last, given that they last until then.
        situation = replace(
            situation, horizon_s=max(0.0, situation.horizon_s - candidate.prepare_s)
        )
        regime = (
            regime
            if regime.durations is None
            else replace(regime, elapsed_s=regime.elapsed_s + candidate.prepare_s)
        )
    left_s = max(0.0, situation.horizon_s - candidate.cost_s)
    lasting_s = regime.expected_s(left_s)
    # Switching back costs time only if conditions end before the run does.
    back_s = (
        0.0 if regime.durations is None else (1.0 - regime.survival(left_s)) * candidate.return_s
    )
    gain_s, cost_s = (
        candidate.usable_probability * candidate.gain * lasting_s,
        candidate.cost_s + back_s,
    )
    probability = candidate.usable_probability * _probability(candidate, cost_s, lasting_s)
    earned_s = candidate.cost_s / candidate.gain if candidate.gain > 0 else math.inf
    unsure_s = unprepared.wait_s(candidate.prepare_s)
    objection, wait_s = _objection(
        replace(situation, regime=regime),
        candidate,
        settings,
        gain_s,
        cost_s,
        probability,
        earned_s,
        unsure_s,
    )
    return _Weighed(
        candidate=candidate,
        gain_s=gain_s,
        cost_s=cost_s,
        probability=probability,
        objection=objection,
        wait_s=wait_s,
    )


def _gain(log_ratio: float, deviation: float) -> float:
    """Expected share of a step's time that is saved; log_ratio is normally distributed."""
    return 1.0 - math.exp(min(50.0, log_ratio + deviation**2 / 2))


def _probability(candidate: SwitchCandidate, cost_s: float, lasting_s: float) -> float:
    """Probability that it saves more than it costs while conditions last."""
    if cost_s >= lasting_s:
        return 0.0
    enough = math.log1p(-cost_s / lasting_s)
    if candidate.deviation <= 0:
        return float(candidate.log_ratio < enough)
    return _NORMAL.cdf((enough - candidate.log_ratio) / candidate.deviation)


def _objection(
    situation: Situation,
    candidate: SwitchCandidate,
    settings: ControlConfig,
    gain_s: float,
    cost_s: float,
    probability: float,
    earned_s: float,
    unsure_s: float,
) -> tuple[str, float | None]:
    """The first test that is not passed (empty: none), and the seconds to wait if only the duration
    of conditions speaks against the switch.
    """
    least = settings.min_gain * (RETURN_GAIN_FACTOR if candidate.was_left else 1.0)
    # The longer conditions have lasted, the longer they are expected to last. So a switch that
    # fails only for their duration may pass later.
    later_s = (
        None if situation.regime.durations is None else REWEIGH_AFTER * situation.regime.elapsed_s
    )
    if candidate.barred:
        return candidate.barred, None
    if candidate.gain <= least:
        return f"saves {candidate.gain:.1%} of a step; at least {least:.0%} is required", None
    # If conditions may end, switching back has to be affordable too, or the run would be stranded.
    needed_s = candidate.cost_s + (
        0.0 if situation.regime.durations is None else candidate.return_s
    )
    if needed_s > situation.budget_s and not candidate.is_free:
        return (
            (
                f"costs {seconds(needed_s)}; the budget for switches has"
                f" {seconds(max(0.0, situation.budget_s))} left"
                f" (controller.budget_share={settings.budget_share:g})"
            ),
            later_s,
        )
    if earned_s >= situation.horizon_s - candidate.cost_s:
        if situation.horizon_s <= 0:
            return (
                f"takes {seconds(candidate.prepare_s)} to prepare; the run ends before that",
                None,
            )
        return (
            (
                f"costs {seconds(cost_s)}; it would not break even in the"
                f" {seconds(situation.horizon_s)} of the run that are left then"
            ),
            None,
        )
    if candidate.usable_probability < settings.min_probability:
        return (
            (
                "saves time only if its devices have recovered"
                f" (probability {candidate.usable_probability:.2f})"
            ),
            None,
        )
    if unsure_s > 0:
        return (
            (
                f"conditions may end within the {seconds(candidate.prepare_s)} of preparing it;"
                f" worth it if they last {seconds(unsure_s)} longer"
            ),
            unsure_s,
        )
    wait_s = situation.regime.wait_s(
        earned_s, MIN_BREAK_EVEN_RESTART if candidate.switch_method == "restart" else MIN_BREAK_EVEN
    )
    if wait_s > 0:
        return (
            (
                f"conditions may end before it breaks even, after {seconds(earned_s)}; worth it"
                f" if they last {seconds(wait_s)} longer"
            ),
            wait_s,
        )
    if probability < settings.min_probability:
        return (
            (
                f"saves time with probability {probability:.2f}; at least"
                f" {settings.min_probability:g} is required"
            ),
            later_s,
        )
    least_times = settings.gain_over_cost * situation.gain_multiplier
    if gain_s < max(cost_s, least_times * candidate.cost_s):
        return (
            (
                f"saves {seconds(gain_s)} at a cost of {seconds(candidate.cost_s)}; at least"
                f" {least_times:.2g} times its cost is required"
            ),
            later_s,
        )
    return "", None


def _move_away(situation: Situation, candidates: Sequence[SwitchCandidate]) -> Decision:
    """Decide when the present plan cannot be kept: take the plan with which the run, including the
    switch, ends soonest.
    """

    def finished_s(candidate: SwitchCandidate) -> float:
        return candidate.cost_s + situation.horizon_s * math.exp(min(50.0, candidate.log_ratio))

    ordered = sorted(candidates, key=lambda each: (bool(each.barred), finished_s(each)))
    weighed = [
        _Weighed(
            candidate=each,
            gain_s=situation.horizon_s * each.gain,
            cost_s=each.cost_s,
            probability=1.0,
            objection=each.barred,
        )
        for each in ordered
    ]
    if not weighed:
        return _decision(
            situation,
            [],
            None,
            why=f"{situation.trigger}; no other possible plan is known",
        )
    best = weighed[0]
    if best.objection:
        return _decision(
            situation,
            weighed,
            None,
            why=(
                f"{situation.trigger}; no other possible plan may be used:"
                f" {best.candidate.plan.axes} {best.objection}"
            ),
        )
    return _decision(
        situation,
        weighed,
        best,
        why=(
            f"{situation.trigger}: {best.candidate.plan.axes} is expected to finish first of"
            f" {len(weighed)} possible plans"
        ),
    )


def _why_switch(situation: Situation, best: _Weighed) -> str:
    return (
        f"{situation.trigger}: {best.candidate.plan.axes} is expected to save"
        f" {best.candidate.gain:.0%} of each step, {seconds(best.gain_s)} in all for a switch of"
        f" {seconds(best.cost_s)}, with probability {best.probability:.2f}"
    )


def _why_stay(situation: Situation, weighed: Sequence[_Weighed]) -> str:
    if situation.blocked:
        return f"{situation.trigger}: {situation.blocked}"
    if not weighed:
        return f"{situation.trigger}: no other usable plan is known"
    # Name the test that the candidate with the largest gain fails; if none has a gain, the present
    # plan is the best.
    best = max(weighed, key=lambda each: (not each.candidate.barred, each.gain_s))
    if best.candidate.gain <= 0:
        return f"{situation.trigger}: no other plan is expected to be faster"
    return f"{situation.trigger}: {best.candidate.plan.axes} {best.objection}"


def _decision(
    situation: Situation,
    weighed: Sequence[_Weighed],
    best: _Weighed | None,
    *,
    why: str,
    wait_s: float | None = None,
) -> Decision:
    chosen = best and best.candidate
    shown = sorted(weighed, key=lambda each: each is not best)[:MAX_ALTERNATIVES]
    return Decision(
        step=situation.step,
        action="switch" if chosen else "stay",
        why=why,
        plan=chosen and chosen.plan,
        switch_method=chosen and chosen.switch_method,
        at_step=situation.at_step if chosen else None,
        without=chosen.without if chosen else frozenset(),
        mandatory=situation.mandatory,
        trigger=situation.trigger,
        step_time_s=situation.step_time_s,
        wait_s=wait_s,
        inputs=situation.inputs,
        alternatives=tuple(_shown(situation, each, each is best) for each in shown),
    )


def _shown(situation: Situation, each: _Weighed, is_best: bool) -> Alternative:
    verdict = (
        CHOSEN
        if is_best
        else each.objection or (situation.blocked or "another plan has a larger net gain")
    )
    return Alternative(
        plan=each.candidate.plan,
        switch_method=each.candidate.switch_method,
        step_time_s=situation.step_time_s * math.exp(min(50.0, each.candidate.log_ratio)),
        gain_s=each.gain_s,
        cost_s=each.cost_s,
        probability=each.probability,
        verdict=verdict,
    )


def _rounded(number: float) -> float:
    """The number with four significant digits: no value here is known more exactly."""
    return float(f"{number:.4g}")
