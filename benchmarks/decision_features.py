"""Features of a candidate: what the rule knows of it, of the conditions, and of the run so far."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimus_jax.control.deciding.value import Worth
from optimus_jax.control.policy import SWITCH_METHODS, Situation, SwitchCandidate

FEATURES = (
    "log_ratio",
    "deviation",
    "log_ratio_after",
    "has_after",
    "probability",
    "net",
    "lead",
    "rank",
    "risk",
    "cost",
    "return",
    "prepare",
    "trial",
    "wait",
    "usable",
    "elapsed",
    "lasting",
    "survival",
    "left",
    "log_left_s",
    "owed",
    "is_permanent",
    "counts_return",
    "is_unexplained",
    "is_planned",
    "has_changed",
    "num_switches",
    "num_decisions",
    "num_candidates",
    *SWITCH_METHODS,
)
"""Names of the features, in order. Times are shares of what is left of the run; `left` and `owed`
are shares of the whole run, and `log_left_s` is the decimal logarithm of what is left over 100 s.
`net` is the value by the rule (deciding/value.py), `lead` that value less the best other one's,
`rank` the number of larger ones, `lasting` the expected time of present conditions. Counts are in
tens."""
MOST = 3.0
"""All features are clipped to -MOST..MOST."""
NUM_CONSIDERED = 3
"""A learnt policy chooses from so many candidates, those with the largest value by the rule. With
all of them it learnt less from the same data: most are poor, and errors add up."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run has been through before a decision."""

    num_switches: int = 0
    num_decisions: int = 0
    has_changed: bool = False
    """Whether conditions were ever other than those of the beginning."""


def features_of(
    situation: Situation, candidates: Sequence[SwitchCandidate], history: History
) -> np.ndarray:
    """[candidates, FEATURES], float64: what the rule knows of each candidate."""
    worths = [situation.worth_of(each) for each in candidates]
    net_s = np.array([each.net_s for each in worths])
    rows = []
    for place, (candidate, found) in enumerate(zip(candidates, worths, strict=True)):
        others = np.delete(net_s, place)
        values = _of_candidate(situation, candidate, found)
        values |= _of_situation(situation, history)
        left_s = max(1e-6, situation.horizon_s)
        values |= {
            "lead": (found.net_s - max(0.0, others.max(initial=0.0))) / left_s,
            "rank": float((others > found.net_s).sum()) / 10,
            "num_candidates": len(candidates) / 10,
        }
        rows.append([values[name] for name in FEATURES])
    found = np.clip(np.nan_to_num(np.array(rows).reshape(-1, len(FEATURES))), -MOST, MOST)
    # As they are stored, so that a stored decision is repeated exactly.
    return np.array([[float(f"{value:.5g}") for value in row] for row in found])


def considered(features: np.ndarray, barred: np.ndarray) -> np.ndarray:
    """[candidates], bool: which of them a learnt policy may take."""
    order = np.argsort(-features[:, FEATURES.index("net")], kind="stable")
    found = np.zeros(len(features), bool)
    found[order[~barred[order]][:NUM_CONSIDERED]] = True
    return found


def _of_candidate(
    situation: Situation, candidate: SwitchCandidate, found: Worth
) -> dict[str, float]:
    left_s = max(1e-6, situation.horizon_s)
    after = candidate.log_ratio_after
    return {
        "log_ratio": candidate.log_ratio,
        "deviation": candidate.deviation,
        "log_ratio_after": 0.0 if after is None else after,
        "has_after": float(after is not None),
        "probability": found.probability,
        "net": found.net_s / left_s,
        "risk": found.risk_s / left_s,
        "cost": found.cost_s / left_s,
        "return": candidate.return_s / left_s,
        "prepare": candidate.prepare_s / left_s,
        "wait": found.wait_s / left_s,
        "usable": candidate.usable_probability,
        **{name: float(name == candidate.switch_method) for name in SWITCH_METHODS},
    }


def _of_situation(situation: Situation, history: History) -> dict[str, float]:
    regime, left_s = situation.regime, max(1e-6, situation.horizon_s)
    whole_s = max(left_s, situation.whole_s)
    return {
        "trial": situation.trial_s / left_s,
        "elapsed": regime.elapsed_s / left_s,
        "lasting": regime.expected_s(left_s) / left_s,
        "survival": regime.survival(left_s),
        "left": left_s / whole_s,
        "log_left_s": float(np.log10(left_s)) - 2.0,
        "owed": situation.account.owed_s / whole_s,
        "is_permanent": float(regime.durations is None),
        "counts_return": float(situation.counts_return),
        "is_unexplained": float(situation.is_unexplained),
        "is_planned": float(situation.at_step is not None),
        "has_changed": float(history.has_changed),
        "num_switches": history.num_switches / 10,
        "num_decisions": history.num_decisions / 10,
    }
