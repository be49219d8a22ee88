"""The enumeration of layouts: nothing illegal in it, nothing legal left out."""

import itertools
from dataclasses import replace

import pytest

from optimus_jax.config import Config, DataConfig, ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import memory_fallbacks, plan_for
from optimus_jax.planning.search.layouts import TENSOR_RULES, Rejection, axis_sizes, layouts

MODEL = ModelConfig(
    name="tested",
    family="llama",
    vocab_size=1000,
    num_layers=6,
    embed_dim=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=96,
)
CPU = Topology(
    num_devices=12, num_processes=1, platform="cpu", device_kind="cpu", bytes_per_device=None
)


def config(**settings):
    return Config(model=MODEL, data=DataConfig(global_batch=24, seq_len=32)).with_values(
        {f"parallel.{name}": value for name, value in settings.items()}
    )


def legal(topology=CPU, **settings):
    return [layout for layout in layouts(config(**settings), topology) if isinstance(layout, Plan)]


@pytest.mark.parametrize("num_devices", [1, 2, 12, 60])
def test_axis_sizes_are_all_factorisations(num_devices):
    found = list(axis_sizes(num_devices))
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    wanted = [
        sizes
        for sizes in itertools.product(divisors, repeat=4)
        if sizes[0] * sizes[1] * sizes[2] * sizes[3] == num_devices
    ]
    assert sorted((s.pipe, s.data, s.fsdp, s.tensor) for s in found) == sorted(wanted)


@pytest.mark.parametrize("num_devices", [1, 6, 8, 12])
def test_every_layout_is_legal_and_listed_once(num_devices):
    topology = replace(CPU, num_devices=num_devices)
    found = legal(topology)
    for plan in found:
        assert plan.num_devices == num_devices
        plan.validate(MODEL, global_batch=24)
    assert len(set(found)) == len(found) > 0


@pytest.mark.parametrize("settings", [{}, {"kept_layers": 3}, {"overlap": "halves"}])
def test_every_layout_of_gpus_is_legal(settings):
    found = legal(Cluster.parse("h100:8").topology(), **settings)
    for plan in found:
        plan.validate(MODEL, global_batch=24)
    assert {plan.axes.pipe for plan in found} > {1}
    if not settings:
        assert {plan.overlap for plan in found} == {"none", "layers", "halves"}


@pytest.mark.slow
def test_every_legal_combination_of_settings_is_listed():
    """All meshes, ZeRO stages, rules, schedules and microbatches by brute force, except those that
    the module leaves out.
    """
    found, tried = set(legal()), 0
    for axes, zero, rules, microbatches, repeats in itertools.product(
        axis_sizes(12), (0, 1, 2, 3), TENSOR_RULES, (1, 2, 3, 4, 6, 8, 12, 24), (1, 2, 3, 6)
    ):
        if (
            (axes.fsdp > 1 and zero == 0)
            or (axes.tensor == 1 and rules)
            or (axes.pipe == 1 and repeats > 1)
        ):
            continue
        if repeats > 1 and MODEL.num_layers % (axes.pipe * repeats):
            continue
        requested = config(
            zero=zero,
            rules=rules,
            microbatches=microbatches,
            repeats=repeats if repeats > 1 else None,
        )
        try:
            plan = plan_for(requested, axes, CPU)
            plan.validate(MODEL, global_batch=24, lengths=requested.compiled_lengths)
        except PlanError:
            continue
        tried += 1
        assert plan in found
    assert tried == len(found)


def test_rejected_layouts_say_why():
    reasons = {
        rejection.layouts: rejection.reason
        for rejection in layouts(config(), CPU)
        if isinstance(rejection, Rejection)
    }
    assert "12 stages" in reasons["pipe=12"]
    assert "cannot be split evenly" in reasons["data=3,tensor=4"]


