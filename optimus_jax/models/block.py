"""A block: attention and feed-forward, their norms and the residual, and which of a layer's values
backward computes again.

Shapes: B batch, L length, T cached length, D embed, H query heads, G key/value heads and K
head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from optimus_jax.config import AttentionKernel, ModelConfig, Overlap, RematPolicy
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.axes import HEADS, MLP
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sums import Sums
from optimus_jax.models.attention import Attention
from optimus_jax.models.families import features_of
from optimus_jax.models.kernels import Visibility, attend
from optimus_jax.models.layers import Norm, dropout
from optimus_jax.models.mlp import FeedForward

LAYER_INPUT = "layer input"
"""Checkpoint name of a layer's input, used to offload it to host memory."""
SITES_PER_LAYER = 4
"""Places in a layer that draw dropout masks: attention weights, two residual branches, adapters."""
SITES_OF_CROSS = 2
"""Further ones of a layer that attends to an encoder: attention weights, a residual branch."""


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The inputs of a forward pass besides parameters and tokens."""

    comm: Collectives
    """Operations on logical axes under the plan, and the format of matmuls (`comm.dtype`)."""
    kernel: AttentionKernel | Literal["traced_cudnn"] = "xla"
    """`kernel` of `attend` (models/kernels.py)."""
    remat: RematPolicy = "none"
    """What backward computes again, as `parallel.remat` says; applied by `recomputed` and
    `recomputed_whole`."""
    kept_layers: int = 0
    """Layers at the end of the stack that run as with remat="none"."""
    overlap: Overlap = "none"
    """Whose compute the exchanges of a layer run beside, as `parallel.overlap` says."""
    hands_over: bool = True
    """Whether backward follows forward at once, so that it may begin with the matrices that
    forward gathered last (models/layer_loop.py)."""
    offload: bool = False
    """Whether layer inputs are kept in host memory until backward; needs remat="full", which saves
    nothing else."""
    visibility: Visibility = field(default_factory=Visibility)
    """Which keys each query sees: documents, causality, window."""
    keys_B: Array | None = None
    """Dropout key of every example; None: no dropout."""

    @property
    def has_own_loops(self) -> bool:
        """Whether the stack runs in models/layer_loop.py instead of `lax.scan`."""
        return self.overlap != "none"

    def halves(self) -> "tuple[ForwardContext, ForwardContext]":
        """This for the first half of the examples, and for the second."""
        keys, segments = self.keys_B, self.visibility.segments_BL

        def half(number: int) -> ForwardContext:
            return replace(
                self,
                visibility=replace(self.visibility, segments_BL=half_of(segments, number)),
                keys_B=half_of(keys, number),
            )

        return half(0), half(1)

    def recomputed(self, part: Callable) -> Callable:
        """Wrap a part of a layer so that only its arguments are saved for backward.

        Meant for a matmul with cheap arithmetic beside it. Computing the arithmetic again, or
        gathering the matrix again, is better than saving it; the matmul itself is not computed
        again. Policies that recompute more apply to the layer as a whole (`recomputed_whole`).
        """
        return (
            jax.checkpoint(part, prevent_cse=False) if self.remat in ("none", "selective") else part
        )

    def recomputed_whole(self, layer: Callable) -> Callable:
        """Wrap a layer, the body of a scan, under the policies that concern it as a whole: "full"
        and "dots".
        """
        match self.remat:
            case "full" if self.offload:
                # The input is named, not the output: a scan keeps its own copy of an output
                # whatever the policy says (jax-ml/jax#23869).
                return jax.checkpoint(
                    lambda x_BLD, slot: layer(checkpoint_name(x_BLD, LAYER_INPUT), slot),
                    prevent_cse=False,
                    policy=jax.checkpoint_policies.save_and_offload_only_these_names(
                        names_which_can_be_saved=[],
                        names_which_can_be_offloaded=[LAYER_INPUT],
                        offload_src="device",
                        offload_dst="pinned_host",
                    ),
                )
            case "full":
                return jax.checkpoint(
                    layer, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False
                )
            case "dots":
                return jax.checkpoint(
                    layer,
                    policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
                    prevent_cse=False,
                )
        return layer


class LayersOutput(NamedTuple):
    """What a block gives, or a stack of them."""

    x_BLD: Array
    """The residual stream after it."""
    auxiliary: Sums
    """This device's shares (mesh/sums.py) of sums over the tokens, which a task may add to its
    loss, such as one that balances experts. Of a stack: added over its layers."""
    cache: tuple[Array, Array] | None
    """Keys and values, if some were given."""


class CrossAttention(nnx.Module):
    """What the layers of a model with an encoder have beside self-attention and feed-forward.

    All have all of it, so that an encoder and a decoder are one stack: layers of the encoder do not
    use the attention, nor any but its last one the norm of its result
    (docs/decisions/0038-an-encoder-is-the-first-layers.md).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def norm() -> Norm:
            kind = str(features_of(config).norm)
            return Norm(kind, (config.embed_dim,), config.norm_epsilon)

        self.norm = norm()
        self.attention = Attention(config.base, rngs=rngs)
        self.encoder_norm = norm()
        self.first_site = SITES_PER_LAYER * config.num_layers + 1
        """Sites of dropout: after those of all layers."""

    def keys_and_values(
        self, read_BFD: Array, num_local_heads: int, comm: Collectives
    ) -> tuple[Array, Array]:
        """Keys and values [B, F, G, K] of an encoder's result, for this many query heads."""
        read_BFD = comm.fan_out(read_BFD.astype(comm.sums), HEADS)
        return self.attention.keys_and_values(read_BFD, num_local_heads, comm)


