"""With a tick of slack, sends are independent of a tick's arithmetic, so that the two can overlap.

Read from the traced step, before a compiler has ordered anything. Every stage sends at the
beginning of a tick what it computed in the tick before. Two things must hold for that to cost no
time: the send does not wait for a matmul of its own tick, and no matmul of its own tick waits for
what arrives. The second does not hold with latency 1, where a tick uses what it receives.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import plans
import pytest

MODEL = dataclasses.replace(plans.GPT, dropout=0.0, num_layers=4)
SENDS, MATMULS = "ppermute", "dot_general"


@functools.cache
def tick_bodies(case: plans.PlanCase) -> list[Any]:
    """The jaxprs of one tick of each phase that sends."""
    built = plans.build(MODEL, case)
    traced = built.program.train_step.trace(
        jax.eval_shape(built.program.init, jnp.int32(0)), built.batch
    )
    return [
        body
        for body in every_jaxpr(traced.jaxpr.jaxpr)
        if any(equation.primitive.name == SENDS for equation in body.eqns)
    ]


def every_jaxpr(jaxpr: Any) -> Iterator[Any]:
    """`jaxpr` and those inside its equations."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in inner_jaxprs(equation):
            yield from every_jaxpr(inner)


def inner_jaxprs(equation: Any) -> list[Any]:
    """Jaxprs that an equation runs."""
    values = itertools.chain.from_iterable(
        value if isinstance(value, tuple | list) else [value] for value in equation.params.values()
    )
    return [inner for value in values if hasattr(inner := getattr(value, "jaxpr", value), "eqns")]


def computes(equation: Any, name: str) -> bool:
    """Whether an equation is, or runs, a primitive of that name."""
    return equation.primitive.name == name or any(
        computes(other, name) for inner in inner_jaxprs(equation) for other in inner.eqns
    )


def waiting(body: Any, *, who: str, for_whom: str) -> list[Any]:
    """Equations of primitive `who` that depend, directly or not, on a result of `for_whom` of the
    same tick.
    """
    late, found = set(), []
    for equation in body.eqns:
        is_late = any(
            variable in late for variable in equation.invars if not hasattr(variable, "val")
        )
        if is_late and computes(equation, who):
            found.append(equation)
        if is_late or computes(equation, for_whom):
            late.update(equation.outvars)
    return found


CASES = [
    {"schedule": "1f1b", "microbatches": 4},
    {"schedule": "1f1b", "microbatches": 4, "stage_residuals": "recompute"},
    {"schedule": "interleaved", "microbatches": 4},
]


@pytest.mark.parametrize("parallel", CASES, ids=str)
@pytest.mark.parametrize("send_slack", [True, False])
def test_no_send_waits_for_a_matmul_of_its_tick(parallel, send_slack):
    bodies = tick_bodies(plans.case("pipe=2,data=2", send_slack=send_slack, **parallel))
    assert any(computes(equation, MATMULS) for body in bodies for equation in body.eqns)
    for body in bodies:
        assert not waiting(body, who=SENDS, for_whom=MATMULS)


@pytest.mark.parametrize("parallel", CASES, ids=str)
def test_only_with_slack_no_matmul_waits_for_a_send_of_its_tick(parallel):
    with_slack, without = (
        tick_bodies(plans.case("pipe=2,data=2", send_slack=slack, **parallel))
        for slack in (True, False)
    )
    for body in with_slack:
        assert not waiting(body, who=MATMULS, for_whom=SENDS)
    assert any(waiting(body, who=MATMULS, for_whom=SENDS) for body in without)
