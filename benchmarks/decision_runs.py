"""Simulated runs in which something else than the controller's rule decides.

The controller is that of every simulated run; only `policy.decide` is replaced. What protects a run
stays: candidates that are barred are never taken, decisions that are mandatory or blocked, trials
and their way back are the rule's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from decision_features import FEATURES, History, features_of
from decision_labels import Hindsight
from decision_learners import Learnt
from simulated_control import SETTINGS, searcher, setup_of

from optimus_jax.control import constants, policy
from optimus_jax.control.policy import Decision, Situation, SwitchCandidate
from optimus_jax.simulation.comparison import AUTO, POLICIES, Result
from optimus_jax.simulation.named_scenarios import find_scenario
from optimus_jax.simulation.setup import Truth
from optimus_jax.simulation.simulator import Simulation

EXPLORED = 0.25
"""Probability of a random candidate instead of the rule's decision, when training data are
collected."""
EXPLORED_TOP = 3
"""The random candidate is one of so many with the largest value."""

decide = policy.decide
Choose = Callable[[Situation, Sequence[SwitchCandidate], np.ndarray, int | None], int | None]
"""(situation, candidates, features, the rule's choice) to the candidate to take; None: stay."""


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """A run: a scenario on a setting with a seed."""

    setting: str
    scenario: str
    seed: int


class Decider:
    """Stands in for `policy.decide` in one simulated run, and records its decisions.

    Args:
      simulation: the run.
      choose: chooses a candidate where there is a choice; None: the rule does.
      is_labelled: whether to record the labels.
      has_true_ratios: whether the rule sees the true ratios of step times.
    """

    def __init__(
        self,
        simulation: Simulation,
        choose: Callable[["Decider"], Choose] | None = None,
        *,
        is_labelled: bool = False,
        has_true_ratios: bool = False,
    ):
        self.hindsight, self.records = Hindsight(simulation), list[dict[str, Any]]()
        self._run, self._is_labelled, self._has_true_ratios = (
            simulation,
            is_labelled,
            has_true_ratios,
        )
        self._choose, self._has_changed, self._num_decisions = choose and choose(self), False, 0

    def __call__(self, situation: Situation, candidates: Sequence[SwitchCandidate]) -> Decision:
        """Decide as `policy.decide` does."""
        self._has_changed |= situation.regime.durations is not None or situation.is_unexplained
        if self._has_true_ratios and not situation.mandatory:
            candidates = [self.hindsight.with_true_ratios(situation, each) for each in candidates]
        ruled = decide(situation, candidates)
        if situation.mandatory or situation.blocked or not candidates:
            return ruled
        features = features_of(situation, candidates, self._history())
        self._num_decisions += 1
        rule = taken = _index(ruled, candidates)
        if self._choose is not None:
            taken = self._choose(situation, candidates, features, rule)
        self._record(situation, candidates, features, rule)
        return ruled if taken == rule else _decision(situation, candidates, ruled, taken)

    def _history(self) -> History:
        events = self._run.run_events
        return History(
            num_switches=sum(each.kind in ("switch", "failed") for each in events),
            num_decisions=self._num_decisions,
            has_changed=self._has_changed,
        )

    def _record(
        self,
        situation: Situation,
        candidates: Sequence[SwitchCandidate],
        features: np.ndarray,
        rule: int | None,
    ) -> None:
        record: dict[str, Any] = {
            "features": features.tolist(),
            "barred": [bool(each.barred) for each in candidates],
            "rule": rule,
        }
        if self._is_labelled:
            labels = self.hindsight.labels(situation, candidates)
            if not np.isfinite(labels.whole_s) or labels.whole_s <= 0:
                return
            record["saved"] = [
                float(f"{share:.5g}") for share in np.nan_to_num(labels.net_s / labels.whole_s)
            ]
        self.records.append(record)


def _index(decision: Decision, candidates: Sequence[SwitchCandidate]) -> int | None:
    """Which candidate a decision takes."""
    for place, each in enumerate(candidates):
        if (each.plan, each.without) == (decision.plan, decision.without) and not each.barred:
            return place
    return None


def _decision(
    situation: Situation,
    candidates: Sequence[SwitchCandidate],
    ruled: Decision,
    taken: int | None,
) -> Decision:
    """The rule's decision with another choice."""
    regime = situation.regime
    if taken is None:
        return replace(
            ruled,
            action="stay",
            why=f"{situation.trigger}: the learnt policy stays",
            plan=None,
            switch_method=None,
            at_step=None,
            without=frozenset(),
            wait_s=None
            if regime.durations is None
            else constants.REVIEW_AFTER_SHARE * regime.elapsed_s,
        )
    candidate = candidates[taken]
    return replace(
        ruled,
        action="switch",
        why=f"{situation.trigger}: the learnt policy takes {candidate.plan.axes}",
        plan=candidate.plan,
        switch_method=candidate.switch_method,
        at_step=situation.at_step,
        without=candidate.without,
        wait_s=None,
    )


def exploring(seed: int) -> Callable[[Decider], Choose]:
    """Now and then takes a random one of the candidates with the largest value."""
    random, net = np.random.default_rng([seed, 8]), FEATURES.index("net")

    def choose(
        situation: Situation,
        candidates: Sequence[SwitchCandidate],
        features: np.ndarray,
        rule: int | None,
    ) -> int | None:
        top = [
            int(place)
            for place in np.argsort(-features[:, net], kind="stable")
            if not candidates[place].barred
        ][:EXPLORED_TOP]
        return int(random.choice(top)) if random.random() < EXPLORED and top else rule

    return lambda decider: choose


def learnt(found: Learnt) -> Callable[[Decider], Choose]:
    """Chooses as the learnt policy does."""
    return lambda decider: (
        lambda situation, candidates, features, rule: found.choose(
            features, np.array([bool(each.barred) for each in candidates])
        )
    )


def by_labels(decider: Decider) -> Choose:
    """Chooses the candidate with the largest label, if that is positive."""

    def choose(
        situation: Situation,
        candidates: Sequence[SwitchCandidate],
        features: np.ndarray,
        rule: int | None,
    ) -> int | None:
        net_s = decider.hindsight.labels(situation, candidates).net_s
        usable = np.where([bool(each.barred) for each in candidates], -np.inf, net_s)
        return int(usable.argmax()) if usable.max() > 0 else None

    return choose


def simulated(
    case: Case, choose: Callable[[Decider], Choose] | None = None, **options: bool
) -> tuple[Result, list[dict[str, Any]]]:
    """Run the controller with this way to choose. Returns its result and its decisions.

    Raises OptimusError if the scenario is impossible on the setting.
    """
    truth = Truth(setup_of(find_scenario(case.scenario), SETTINGS[case.setting]), case.seed)
    make, simulation_options = POLICIES[AUTO]
    simulation = Simulation(
        truth, make(truth.setup, searcher(), truth.setup.settings), simulation_options
    )
    decider = Decider(simulation, choose, **options)
    with mock.patch.object(policy, "decide", decider):
        return Result.of(simulation.run()), decider.records
