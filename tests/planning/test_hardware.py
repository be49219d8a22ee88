"""Hardware profiles are measured once per setting, cached, and used only if they are intact."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from helpers import free_port
from quick_flags import QUICK_FLAGS

from optimus_jax.errors import ConfigError
from optimus_jax.planning.profiles import hardware
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.hardware import HardwareProfile, Setting, profile_hardware
from optimus_jax.planning.profiles.measurements import (
    ALL_REDUCE,
    CollectiveFit,
    CollectiveTime,
    HostCopyTime,
    MatmulTime,
    MemoryTime,
    OverlapTime,
)
from optimus_jax.planning.profiles.nvml import Gpu, NvLink, NvmlFacts
from optimus_jax.planning.profiles.probe_programs import Timing
from optimus_jax.planning.profiles.probes import Probed, ProbeSizes
from optimus_jax.system.cache import measurements_directory

QUICK = Timing(guessed_flops_per_s=1e10, guessed_bytes_per_s=1e10, program_s=1e-9, runs=1)
TINY = ProbeSizes(
    matmuls=((8, 8, 8),), dtypes=("f32",), pass_bytes=(64,), message_bytes=(64, 256), timing=QUICK
)
SETTING = Setting(
    device_kind="NVIDIA H100 80GB HBM3",
    platform="gpu",
    num_devices=16,
    num_processes=2,
    num_hosts=2,
    processor="a processor, 96 cores",
    driver="550.54.15",
    jax="0.10.2",
    jaxlib="0.10.2",
    xla_flags="",
    probes="digest",
)
GPU = Gpu(
    name="NVIDIA H100 80GB HBM3",
    pci_address="00000000:0B:00.0",
    memory_bytes=85520809984,
    core_clock_hz=345e6,
    max_core_clock_hz=1980e6,
    memory_clock_hz=2619e6,
    max_memory_clock_hz=2619e6,
    power_w=None,
    power_limit_w=700.0,
    pcie_generation=5,
    max_pcie_generation=5,
    pcie_lanes=16,
    max_pcie_lanes=16,
    ecc=True,
    nvlinks=(NvLink(port=0, active=True, version=4, peer="switch"),),
)
PROFILE = HardwareProfile(
    setting=SETTING,
    measured_at="2026-11-21T12:00:00+00:00",
    probed=Probed(
        launch_s=1e-4,
        matmuls=(MatmulTime(m=8, k=8, n=8, dtype="bf16", time_s=1e-6),),
        passes=(MemoryTime(num_bytes=64, time_s=1e-6),),
        host_copies=(
            HostCopyTime(num_bytes=16, time_s=1e-6),
            HostCopyTime(num_bytes=64, time_s=2e-9),
        ),
        collectives=(
            CollectiveTime(kind=ALL_REDUCE, axis_size=8, stride=1, num_bytes=64, time_s=1e-5),
        ),
        overlap=OverlapTime(matmul_s=1.0, collective_s=1.0, together_s=1.25),
        num_left_out=0,
        took_s=60.0,
    ),
    fits=(
        CollectiveFit(kind=ALL_REDUCE, axis_size=8, stride=1, latency_s=28e-6, bytes_per_s=380e9),
        CollectiveFit(kind=ALL_REDUCE, axis_size=2, stride=8, latency_s=20e-6, bytes_per_s=45e9),
        CollectiveFit(kind=ALL_REDUCE, axis_size=4, stride=1, latency_s=1e-5, bytes_per_s=None),
    ),
    nvml=NvmlFacts(
        missing=None,
        driver="550.54.15",
        cuda="12.4",
        gpus=(GPU, replace(GPU, nvlinks=(), ecc=None)),
        paths=((None, "between NUMA nodes"), ("between NUMA nodes", None)),
    ),
)


def profile_of_two(cache, **options):
    return profile_hardware(jax.devices()[:2], sizes=TINY, cache=cache, **options)


@pytest.fixture
def no_probes(monkeypatch):
    """A function after whose call measuring fails the test."""

    def forbidden(*_, **__):
        pytest.fail("measured again")

    return lambda: monkeypatch.setattr(hardware, "probe", forbidden)


def cached_file(cache):
    (path,) = cache.iterdir()
    return path


@pytest.mark.parametrize(
    "profile",
    [
        PROFILE,
        replace(
            PROFILE,
            nvml=NvmlFacts(missing="no driver"),
            fits=(),
            probed=replace(PROFILE.probed, overlap=None),
        ),
    ],
)
def test_a_profile_survives_json(profile):
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert hash(HardwareProfile.from_json(profile.to_json())) == hash(profile)


def test_a_profile_is_measured_once(tmp_path, no_probes):
    first = profile_of_two(tmp_path)
    no_probes()
    assert profile_of_two(tmp_path) == first
    assert (first.setting.num_devices, first.setting.platform, first.setting.jax) == (
        2,
        "cpu",
        jax.__version__,
    )
    assert len(first.fits) == 5
    assert not list(tmp_path.glob("*.part"))


def test_refreshing_measures_again(tmp_path):
    first = profile_of_two(tmp_path)
    text = cached_file(tmp_path).read_text()
    second = profile_of_two(tmp_path, refresh=True)
    assert second.probed != first.probed
    assert cached_file(tmp_path).read_text() != text


def test_progress_is_reported(tmp_path):
    reported = []
    profile_of_two(tmp_path, progress=lambda what, share: reported.append(what))
    assert reported[0] == "launch"
    assert len(reported) == 1 + 1 + 1 + 5 * 2 + 1


@pytest.mark.parametrize(
    "change",
    [
        {"device_kind": "NVIDIA H200"},
        {"num_devices": 8},
        {"num_processes": 16},
        {"num_hosts": 1},
        {"processor": "another"},
        {"driver": "560.1"},
        {"jax": "0.11.0"},
        {"jaxlib": "0.11.0"},
        {"xla_flags": "--xla_gpu_enable_triton_gemm=false"},
        {"probes": "others"},
        {"platform": "cpu"},
    ],
)
def test_change_of_the_setting_changes_its_digest(change):
    assert replace(SETTING, **change).digest != SETTING.digest
    assert {field.name for field in dataclasses.fields(Setting)} >= set(change)


def test_order_of_xla_flags_does_not_matter(monkeypatch):
    def flags(text):
        monkeypatch.setenv("XLA_FLAGS", text)
        return Setting.now(jax.devices(), TINY, driver="550").xla_flags

    assert flags("--a=1  --b=2") == flags(" --b=2 --a=1") != flags("--a=1")
    assert Setting.now(jax.devices(), TINY, driver="550").driver is None, (
        "CPU devices do not depend on it"
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"setting": 1}',
        lambda text: text.replace('"probed"', '"robbed"'),
        lambda text: json.dumps({**json.loads(text), "fits": "none"}),
        lambda text: json.dumps({**json.loads(text), "nvml": {}}),
        lambda text: "\ud800",
    ],
)
def test_damaged_profile_warns_and_is_measured_again(tmp_path, damage, no_probes):
    first = profile_of_two(tmp_path)
    cached_file(tmp_path).write_bytes(damage(first.to_json()).encode("utf-8", "surrogatepass"))
    with pytest.warns(UserWarning, match="cannot be used"):
        second = profile_of_two(tmp_path)
    assert second.setting == first.setting
    no_probes()
    assert profile_of_two(tmp_path) == second


def test_profile_of_another_setting_is_not_used(tmp_path):
    first = profile_of_two(tmp_path)
    cached_file(tmp_path).write_text(
        replace(first, setting=replace(first.setting, num_devices=4)).to_json()
    )
    with pytest.warns(UserWarning, match="does not match the setting"):
        assert profile_of_two(tmp_path).setting.num_devices == 2


def test_unwritable_cache_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert profile_of_two(tmp_path / "file" / "cache").setting.num_devices == 2


def test_cache_directory_follows_xdg_cache_home(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert measurements_directory() == Path("/somewhere/optimus_jax/hardware")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert measurements_directory() == Path("/home/someone/.cache/optimus_jax/hardware")


def test_host_link_speed_is_that_of_the_largest_copy():
    cluster = Cluster.parse("h100:2x8")
    assert PROFILE.cluster(cluster).to_host.bytes_per_s == 64 / 2e-9 != cluster.to_host.bytes_per_s
    unmeasured = replace(PROFILE, probed=replace(PROFILE.probed, host_copies=()))
    assert unmeasured.cluster(cluster).to_host == cluster.to_host


def test_measured_links_replace_published_ones():
    cluster = PROFILE.cluster(Cluster.parse("h100:2x8"))
    assert (cluster.intra_host.bytes_per_s, cluster.inter_host.bytes_per_s) == (380e9, 45e9)
    # A ring of 8 takes 14 steps, one of 2 takes 2.
    assert (cluster.intra_host.latency_s, cluster.inter_host.latency_s) == (
        pytest.approx(2e-6),
        pytest.approx(10e-6),
    )
    assert "2026-11-21" in cluster.intra_host.source


def test_unmeasured_links_stay_as_published():
    cluster = Cluster.parse("h100:4")
    assert replace(PROFILE.cluster(cluster), to_host=cluster.to_host) == cluster, (
        "four devices have a fit without a rate"
    )
    assert PROFILE.fit(ALL_REDUCE, 3) is None


def test_json_that_is_no_profile_raises():
    with pytest.raises((ConfigError, TypeError, ValueError)):
        HardwareProfile.from_json('{"a": 1}')


def test_processes_share_the_profile_of_process_0(tmp_path):
    """Each process has a cache; that of process 1 stays empty: all processes measure, or none."""
    program = textwrap.dedent("""
        import pathlib, sys, jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
        from test_hardware import TINY
        from optimus_jax.planning.profiles.hardware import profile_hardware
        own = pathlib.Path(sys.argv[3]) / sys.argv[2]
        first = profile_hardware(sizes=TINY, cache=own)
        assert own.exists() == (sys.argv[2] == "0")
        second = profile_hardware(sizes=TINY, cache=own)
        assert first == second
        print(first.setting.digest, first.setting.num_hosts, first.probed.took_s)
    """)
    address = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "XLA_FLAGS": QUICK_FLAGS,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(number), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(2)
    ]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    first, second = (answer.splitlines()[-1] for answer, _ in answers)
    assert first == second, "the same times to the last digit"
    assert first.split()[1] == "1", "two processes of one machine"
