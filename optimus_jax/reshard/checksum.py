"""Checksums of arrays that do not depend on their sharding.

The bits of each element are multiplied by an odd number hashed from the element's indices,
scrambled, and summed modulo 2^32. Hence
* the sum is the same for every sharding, device count and order of addition;
* a change of one element always changes it: an odd factor and the scrambling are invertible;
* swapping two elements changes it, except with probability about 2^-32;
* appended zeros (rows that pad a vocabulary) do not change it: zero bits stay zero, and the hash
  depends only on indices, never on the shape.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.reshard.memory_kinds import on_devices

BLOCK_ELEMENTS = 1 << 16
"""Elements whose shares are computed at a time: they and what is computed stay in the cache."""
SCRAMBLING, LAST_SHIFT = ((16, 0x85EBCA6B), (13, 0xC2B2AE35)), 16
"""Shifts and odd factors of MurmurHash3's last step."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `params/embed` or `optimizer/0/mu/embed`."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {leaf_path(path): leaf for path, leaf in paths}
    assert len(leaves) == len(paths), "two leaves of one tree have the same path"
    return leaves


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of every leaf, by path; the same on every process.

    Computed on the devices: each device sums its own shards, and one integer per leaf is exchanged.
    64-bit elements are not supported.

    Args:
      tree: jax.Arrays of any sharding.
    """
    return {name: found.checksum for name, found in check_arrays(tree).items()}


class ArrayCheck(NamedTuple):
    """Checksum of an array, and whether it is finite."""

    checksum: int
    is_finite: bool
    """Whether no element is NaN or infinite."""


def check_arrays(tree: Any) -> dict[str, ArrayCheck]:
    """Checksum and finiteness of every leaf by path, in one pass over each leaf."""
    # One leaf at a time. A single program for all leaves takes longer to compile (parameters and
    # their moments share programs) and on a CPU needs scratch space as large as the whole tree.
    # Many programs in flight exhaust the threads of a CPU, and their sums deadlock.
    return {
        name: ArrayCheck(int(found[0]), bool(found[1]))
        for name, leaf in named_leaves(tree).items()
        for found in [_check_array(on_devices(leaf))]
    }


def checksum_of_part(values: np.ndarray, start: Sequence[int]) -> int:
    """A part's share in the checksum of an array: those of parts that together are the whole array
    add up to its checksum modulo 2^32.

    Computed by NumPy, a few rows at a time.

    Args:
      values: the part.
      start: index of its first element.
    """
    if not values.size:
        return 0
    if not values.ndim:
        values = values.reshape(1)
    # what all indices but the last contribute
    outer = np.zeros((), np.uint32)
    for first, size in zip(start[:-1], values.shape[:-1], strict=True):
        outer = _scramble(outer[..., None] + np.arange(first, first + size, dtype=np.uint32))
    last = values.shape[-1]
    inner = np.arange(last, dtype=np.uint32) + np.uint32(start[-1] if start else 0)
    rows, outer = values.reshape(-1, last), outer.reshape(-1, 1)
    total, step = 0, max(1, BLOCK_ELEMENTS // max(last, 1))
    for begin in range(0, len(rows), step):
        bits = rows[begin : begin + step]
        factor = outer[begin : begin + step] + inner
        other = np.empty_like(factor)
        _scramble_in_place(factor, other)
        factor |= np.uint32(1)
        factor *= bits.view(f"uint{8 * bits.itemsize}")
        _scramble_in_place(factor, other)
        total += int(factor.sum(dtype=np.uint64))
    return total % 2**32


def _scramble_in_place(x: np.ndarray, other: np.ndarray) -> None:
    """`_scramble` into its argument; `other` is room for as many numbers."""
    for shift, factor in (*SCRAMBLING, (LAST_SHIFT, 1)):
        np.right_shift(x, np.uint32(shift), out=other)
        x ^= other
        if factor != 1:
            x *= np.uint32(factor)


@jax.jit
def _check_array(x: Array) -> tuple[Array, Array]:
    """uint32 []: the checksum of one array; bool []: whether it is finite."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    weights = jnp.zeros_like(bits)
    for dim in range(x.ndim):
        weights = _scramble(weights + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim))
    return jnp.sum(_scramble(bits * (weights | np.uint32(1))), dtype=jnp.uint32), jnp.isfinite(
        x
    ).all()


def _scramble(x: Any) -> Any:
    """An invertible map of uint32 that keeps zero (the last step of MurmurHash3)."""
    for shift, factor in SCRAMBLING:
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(LAST_SHIFT))
