"""Residuals that a stage's forward saves for its backward, as arrays that buffers can hold
(mesh/closures.py).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from optimus_jax.mesh.closures import ClosureParts
from optimus_jax.mesh.sums import Sums
from optimus_jax.mesh.zero import vary
from optimus_jax.pipeline.stage_values import Tree, floating, with_floating

Microbatch = Any
Layers = Callable[[Tree, Tree, Tree, Microbatch], tuple[Tree, Sums]]
"""(parameters, constants, stage value, microbatch) -> (stage value, auxiliary sums)."""


class Residuals:
    """What a stage stores for backward; not its own parameters and constants, which it has."""

    def __init__(
        self,
        layers: Layers,
        repeat: tuple[Tree, Tree],
        value: Tree,
        microbatch: Microbatch,
    ):
        self._layers = layers
        self._parts: ClosureParts | None = None
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
        self._parts, saved = ClosureParts.of(pull, jax.tree.leaves(repeat))
        return result, saved

    def backward(
        self,
        repeat: tuple[Tree, Tree],
        saved: list[Array],
        cotangents: tuple[list[Array], Sums],
    ) -> tuple[Tree, list[Array]]:
        """Gradients with respect to the stage's parameters and the floating leaves of its input,
        given those with respect to the floating leaves of its output and its auxiliary sums.
        """
        assert self._parts is not None, "forward comes first"
        return self._parts.closure(jax.tree.leaves(repeat), saved)(cotangents)


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
