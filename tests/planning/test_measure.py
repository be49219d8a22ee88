"""Which candidate plans are tried, with fake trials."""

from dataclasses import replace

import pytest

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import PlanError
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Pricing, search
from optimus_jax.planning.trials.measure import TRIAL_STEPS, expected_gain, measure
from optimus_jax.planning.trials.trial import PlanTrial, run_trial

CLUSTER = Cluster.parse("h100:8")
RANKED = search(
    Pricing(
        Config(model=model_preset("gpt2-xl"), data=DataConfig(global_batch=32, seq_len=1024)),
        CLUSTER,
        Rates.of(CLUSTER.accelerator),
    ),
    top=6,
).best


class Trials:
    """Fake trials that take `factors` times the prediction, in turn; None: does not fit."""

    def __init__(self, factors, compile_s=10.0):
        self.factors, self.compile_s, self.tried = factors, compile_s, []

    def __call__(self, plan):
        factor = self.factors[len(self.tried)]
        self.tried.append(plan)
        if factor is None:
            raise PlanError("needs more than there is")
        predicted_s = next(
            candidate for candidate in RANKED if candidate.plan == plan
        ).prediction.step_time_s
        return PlanTrial(
            plan=plan,
            step_time_s=factor * predicted_s,
            shortest_s=factor * predicted_s,
            cpu_s=0.0,
            compile_s=self.compile_s,
            step_bytes=0,
        )


def test_long_run_tries_three_plans_and_keeps_the_fastest():
    trials = Trials([1.0, 1.3, 0.8])
    measured = measure(RANKED, trials, num_steps=10**6, most=3, spread=0.25)
    assert trials.tried == [candidate.plan for candidate in RANKED[:3]]
    assert measured.plan == RANKED[2].plan
    assert len(measured.trials) == 3


def test_short_run_tries_no_plan():
    trials = Trials([1.0, 1.0, 1.0])
    measured = measure(RANKED, trials, num_steps=20, most=3, spread=0.25)
    assert (measured.plan, measured.trials, trials.tried) == (RANKED[0].plan, (), [])
    assert "expected to save" in measured.why


def test_trials_end_when_compiling_costs_more_than_it_can_save():
    """The first trial shows that compiling takes an hour."""
    trials = Trials([1.0, 1.0, 1.0], compile_s=3600.0)
    measured = measure(RANKED, trials, num_steps=5000, most=3, spread=0.25)
    assert len(trials.tried) == 1
    assert measured.plan == RANKED[0].plan


def test_candidates_outside_the_interval_are_not_tried():
    far = [
        RANKED[0],
        *(
            replace(c, prediction=replace(c.prediction, low_s=10 * RANKED[0].prediction.high_s))
            for c in RANKED[1:]
        ),
    ]
    trials = Trials([1.0, 1.0])
    assert measure(far, trials, num_steps=10**9, most=3, spread=0.25).plan == RANKED[0].plan
    assert trials.tried == []


def test_candidates_that_do_not_fit_are_skipped():
    trials = Trials([None, 1.0, 1.1, 1.2])
    assert measure(RANKED, trials, num_steps=10**6, most=3, spread=0.25).plan == RANKED[1].plan
    later = measure(
        RANKED, Trials([None, None, None, None, 1.0, 1.2]), num_steps=10**6, most=3, spread=0.25
    )
    assert later.plan == RANKED[4].plan
    with pytest.raises(PlanError, match="none of the planner's best plans fits"):
        measure(RANKED, Trials([None] * 6), num_steps=10**6, most=3, spread=0.25)


def test_expected_gain_by_hand():
    assert expected_gain(1.0, [1.0], 0.0) == 0.0
    assert expected_gain(1.0, [0.9], 0.0) == pytest.approx(0.1)
    # E max(0, 1 - exp(s z)) of a standard normal z is Phi(0) - exp(s^2 / 2) Phi(-s).
    # 4,000 draws
    assert expected_gain(1.0, [1.0], 0.2) == pytest.approx(0.5 - 1.0202013 * 0.4207403, rel=0.05)
    assert expected_gain(1.0, [1.0, 1.0], 0.2) > expected_gain(1.0, [1.0], 0.2)


def test_a_trial_runs_the_real_step():
    config = Config(
        model=model_preset("gpt2-nano"), data=DataConfig(global_batch=8, seq_len=32)
    ).with_values({"model.num_layers": 2, "parallel.mesh": "data=2,fsdp=2,tensor=2"})
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.search.choice import choose_plan

    plan = choose_plan(config, discover()).plan
    trial = run_trial(config, plan, num_steps=TRIAL_STEPS)
    assert trial.plan == plan
    assert min(trial.step_time_s, trial.compile_s, trial.cpu_s) > 0
    with pytest.raises(PlanError, match="the compiled step needs"):
        run_trial(config, plan, num_steps=1, bytes_per_device=trial.step_bytes - 1)