@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        ({"mesh": "data=2,tensor=6"}, lambda plan: plan.axes == AxisSizes(data=2, tensor=6)),
        ({"zero": 2}, lambda plan: plan.zero == 2 and plan.axes.fsdp > 1),
        ({"zero": 0}, lambda plan: plan.zero == 0 and plan.axes.fsdp == 1),
        ({"microbatches": 4}, lambda plan: plan.microbatches == 4),
        ({"rules": ("mlp=none",)}, lambda plan: "mlp" not in dict(plan.rules)),
        (
            {"schedule": "gpipe"},
            lambda plan: plan.pipeline is not None and plan.pipeline.schedule == "gpipe",
        ),
        ({"schedule": "none"}, lambda plan: plan.pipeline is None),
        ({"repeats": 3}, lambda plan: plan.pipeline is not None and plan.pipeline.repeats == 3),
        (
            {"layers_per_stage": (4, 2)},
            lambda plan: plan.pipeline is not None and plan.pipeline.layers_per_stage == (4, 2),
        ),
        ({"remat": "full"}, lambda plan: plan.remat == "full"),
    ],
)
def test_settings_that_the_user_fixed_are_kept(settings, holds):
    found = legal(**settings)
    assert found
    assert all(holds(plan) for plan in found)
    assert len(found) < len(legal()) or "remat" in settings


def test_memory_fallbacks_recompute_more_and_more():
    plan = next(plan for plan in legal() if plan.pipeline is not None)
    fallbacks = list(memory_fallbacks(config(), plan, "cpu"))
    assert fallbacks[0] == plan
    assert [(each.remat, each.pipeline.keep_residuals) for each in fallbacks] == [
        (remat, keep) for keep in (True, False) for remat in ("none", "selective", "dots", "full")
    ]
    fixed = next(
        plan for plan in legal(remat="dots", stage_residuals="keep") if plan.pipeline is not None
    )
    kept = config(remat="dots", stage_residuals="keep")
    assert list(memory_fallbacks(kept, fixed, "cpu")) == [fixed]
    assert fixed.remat == "dots"


def test_host_offload_is_the_last_fallback_and_only_on_gpus():
    staged = next(plan for plan in legal() if plan.pipeline is not None)
    plan = next(plan for plan in legal() if plan.pipeline is None)
    policies = ["none", "selective", "dots", "full"]
    assert {each.offload for each in memory_fallbacks(config(), plan, "cpu")} == {"none"}
    assert [(each.offload, each.remat) for each in memory_fallbacks(config(), plan, "gpu")] == [
        *(("none", remat) for remat in policies),
        ("activations", "full"),
        *(("optimizer", remat) for remat in policies),
        ("all", "full"),
    ]
    assert {each.offload for each in memory_fallbacks(config(), staged, "gpu")} == {
        "none",
        "optimizer",
    }
    assert {each.offload for each in memory_fallbacks(config(offload="none"), plan, "gpu")} == {
        "none"
    }


def test_layouts_offload_what_the_config_says():
    for offload in ("activations", "optimizer", "all"):
        found = legal(offload=offload)
        assert {plan.offload for plan in found} == {offload}
        assert any(plan.pipeline for plan in found) == (offload == "optimizer")
        assert {plan.remat for plan in found} == {"none" if offload == "optimizer" else "full"}
    assert not legal(offload="all", remat="dots")


def test_wrong_setting_raises_instead_of_rejecting_layouts():
    with pytest.raises(PlanError, match="cuDNN"):
        list(layouts(config(attention="cudnn"), CPU))


def test_split_tokens_are_asked_for_once_and_need_a_tensor_axis():
    found = [
        each
        for each in layouts(config(sequence_parallel=True), CPU)
        if not isinstance(each, Rejection)
    ]
    assert found
    assert all("length" in dict(plan.rules) and plan.axes.tensor > 1 for plan in found)
    for asked in (True, False):
        with pytest.raises(PlanError, match=r"sequence_parallel alone"):
            list(layouts(config(sequence_parallel=asked, rules=("length=tensor",)), CPU))
