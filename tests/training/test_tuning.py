"""Adapters, and models of which only some groups are trained, under the shared list of plans."""

from dataclasses import replace

import jax
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, assert_close, host_leaves
from test_equal_to_one_device import Run, one_device, run_case

from optimus_jax.config import ModelConfig, Tuning

LORA = Tuning(method="lora", rank=4, alpha=2.0, dropout=0.2, base_precision="bf16")
"""On all projections; every leaf of it has a gradient in every step of a random state."""
SOME = Tuning(
    method="lora",
    rank=3,
    rank_scaling="sqrt_rank",
    targets=("value", "gate", "up"),
    freeze=("mlp",),
)
"""On some projections, and beside it everything but the feed-forward is trained."""
IA3 = Tuning(method="ia3")
GROUPS = Tuning(freeze=("embedding", "attention"))
TUNINGS = {"lora": LORA, "some": SOME, "ia3": IA3, "groups": GROUPS}
DAILY = {("lora", number) for number in range(0, len(plans.PLANS), 4)} | {
    ("some", 9),
    ("ia3", 12),
    ("ia3", 2),
    ("groups", 24),
    ("groups", 3),
}
"""Pairs of a tuning and the number of a plan that `make test` compares; the others are nightly."""


def tuned(case: plans.PlanCase, number: int, tuning: Tuning) -> ModelConfig:
    model = plans.model_for(case, list(plans.MODELS)[number % len(plans.MODELS)])
    return replace(model, tuning=tuning)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, number),
            marks=() if (name, number) in DAILY else pytest.mark.nightly,
            id=f"{name} {case}",
        )
        for name in TUNINGS
        for number, case in enumerate(plans.PLANS)
    ],
)
def runs(request) -> tuple[Run, Run]:
    """A plan's run, and one device's."""
    name, number = request.param
    case = plans.PLANS[number]
    model = tuned(case, number, TUNINGS[name])
    clip = ("optimizer.clip_norm", 0.01)
    return run_case(model, case, dict([clip])), one_device(model, clip)


def test_it_equals_one_device(runs):
    run, one = runs
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        assert expected["grad_norm"] > run.built.config.optimizer.clip_norm
        assert_close(found, expected, F32_RELATIVE)
    for found, expected in zip(run.states, one.states, strict=True):
        assert_close(found, expected, F32_RELATIVE)


def test_frozen_leaves_stay_and_have_no_moments(runs):
    _, one = runs
    program = one.built.program
    before, after = host_leaves(plans.random_state(program)), one.states[1]
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(program.shapes.leaves)
    }
    assert {leaf.trained for leaf in names.values()} == {True, False}
    for name, leaf in names.items():
        assert (before[f"params/{name}"] != after[f"params/{name}"]).any() == leaf.trained, name
        for moment in ("mu", "nu"):
            assert (f"opt_state/0/{moment}/{name}" in after) == leaf.trained, name
            if leaf.trained:
                assert np.abs(after[f"opt_state/0/{moment}/{name}"]).max() > 0, name
