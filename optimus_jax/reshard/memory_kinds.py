"""Whether an array is in device memory or in pinned host memory, and copies between the two."""

import jax
from jax import Array
from jax.sharding import Sharding

DEVICE_MEMORY, HOST_MEMORY = "device", "pinned_host"
"""JAX's names of the memory kinds."""


def lies_on_host(sharding: Sharding) -> bool:
    """Whether arrays of this sharding are in host memory."""
    return sharding.memory_kind == HOST_MEMORY


def in_memory_of(array: Array, sharding: Sharding) -> Array:
    """The array in the memory kind of `sharding`: the array itself, or a copy that is split like
    it.
    """
    if lies_on_host(array.sharding) == lies_on_host(sharding):
        return array
    return jax.device_put(
        array,
        array.sharding.with_memory_kind(HOST_MEMORY if lies_on_host(sharding) else DEVICE_MEMORY),
    )


def on_devices(array: Array) -> Array:
    """The array in device memory: the array itself, or a copy."""
    return (
        jax.device_put(array, array.sharding.with_memory_kind(DEVICE_MEMORY))
        if lies_on_host(array.sharding)
        else array
    )
