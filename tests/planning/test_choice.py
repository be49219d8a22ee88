"""The plan that is chosen when the user leaves it open, and the error when nothing fits; no devices
needed.
"""

import re
from dataclasses import replace

import pytest

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.config.request import make_config
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.search import fits
from optimus_jax.planning.search.suggestions import NAMED

GIB = 2**30
EIGHT = Topology(
    num_devices=8,
    num_processes=1,
    platform="gpu",
    device_kind="NVIDIA H100 80GB HBM3",
    bytes_per_device=80 * GIB,
)


def config(model, **settings):
    return Config(
        model=model_preset(model), data=DataConfig(global_batch=16, seq_len=256)
    ).with_values({"precision.compute": "f32", **settings})


@pytest.mark.parametrize(
    ("model", "settings", "gib", "axes", "zero", "why"),
    [
        ("gpt2", {}, 80, AxisSizes(data=8), 0, "fits on each device"),
        (
            "llama3-8b",
            {"parallel.remat": "full"},
            80,
            AxisSizes(fsdp=8),
            3,
            "does not fit on a device",
        ),
        ("gpt2", {"parallel.zero": 1}, 80, AxisSizes(fsdp=8), 1, "zero=1 was requested"),
        ("gpt2", {"parallel.mesh": "data=2,fsdp=4"}, 80, AxisSizes(data=2, fsdp=4), 3, "was given"),
        ("gpt2-xl", {}, None, AxisSizes(data=8), 0, "fits on each device"),
        # gpipe needs stages
        (
            "gpt2",
            {"parallel.schedule": "gpipe"},
            80,
            AxisSizes(pipe=2, data=4),
            0,
            "fits on each device",
        ),
    ],
)
def test_chosen_mesh_zero_and_reason(model, settings, gib, axes, zero, why):
    topology = replace(EIGHT, bytes_per_device=gib and gib * GIB)
    choice = choose_plan(config(model, **settings), topology)
    assert (choice.plan.axes, choice.plan.zero) == (axes, zero)
    assert why in choice.why
    assert fits(choice.memory, topology)


@pytest.mark.parametrize(
    ("num_devices", "global_batch", "gib", "axes"),
    [
        (3, 8, 80, AxisSizes(tensor=3)),  # three of four hosts are left
        (6, 16, 80, AxisSizes(data=2, tensor=3)),
        (24, 16, 80, AxisSizes(data=8, tensor=3)),
        (10, 16, 80, AxisSizes(data=2, pipe=5)),  # 12 heads do not divide over 5 devices
        (6, 16, 1, AxisSizes(fsdp=2, tensor=3)),
    ],
)
def test_devices_that_the_batch_cannot_use_go_to_tensor_or_pipe(
    num_devices, global_batch, gib, axes
):
    requested = config("gpt2", **{"data.global_batch": global_batch, "parallel.remat": "full"})
    choice = choose_plan(
        requested, replace(EIGHT, num_devices=num_devices, bytes_per_device=gib * GIB)
    )
    assert choice.plan.axes == axes


def test_pipeline_stages_lie_on_different_hosts():
    three_hosts = replace(EIGHT, num_devices=6, num_hosts=3, num_processes=3)
    assert choose_plan(
        config("gpt2", **{"data.global_batch": 8}), three_hosts
    ).plan.axes == AxisSizes(pipe=3, data=2)
    assert (
        "split 3 ways" in choose_plan(config("gpt2", **{"data.global_batch": 8}), three_hosts).why
    )


def test_error_without_a_legal_plan_is_about_the_batch():
    with pytest.raises(PlanError, match="global batch does not divide evenly"):
        choose_plan(config("gpt2", **{"data.global_batch": 8}), replace(EIGHT, num_devices=29))


def test_one_device_gets_the_mesh_of_ones():
    assert choose_plan(config("gpt2"), replace(EIGHT, num_devices=1)).plan.axes == AxisSizes()


def test_plan_that_does_not_fit_names_bytes_and_fitting_options():
    requested = config("llama3-8b", **{"parallel.mesh": "data=8"})
    with pytest.raises(
        PlanError, match=r"about [\d.]+ GiB per device is needed, 80.00 GiB is available"
    ) as caught:
        choose_plan(requested, EIGHT)
    options = str(caught.value).partition(NAMED)[2].split(" or ")
    assert any(option.startswith("--mesh ") and "fsdp" in option for option in options)
    for option in options:
        flags = re.findall(r"--(?:set )?(\S+)[ =](\S*)", option)
        assert fits(choose_plan(make_config(None, dict(flags), requested), EIGHT).memory, EIGHT)


def test_model_that_fits_nowhere_asks_for_more_devices():
    with pytest.raises(
        PlanError, match="use more devices or a smaller model: with fully sharded state"
    ):
        choose_plan(config("llama3.3-70b"), EIGHT)


@pytest.mark.parametrize("model", ["gpt2", "llama3.2-1b"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_zero_and_remat_lower_the_memory_estimate(model, microbatches):
    def total(mesh, **settings):
        requested = config(
            model,
            **{"parallel.microbatches": microbatches},
            **{f"parallel.{name}": value for name, value in settings.items()},
        )
        plan = plan_for(requested, AxisSizes.parse(mesh), EIGHT)
        return memory_of_run(requested, plan).total

    stages = [total("fsdp=8", zero=zero) for zero in range(4)]
    assert stages == sorted(stages, reverse=True)
    assert len(set(stages)) == 4
    policies = [total("data=8", remat=remat) for remat in ("none", "selective", "full")]
    assert policies == sorted(policies, reverse=True)
    assert len(set(policies)) == 3
