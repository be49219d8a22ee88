"""The optimizer's update with moments in host memory: they are copied to the device and back, leaf
by leaf.

The moments of a leaf are fetched when those of the previous leaf are updated, so that a device
holds the moments of at most two leaves: new ones being copied out, and old ones being copied in.
Optimization barriers enforce this order in XLA's GPU scheduler; without them it would start every
copy at the beginning of the step, and the device would hold all moments during forward and
backward. A barrier makes all its operands vary over the same mesh axes. So a leaf waits for the
last leaf that varies over no other axes than its own, and leaves that are split differently form
separate chains.

The arithmetic equals the whole update: the same transformation is applied to one leaf after
another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import optax
from jax import Array, lax

from optimus_jax.mesh.zero import varying_axes

ON_DEVICE, ON_HOST = jax.memory.Space.Device, jax.memory.Space.Host


def update_through_host(
    whole: optax.GradientTransformation,
    of_leaf: Sequence[optax.GradientTransformation],
    finish: Callable[[Any, Any], Any],
    gradients: Any,
    opt_state: optax.OptState,
    params: Any,
    *,
    after: Array,
) -> tuple[Any, optax.OptState]:
    """`whole.update(gradients, opt_state, params)`, with moments that lie on the host before and
    after.

    Args:
      whole: the transformation of all leaves.
      of_leaf: the same transformation for each single leaf, in the order of the tree's leaves.
      finish: (new state, old state) of a leaf, both on the device -> the state to keep.
      gradients, params: trees of the same structure, on the device.
      opt_state: state of `whole`; its moments are on the host, its counters on the device.
      after: a replicated value; no moment is fetched before it is computed.
    Returns:
      Updates on the device, and the new state with its moments on the host.
    """
    structure = jax.tree.structure(params)
    updates, states = [], []
    gradients, params = jax.tree.leaves(gradients), jax.tree.leaves(params)
    done: list[Any] = [after]
    for transformation, gradient, state, param in zip(
        of_leaf, gradients, _by_leaf(whole, of_leaf[0], opt_state, structure), params, strict=True
    ):
        old = optax.tree_map_params(transformation, partial(_fetched, done=done), state)
        update, new = transformation.update(gradient, old, param)
        new = finish(new, old)
        updates.append(update)
        states.append(
            optax.tree_map_params(
                transformation, lambda moment: jax.device_put(moment, ON_HOST), new
            )
        )
        done.append(update)
    return jax.tree.unflatten(structure, updates), _joined(whole, opt_state, states, structure)


def _fetched(moment: Array, *, done: Sequence[Array]) -> Array:
    """Copy a moment to the device after the last value of `done` that varies only over the moment's
    axes.
    """
    last = next(value for value in reversed(done) if varying_axes(value) <= varying_axes(moment))
    return jax.device_put(lax.optimization_barrier((moment, last))[0], ON_DEVICE)


def _by_leaf(
    whole: optax.GradientTransformation,
    of_one: optax.GradientTransformation,
    state: optax.OptState,
    structure: Any,
) -> list[optax.OptState]:
    """The state of each single leaf; counters are repeated for each."""
    number = structure.num_leaves
    leaves = jax.tree.leaves(
        _with_counters(
            whole, state, lambda counter: jax.tree.unflatten(structure, [counter] * number)
        )
    )
    alone = jax.tree.structure(jax.eval_shape(of_one.init, jax.ShapeDtypeStruct((), "float32")))
    return [jax.tree.unflatten(alone, leaves[place::number]) for place in range(number)]


def _joined(
    whole: optax.GradientTransformation,
    like: optax.OptState,
    states: Sequence[optax.OptState],
    structure: Any,
) -> optax.OptState:
    """The inverse of `_by_leaf`."""
    repeated = _with_counters(
        whole, like, lambda counter: jax.tree.unflatten(structure, [counter] * structure.num_leaves)
    )
    by_place = zip(*map(jax.tree.leaves, states), strict=True)
    joined = jax.tree.unflatten(
        jax.tree.structure(repeated), [leaf for leaves in by_place for leaf in leaves]
    )
    return _with_counters(whole, joined, lambda counters: jax.tree.leaves(counters)[0])


def _with_counters(
    whole: optax.GradientTransformation, state: optax.OptState, function: Callable[[Any], Any]
) -> optax.OptState:
    """The state with `function` applied to all but the moments."""
    return optax.tree_map_params(whole, lambda moment: moment, state, transform_non_params=function)
