"""The core of attention, softmax(scale q k) v: which keys a query sees, and which kernel runs.

`xla` is in models/blockwise_attention.py, `cudnn` in models/fused_attention.py. Both skip keys that
a window hides.

Shapes: B batch, L length of queries, T length of keys, H query heads, G key/value heads, K
head_dim. H and G count this device's heads only.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config import AttentionKernel, Config, Precision
from optimus_jax.devices.accelerators import AMPERE, HOPPER
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.scopes import ATTENTION
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.blockwise_attention import (
    BlockwiseSettings,
    QueryBlock,
    attend_in_blocks,
    blocks_of,
)
from optimus_jax.models.branches import either
from optimus_jax.models.families import features_of, generator_of
from optimus_jax.models.fused_attention import cudnn_attention

BRANCH_SAVES_SHARE = 0.25
"""Share of the products of a layer's core that a window must save to be worth a branch, which
copies arrays. On a CPU, 17% gained nothing, and with 2% a step was 4 to 10% slower (decision 18).
"""
CUDNN_HEAD_DIM, CUDNN_HEAD_DIM_HOPPER = 128, 256
"""Widest heads of cuDNN's kernel before Hopper, and from it on."""


def choose_kernel(config: Config, topology: Topology, precision: Precision) -> AttentionKernel:
    """The attention kernel to use. Raises PlanError if the requested one cannot run."""
    wanted, obstacle = config.parallel.attention, _cudnn_obstacle(config, topology, precision)
    if wanted == "cudnn" and obstacle:
        raise PlanError(
            explain(
                "the cuDNN attention kernel cannot run here",
                given=obstacle,
                do="use --set parallel.attention=xla",
            )
        )
    if wanted == "auto":
        return "xla" if obstacle else "cudnn"
    return wanted


