"""Shards copied within the memory of a process equal those of the exchange, in every dtype; old
shards do not change.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from test_exchange import block_layouts, exchanged_in_numpy

from optimus_jax.reshard.exchange import BlockLayout, make_exchange
from optimus_jax.reshard.host_copies import copy_shards, share_memory
from optimus_jax.reshard.piece_programs import ROW

DEVICES = 4


@settings(max_examples=20)
@given(st.data())
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_copied_shards_equal_those_of_the_exchange(dtype, data):
    sizes = data.draw(st.sampled_from([(6, (4,)), (5, ()), (4, (2, 6))]))
    source, target = (data.draw(block_layouts(DEVICES, sizes)) for _ in range(2))
    exchange = make_exchange(
        source, target, processes=(0,) * DEVICES, most=data.draw(st.sampled_from([2, 100]))
    )
    devices = jax.devices()[:DEVICES]
    shards = [
        np.arange(1, 1 + np.prod(exchange.old)).reshape(exchange.old) * (place + 1) % 251
        for place in range(DEVICES)
    ]
    old = {
        device: jax.device_put(shard.astype(dtype), device)
        for device, shard in zip(devices, shards, strict=True)
    }
    new = copy_shards(old, exchange, np.dtype(dtype), devices, Mesh(np.array(devices), (ROW,)))
    for device, shard, expected in zip(
        devices, shards, exchanged_in_numpy(exchange, shards), strict=True
    ):
        assert new[device].dtype == dtype
        assert new[device].devices() == {device}
        np.testing.assert_array_equal(np.asarray(new[device]).astype(int), expected)
        np.testing.assert_array_equal(np.asarray(old[device]).astype(int), shard)


def test_copied_shards_may_be_donated():
    """They are in memory that JAX owns; any other would be copied before a step may write to it."""
    devices = jax.devices()[:2]
    row, rows = Mesh(np.array(devices), (ROW,)), range(1024)
    halves, whole = (
        BlockLayout(local=(512,), blocks=((0,), (1,)), rows=rows),
        BlockLayout(local=(1024,), blocks=((0,), (0,)), rows=rows),
    )
    exchange = make_exchange(halves, whole, processes=(0, 0), most=1024)
    old = {
        device: jax.device_put(np.full(512, place, np.float32), device)
        for place, device in enumerate(devices)
    }
    new = copy_shards(old, exchange, np.dtype(np.float32), devices, row)[devices[0]]
    pointer = new.unsafe_buffer_pointer()
    stepped = jax.jit(lambda array: array + 1, donate_argnums=0)(new)
    assert stepped.unsafe_buffer_pointer() == pointer
    assert new.is_deleted()
    np.testing.assert_array_equal(np.asarray(stepped), np.repeat([1, 2], 512))


def test_cpu_devices_of_a_process_share_memory():
    assert share_memory(jax.devices())
