"""What devices compute in some iterations of a loop only, as a branch of the program.

A branch may hold collectives if all devices that they span take it in the same iterations, and if
data say in which order they and others of the same devices begin. XLA keeps one order for
collectives outside of branches. But a branch counts as begun before the collective in it does, so
that on a CPU devices may disagree about the order of two branches that do not depend on each other,
or of a branch and a collective behind it; they then mix up the data of the two, or crash (jaxlib
0.10.2). `ordered_after` makes one depend on the other.

A compiled program does not say how often a branch is taken. Its name scope does: in
`.../8_of_11_times/cond` it is taken in 8 of the 11 iterations. Where pipeline stages differ, this
counts the first one; over a whole step each stage takes it as often.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun
from numpy.typing import NDArray

from optimus_jax.mesh.zero import vary, varying_axes

_SCOPE = re.compile(r"(\d+)_of_(\d+)_times(?:/cond)?$")


def run_when(
    now: Array,
    compute: Callable[[], tuple[Any, ...]],
    otherwise: tuple[Any, ...] | None = None,
    *,
    iterations: NDArray[np.bool_],
) -> tuple[Any, ...]:
    """`compute()` where `now` is true, in an iteration of a `lax.scan`. If it is true in all of
    them, there is no branch.

    A branch copies what it hands on from outside to its results: add large values to the results,
    rather than giving them as `otherwise`.

    Args:
      otherwise: the results elsewhere; None in the place of one, or of all: zeros.
      iterations: [iterations] or [iterations, stages], the values of `now` in the loop.
    """
    if iterations.all():
        return compute()
    computed, types = _traced(compute)

    def rest() -> tuple[Any, ...]:
        return tuple(
            jax.tree.map(_zeros, of_result) if given is None else given
            for of_result, given in zip(types, otherwise or (None,) * len(types), strict=True)
        )

    counted = iterations if iterations.ndim == 1 else iterations[:, 0]
    with jax.named_scope(f"{int(counted.sum())}_of_{len(counted)}_times"):
        return lax.cond(now, computed, rest)


def ordered_after(values: Any, earlier: Any) -> Any:
    """`values`, unchanged, which a program has only once it has computed `earlier`.

    The condition is always true, and no compiler pass knows it: it counts bits. A leaf waits for
    those floating leaves of `earlier` that vary over no other mesh axes than it does.
    """
    computed = [
        (varying_axes(leaf), _is_computed(leaf))
        for leaf in jax.tree.leaves(earlier)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]

    def waiting(leaf: Array) -> Array:
        for axes, is_computed in computed:
            if axes <= varying_axes(leaf):
                leaf = jnp.where(is_computed, leaf, jnp.zeros_like(leaf))
        return leaf

    return jax.tree.map(waiting, values)


def _is_computed(floating: Array) -> Array:
    """True, once the array is there."""
    number = floating[(0,) * floating.ndim].astype(jnp.float32)
    return lax.population_count(lax.bitcast_convert_type(number, jnp.uint32)) <= 32


def share_taken(source: str) -> Fraction | None:
    """How often a branch of `run_when` is taken, of the times that it is reached; None for other
    operations.

    Args:
      source: JAX's name of the operation (op_name), or its name stack.
    """
    found = _SCOPE.search(source)
    return Fraction(int(found[1]), int(found[2])) if found else None


def _traced(
    function: Callable[[], tuple[Any, ...]],
) -> tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]:
    """The function, traced once, and the types of its results."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)()
    structure = jax.tree.structure(shapes)
    return (
        lambda: jax.tree.unflatten(structure, jaxpr_as_fun(program)()),
        jax.tree.unflatten(structure, program.out_avals),
    )


def _zeros(like: Any) -> Array:
    return vary(jnp.zeros(like.shape, like.dtype), sorted(like.mat.varying))
