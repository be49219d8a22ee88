"""Features of a candidate, and two regressions from them to what a switch would truly save.

The target is the label of decision_labels.py over the run's time, as a share. Squared errors then
estimate its mean, so a switch with a positive prediction saves on average. Ridge regression sees
sums of features; boosted trees see their interactions. The penalty of the one, the number of trees
of the other, and the *margin* that a prediction has to exceed are chosen by cross-validation over
scenarios: no scenario is on both sides of a split.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from optimus_jax.control.deciding.value import Bet, Worth, worth
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
    "hangs_on_ratio",
    "is_unexplained",
    "is_planned",
    "has_changed",
    "num_switches",
    "num_decisions",
    "num_candidates",
    *SWITCH_METHODS,
)
"""Names of the features, in order. Times are shares of what is left of the run, except `left` and
`owed`, which are shares of the whole run, and log_left_s. `lead` is the value (`net`) less that of
the best other candidate, `lasting` the expected time of present conditions."""
MOST = 3.0
"""Features are clipped to -MOST..MOST, and log ratios with them; counts are in tens."""
FOLDS = 5
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""Penalties of the ridge regression."""
NUM_TREES, RATE, DEPTH, NUM_BINS, LEAST_ROWS = (10, 20, 40, 80), 0.1, 3, 24, 30
"""Boosting: numbers of trees to choose from, the share of each that is added, questions on the way
to a leaf, values of a feature that are told apart, and rows of the smallest leaf."""
MARGINS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)
"""Margins to choose from, as shares of the run's time."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run has been through before a decision."""

    num_switches: int = 0
    num_decisions: int = 0
    has_changed: bool = False
    """Whether conditions were ever other than those of the beginning."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A decision with its truth."""

    group: str
    """The scenario, which is never on both sides of a split."""
    features: np.ndarray
    """[candidates, FEATURES]."""
    saved: np.ndarray
    """[candidates]: the labels, as shares of the run's time."""
    barred: np.ndarray
    """[candidates]: whether the candidate may not be taken."""
    rule: int | None
    """The candidate that the rule takes; None: it stays."""


class Regression(Protocol):
    """Predicts savings."""

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """[rows, FEATURES] to [rows], as shares of the run's time."""
        ...


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """A learnt policy: it takes the candidate with the largest prediction above the margin."""

    predict: Regression
    margin: float
    setting: float
    """The penalty or the number of trees that was chosen."""
    saved: float
    """Mean saving of a decision on scenarios that were held out, as a share of the run's time."""

    def choose(self, features: np.ndarray, barred: np.ndarray) -> int | None:
        """The candidate to switch to; None: stay."""
        return _best(self.predict(features), barred, self.margin)


def features_of(
    situation: Situation, candidates: Sequence[SwitchCandidate], history: History
) -> np.ndarray:
    """[candidates, FEATURES], float64: what the rule knows of each candidate."""
    worths = [_worth(situation, each) for each in candidates]
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
    return np.clip(np.nan_to_num(np.array(rows).reshape(-1, len(FEATURES))), -MOST, MOST)


def _worth(situation: Situation, candidate: SwitchCandidate) -> Worth:
    """V of the candidate, as the rule weighs it."""
    bet = Bet(
        log_ratio=candidate.log_ratio,
        deviation=candidate.deviation,
        log_ratio_after=candidate.log_ratio_after,
        cost_s=candidate.cost_s,
        return_s=candidate.return_s,
        prepare_s=candidate.prepare_s if situation.at_step is None else 0.0,
        trial_s=situation.trial_s,
        usable=candidate.usable_probability,
    )
    return worth(bet, situation.regime, situation.horizon_s)


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
        "hangs_on_ratio": float(situation.hangs_on_ratio),
        "is_unexplained": float(situation.is_unexplained),
        "is_planned": float(situation.at_step is not None),
        "has_changed": float(history.has_changed),
        "num_switches": history.num_switches / 10,
        "num_decisions": history.num_decisions / 10,
    }


