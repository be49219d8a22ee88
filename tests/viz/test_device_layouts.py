"""Drawn shards match those of real arrays, and figures name them."""

import dataclasses

import jax
import numpy as np
import pytest

from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.request import make_config
from optimus_jax.mesh.build import build_mesh, discover
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.viz.layouts import (
    ShardedTensor,
    batch_tensor,
    device_table,
    draw_mesh,
    draw_tensors,
    model_tensors,
)


def tensors_of(model: str, mesh: str, kind="parameters", **settings) -> dict[str, ShardedTensor]:
    config = make_config(model, {"mesh": mesh, **settings})
    axes = AxisSizes.parse(mesh)
    plan = plan_for(config, axes, dataclasses.replace(discover(), num_devices=axes.num_devices))
    devices = build_mesh(plan.axes, jax.devices()[: axes.num_devices])
    batch = batch_tensor(config.model, plan, devices, global_batch=16, seq_len=32)
    return {
        tensor.name: tensor for tensor in [*model_tensors(config.model, plan, devices, kind), batch]
    }


def texts(figure) -> str:
    return "\n".join(
        text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))
    )


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("data=2,fsdp=2,tensor=2", {}),
        ("data=8", {}),
        ("pipe=2,fsdp=2,tensor=2", {"microbatches": 2}),
        ("fsdp=4,tensor=2", {"zero": 1}),
    ],
)
def test_shards_match_those_of_real_arrays(mesh, settings):
    for tensor in tensors_of("llama-nano", mesh, **settings).values():
        sharding = jax.sharding.NamedSharding(tensor.mesh, tensor.spec)
        array = jax.jit(
            lambda shape=tensor.shape: jax.numpy.zeros(shape, "float32"), out_shardings=sharding
        )()
        devices = list(tensor.mesh.devices.flat)
        for real in array.addressable_shards:
            shard = tensor.shards[devices.index(real.device)]
            assert tuple(stop - start for start, stop in shard) == real.data.shape
            assert tensor.num_bytes(shard) == real.data.nbytes
            assert all(
                index.indices(size)[:2] == bounds
                for index, size, bounds in zip(real.index, tensor.shape, shard, strict=True)
            )


def test_replicas_and_splits_follow_the_mesh_axes():
    tensors = tensors_of("llama-nano", "data=2,fsdp=2,tensor=2")
    query = tensors["layers/attention/query"]
    assert [query.dims[dim] for dim in query.split_dims] == ["embed", "heads"]
    assert query.shards[0] == query.shards[4] != query.shards[1], (
        "device 4 is device 0 along data, device 1 along tensor"
    )
    text = device_table([query, tensors["final_norm/scale"]], 5)
    assert "| embed 0:128; heads 4:8 | 262,144 | 1 |" in text
    assert "| all of it | 1,024 | 0-4, 6-7 |" in text
    assert "**263,168**" in text


def test_zero_splits_parameters_and_moments_between_steps():
    for zero, parts in ((0, 1), (1, 8), (3, 8)):
        for kind in ("parameters", "moments"):
            tensor = tensors_of("gpt2-nano", "fsdp=8", kind, zero=zero)["layers/mlp/up"]
            assert len(set(tensor.shards.values())) == parts


def test_descriptions_name_the_layers_of_each_stage():
    up = tensors_of("gpt2-nano", "pipe=2", schedule="interleaved", microbatches=4)["layers/mlp/up"]
    assert [up.describe(shard, 0) for shard in up.shards.values()] == [
        "layers 0, 2",
        "layers 1, 3",
    ]
    uneven = tensors_of(
        "gpt2-nano", "pipe=2", microbatches=4, **{"parallel.layers_per_stage": (3, 1)}
    )["layers/mlp/up"]
    assert [uneven.describe(shard, 0) for shard in uneven.shards.values()] == [
        "layers 0-2",
        "layers 3 + an empty slot + an empty slot",
    ]


def test_figures_name_devices_and_shards():
    tensors = tensors_of("gpt2-nano", "data=2,fsdp=2,tensor=2")
    mesh = texts(draw_mesh(tensors["positions"].mesh))
    assert all(f"device {device}" in mesh for device in range(8))
    assert "data 1\nfsdp 0\ntensor 1" in mesh
    figure = draw_tensors(
        [tensors[name] for name in ("layers/mlp/up", "tokens of a batch", "final_norm/scale")]
    )
    text = texts(figure)
    assert "devices 1, 5" in text
    assert "mlp\n512:1024" in text
    assert "batch\n4:8" in text
    assert "whole on every device" in text
    figure.canvas.draw()


def test_every_shard_is_drawn_once():
    tensor = tensors_of("gpt2-nano", "pipe=2,fsdp=2,tensor=2", microbatches=2)["layers/mlp/up"]
    cells = [
        text for text in texts(draw_tensors([tensor])).splitlines() if text.startswith("device ")
    ]
    assert sorted(cells) == [f"device {device}" for device in range(8)]
    assert np.prod(tensor.shape) * 4 == sum(map(tensor.num_bytes, set(tensor.shards.values())))
