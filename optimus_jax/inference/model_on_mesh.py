"""A model that continues tokens with a key/value cache, on one device or split over a mesh.

Over a mesh, all devices run the same tokens: `tensor` splits heads, hidden width and vocabulary,
and `fsdp` splits the storage of matrices, which are gathered where they are used.

Shapes: B samples, L length of a pass, T cached length, D embed, V vocab, G key/value heads, K
head_dim.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import FSDP, TENSOR, AxisSizes
from optimus_jax.errors import ConfigError, counted, explain
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
from optimus_jax.models.transformer import Decoder
from optimus_jax.run.predict import predicts
from optimus_jax.system.command import typed_command

Cache = tuple[Array, Array]
"""Keys and values, [layers, B, T, G, K] each. Over a mesh, a head is in it once for each device
that needs it."""
Values = TypeVar("Values")
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
            ask = f"; `{typed_command('predict')}` asks this one for labels"
            raise ConfigError(
                explain(
                    "a model with labels generates no text",
                    given=f"{self.config.name}, with {counted(len(self.config.labels), 'label')}",
                    do="name a model with a head over the vocabulary"
                    + (ask if predicts(self.config) else ""),
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

    def empty_cache(self, params: Params, num_keys: int, *, rows: int = 1) -> Cache:
        """A cache of zeros of the layers that see text, for `num_keys` positions of each row, in
        the format of the parameters.
        """
        config, dtype = self.config, params["embedding"]["table"].dtype
        num_layers = config.num_layers - config.encoder_layers
        num_heads = self.axes.fsdp * max(config.num_kv_heads, self.axes.tensor)
        zeros = jnp.zeros((num_layers, rows, num_keys, num_heads, config.head_dim), dtype)
        if self.axes.num_devices > 1:
            split = NamedSharding(self.mesh, self.cache_spec)
            zeros = lax.with_sharding_constraint(zeros, split)
        return zeros, jnp.copy(zeros)

    @property
    def cache_spec(self) -> PartitionSpec:
        """Of keys and values [layers, B, T, G, K]."""
        split = tuple(axis for axis in (FSDP, TENSOR) if self.axes[axis] > 1)
        return PartitionSpec(None, None, None, split)

    def over_mesh(self, of_device: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A function of one device's arrays, as a function of whole ones."""
        if self.axes.num_devices == 1:
            return of_device
        return jax.shard_map(of_device, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def on_device(self, params: Params, start: Array | int = 0) -> tuple[Decoder, ForwardContext]:
        """The model of one device's parameters, and the inputs of a pass.

        Args:
          start: position of the first token, of all rows or of each, int [B].
        """
        # The kernel is XLA's, because cuDNN's causal mask assumes that the first query is at
        # position 0.
        run = ForwardContext(
            comm=Collectives(params["embedding"]["table"].dtype, self._rules, self._zero),
            kernel="xla",
            visibility=Visibility(query_offset=jnp.reshape(start, (-1, 1, 1))),
        )
        return self.shapes.module(params, run.comm), run

    def varied(self, values: Values) -> Values:
        """Values of one device, marked as varying over fsdp: a gathered matrix makes its results
        vary.
        """
        return jax.tree.map(lambda x: vary(x, self._gathered), values)

    def next_logits(self, model: Decoder, hidden_B1D: Array, run: ForwardContext) -> Array:
        """Logits over the whole vocabulary, float32 [B, V], of the head's input; the same on all
        devices.
        """
        return self.whole_logits(model, hidden_B1D, run)[:, 0]

    def whole_logits(self, model: Decoder, hidden_BLD: Array, run: ForwardContext) -> Array:
        """`next_logits` of every token, float32 [B, L, V]."""
        logits_BLV = run.comm.gathered(model.logits(hidden_BLD, run), VOCAB)
        return lax.pmax(logits_BLV, self._gathered) if self._gathered else logits_BLV

    def all_logits(self, params: Params, tokens_BL: Array) -> Array:
        """Run tokens at positions 0, 1, ... through the model: the logits after each of them,
        float32 [B, L, V].
        """
        whole = PartitionSpec()
        run = self.over_mesh(self._all_logits, (self.param_specs, whole), whole)
        return run(params, tokens_BL)[..., : self.config.vocab_size]

    def _all_logits(self, params: Params, tokens_BL: Array) -> Array:
        """`all_logits` on this device."""
        positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1])[None], tokens_BL.shape)
        model, run = self.on_device(params)
        x_BLD = self.varied(model.embed(tokens_BL, positions_BL, run))
        x_BLD = model.run_layers(x_BLD, positions_BL, run).x_BLD
        return self.whole_logits(model, model.head_input(x_BLD, run.comm), run)

    def extend(
        self, params: Params, cache: Cache, tokens_BL: Array, start_B: Array, last_B: Array
    ) -> tuple[Array, Cache]:
        """Run tokens at positions `start_B`, `start_B` + 1, ... of each row through the model, and
        extend the cache.

        Args:
          cache: keys and values of all positions before these. start_B + L is at most T.
        Returns:
          The logits after the token with index `last_B` in each row, float32 [B, V], and the cache
          with the keys and values of these tokens.
        """
        whole = PartitionSpec()
        run = self.over_mesh(
            self._extended,
            (self.param_specs, self.cache_spec, whole, whole, whole),
            (whole, self.cache_spec),
        )
        return run(params, cache, tokens_BL, start_B, last_B)

    def _extended(
        self, params: Params, cache: Cache, tokens_BL: Array, start_B: Array, last_B: Array
    ) -> tuple[Array, Cache]:
        """`extend` on this device."""
        positions_BL = start_B[:, None] + jnp.arange(tokens_BL.shape[1])[None]
        model, run = self.on_device(params, start_B)
        x_BLD = self.varied(model.embed(tokens_BL, positions_BL, run))
        out = model.run_layers(x_BLD, positions_BL, run, self.varied(cache))
        assert out.cache is not None, "a cache went in and none came out"
        x_B1D = jnp.take_along_axis(out.x_BLD, last_B[:, None, None], axis=1)
        return self.next_logits(model, model.head_input(x_B1D, run.comm), run), out.cache

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

    @property
    def _gathered(self) -> tuple[str, ...]:
        """Axes over which matrices are gathered."""
        return (FSDP,) if self._zero else ()


@functools.partial(jax.jit, static_argnames="model")
def all_logits(model: ModelOnMesh, params: Params, tokens_BL: Array) -> Array:
    """`ModelOnMesh.all_logits`."""
    return model.all_logits(params, tokens_BL)


@functools.partial(jax.jit, static_argnames="model")
def next_token_scores(
    model: ModelOnMesh, params: Params, tokens_BL: Array, next_BL: Array
) -> tuple[Array, Array]:
    """Log-probability of each of the tokens that follow, float32 [B, L], and whether it is the
    likeliest, bool [B, L].
    """
    logits_BLV = model.all_logits(params, tokens_BL)
    of_next_BL1 = jnp.take_along_axis(logits_BLV, next_BL[..., None], axis=-1)
    normalizer_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    return of_next_BL1[..., 0] - normalizer_BL, logits_BLV.argmax(-1) == next_BL


@functools.cache
def unpadded(config: ModelConfig) -> ModelShapes:
    """The shapes of the model with an unpadded vocabulary."""
    return model_shapes(config, config.vocab_size)
