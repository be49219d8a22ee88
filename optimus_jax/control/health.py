"""Health of this process's devices: memory as reported by JAX; clocks, temperature and errors as
reported by NVIDIA's driver.

Of several devices the worst one counts, because a step lasts as long as on its slowest device: the
fullest memory, the lowest clock and utilisation, the highest temperature. Power and errors are
sums.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from optimus_jax.control.background import Asked, StartThread, Worker
from optimus_jax.control.guard import Absent
from optimus_jax.control.signals import (
    CLOCK_SHARE,
    ECC_ERRORS,
    MEMORY_PEAK_SHARE,
    MEMORY_SHARE,
    POWER_W,
    TEMPERATURE_C,
    THROTTLED_SHARE,
    UTILISATION,
)
from optimus_jax.planning.profiles.nvml import Driver

SLOWED_BY = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}
"""Reasons for which the driver lowers a clock although there is work. Idleness and clock limits set
by a user do not count.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


class MemoryDevice(Protocol):
    """The part of a JAX device that is used here."""

    def memory_stats(self) -> Mapping[str, int] | None:
        """Statistics of its allocator; None: the backend does not report them."""
        ...


class DeviceMemory:
    """A source: memory in use, and its peak in this process, as shares of what JAX may use.

    The fullest device counts.

    Args:
      devices: the devices of this process.
    """

    name = "device memory"
    signals = (MEMORY_SHARE, MEMORY_PEAK_SHARE)

    def __init__(self, devices: Sequence[MemoryDevice]) -> None:
        self._devices = devices

    def poll(self, step: int, now_s: float) -> Mapping[str, float]:
        """Both shares.

        Raises Absent if the backend does not report memory: CPU devices share the host's memory
        with everything else.
        """
        stats = [
            found
            for device in self._devices
            if (found := device.memory_stats()) and found.get("bytes_limit")
        ]
        if not stats:
            raise Absent("the devices do not say how much memory is in use")
        keys = {MEMORY_SHARE: "bytes_in_use", MEMORY_PEAK_SHARE: "peak_bytes_in_use"}
        return {
            name: max(found[key] / found["bytes_limit"] for found in stats)
            for name, key in keys.items()
            if all(key in found for found in stats)
        }

    def close(self) -> None:
        """Do nothing: it holds no resources."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU at one moment; None: the driver does not report this value."""

    utilisation: float | None
    """Share of the last sampling interval (up to a second) in which some kernel ran."""
    clock_share: float | None
    """Clock of its multiprocessors over their highest clock."""
    slowed_by: tuple[str, ...] | None
    """Why its clock is lowered; values of SLOWED_BY."""
    power_w: float | None
    """Power draw in watts."""
    temperature_c: float | None
    """Temperature of the chip, in degrees Celsius."""
    ecc_errors: int | None
    """Number of uncorrected memory errors since the driver was loaded."""


