"""The parameters of a new run from Hugging Face's tensors.

Every process has all tensors in host memory; each device gets its shard of a parameter and nothing
else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from optimus_jax.mesh.leaf import Leaf
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.models.huggingface import from_huggingface
from optimus_jax.models.shapes import ModelShapes, Params
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program


@dataclass(frozen=True, eq=False)
class HuggingFaceWeights:
    """The parameters in Hugging Face's tensors, as `InitialWeights` (run/initial_weights.py)."""

    tensors: Mapping[str, np.ndarray]
    """Every tensor of the model, by name."""
    source: str
    """Where they are from."""

    def initial_state(
        self, program: Program, say: Callable[[str], object]
    ) -> tuple[TrainState, str]:
        """As `InitialWeights`.

        Raises:
          CheckpointError: the tensors are not those of the model.
        """
        shapes = program.shapes
        in_order = from_huggingface(self.tensors, shapes.config, shapes.vocab_rows)
        params = placed(in_order, shapes, program.state_shardings.params)
        return program.state_with(params), self.source


def placed(in_order: Params, shapes: ModelShapes, shardings: Params) -> Params:
    """Parameters of the host on the devices, leaf by leaf; a device gets only its own shard.

    Args:
      in_order: arrays whose stacks hold the layers in order, without empty slots.
      shapes: the model under the plan, whose slots say where the layers go.
      shardings: a NamedSharding for every leaf.
    """
    slots = np.array(shapes.slots)

    def place(
        leaf: Leaf, whole: np.ndarray, like: jax.ShapeDtypeStruct, sharding: NamedSharding
    ) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # JAX's type allows it
            if not leaf.is_in_layers:
                return whole[index]
            layers = slots[index[0]]
            part = whole[:, *index[1:]][layers]
            part[layers == EMPTY] = 0
            return part

        return jax.make_array_from_callback(like.shape, sharding, shard)

    return jax.tree.map(place, shapes.leaves, in_order, shapes.params, shardings)
