"""benchmarks/learnt_decisions.py: labels are what switches truly save, regressions learn them, and
a learnt policy wins by its margin or not at all.
"""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from optimus_jax.control.deciding.account import Allowance
from optimus_jax.control.deciding.value import Regime
from optimus_jax.control.policy import Situation, SwitchCandidate, decide
from optimus_jax.errors import ConfigError
from optimus_jax.simulation.baseline_policies import Static
from optimus_jax.simulation.comparison import AUTO, Result, run_policy
from optimus_jax.simulation.named_scenarios import library
from optimus_jax.simulation.oracle import STATIC, run_static
from optimus_jax.simulation.setup import Truth
from optimus_jax.simulation.simulator import Simulation

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def folder():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield


@pytest.fixture(scope="module")
def benchmark(folder):
    return import_module("learnt_decisions")


@pytest.fixture(scope="module")
def runs(folder):
    return import_module("decision_runs")


@pytest.fixture(scope="module")
def learners(folder):
    return import_module("decision_learners")


@pytest.fixture(scope="module")
def report(folder):
    return import_module("learnt_decisions_report")


def names():
    return import_module("decision_features").FEATURES


# Labels


@pytest.fixture(scope="module")
def new_run(folder):
    """A run that has not begun, 1000 s long, and two other plans, the faster one first."""
    simulated_control = import_module("simulated_control")
    setting = simulated_control.SETTINGS["gpt2-xl-h100"]
    scenario = replace(library()["default-start"], duration_s=1000.0)
    truth = Truth(simulated_control.setup_of(scenario, setting), 0)
    simulation = Simulation(truth, Static(truth.setup.start, 64), STATIC)
    plans = simulated_control.searcher().plans(truth.setup.nominal[0])
    times_s = {plan: run_static(truth, plan).total_s for plan in plans if plan.num_devices == 64}
    ordered = sorted(times_s, key=lambda plan: times_s[plan])
    assert times_s[ordered[0]] < truth_time(truth) < times_s[ordered[-1]]
    return simulation, ordered[0], ordered[-1]


def truth_time(truth):
    return run_static(truth, truth.setup.start).total_s


def situation(**values):
    return Situation(
        step=0,
        trigger="news",
        step_time_s=1.0,
        horizon_s=1000.0,
        regime=Regime(elapsed_s=100.0, durations=None),
        account=Allowance(share=0.02),
        whole_s=1100.0,
        **values,
    )


def candidate(plan, log_ratio=-0.2, **values):
    return SwitchCandidate(
        plan=plan,
        switch_method="remesh",
        log_ratio=log_ratio,
        deviation=0.1,
        cost_s=10.0,
        **values,
    )


@pytest.mark.slow
def test_a_label_is_the_difference_of_the_two_runs(new_run):
    simulation, faster, slower = new_run
    hindsight = import_module("decision_labels").Hindsight(simulation)
    labels = hindsight.labels(situation(), [candidate(faster), candidate(slower)])
    truth = simulation.truth
    assert labels.left_s == labels.whole_s == pytest.approx(truth_time(truth))
    costs = hindsight._costs.switch_s(
        simulation.place,
        type(simulation.place)(faster, simulation.place.devices),
        truth.timeline.at(0.0),
        0,
    )
    saved_s = truth_time(truth) - run_static(truth, faster).total_s
    assert labels.net_s[0] == pytest.approx(saved_s - sum(costs.values()))
    kept_s = truth_time(truth) - run_static(truth, slower).total_s
    assert kept_s < labels.net_s[1] < 0, "a slower plan is taken back after its trial"


@pytest.mark.slow
def test_a_perfect_predictor_knows_the_ratio(new_run):
    simulation, faster, _ = new_run
    hindsight = import_module("decision_labels").Hindsight(simulation)
    known = hindsight.with_true_ratios(situation(), candidate(faster, log_ratio=0.5))
    truth = simulation.truth
    ratio = run_static(truth, faster).total_s / truth_time(truth)
    assert (known.log_ratio, known.deviation) == pytest.approx((np.log(ratio), 0.0))


# Regressions


def examples(learners, target, *, count=240, candidates=3):
    """Decisions with random features, whose savings are a function of [candidates, FEATURES]."""
    random = np.random.default_rng(0)
    found = []
    for number in range(count):
        features = random.uniform(-1, 1, (candidates, len(names())))
        found.append(
            learners.Example(
                group=f"random:{number // 4}",
                features=features,
                saved=target(features),
                is_open=np.ones(candidates, bool),
                rule=None,
            )
        )
    return found


def linear(features):
    return 0.1 * features[:, 0] - 0.05 * features[:, 2] - 0.02


