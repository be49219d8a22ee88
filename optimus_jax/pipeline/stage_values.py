"""What travels between stages: a pytree of arrays, the *stage value*; and buffers of such values.

Its leaves may have different shapes and dtypes. Floating leaves are differentiated: their
cotangents travel back. Integer leaves travel forward only.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.errors import explain
from optimus_jax.mesh.zero import vary, varying_axes

Tree = Any


def floating(value: Tree) -> list[Array]:
    """The leaves that are differentiated."""
    return [leaf for leaf in jax.tree.leaves(value) if _is_floating(leaf)]


def with_floating(value: Tree, leaves: list[Array]) -> Tree:
    """`value` with `leaves` in the place of its floating leaves."""
    given = iter(leaves)
    return jax.tree.map(lambda leaf: next(given) if _is_floating(leaf) else leaf, value)


def check_dtypes(value: Tree) -> None:
    """Raise TypeError if a leaf is neither floating nor an integer, and so cannot be sent."""
    for path, leaf in jax.tree.leaves_with_path(value):
        if not (_is_floating(leaf) or jnp.issubdtype(leaf.dtype, jnp.integer)):
            raise TypeError(
                explain(
                    "a stage value has a leaf that cannot be sent to the next stage",
                    given=f"{jax.tree_util.keystr(path) or 'the value'} of dtype {leaf.dtype}",
                    do="make it an array of floats or integers",
                )
            )


def check_unchanged(before: Tree, after: Tree) -> None:
    """Raise TypeError if layers give another kind of value than they take: the same buffers hold
    the value before every stage."""
    given, found = _described(before), _described(after)
    if given != found:
        raise TypeError(
            explain(
                "the layers of a stage change the type of the stage value",
                given=f"{given} before and {found} after",
                do="keep structure, shapes, dtypes and varying mesh axes as `embed` makes them",
            )
        )


def result_types(function: Callable[..., Tree], *args: Tree) -> Tree:
    """The types of the arrays that `function` gives, with their varying axes."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.out_avals)


def zeros(like: Any, *axes: str) -> Array:
    """Zeros of a type that also vary over `axes`."""
    return vary(jnp.zeros(like.shape, like.dtype), sorted({*axes, *like.mat.varying}))


def buffers_of(num_slots: int, like: Tree) -> Tree:
    """Buffers of zeros: `num_slots` slots and the spare slot, each with the shape of `like`."""
    return jax.tree.map(
        lambda leaf: vary(
            jnp.zeros((num_slots + 1, *leaf.shape), leaf.dtype), sorted(varying_axes(leaf))
        ),
        like,
    )


def slot_of(buffers: Tree, slot: Array) -> Tree:
    """The values in a slot."""
    return jax.tree.map(
        lambda buffer: lax.dynamic_index_in_dim(buffer, slot, keepdims=False), buffers
    )


def with_slot(buffers: Tree, slot: Array, values: Tree) -> Tree:
    """The buffers with values put into a slot."""
    return jax.tree.map(
        lambda buffer, value: lax.dynamic_update_index_in_dim(
            buffer, value.astype(buffer.dtype), slot, 0
        ),
        buffers,
        values,
    )


def where(condition: Array, values: Tree, others: Tree | int) -> Tree:
    """`jnp.where` of every leaf; `others` may be one number."""
    if isinstance(others, int):
        return jax.tree.map(lambda value: jnp.where(condition, value, others), values)
    return jax.tree.map(partial(jnp.where, condition), values, others)


def _is_floating(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _described(value: Tree) -> str:
    return str(
        jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype), sorted(varying_axes(leaf))), value)
    )
