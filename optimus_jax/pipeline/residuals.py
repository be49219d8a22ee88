"""Residuals that a stage's forward saves for its backward, as arrays that buffers can hold.

`jax.vjp` returns a closure, which is a pytree. After forward its leaves are stored in buffers; for
backward the closure is rebuilt with the leaves that are read from the buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from optimus_jax.mesh.sums import Sums
from optimus_jax.mesh.zero import vary
from optimus_jax.pipeline.stage_values import Tree, floating, with_floating

Microbatch = Any
Layers = Callable[[Tree, Tree, Tree, Microbatch], tuple[Tree, Sums]]
"""(parameters, constants, stage value, microbatch) -> (stage value, auxiliary sums)."""


class Residuals:
    """Splits the closure of a stage's vjp into arrays for buffers, and rebuilds it from them.

    Leaves that are the stage's own parameters or constants (the same objects) are not stored, since
    backward has them anyway. Random keys are stored as their integers.
    """

    def __init__(
        self,
        layers: Layers,
        repeat: tuple[Tree, Tree],
        value: Tree,
        microbatch: Microbatch,
    ):
        self._layers = layers
        self._leaf_sources: list[_StageLeaf | _SavedLeaf] = []
        self._treedef: Any = None
        self.auxiliary_names: tuple[str, ...] = ()
        """Names of the auxiliary sums of the layers."""
        # Traced, not run: the buffers must exist before the first forward.
        saved = jax.make_jaxpr(lambda *args: self.forward(*args)[1])(
            repeat, value, microbatch
        ).out_avals
        self.like = [
            vary(jnp.zeros(aval.shape, aval.dtype), sorted(aval.mat.varying)) for aval in saved
        ]
        """An array of zeros for every array that is stored in a buffer."""

    def forward(
        self, repeat: tuple[Tree, Tree], value: Tree, microbatch: Microbatch
    ) -> tuple[tuple[Tree, Sums], list[Array]]:
        """The stage's results, and the arrays to store for its backward."""
        result, pull = vjp_of_layers(self._layers, repeat, value, microbatch)
        self.auxiliary_names = tuple(result[1])
        leaves, self._treedef = jax.tree.flatten(pull)
        given = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(repeat))}
        saved: dict[int, Array] = {}
        self._leaf_sources = []
        for leaf in leaves:
            if id(leaf) in given:
                self._leaf_sources.append(_StageLeaf(given[id(leaf)]))
                continue
            saved.setdefault(id(leaf), leaf)
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            self._leaf_sources.append(
                _SavedLeaf(
                    list(saved).index(id(leaf)), jax.random.key_impl(leaf) if is_key else None
                )
            )
        return result, [
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            for leaf in saved.values()
        ]

    def backward(
        self,
        repeat: tuple[Tree, Tree],
        saved: list[Array],
        cotangents: tuple[list[Array], Sums],
    ) -> tuple[Tree, list[Array]]:
        """Gradients with respect to the stage's parameters and the floating leaves of its input,
        given those with respect to the floating leaves of its output and its auxiliary sums.
        """
        given = jax.tree.leaves(repeat)
        leaves = [
            given[place.index]
            if isinstance(place, _StageLeaf)
            else saved[place.index]
            if place.key_impl is None
            else jax.random.wrap_key_data(saved[place.index], impl=place.key_impl)
            for place in self._leaf_sources
        ]
        return jax.tree.unflatten(self._treedef, leaves)(cotangents)


@dataclass(frozen=True)
class _StageLeaf:
    """A leaf of the closure that is one of the stage's parameters or constants."""

    index: int


@dataclass(frozen=True)
class _SavedLeaf:
    """A leaf of the closure that is stored in a buffer."""

    index: int
    key_impl: Any


def vjp_of_layers(
    layers: Layers, repeat: tuple[Tree, Tree], value: Tree, microbatch: Microbatch
) -> tuple[tuple[Tree, Sums], Callable[[tuple[list[Array], Sums]], tuple[Tree, list[Array]]]]:
    """The results of a stage's layers, and the function of `Residuals.backward`'s cotangents that
    gives its gradients.
    """
    params, constants = repeat

    def differentiated(params: Tree, leaves: list[Array]) -> tuple[tuple[list[Array], Sums], Tree]:
        after, auxiliary = layers(params, constants, with_floating(value, leaves), microbatch)
        return (floating(after), auxiliary), after

    (leaves, auxiliary), pull, after = jax.vjp(
        differentiated, params, floating(value), has_aux=True
    )
    return (with_floating(after, leaves), auxiliary), pull
