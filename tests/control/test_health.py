"""Health of this process's GPUs by the driver: the worst GPU counts, queries run in a thread, and
what the driver does not report is left out.
"""

import pytest
from signal_fakes import NvmlError, at_once, nvml

from optimus_jax.control.guard import Absent
from optimus_jax.control.health import SLOWED_BY, GpuHealth, visible_gpus

GOOD = {
    "busy": 100,
    "clock": 1980,
    "max_clock": 1980,
    "reasons": 0,
    "power": 600_000,
    "temperature": 60,
    "ecc": 0,
    "uuid": "GPU-a",
}
POWER_CAP, GPU_IDLE, HARDWARE_HEAT = 0x4, 0x1, 0x40


def health(gpus, names=None):
    return GpuHealth(
        list(range(len(gpus))) if names is None else names, library=nvml(gpus), start=at_once
    )


def test_the_worst_gpu_counts_and_power_is_summed():
    hot = GOOD | {
        "busy": 50,
        "clock": 990,
        "reasons": HARDWARE_HEAT | GPU_IDLE,
        "temperature": 90,
        "uuid": "GPU-b",
    }
    source = health([GOOD, hot])
    assert source.poll(1, 0.0) == {
        "utilisation": 0.5,
        "clock_share": 0.5,
        "throttled_share": 0.5,
        "power_w": 1200.0,
        "temperature_c": 90.0,
        "ecc_errors": 0.0,
    }


@pytest.mark.parametrize(
    ("reasons", "share"),
    [(0, 0.0), (GPU_IDLE, 0.0), (POWER_CAP, 1.0), (GPU_IDLE | HARDWARE_HEAT, 1.0)],
)
def test_an_idle_gpu_is_not_throttled(reasons, share):
    assert health([GOOD | {"reasons": reasons}]).poll(1, 0.0)["throttled_share"] == share


def test_every_throttle_reason_exists_in_pynvml():
    library = nvml([GOOD])
    assert len({getattr(library, name) for name in SLOWED_BY}) == len(SLOWED_BY)


def test_ecc_errors_are_counted_from_the_first_poll():
    gpus = [GOOD | {"ecc": 7}]
    source = health(gpus)
    assert source.poll(1, 0.0)["ecc_errors"] == 0
    gpus[0]["ecc"] = 9
    assert source.poll(2, 1.0)["ecc_errors"] == 2


def test_values_that_one_gpu_lacks_come_from_the_other():
    samples = health(
        [GOOD | {"power": None, "busy": None}, GOOD | {"power": 100_000, "ecc": None, "busy": None}]
    ).poll(1, 0.0)
    assert samples["power_w"] == 100.0
    assert "utilisation" not in samples


def test_only_gpus_of_this_process_are_polled():
    assert health([GOOD, GOOD | {"temperature": 99}], names=[0]).poll(1, 0.0)["temperature_c"] == 60
    assert (
        health([GOOD, GOOD | {"temperature": 99, "uuid": "GPU-b"}], names=["GPU-b"]).poll(1, 0.0)[
            "temperature_c"
        ]
        == 99
    )


def test_a_missing_driver_or_gpu_is_reported_with_a_reason():
    with pytest.raises(Absent, match="does not know the GPUs"):
        health([], names=[0]).poll(1, 0.0)
    library = nvml([GOOD])

    def no_driver():
        raise NvmlError("NVML Shared Library Not Found")

    library.nvmlInit = no_driver
    with pytest.raises(Absent, match="Not Found"):
        GpuHealth([0], library=library, start=at_once).poll(1, 0.0)


def test_a_hanging_driver_does_not_block_polling():
    waiting = []
    source = GpuHealth([0], library=nvml([GOOD]), start=waiting.append)
    assert [source.poll(step, float(step)) for step in (1, 2, 3)] == [None, None, None]
    assert len(waiting) == 1, "one question at a time"
    waiting.pop()()
    assert source.poll(4, 4.0)["temperature_c"] == 60


def test_closing_shuts_nvml_down_if_it_was_started():
    library, ended = nvml([GOOD]), []
    library.nvmlShutdown = lambda: ended.append(True)
    source = GpuHealth([0], library=library, start=at_once)
    source.close()
    assert not ended, "what was not begun is not ended"
    source.poll(1, 0.0)
    source.close()
    assert ended == [True]


@pytest.mark.parametrize(
    ("visible", "names"),
    [("", [0, 1]), ("2,3", [2, 3]), ("GPU-b, GPU-a", ["GPU-b", "GPU-a"]), ("5", [5])],
)
def test_gpus_are_named_as_in_cuda_visible_devices(visible, names, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus([0, 1]) == names
