"""Frozen matrices in 4 or 8 bits: how values become codes, and codes values again.

*nf4* (Dettmers et al. 2023, arXiv:2305.14314): the last dimension is cut into blocks of at most
BLOCK elements. A block has a scale, its largest magnitude, and every element is the nearest of 16
values between -1 and 1, which are quantiles of a normal distribution. Two codes share a byte. The
scales are quantised once more (double quantisation): to 255 steps of the largest of GROUP scales
that follow each other along the width of the residual stream. An element takes
4 + 8 / 64 + 32 / 2048 bits.

*int8*: every element is a multiple of its channel's scale, from -127 to 127; a channel is all
elements that contribute to one result.

Codes are those of the whole matrix, however devices share it. fsdp splits and gathers codes, not
values (`Collectives.weight`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from optimus_jax.config.tuning import QuantisedFormat
from optimus_jax.mesh.axes import EMBED, HEAD_DIM
from optimus_jax.mesh.leaf import Leaf

BLOCK = 64
"""Most elements of a block."""
SHARES = 8
"""Devices that can share a last dimension without cutting a block, if they can share it at all."""
GROUP = 32
"""Most scales that are quantised together."""
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The values of nf4 (arXiv:2305.14314, appendix E)."""
STEPS = 255
"""Steps of a quantised scale."""
LARGEST = 127
"""Largest code of int8."""

Codes = Mapping[str, Any]
"""What stands for a matrix [..., D, ..., N], by name. In nf4:

* `codes`, uint8 [..., D, ..., N / 2]: the code of an even element in the upper half;
* `scales`, uint8 [..., D, ..., N / block], in steps of the group;
* `steps`, float32 [..., D / group, ..., N / block].

In int8:

* `codes`, int8 [..., D, ..., N];
* `scales`, float32, without the dimensions of a channel.
"""


class QuantisedMatrix(nnx.Module):
    """The codes of a frozen matrix, in the place of its parameter."""

    def __init__(self, param: nnx.Variable, kind: QuantisedFormat):
        self.leaf = Leaf.of(param)
        self.kind: QuantisedFormat = kind
        rows = code_leaves(self.leaf, kind)
        for name, values in encoded(param.get_value(), self.leaf, kind).items():
            setattr(self, name, rows[name].variable(values))

    def values(self, whole: Callable[[nnx.Variable], Array], dtype: jnp.dtype) -> Array:
        """The matrix, in `dtype`; of one layer, if the codes are.

        Args:
          whole: gathers a part of the codes along fsdp.
        """
        codes = {name: whole(getattr(self, name)) for name in code_leaves(self.leaf, self.kind)}
        return decoded(codes, self.leaf.last(codes["codes"].ndim), dtype)


def quantised_format(codes: Mapping[str, Any]) -> QuantisedFormat:
    """The format of codes."""
    return "nf4" if "steps" in codes else "int8"


def code_leaves(leaf: Leaf, kind: QuantisedFormat) -> dict[str, Leaf]:
    """The rows of the leaf table for a frozen matrix's codes.

    Scales of scales, and of int8, are few, and stay whole along fsdp.
    """
    if kind == "nf4":
        return {
            "codes": replace(leaf, trained=False, values=2),
            "scales": replace(leaf, trained=False, values=0),
            "steps": replace(leaf, trained=False, values=0, role="scale"),
        }
    dims = tuple(name for dim, name in enumerate(leaf.dims) if dim not in _channel(leaf))
    return {
        "codes": replace(leaf, trained=False),
        "scales": replace(leaf, dims=dims, trained=False, values=0, role="scale"),
    }


