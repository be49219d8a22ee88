"""Any row of OPTIMIZERS trains under every layout, and whoever holds its state reads it from that
state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plans
import pytest
from helpers import F32_RELATIVE, assert_close
from test_equal_to_one_device import run_case

from optimus_jax.config import Config, OptimizerConfig
from optimus_jax.errors import ConfigError
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.training.optimizer import (
    OPTIMIZERS,
    Optimizer,
    moments_per_parameter,
    optimizer_named,
    peak_learning_rate,
)
from optimus_jax.training.state import bytes_on_device


def lion_like(config: OptimizerConfig) -> optax.GradientTransformation:
    """Lion (arXiv:2302.06675) has one moment and no counter.

    Its sign is softened: that of a gradient which is zero, as of the keys' biases, is rounding.
    """

    def update(gradients, moment, params=None):
        del params
        mixed = jax.tree.map(
            lambda m, g: config.beta1 * m + (1 - config.beta1) * g, moment, gradients
        )
        new = jax.tree.map(
            lambda m, g: config.beta2 * m + (1 - config.beta2) * g, moment, gradients
        )
        return jax.tree.map(lambda m: m / (abs(m) + 1e-3), mixed), new

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.fixture(params=["sgd", "lion"])
def name(request, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "lion", Optimizer(direction=lion_like))
    return request.param


CASES = [
    plans.case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2),
    plans.case("pipe=2,fsdp=4", zero=2, microbatches=4, offload="optimizer"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_optimizer_of_one_row_equals_one_device(name, case):
    model = plans.model_for(case, "gpt")
    settings = {"optimizer.name": name, "optimizer.lr": 1e-3}
    run, one = (run_case(model, each, settings) for each in (case, plans.ONE_DEVICE))
    for ours, theirs in zip(run.states, one.states, strict=True):
        for path in theirs:
            assert_close(ours[path], theirs[path], F32_RELATIVE)
    moved = run.states[1]["params/layers/mlp/up"] - run.states[0]["params/layers/mlp/up"]
    assert np.abs(moved).max() > 0


def test_the_planner_counts_the_moments_that_an_optimizer_has(name):
    built = plans.build(plans.GPT, CASES[0], {"optimizer.name": name, "optimizer.lr": 1e-3})
    assert moments_per_parameter(name) == 1
    memory = memory_of_run(built.config, built.plan)
    state = built.program.abstract_state()
    scalars = 64
    assert memory.states == pytest.approx(bytes_on_device(state), abs=scalars)
    adam = memory_of_run(built.config.with_values({"optimizer.name": "adamw"}), built.plan)
    assert adam.moments == 2 * memory.moments


def test_moments_of_another_shape_than_the_parameter_are_refused(monkeypatch):
    factored = Optimizer(direction=lambda _: optax.scale_by_factored_rms(min_dim_size_to_factor=8))
    monkeypatch.setitem(OPTIMIZERS, "factored", factored)
    settings = {"optimizer.name": "factored", "optimizer.lr": 1e-3}
    with pytest.raises(ConfigError, match="another shape than its parameter"):
        plans.build(plans.GPT, CASES[0], settings)


def test_a_row_that_is_replaced_is_counted_anew(monkeypatch):
    for direction, moments in ((lion_like, 1), (lambda _: optax.scale_by_adan(), 4)):
        monkeypatch.setitem(OPTIMIZERS, "mine", Optimizer(direction=direction))
        assert moments_per_parameter("mine") == moments


def test_an_unknown_optimizer_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="adamw"):
        optimizer_named("adam")


def test_sgd_has_no_default_learning_rate():
    with pytest.raises(ConfigError, match="--lr"):
        peak_learning_rate(Config().with_values({"optimizer.name": "sgd"}).optimizer, 10**6)