def learn(examples: Sequence[Example], kind: str) -> Learnt:
    """Fit a regression of KINDS, with its setting and margin chosen on held-out scenarios."""
    fit, settings = KINDS[kind]
    groups = sorted({each.group for each in examples})
    fold_of = {group: place % FOLDS for place, group in enumerate(groups)}
    held_out = {setting: list[tuple[Example, np.ndarray]]() for setting in settings}
    for fold in range(FOLDS):
        inside = [each for each in examples if fold_of[each.group] != fold]
        outside = [each for each in examples if fold_of[each.group] == fold]
        if not inside:
            continue
        for setting, predict in fit(*_rows(inside), settings).items():
            held_out[setting] += [(each, predict(each.features)) for each in outside]
    scores = {
        (setting, margin): float(np.mean([saved(each, found, margin) for each, found in pairs]))
        for setting, pairs in held_out.items()
        for margin in MARGINS
    }
    setting, margin = max(scores, key=lambda key: scores[key])
    return Learnt(
        predict=fit(*_rows(examples), (setting,))[setting],
        margin=margin,
        setting=setting,
        saved=scores[setting, margin],
    )


def saved(example: Example, predicted: np.ndarray, margin: float) -> float:
    """What the decision by these predictions truly saves, as a share of the run's time."""
    chosen = _best(predicted, example.barred, margin)
    return 0.0 if chosen is None else float(example.saved[chosen])


def _best(predicted: np.ndarray, barred: np.ndarray, margin: float) -> int | None:
    usable = np.where(barred, -np.inf, predicted)
    best = int(usable.argmax()) if len(usable) else None
    return best if best is not None and usable[best] > margin else None


