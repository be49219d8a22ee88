"""The switching policy: decides whether to switch plans, and to which one.

It is a pure function: the decision depends on its arguments only, and records its reasons.

A *candidate* is a plan that the run could switch to. Its *gain* is the time it would save until the
end of the *horizon*; its *cost* is the time for which the switch, and the way back where it may be
needed, delay the run. The *switch method* is the kind of switch, ordered from cheapest to most
expensive. The run takes the switch that is worth most (deciding/value.py), if it is worth more than
to stay or to wait, and if the account of earlier switches allows its risk (deciding/account.py).
"""

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from optimus_jax.control import constants
from optimus_jax.control.deciding.account import Allowance
from optimus_jax.control.deciding.value import Bet, Regime, Worth, gain, worth
from optimus_jax.plan import Plan
from optimus_jax.planning.search.explain import flags, seconds

SwitchMethod = Literal["executable", "rebalance", "remesh", "subset", "restart"]
SWITCH_METHODS: tuple[SwitchMethod, ...] = typing.get_args(SwitchMethod)
"""Cheapest first: `executable` moves no state, `rebalance` moves some layers to neighbours, the
others move more (docs/control.md)."""
DecisionAction = Literal["stay", "switch"]
CHOSEN = "chosen"
MAX_ALTERNATIVES = 5
"""Largest number of alternatives in the record of a decision."""


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
    """Expected logarithm of (step time under the plan / under the fastest other one that the run
    has had) once present conditions have ended; None: present conditions are the normal ones."""
    usual: float = 1.0
    """Step time under that other plan then, over the present one."""
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

    @property
    def gain(self) -> float:
        """Expected saving, as a share of the step time."""
        return gain(self.log_ratio, self.deviation)


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
    account: Allowance
    """What switches may still risk."""
    whole_s: float
    """Expected time of the whole run without this switch."""
    trial_s: float = 0.0
    """Time of the steps for which a new plan is on trial, at that step time."""
    blocked: str = ""
    """Why no switch is allowed now, whatever it gains; empty: switches are allowed."""
    mandatory: bool = False
    """The present plan cannot be kept."""
    at_step: int | None = None
    """Boundary that a switch is planned for; None: now."""
    until_s: float = 0.0
    """Time until that boundary. The horizon begins there."""
    is_unexplained: bool = False
    """Whether step times have changed and nobody knows why."""
    has_switched: bool = False
    """Whether the run has left a plan by choice before."""
    under_plan_s: float = math.inf
    """Time since the run entered its plan."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The measurements and settings behind these values, for the record."""

    @property
    def counts_return(self) -> bool:
        """Whether a plan that proves slower is expected to cost its trial only.

        A plan for a phase to come has no trial, because the steps before it had other batches.
        """
        return self.at_step is None

    def worth_of(self, candidate: SwitchCandidate) -> Worth:
        """What the switch to this candidate is worth."""
        bet = Bet(
            log_ratio=candidate.log_ratio,
            deviation=candidate.deviation,
            log_ratio_after=candidate.log_ratio_after,
            usual=candidate.usual,
            cost_s=candidate.cost_s,
            return_s=candidate.return_s,
            prepare_s=candidate.prepare_s if self.at_step is None else self.until_s,
            trial_s=self.trial_s,
            usable=candidate.usable_probability,
            counts_return=self.counts_return,
        )
        return worth(bet, self.regime, self.until_s + self.horizon_s)

    def too_unlikely(self, found: Worth) -> str:
        """Why a switch of this worth is too unlikely to pay; empty: it is not.

        Where conditions last, or nobody knows what they are, what it gains depends on predicted
        step times alone. There an unlikely switch is made if conditions last and it is worth a
        share of the time that is left. The first switch of a run, if it is a gamble, has to be
        likelier, and worth more. Where conditions may end, an unlikely switch has to be worth a
        share of what it costs.
        """
        sure = constants.MIN_PROBABILITY
        if found.probability >= sure:
            return ""
        if self.is_unexplained:
            return f"at least P {sure:g} is required in such conditions"
        if self.regime.durations is not None:
            if found.net_s < constants.MIN_GAMBLE_MARGIN * found.cost_s:
                worth_s = seconds(constants.MIN_GAMBLE_MARGIN * found.cost_s)
                return f"with less than P {sure:g} it has to be worth {worth_s}"
            return ""
        least, share = 0.0, constants.MIN_GAMBLE_SHARE
        if not self.has_switched and self.counts_return:
            least, share = constants.FIRST_GAMBLE_PROBABILITY, constants.MIN_FIRST_GAMBLE_SHARE
        if found.probability < least:
            return f"at least P {least:g} is required of a first switch"
        if found.net_s < share * self.horizon_s:
            worth_s = f"{seconds(share * self.horizon_s)}, {share:.1%} of what is left"
            return f"with less than P {sure:g} it has to be worth {worth_s}"
        return ""

    def has_waited_for(self, candidate: SwitchCandidate) -> bool:
        """Whether present conditions have cost as much under the present plan as this switch and
        the way back would.

        Then the switch can at most double what they cost, whatever is owed: the ski rental problem
        (Karlin et al. 1988, doi:10.1007/BF01762111).
        """
        if self.regime.durations is None:
            return False
        waited_s = min(self.regime.elapsed_s, self.under_plan_s)
        return waited_s * candidate.gain >= candidate.cost_s + candidate.return_s


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A candidate with its predicted gain and cost, as recorded in a decision."""

    plan: Plan
    switch_method: SwitchMethod
    step_time_s: float
    """Expected step time under this plan."""
    gain_s: float
    """Expected saving until the horizon, before costs: none where conditions end before."""
    cost_s: float
    """Expected delay by the switch, and by switching back where that may be needed."""
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

    A `stay` withdraws the switch that is being prepared, unless only one of them is about a phase
    to come.
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
    """Seconds after which a switch that was rejected only for the duration of conditions, or for
    what is owed, has to be weighed again; None: there is none."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The measurements and settings behind the decision, by name; None: unknown."""
    alternatives: tuple[Alternative, ...] = ()
    """The candidates that were weighed, best first."""

    @property
    def target(self) -> tuple[Plan | None, frozenset[int], int | None]:
        """Where the run goes, and when: plan, devices not used, boundary."""
        return self.plan, self.without, self.at_step

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


