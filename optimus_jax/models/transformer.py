"""The decoder: embedding, a scanned stack of blocks, a final norm and the head's matrix.

One class serves every family; `models/families.py` lists the differences. The stack is one set of
parameters with a leading `layers` dimension, so that compile time does not grow with depth.

Shapes: B batch, L length, T cached length, D embed, V vocab (this device's part), G key/value
heads and K head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.mesh.axes import EMBED, HEADS, LAYERS, POSITIONS, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models import rotary
from optimus_jax.models.attention import Attention
from optimus_jax.models.families import family_of
from optimus_jax.models.kernels import Visibility, attend
from optimus_jax.models.layers import Embedding, Norm, dropout, normal, rows_of
from optimus_jax.models.mlp import FeedForward

LAYER_INPUT = "layer input"
"""Checkpoint name of a layer's input, used to offload it to host memory."""
SITES_PER_LAYER = 4
"""Places in a layer that draw a dropout mask: attention weights, two residual branches, one
spare."""


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The inputs of a forward pass besides parameters and tokens."""

    comm: Collectives
    kernel: AttentionKernel = "xla"
    remat: RematPolicy = "none"
    offload: bool = False
    """Whether layer inputs are kept in host memory until backward; needs remat="full", which saves
    nothing else."""
    visibility: Visibility = field(default_factory=Visibility)
    keys_B: Array | None = None
    """Dropout key of every example; None: no dropout."""

    def recomputed(self, part: Callable) -> Callable:
        """Wrap a part of a layer so that only its arguments are saved for backward.

        Meant for a matmul with cheap arithmetic beside it. Computing the arithmetic again, or
        gathering the matrix again, is better than saving it; the matmul itself is not computed
        again. Policies that recompute more apply to the layer as a whole (`_rematerialised`).
        """
        return (
            jax.checkpoint(part, prevent_cse=False) if self.remat in ("none", "selective") else part
        )


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        family = family_of(config.family)
        self.dropout = config.dropout
        self.attention_norm = Norm(family.norm, config.embed_dim, config.norm_epsilon)
        self.attention = Attention(config, family, rngs=rngs)
        self.mlp_norm = Norm(family.norm, config.embed_dim, config.norm_epsilon)
        self.mlp = FeedForward(config, family, rngs=rngs)

    def __call__(
        self,
        x_BLD: Array,
        layer: Array,
        run: ForwardContext,
        cos_sin: tuple[Array, Array] | None,
        cache: tuple[Array, Array] | None = None,
    ) -> tuple[Array, tuple[Array, Array] | None]:
        """[B, L, D] -> [B, L, D].

        `cache`: earlier keys and values [B, T, G, K]; returned with those of this pass added.
        """
        comm, site, recomputed = run.comm, layer * SITES_PER_LAYER + 1, run.recomputed
        q, k, v = recomputed(
            lambda x: self.attention.project(self.attention_norm(x, comm.sums), comm, cos_sin)
        )(x_BLD)
        if cache is not None:
            start = (0, run.visibility.query_offset, 0, 0)
            longer = [
                lax.dynamic_update_slice(old, new.astype(old.dtype), start)
                for old, new in zip(cache, (k, v), strict=True)
            ]
            k, v = cache = longer[0], longer[1]
        head_keys = self._head_keys(run, site, q.shape[2])

        def core(q: Array, k: Array, v: Array) -> Array:
            return attend(
                q, k, v, run.visibility, kernel=run.kernel, dropout=self.dropout, keys_BH=head_keys
            )

        heads = (jax.checkpoint(core) if run.remat == "selective" else core)(q, k, v)
        out_BLD = self.attention.combine(
            recomputed(lambda h: self.attention.partial_out(h, comm))(heads), comm
        )
        x_BLD = x_BLD + dropout(out_BLD, self.dropout, run.keys_B, site + 1)
        hidden = recomputed(lambda x: self.mlp.hidden(self.mlp_norm(x, comm.sums), comm))(x_BLD)
        out_BLD = self.mlp.combine(
            recomputed(lambda h: self.mlp.partial_out(h, comm))(hidden), comm
        )
        return x_BLD + dropout(out_BLD, self.dropout, run.keys_B, site + 2), cache

    def _head_keys(self, run: ForwardContext, site: Array, num_local_heads: int) -> Array | None:
        """Dropout keys [B, H] per example and local head; independent of which device has it."""
        if run.keys_B is None or self.dropout == 0:
            return None
        heads = run.comm.offset(num_local_heads, HEADS) + jnp.arange(num_local_heads)
        per_head = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return jax.vmap(lambda key: per_head(jax.random.fold_in(key, site), heads))(run.keys_B)


class Decoder(nnx.Module):
    """Tokens to final hidden states; the loss (or generation) applies the head's matrix itself."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_rows: int,
        slots: tuple[int, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        """`slots`: the layer that each slot of the stack holds; None: all layers in order
        (`mesh/slots.py`)."""
        family = family_of(config.family)
        self.config = config
        self.embedding = Embedding(
            vocab_rows, config.embed_dim, config.init_std, vocab_size=config.vocab_size, rngs=rngs
        )
        self.positions = nnx.data(
            normal(rngs, (config.max_length, config.embed_dim), (POSITIONS, EMBED), config.init_std)
            if family.positions == "learned"
            else None
        )

        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: LAYERS})
        def stack(key: Array) -> Block:
            return Block(config, rngs=nnx.Rngs(params=key))

        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = stack(keys if slots is None else keys[np.maximum(slots, 0)])
        self.final_norm = Norm(family.norm, config.embed_dim, config.norm_epsilon)
        self.head = nnx.data(
            None
            if config.tied
            else Embedding(
                vocab_rows,
                config.embed_dim,
                config.init_std,
                vocab_size=config.vocab_size,
                rngs=rngs,
            )
        )

    def embed(self, tokens_BL: Array, positions_BL: Array, run: ForwardContext) -> Array:
        """int32 [B, L] -> [B, L, D]."""
        x_BLD = self.embedding(tokens_BL, run.comm)
        if self.positions is not None:
            x_BLD = x_BLD + rows_of(self.positions[...], positions_BL, run.comm.dtype)
        return dropout(x_BLD, self.config.dropout, run.keys_B, 0)

    def run_layers(
        self,
        x_BLD: Array,
        positions_BL: Array,
        run: ForwardContext,
        cache: tuple[Array, Array] | None = None,
    ) -> tuple[Array, tuple[Array, Array] | None]:
        """Run the stack. `cache`: keys and values [layers, B, T, G, K], or None in training."""
        layer, stacked = self._layer(positions_BL, run)
        return lax.scan(layer, x_BLD, (stacked, jnp.arange(self.config.num_layers), cache))

    def run_some_layers(
        self,
        x_BLD: Array,
        positions_BL: Array,
        run: ForwardContext,
        slots: Array,
        *,
        all_full: bool,
    ) -> Array:
        """Run the layers of a stack in the order of its slots, some of which may be empty.

        An empty slot is computed like the others and its result is dropped. This costs no time, as
        its pipeline stage would otherwise wait for a longer one, and all devices take the same
        branch.

        Args:
          slots: int32, the layer that each slot holds, -1 if it is empty.
          all_full: whether no slot is empty on any device.
        """
        layer, stacked = self._layer(positions_BL, run)

        def if_full(x_BLD: Array, slot: tuple) -> tuple[Array, None]:
            return jnp.where(slot[1] >= 0, layer(x_BLD, slot)[0], x_BLD), None

        return lax.scan(layer if all_full else if_full, x_BLD, (stacked, slots, None))[0]

    def _layer(self, positions_BL: Array, run: ForwardContext) -> tuple[Callable, nnx.State]:
        """The body of a scan over layers, and the stacked parameters to scan over."""
        cos_sin = rotary.angles(self.config, positions_BL) if self.positions is None else None
        graphdef, stacked = nnx.split(self.layers)

        def body(x_BLD: Array, layer: tuple) -> tuple[Array, tuple[Array, Array] | None]:
            params, index, layer_cache = layer
            return nnx.merge(graphdef, params)(x_BLD, index, run, cos_sin, layer_cache)

        return _rematerialised(body, run), stacked

    def head_matrix(self) -> Array:
        """The head's matrix [V, D]; with tied weights, the embedding."""
        return (self.head or self.embedding).table[...]

    def hidden(self, tokens_BL: Array, positions_BL: Array, run: ForwardContext) -> Array:
        """Final hidden states [B, L, D] of int32 [B, L] tokens."""
        x_BLD = self.embed(tokens_BL, positions_BL, run)
        x_BLD, _ = self.run_layers(x_BLD, positions_BL, run)
        return self.final_norm(x_BLD)

    def logits(self, hidden_BLD: Array, run: ForwardContext) -> Array:
        """Logits, float32 [B, L, V], of this device's part of the vocabulary; -inf for padding."""
        head_VD = self.head_matrix()
        operands = hidden_BLD.astype(run.comm.dtype), head_VD.astype(run.comm.dtype)
        logits = jnp.einsum("bld,vd->blv", *operands, preferred_element_type=jnp.float32)
        ids = run.comm.offset(head_VD.shape[0], VOCAB) + jnp.arange(head_VD.shape[0])
        return jnp.where(ids < self.config.vocab_size, logits, -jnp.inf)


def _rematerialised(layer: Callable, run: ForwardContext) -> Callable:
    """Apply the remat policies that concern a layer as a whole, "full" and "dots".

    `ForwardContext.recomputed` applies the others."""
    match run.remat:
        case "full" if run.offload:
            # The input is named, not the output: a scan keeps its own copy of an output whatever
            # the policy says (jax-ml/jax#23869).
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
