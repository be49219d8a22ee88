"""Messages where JAX does not start, or unexpectedly starts on the CPU."""

import jax
import pytest

from optimus_jax.devices import backend, gpu_sharing
from optimus_jax.devices.backend import start_backend, unexpected_cpu_warning
from optimus_jax.devices.cpu import use_cpu_devices
from optimus_jax.errors import ConfigError, FaultError

GPT2 = 124_439_808


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with these device files, drivers, packages and variables, on which JAX has not
    started and will not.
    """

    def make(
        *, files=(), gpus=None, driver=None, packages=(), platforms="", says=None, environment=()
    ):
        for name in (
            "JAX_PLATFORMS",
            "JAX_PLATFORM_NAME",
            "CUDA_VISIBLE_DEVICES",
            "LD_LIBRARY_PATH",
        ):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment:
            monkeypatch.setenv(name, value)
        for name in files:
            (tmp_path / name).touch()
        monkeypatch.setattr(backend, "_DEV", tmp_path)
        monkeypatch.setattr(backend, "num_gpus", lambda: gpus)
        monkeypatch.setattr(backend, "_driver_cuda", lambda: driver)
        monkeypatch.setattr(backend, "_version", {"jaxlib": "0.10.2", **dict(packages)}.get)
        monkeypatch.setattr(backend, "_asked_for", lambda: platforms)
        monkeypatch.setattr(backend, "backends_are_initialized", lambda: False)
        monkeypatch.setattr(backend, "check_xla_flags", lambda: None)

        def devices():
            raise says or AssertionError

        monkeypatch.setattr(jax, "devices", devices)

    return make


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"platforms": "cuda"},
            [
                "no GPU was found",
                "no GPU was detected",
                "AssertionError",
                "pip install 'optimus-jax[cuda13]'",
            ],
        ),
        (
            {"platforms": "gpu", "says": RuntimeError("Unable to initialize backend 'rocm': x")},
            ["no GPU was found", "backend 'rocm': x"],
        ),
        (
            {"platforms": "cuda", "files": ["nvidia0", "nvidia1", "nvidiactl"]},
            ["2 NVIDIA GPUs, and jax is installed without CUDA", "[cuda13]"],
        ),
        (
            {"platforms": "cuda", "gpus": 1, "driver": (12, 4)},
            ["without CUDA", "pip install 'optimus-jax[cuda12]'"],
        ),
        (
            {
                "platforms": "cuda",
                "gpus": 1,
                "driver": (12, 4),
                "packages": [("jax-cuda13-plugin", "0.10.2")],
            },
            ["knows CUDA 12.4", "needs 13", "[cuda12]'"],
        ),
        (
            {
                "platforms": "cuda",
                "gpus": 1,
                "driver": (13, 0),
                "packages": [("jax-cuda13-plugin", "0.9")],
            },
            ["is version 0.9, and jaxlib 0.10.2", "--upgrade"],
        ),
        (
            {"platforms": "cuda", "gpus": 8, "environment": [("CUDA_VISIBLE_DEVICES", "")]},
            ["8 NVIDIA GPUs, and CUDA_VISIBLE_DEVICES= hides", "unset CUDA_VISIBLE"],
        ),
        (
            {
                "platforms": "cuda",
                "gpus": 1,
                "packages": [("jax-cuda13-plugin", "0.10.2")],
                "environment": [("LD_LIBRARY_PATH", "/opt/cuda")],
            },
            ["cannot start CUDA", "LD_LIBRARY_PATH=/opt/cuda may", "unset LD_LIBRARY_PATH"],
        ),
        ({"platforms": "rocm", "files": ["kfd"]}, ["no GPU was found", "AMD GPU", "rocm"]),
        ({"platforms": "tpu"}, ["no TPU was detected", "jax[tpu]"]),
        ({"platforms": "foo"}, ["does not know it", "choose cpu, cuda, rocm or tpu"]),
        (
            {"says": RuntimeError("the plugin is broken")},
            ["JAX cannot start", "the plugin is broken", "JAX_PLATFORMS=cpu"],
        ),
    ],
)
def test_platform_that_does_not_start_is_a_readable_error(machine, given, words):
    machine(**given)
    with pytest.raises(ConfigError) as raised:
        start_backend()
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_missing_peer_process_is_a_fault(machine, monkeypatch):
    machine(
        says=RuntimeError(
            "Unable to initialize backend 'cpu': DEADLINE_EXCEEDED: Getting global topologies"
            " timed out"
        )
    )
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(FaultError, match="not all processes found their devices"):
        start_backend()


@pytest.mark.parametrize(
    ("given", "params", "words"),
    [
        (
            {},
            GPT2,
            [
                "no GPU was found",
                "124,439,808 parameters",
                "no NVIDIA driver answers",
                "JAX_PLATFORMS=cpu",
            ],
        ),
        ({}, 1000, None),
        ({"platforms": "cpu"}, GPT2, None),
        (
            {"gpus": 1},
            0,
            [
                "1 NVIDIA GPU, and jax is installed without CUDA",
                "pip install 'optimus-jax[cuda13]'",
            ],
        ),
        ({"gpus": 1, "platforms": "cpu"}, 0, None),
        ({"platforms": "cuda,cpu"}, 0, ["no GPU was found"]),
        ({"files": ["accel0"]}, 0, ["TPU", "jax[tpu]"]),
    ],
)
def test_run_on_the_cpu_by_accident_gets_a_warning(machine, monkeypatch, given, params, words):
    machine(**given)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    message = unexpected_cpu_warning(lambda: params)
    assert (message is None) if words is None else all(word in message for word in words), message


def test_gpus_are_counted_by_the_driver(monkeypatch):
    monkeypatch.setattr(gpu_sharing.pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(gpu_sharing.pynvml, "nvmlDeviceGetCount", lambda: 3)
    assert gpu_sharing.num_gpus() == 3


@pytest.fixture
def jax_setting():
    """Sets one of JAX's settings for a test."""
    before = {
        name: jax.config.values[name]
        for name in ("jax_platforms", "jax_platform_name", "jax_default_device")
        if name in jax.config.values
    }
    yield jax.config.update
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    ("device", "platforms", "words"),
    [
        (
            "gpu",
            "",
            [
                "no GPU was found",
                "JAX_DEFAULT_DEVICE=gpu; JAX: Unknown backend",
                "unset JAX_DEFAULT_DEVICE",
                "optimus-jax[cuda13]",
            ],
        ),
        ("gpu", "cpu", ["platform cpu was requested, which leaves it out", "JAX_PLATFORMS=gpu"]),
    ],
)
def test_missing_default_device_is_a_readable_error(
    monkeypatch, jax_setting, device, platforms, words
):
    assert jax.devices()[0].platform == "cpu"
    monkeypatch.setattr(backend, "_asked_for", lambda: platforms)
    monkeypatch.setattr(backend, "unused_accelerator", lambda: None)
    monkeypatch.setenv("JAX_DEFAULT_DEVICE", device)
    jax_setting("jax_default_device", device)
    with pytest.raises(ConfigError) as raised:
        start_backend()
    assert all(word in str(raised.value) for word in words), str(raised.value)
    jax_setting("jax_default_device", "cpu")
    start_backend()


@pytest.mark.parametrize(
    ("name", "value", "note"),
    [
        (
            "jax_platforms",
            "cuda",
            "JAX_PLATFORMS=cuda is not followed: {} virtual CPU devices were requested",
        ),
        ("jax_platforms", "cpu,cuda", None),
        ("jax_default_device", "gpu", "JAX_DEFAULT_DEVICE=gpu is not followed"),
        ("jax_platforms", "tpu,cpu", "JAX_PLATFORMS=tpu,cpu is not"),
    ],
)
def test_platform_ignored_for_virtual_devices_is_noted_once(
    monkeypatch, jax_setting, capsys, name, value, note
):
    count = len(jax.devices())
    monkeypatch.setenv(name.upper(), value)
    jax_setting(name, value)
    use_cpu_devices(count)
    use_cpu_devices(count)
    message = capsys.readouterr().err
    assert message.count("note:") == (note is not None)
    assert note is None or note.format(count) in message
    start_backend()