def decide(situation: Situation, candidates: Sequence[SwitchCandidate]) -> Decision:
    """Stay, or switch to one of the candidates. A pure function of its arguments."""
    if situation.mandatory:
        return _move_away(situation, candidates)
    weighed = sorted((_weigh(situation, each) for each in candidates), key=lambda each: -each.net_s)
    passed = [] if situation.blocked else [each for each in weighed if not each.objection]
    if not passed:
        waits = [each.wait_s for each in weighed if each.wait_s is not None]
        return _decision(
            situation,
            weighed,
            None,
            why=_why_stay(situation, weighed),
            wait_s=min(waits, default=None),
        )
    return _decision(situation, weighed, passed[0], why=_why_switch(situation, passed[0]))


@dataclass(frozen=True, kw_only=True)
class _Weighed:
    """A candidate and what the switch to it is worth."""

    candidate: SwitchCandidate
    net_s: float
    saved_s: float
    cost_s: float
    probability: float
    objection: str
    """Why the switch is not made; empty: it may be."""
    wait_s: float | None = None
    """Seconds after which it has to be weighed again because conditions have lasted longer then, or
    less is owed; None: there are none."""


def _weigh(situation: Situation, candidate: SwitchCandidate) -> _Weighed:
    found = situation.worth_of(candidate)
    weighed = _Weighed(
        candidate=candidate,
        net_s=found.net_s,
        saved_s=found.saved_s,
        cost_s=found.cost_s,
        probability=found.probability,
        objection=candidate.barred,
    )
    if candidate.barred:
        return weighed
    # The longer conditions have lasted, the longer they are expected to last.
    later_s = (
        None
        if situation.regime.durations is None
        else constants.REVIEW_AFTER_SHARE * situation.regime.elapsed_s
    )
    told = _told(weighed)
    if found.wait_s > 0 and situation.at_step is None:
        # If conditions may be over already, unseen, that grows likelier meanwhile.
        is_unseen = candidate.usable_probability < 1
        return replace(
            weighed,
            objection=f"{told}; worth more if conditions last {seconds(found.wait_s)} longer",
            wait_s=min(found.wait_s, later_s) if is_unseen and later_s else found.wait_s,
        )
    if found.net_s <= 0:
        return replace(weighed, objection=told, wait_s=later_s)
    if too_unlikely := situation.too_unlikely(found):
        return replace(weighed, objection=f"{told}; {too_unlikely}", wait_s=later_s)
    if found.risk_s > situation.account.allows_s(
        situation.whole_s
    ) and not situation.has_waited_for(candidate):
        refused = situation.account.refused(found.risk_s, situation.whole_s)
        # What is owed is paid by the steps that the last switch has made faster.
        paid_s = constants.DEBT_REVIEW * situation.account.owed_s
        waits = [each for each in (later_s, paid_s) if each]
        return replace(weighed, objection=f"{told}; {refused}", wait_s=min(waits, default=None))
    return weighed


