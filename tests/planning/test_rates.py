"""Rates come from measurements or from a data sheet, and are never made up."""

from dataclasses import replace

import pytest
from pricing import RATES

from optimus_jax.devices.accelerators import Accelerator, accelerator_named
from optimus_jax.errors import PlanError
from optimus_jax.planning.cost.operators import device_time
from optimus_jax.planning.cost.rates import (
    CPU_PASS_SHARE,
    MATMUL_SHARE,
    MATMUL_SHARES,
    Rates,
)
from optimus_jax.planning.cost.work import matmul
from optimus_jax.planning.profiles.hardware import HardwareProfile, Setting
from optimus_jax.planning.profiles.measurements import (
    ALL_REDUCE,
    PERMUTE,
    CollectiveFit,
    HostCopyTime,
    MatmulTime,
    MemoryTime,
    OverlapTime,
)
from optimus_jax.planning.profiles.nvml import read_nvml
from optimus_jax.planning.profiles.probes import Probed

SHAPES = [(m, k, n) for m in (64, 512) for k in (64, 256, 1024) for n in (64, 1024)]


def profile(
    *,
    device_kind: str,
    platform: str,
    matmuls: tuple[MatmulTime, ...],
    fits: tuple[CollectiveFit, ...] = (),
) -> HardwareProfile:
    setting = Setting(
        device_kind=device_kind,
        platform=platform,
        num_devices=8,
        num_processes=1,
        num_hosts=1,
        processor="",
        driver=None,
        jax="",
        jaxlib="",
        xla_flags="",
        probes="",
    )
    probed = Probed(
        launch_s=3e-4,
        matmuls=matmuls,
        passes=(MemoryTime(num_bytes=1000, time_s=1e-7), MemoryTime(num_bytes=10**6, time_s=1e-3)),
        host_copies=(),
        collectives=(),
        overlap=OverlapTime(matmul_s=1.0, collective_s=1.0, together_s=1.5),
        num_left_out=0,
        took_s=1.0,
    )
    return HardwareProfile(
        setting=setting, measured_at="today", probed=probed, fits=fits, nvml=read_nvml()
    )


def matmul_times(rates: Rates, dtype: str) -> tuple[MatmulTime, ...]:
    return tuple(
        MatmulTime(
            m=m,
            k=k,
            n=n,
            dtype=dtype,
            time_s=device_time(matmul(m, k, n), rates, f32=dtype == "f32").total,
        )
        for m, k, n in SHAPES
    )


@pytest.mark.parametrize(
    ("name", "tflops", "share"),
    [
        ("a100", 312, MATMUL_SHARE),
        ("rtx4090", 165.2, MATMUL_SHARE),
        ("h100", 989, 0.71),
        ("h200", 989, 0.71),
        ("b200", 2250, 0.67),
        ("gb200", 2500, 0.63),
        ("mi300x", 1307.4, 0.44),
    ],
)
def test_rates_of_a_data_sheet_are_shares_of_its_peaks(name, tflops, share):
    rates = Rates.of(accelerator_named(name))
    assert rates.matmul_flops_per_s == pytest.approx(share * tflops * 1e12)
    assert "not measured" in rates.source


def test_matmul_shares_are_of_listed_accelerators():
    for name, share in MATMUL_SHARES.items():
        assert accelerator_named(name).dense_peak_flops
        assert 0.4 < share < MATMUL_SHARE


def test_measured_host_link_is_not_derated_again():
    known = profile(
        device_kind="NVIDIA H100 80GB HBM3", platform="gpu", matmuls=matmul_times(RATES, "f32")
    )
    assert Rates.from_profile(known).host_share == Rates.host_share < 1
    copied = replace(
        known, probed=replace(known.probed, host_copies=(HostCopyTime(num_bytes=1, time_s=1.0),))
    )
    assert Rates.from_profile(copied).host_share == 1


def test_unknown_device_has_no_rates():
    with pytest.raises(PlanError, match="Riva 128"):
        Rates.of(Accelerator.unlisted("Riva 128", "gpu"))


@pytest.mark.parametrize(
    ("device_kind", "platform"), [("cpu", "cpu"), ("NVIDIA H100 80GB HBM3", "gpu")]
)
def test_measured_matmuls_recover_the_rates_that_made_them(device_kind, platform):
    cores = 132.0 if platform == "gpu" else 0.0
    made = replace(
        RATES, matmul_flops_per_s=3e10, f32_matmul_flops_per_s=3e10, inner=20.0, num_cores=cores
    )
    rates = Rates.from_profile(
        profile(device_kind=device_kind, platform=platform, matmuls=matmul_times(made, "f32"))
    )
    assert (rates.f32_matmul_flops_per_s, rates.inner, rates.num_cores) == pytest.approx(
        (3e10, 20.0, cores)
    )
    assert rates.shares_processor == (platform == "cpu"), "its eight devices are virtual"
    assert rates.matmul_flops_per_s == rates.f32_matmul_flops_per_s, (
        "without 16-bit matmuls float32 ones do their work"
    )


def test_each_dtype_has_its_own_matmul_rate():
    times = matmul_times(
        replace(RATES, num_cores=0.0, matmul_flops_per_s=8e10, f32_matmul_flops_per_s=2e10), "f32"
    )
    times += matmul_times(
        replace(RATES, num_cores=0.0, matmul_flops_per_s=8e10, inner=40.0), "bf16"
    )
    for order in (times, times[::-1]):
        rates = Rates.from_profile(profile(device_kind="cpu", platform="cpu", matmuls=order))
        assert (
            rates.matmul_flops_per_s,
            rates.f32_matmul_flops_per_s,
            rates.inner,
        ) == pytest.approx((8e10, 2e10, 40.0))


def test_profile_gives_memory_launch_overlap_and_send_rates():
    fits = tuple(
        CollectiveFit(kind=kind, axis_size=8, stride=1, latency_s=0.0, bytes_per_s=speed)
        for kind, speed in ((ALL_REDUCE, 4e9), (PERMUTE, 1e9))
    )
    rates = Rates.from_profile(
        profile(device_kind="cpu", platform="cpu", matmuls=matmul_times(RATES, "f32"), fits=fits)
    )
    assert (
        rates.memory_bytes_per_s,
        rates.step_s,
        rates.overlap_slowdown,
        rates.send_share,
    ) == pytest.approx((1e9, 3e-4, 1.5, 0.25))
    assert (rates.collective_share, rates.pass_share) == (1.0, CPU_PASS_SHARE)
    assert "measured on 8 x cpu" in rates.source


def test_matmuls_that_no_line_fits_still_give_a_rate():
    odd = tuple(
        MatmulTime(m=64, k=k, n=64, dtype="f32", time_s=time_s)
        for k, time_s in ((64, 1e-6), (1024, 1e-4))
    )
    rates = Rates.from_profile(profile(device_kind="cpu", platform="cpu", matmuls=odd))
    assert rates.inner == 0
    assert 2 * 64 * 64 * 1024 / 1e-4 < rates.f32_matmul_flops_per_s < 2 * 64 * 64 * 64 / 1e-6


def test_an_incomplete_profile_is_refused():
    with pytest.raises(PlanError, match="not complete"):
        Rates.from_profile(profile(device_kind="cpu", platform="cpu", matmuls=()))
