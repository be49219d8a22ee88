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
Action = Literal["stay", "switch"]
CHOSEN = "chosen"
ALMOST = 0.9
"""A cheaper switch method wins if its net gain is this share of the largest."""
EVEN_ODDS = 0.5
"""Of earning a switch's cost back, before it is made while it is unknown how long conditions
last."""
LONG_ODDS = 0.7
"""The same of a restart, which takes as long again to undo; nor does anything tell when it should
be, for who is left out is not measured."""
LOOK_AGAIN = 0.25
"""Of the time that conditions have lasted: after so much more of it, what only their duration spoke
against is weighed again."""
RETURN = 2.0
"""A plan that was left has to gain so many times as much as another, while nothing has changed
since."""
SHOWN = 5
"""Alternatives that a record has."""
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True, kw_only=True)
class SwitchCandidate:
    """A plan that could be switched to; all times are predictions."""

    plan: Plan
    switch_method: SwitchMethod
    log_ratio: float
    """Expected logarithm of its step time over the present plan's, in present conditions."""
    deviation: float
    """Standard deviation of that."""
    log_ratio_after: float | None = None
    """The same once present conditions have ended; None: as it was before, so that the present plan
    is the better one."""
    cost_s: float
    """Expected delay by the switch."""
    return_s: float = 0.0
    """Expected delay by the way back."""
    prepare_s: float = 0.0
    """Expected time until the switch can be made, in which the run goes on; if conditions end
    before, it is not made."""
    without: frozenset[int] = frozenset()
    """Ids of devices that it does not use."""
    likely: float = 1.0
    """Probability that conditions are those that its ratio holds in."""
    barred: str = ""
    """Why it is not to be used: not allowed, or it failed; empty: it may be."""
    is_free: bool = False
    """The budget does not pay for it: it undoes what the run was forced to."""
    was_left: bool = False
    """The run was under it and left it, and nothing has changed since."""

    @property
    def gain(self) -> float:
        """Share of a step's time that it is expected to save."""
        return _gain(self.log_ratio, self.deviation)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """How long present conditions have held, and are going to."""

    elapsed_s: float
    """Since they began."""
    durations: Durations | None
    """Of regimes of their kind; None: they are here to stay."""

    def expected_s(self, horizon_s: float) -> float:
        """Expected time left of it within the horizon."""
        return (
            horizon_s
            if self.durations is None
            else self.durations.expected_s(self.elapsed_s, horizon_s)
        )

    def survival(self, further_s: float) -> float:
        """Probability that it lasts that much longer."""
        return 1.0 if self.durations is None else self.durations.survival(self.elapsed_s, further_s)

    def wait_s(self, further_s: float, probability: float = EVEN_ODDS) -> float:
        """How much longer it has to last until it lasts `further_s` more with this probability."""
        return (
            0.0
            if self.durations is None
            else self.durations.wait_s(self.elapsed_s, further_s, probability)
        )


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a decision is about."""

    step: int
    """Done."""
    trigger: str
    """What put it up for decision, in words."""
    step_time_s: float
    """Expected under the present plan in present conditions."""
    horizon_s: float
    """What is left of the run, or of its phase, at that pace."""
    regime: Regime
    budget_s: float
    """What switches may still take."""
    caution: float = 1.0
    """Factor on the costs that a gain has to be worth: more than 1 where the run has been to and
    fro."""
    blocked: str = ""
    """Why no switch may be made now, whatever it gains; empty: one may."""
    mandatory: bool = False
    """The present plan cannot be kept."""
    at_step: int | None = None
    """Boundary that a switch is planned for; None: now."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What all this rests on, for the record."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A candidate as it was weighed; all times are predictions."""

    plan: Plan
    switch_method: SwitchMethod
    step_time_s: float
    """Expected, under this plan."""
    gain_s: float
    """Expected to be saved until the horizon, before costs."""
    cost_s: float
    """Expected delay by the switch, and by the way back where conditions may end."""
    probability: float
    """That it saves more than it costs."""
    verdict: str
    """`chosen`, or what spoke against it."""

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
    """Done when it was made."""
    action: Action
    why: str
    """One sentence for people."""
    plan: Plan | None = None
    """To switch to; None: stay."""
    switch_method: SwitchMethod | None = None
    """What the switch has to touch."""
    at_step: int | None = None
    """The switch belongs at the boundary after this step (prepare it before); None: as soon as it
    is prepared."""
    without: frozenset[int] = frozenset()
    """Ids of devices that `plan` must not use."""
    mandatory: bool = False
    """The run cannot go on, or not for long, under the present plan."""
    trigger: str = ""
    """What put it up for decision."""
    step_time_s: float | None = None
    """Expected of a step under the present plan in the present conditions."""
    wait_s: float | None = None
    """Only time speaks against a switch: after so much more of it, it has to be weighed again."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What it rests on, by name; None is unknown."""
    alternatives: tuple[Alternative, ...] = ()
    """What was weighed, best first."""

    def as_json(self) -> dict[str, Any]:
        """For the `decision` event of events.jsonl; its step and time are the event's own."""
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
    """Stay, or switch to one of the candidates. Depends on nothing but its arguments."""
    if situation.mandatory:
        return _move_away(situation, candidates)
    weighed = sorted(
        (_weigh(situation, each, settings) for each in candidates), key=lambda each: -each.net_s
    )
    passed = [] if situation.blocked else [each for each in weighed if not each.objection]
    best = min(
        [each for each in passed if each.net_s >= ALMOST * passed[0].net_s],
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
    """A candidate with what it is worth."""

    candidate: SwitchCandidate
    gain_s: float
    cost_s: float
    probability: float
    objection: str
    """The first test that it fails; empty: none."""
    wait_s: float | None = None
    """What it has to wait for is time alone: so much of it."""

    @property
    def net_s(self) -> float:
        return self.gain_s - self.cost_s


def _weigh(situation: Situation, candidate: SwitchCandidate, settings: ControlConfig) -> _Weighed:
    regime = situation.regime
    if (
        candidate.log_ratio_after is not None
        and _gain(candidate.log_ratio_after, candidate.deviation) > settings.min_gain
    ):
        # It is better now and afterwards, so how long now lasts does not matter.
        regime = replace(regime, durations=None)
        candidate = replace(
            candidate, log_ratio=max(candidate.log_ratio, candidate.log_ratio_after)
        )
    unprepared = regime
    if candidate.prepare_s and situation.at_step is None:
        # Nothing is gained while it is prepared; and conditions that end before it is ready
        # withdraw it, so what counts is how long those last that have lasted until then.
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
    # The way back is walked only if conditions end before the run does.
    back_s = (
        0.0 if regime.durations is None else (1.0 - regime.survival(left_s)) * candidate.return_s
    )
    gain_s, cost_s = candidate.likely * candidate.gain * lasting_s, candidate.cost_s + back_s
    probability = candidate.likely * _probability(candidate, cost_s, lasting_s)
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
    """Expected share of a step's time that is saved."""
    return 1.0 - math.exp(min(50.0, log_ratio + deviation**2 / 2))


def _probability(candidate: SwitchCandidate, cost_s: float, lasting_s: float) -> float:
    """That what it saves while conditions last is more than it costs."""
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
    """The first test that is not passed, and how long to wait where time alone is missing."""
    least = settings.min_gain * (RETURN if candidate.was_left else 1.0)
    # The longer conditions have lasted, the longer they are expected to, and the run with them:
    # what fails by that alone may pass later.
    later_s = (
        None if situation.regime.durations is None else LOOK_AGAIN * situation.regime.elapsed_s
    )
    if candidate.barred:
        return candidate.barred, None
    if candidate.gain <= least:
        return f"saves {candidate.gain:.1%} of a step, and {least:.0%} is the least", None
    # Where conditions may end, the way back has to be affordable too, or the run would be stranded.
    needed_s = candidate.cost_s + (
        0.0 if situation.regime.durations is None else candidate.return_s
    )
    if needed_s > situation.budget_s and not candidate.is_free:
        return (
            (
                f"costs {seconds(needed_s)}, and {seconds(max(0.0, situation.budget_s))} are left"
                f" for switches (controller.budget_share={settings.budget_share:g})"
            ),
            later_s,
        )
    if earned_s >= situation.horizon_s - candidate.cost_s:
        if situation.horizon_s <= 0:
            return f"takes {seconds(candidate.prepare_s)} to prepare, and the run ends before", None
        return (
            (
                f"costs {seconds(cost_s)}, which the {seconds(situation.horizon_s)} that are left"
                " then cannot earn back"
            ),
            None,
        )
    if candidate.likely < settings.min_probability:
        return (
            (
                "saves time only if conditions there are normal, with probability"
                f" {candidate.likely:.2f}"
            ),
            None,
        )
    if unsure_s > 0:
        return (
            (
                f"conditions may not last the {seconds(candidate.prepare_s)} that preparing it"
                f" takes; worth it if they last {seconds(unsure_s)} longer"
            ),
            unsure_s,
        )
    wait_s = situation.regime.wait_s(
        earned_s, LONG_ODDS if candidate.switch_method == "restart" else EVEN_ODDS
    )
    if wait_s > 0:
        return (
            (
                f"conditions may not last the {seconds(earned_s)} that earn its cost back; worth it"
                f" if they last {seconds(wait_s)} longer"
            ),
            wait_s,
        )
    if probability < settings.min_probability:
        return (
            (
                f"saves time with probability {probability:.2f}, and {settings.min_probability:g}"
                " is the least"
            ),
            later_s,
        )
    least_times = settings.gain_over_cost * situation.caution
    if gain_s < max(cost_s, least_times * candidate.cost_s):
        return (
            (
                f"saves {seconds(gain_s)} for {seconds(candidate.cost_s)}, and {least_times:.2g}"
                " times is the least"
            ),
            later_s,
        )
    return "", None


def _move_away(situation: Situation, candidates: Sequence[SwitchCandidate]) -> Decision:
    """The present plan cannot be kept: to whatever does the rest of the run, the move included,
    soonest.
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
            why=f"{situation.trigger}, and no plan is known that could be kept instead",
        )
    best = weighed[0]
    if best.objection:
        return _decision(
            situation,
            weighed,
            None,
            why=(
                f"{situation.trigger}, and no plan that could be kept instead may be used:"
                f" {best.candidate.plan.axes} {best.objection}"
            ),
        )
    return _decision(
        situation,
        weighed,
        best,
        why=(
            f"{situation.trigger}: {best.candidate.plan.axes} is expected to finish soonest of"
            f" {len(weighed)} plans that can go on"
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
        return f"{situation.trigger}: no other plan is known that could be used"
    # The one with the most to gain says what it fails by; without any gain the plan at hand is the
    # best.
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
    shown = sorted(weighed, key=lambda each: each is not best)[:SHOWN]
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
        CHOSEN if is_best else each.objection or (situation.blocked or "another one is worth more")
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
    """Four digits: more would say more than is known."""
    return float(f"{number:.4g}")
