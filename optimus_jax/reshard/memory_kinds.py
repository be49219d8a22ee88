"""Whose memory an array lies in: the devices' own, or their host's, from and to which they can copy
by themselves.
"""

import jax
from jax import Array
from jax.sharding import Sharding

DEVICE_MEMORY, HOST_MEMORY = "device", "pinned_host"
"""JAX's names for them."""


def lies_on_host(sharding: Sharding) -> bool:
    """Whether arrays of this sharding lie in the host's memory."""
    return sharding.memory_kind == HOST_MEMORY


def in_memory_of(array: Array, sharding: Sharding) -> Array:
    """The array itself, or a copy split in the same way, in the memory in which arrays of another
    sharding lie.
    """
    if lies_on_host(array.sharding) == lies_on_host(sharding):
        return array
    return jax.device_put(
        array,
        array.sharding.with_memory_kind(HOST_MEMORY if lies_on_host(sharding) else DEVICE_MEMORY),
    )


def on_devices(array: Array) -> Array:
    """The array itself, or a copy of it in the devices' own memory."""
    return (
        jax.device_put(array, array.sharding.with_memory_kind(DEVICE_MEMORY))
        if lies_on_host(array.sharding)
        else array
    )