def _rows(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All candidates as rows: features, targets, and weights, with which each decision counts as
    much as any other, however many candidates it has.
    """
    weights = [np.full(len(each.saved), 1 / max(1, len(each.saved))) for each in examples]
    target = np.concatenate([each.saved for each in examples])
    return (
        np.concatenate([each.features for each in examples]),
        np.clip(target, -1.0, 1.0),
        np.concatenate(weights) * len(target) / len(examples),
    )


Fit = Callable[[np.ndarray, np.ndarray, np.ndarray, Sequence[float]], Mapping[float, Regression]]


def fit_ridge(
    features: np.ndarray, target: np.ndarray, weights: np.ndarray, penalties: Sequence[float]
) -> Mapping[float, Regression]:
    """Ridge regression on standardised features, for each penalty."""
    mean = np.average(features, axis=0, weights=weights)
    scale = np.sqrt(np.average((features - mean) ** 2, axis=0, weights=weights)) + 1e-6
    scaled, middle = (features - mean) / scale, float(np.average(target, weights=weights))
    gram = scaled.T @ (scaled * weights[:, None])
    moment = scaled.T @ (weights * (target - middle))

    def fitted(penalty: float) -> Regression:
        slope = np.linalg.solve(gram + penalty * np.eye(len(gram)), moment)
        return lambda rows: (rows - mean) / scale @ slope + middle

    return {penalty: fitted(penalty) for penalty in penalties}


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """A regression tree of DEPTH questions. Node n asks whether a feature exceeds a value, and is
    followed by 2 n + 1 if not and by 2 n + 2 if so.
    """

    feature: np.ndarray
    """[nodes], int."""
    limit: np.ndarray
    """[nodes]; infinite: the node is not divided."""
    value: np.ndarray
    """[leaves]."""

    def __call__(self, features: np.ndarray) -> np.ndarray:
        node = np.zeros(len(features), int)
        for _ in range(DEPTH):
            asked = features[np.arange(len(features)), self.feature[node]]
            node = 2 * node + 1 + (asked > self.limit[node])
        return self.value[node - len(self.feature)]


def fit_trees(
    features: np.ndarray, target: np.ndarray, weights: np.ndarray, counts: Sequence[float]
) -> Mapping[float, Regression]:
    """Gradient boosting of squared errors, after each of these numbers of trees."""
    limits = [
        np.unique(np.quantile(column, np.linspace(0, 1, NUM_BINS + 1)[1:-1]))
        for column in features.T
    ]
    bins = np.stack(
        [np.searchsorted(each, column) for each, column in zip(limits, features.T, strict=True)]
    )
    middle, trees = float(np.average(target, weights=weights)), list[_Tree]()
    residual, found = target - middle, dict[float, Regression]()
    for number in range(1, int(max(counts)) + 1):
        tree = _grow(bins, limits, residual, weights)
        residual = residual - RATE * tree(features)
        trees.append(tree)
        if number in counts:
            found[number] = _boosted(middle, tuple(trees))
    return found


def _boosted(middle: float, trees: Sequence[_Tree]) -> Regression:
    return lambda rows: middle + RATE * sum((tree(rows) for tree in trees), np.zeros(len(rows)))


def _grow(
    bins: np.ndarray, limits: Sequence[np.ndarray], residual: np.ndarray, weights: np.ndarray
) -> _Tree:
    num_nodes = 2**DEPTH - 1
    feature, limit = np.zeros(num_nodes, int), np.full(num_nodes, np.inf)
    node = np.zeros(len(residual), int)
    for each in range(num_nodes):
        rows = np.flatnonzero(node == each)
        split = _split(bins[:, rows], limits, residual[rows], weights[rows])
        if split is not None:
            feature[each], place = split
            limit[each] = limits[feature[each]][place]
            node[rows] = 2 * each + 1 + (bins[feature[each], rows] > place)
        else:
            node[rows] = 2 * each + 1
    leaf = node - num_nodes
    total = np.bincount(leaf, weights, num_nodes + 1)
    # A leaf of few rows is drawn towards 0.
    sums = np.bincount(leaf, weights * residual, num_nodes + 1)
    return _Tree(feature=feature, limit=limit, value=sums / (total + 1.0))


def _split(
    bins: np.ndarray, limits: Sequence[np.ndarray], residual: np.ndarray, weights: np.ndarray
) -> tuple[int, int] | None:
    """The feature and the place among its limits that reduce squared errors most; None: there are
    too few rows.
    """
    num_features, num_rows = bins.shape
    if num_rows < 2 * LEAST_ROWS:
        return None
    flat = (bins + NUM_BINS * np.arange(num_features)[:, None]).ravel()

    def below(values: np.ndarray) -> np.ndarray:
        """[features, NUM_BINS]: sums of [rows] over the rows up to each limit."""
        summed = np.bincount(flat, np.tile(values, num_features), num_features * NUM_BINS)
        return summed.reshape(num_features, NUM_BINS).cumsum(axis=1)

    rows, weight, moment = below(np.ones(num_rows)), below(weights), below(weights * residual)
    total, whole = float(weights.sum()), float((weights * residual).sum())
    num_limits = np.array([len(each) for each in limits])
    usable = (
        (np.arange(NUM_BINS) < num_limits[:, None])
        & (rows >= LEAST_ROWS)
        & (num_rows - rows >= LEAST_ROWS)
    )
    reduced = np.where(
        usable,
        moment**2 / np.maximum(weight, 1e-12)
        + (whole - moment) ** 2 / np.maximum(total - weight, 1e-12),
        -np.inf,
    )
    feature, place = np.unravel_index(int(reduced.argmax()), reduced.shape)
    has_split = reduced[feature, place] > whole**2 / total
    return (int(feature), int(place)) if has_split else None


KINDS: Mapping[str, tuple[Fit, Sequence[float]]] = {
    "ridge": (fit_ridge, PENALTIES),
    "trees": (fit_trees, NUM_TREES),
}
"""Regressions by name: how each is fitted, and the settings to choose from."""
