"""Compiler options: known to XLA, chosen by device and plan, never overriding the user's own."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from plans import GPT, build, case

from optimus_jax.mesh.xla_options import CPU_OPTIONS, QUICK_COMPILATION
from optimus_jax.training.compiler_options import (
    BLACKWELL_COMMAND_BUFFERS,
    DOUBLE_BUFFERING,
    LATENCY_HIDING,
    PIPELINED_ALL_GATHER,
    combined_exchanges,
    memory_limit,
    options_for,
    usable_bytes,
)

CPU, GPU, B200 = ("cpu", "cpu"), ("gpu", "NVIDIA H200"), ("gpu", "NVIDIA B200")


def plan(mesh, **parallel):
    return build(GPT, case(mesh, **parallel)).plan


LAYER_ELEMENTS = 1000
HIDING = [LATENCY_HIDING, DOUBLE_BUFFERING]
COMBINED = list(combined_exchanges(plan("fsdp=8", zero=3), LAYER_ELEMENTS))
ALL_OPTIONS = (
    *CPU_OPTIONS,
    QUICK_COMPILATION,
    LATENCY_HIDING,
    PIPELINED_ALL_GATHER,
    DOUBLE_BUFFERING,
    BLACKWELL_COMMAND_BUFFERS,
    *COMBINED,
)


@pytest.mark.parametrize(
    "option",
    ALL_OPTIONS,
    ids=lambda option: option.name,
)
def test_xla_accepts_the_options_name_and_value(option):
    assert jax.jit(lambda x: x + 1, compiler_options={option.name: option.value})(1.0) == 2.0


def test_xla_refuses_an_unknown_option():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_thing"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_thing": True})(1.0)


@pytest.mark.parametrize(
    ("device", "mesh", "settings", "wanted"),
    [
        (GPU, "data=1", {}, []),
        (GPU, "data=1", {"offload": "optimizer"}, [LATENCY_HIDING]),
        (GPU, "data=8", {}, [LATENCY_HIDING]),
        (GPU, "fsdp=8", {"zero": 3}, [LATENCY_HIDING, PIPELINED_ALL_GATHER]),
        (GPU, "fsdp=8", {"zero": 1}, [LATENCY_HIDING]),
        (GPU, "fsdp=8", {"zero": 3, "microbatches": 2}, [LATENCY_HIDING]),
        (
            GPU,
            "pipe=2,fsdp=4",
            {"zero": 3, "microbatches": 1, "schedule": "gpipe"},
            [LATENCY_HIDING],
        ),
        (GPU, "fsdp=8", {"zero": 3, "overlap": "layers"}, [*HIDING, *COMBINED]),
        (GPU, "fsdp=8", {"zero": 3, "overlap": "halves"}, HIDING),
        (GPU, "data=8", {"overlap": "layers"}, HIDING),
        (
            GPU,
            "fsdp=8",
            {"zero": 3, "overlap": "layers", "microbatches": 2},
            [LATENCY_HIDING, *COMBINED],
        ),
        (B200, "data=1", {}, [BLACKWELL_COMMAND_BUFFERS]),
        (CPU, "fsdp=8", {}, [*CPU_OPTIONS, QUICK_COMPILATION]),
        (("tpu", "TPU v5"), "fsdp=8", {}, []),
    ],
)
def test_options_are_chosen_by_device_and_plan(device, mesh, settings, wanted, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    options = options_for(*device, plan(mesh, **settings), layer_elements=LAYER_ELEMENTS)
    assert list(options) == wanted


def test_a_step_in_bf16_on_a_cpu_is_fully_optimised(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    options = options_for(*CPU, replace(plan("fsdp=8"), precision="bf16"))
    assert list(options) == list(CPU_OPTIONS)


def test_exchanges_are_joined_up_to_those_of_a_layer():
    gathers, scatters = COMBINED
    assert gathers.value == str(4 * LAYER_ELEMENTS), "whole, in float32 on this platform"
    assert scatters.value == str(4 * LAYER_ELEMENTS // 8), "the shard of a float32 gradient"


def test_options_in_xla_flags_are_left_to_the_user(monkeypatch):
    fsdp = plan("fsdp=8", zero=3)
    monkeypatch.setenv("XLA_FLAGS", f"--some_other=1 --{LATENCY_HIDING.name}=false")
    assert list(options_for(*GPU, fsdp)) == [PIPELINED_ALL_GATHER]


@pytest.mark.parametrize(
    "name", ["xla_gpu_enable_pipelined_all_gather", "xla_gpu_pipeline_all_gather"]
)
def test_users_pipelined_all_gather_flag_wins_under_either_name(name, monkeypatch):
    assert name in (PIPELINED_ALL_GATHER.name, PIPELINED_ALL_GATHER.other_name)
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=anything")
    assert list(options_for(*GPU, plan("fsdp=8", zero=3))) == [LATENCY_HIDING]


def test_options_are_printed_as_in_xla_flags():
    assert PIPELINED_ALL_GATHER.text in (
        "xla_gpu_enable_pipelined_all_gather=true",
        "xla_gpu_pipeline_all_gather=on",
    )
    assert BLACKWELL_COMMAND_BUFFERS.text == "xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
    text = "import jax; print(jax.numpy.ones(1) + 1)"
    flags = " ".join(
        f"--{option.text}"
        for option in (
            *CPU_OPTIONS,
            LATENCY_HIDING,
            PIPELINED_ALL_GATHER,
            BLACKWELL_COMMAND_BUFFERS,
        )
    )
    subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "XLA_FLAGS": flags},
        check=True,
        capture_output=True,
    )


def test_xla_refuses_the_other_name_of_pipelined_all_gather():
    """Both are needed as long as both versions of JAX are."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(
            lambda x: x + 1,
            compiler_options={PIPELINED_ALL_GATHER.other_name: PIPELINED_ALL_GATHER.value},
        )(1.0)


