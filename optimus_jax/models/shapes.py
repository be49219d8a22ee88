"""The shapes and logical axes of a model's parameters, without allocating arrays."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.mesh.axes import LAYERS, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.leaf import Leaf, leaf_path
from optimus_jax.models.encoder_decoder import layers_with
from optimus_jax.models.families import generator_of
from optimus_jax.models.generator import GENERATOR, beside_generator, beside_model, own_part
from optimus_jax.models.keys import make_key
from optimus_jax.models.transformer import Decoder

Params = dict[str, Any]
"""Nested dict of arrays (or of anything, leaf by leaf), named like the modules."""
_GENERATOR_SEED = 0x67656E
"""A generator's parameters have another seed than the model's, or some would be the same."""


@dataclass(frozen=True)
class ModelShapes:
    """The structure of a Decoder: its parameters' shapes and logical axes, and its layers. A
    generator's own parameters are among them, and no part of the Decoder.
    """

    config: ModelConfig
    vocab_rows: int
    slots: tuple[int, ...]
    """Layer that each slot of the stack holds, -1 if empty: 0, 1, 2, ... except in some pipelines
    (mesh/slots.py)."""
    graphdef: nnx.GraphDef
    state: nnx.State
    """Abstract variables with their rows of the leaf table."""

    @property
    def params(self) -> Params:
        """ShapeDtypeStruct of every parameter."""
        own = {} if self.generator is None else {GENERATOR: own_part(self.generator.params)}
        return nnx.to_pure_dict(self.state) | own

    @cached_property
    def generator(self) -> "ModelShapes | None":
        """The generator as a model of its own; None: there is none."""
        config = generator_of(self.config)
        return None if config is None else model_shapes(config, self.vocab_rows)

    @cached_property
    def base(self) -> "ModelShapes":
        """The same model without adapters."""
        return self.with_tuning(Tuning())

    @cached_property
    def without_adapters(self) -> "ModelShapes":
        """The same model without adapters, with the same groups frozen and stored alike."""
        return self.with_tuning(self.config.tuning.without_adapters)

    def with_tuning(self, tuning: Tuning) -> "ModelShapes":
        """The same model, of which something else is trained."""
        if tuning == self.config.tuning:
            return self
        return model_shapes(replace(self.config, tuning=tuning), self.vocab_rows, self.slots)

    @property
    def leaves(self) -> Params:
        """The leaf table: the Leaf of every parameter."""
        leaves = nnx.to_pure_dict(
            jax.tree.map(
                lambda variable: variable.replace(Leaf.of(variable)),
                self.state,
                is_leaf=_is_variable,
            )
        )
        if self.generator is None:
            return leaves
        return leaves | {GENERATOR: jax.tree.map(beside_model, own_part(self.generator.leaves))}

    def may_be_padded(self, path: str) -> bool:
        """Whether an array of the training state, at a path such as `opt_state/0/mu/head/table`,
        may end in zeros, whose number depends on the plan.
        """
        return path.endswith(self._padded)

    @cached_property
    def _padded(self) -> tuple[str, ...]:
        """Paths of the leaves of which that is true."""
        return tuple(
            "/" + leaf_path(path)
            for path, leaf in jax.tree.leaves_with_path(self.leaves)
            if leaf.may_be_padded
        )

    @property
    def num_params(self) -> int:
        """Number of parameters, without padding rows and empty slots."""
        return sum(self.sizes().values())

    @property
    def num_trained(self) -> int:
        """Number of those that are trained."""
        return sum(self.sizes(trained_alone=True).values())

    def sizes(self, *, trained_alone: bool = False) -> dict[str, int]:
        """Number of elements of each parameter, by its path, without padding rows, empty slots and
        layers that do not use it.
        """
        sizes = {}
        for (path, leaf), array in zip(
            jax.tree.leaves_with_path(self.leaves), jax.tree.leaves(self.params), strict=True
        ):
            if trained_alone and not leaf.trained:
                continue
            name = leaf_path(path)
            num_layers = len(layers_with(name, self.config))
            if trained_alone:
                num_layers -= self.config.tuning.freeze_layers
            size = array.size * leaf.values
            for dim, axis in zip(array.shape, leaf.dims, strict=True):
                if axis in (VOCAB, LAYERS):
                    used = self.config.vocab_size if axis == VOCAB else num_layers
                    size = size // dim * used
            sizes[name] = size
        return sizes

    def whole_outside_layers(self, params: Params, comm: Collectives) -> Params:
        """The parameters, with all matrices outside the stack gathered along fsdp and cast.

        This is done once for all uses: with tied weights the embedding is used twice. A layer's
        matrices are gathered when the layer is reached.
        """
        outer = nnx.State(
            {name: part for name, part in self._variables(params).items() if name != LAYERS}
        )
        return {**nnx.to_pure_dict(comm.weights(outer)), LAYERS: params[LAYERS]}

    def module(self, params: Params, comm: Collectives) -> Decoder:
        """The Decoder with these parameters, ready to be called."""
        return self.merged(self.whole_outside_layers(params, comm))

    def merged(self, whole: Params) -> Decoder:
        """The Decoder with the result of `whole_outside_layers` as its parameters."""
        return nnx.merge(self.graphdef, self._variables(whole))

    def _variables(self, params: Params) -> nnx.State:
        state = jax.tree.map(lambda variable: variable, self.state)
        nnx.replace_by_pure_dict(state, beside_generator(params))
        return state

    def initial(self, seed: jax.Array) -> Params:
        """New parameters from an integer seed; their values do not depend on sharding."""
        with nnx.use_eager_sharding(False):
            params = nnx.to_pure_dict(nnx.state(self._build(nnx.Rngs(params=make_key(seed)))))
        if self.generator is None:
            return params
        return params | {GENERATOR: own_part(self.generator.initial(seed ^ _GENERATOR_SEED))}

    def _build(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(self.config, vocab_rows=self.vocab_rows, slots=self.slots, rngs=rngs)


def model_shapes(
    config: ModelConfig, vocab_rows: int, slots: tuple[int, ...] | None = None
) -> ModelShapes:
    """Shapes of a model whose vocabulary is padded to `vocab_rows`.

    Args:
      slots: the layer that each slot of the stack holds; None: all layers in order.
    """
    slots = tuple(range(config.num_layers)) if slots is None else slots
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(
            lambda: Decoder(
                config, vocab_rows=vocab_rows, slots=slots, rngs=nnx.Rngs(params=make_key(0))
            )
        )
        graphdef, state = nnx.split(abstract)
    return ModelShapes(config, vocab_rows, slots, graphdef, state)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)
