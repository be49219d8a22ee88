"""Layers that are not trained, in stacks of which other layers are (model.tuning.freeze_layers).

Their gradients and updates are zero, so they keep their bits under every optimizer, and do not
count in the norm of gradients. Their moments are there, and stay zero.
"""

import jax.numpy as jnp
from jax import Array

from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.models.shapes import ModelShapes
from optimus_jax.training.rate_factors import of_own_slots


def zero_in_frozen_layers(
    leaf: Leaf, value: Array, shapes: ModelShapes, comm: Collectives
) -> Array:
    """A leaf's gradient or update, laid out like the moments, with zeros where it has none."""
    first = shapes.config.tuning.freeze_layers
    if not first or not leaf.is_in_layers:
        return value
    is_trained = of_own_slots([slot >= first for slot in shapes.slots], value, comm)
    return jnp.where(is_trained, value, 0)
