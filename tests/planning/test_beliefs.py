"""The regression of step times: its arithmetic, and what it learns of the errors' sizes."""

import math

import numpy as np
import pytest

from optimus_jax.planning.learning import sizes
from optimus_jax.planning.learning.beliefs import Beliefs, Evidence, Query
from optimus_jax.planning.learning.calibrate import COMMON, TERM, Calibration
from optimus_jax.planning.learning.sizes import OWN, OWN_SPREAD, USUAL_OWN, Sizes


def of_plan(plan: str, setting: str = "", **terms_s: float) -> Query:
    return Query(plan=plan, setting=setting, terms_s=terms_s or {"head": 1.0})


def seen(plan: str, error: float, deviation: float = 0.01, setting: str = "") -> Evidence:
    """A plan that was predicted to take a second, and took exp(error) seconds."""
    return Evidence(query=of_plan(plan, setting), log_time=error, deviation=deviation)


def usual(found: Sizes) -> float:
    """Median of the plans' own deviation."""
    return math.exp(found.weights @ np.log(found.own))


def test_one_hypothesis_is_the_usual_regression(monkeypatch):
    """Two plans of one term: the error of the term is shared, and each has one of its own."""
    monkeypatch.setattr(sizes, "OWN", (0.05,))
    monkeypatch.setattr(sizes, "TERMS", (1.0,))
    shared, own, noise = COMMON**2 + TERM**2, 0.05**2, 0.01**2
    found = Beliefs.given([seen("a", 0.2)], Calibration(), [of_plan("a"), of_plan("b")])
    measured = shared + own + noise
    assert found.mean == pytest.approx([0.2 * (shared + own) / measured, 0.2 * shared / measured])
    assert np.diag(found.covariance) == pytest.approx(
        [
            shared + own - (shared + own) ** 2 / measured,
            shared + own - shared**2 / measured,
        ]
    )
    assert found.calibration.mean == pytest.approx([0.2 * shared / measured])


def test_the_prior_has_its_median_and_spread():
    prior = Sizes.unknown()
    assert prior.weights.sum() == pytest.approx(1)
    assert usual(prior) == pytest.approx(USUAL_OWN, rel=0.1)
    logs = np.log(prior.own)
    assert prior.weights @ (logs - prior.weights @ logs) ** 2 == pytest.approx(
        OWN_SPREAD**2, rel=0.1
    )


@pytest.mark.parametrize("true", [0.01, 0.03, 0.1, 0.3])
def test_the_deviation_of_plans_is_learnt_from_how_they_scatter(true):
    errors = true * np.random.default_rng(0).standard_normal(24)
    evidence = [seen(str(number), 0.1 + error, 0.002) for number, error in enumerate(errors)]
    found = Beliefs.given(evidence, Calibration(), [of_plan("new")])
    assert usual(found.sizes) == pytest.approx(true, rel=0.4)
    assert math.sqrt(found.covariance[0, 0]) == pytest.approx(true, rel=0.5)


def test_one_plan_teaches_little_about_how_plans_scatter():
    found = Beliefs.given([seen("a", 0.1)], Calibration(), [of_plan("b")])
    assert usual(found.sizes) == pytest.approx(USUAL_OWN, rel=0.2)


def test_terms_that_are_far_off_widen_the_terms_errors():
    def factor(error: float) -> float:
        evidence = [seen(str(number), error) for number in range(8)]
        found = Beliefs.given(evidence, Calibration()).sizes
        return float(found.weights @ found.terms)

    assert factor(0.6) > 1.5 * factor(0.05)


def test_moments_are_those_of_the_average_over_hypotheses():
    random = np.random.default_rng(0)
    found = Sizes(np.ones(2), np.ones(2), np.array([0.3, 0.7]))
    means = np.array([[0.0, 1.0], [2.0, -1.0]])
    roots = random.standard_normal((2, 2, 2))
    covariances = roots @ roots.transpose(0, 2, 1)
    drawn = np.concatenate(
        [
            random.multivariate_normal(means[index], covariances[index], size=count)
            for index, count in enumerate((60_000, 140_000))
        ]
    )
    mean, covariance = found.moments(means, covariances)
    assert mean == pytest.approx(drawn.mean(axis=0), abs=0.03)
    assert covariance == pytest.approx(np.cov(drawn.T), abs=0.05)


def test_an_outlier_hardly_changes_the_others_and_keeps_its_own_time():
    evidence = [seen(str(number), 0.02 * (-1) ** number) for number in range(8)]
    asked = [of_plan("new"), of_plan("odd")]
    without = Beliefs.given(evidence, Calibration(), asked)
    found = Beliefs.given([*evidence, seen("odd", 2.0)], Calibration(), asked)
    assert found.mean[0] == pytest.approx(without.mean[0], abs=0.05)
    assert found.mean[1] == pytest.approx(2.0, abs=0.2)


def test_a_plan_is_mostly_as_far_off_in_other_conditions():
    evidence = [seen("a", 0.0), seen("b", 0.2), seen("c", -0.2), seen("d", 0.1), seen("e", -0.1)]
    asked = [of_plan(plan, "slow links") for plan in "abc"]
    found = Beliefs.given(evidence, Calibration(), asked).mean
    assert 0.08 < found[1] - found[0] < 0.19
    assert 0.08 < found[0] - found[2] < 0.19


def test_without_evidence_only_the_prior_speaks():
    found = Beliefs.given([], Calibration(), [of_plan("a"), of_plan("b", head=2.0)])
    assert found.mean == pytest.approx([0.0, math.log(2.0)])
    assert found.covariance[0, 0] > found.covariance[0, 1] > 0
    assert found.sizes.weights == pytest.approx(Sizes.unknown().weights)
    assert set(found.sizes.own) == set(OWN)
