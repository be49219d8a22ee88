"""Where the parameters of a generator lie in those of its model, and along which axes.

What it shares with the model is there once. Its own parameters lie below `generator/`, its layers
below `generator/stack`, so that nothing takes them for layers of the model
(docs/decisions/0040-a-generator-beside-its-model.md).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optimus_jax.mesh.axes import (
    GENERATOR_HEADS,
    GENERATOR_KV_HEADS,
    GENERATOR_LAYERS,
    GENERATOR_MLP,
    HEADS,
    KV_HEADS,
    LAYERS,
    MLP,
)
from optimus_jax.mesh.leaf import Leaf

GENERATOR, STACK = "generator", "stack"
"""Names of a generator's own parameters, and among them of its layers."""
SHARED = ("embedding", "positions", "token_types", "embedding_norm")
"""Parameters that a generator shares with its model."""
_OWN_AXES = {
    LAYERS: GENERATOR_LAYERS,
    HEADS: GENERATOR_HEADS,
    KV_HEADS: GENERATOR_KV_HEADS,
    MLP: GENERATOR_MLP,
}

NamedParams = Mapping[str, Any]
"""Parameters, or anything by their names."""


def of_generator(params: NamedParams) -> dict[str, Any]:
    """Those of a model with a generator of which the generator consists, named as in a model of its
    own.
    """
    shared = {name: params[name] for name in SHARED if name in params}
    own = params[GENERATOR].items()
    return shared | {LAYERS if name == STACK else name: part for name, part in own}


def beside_generator(params: NamedParams) -> dict[str, Any]:
    """All but a generator's own."""
    return {name: part for name, part in params.items() if name != GENERATOR}


def own_part(generator: NamedParams) -> dict[str, Any]:
    """A generator's own, of those of a model of its own, as they lie below GENERATOR."""
    return {
        STACK if name == LAYERS else name: part
        for name, part in generator.items()
        if name not in SHARED
    }


def beside_model(leaf: Leaf) -> Leaf:
    """A generator's leaf as one of its model, which has other layers and heads."""
    dims, used_over = (
        tuple([_OWN_AXES.get(axis, axis) for axis in axes]) for axes in (leaf.dims, leaf.used_over)
    )
    return replace(leaf, dims=dims, used_over=used_over)