def test_programs_are_compiled_with_the_options():
    program = build(GPT, case("fsdp=8")).program
    assert program.options == CPU_OPTIONS
    assert all(
        option.why and option.source and option.text.startswith(option.name)
        for option in (
            *CPU_OPTIONS,
            LATENCY_HIDING,
            PIPELINED_ALL_GATHER,
            BLACKWELL_COMMAND_BUFFERS,
        )
    )


def test_memory_limit_leaves_what_jax_may_use_beside_the_state(monkeypatch):
    """80% of an H200 less the state, times the factor, is what the run may have beside the
    state."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    limit = memory_limit("NVIDIA H200", 64 * 10**9)
    assert limit is not None
    xla_budget, available = 0.8 * 141e9 - 64e9, 0.98 * 0.95 * 141e9 - 64e9
    assert available - 0.01 * xla_budget < xla_budget * int(limit.value) / 100 <= available
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert memory_limit("NVIDIA H200", 10**9).text == "xla_gpu_memory_limit_slop_factor=60"
    assert memory_limit("NVIDIA H200", 70 * 10**9) is None, "there is no room beside the state"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    assert memory_limit("NVIDIA H200", 113 * 10**9) is None, "XLA would count on less than nothing"
    assert memory_limit("a card of the future", 10**9) is None
    assert list(options_for(*GPU, plan("data=1"), 64 * 10**9)) == [limit]
    assert jax.jit(lambda x: x + 1, compiler_options={limit.name: limit.value})(1.0) == 2.0
    monkeypatch.setenv("XLA_FLAGS", f"--{limit.name}=95")
    assert not options_for(*GPU, plan("data=1"), 64 * 10**9)


def test_memory_limit_of_a_local_gpu_is_based_on_its_pool(monkeypatch):
    """XLA's 80% are of the driver's bytes: with a factor from the data sheet's it would count on
    more than JAX's pool.
    """
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    driver, state = 150_754_820_096, 100 * 10**9
    pool = int(0.92 * driver)

    def promised(limit):
        return state + int(limit.value) / 100 * (0.8 * driver - state)

    limit = memory_limit("NVIDIA H200", state, pool)
    assert limit is not None
    assert 0.97 * pool < promised(limit) <= 0.98 * pool
    assert promised(memory_limit("NVIDIA H200", state)) > pool
    assert memory_limit("a card of the future", state, pool) == limit
    assert memory_limit("NVIDIA H200", state, pool - 2**20) == limit, "of two processes"
    assert memory_limit("NVIDIA H200", 140 * 10**9, pool) is None
    assert options_for(*GPU, plan("data=1"), state, pool) == (limit,)


def test_usable_bytes_are_those_of_a_local_device_of_the_mesh(monkeypatch):
    class Device:
        def __init__(self, stats=None):
            self.memory_stats = lambda: stats

    elsewhere, silent, local_device = Device(), Device(), Device({"bytes_limit": 123})
    for local, devices, found in (
        ([local_device], [elsewhere, local_device], 123),
        ([silent], [silent], None),
        ([local_device], [elsewhere], None),
    ):
        monkeypatch.setattr("jax.local_devices", lambda local=local: local)
        assert usable_bytes(SimpleNamespace(devices=np.array(devices, object))) == found
