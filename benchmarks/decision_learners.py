"""Two regressions from features of a candidate to what the switch to it would truly save.

The target is the label of decision_labels.py over the run's time, as a share. Squared errors then
estimate its mean, so a switch with a positive prediction saves on average. Ridge regression sees
sums of features; boosted trees see their interactions. The penalty of the one, the number of trees
of the other, and the *margin* that a prediction has to exceed are chosen by cross-validation over
scenarios: no scenario is on both sides of a split. The margin is the one that saves most for each
decision, or, since a label does not know of later decisions, the one with which the policy
switches as often as the rule (*careful*).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from decision_features import considered

FOLDS = 5
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""Penalties of the ridge regression."""
NUM_TREES, RATE, DEPTH, NUM_BINS, LEAST_ROWS = (10, 20, 40, 80), 0.1, 3, 24, 30
"""Boosting: numbers of trees to choose from, the share of each that is added, questions on the way
to a leaf, values of a feature that are told apart, and rows of the smallest leaf."""
MARGINS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)
"""Margins to choose from, as shares of the run's time."""
MOST_SAVED = 1.0
"""Labels are clipped to this share of the run's time, up and down."""

Regression = Callable[[np.ndarray], np.ndarray]
"""[rows, FEATURES] to predicted savings, [rows], as shares of the run's time."""
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray, Sequence[float]], Mapping[float, Regression]]
"""(features [rows, FEATURES], targets [rows], weights [rows], settings) to a regression for each
setting."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A decision with its truth."""

    group: str
    """The scenario, which is never on both sides of a split."""
    features: np.ndarray
    """[candidates, FEATURES]."""
    saved: np.ndarray
    """[candidates]: the labels, as shares of the run's time."""
    is_open: np.ndarray
    """[candidates]: whether a learnt policy may take the candidate."""
    rule: int | None
    """The candidate that the rule takes; None: it stays."""


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """A learnt policy: it takes the candidate with the largest prediction above the margin."""

    predict: Regression
    margin: float
    setting: float
    """The penalty or the number of trees that was chosen."""
    saved: float
    """Mean saving of a decision on scenarios that were held out, as a share of the run's time."""
    rate: float
    """Share of decisions there that switch."""

    def choose(self, features: np.ndarray, barred: np.ndarray) -> int | None:
        """The candidate to switch to; None: stay."""
        return _best(self.predict(features), considered(features, barred), self.margin)


def learn(examples: Sequence[Example], name: str) -> Learnt:
    """Learn the policy of POLICIES with this name."""
    kind, is_careful = POLICIES[name]
    fit, settings = KINDS[kind]
    held_out = _held_out(examples, fit, settings)
    margins = {
        setting: (_margin_as_often(pairs),) if is_careful else MARGINS
        for setting, pairs in held_out.items()
    }
    scores = {
        (setting, margin): float(np.mean([saved(each, found, margin) for each, found in pairs]))
        for setting, pairs in held_out.items()
        for margin in margins[setting]
    }
    setting, margin = max(scores, key=lambda key: scores[key])
    switches = [_best(found, each.is_open, margin) for each, found in held_out[setting]]
    return Learnt(
        predict=fit(*_rows(examples), (setting,))[setting],
        margin=margin,
        setting=setting,
        saved=scores[setting, margin],
        rate=float(np.mean([each is not None for each in switches])),
    )


Predicted = Sequence[tuple[Example, np.ndarray]]
"""Decisions with the predictions for their candidates, [candidates]."""


def _held_out(
    examples: Sequence[Example], fit: Fit, settings: Sequence[float]
) -> Mapping[float, Predicted]:
    """All decisions, each predicted from other scenarios, for each setting."""
    groups = sorted({each.group for each in examples})
    fold_of = {group: place % FOLDS for place, group in enumerate(groups)}
    held_out = {setting: list[tuple[Example, np.ndarray]]() for setting in settings}
    for fold in range(FOLDS):
        inside = [each for each in examples if fold_of[each.group] != fold]
        outside = [each for each in examples if fold_of[each.group] == fold]
        for setting, predict in fit(*_rows(inside), settings).items() if outside else ():
            held_out[setting] += [(each, predict(each.features)) for each in outside]
    return held_out


def _margin_as_often(pairs: Predicted) -> float:
    """The margin with which decisions switch as often as the rule's do."""
    tops = [found[each.is_open].max(initial=-np.inf) for each, found in pairs]
    num_switches = sum(each.rule is not None for each, _ in pairs)
    ordered = sorted(tops, reverse=True)
    return max(0.0, float(ordered[num_switches])) if num_switches < len(ordered) else 0.0


def saved(example: Example, predicted: np.ndarray, margin: float) -> float:
    """What the decision by these predictions truly saves, as a share of the run's time."""
    chosen = _best(predicted, example.is_open, margin)
    return 0.0 if chosen is None else float(example.saved[chosen])


def _best(predicted: np.ndarray, is_open: np.ndarray, margin: float) -> int | None:
    usable = np.where(is_open, predicted, -np.inf)
    best = int(usable.argmax()) if len(usable) else None
    return best if best is not None and usable[best] > margin else None


def _rows(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All open candidates as rows: features, targets, and weights, with which each decision counts
    as much as any other, however many candidates it has.
    """
    some = [each for each in examples if each.is_open.any()]
    counts = np.array([each.is_open.sum() for each in some])
    target = np.concatenate([each.saved[each.is_open] for each in some])
    return (
        np.concatenate([each.features[each.is_open] for each in some]),
        np.clip(target, -MOST_SAVED, MOST_SAVED),
        np.repeat(counts.mean() / counts, counts),
    )


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
POLICIES: Mapping[str, tuple[str, bool]] = {
    "ridge": ("ridge", False),
    "trees": ("trees", False),
    "careful ridge": ("ridge", True),
    "careful trees": ("trees", True),
}
"""Learnt policies by name: the regression, and whether the margin is the one with which it switches
as often as the rule."""
