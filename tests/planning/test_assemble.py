"""Settings that the user left open are filled in by what the devices support."""

from dataclasses import replace

import pytest

from optimus_jax.config import Config, ModelConfig, PrecisionConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import compute_precision, plan_for
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.layouts import layouts
from optimus_jax.training.state import initial_loss_scale

CONFIG = Config(model=ModelConfig(head_dim=64))
MI300X = Topology(
    num_devices=1,
    num_processes=1,
    platform="gpu",
    device_kind="AMD Instinct MI300X",
    bytes_per_device=None,
)


def topology_of(device):
    return Cluster.parse(f"{device}:1").topology()


def config_with_precision(precision):
    return CONFIG.with_values({"precision.compute": precision})


@pytest.mark.parametrize(
    ("topology", "precision"),
    [
        (topology_of("cpu"), "f32"),
        (topology_of("a100"), "bf16"),
        (topology_of("h200"), "bf16"),
        (topology_of("l4"), "bf16"),
        (topology_of("v100"), "f16"),
        (MI300X, "bf16"),
        (replace(MI300X, compute_capability=(7, 5)), "f16"),
    ],
)
def test_precision_defaults_to_the_devices_native_format(topology, precision):
    assert (
        choose_plan(CONFIG, topology).plan.precision
        == plan_for(CONFIG, AxisSizes(), topology).precision
        == precision
    )
    assert {layout.precision for layout in layouts(CONFIG, topology)} == {precision}
    assert compute_precision(config_with_precision("f32"), topology) == "f32"
    assert compute_precision(config_with_precision("f16"), topology) == "f16"


def test_unsupported_precision_is_refused():
    with pytest.raises(PlanError, match=r"no bf16[\s\S]*use --precision f16 or f32"):
        choose_plan(config_with_precision("bf16"), topology_of("v100"))
    assert choose_plan(config_with_precision("bf16"), topology_of("h100")).plan.precision == "bf16"


@pytest.mark.parametrize(("device", "scale"), [("v100", 2.0**16), ("h100", 1), ("cpu", 1)])
def test_only_f16_starts_with_a_loss_scale(device, scale):
    assert (
        initial_loss_scale(
            PrecisionConfig(), plan_for(CONFIG, AxisSizes(), topology_of(device))
        ).scale
        == scale
    )
