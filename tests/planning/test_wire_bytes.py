"""Predicted bytes on the wire are those of compiled steps."""

import pytest
from pricing import HOST, HOSTS, LLAMA, RATES, plan_of

from optimus_jax.config.presets import model_preset
from optimus_jax.planning.cost.wire_bytes import wire_bytes
from optimus_jax.planning.cost.workload import Workload

LARGE = model_preset("llama3.3-70b")
GIB = 2**30
GATHERS, SCATTERS = ("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",))
SUMS = ("all-reduce", ("data",))
STAGES = {
    ("all-reduce", ("tensor",)): 70.0,
    ("all-gather", ("tensor",)): 1.75,
    ("collective-permute", ("pipe",)): 0.17,
    ("all-reduce", ("pipe",)): 0.22,
    ("all-reduce", ("pipe", "tensor")): 2.3,
}
COMPILED = [
    ("data=2,fsdp=4", LLAMA, 1, {}, {GATHERS: 20.97, SCATTERS: 22.44, SUMS: 7.48}),
    (
        "data=2,fsdp=4",
        LLAMA,
        1,
        {"overlap": "layers"},
        {GATHERS: 21.27, SCATTERS: 22.44, SUMS: 7.68},
    ),
    (
        "fsdp=4,tensor=2",
        LLAMA,
        1,
        {},
        {GATHERS: 10.48, SCATTERS: 11.22, ("all-reduce", ("tensor",)): 4.06},
    ),
    (
        "pipe=4,fsdp=2,tensor=8",
        LARGE,
        1,
        {"zero": 1, "microbatches": 8},
        STAGES | {GATHERS: 2.05, SCATTERS: 4.11},
    ),
]
"""Mesh, model, rows of 4,096 tokens of a microbatch on a device, settings, and GiB of the plan
compiled for H100s (benchmarks/results/compiled-exchanges.md)."""


@pytest.mark.parametrize(("mesh", "model", "rows", "settings", "compiled"), COMPILED)
def test_planned_bytes_are_those_of_compiled_plans(mesh, model, rows, settings, compiled):
    plan = plan_of(mesh, model, **settings)
    batch = rows * plan.microbatches * plan.batch_ways()
    workload = Workload(model=model, seq_len=4096, global_batch=batch)
    cluster = HOSTS if plan.num_devices > 8 else HOST
    planned = wire_bytes(workload, plan, cluster, RATES)
    # Compiled figures are given to a hundredth of a GiB.
    assert {key: planned[key] / GIB for key in compiled} == pytest.approx(compiled, abs=0.006)
    assert all(sent < 0.01 * GIB for key, sent in planned.items() if key not in compiled)