class Block(nnx.Module):
    """Attention and feed-forward, each normed and added to the residual."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        features = features_of(config)
        self.dropout, self.adapter_dropout = config.dropout, config.tuning.dropout
        self.parallel, self.post = bool(features.parallel), features.norm_place == "post"

        def norm(*places: str) -> Norm | None:
            return nnx.data(
                Norm(str(features.norm), (config.embed_dim,), config.norm_epsilon)
                if features.norm_place in places
                else None
            )

        self.attention_norm = norm("pre", "sandwich")
        self.attention = Attention(config, rngs=rngs)
        self.attention_out_norm = norm("post", "sandwich", "output")
        self.cross = nnx.data(CrossAttention(config, rngs=rngs) if config.encoder_layers else None)
        self.mlp_norm = nnx.data(None) if self.parallel else norm("pre", "sandwich")
        self.mlp = FeedForward(config, rngs=rngs)
        self.mlp_out_norm = norm("post", "sandwich", "output")

    def __call__(
        self,
        x_BLD: Array,
        layer: Array,
        run: ForwardContext,
        cos_sin: tuple[Array, Array] | None,
        cache: tuple[Array, Array] | None = None,
        read: Array | tuple[Array, Array] | None = None,
    ) -> LayersOutput:
        """[B, L, D] -> [B, L, D].

        Args:
          cache: earlier keys and values [B, T, G, K]; returned with those of this pass added.
          read: what an encoder gives [B, F, D], to which the layer attends too; or its keys and
            values (`CrossAttention.keys_and_values`).
        """
        comm, site, recomputed = run.comm, layer * SITES_PER_LAYER + 1, run.recomputed
        keys_B = self._adapter_keys(run, site + 3)
        q, k, v, hidden = self._projected(x_BLD, run, cos_sin, keys_B)
        if cache is not None:
            k, v = cache = with_earlier(cache, k, v, run)
        head_keys = self._head_keys(run, site, q.shape[2])

        heads = self._heads(self.attention, (q, k, v), run, run.visibility, head_keys)
        if hidden is not None:
            out_BLD = recomputed(
                lambda heads, hidden: (
                    self.attention.partial_out(heads, comm, keys_B)
                    + self.mlp.partial_out(hidden, comm, keys_B)
                )
            )(heads, hidden)
            out_BLD = self.mlp.with_bias(self.attention.combine(out_BLD, comm), comm)
            return LayersOutput(x_BLD + out_BLD, {}, cache)
        out_BLD = self.attention.combine(
            recomputed(lambda h: self.attention.partial_out(h, comm, keys_B))(heads), comm
        )
        before_BLD = x_BLD
        x_BLD = self._added(x_BLD, out_BLD, self.attention_out_norm, run, site + 1)
        if read is not None:
            x_BLD = self._with_read(x_BLD, read, layer, run)
        mlp_norm = self.attention_norm if self.parallel else self.mlp_norm
        hidden = recomputed(
            lambda x: self.mlp.hidden(comm.fan_out(normed(mlp_norm, x, comm), MLP), comm, keys_B)
        )(before_BLD if self.parallel else x_BLD)
        out_BLD = self.mlp.combine(
            recomputed(lambda h: self.mlp.partial_out(h, comm, keys_B))(hidden), comm
        )
        x_BLD = self._added(x_BLD, out_BLD, self.mlp_out_norm, run, site + 2)
        return LayersOutput(x_BLD, {}, cache)

    def _heads(
        self,
        attention: Attention,
        of_heads: tuple[Array, Array, Array],
        run: ForwardContext,
        visibility: Visibility,
        keys_BH: Array | None,
    ) -> Array:
        """The core's result [B, L, H, K], of queries, keys and values."""

        def core(q: Array, k: Array, v: Array) -> Array:
            return attend(
                q,
                k,
                v,
                visibility,
                kernel=run.kernel,
                scale=attention.scale,
                softcap=attention.softcap,
                dropout=self.dropout,
                keys_BH=keys_BH,
            )

        return (jax.checkpoint(core) if run.remat == "selective" else core)(*of_heads)

    def _with_read(
        self, x_BLD: Array, read: Array | tuple[Array, Array], layer: Array, run: ForwardContext
    ) -> Array:
        """The residual with what its tokens take from an encoder's result."""
        assert self.cross is not None
        comm, cross, recomputed = run.comm, self.cross, run.recomputed
        site = cross.first_site + SITES_OF_CROSS * layer

        def queries(x_BLD: Array) -> Array:
            x_BLD = comm.fan_out(normed(cross.norm, x_BLD, comm), HEADS)
            return cross.attention.queries(x_BLD, comm)

        q = recomputed(queries)(x_BLD)
        if isinstance(read, tuple):
            k, v = read
        else:
            k, v = recomputed(lambda each: cross.keys_and_values(each, q.shape[2], comm))(read)
        keys_BH = self._head_keys(run, site, q.shape[2])
        heads = self._heads(cross.attention, (q, k, v), run, Visibility(causal=False), keys_BH)
        out_BLD = cross.attention.combine(
            recomputed(lambda heads: cross.attention.partial_out(heads, comm))(heads), comm
        )
        return self._added(x_BLD, out_BLD, None, run, site + 1)

    def _projected(
        self,
        x_BLD: Array,
        run: ForwardContext,
        cos_sin: tuple[Array, Array] | None,
        keys_B: Array | None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys, values, and the feed-forward's hidden values if both branches of a
        parallel block share their input and their result: then one collective gathers the stream
        for both, and one sums what both give. Dropout needs each branch's own result.

        Backward computes what leads to the products again, and what follows: rotations keep
        nothing, so they are part of the first; norms of queries and keys need the product.
        """
        comm, attention = run.comm, self.attention
        is_joint = (
            self.parallel
            and (run.keys_B is None or self.dropout == 0)
            and comm.splits_alike(HEADS, MLP)
        )
        rotates_at_once = attention.query_norm is None

        def projected(x_BLD: Array) -> tuple[Array, Array, Array, Array | None]:
            x_BLD = comm.fan_out(normed(self.attention_norm, x_BLD, comm), HEADS)
            q, k, v = attention.project(x_BLD, comm, keys_B)
            if rotates_at_once:
                q, k = attention.rotated(q, k, cos_sin)
            return q, k, v, self.mlp.hidden(x_BLD, comm, keys_B) if is_joint else None

        q, k, v, hidden = run.recomputed(projected)(x_BLD)
        if not rotates_at_once:
            q, k = run.recomputed(
                lambda q, k: attention.rotated(*attention.normed(q, k, comm), cos_sin)
            )(q, k)
        return q, k, v, hidden

    def _added(
        self, x_BLD: Array, out_BLD: Array, norm: Norm | None, run: ForwardContext, site: Array
    ) -> Array:
        """The residual with a sublayer's output added."""
        if norm is not None and not self.post:
            out_BLD = norm(out_BLD)
        x_BLD = x_BLD + dropout(out_BLD, self.dropout, run.keys_B, site, run.comm)
        return norm(x_BLD) if norm is not None and self.post else x_BLD

    def _adapter_keys(self, run: ForwardContext, site: Array) -> Array | None:
        """Dropout keys [B] of this layer's adapters."""
        if run.keys_B is None or self.adapter_dropout == 0:
            return None
        return jax.vmap(jax.random.fold_in, in_axes=(0, None))(run.keys_B, site)

    def _head_keys(self, run: ForwardContext, site: Array, num_local_heads: int) -> Array | None:
        """Dropout keys [B, H] per example and local head; independent of which device has it."""
        if run.keys_B is None or self.dropout == 0:
            return None
        heads = run.comm.offset(num_local_heads, HEADS) + jnp.arange(num_local_heads)
        per_head = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return jax.vmap(lambda key: per_head(jax.random.fold_in(key, site), heads))(run.keys_B)


def with_earlier(
    cache: tuple[Array, Array], k_BLGK: Array, v_BLGK: Array, run: ForwardContext
) -> tuple[Array, Array]:
    """Earlier keys and values [B, T, G, K], and those of this pass in their places."""
    start_B = jnp.broadcast_to(jnp.ravel(run.visibility.query_offset), len(k_BLGK))
    in_place = jax.vmap(lambda old, new, start: lax.dynamic_update_slice(old, new, (start, 0, 0)))
    keys, values = (
        in_place(old, new.astype(old.dtype), start_B)
        for old, new in zip(cache, (k_BLGK, v_BLGK), strict=True)
    )
    return keys, values


def check_output(block: nnx.Module, x_BLD: Array, cache: object, out: object) -> None:
    """Raise ConfigError if a block gives something that no block may give.

    Args:
      x_BLD, cache: what it was given.
      out: what it has returned.
    """
    kind = type(block).__name__
    if not isinstance(out, LayersOutput) or (out.x_BLD.shape, out.x_BLD.dtype) != (
        x_BLD.shape,
        x_BLD.dtype,
    ):
        found = (
            f"{out.x_BLD.dtype}{list(out.x_BLD.shape)}"
            if isinstance(out, LayersOutput)
            else "an array"
            if isinstance(out, Array)
            else type(out).__name__
        )
        raise ConfigError(
            explain(
                f"{kind} does not return the residual stream as it was given",
                given=f"{found}, for {x_BLD.dtype}{list(x_BLD.shape)}",
                do="return LayersOutput(x_BLD, {}, cache) with x_BLD of the same shape and dtype",
            )
        )
    if cache is not None and out.cache is None:
        raise ConfigError(
            explain(
                f"{kind} keeps no keys and values, so that no text can be generated with it",
                given="LayersOutput.cache is None",
                do="return what with_earlier of optimus_jax.models.block gives",
            )
        )


def normed(norm: Norm | None, x_BLD: Array, comm: Collectives) -> Array:
    """The residual as a sublayer reads it."""
    return x_BLD.astype(comm.sums) if norm is None else norm(x_BLD, comm.sums)


def half_of(rows: Array | None, number: int) -> Array | None:
    """The first (0) or second (1) half of the rows of an array [B, ...]."""
    return None if rows is None else jnp.split(rows, 2)[number]