def interaction(features):
    return 0.3 * ((features[:, 0] > 0) & (features[:, 1] > 0)) - 0.1


def mean_best(learners, found):
    return np.mean([learners.saved(each, each.saved, 0.0) for each in found])


@pytest.mark.slow
def test_regressions_learn_what_they_can_say(learners):
    sums, both = examples(learners, linear), examples(learners, interaction)
    assert learners.learn(sums, "ridge").saved > 0.95 * mean_best(learners, sums)
    assert learners.learn(both, "trees").saved > 0.9 * mean_best(learners, both)
    assert learners.learn(both, "ridge").saved < 0.9 * mean_best(learners, both)


def test_learning_is_deterministic(learners):
    found = examples(learners, linear, count=60)
    rows = np.random.default_rng(1).uniform(-1, 1, (5, len(names())))
    for kind in learners.POLICIES:
        first, second = (learners.learn(found, kind).predict(rows) for _ in range(2))
        assert first.tolist() == second.tolist()
        assert len(set(first)) > 1


def test_careful_policies_switch_as_often_as_the_rule(learners):
    found = [
        replace(each, rule=0 if number % 10 == 0 else None)
        for number, each in enumerate(examples(learners, linear))
    ]
    assert learners.learn(found, "careful ridge").rate == pytest.approx(0.1)
    assert learners.learn(found, "ridge").rate > 0.5


def test_the_best_candidate_above_the_margin_is_taken_unless_barred(learners):
    def policy(margin):
        return learners.Learnt(
            predict=lambda features: features[:, 0], margin=margin, setting=1.0, saved=0.0, rate=0.0
        )

    features = np.zeros((3, len(names())))
    features[:, 0] = [0.03, 0.05, -0.1]
    free, barred = np.zeros(3, bool), np.array([False, True, False])
    assert policy(0.0).choose(features, free) == 1
    assert policy(0.0).choose(features, barred) == 0
    assert policy(0.04).choose(features, barred) is None
    assert policy(0.0).choose(features[:0], free[:0]) is None


@pytest.mark.slow
def test_features_are_named_and_finite(new_run):
    _, faster, slower = new_run
    candidates = [candidate(faster), candidate(slower, log_ratio=60.0)]
    module = import_module("decision_features")
    found = module.features_of(situation(), candidates, module.History(num_switches=2))
    named = [dict(zip(names(), row, strict=True)) for row in found]
    assert np.isfinite(found).all()
    assert (named[0]["log_ratio"], named[0]["remesh"], named[0]["restart"]) == (-0.2, 1.0, 0.0)
    assert named[0]["left"] == 0.90909, "as it is stored"
    assert (named[0]["rank"], named[1]["rank"]) == (0.0, 0.1)
    assert named[1]["lead"] < 0 < named[0]["lead"]


def test_the_best_few_by_the_rule_are_considered():
    module = import_module("decision_features")
    features = np.zeros((5, len(names())))
    features[:, names().index("net")] = [0.1, 0.5, 0.3, 0.2, -0.4]
    barred = np.array([False, True, False, False, False])
    found = module.considered(features, barred)
    assert found.tolist() == [True, False, True, True, False]
    assert module.considered(features, np.ones(5, bool)).sum() == 0


# Runs


@pytest.mark.slow
@pytest.mark.nightly  # three runs of a whole scenario
def test_the_rule_decides_as_without_the_benchmark(runs):
    case = runs.Case(setting="gpt2-xl-h100", scenario="wrong-prior", seed=0)
    simulated_control = import_module("simulated_control")
    setup = simulated_control.setup_of(
        library()[case.scenario], simulated_control.SETTINGS[case.setting]
    )
    plain = run_policy(AUTO, Truth(setup, case.seed), simulated_control.searcher())
    result, decisions = runs.simulated(case)
    assert (result.total_s, result.event_counts) == (plain.total_s, plain.event_counts)
    assert decisions
    stays, _ = runs.simulated(case, lambda decider: lambda *arguments: None)
    assert stays.event_counts.get("switch", 0) == 0


@pytest.mark.slow
def test_a_learnt_switch_is_one_of_the_candidates(runs, new_run):
    simulation, faster, slower = new_run
    decider = runs.Decider(simulation, lambda decider: lambda *arguments: 1)
    candidates = [candidate(faster), candidate(slower, log_ratio=1.0)]
    made = decider(situation(), candidates)
    assert (made.action, made.plan, made.switch_method) == ("switch", slower, "remesh")
    blocked = situation(blocked="a trial runs")
    assert decider(blocked, candidates) == decide(blocked, candidates)


