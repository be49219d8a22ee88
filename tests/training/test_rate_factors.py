"""Factors on the learning rate, by group and layer, alone and under plans of the shared list."""

import functools
import typing
from dataclasses import replace
from typing import Any

import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, assert_close, host_leaves, relative_error
from test_equal_to_one_device import Run, one_device, run_case

import optimus_jax
from optimus_jax.config import Config, LearningRateFactors, Tuning
from optimus_jax.config.settings import field_types
from optimus_jax.config.tuning import ParameterGroup
from optimus_jax.errors import ConfigError
from optimus_jax.reshard.reshard import Layout, Move
from optimus_jax.training.step import build_program

FACTORS = {"embedding": 0.25, "attention": 0.5, "mlp": 2.0, "norm": 3.0}
DECAY = 0.75
SETTINGS: tuple[tuple[str, Any], ...] = (
    *((f"optimizer.lr_factors.{group}", factor) for group, factor in FACTORS.items()),
    ("optimizer.layer_lr_decay", DECAY),
)
DAILY = (4, 31)
"""Numbers of plans that `make test` compares; the others are nightly."""
LAYERS = 3


def expected_factor(path: str) -> float | np.ndarray:
    """The factor of a leaf of the model with LAYERS layers; of every layer, if it is a stack."""
    group = next(
        group
        for word, group in {
            "norm": "norm",
            "attention/": "attention",
            "mlp/": "mlp",
            "embedding/": "embedding",
            "positions": "embedding",
        }.items()
        if word in path
    )
    if "layers/" in path:
        return FACTORS[group] * np.array([DECAY**2, DECAY, 1.0])
    return FACTORS[group] * (DECAY**LAYERS if group == "embedding" else 1.0)


def test_there_is_a_factor_for_every_group():
    assert tuple(field_types(LearningRateFactors)) == typing.get_args(ParameterGroup)


def test_a_factor_multiplies_the_whole_update():
    """Weight decay too. The first step is the same up to there."""
    before = host_leaves(plans.random_state(one_device(plans.GPT).built.program))
    plain, scaled = one_device(plans.GPT).states[0], one_device(plans.GPT, *SETTINGS).states[0]
    for path in (path for path in plain if path.startswith("params/")):
        moved, factor = plain[path] - before[path], expected_factor(path)
        assert np.abs(moved).max() > 1e-4, path
        shape = (-1, *[1] * (moved.ndim - 1)) if np.ndim(factor) else ()
        expected = before[path] + np.reshape(factor, shape) * moved
        assert relative_error(scaled[path], expected) <= F32_RELATIVE, path
    for path in (path for path in plain if path.startswith("opt_state/")):
        np.testing.assert_array_equal(plain[path], scaled[path], path)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            number, marks=() if number in DAILY else pytest.mark.nightly, id=f"{number} {case}"
        )
        for number, case in enumerate(plans.PLANS)
    ],
)
def runs(request) -> tuple[Run, Run]:
    """A plan's run, and one device's."""
    case = plans.PLANS[request.param]
    model = plans.model_for(case, "gpt")
    return run_case(model, case, dict(SETTINGS)), one_device(model, *SETTINGS)


def test_every_plan_equals_one_device(runs):
    run, one = runs
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        assert_close(found, expected, F32_RELATIVE)
    for found, expected in zip(run.states, one.states, strict=True):
        assert_close(found, expected, F32_RELATIVE)


def test_a_run_goes_on_under_another_plan():
    """Interleaved stages hold layers in another order, with empty slots."""
    case = plans.case("pipe=2,data=2", schedule="interleaved", microbatches=4)
    model = plans.model_for(case, "gpt")
    source, target = (
        plans.build(model, each, dict(SETTINGS)) for each in (case, plans.case("data=4"))
    )
    assert source.program.shapes.slots != tuple(range(model.num_layers))
    state, _ = plans.compiled_step(source)(plans.random_state(source.program), source.batch)
    layouts = [
        Layout(leaves=each.program.abstract_state(), slots=each.program.shapes.slots)
        for each in (source, target)
    ]
    state = Move(*layouts, budget_bytes=2**30).run(state)
    state, _ = plans.compiled_step(target)(state, plans.batch_of_step(target.program, 2))
    expected = one_device(model, *SETTINGS).states[1]
    assert_close(plans.in_order(target.program, host_leaves(state)), expected, F32_RELATIVE)


@functools.cache
def lowered(*settings: tuple[str, Any]) -> str:
    built = plans.build(plans.LLAMA, plans.case("fsdp=2,tensor=2", zero=3), dict(settings))
    state = built.program.abstract_state()
    return built.program.train_step.lower(state, built.batch).as_text()


def test_factors_of_one_change_no_program():
    ones = (("optimizer.lr_factors.mlp", 1.0), ("optimizer.layer_lr_decay", 1.0))
    assert lowered(*ones) == lowered()
    assert lowered(("optimizer.lr_factors.mlp", 2.0)) != lowered()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_factors.mlp": 0.0}, "lr_factors.mlp must be positive"),
        ({"lr_factors.norm": -1.0}, "lr_factors.norm must be positive"),
        ({"layer_lr_decay": 0.0}, "layer_lr_decay is a factor above 0"),
        ({"layer_lr_decay": 1.5}, "layer_lr_decay is a factor above 0"),
        ({"lr_factors.mpl": 2.0}, "unknown setting"),
    ],
)
def test_invalid_factors_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config().with_values({f"optimizer.{name}": value for name, value in settings.items()})


HEAD_ALONE = Tuning(freeze=("embedding", "attention", "mlp", "norm"))


@pytest.mark.parametrize(
    ("model", "tuning", "name", "message"),
    [
        (plans.GPT, Tuning(), "lr_factors.adapter", "group 'adapter' is trained"),
        (plans.GPT, Tuning(), "lr_factors.head", "group 'head' is trained"),
        (plans.LLAMA, Tuning(freeze=("mlp",)), "lr_factors.mlp", "group 'mlp' is trained"),
        (plans.LLAMA, HEAD_ALONE, "layer_lr_decay", "no layer is trained"),
    ],
)
def test_factors_of_what_is_not_trained_are_refused(model, tuning, name, message):
    settings = {f"optimizer.{name}": 0.5}
    config = plans.make_config(replace(model, tuning=tuning), plans.ONE_DEVICE, settings)
    with pytest.raises(ConfigError, match=message):
        build_program(config, plans.make_plan(config))


def test_a_run_with_a_useless_factor_does_not_begin(tmp_path):
    settings: dict[str, Any] = {"optimizer.lr_factors.adapter": 2.0}
    with pytest.raises(ConfigError, match="group 'adapter' is trained"):
        optimus_jax.train("gpt2-nano", run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
