"""Whether a step overflows f16 depends on its batch and its loss scale, and not on the plan."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F16_RELATIVE, MATMUL_RELATIVE, relative_error

from optimus_jax.models.products import project

CASES = (plans.case("data=3,tensor=2"), plans.case("data=2,tensor=4", microbatches=2))
"""Gradients summed in parts over tokens and over columns; then over microbatches too, and over
query heads of one key/value head."""
FROM, TO = 18, 23
"""Loss scales, as powers of two: with the least no step overflows, with the largest every one."""
NUM_STEPS = 4


def losses_and_skips(case):
    """Metrics of one step with every loss scale, and of a few steps from a scale too large for the
    first.
    """
    built = plans.build(
        plans.LLAMA,
        case,
        {
            "precision.compute": "f16",
            "precision.loss_scale_hysteresis": 1,
            "precision.loss_scale_growth_steps": 2,
        },
    )
    program, step = built.program, plans.compiled_step(built)
    fresh = plans.random_state(program)

    def run(scale, num_steps):
        sharding, metrics = fresh.loss_scale.scale.sharding, []
        state = jax.tree.map(
            jnp.copy,
            replace(
                fresh,
                loss_scale=replace(
                    fresh.loss_scale, scale=jax.device_put(jnp.float32(scale), sharding)
                ),
            ),
        )
        for number in range(1, num_steps + 1):
            state, now = step(state, plans.batch_of_step(program, number))
            metrics.append(
                {name: float(now[name]) for name in ("skipped", "loss", "grad_norm", "loss_scale")}
            )
        return metrics

    one = [run(2.0**exponent, 1)[0] for exponent in np.arange(FROM, TO, 0.25)]
    first = next(metrics["loss_scale"] for metrics in one if metrics["skipped"])
    return one, run(2 * first, NUM_STEPS)


def test_steps_overflow_under_every_plan_or_under_none():
    (one, several), *others = (losses_and_skips(case) for case in (plans.ONE_DEVICE, *CASES))
    assert {metrics["skipped"] for metrics in one} == {False, True}
    assert [metrics["skipped"] for metrics in several][:1] == [True]
    assert not several[-1]["skipped"]
    for case, (one_here, several_here) in zip(CASES, others, strict=True):
        for found, expected in zip((*one_here, *several_here), (*one, *several), strict=True):
            assert found["skipped"] == expected["skipped"], (str(case), expected["loss_scale"])
            assert found["loss_scale"] == expected["loss_scale"]
            assert found["loss"] == pytest.approx(expected["loss"], rel=F16_RELATIVE)
            if not expected["skipped"]:
                assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=F16_RELATIVE)


def f16_sums(jaxpr):
    """For every sum over devices that is taken in f16, the function that made its operand."""
    made_by = {
        out: equation.params.get("name", equation.primitive.name)
        for equation in jaxpr.eqns
        for out in equation.outvars
    }
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith(("psum", "reduce_scatter")):
            yield from (
                made_by.get(operand, "an argument")
                for operand in equation.invars
                if operand.aval.dtype == jnp.float16
            )
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda node: hasattr(node, "eqns") or hasattr(node, "jaxpr"),
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from f16_sums(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("gpt", plans.case("data=2,fsdp=2,tensor=2", zero=3, remat="full")),
        ("llama", plans.case("pipe=2,fsdp=2,tensor=2", microbatches=4, zero=1)),
    ],
    ids=str,
)
def test_f16_sums_over_devices_only_add_zeros_to_one_value(name, case):
    built = plans.build(plans.model_for(case, name), case, {"precision.compute": "f16"})
    traced = built.program.train_step.trace(
        jax.eval_shape(built.program.init, jnp.int32(0)), built.batch
    )
    assert set(f16_sums(traced.jaxpr.jaxpr)) == {"_where"}, (
        "embedded tokens, and what one stage has: all others give zeros"
    )


@pytest.mark.parametrize("largest", [1.0, 6e4, 1e6, 1e30])
def test_cotangent_beyond_f16_range_still_gives_a_gradient(largest):
    """A part of a key's gradient is rounded to f16 for the product with the weights, at a scale
    where it is finite.
    """
    random = np.random.default_rng(0)
    x, weight = (
        jnp.asarray(random.standard_normal(shape), jnp.float16).astype(jnp.float32)
        for shape in ((1, 64, 8), (8, 6))
    )
    d_out = jnp.asarray(random.standard_normal((1, 64, 6)), jnp.float32)
    d_out = d_out / jnp.abs(d_out).max() * largest
    product = lambda x, weight: project(  # noqa: E731
        x, weight, jnp.dtype(jnp.float16), result=jnp.dtype(jnp.float32)
    )
    d_x, d_weight = jax.vjp(product, x, weight)[1](d_out)
    assert (
        relative_error(np.asarray(d_x), np.asarray(d_out @ weight.T)) <= MATMUL_RELATIVE["float16"]
    )
    assert (
        relative_error(np.asarray(d_weight), np.asarray(jnp.einsum("bnd,bnf->df", x, d_out)))
        <= MATMUL_RELATIVE["float16"]
    )
    for broken in (jnp.inf, jnp.nan):
        assert not jnp.isfinite(
            jax.vjp(product, x, weight)[1](d_out.at[0, 3, 2].set(broken))[1]
        ).all()
