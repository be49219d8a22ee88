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
from optimus_jax.control.deciding.value import Bet, Regime, Worth, worth
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
import os
SIGMA = float(os.environ.get("SIGMA", "1"))
MARGIN = float(os.environ.get("MARGIN", "0"))
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
        return 1.0 - math.exp(min(50.0, self.log_ratio + self.deviation**2 / 2))


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
    """Seconds that the next switch may risk to lose."""
    trial_s: float = 0.0
    """Time of a new plan's trial steps at that step time."""
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
    found = worth(
        Bet(
            log_ratio=candidate.log_ratio,
            deviation=candidate.deviation * SIGMA,
            log_ratio_after=candidate.log_ratio_after,
            cost_s=candidate.cost_s,
            return_s=candidate.return_s,
            prepare_s=candidate.prepare_s if situation.at_step is None else 0.0,
            trial_s=situation.trial_s,
            usable=candidate.usable_probability,
        ),
        situation.regime,
        situation.horizon_s,
    )
    objection, wait_s = _objection(situation, candidate, settings, found)
    return _Weighed(
        candidate=candidate,
        gain_s=found.gain_s,
        cost_s=found.gain_s - found.net_s,
        probability=found.probability,
        objection=objection,
        wait_s=wait_s,
    )


def _objection(
    situation: Situation, candidate: SwitchCandidate, settings: ControlConfig, found: Worth
) -> tuple[str, float | None]:
    """Why the switch is not made (empty: it may be), and after how many seconds it is weighed again
    because of how long conditions last.
    """
    later_s = (
        None if situation.regime.durations is None else REWEIGH_AFTER * situation.regime.elapsed_s
    )
    what = f"would save {seconds(found.gain_s)} (P {found.probability:.2f}) for {seconds(found.gain_s - found.net_s)}"
    if candidate.barred:
        return candidate.barred, None
    if found.wait_s > 0:
        return (
            f"{what}; worth more if conditions last {seconds(found.wait_s)} longer",
            found.wait_s,
        )
    if found.net_s <= MARGIN * candidate.cost_s:
        return f"would save {seconds(max(0.0, found.gain_s))} for {seconds(found.gain_s - found.net_s)}", later_s
    if found.worst_s > max(0.0, situation.budget_s):
        return (
            f"{what}; the account allows to risk {seconds(max(0.0, situation.budget_s))}, and it"
            f" may lose {seconds(found.worst_s)} (controller.budget_share={settings.budget_share:g})"
        ), later_s
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
