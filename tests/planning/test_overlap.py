"""What exchanges run beside: the planner's shares are those of compiled plans, and never more than
the compute that there is.
"""

from dataclasses import replace

import pytest
from pricing import HOST, HOSTS, LLAMA, RATES, plan_of

from optimus_jax.config.presets import model_preset
from optimus_jax.planning.cost.communication import LAYER_PARTS
from optimus_jax.planning.cost.cost import hidden_shares, predict
from optimus_jax.planning.cost.implementation_profile import OURS
from optimus_jax.planning.cost.mesh_costs import ClusterCosts
from optimus_jax.planning.cost.overlap import USABLE
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster

LARGE = model_preset("llama3.3-70b")
GATHERS, SCATTERS = ("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",))
SUMS, OVER_TENSOR = ("all-reduce", ("data",)), ("all-reduce", ("tensor",))
COMPILED = [
    ("fsdp=8", LLAMA, 1, {}, {GATHERS: 0.96, SCATTERS: 0.87}),
    ("fsdp=8", LLAMA, 1, {"overlap": "layers"}, {GATHERS: 0.98, SCATTERS: 0.89}),
    ("data=2,fsdp=4", LLAMA, 1, {}, {GATHERS: 0.95, SCATTERS: 0.87, SUMS: 0.15}),
    ("data=2,fsdp=4", LLAMA, 1, {"overlap": "layers"}, {GATHERS: 1.0, SCATTERS: 0.84, SUMS: 0.81}),
    ("fsdp=4,tensor=2", LLAMA, 2, {}, {GATHERS: 0.98, SCATTERS: 0.75, OVER_TENSOR: 0.74}),
    (
        "fsdp=4,tensor=2",
        LLAMA,
        2,
        {"overlap": "halves"},
        {GATHERS: 1.0, SCATTERS: 0.9, OVER_TENSOR: 0.86},
    ),
    ("fsdp=64", LARGE, 1, {"remat": "full"}, {GATHERS: 0.89, SCATTERS: 0.56}),
    ("fsdp=64", LARGE, 1, {"remat": "full", "overlap": "layers"}, {GATHERS: 0.98, SCATTERS: 0.97}),
    (
        "data=2,fsdp=32",
        LARGE,
        1,
        {"remat": "full", "overlap": "layers"},
        {GATHERS: 0.66, SCATTERS: 0.96},
    ),
    ("fsdp=32,tensor=2", LARGE, 2, {"remat": "full"}, {GATHERS: 0.35, SCATTERS: 0.16}),
    (
        "fsdp=32,tensor=2",
        LARGE,
        2,
        {"remat": "full", "overlap": "layers"},
        {GATHERS: 0.53, SCATTERS: 0.01},
    ),
]
"""Mesh, model, rows of 4,096 tokens on a device, settings, and the hidden shares of the plan
compiled for H100s (docs/decisions/0035; of the last two, benchmarks/results/compiled-exchanges.md).
"""
WITHIN = 0.1
"""What is asked of the planner's shares. These plans keep it; the page says which do not."""


def case(mesh, model, rows, settings):
    plan = plan_of(mesh, model, **settings)
    workload = Workload(model=model, seq_len=4096, global_batch=rows * plan.batch_ways())
    return workload, plan, HOSTS if plan.num_devices > 8 else HOST


@pytest.mark.parametrize(("mesh", "model", "rows", "settings", "compiled"), COMPILED)
def test_exchanges_hide_what_compiled_plans_show(mesh, model, rows, settings, compiled):
    planned = hidden_shares(*case(mesh, model, rows, settings), RATES)
    assert {key: planned[key] for key in compiled} == pytest.approx(compiled, abs=WITHIN)


@pytest.mark.parametrize("overlap", ["none", "layers"])
def test_no_more_hides_than_there_is_compute(overlap):
    slow = HOSTS.with_links(["between=1GB/s"])
    workload, plan, _ = case("fsdp=64", LLAMA, 1, {"overlap": overlap})
    mesh = ClusterCosts(workload, slow, RATES, OURS).mesh(plan)
    beside = sum(beside_s for op, _, beside_s in mesh.exchanges(plan) if op.part in LAYER_PARTS)
    compute = mesh.layer(plan, plan.zero).compute
    assert beside == pytest.approx(USABLE * LLAMA.num_layers * (compute.forward + compute.backward))


def test_what_hides_is_taken_off_the_step():
    """Both slow each other down: of what is beside compute, 0.7 is saved."""
    workload, plan, cluster = case("fsdp=8", LLAMA, 1, {})
    free, none = (
        predict(workload, plan, cluster, replace(RATES, overlap_slowdown=slowdown)).step_time_s
        for slowdown in (1.0, 2.0)
    )
    mesh = ClusterCosts(workload, cluster, RATES, OURS).mesh(plan)
    assert none - free == pytest.approx(sum(each[2] for each in mesh.exchanges(plan)))
    usual = predict(workload, plan, cluster, RATES).step_time_s
    assert none - usual == pytest.approx(0.7 * (none - free))


@pytest.mark.parametrize("overlap", ["none", "layers", "halves"])
def test_without_xlas_order_only_matrices_hide_the_usual_share(overlap):
    on_cpu = Cluster.parse("h100:8")
    on_cpu = replace(on_cpu, accelerator=replace(on_cpu.accelerator, platform="cpu"))
    workload, plan, _ = case("fsdp=4,tensor=2", LLAMA, 2, {"overlap": overlap})
    other = replace(OURS, scheduled_by_xla=False)
    for cluster, implementation in ((on_cpu, OURS), (HOST, other)):
        shares = hidden_shares(workload, plan, cluster, RATES, implementation)
        assert shares[OVER_TENSOR] == 0
        assert shares[GATHERS] == pytest.approx(RATES.overlap_share, abs=0.05)
