"""Fakes for tests of signals: a clock, NVIDIA's driver, devices, and processes that run probes."""

from types import ModuleType, SimpleNamespace

import numpy as np
import pynvml

from optimus_jax.control.baselines import AllReduce, Matmuls, messages_of

COMPUTE = Matmuls(m=512, k=256, dtype="f32", repeats=1)


class FakeClock:
    """Advances only when told to."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def pass_s(self, seconds):
        self.now_s += seconds


def at_once(job):
    """Run the job immediately, in place of a thread."""
    job()


class NvmlError(Exception):
    """The fake driver's error."""


def nvml(gpus):
    """A fake of pynvml. `gpus` may be changed while it is in use; what a GPU's entry lacks is "Not
    Supported".
    """
    library = ModuleType("fake")

    def answer(key):
        def of(handle, *_):
            value = gpus[handle].get(key)
            if value is None:
                raise NvmlError("Not Supported")
            return value

        return of

    def by_index(index):
        if index >= len(gpus):
            raise NvmlError("Not Found")
        return index

    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: next(
            index for index, gpu in enumerate(gpus) if gpu["uuid"] == uuid
        ),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(
            gpu=answer("busy")(handle), memory=0
        ),
        "nvmlDeviceGetClockInfo": answer("clock"),
        "nvmlDeviceGetMaxClockInfo": answer("max_clock"),
        "nvmlDeviceGetCurrentClocksThrottleReasons": answer("reasons"),
        "nvmlDeviceGetPowerUsage": answer("power"),
        "nvmlDeviceGetTemperature": answer("temperature"),
        "nvmlDeviceGetTotalEccErrors": answer("ecc"),
    }
    constants = {
        name: getattr(pynvml, name)
        for name in dir(pynvml)
        if name.startswith(("NVML_", "nvmlClocksThrottleReason"))
    }
    for name, value in {"NVMLError": NvmlError, **constants, **functions}.items():
        setattr(library, name, value)
    return library


class FakePrograms:
    """Probes with given durations, which advance the fake clock."""

    compute, messages = COMPUTE, messages_of("cpu")

    def __init__(self, clock, axes=("data",), *, latency_s=1e-4, s_per_byte=1e-9, compute_s=0.01):
        self.axes, self.compute_s = axes, compute_s
        self.outside: dict[int, float] = {}
        self.latency_s, self.s_per_byte = (
            dict.fromkeys(axes, latency_s),
            dict.fromkeys(axes, s_per_byte),
        )
        self.ran = []
        self._clock = clock

    def work(self, axis, num_bytes):
        return AllReduce(
            axis_size=2, stride=1 + self.axes.index(axis), num_bytes=num_bytes, repeats=1
        )

    def time_s(self, axis, num_bytes):
        self.ran.append((axis, num_bytes))
        time_s = self.latency_s[axis] + num_bytes * self.s_per_byte[axis]
        self._clock.pass_s(time_s)
        return time_s

    def compute_time_s(self):
        self._clock.pass_s(self.compute_s)
        return self.compute_s

    def outside_ratios(self, lost):
        return {device: ratio for device, ratio in self.outside.items() if device not in lost}


def with_others(*changes):
    """An exchange with processes that measure the same as this one except for `changes`, each a
    function of a copy of its numbers.
    """

    def exchange(own):
        rows = [own]
        for change in changes:
            row = own.copy()
            change(row)
            rows.append(row)
        return np.stack(rows)

    return exchange
