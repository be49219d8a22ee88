"""Plans compiled for GPUs that are not here; tests that need the CUDA compiler are skipped where it
is not installed.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import PlanError
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time import compile_check
from optimus_jax.planning.ahead_of_time.compile_check import can_compile, check, targets
from optimus_jax.planning.ahead_of_time.compile_report import (
    CompileReport,
    Rematerialised,
    Traffic,
    check_executable,
)
from optimus_jax.planning.ahead_of_time.rematerialised import rematerialised
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for

GIB = 2**30
needs_compiler = pytest.mark.skipif(
    not can_compile(), reason="the CUDA compiler is not installed (extra plan-gpu)"
)


def config_and_plan(mesh: str, cluster: Cluster, **settings: str) -> tuple[Config, Plan]:
    config = Config(model=model_preset("llama-nano"), data=DataConfig(global_batch=32)).with_values(
        {
            "parallel.mesh": mesh,
            "precision.compute": "bf16",
            **{f"parallel.{name}": value for name, value in settings.items()},
        }
    )
    plan = plan_for(config, AxisSizes.parse(mesh), cluster.topology())
    plan.validate(config.model, global_batch=config.data.global_batch)
    return config, plan


def traffic(
    kind: str,
    axes: tuple[str, ...],
    *,
    times: int = 1,
    work_under: int = 1,
    exposed_s: float = 0.0,
) -> Traffic:
    return Traffic(
        kind=kind,
        axes=axes,
        payload_bytes=100,
        wire_bytes=50.0,
        times=times,
        work_under=work_under,
        source="step",
        time_s=1.0,
        exposed_s=exposed_s,
    )


REPORT = CompileReport(
    plan="0123",
    target="h100",
    attention="cudnn",
    num_devices=8,
    compile_s=1.5,
    argument_bytes=10 * GIB,
    temp_bytes=60 * GIB,
    output_bytes=10 * GIB,
    alias_bytes=9 * GIB,
    capacity_bytes=80 * GIB,
    headroom_share=0.06,
    dot_flops=1e12,
    traffic=(
        traffic("all-gather", ("fsdp",), times=3),
        traffic("all-gather", ("fsdp",), work_under=0),
        traffic("all-reduce", ("data", "tensor"), work_under=0),
        traffic("collective-permute", ("pipe",)),
    ),
    rematerialised=(Rematerialised(array="f32[8]", source="there", change=("vocab",)),),
    unknown_loops=("while.1",),
)


def test_report_gives_fit_exposed_collectives_and_wire_bytes():
    assert REPORT.total_bytes == 71 * GIB
    assert REPORT.fits
    assert replace(REPORT, headroom_share=0.12).fits is False
    assert replace(REPORT, capacity_bytes=None).fits is None
    assert [each.kind for each in REPORT.exposed_collectives] == ["all-gather"], (
        "all-reduces are waited for by what needs their sum"
    )
    assert REPORT.wire_bytes() == {
        ("all-gather", ("fsdp",)): 200.0,
        ("all-reduce", ("data", "tensor")): 50.0,
        ("collective-permute", ("pipe",)): 50.0,
    }
    assert CompileReport.from_json(REPORT.to_json()) == REPORT
    assert json.loads(REPORT.to_json())["traffic"][0]["times"] == 3


def test_hidden_shares_are_compared_with_the_planners_longest_exchange_first():
    report = replace(
        REPORT,
        traffic=(
            traffic("all-reduce", ("data",), exposed_s=1.0),
            traffic("all-gather", ("fsdp",), times=3, exposed_s=0.25),
            traffic("all-gather", ("fsdp",), exposed_s=0.25),
        ),
    )
    compared = report.compare_hidden({("all-gather", ("fsdp",)): 0.7})
    assert list(compared.items()) == [
        ("all-gather over fsdp", {"time_s": 4.0, "compiled": 0.75, "planned": 0.7}),
        ("all-reduce over data", {"time_s": 1.0, "compiled": 0.0, "planned": None}),
    ]


def test_memory_check_before_a_run_reads_the_executable():
    compiled = (
        jax.jit(lambda x: (x + 1, jnp.sort(x)), donate_argnums=0)
        .lower(jnp.ones(1000))
        .compile()
        .memory_analysis()
    )
    found = check_executable(compiled, 8 * GIB)
    assert (found.argument_bytes, found.output_bytes) == (4000, compiled.output_size_in_bytes)
    assert found.fits
    assert 8000 <= found.total_bytes < 100_000
    tight = check_executable(compiled, found.total_bytes)
    assert tight.fits is False, "there has to be room beside it"
    assert check_executable(compiled, found.total_bytes, headroom_share=0.0).fits
    assert check_executable(compiled, None).fits is None


def test_a_donated_array_counts_once():
    analysis = SimpleNamespace(
        argument_size_in_bytes=70,
        temp_size_in_bytes=20,
        output_size_in_bytes=71,
        alias_size_in_bytes=70,
    )
    assert check_executable(analysis, 100).total_bytes == 91


def test_compile_errors_say_why(monkeypatch):
    cluster = Cluster.parse("h100:8")
    config, plan = config_and_plan("fsdp=8", cluster)
    monkeypatch.setattr(compile_check, "can_compile", lambda: False)
    with pytest.raises(PlanError, match=r"pip install 'optimus-jax\[plan-gpu\]'"):
        check(config, plan, cluster)
    monkeypatch.setattr(compile_check, "can_compile", lambda: True)
    with pytest.raises(
        PlanError,
        match=r"a100 or h100 or h200, or describe it in .*/targets/rtx4090.textproto",
    ):
        check(config, plan, Cluster.parse("rtx4090:8"))
    with pytest.raises(PlanError, match="the plan is for 8 devices, the cluster has 16"):
        check(config, plan, Cluster.parse("h100:2x8"))
    with pytest.raises(PlanError, match=r"compiling took longer than 0.01 s"):
        check(config, plan, cluster, timeout_s=0.01)


def test_error_of_a_failed_compile_process_is_quoted(monkeypatch):
    cluster = Cluster.parse("h100:8")
    config, plan = config_and_plan("fsdp=8", cluster)
    monkeypatch.setattr(compile_check, "can_compile", lambda: True)
    monkeypatch.setattr(compile_check, "WORKER", "optimus_jax.no_such_module")
    with pytest.raises(PlanError, match=r"does not compile(.|\n)*No module named"):
        check(config, plan, cluster)


def test_every_compile_target_matches_a_known_accelerator():
    assert targets() == ("a100", "h100", "h200")
    for name in targets():
        text, accelerator = (
            (compile_check._TARGETS / f"{name}.textproto").read_text(),
            Cluster.parse(f"{name}:8").accelerator,
        )
        assert f'name: "{accelerator.device_kind}"' in text
        assert f"core_count: {accelerator.num_cores}\n" in text
        assert accelerator.memory_bytes is not None
        memory = int(text.split("device_memory_size: ")[1].split()[0])
        assert accelerator.memory_bytes <= memory < 1.08 * accelerator.memory_bytes, (
            "the driver counts what the data sheet rounds off"
        )


def test_fully_rematerialised_array_is_named_with_its_logical_axes(capfd):
    """XLA really rematerialises this array: no collective leads to its new order of shards."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731

    def moved(x):
        x = jnp.sin(jax.lax.with_sharding_constraint(x * 2, spec("data", None, "tensor")))
        return jnp.cos(jax.lax.with_sharding_constraint(x, spec(None, ("tensor", "data"), None)))

    config = Config(
        model=replace(model_preset("llama-nano"), vocab_size=512), data=DataConfig(global_batch=24)
    )
    plan = plan_for(config, AxisSizes(data=2, tensor=4), Cluster.parse("h100:8").topology())
    jax.jit(moved).lower(
        jax.ShapeDtypeStruct(
            (24, 32, config.model.mlp_dim), jnp.float32, sharding=spec("data", None, "tensor")
        )
    ).compile()
    (found,) = rematerialised(capfd.readouterr().err, config, plan)
    assert (found.array, found.change) == (
        f"f32[12,32,{config.model.mlp_dim // 4}]",
        ("batch", "mlp"),
    )
    assert "sharding_constraint" in found.source
    assert rematerialised("all is well", config, plan) == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{devices=[2,1,4]<=[8]}", "{devices=[2,4,1]<=[8]}"),
        (
            "{mesh['data'=2,'tensor'=4], [{'data'}, {}, {'tensor'}]}",
            "{mesh['data'=2,'tensor'=4], [{'data'}, {'tensor'}, {}]}",
        ),
        (
            "{mesh['x'=8], [{'x':(1)2}, {}, {'x':(2)4}]}",
            (
                "{mesh['x'=8], device_ids=([2,4]T(1,0)), [{'x':(1)2}, {'x':(2)4}, {}],"
                " replicated={'y'}}"
            ),
        ),
    ],
)
def test_only_dims_whose_sharding_changes_are_named(before, after):
    cluster = Cluster.parse("h100:8")
    config, plan = config_and_plan("data=2,tensor=4", cluster)
    message = (
        f"[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {before}"
        f" to {after} efficiently "
        f"for HLO operation %copy.1 = f32[16,8,{config.model.mlp_dim // 4}]{{2,1,0}} copy(%x),"
        ' metadata={op_name="jit(f)/here" stack_frame_id=3}.'
    )
    assert rematerialised(f"{message}\n{message}\n", config, plan) == (
        Rematerialised(
            array=f"f32[16,8,{config.model.mlp_dim // 4}]",
            source="jit(f)/here",
            change=("heads", "mlp"),
        ),
    )