def encoded(matrix: Array, leaf: Leaf, kind: QuantisedFormat) -> dict[str, Array]:
    """The codes of a matrix of floats, or of a stack of them.

    Args:
      leaf: the matrix's row of the leaf table. For nf4 its last dimension is even and not the width
        of the residual stream.
    """
    matrix = matrix.astype(jnp.float32)
    if kind == "nf4":
        block = _block_size(matrix.shape[-1], shared=leaf.dims[-1] != HEAD_DIM)
        return _to_nf4(matrix, leaf.dims.index(EMBED), block)
    scales = jnp.abs(matrix).max(_channel(leaf), keepdims=True) / LARGEST
    codes = jnp.round(matrix / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)
    return {"codes": codes, "scales": scales.squeeze(_channel(leaf))}


def decoded(codes: Codes, leaf: Leaf, dtype: Any) -> Any:
    """The matrix that some codes stand for, in `dtype`: arrays of JAX or of numpy.

    Args:
      leaf: as for `encoded`.
    """
    stored, scales = codes["codes"], codes["scales"]
    xp = stored.__array_namespace__()
    if quantised_format(codes) == "int8":
        return (stored.astype(np.float32) * xp.expand_dims(scales, _channel(leaf))).astype(dtype)
    scales = _nf4_scales(scales, codes["steps"], leaf.dims.index(EMBED))
    values = xp.asarray(NF4)[xp.stack((stored >> 4, stored & 15), -1)]
    shape = (*stored.shape[:-1], 2 * stored.shape[-1])
    blocks = values.reshape(*scales.shape, shape[-1] // scales.shape[-1])
    return (blocks * scales[..., None]).astype(dtype).reshape(shape)


def num_blocks(size: int) -> int:
    """Blocks of nf4 in a last dimension that devices may share: each has whole ones."""
    return size // _block_size(size, shared=True)


def _block_size(size: int, *, shared: bool) -> int:
    """The size of blocks in a last dimension. It does not depend on the plan, so that a checkpoint
    has the same codes under all.
    """
    return max(2, _part_size(size // gcd(size, SHARES) if shared else size, BLOCK))


def _part_size(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides a size."""
    return min(most, size & -size)


def _channel(leaf: Leaf) -> tuple[int, ...]:
    """The dimensions of a channel of int8: those that a product contracts."""
    stacked, ndim = int(leaf.is_in_layers), len(leaf.dims)
    return (stacked,) if leaf.role == "matrix" else tuple(range(stacked + 1, ndim))


def _to_nf4(matrix: Array, dim: int, block: int) -> dict[str, Array]:
    """The codes of a float32 matrix in blocks of that size; scales form groups along `dim`."""
    size, group = matrix.shape[-1], _part_size(matrix.shape[dim], GROUP)
    blocks = matrix.reshape(*matrix.shape[:-1], size // block, block)
    scales = jnp.abs(blocks).max(-1)
    shape = scales.shape
    grouped = scales.reshape(*shape[:dim], shape[dim] // group, group, *shape[dim + 1 :])
    steps = grouped.max(dim + 1) / STEPS
    each = jnp.expand_dims(jnp.where(steps > 0, steps, 1), dim + 1)
    # A step may be rounded down.
    counts = jnp.minimum(jnp.round(grouped / each), STEPS).astype(jnp.uint8).reshape(shape)
    # Codes belong to the scales that are stored, not to those that were rounded.
    stored = _nf4_scales(counts, steps, dim)[..., None]
    normed = jnp.where(stored > 0, blocks / jnp.where(stored > 0, stored, 1), 0)
    codes = jnp.zeros(normed.shape, jnp.uint8)
    for between in (NF4[1:] + NF4[:-1]) / 2:
        codes += (normed > between).astype(jnp.uint8)
    pairs = codes.reshape(*matrix.shape[:-1], size // 2, 2)
    return {"codes": pairs[..., 0] << 4 | pairs[..., 1], "scales": counts, "steps": steps}


def _nf4_scales(counts: Any, steps: Any, dim: int) -> Any:
    """The scales of blocks, float32."""
    group = counts.shape[dim] // steps.shape[dim]
    xp = counts.__array_namespace__()
    return counts.astype(np.float32) * xp.repeat(steps, group, axis=dim)