class GpuHealth:
    """A source: what NVIDIA's driver reports. It is queried in a thread of its own, since with
    eight GPUs a query can take longer than a step.

    Args:
      gpus: the GPUs of this process: the driver's numbers or UUIDs (`visible_gpus`).
      library: replaces `pynvml`, for tests; None: `pynvml`.
      start: runs the queries; None: a thread.
    """

    name = "NVML"
    signals = (UTILISATION, CLOCK_SHARE, THROTTLED_SHARE, POWER_W, TEMPERATURE_C, ECC_ERRORS)

    def __init__(
        self,
        gpus: Sequence[int | str],
        *,
        library: ModuleType | None = None,
        start: StartThread | None = None,
    ) -> None:
        self._gpus, self._library = gpus, library
        self._worker = Worker("nvml") if start is None else None
        self._asked = Asked(self._read, start or self._worker or Worker("nvml"))
        self._driver: Driver | None = None
        self._handles: list[object] = []
        self._errors_before: int | None = None

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """The newest samples; None: the driver has not answered yet.

        Raises Absent if there is no driver.
        """
        states = self._asked.take()
        if states is None:
            return None
        return self._samples(states)

    def close(self) -> None:
        """Release the driver, after its last answer."""
        if self._worker is not None:
            self._worker(self._shut_down)
            self._worker.close()
        else:
            self._shut_down()

    def _samples(self, states: Sequence[GpuState]) -> dict[str, float]:
        slowed = [float(bool(state.slowed_by)) for state in states if state.slowed_by is not None]
        known: dict[str, float | None] = {
            UTILISATION: _over(min, [state.utilisation for state in states]),
            CLOCK_SHARE: _over(min, [state.clock_share for state in states]),
            THROTTLED_SHARE: sum(slowed) / len(slowed) if slowed else None,
            POWER_W: _over(sum, [state.power_w for state in states]),
            TEMPERATURE_C: _over(max, [state.temperature_c for state in states]),
            ECC_ERRORS: self._new_errors(_over(sum, [state.ecc_errors for state in states])),
        }
        return {name: value for name, value in known.items() if value is not None}

    def _new_errors(self, errors: float | None) -> float | None:
        """Number of errors since the first answer."""
        if errors is None:
            return None
        if self._errors_before is None:
            self._errors_before = int(errors)
        return errors - self._errors_before

    def _read(self) -> list[GpuState]:
        driver = self._connected()
        return [_state(driver, handle) for handle in self._handles]

    def _connected(self) -> Driver:
        if self._driver is None:
            library = _pynvml() if self._library is None else self._library
            try:
                library.nvmlInit()
            except library.NVMLError as error:
                raise Absent(str(error)) from error
            self._library, self._driver = library, Driver(library)
        if not self._handles:
            asked = [
                self._driver.ask(
                    "nvmlDeviceGetHandleByUUID"
                    if isinstance(gpu, str)
                    else "nvmlDeviceGetHandleByIndex",
                    gpu,
                )
                for gpu in self._gpus
            ]
            self._handles = [handle for handle in asked if handle is not None]
        if not self._handles:
            raise Absent(f"the driver does not know the GPUs {list(self._gpus)}")
        return self._driver

    def _shut_down(self) -> None:
        if self._driver is not None:
            self._driver.ask("nvmlShutdown")
        self._driver, self._handles = None, []


def visible_gpus(local_hardware_ids: Sequence[int]) -> list[int | str]:
    """The driver's numbers or UUIDs of the GPUs that JAX numbers `local_hardware_ids`.

    CUDA numbers GPUs of one kind as the driver does (by PCI address), but counts only those in
    CUDA_VISIBLE_DEVICES, in that order.

    Args:
      local_hardware_ids: `device.local_hardware_id` of the process's devices.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return list(local_hardware_ids)
    names = [int(name) if name.isdecimal() else name for name in map(str.strip, visible.split(","))]
    return [names[number] for number in local_hardware_ids if number < len(names)]


def _state(driver: Driver, handle: object) -> GpuState:
    core = driver.constant("NVML_CLOCK_SM")
    clock, most = (
        driver.whole("nvmlDeviceGetClockInfo", handle, core),
        driver.whole("nvmlDeviceGetMaxClockInfo", handle, core),
    )
    busy = getattr(driver.ask("nvmlDeviceGetUtilizationRates", handle), "gpu", None)
    return GpuState(
        utilisation=None if busy is None else busy / 100,
        clock_share=clock / most if clock is not None and most else None,
        slowed_by=_slowed_by(
            driver, driver.whole("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        ),
        power_w=driver.scaled(1e-3, "nvmlDeviceGetPowerUsage", handle),
        temperature_c=driver.whole(
            "nvmlDeviceGetTemperature", handle, driver.constant("NVML_TEMPERATURE_GPU")
        ),
        ecc_errors=driver.whole(
            "nvmlDeviceGetTotalEccErrors",
            handle,
            driver.constant("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
            driver.constant("NVML_VOLATILE_ECC"),
        ),
    )


def _slowed_by(driver: Driver, reasons: int | None) -> tuple[str, ...] | None:
    return (
        None
        if reasons is None
        else tuple(
            words for name, words in SLOWED_BY.items() if reasons & (driver.constant(name) or 0)
        )
    )


def _over(choose: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return choose(known) if known else None


def _pynvml() -> ModuleType:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise Absent(str(error)) from error