def test_training_data_continue_where_they_were_stopped(benchmark, runs, monkeypatch, tmp_path):
    done, data = [], tmp_path / "new" / "data.jsonl"

    def simulated(case, choose, **options):
        done.append(case.seed)
        features = np.full((1, len(names())), 0.1)
        record = {"features": features.tolist(), "saved": [0.1], "barred": [False], "rule": None}
        return Result(total_s=1.0, event_counts={}), [record]

    monkeypatch.setattr(benchmark, "simulated", simulated)
    cases = [runs.Case(setting="llama-a100", scenario="random:0", seed=seed) for seed in range(3)]
    with pytest.raises(ConfigError, match=r"no training data[\s\S]*learnt_decisions.py collect"):
        benchmark.examples_in(data)
    benchmark.collect(cases[:2], data)
    data.write_text(data.read_text() + '{"setting": "llama-a1')
    data.write_text(data.read_text() + "\n")
    benchmark.collect(cases, data)
    assert done == [0, 1, 2]
    assert len(benchmark.examples_in(data)) == 3


def test_a_policy_that_agrees_with_the_rule_has_its_result(
    benchmark, runs, learners, monkeypatch, tmp_path
):
    case = runs.Case(setting="llama-a100", scenario="random:0", seed=0)
    features = np.zeros((1, len(names()))).tolist()
    record = {"features": features, "barred": [False], "rule": None}
    done = []

    def run(case, method, policies):
        done.append(method)
        return Result(total_s=100.0, event_counts={}), [record] * (method == "rule")

    def policy(predicted):
        return learners.Learnt(
            predict=lambda rows: np.full(len(rows), predicted),
            margin=0.0,
            setting=1.0,
            saved=0.0,
            rate=0.0,
        )

    monkeypatch.setattr(benchmark, "_run", run)
    monkeypatch.setattr(benchmark, "examples_in", lambda data: [])
    monkeypatch.setattr(
        benchmark, "learn", lambda examples, kind: policy({"ridge": -0.1, "trees": 0.1}[kind])
    )
    methods = ("stay", "oracle", "rule", "ridge", "trees")
    out = tmp_path / "out.jsonl"
    found = benchmark.compare([case], methods, tmp_path / "data.jsonl", out)
    assert set(found[case]) == set(methods)
    assert done == ["stay", "oracle", "rule", "trees"]
    assert benchmark.compare([case], methods, tmp_path / "data.jsonl", out) == found
    assert done == ["stay", "oracle", "rule", "trees"], "nothing runs again"
    assert all(json.loads(line)["simulated"] for line in out.read_text().splitlines())


# The report


def compared(runs, learnt_s, *, scenario="random:{}", switches=1):
    """Results of ten runs that stay 100 s, the rule's 95 s and the oracle's 90 s."""

    def result(total_s, switches=0):
        return Result(total_s=total_s, event_counts={"switch": switches})

    return {
        runs.Case(setting="llama-a100", scenario=scenario.format(seed), seed=seed): {
            "stay": result(100.0),
            "oracle": result(90.0),
            "rule": result(95.0),
            "ridge": result(time_s, switches),
        }
        for seed, time_s in enumerate(learnt_s)
    }


@pytest.mark.parametrize(
    ("learnt_s", "scenario", "switches", "wins"),
    [
        ([94.0] * 10, "random:{}", 1, True),
        ([94.8] * 10, "random:{}", 1, False),
        ([80.0] + [95.5] * 9, "random:{}", 1, False),
        ([90.0] * 9 + [103.0], "random:{}", 1, False),
        ([94.0] * 10, "stationary", 1, False),
        ([94.0] * 10, "stationary", 0, True),
    ],
    ids=["clearly", "by too little", "by luck", "with a loss", "in vain", "without a switch"],
)
def test_a_policy_wins_by_the_margin_or_not_at_all(
    report, runs, learnt_s, scenario, switches, wins
):
    found = compared(runs, learnt_s, scenario=scenario, switches=switches)
    text = report.report(found, ("stay", "oracle", "rule", "ridge"))
    assert f"ridge {'wins' if wins else 'does not win'} by the margin" in text


def test_the_table_is_paired_with_the_rule(report, runs):
    found = compared(runs, [94.0] * 10)
    text = report.report(found, ("stay", "oracle", "rule", "ridge"))
    assert "| ridge | 6.00% | +1.00% [+1.00%, +1.00%] | 60% | 0 | 6.0% | 1.00 | 0 |" in text
    assert "drawn, 10 runs" in text
    assert "named" not in text
    assert report.report({}, ("stay",)) == "No case has results of all methods."
