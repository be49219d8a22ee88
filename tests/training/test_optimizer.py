"""Learning rates at the steps that matter, which leaves decay, and AdamW by its definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, relative_error

from optimus_jax.config import Config, OptimizerConfig
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.models.shapes import model_shapes
from optimus_jax.training.optimizer import learning_rate, make_optimizer, peak_learning_rate

PEAK = 0.5
MATRIX, BIAS = Leaf(("embed", "mlp"), "matrix", "mlp"), Leaf(("norm",), "bias", "norm")


def rates(schedule, *, steps=100, warmup=10, **settings):
    """Learning rate of every step, from 1."""
    config = Config(
        steps=steps,
        optimizer=OptimizerConfig(lr=PEAK, schedule=schedule, warmup_steps=warmup, **settings),
    )
    rate = jax.jit(jax.vmap(learning_rate(config, 10**9)))(
        jnp.arange(1, steps + 1, dtype=jnp.int32)
    )
    assert rate.dtype == jnp.float32
    return dict(enumerate(np.asarray(rate).tolist(), 1))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_starts_above_zero(schedule):
    rate = rates(schedule)
    assert rate[1] == pytest.approx(PEAK / 10)
    assert rate[5] == pytest.approx(PEAK / 2)
    assert rate[10] == pytest.approx(PEAK) == max(rate.values())


def test_cosine_schedule_falls_to_the_minimum():
    rate = rates("cosine", min_lr_ratio=0.2)
    assert rate[55] == pytest.approx(PEAK * (0.2 + 1) / 2), "halfway"
    assert rate[32] == pytest.approx(PEAK * (0.2 + 0.8 * (1 + np.cos(np.pi * 22 / 90)) / 2))
    assert rate[100] == pytest.approx(PEAK * 0.2)


def test_linear_schedule_falls_evenly_to_the_minimum():
    rate = rates("linear", min_lr_ratio=0.2)
    assert rate[55] == pytest.approx(PEAK * 0.6)
    assert rate[100] == pytest.approx(PEAK * 0.2)
    assert rate[20] - rate[30] == pytest.approx(rate[70] - rate[80])


def test_wsd_schedule_is_flat_and_then_linear():
    rate = rates("wsd", min_lr_ratio=0.0, decay_fraction=0.3)
    assert {rate[step] for step in range(10, 71)} == {PEAK}
    assert rate[71] < PEAK
    assert rate[85] == pytest.approx(PEAK / 2)
    assert rate[100] == pytest.approx(0, abs=1e-6 * PEAK)


def test_constant_schedule_stays_at_the_peak():
    assert set(list(rates("constant").values())[9:]) == {PEAK}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_first_step_without_warm_up_is_at_the_peak_or_just_below(schedule):
    assert PEAK * 0.98 < rates(schedule, warmup=0)[1] <= PEAK


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_run_shorter_than_its_warm_up_warms_up(schedule):
    rate = rates(schedule, steps=4, warmup=10)
    assert all(0 < rate[step] <= PEAK for step in rate)
    assert rate[4] == pytest.approx(PEAK)


@pytest.mark.parametrize(
    ("num_params", "rate"),
    [
        (3_300_000, 2e-3),
        (124_000_000, 6e-4),
        (355_000_000, 3e-4),
        (774_000_000, 2.5e-4),
        (1_558_000_000, 2e-4),
        (8_000_000_000, 1.2e-4),
        (70_000_000_000, 1e-4),
    ],
)
def test_default_learning_rate_by_model_size(num_params, rate):
    assert peak_learning_rate(OptimizerConfig(), num_params) == rate
    assert peak_learning_rate(OptimizerConfig(lr=0.1), num_params) == 0.1


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_matrices_decay_and_vectors_do_not(name):
    shapes = model_shapes(plans.MODELS[name], 104)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.25), shapes.leaves)
    params, zeros = (
        jax.tree.map(lambda leaf, v=value: np.full(leaf.shape, v, np.float32), shapes.params)
        for value in (2, 0)
    )
    updates, _ = jax.jit(lambda: optimizer.update(zeros, optimizer.init(params), params))()
    decayed = {
        "/".join(key.key for key in path): float(leaf.max())
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
    }
    assert set(decayed.values()) == {0.0, 0.5}
    for path, update in decayed.items():
        is_vector = "norm" in path or "bias" in path
        assert update == (0.0 if is_vector else 0.5), path


def test_adamw_by_its_definition():
    config = OptimizerConfig(beta1=0.8, beta2=0.9, epsilon=0.01, weight_decay=0.3)
    optimizer = make_optimizer(config, {"w": MATRIX, "b": BIAS})
    random = np.random.default_rng(0)
    params = {"w": random.standard_normal((3, 4)), "b": random.standard_normal(3)}
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
    found = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    state = optimizer.init(found)
    for step in (1, 2, 3):
        gradients = {name: random.standard_normal(value.shape) for name, value in params.items()}
        updates, state = optimizer.update(
            jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradients), state, found
        )
        for name, gradient in gradients.items():
            m, v = moments[name]
            m, v = moments[name] = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
            update = m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + 0.01) + (
                0.3 * params[name] if name == "w" else 0
            )
            made: Any = updates
            assert relative_error(np.asarray(made[name]), update) <= F32_RELATIVE