def _told(weighed: _Weighed) -> str:
    """What the switch would save, for what, and how likely that is."""
    return (
        f"would save {seconds(max(0.0, weighed.saved_s))} (P {weighed.probability:.2f}) for"
        f" {seconds(weighed.cost_s)}"
    )


def _move_away(situation: Situation, candidates: Sequence[SwitchCandidate]) -> Decision:
    """Decide when the present plan cannot be kept: take the plan with which the run, including the
    switch, ends soonest.
    """

    def finished_s(candidate: SwitchCandidate) -> float:
        return candidate.cost_s + situation.horizon_s * math.exp(min(50.0, candidate.log_ratio))

    # A run that has to move does not gamble on better conditions than the present ones.
    ordered = sorted(
        [each for each in candidates if each.usable_probability == 1],
        key=lambda each: (bool(each.barred), finished_s(each)),
    )
    weighed = [
        _Weighed(
            candidate=each,
            net_s=situation.horizon_s * each.gain - each.cost_s,
            saved_s=situation.horizon_s * each.gain,
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
    axes, cost = best.candidate.plan.axes, seconds(best.cost_s)
    is_gamble = situation.counts_return and situation.regime.durations is None
    if is_gamble and best.probability < constants.MIN_PROBABILITY:
        return (
            f"{situation.trigger}: {axes} may be faster (P {best.probability:.2f}) and is taken"
            f" back if it is not; it would save {seconds(best.saved_s)} on average for a switch of"
            f" {cost}"
        )
    return (
        f"{situation.trigger}: {axes} is expected to save {best.candidate.gain:.0%} of each step,"
        f" {seconds(best.saved_s)} in all for a switch of {cost}, with probability"
        f" {best.probability:.2f}"
    )


def _why_stay(situation: Situation, weighed: Sequence[_Weighed]) -> str:
    if situation.blocked:
        return f"{situation.trigger}: {situation.blocked}"
    if not weighed:
        return f"{situation.trigger}: no other usable plan is known"
    # Name what holds back the candidate with the largest gain; if none has a gain, the present plan
    # is the best.
    best = max(weighed, key=lambda each: (not each.candidate.barred, each.saved_s))
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
        gain_s=each.saved_s,
        cost_s=each.cost_s,
        probability=each.probability,
        verdict=verdict,
    )


def _rounded(number: float) -> float:
    """The number with four significant digits: no value here is known more exactly."""
    return float(f"{number:.4g}")
