"""A fit recovers the rates that made some steps, is robust to outliers, and widens its interval far
from measured shapes.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from pricing import GPT, HOST, RATES, plan_of

from optimus_jax.planning.cost.corrections import factor, likeness, spread
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.learning.fit import FITTED, Sample, fit_rates

TRUE_RATES = replace(
    RATES,
    matmul_flops_per_s=0.8 * RATES.matmul_flops_per_s,
    collective_share=0.5,
    memory_bytes_per_s=1.2 * RATES.memory_bytes_per_s,
)
MESHES = ("data=1", "tensor=2", "tensor=4", "tensor=8", "data=2,tensor=2", "pipe=2,tensor=2")
LOOSE: dict[str, float] = dict.fromkeys(
    ("matmul_flops_per_s", "memory_bytes_per_s", "collective_share"), 30.0
)
"""Priors wide enough that samples decide."""


def samples(model=GPT, batches=(8, 16, 32), slower=lambda plan: 1.0) -> list[Sample]:
    found = []
    for mesh in MESHES:
        for batch in batches:
            plan = plan_of(mesh, model, microbatches=4)
            sample = Sample(
                workload=Workload(model=model, seq_len=1024, global_batch=batch),
                plan=plan,
                cluster=HOST,
                step_time_s=1.0,
            )
            found.append(
                replace(sample, step_time_s=sample.predicted(TRUE_RATES).step_time_s * slower(plan))
            )
    return found


def errors(rates, targets) -> np.ndarray:
    return np.array(
        [sample.predicted(rates).step_time_s / sample.step_time_s - 1 for sample in targets]
    )


def test_fit_recovers_the_rates_that_made_the_samples():
    rates = fit_rates(samples(), RATES, fitted=LOOSE)
    for name in LOOSE:
        assert getattr(rates, name) == pytest.approx(getattr(TRUE_RATES, name), rel=0.03), name


def test_fit_predicts_a_model_of_another_width():
    wider = replace(
        GPT, embed_dim=2 * GPT.embed_dim, head_dim=2 * GPT.head_dim, mlp_dim=2 * GPT.mlp_dim
    )
    targets = samples(wider)
    assert np.abs(errors(RATES, targets)).mean() > 0.1, "or there is nothing to learn"
    assert np.abs(errors(fit_rates(samples(), RATES), targets)).mean() < 0.04


def test_outliers_hardly_move_the_fit():
    """One sample in nine took twice as long."""
    known = samples()
    spoilt = [
        replace(sample, step_time_s=2 * sample.step_time_s) if number % 9 == 4 else sample
        for number, sample in enumerate(known)
    ]
    rates = fit_rates(spoilt, RATES, fitted=LOOSE)
    assert rates.matmul_flops_per_s == pytest.approx(TRUE_RATES.matmul_flops_per_s, rel=0.1)


def test_corrections_by_shape_catch_what_rates_cannot_explain():
    """At tensor=4 steps take 30% longer, which no rate explains."""
    odd = lambda plan: 1.3 if plan.axes.tensor == 4 else 1.0  # noqa: E731
    known = samples(slower=odd)
    rates = fit_rates(known, RATES, fitted=LOOSE)
    deeper = samples(replace(GPT, num_layers=64), slower=odd)
    assert np.abs(errors(replace(rates, corrections=()), deeper)).max() > 0.1
    assert np.abs(errors(rates, deeper)).max() < 0.05, "another depth has the same shapes"


def test_interval_is_narrow_near_measured_shapes_and_wide_elsewhere():
    known = samples()
    rates = fit_rates(known, RATES)
    near, far = spread(rates, "layer", known[0].place()), spread(rates, "layer", (2.0, 2.0, 0.0))
    assert near == pytest.approx(rates.spread_nearby)
    assert far == pytest.approx(rates.spread, rel=1e-3)
    assert near < far / 3


def test_rates_without_samples_keep_the_prior():
    rates = fit_rates(samples(), RATES)
    assert rates.inter_host_share == pytest.approx(RATES.inter_host_share), (
        "no sample has two hosts"
    )
    assert set(FITTED) <= set(vars(rates))
    assert "fitted to 18 measured steps" in rates.source


def test_far_shapes_have_no_correction():
    rates = fit_rates(samples(slower=lambda plan: 1.3), replace(RATES), fitted={"step_s": 0.01})
    assert factor(rates, "layer", samples()[0].place()) > 1.15
    assert factor(rates, "layer", (60.0, 60.0, 60.0)) == pytest.approx(1.0)


def test_likeness_falls_with_distance():
    place = (10.0, 11.0, 0.0)
    assert likeness(place, place, 0.2) == 1
    assert 0.5 < likeness(place, (11.0, 11.0, 0.0), 0.2) < 0.52
    assert likeness(place, (12.0, 11.0, 1.0), 0.2) == pytest.approx(math.exp(-3 / 1.5))
    assert likeness(place, (10.0, 12.0, 0.0), 0.2) < 0.01, "another width says next to nothing"
    assert likeness(place, (10.0, 12.0, 0.0), 1.5) == pytest.approx(math.exp(-1 / 1.5))