@needs_compiler
@pytest.mark.parametrize("name", ["h100", "h200"])
def test_plan_for_two_hosts_compiles_and_reports_wire_bytes(name):
    cluster = Cluster.parse(f"{name}:2x8")
    config, plan = config_and_plan("data=2,fsdp=4,tensor=2", cluster, attention="xla")
    report = check(config, plan, cluster)
    assert report.fits
    assert (
        report.target,
        report.num_devices,
        report.plan,
        report.rematerialised,
        report.unknown_loops,
    ) == (name, 16, plan.digest, (), ())
    sent = report.wire_bytes()
    assert set(sent) >= {
        ("all-gather", ("fsdp",)),
        ("reduce-scatter", ("fsdp",)),
        ("all-reduce", ("tensor",)),
        ("all-reduce", ("data",)),
    }
    # Every matrix is gathered in bf16, once in forward and once in backward; its gradient is
    # scattered in float32.
    assert sent["all-gather", ("fsdp",)] == pytest.approx(
        sent["reduce-scatter", ("fsdp",)], rel=0.05
    )
    estimate = memory_of_run(config, plan)
    assert report.argument_bytes == pytest.approx(estimate.states, rel=0.05)


@needs_compiler
def test_fused_attention_of_the_plan_is_compiled():
    cluster = Cluster.parse("h100:8")
    config, plan = config_and_plan("fsdp=8", cluster)
    assert plan.attention == "cudnn"
    fused = check(config, plan, cluster)
    plain = check(config, replace(plan, attention="xla"), cluster)
    assert (fused.attention, plain.attention) == ("cudnn", "xla")
    assert fused.temp_bytes < plain.temp_bytes, "weights of attention are not kept"
    assert fused.dot_flops < plain.dot_flops, "and its products are the library's"
