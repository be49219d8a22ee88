"""The output of `show_mesh`, compared with the shardings of a run."""

from pathlib import Path

import jax
import pytest

import optimus_jax
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.request import make_config
from optimus_jax.errors import ConfigError, OptimusError
from optimus_jax.mesh.build import build_mesh, discover
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.viz.layouts import model_tensors


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("data=2,fsdp=4", {}),
        ("pipe=2,fsdp=2,tensor=2", {}),
        ("fsdp=4,tensor=2", {"zero": 1}),
    ],
)
def test_parameters_are_sharded_as_in_a_run(mesh, settings):
    axes = AxisSizes.parse(mesh)
    config = make_config("gpt2-nano", {"mesh": mesh, **settings})
    plan = plan_for(config, axes, discover())
    tensors = model_tensors(config.model, plan, build_mesh(axes, jax.devices()))
    _, *rows = optimus_jax.show_mesh(mesh, model="gpt2-nano", **settings).parameters
    assert {(name, where != "whole on every device", size) for name, _, where, size in rows} == {
        (
            tensor.name,
            bool(tensor.split_dims),
            f"{tensor.num_bytes(tensor.shards[0]) / 2**20:,.2f} MiB",
        )
        for tensor in tensors
    }


def test_the_grid_shows_every_device_at_its_mesh_position():
    view = optimus_jax.show_mesh("data=2,fsdp=2,tensor=2", model="gpt2-nano")
    assert view.grid == (
        ("", "tensor 0", "tensor 1"),
        ("data 0, fsdp 0", "device 0", "device 1"),
        ("data 0, fsdp 1", "device 2", "device 3"),
        ("data 1, fsdp 0", "device 4", "device 5"),
        ("data 1, fsdp 1", "device 6", "device 7"),
    )
    assert [row[:3] for row in view.axes[1:]] == [
        ("data", "2", "0, 4"),
        ("fsdp", "2", "0, 2"),
        ("tensor", "2", "0, 1"),
    ]


def test_hosts_of_a_hypothetical_cluster_are_shown():
    view = optimus_jax.show_mesh("pipe=2,fsdp=4", model="llama-nano", cluster="h100:2x4")
    assert view.grid[2][1] == "device 4 @ host 1"
    assert [row[3] for row in view.axes[1:]] == ["crosses hosts", "inside a process"]


def test_the_view_prints_as_text_and_as_html():
    view = optimus_jax.show_mesh("fsdp=16", model="gpt2-nano")
    assert str(view) == repr(view)
    for row in (*view.grid, *view.axes, *view.parameters):
        assert all(cell in str(view) for cell in row)
        assert "".join(f"<td>{cell}</td>" for cell in row) in view._repr_html_().replace(
            "th>", "td>"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": "auto"}, "find_plans chooses"),
        ({"mesh": "dat=2"}, "did you mean 'data'"),
        ({"mesh": "fsdp=4", "cluster": "h100:2x4"}, "4 devices, and the cluster 8"),
        ({"mesh": "tensor=3"}, "num_heads=8"),
    ],
)
def test_an_impossible_mesh_is_an_error(arguments, message):
    with pytest.raises(OptimusError, match=message):
        optimus_jax.show_mesh(**{"model": "gpt2-nano", **arguments})


def test_a_model_is_a_name_a_path_or_a_config():
    by_path = optimus_jax.show_mesh("fsdp=8", model=Path("gpt2-nano"))
    assert str(by_path) == str(optimus_jax.show_mesh("fsdp=8", model="gpt2-nano"))
    (best, *_) = optimus_jax.find_plans(Path("gpt2-nano"), "h100:8")
    assert best.axes.num_devices == 8
    for wrong, given in (
        (optimus_jax.ModelConfig, "the class ModelConfig"),
        (8, "a int"),
        (None, "a NoneType"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)a model is the name.*given: {given}"):
            optimus_jax.show_mesh("fsdp=8", model=wrong)
        with pytest.raises(ConfigError, match=rf"(?s)a model is the name.*given: {given}"):
            optimus_jax.find_plans(wrong, "h100:8")
