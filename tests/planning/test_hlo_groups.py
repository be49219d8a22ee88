"""Replica groups in every notation of XLA, and as the installed compiler writes them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from optimus_jax.planning.ahead_of_time.hlo_groups import counted_groups, groups_of


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("[1,3]<=[3]", ((0, 1, 2),)),
    ],
)
def test_iota_replica_groups_are_parsed(text, groups):
    assert counted_groups(text) == groups
    assert groups_of(f"channel_id=1, replica_groups={text}, dimensions={{0}}", 8) == groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=%add", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,4},{4,0}}, metadata={}", ((0, 4), (4, 0))),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
        ("to_apply=%add", (tuple(range(8)),)),
    ],
)
def test_listed_replica_groups_are_parsed(text, groups):
    assert groups_of(text, 8) == groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("mesh['data'=2,'tensor'=4] {'tensor'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['data'=2,'tensor'=4] {'data'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "mesh['pipe'=1,'data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}",
            ((0, 1, 4, 5), (2, 3, 6, 7)),
        ),
        ("mesh['data'=2,'tensor'=2] {'tensor','data'}", ((0, 2, 1, 3),)),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'x'=4] {'x':(2)2,'a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=3], device_ids=([3,2]T(1,0)) {'y'}", ((0, 2, 4), (1, 3, 5))),
        ("mesh[x=2,y=2] {y}", ((0, 1), (2, 3))),
    ],
)
def test_replica_groups_by_mesh_axes_are_parsed(text, groups):
    assert (
        groups_of(f"channel_id=1, replica_groups={text}, use_global_device_ids=true", 8) == groups
    )


def test_unknown_notation_of_groups_is_an_error():
    with pytest.raises(ValueError, match="not known: replica_groups=torus"):
        groups_of("replica_groups=torus(2,4)", 8)


@pytest.mark.parametrize(
    "axes", [("data",), ("fsdp",), ("tensor",), ("data", "tensor"), ("data", "fsdp", "tensor")]
)
def test_replica_groups_of_the_installed_compiler_are_parsed(axes):
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
    )
    summed = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(x, axes),
            mesh=mesh,
            in_specs=PartitionSpec(mesh.axis_names),
            out_specs=PartitionSpec(tuple(name for name in mesh.axis_names if name not in axes)),
        )
    )
    (line,) = re.findall(r"all-reduce\(.*", summed.lower(jnp.ones(8)).compile().as_text() or "")
    number = np.arange(8).reshape(mesh.devices.shape)
    inside = [mesh.axis_names.index(axis) for axis in axes]
    expected = np.moveaxis(number, inside, range(3 - len(axes), 3)).reshape(-1, 2 ** len(axes))
    assert sorted(map(sorted, groups_of(line, 8))) == expected.tolist()
