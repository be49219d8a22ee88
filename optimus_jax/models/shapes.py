"""A model's parameters as shapes and names, without a single array."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.transformer import Decoder

Params = dict[str, Any]
"""Nested dict of arrays (or of anything, leaf by leaf), named like the modules."""

VOCABULARY_LEAVES = ("embedding/table", "head/table")
"""Endings of the paths of leaves that are padded to whole shards, so whose shape depends on the plan."""


@dataclass(frozen=True)
class ModelShapes:
    """What a Decoder is made of."""

    config: ModelConfig
    vocab_rows: int
    graphdef: nnx.GraphDef
    state: nnx.State
    """Abstract variables, with their logical names."""

    @property
    def params(self) -> Params:
        """ShapeDtypeStruct of every parameter."""
        return nnx.to_pure_dict(self.state)

    @property
    def names(self) -> Params:
        """Logical axes of every parameter: a tuple with a name per dimension."""
        return nnx.to_pure_dict(jax.tree.map(
            lambda variable: variable.replace(variable.out_sharding), self.state, is_leaf=_is_variable))

    @property
    def num_params(self) -> int:
        """Parameters, rows of padding not counted."""
        padding = (self.vocab_rows - self.config.vocab_size) * self.config.embed_dim * (1 if self.config.tied else 2)
        return sum(leaf.size for leaf in jax.tree.leaves(self.params)) - padding

    def module(self, params: Params, comm: Collectives) -> Decoder:
        """The Decoder with these parameters, ready to be called.

        Matrices outside the stack of layers (the embedding is used twice where weights are tied) are made
        whole and cast here, once; those of a layer when they are reached.
        """
        state = jax.tree.map(lambda variable: variable, self.state)
        nnx.replace_by_pure_dict(state, params)
        ready = {name: part if name == LAYERS else comm.weights(part) for name, part in state.items()}
        return nnx.merge(self.graphdef, nnx.State(ready))

    def initial(self, seed: jax.Array) -> Params:
        """Fresh float32 parameters from an integer seed; the same values for any sharding of the result."""
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.state(self._build(nnx.Rngs(params=jax.random.key(seed)))))

    def _build(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(self.config, vocab_rows=self.vocab_rows, rngs=rngs)


def model_shapes(config: ModelConfig, vocab_rows: int) -> ModelShapes:
    """Shapes of the model with its vocabulary padded to `vocab_rows`."""
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: Decoder(config, vocab_rows=vocab_rows, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
    return ModelShapes(config, vocab_rows, graphdef, state)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)
