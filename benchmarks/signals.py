"""Cost of the controller's signals: host time at each step boundary, and of a round of probes.

    python benchmarks/signals.py [--cpu-devices 8] [--steps 20000]

Steps pass on a simulated clock (10 ms, 100 ms, 1 s), so that sources are polled as often as in a
run. The time of each boundary is measured: CPU time of the training thread (steady on shared cores)
and wall time. Batches are 16 x 1024 tokens. A simulated driver of 8 GPUs answers in a thread. There
are no other processes, and so no heartbeats. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from optimus_jax.config import ControlConfig
from optimus_jax.control.health import DeviceMemory, GpuHealth
from optimus_jax.control.heartbeats import HeartbeatAges
from optimus_jax.control.sources import Signals
from optimus_jax.faults.heartbeat import Heartbeats
from optimus_jax.faults.progress import Progress
from optimus_jax.run_directory.step_record import StepRecord

NUM_GPUS = 8


class _Memory:
    """A simulated device that reports its memory in use."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": 60, "peak_bytes_in_use": 90, "bytes_limit": 100}


def _driver() -> ModuleType:
    driver = ModuleType("pretended")
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetClockInfo": 1500,
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=99),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
        "nvmlDeviceGetPowerUsage": 650_000,
        "nvmlDeviceGetTemperature": 70,
        "nvmlDeviceGetTotalEccErrors": 0,
    }
    for name, answer in answers.items():
        setattr(driver, name, lambda *_, answer=answer: answer)
    for name in (
        "NVML_CLOCK_SM",
        "NVML_TEMPERATURE_GPU",
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
        "NVML_VOLATILE_ECC",
    ):
        setattr(driver, name, 0)
    driver.__dict__.update(
        NVMLError=OSError, nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}"
    )
    return driver


def boundaries(num_steps: int, step_time_s: float) -> dict[str, float]:
    """Seconds of the training thread at a step boundary."""
    now = [0.0]
    batch = {"segments": np.zeros((16, 1024), np.int32), "loss_mask": np.ones((16, 1024), bool)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        sources = [
            DeviceMemory([_Memory()] * NUM_GPUS),
            GpuHealth(range(NUM_GPUS), library=_driver()),
            HeartbeatAges(Heartbeats(Path(directory), 0, 8, Progress())),
        ]
        told: list[str] = []
        signals = Signals(
            ControlConfig(),
            global_batch=16,
            seq_len=1024,
            sources=sources,
            clock=lambda: now[0],
            warn=told.append,
        )
        took_s = [
            _boundary_s(signals, step, now, step_time_s, batch) for step in range(1, num_steps + 1)
        ]
        signals.close()
    assert not told, told
    processor_s, wall_s = zip(*took_s, strict=True)
    return {
        "mean_processor_s": statistics.fmean(processor_s),
        "median_processor_s": statistics.median(processor_s),
        "median_wall_s": statistics.median(wall_s),
    }


def _boundary_s(
    signals: Signals, step: int, now: list[float], step_time_s: float, batch: dict[str, np.ndarray]
) -> tuple[float, float]:
    now[0] += step_time_s
    record = StepRecord(
        step=step,
        loss=5 / step,
        grad_norm=1.0,
        lr=1e-3,
        tokens=16384,
        step_time_s=step_time_s + 1e-6 * step,
        tokens_per_s=1e5,
        mfu=0.4,
        plan="pretended",
        peak_bytes=None,
    )
    start_s, start_processor_s = time.perf_counter(), time.thread_time()
    signals.dispatched(dispatch_s=1e-6 * step, batch=batch)
    signals.step(record)
    signals.observe(step)
    return time.thread_time() - start_processor_s, time.perf_counter() - start_s


def rounds() -> dict[str, float]:
    """Seconds to compile the probes, to settle them, and of a round, on data=4,tensor=2."""
    import jax

    from optimus_jax.config.axes import MESH_AXES
    from optimus_jax.control.live import Probes
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.profiles.cluster import Cluster

    cluster = Cluster.of(discover())
    mesh = jax.make_mesh(
        (1, len(jax.devices()) // 2, 1, 2), MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4
    )
    probes = Probes(0.002, cluster, None, num_meshes=1, warn=print)
    start_s = time.perf_counter()
    probes.prepare(mesh)
    compiled_s = time.perf_counter()
    on_mesh = probes.on(mesh)
    settled_s = time.perf_counter()
    assert on_mesh is not None
    took_s = []
    for step in range(20):
        before_s = time.perf_counter()
        on_mesh.run(step, step_time_s=0.1)
        took_s.append(time.perf_counter() - before_s)
    return {
        "compile_s": compiled_s - start_s,
        "settle_s": settled_s - compiled_s,
        "round_median_s": statistics.median(took_s),
        "round_largest_s": max(took_s),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-devices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20000)
    args = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={args.cpu_devices}")
    found = {
        f"boundary, steps of {step_time_s} s": boundaries(args.steps, step_time_s)
        for step_time_s in (0.01, 0.1, 1.0)
    }
    print(json.dumps(found | {"round": rounds()}, indent=1))


if __name__ == "__main__":
    main()
