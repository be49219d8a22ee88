"""Published figures are consistent, and a device is recognised by its full name only."""

import pytest

from optimus_jax.devices.accelerators import (
    ACCELERATORS,
    Accelerator,
    accelerator_named,
    accelerator_of_kind,
)
from optimus_jax.errors import ConfigError
from optimus_jax.mesh.topology import Topology

FLOPS_PER_CLOCK = {
    "a100": 2048,
    "h100": 4096,
    "h200": 4096,
    "b200": 8192,
    "gb200": 8192,
    "gb300": 8192,
    "mi300x": 2048,
    "l40s": 1024,
    "l4": 1024,
    "rtx4090": 512,
    "rtx3090": 512,
    "v100": 1024,
}
"""Of one multiprocessor in 16-bit matmuls that accumulate in float32: from the architectures' white
papers."""
GPUS = [each for each in ACCELERATORS if each.platform == "gpu"]


def topology(device_kind):
    return Topology(
        num_devices=8,
        num_processes=1,
        platform="gpu",
        device_kind=device_kind,
        bytes_per_device=None,
    )


def test_names_and_kinds_are_unique():
    assert (
        len({each.name for each in ACCELERATORS})
        == len({each.device_kind for each in ACCELERATORS})
        == len(ACCELERATORS)
    )


@pytest.mark.parametrize(
    "name",
    [
        "a100",
        "a100-40gb",
        "a100-pcie",
        "h100",
        "h100-pcie",
        "h200",
        "b200",
        "gb200",
        "gb300",
        "mi300x",
        "l40s",
        "l4",
        "rtx4090",
        "rtx3090",
        "v100",
    ],
)
def test_the_gpus_that_people_plan_for_are_listed(name):
    assert accelerator_named(name.upper()).platform == "gpu"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_published_figures_are_consistent_and_have_a_source(gpu):
    """A sparse peak, the accumulator's format or a wrong number of multiprocessors would be off by
    more than these bounds.
    """
    assert gpu.sources
    # A tensor core does twice as much in 16 bits as in TF32, which JAX uses on NVIDIA's from A100.
    ratio = gpu.dense_peak_flops / gpu.f32_peak_flops
    assert 1.97 < ratio < 2.03 or gpu.name.startswith(("v100", "mi300x"))
    clock_hz = gpu.dense_peak_flops / gpu.num_cores / FLOPS_PER_CLOCK[gpu.name.partition("-")[0]]
    assert 1.4e9 < clock_hz < 2.6e9, "a boost clock that exists"
    assert 70 < gpu.dense_peak_flops / gpu.memory_bytes_per_s < 450
    assert 15e-3 < gpu.memory_bytes / gpu.memory_bytes_per_s < 81e-3, (
        "seconds to read all of it: 17 ms (V100) to 80 ms (L4)"
    )


def test_unpublished_figures_are_unknown():
    assert accelerator_named("cpu").dense_peak_flops is None
    assert Accelerator.unlisted("cpu", "cpu") == accelerator_named("cpu")


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", 121e12),
    ],
)
def test_device_name_of_the_driver_gives_the_peak(device_kind, peak):
    assert (
        topology(device_kind).dense_peak_flops("bf16")
        == topology(device_kind).dense_peak_flops("f16")
        == peak
    )


@pytest.mark.parametrize(
    "device_kind",
    ["NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA L4 something", "cpu", ""],
)
def test_no_peak_is_guessed_from_the_beginning_of_a_name(device_kind):
    """These are slower than the devices that their names begin with."""
    assert topology(device_kind).dense_peak_flops("bf16") is None
    assert accelerator_of_kind(device_kind) in (None, accelerator_named("cpu"))


def test_float32_has_no_peak_for_mfu():
    assert topology("NVIDIA H200").dense_peak_flops("f32") is None


def test_mistyped_accelerator_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        accelerator_named("h10")