def _cudnn_obstacle(config: Config, topology: Topology, precision: Precision) -> str | None:
    """Why JAX's cuDNN kernel cannot run in training; None: it can."""
    capability, model = topology.compute_capability, config.model
    if topology.platform not in ("gpu", "cuda"):
        return f"it runs on GPUs, and this platform is {topology.platform}"
    if capability is None or capability < AMPERE:
        return (
            f"it needs compute capability {_dotted(AMPERE)} or higher, and that of"
            f" {topology.device_kind} is {_dotted(capability) if capability else 'not known'}"
        )
    if precision == "f32":
        return "it computes in bf16 or f16, and the precision is f32"
    if model.dropout:
        return f"it has no dropout on attention weights, and model.dropout is {model.dropout}"
    widest = CUDNN_HEAD_DIM_HOPPER if capability >= HOPPER else CUDNN_HEAD_DIM
    for each in (model, generator_of(model)):
        if each is not None and (each.head_dim % 8 or each.head_dim > widest):
            return (
                f"its heads are multiples of 8 up to {widest} wide on this GPU, and head_dim"
                f" is {each.head_dim} ({each.name})"
            )
    if features_of(model).attention_softcap:
        return f"it has no cap on scores, and {model.name} has one"
    if config.separates_documents and config.seq_len % 2:
        return (
            "with documents it computes even numbers of tokens, and data.seq_len is"
            f" {config.seq_len}"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["segments_BL", "query_offset", "is_windowed"],
    meta_fields=["causal", "window"],
)
@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: all, or those not after it; with a window the nearest of these and,
    with documents, those of its own document."""

    segments_BL: Array | None = None
    """Document of every position, int32 [B, L]; None: each example is one document."""
    query_offset: Array | int = 0
    """Position of the first query among the keys (above 0 when a cache holds earlier keys), of all
    examples or of each, int [B, 1, 1]."""
    causal: bool = True
    """Whether keys after a query are hidden from it."""
    window: int | None = None
    """Keys that a query sees, its own included; None: all. Needs causal attention."""
    is_windowed: Array | None = None
    """Whether the window applies, a bool scalar; None: it does."""

    def mask(self, queries: slice, keys: slice) -> Array:
        """bool [B or 1, L, T]: which of the keys in `keys` each query in `queries` sees."""
        shape = (1, queries.stop - queries.start, keys.stop - keys.start)
        # Positions are relative to the first of these keys.
        query = (
            self.query_offset
            + (queries.start - keys.start)
            + lax.broadcasted_iota(jnp.int32, shape, 1)
        )
        key = lax.broadcasted_iota(jnp.int32, shape, 2)
        visible = query >= key if self.causal else jnp.ones(shape, jnp.bool_)
        if self.window is not None:
            inside = query - key < self.window
            visible = visible & (inside if self.is_windowed is None else inside | ~self.is_windowed)
        if self.segments_BL is not None:
            visible = visible & (
                self.segments_BL[:, queries, None] == self.segments_BL[:, None, keys]
            )
        return visible

    def of(self, *, is_windowed: bool) -> "Visibility":
        """This for a layer of which it is known whether its window applies."""
        return replace(self, window=self.window if is_windowed else None, is_windowed=None)


@jax.named_scope(ATTENTION)
def attend(
    q_BLHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    visibility: Visibility,
    *,
    kernel: AttentionKernel | Literal["traced_cudnn"],
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    keys_BH: Array | None = None,
) -> Array:
    """Attention of every query to the keys it sees, [B, L, H, K]; the softmax is in float32.

    If `visibility.is_windowed` is an array, there is a branch to one of two programs where that
    saves enough work; elsewhere only the mask depends on it.

    Args:
      k_BTGK: keys; like values, they are rounded to the format of the queries, but their gradient
        has their own format.
      kernel: how it is computed; `traced_cudnn` computes nothing and saves what cuDNN's kernel
        saves, to be traced on machines without cuDNN.
      scale: factor of scores; None: 1 / sqrt(K).
      softcap: scaled scores s become c tanh(s / c) (kernel xla only); 0: no cap.
      dropout: probability that a weight is zeroed (kernel xla only).
      keys_BH: dropout key of every example and head; None: no dropout.
    """
    num_keys = k_BTGK.shape[1]
    if visibility.window is not None and visibility.window >= num_keys:
        visibility = visibility.of(is_windowed=False)
    factor = q_BLHK.shape[-1] ** -0.5 if scale is None else scale
    if kernel in ("cudnn", "traced_cudnn"):
        k_BTGK, v_BTGK = k_BTGK.astype(q_BLHK.dtype), v_BTGK.astype(q_BLHK.dtype)
        fused = _Fused(factor, is_traced_only=kernel == "traced_cudnn")
        return _core(fused, (q_BLHK, k_BTGK, v_BTGK), visibility, None)
    blockwise = _Blockwise(BlockwiseSettings(dropout, k_BTGK.dtype, factor, softcap))
    q_BHLK, k_BGTK, v_BGTK = (x.transpose(0, 2, 1, 3) for x in (q_BLHK, k_BTGK, v_BTGK))
    keys_BH = keys_BH if dropout else None
    return _core(blockwise, (q_BHLK, k_BGTK, v_BGTK), visibility, keys_BH).transpose(0, 2, 1, 3)


Arrays = tuple[Array, Array, Array]
"""Queries, keys and values."""


class _Fused(NamedTuple):
    """The core by kernel cudnn."""

    scale: float
    is_traced_only: bool

    def branch_pays(self, arrays: Arrays, visibility: Visibility) -> bool:
        """Whether layers with a window should run another program than those without."""
        return visibility.segments_BL is None

    def in_branch(self) -> "_Fused":
        """This, saving arrays of the same shapes with a window and without."""
        return self

    def __call__(self, arrays: Arrays, visibility: Visibility, keys_BH: Array | None) -> Array:
        length, num_keys = (x_BLHK.shape[1] for x_BLHK in arrays[:2])
        assert length == num_keys or not visibility.causal, (
            "this kernel knows no cache: its causal mask begins at the first key"
        )
        whole, is_masked = slice(0, length), visibility.segments_BL is not None
        return cudnn_attention(
            *arrays,
            visibility.mask(whole, whole)[:, None] if is_masked else None,
            scale=self.scale,
            causal=visibility.causal,
            window=None if is_masked else visibility.window,
            is_traced_only=self.is_traced_only,
        )


class _Blockwise(NamedTuple):
    """The core by kernel xla."""

    settings: BlockwiseSettings

    def branch_pays(self, arrays: Arrays, visibility: Visibility) -> bool:
        """Whether layers with a window should run another program than those without."""
        windowed, full = (
            sum(block.num_pairs for block in self._blocks(arrays, each))
            for each in (visibility, replace(visibility, window=None))
        )
        return windowed <= (1 - BRANCH_SAVES_SHARE) * full

    def in_branch(self) -> "_Blockwise":
        """This, saving arrays of the same shapes with a window and without."""
        return _Blockwise(self.settings._replace(saves_all=True))

    def __call__(self, arrays: Arrays, visibility: Visibility, keys_BH: Array | None) -> Array:
        q_BHLK, k_BGTK, _ = arrays
        is_open = visibility.is_windowed is not None
        blocks = self._blocks(arrays, replace(visibility, window=None) if is_open else visibility)
        group = q_BHLK.shape[1] // k_BGTK.shape[1]
        masks = [
            _repeat_rows(visibility.mask(block.queries, block.keys), group) for block in blocks
        ]
        fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))
        keys = [None if keys_BH is None else fold(keys_BH, block.first_query) for block in blocks]
        return attend_in_blocks(self.settings, blocks, *arrays, masks, keys)

    def _blocks(self, arrays: Arrays, visibility: Visibility) -> tuple[QueryBlock, ...]:
        num_queries, num_keys = (x_BHLK.shape[2] for x_BHLK in arrays[:2])
        return blocks_of(num_queries, num_keys, visibility.window, causal=visibility.causal)


def _core(
    core: _Fused | _Blockwise, arrays: Arrays, visibility: Visibility, keys_BH: Array | None
) -> Array:
    """The core's result, by one of two programs if some layers have a window and that pays."""
    if visibility.is_windowed is None or not core.branch_pays(arrays, visibility):
        return core(arrays, visibility, keys_BH)
    windowed, full = (_Side(core.in_branch(), is_windowed) for is_windowed in (True, False))
    return either(windowed, full, visibility.is_windowed, arrays, (visibility, keys_BH))


@dataclass(frozen=True)
class _Side:
    """The core of layers with a window, or of those without."""

    core: _Fused | _Blockwise
    is_windowed: bool

    def __call__(self, arrays: Arrays, others: tuple[Visibility, Array | None]) -> Array:
        visibility, keys_BH = others
        return self.core(arrays, visibility.of(is_windowed=self.is_windowed), keys_BH)


def _repeat_rows(mask_BLT: Array, times: int) -> Array:
    """[B, L, T] -> [B, 1, times * L, T]: repeated for each query head of a key/value head."""
    mask = jnp.broadcast_to(mask_BLT[:, None], (mask_BLT.shape[0], times, *mask_BLT.shape[1:]))
    return mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])
