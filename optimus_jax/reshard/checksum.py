"""Checksums of arrays that do not depend on their sharding.

The bits of each element are multiplied by an odd number hashed from the element's indices,
scrambled, and summed modulo 2^32. Hence
* the sum is the same for every sharding, device count and order of addition;
* a change of one element always changes it: an odd factor and the scrambling are invertible;
* swapping two elements changes it, except with probability about 2^-32;
* appended zeros (rows that pad a vocabulary) do not change it: zero bits stay zero, and the hash
  depends only on indices, never on the shape.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.reshard.memory_kinds import on_devices


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `params/embed` or `optimizer/0/mu/embed`."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
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


def _scramble(x: Array) -> Array:
    """An invertible map of uint32 that keeps zero (the last step of MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
