"""A model that continues tokens with a key/value cache, on one device or split over a mesh.

Over a mesh, all devices run the same tokens: `tensor` splits heads, hidden width and vocabulary,
and `fsdp` splits the storage of matrices, which are gathered where they are used.

Shapes: B samples, L length of a pass, T cached length, V vocab, G key/value heads, K head_dim.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import FSDP, TENSOR, AxisSizes
from optimus_jax.errors import ConfigError, counted, explain
from optimus_jax.inference.sampling import Sampling, draw
from optimus_jax.mesh.axes import BATCH, VOCAB
from optimus_jax.mesh.build import build_mesh
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.rules import active_rules, check_rules, make_rules, padded_vocab
from optimus_jax.mesh.sharding import layouts_of
from optimus_jax.mesh.zero import vary
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.families import features_of
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.shapes import ModelShapes, Params, model_shapes

Cache = tuple[Array, Array]
"""Keys and values, [layers, B, T, G, K] each. Over a mesh, a head is in it once for each device
that needs it."""
ONE_DEVICE = AxisSizes()


@dataclass(frozen=True)
class ModelOnMesh:
    """A model and the devices that its parameters are split over."""

    config: ModelConfig
    axes: AxisSizes = ONE_DEVICE

    def __post_init__(self) -> None:
        if self.axes.num_devices != self.axes.fsdp * self.axes.tensor:
            raise ConfigError(
                explain(
                    "generation splits a model over fsdp and tensor",
                    given=f"mesh {self.axes}",
                    do="give sizes of these axes alone, such as tensor=4",
                )
            )
        if self.config.labels:
            raise ConfigError(
                explain(
                    "a model with labels generates no text",
                    given=f"{self.config.name}, with {counted(len(self.config.labels), 'label')}",
                    do="name a model with a head over the vocabulary; `optimus export` writes this"
                    " one for transformers",
                )
            )
        if not features_of(self.config).causal:
            raise ConfigError(
                explain(
                    "a model whose attention sees later tokens cannot generate text",
                    given=f"family {self.config.family}",
                    do="name a decoder, such as a run of gpt2-nano",
                )
            )
        check_rules(make_rules(self.config), self.axes, self.config)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The first devices of this process, as a mesh."""
        return build_mesh(self.axes, jax.local_devices()[: self.axes.num_devices])

    @functools.cached_property
    def shapes(self) -> ModelShapes:
        """Shapes of the model. The vocabulary is padded if it is split."""
        if self.axes.num_devices == 1:
            return unpadded(self.config)
        rows = padded_vocab(self.config.vocab_size, make_rules(self.config), self.axes)
        return model_shapes(self.config, rows)

    @property
    def param_specs(self) -> Params:
        """A PartitionSpec for every parameter."""
        layouts = layouts_of(self.shapes.leaves, self._storage_rules, self._zero)
        return jax.tree.map(lambda layout: layout.param_spec, layouts)

    @property
    def param_shardings(self) -> Params:
        """A NamedSharding for every parameter."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.param_specs)

    def abstract_params(self, dtype: jnp.dtype | None = None) -> Params:
        """Shape, dtype and sharding of every parameter.

        Args:
          dtype: of all of them; None: those in which a run stores them.
        """
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, dtype or leaf.dtype, sharding=sharding
            ),
            self.shapes.params,
            self.param_shardings,
        )

    def empty_cache(self, params: Params, num_keys: int) -> Cache:
        """A cache of zeros for `num_keys` positions of one sample, in the format of the
        parameters.
        """
        config, dtype = self.config, params["embedding"]["table"].dtype
        num_heads = self.axes.fsdp * max(config.num_kv_heads, self.axes.tensor)
        shape = (config.num_layers, 1, num_keys, num_heads, config.head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def extend(
        self, params: Params, cache: Cache, tokens_BL: Array, start: Array, last: Array
    ) -> tuple[Array, Cache]:
        """Run tokens at positions `start`, `start` + 1, ... through the model, and extend the
        cache.

        Args:
          cache: keys and values of all positions before `start`. start + L is at most T.
        Returns:
          The logits after the token with index `last` in `tokens_BL`, float32 [B, V], and the cache
          with the keys and values of these tokens.
        """
        if self.axes.num_devices == 1:
            return self._extended(params, cache, tokens_BL, start, last)
        whole: Any = PartitionSpec()
        split = tuple(axis for axis in (FSDP, TENSOR) if self.axes[axis] > 1)
        by_heads = PartitionSpec(None, None, None, split)
        run = jax.shard_map(
            self._extended,
            mesh=self.mesh,
            in_specs=(self.param_specs, by_heads, whole, whole, whole),
            out_specs=(whole, by_heads),
        )
        return run(params, cache, tokens_BL, start, last)

    def _extended(
        self, params: Params, cache: Cache, tokens_BL: Array, start: Array, last: Array
    ) -> tuple[Array, Cache]:
        """`extend` on this device."""
        positions_BL = jnp.broadcast_to(start + jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        # The kernel is XLA's, because cuDNN's causal mask assumes that the first query is at
        # position 0.
        run = ForwardContext(
            comm=Collectives(cache[0].dtype, self._rules, self._zero),
            kernel="xla",
            visibility=Visibility(query_offset=start),
        )
        model = self.shapes.module(params, run.comm)
        x_BLD = model.embed(tokens_BL, positions_BL, run)
        # What a gathered matrix gives counts as different on each device, though it is not.
        gathered = (FSDP,) if self._zero else ()
        x_BLD, cache = vary(x_BLD, gathered), jax.tree.map(lambda x: vary(x, gathered), cache)
        out = model.run_layers(x_BLD, positions_BL, run, cache)
        assert out.cache is not None, "a cache went in and none came out"
        x_B1D = lax.dynamic_slice_in_dim(out.x_BLD, last, 1, axis=1)
        logits_BV = model.logits(model.head_input(x_B1D, run.comm), run)[:, 0]
        logits_BV = run.comm.gathered(logits_BV, VOCAB)
        return lax.pmax(logits_BV, gathered) if gathered else logits_BV, out.cache

    @functools.cached_property
    def _storage_rules(self) -> Mapping[str, tuple[str, ...]]:
        return active_rules(make_rules(self.config), self.axes, self.config)

    @property
    def _rules(self) -> Mapping[str, tuple[str, ...]]:
        """Those of a pass: no device has tokens of its own."""
        return {name: axes for name, axes in self._storage_rules.items() if name != BATCH}

    @property
    def _zero(self) -> int:
        return 3 if self.axes.fsdp > 1 else 0


@functools.partial(jax.jit, static_argnames=("model", "sampling", "num_keys"))
def prefill(
    model: ModelOnMesh,
    params: Params,
    prompt_1L: Array,
    length: Array,
    keys_B: Array,
    *,
    sampling: Sampling,
    num_keys: int,
) -> tuple[Array, Cache]:
    """Run a padded prompt of `length` tokens: the first new tokens [B], and the cache of all
    samples.
    """
    cache = model.empty_cache(params, num_keys)
    logits_1V, cache = model.extend(params, cache, prompt_1L, jnp.int32(0), length - 1)
    logits_BV = jnp.repeat(logits_1V, len(keys_B), axis=0)
    return draw(logits_BV, keys_B, length, sampling), jax.tree.map(
        lambda x: jnp.repeat(x, len(keys_B), axis=1), cache
    )


@functools.partial(jax.jit, static_argnames=("model", "sampling"), donate_argnames="cache")
def next_tokens(
    model: ModelOnMesh,
    params: Params,
    cache: Cache,
    tokens_B: Array,
    position: Array,
    keys_B: Array,
    *,
    sampling: Sampling,
) -> tuple[Array, Cache]:
    """Run the tokens [B] at `position`: the tokens after them, and the extended cache."""
    logits_BV, cache = model.extend(params, cache, tokens_B[:, None], position, jnp.int32(0))
    return draw(logits_BV, keys_B, position + 1, sampling), cache


@functools.cache
def unpadded(config: ModelConfig) -> ModelShapes:
    """The shapes of the model with an unpadded vocabulary."""
    return model_shapes(config, config.vocab_size)
