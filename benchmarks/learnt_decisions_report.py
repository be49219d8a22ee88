"""The tables of benchmarks/learnt_decisions.py: gains over staying, paired with the rule's.

Gains are shares of the time of staying. Intervals are 95%, bootstrapped over scenarios, since the
runs of one scenario resemble each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from decision_learners import POLICIES, Example, learn, saved
from decision_runs import Case
from simulated_control_report import ATTAINABLE, MOST_LOST, QUIET

from optimus_jax.simulation.comparison import (
    ORACLE,
    STAY,
    Estimate,
    Result,
    estimate,
    num_switches,
)
from optimus_jax.simulation.random_scenarios import RANDOM

RULE = "rule"
LEAST_DIFFERENCE = 0.003
"""Difference of mean gains from which a learnt policy is shipped."""

Runs = Mapping[Case, Mapping[str, Result]]
"""Results by case and method."""


def trained(examples: Sequence[Example]) -> str:
    """What was learnt, a line each, with the mean saving of a decision on held-out scenarios."""
    ruled = np.mean([0.0 if each.rule is None else each.saved[each.rule] for each in examples])
    best = np.mean([saved(each, each.saved, 0.0) for each in examples])
    rate = np.mean([each.rule is not None for each in examples])
    lines = [
        f"{len(examples)} decisions with {sum(len(each.saved) for each in examples)} candidates, of"
        f" {len({each.group for each in examples})} scenarios. Mean saving of a decision by its"
        f" labels: rule {ruled:.2%} ({rate:.0%} switch), best of the candidates that are considered"
        f" {best:.2%}."
    ]
    for kind in POLICIES:
        found = learn(examples, kind)
        lines.append(
            f"{kind}: setting {found.setting:g}, margin {found.margin:.1%}; on held-out scenarios"
            f" {found.saved:.2%}, and {found.rate:.0%} of decisions switch."
        )
    return "\n".join(lines)


def report(found: Runs, methods: Sequence[str]) -> str:
    """Tables of all methods over the cases that have all of them, and the verdict on each learnt
    policy.
    """
    complete = {case: runs for case, runs in sorted(found.items()) if set(methods) <= set(runs)}
    drawn = {case: runs for case, runs in complete.items() if case.scenario.startswith(RANDOM)}
    named = {case: runs for case, runs in complete.items() if case not in drawn}
    text = list[str]()
    for title, runs in (("all", complete), ("drawn", drawn), ("named", named)):
        if runs:
            text += [*_table(title, runs, methods), ""]
    verdicts = [_verdict(kind, complete) for kind in POLICIES if kind in methods and complete]
    return "\n".join([*text, *verdicts]) or "No case has results of all methods."


def _table(title: str, found: Runs, methods: Sequence[str]) -> Iterator[str]:
    yield f"{title}, {len(found)} runs"
    yield ""
    yield (
        "| policy | gain over staying | more than the rule | share of the oracle's gain | runs that"
        f" lose over {MOST_LOST:.0%} | worst | switches | quiet runs that switch |"
    )
    yield "|---" * 8 + "|"
    for name in methods:
        row = summary(name, found)
        yield (
            f"| {name} | {row.gain:.2%} | {row.more.value:+.2%}"
            f" [{row.more.low:+.2%}, {row.more.high:+.2%}] |"
            f" {'' if row.share is None else f'{row.share:.0%}'} | {row.num_lost} |"
            f" {row.worst:.1%} | {row.switches:.2f} | {row.num_in_vain} |"
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One method over many runs."""

    gain: float
    """Mean gain over staying."""
    more: Estimate
    """That gain less the rule's."""
    share: float | None
    """Mean share of the oracle's gain, where that is large enough; None: nowhere."""
    num_lost: int
    """Number of runs that lose more than MOST_LOST."""
    worst: float
    """The smallest gain of a run."""
    switches: float
    """Mean number of switches of a run."""
    num_in_vain: int
    """Number of runs with a switch of those that should have none."""

    def beats(self, rule: "Summary") -> bool:
        """Whether it wins by the margin that was fixed beforehand."""
        return (
            self.more.value >= LEAST_DIFFERENCE
            and self.more.low > 0
            and self.num_lost <= rule.num_lost
            and self.num_in_vain == 0
        )


def summary(method: str, found: Runs) -> Summary:
    """The figures of one method over these runs, which have staying, the oracle and the rule."""
    gains, ruled, possible = (_gains(name, found) for name in (method, RULE, ORACLE))
    attainable = possible >= ATTAINABLE
    shares = np.clip(gains[attainable] / possible[attainable], -1.0, 1.5)
    quiet = [runs for case, runs in found.items() if case.scenario in QUIET]
    return Summary(
        gain=float(gains.mean()),
        more=_by_scenario(gains - ruled, [case.scenario for case in found]),
        share=float(shares.mean()) if attainable.any() else None,
        num_lost=int((gains < -MOST_LOST).sum()),
        worst=float(gains.min()),
        switches=float(np.mean([num_switches(runs[method]) for runs in found.values()])),
        num_in_vain=sum(num_switches(runs[method]) > 0 for runs in quiet),
    )


def _gains(method: str, found: Runs) -> np.ndarray:
    return np.array([1 - runs[method].total_s / runs[STAY].total_s for runs in found.values()])


def _by_scenario(values: np.ndarray, scenarios: Sequence[str]) -> Estimate:
    """The mean with its interval, bootstrapped over scenarios."""
    _, place = np.unique(scenarios, return_inverse=True)
    sums, counts = np.bincount(place, values), np.bincount(place)
    return estimate(lambda drawn: sums[drawn].sum(-1) / counts[drawn].sum(-1), len(sums))


def _verdict(kind: str, found: Runs) -> str:
    wins = summary(kind, found).beats(summary(RULE, found))
    return f"{kind} {'wins' if wins else 'does not win'} by the margin that was fixed beforehand."
