"""What a step does with numbers that are not finite, and how f16 finds its loss scale.

The plan has data, fsdp and tensor axes at once.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F16_RELATIVE, assert_close, host_leaves

CASE = plans.case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2)
GROWTH_STEPS, HYSTERESIS = 3, 2
TOO_LARGE = 2.0**100
"""A loss scale with which every gradient overflows f16."""


@functools.cache
def program(precision):
    """A program and its compiled step."""
    built = plans.build(
        plans.GPT,
        CASE,
        {
            "precision.compute": precision,
            "precision.loss_scale": 1024,
            "precision.loss_scale_growth_steps": GROWTH_STEPS,
            "precision.loss_scale_hysteresis": HYSTERESIS,
        },
    )
    return built.program, plans.compiled_step(built)


def step(precision, state):
    """The next state and its metrics. `state` stays as it was."""
    made, compiled = program(precision)
    metrics: dict
    state, metrics = compiled(jax.tree.map(jnp.copy, state), plans.batch_of_step(made, 1))
    return state, jax.device_get(metrics)


def with_scale(state, **changes):
    """`state` with other values in its loss scale."""
    old = state.loss_scale
    new = {
        name: jax.device_put(
            jnp.asarray(value, getattr(old, name).dtype), getattr(old, name).sharding
        )
        for name, value in changes.items()
    }
    return replace(state, loss_scale=replace(old, **new))


def scale_of(state):
    return (
        float(state.loss_scale.scale),
        int(state.loss_scale.clean_steps),
        int(state.loss_scale.overflows),
    )


def assert_update_skipped(before, after):
    """Nothing but the number of the step and the loss scale has changed."""
    old, new = host_leaves(before), host_leaves(after)
    assert new.pop("step") == old.pop("step") + 1
    assert old.pop("opt_state/0/count") == new.pop("opt_state/0/count")
    for path in old:
        if not path.startswith("loss_scale"):
            np.testing.assert_array_equal(new[path], old[path], err_msg=path)


@pytest.mark.parametrize(
    ("leaf", "value", "loss_is_finite"),
    [
        (("layers", "mlp", "up_bias"), np.nan, False),
        (("embedding", "table"), np.inf, False),
        (("final_norm", "scale"), 1e25, True),
    ],
    ids=["nan", "inf", "a norm too large for float32"],
)
def test_update_that_is_not_finite_is_skipped_and_reported(leaf, value, loss_is_finite):
    made, _ = program("f32")
    state = plans.random_state(made)
    broken = jax.tree.map(lambda x: x, state.params)
    section = functools.reduce(dict.__getitem__, leaf[:-1], broken)
    section[leaf[-1]] = jax.device_put(
        section[leaf[-1]].at[(0,) * section[leaf[-1]].ndim].set(value), section[leaf[-1]].sharding
    )
    broken = replace(state, params=broken)
    after, metrics = step("f32", broken)
    assert metrics["skipped"]
    assert np.isfinite(metrics["loss"]) == loss_is_finite
    assert not np.isfinite(metrics["grad_norm"])
    assert_update_skipped(broken, after)

    after, metrics = step("f32", state)
    assert not metrics["skipped"]
    assert np.isfinite(metrics["grad_norm"])
    assert int(after.opt_state[0].count) == 1


def test_f32_has_no_loss_scale():
    made, _ = program("f32")
    after, metrics = step("f32", plans.random_state(made))
    assert scale_of(after) == (1, 0, 0)
    assert metrics["loss_scale"] == 1


def test_f32_ignores_a_loss_scale_left_by_f16():
    made, _ = program("f32")
    (expected, plain), (after, metrics) = (
        step("f32", with_scale(plans.random_state(made), scale=scale)) for scale in (1, 65536)
    )
    assert metrics == plain
    for path, values in host_leaves(expected.params).items():
        np.testing.assert_array_equal(host_leaves(after.params)[path], values, err_msg=path)


def test_f16_is_f32_within_its_own_rounding_whatever_the_scale():
    made, _ = program("f16")
    exact, expected = step("f32", plans.random_state(program("f32")[0]))
    for scale in (64.0, 1024.0):
        after, metrics = step("f16", with_scale(plans.random_state(made), scale=scale))
        assert not metrics["skipped"]
        assert metrics["loss_scale"] == scale
        assert metrics["loss"] != expected["loss"]
        assert_close(
            {name: metrics[name] for name in ("loss", "grad_norm")},
            {name: expected[name] for name in ("loss", "grad_norm")},
            F16_RELATIVE,
        )
        assert_close(
            (after.params, after.opt_state[0].mu),
            (exact.params, exact.opt_state[0].mu),
            F16_RELATIVE,
        )


def test_f16_skips_overflowing_steps_and_halves_its_scale():
    made, _ = program("f16")
    state = with_scale(plans.random_state(made), scale=TOO_LARGE, clean_steps=2)
    for overflows in range(1, HYSTERESIS):
        before = state
        state, metrics = step("f16", before)
        assert metrics["skipped"]
        assert np.isfinite(metrics["loss"])
        assert metrics["loss_scale"] == TOO_LARGE
        assert_update_skipped(before, state)
        assert scale_of(state) == (TOO_LARGE, 0, overflows)
    after, metrics = step("f16", state)
    assert metrics["skipped"]
    assert_update_skipped(state, after)
    assert scale_of(after) == (TOO_LARGE / 2, 0, 0)


def test_f16_forgets_an_overflow_after_a_clean_step():
    made, _ = program("f16")
    state, metrics = step("f16", with_scale(plans.random_state(made), scale=TOO_LARGE))
    assert metrics["skipped"]
    state, metrics = step("f16", with_scale(state, scale=1024))
    assert not metrics["skipped"]
    assert scale_of(state) == (1024, 1, 0)


def test_f16_doubles_its_scale_after_enough_clean_steps():
    made, _ = program("f16")
    state = plans.random_state(made)
    assert scale_of(state) == (1024, 0, 0)
    for clean in range(1, GROWTH_STEPS):
        state, _ = step("f16", state)
        assert scale_of(state) == (1024, clean, 0)
    state, metrics = step("f16", state)
    assert metrics["loss_scale"] == 1024, "the scale that this step had"
    assert scale_of(state) == (2048, 0, 0)
    assert int(state.opt_state[0].count) == GROWTH_STEPS


def test_loss_scale_never_falls_below_one():
    made, _ = program("f16")
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), plans.random_state(made).params)
    state = with_scale(
        replace(plans.random_state(made), params=broken), scale=1, overflows=HYSTERESIS - 1
    )
    after, metrics = step("f16", state)
    assert metrics["skipped"]
    assert scale_of(after) == (1, 0, 0)
