"""A branch in a program that is differentiated, of which one side's arrays are saved.

Backward of `jax.lax.cond` saves what each of its sides needs. The two sides of a branch here save
arrays of the same shapes, so those of the side that ran are enough.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, lax

Side = Callable[..., Array]
"""(arrays, others) -> an array; hashable."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def either(
    if_true: Side, if_false: Side, is_true: Array, arrays: tuple[Array, ...], others: Any
) -> Array:
    """`if_true(arrays, others)` or `if_false(arrays, others)`, whose results have one shape.

    Not for sides with collectives: devices may take different ones.

    Args:
      is_true: which side runs, a bool scalar.
      arrays: what the result is differentiated by.
      others: further arrays, without gradients.
    """
    return lax.cond(is_true, if_true, if_false, arrays, others)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["is_true", "arrays"],
    meta_fields=["closures"],
)
@dataclass(frozen=True)
class _Saved:
    """What forward saves."""

    is_true: Array
    arrays: list[Array]
    """The leaves of one side's closure."""
    closures: tuple[Any, Any]
    """The tree of each side's closure."""


def _forward(
    if_true: Side, if_false: Side, is_true: Array, arrays: tuple[Array, ...], others: Any
) -> tuple[Array, _Saved]:
    closures = {}

    def saving(side: Side) -> Callable:
        def run(arrays: tuple[Array, ...], others: Any) -> tuple[Array, list[Array]]:
            out, pull = jax.vjp(lambda arrays: side(arrays, others), arrays)
            saved, closures[side] = jax.tree.flatten(pull)
            return out, saved

        return run

    out, saved = lax.cond(is_true, saving(if_true), saving(if_false), arrays, others)
    return out, _Saved(is_true, saved, (closures[if_true], closures[if_false]))


def _backward(if_true: Side, if_false: Side, saved: _Saved, d_out: Array) -> tuple:
    def pulling(closure: Any) -> Callable:
        return lambda arrays, d_out: jax.tree.unflatten(closure, arrays)(d_out)[0]

    sides = [pulling(closure) for closure in saved.closures]
    return None, lax.cond(saved.is_true, *sides, saved.arrays, d_out), None


either.defvjp(_forward, _backward)
