"""Facts that the driver reports are read; those that it does not report are None."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from optimus_jax.planning.profiles import nvml
from optimus_jax.planning.profiles.nvml import SWITCH, Gpu, NvLink, NvmlFacts, read_nvml


class NvmlError(Exception):
    """The error of the fake library."""


CONSTANTS = {
    name: getattr(pynvml, name)
    for name in dir(pynvml)
    if re.match("NVML_(TOPOLOGY|CLOCK|FEATURE|NVLINK)_", name)
}
SM, MEMORY = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM


def refuse(*_):
    raise NvmlError("Not Supported")


def driver(**functions):
    """A fake of pynvml for two GPUs; each function that is not given is one that the driver does
    not support.
    """
    module = ModuleType("fake")
    answers = {name: refuse for name in dir(pynvml) if re.match("nvml(System|Device)Get", name)}
    answers |= {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu {index}",
    }
    for name, value in {"NVMLError": NvmlError, **CONSTANTS, **answers, **functions}.items():
        setattr(module, name, value)
    return module


def h100s(**functions):
    """Two GPUs that report everything: port 0 to a switch, port 1 to the other GPU, port 2 down."""

    def links(answers):
        return lambda handle, port: answers[port] if port < len(answers) else refuse()

    known = {
        "nvmlSystemGetDriverVersion": lambda: "550.54.15",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12040,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(
            busId=f"00000000:{handle[-1]}B:00.0".encode()
        ),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=85520809984, used=1),
        "nvmlDeviceGetClockInfo": lambda handle, clock: {SM: 345, MEMORY: 2619}[clock],
        "nvmlDeviceGetMaxClockInfo": lambda handle, clock: {SM: 1980, MEMORY: 2619}[clock],
        "nvmlDeviceGetPowerUsage": lambda handle: 71500,
        "nvmlDeviceGetPowerManagementLimit": lambda handle: 700000,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetEccMode": lambda handle: [1, 0],
        "nvmlDeviceGetNvLinkState": links([1, 1, 0]),
        "nvmlDeviceGetNvLinkVersion": links([4, 4]),
        "nvmlDeviceGetNvLinkRemoteDeviceType": links(
            [pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU]
        ),
        "nvmlDeviceGetNvLinkRemotePciInfo": links(
            [SimpleNamespace(busId=b"00000000:05:00.0"), SimpleNamespace(busId=b"00000000:1B:00.0")]
        ),
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: pynvml.NVML_TOPOLOGY_SYSTEM,
    }
    return driver(**{**known, **functions})


def test_driver_facts_are_read_in_si_units():
    facts = read_nvml(h100s())
    assert (facts.missing, facts.driver, facts.cuda, len(facts.gpus)) == (
        None,
        "550.54.15",
        "12.4",
        2,
    )
    assert facts.gpus[0] == Gpu(
        name="NVIDIA H100 80GB HBM3",
        pci_address="00000000:0B:00.0",
        memory_bytes=85520809984,
        core_clock_hz=345e6,
        max_core_clock_hz=1980e6,
        memory_clock_hz=2619e6,
        max_memory_clock_hz=2619e6,
        power_w=71.5,
        power_limit_w=700,
        pcie_generation=4,
        max_pcie_generation=5,
        pcie_lanes=8,
        max_pcie_lanes=16,
        ecc=True,
        nvlinks=(
            NvLink(port=0, active=True, version=4, peer=SWITCH),
            NvLink(port=1, active=True, version=4, peer="00000000:1B:00.0"),
            NvLink(port=2, active=False, version=None, peer=None),
        ),
    )
    assert facts.paths == ((None, "between NUMA nodes"), ("between NUMA nodes", None))


def test_facts_that_the_driver_does_not_support_are_none():
    facts = read_nvml(driver())
    assert facts == NvmlFacts(missing=None, gpus=facts.gpus, paths=((None, None), (None, None)))
    assert facts.gpus[0].nvlinks == ()
    assert {value for name, value in vars(facts.gpus[0]).items() if name != "nvlinks"} == {None}


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetNvLinkVersion",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetEccMode",
        "NVML_CLOCK_SM",
        "NVML_NVLINK_MAX_LINKS",
        "NVML_TOPOLOGY_SYSTEM",
        "NVML_NVLINK_DEVICE_TYPE_SWITCH",
    ],
)
def test_name_missing_in_an_older_library_costs_only_its_field(name):
    module = h100s()
    delattr(module, name)
    facts = read_nvml(module)
    assert (facts.gpus[0].name, facts.gpus[0].max_pcie_lanes) == ("NVIDIA H100 80GB HBM3", 16)


def test_a_host_without_gpus_or_a_lost_gpu_is_no_failure():
    assert read_nvml(driver(nvmlDeviceGetCount=lambda: 0)).gpus == ()
    lost = read_nvml(
        h100s(nvmlDeviceGetHandleByIndex=lambda index: refuse() if index == 0 else f"gpu {index}")
    )
    assert [gpu.pci_address for gpu in lost.gpus] == ["00000000:1B:00.0"]


def test_reason_is_kept_without_a_driver():
    def no_driver():
        raise NvmlError("NVML Shared Library Not Found")

    shutdowns = []
    facts = read_nvml(driver(nvmlInit=no_driver, nvmlShutdown=lambda: shutdowns.append("shutdown")))
    assert facts == NvmlFacts(missing="NVML Shared Library Not Found")
    assert not shutdowns, "what was not begun is not ended"


def test_error_of_the_real_library_is_caught(monkeypatch):
    def not_found():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", not_found)
    assert read_nvml() == NvmlFacts(
        missing=str(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    )


def test_reason_is_kept_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml" in read_nvml().missing


def test_nvml_is_shut_down_even_after_an_error():
    ended = []

    def broken(*_):
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError):
        read_nvml(h100s(nvmlDeviceGetName=broken, nvmlShutdown=lambda: ended.append(True)))
    assert ended == [True]


def test_every_nvml_name_that_is_used_exists_in_the_library():
    names = re.findall(r'"(nvml[A-Z]\w+|NVML_\w+)"', Path(nvml.__file__).read_text())
    assert len(names) > 20
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert all(f"NVML_TOPOLOGY_{name}" in CONSTANTS for name in nvml.PATHS)
