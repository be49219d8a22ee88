"""Starts JAX's backend, which finds the devices.

Code that may be the first to ask JAX for a device calls `start_backend` before it does.

Drivers, plugins and settings can make the start fail in many ways, which JAX reports in its own
words or not at all. If JAX cannot start a platform that the user requested, that is an error. If
JAX is on the CPU although the machine has a GPU or the model is large, that is a warning.
"""

import os
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import pynvml
from jax._src import xla_bridge
from jax._src.xla_bridge import backends_are_initialized

from optimus_jax.devices.gpu_sharing import num_gpus
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, FaultError, explain
from optimus_jax.system.environment import check_xla_flags, positive_number_from_environment

HOST_MEMORY_SHARE = 0.75
"""Share of a host's memory that JAX may use for its GPUs (parallel.offload). XLA's default is 64
GiB, less than the moments of 9 billion parameters."""
GPU_MEMORY_SHARE = "0.92"
"""Share of a GPU's memory that JAX preallocates. With JAX's default, 75%, a plan for the whole
device would not run. The rest is for CUDA contexts and NCCL."""
JAX_OWN_SHARE, JAX_OWN_HOST_GIB = "0.75", "64"
"""JAX's own limits, a share of a GPU's memory and GiB of host memory, which apply if nobody sets
others before its first use."""
LARGE_PARAMS = 100_000_000
"""Number of parameters from which a model is seldom meant for a CPU."""
_FRACTION, _OLDER_FRACTION, _HOST_LIMIT_GIB = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
)
_PLUGINS = {13: "jax-cuda13-plugin", 12: "jax-cuda12-plugin"}
"""JAX's packages for NVIDIA GPUs, by CUDA version."""
_PEER_ERRORS = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED", "CANCELLED")
"""Words in JAX's error message that show that another process is at fault."""
_DEV = Path("/dev")


def start_backend() -> None:
    """Make JAX find its devices, with the memory limits of a run.

    Every process of a run must call it.

    JAX may use GPU_MEMORY_SHARE of a GPU's memory, and HOST_MEMORY_SHARE of the host's memory for
    its GPUs, unless XLA_CLIENT_MEM_FRACTION (or its older name, XLA_PYTHON_CLIENT_MEM_FRACTION) and
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB say otherwise. If JAX has already started on a GPU, it is too
    late to set limits: a warning says so, and JAX's own limits apply.

    Raises:
      ConfigError: JAX cannot start, or one of its settings is incompatible with a run.
      FaultError: another process of the run has failed or is missing.
    """
    check_jax_settings()
    has_begun = backends_are_initialized()
    _limit_memory(has_begun)
    if not has_begun:
        check_xla_flags()
        _begin()
    _check_default_device()


def _begin() -> None:
    try:
        jax.devices()
    except Exception as error:  # plugins may raise anything
        said = " ".join(str(error).split())
        if jax.distributed.is_initialized() and any(word in said for word in _PEER_ERRORS):
            raise FaultError(
                explain(
                    "not all processes found their devices",
                    given=said,
                    do="start all again",
                )
            ) from error
        raise _cannot_start(said or type(error).__name__) from error


def gpu_memory_share() -> float:
    """Share of a GPU's memory that JAX may use. Raises ConfigError if the environment variable is
    not a positive number."""
    return positive_number_from_environment(
        _FRACTION,
        float,
        positive_number_from_environment(_OLDER_FRACTION, float, float(GPU_MEMORY_SHARE)),
    )


def host_limit_bytes() -> int:
    """Host memory that JAX may pin, in bytes. Raises ConfigError if the environment variable is not
    a positive number."""
    return (
        int(positive_number_from_environment(_HOST_LIMIT_GIB, int, int(JAX_OWN_HOST_GIB))) * 2**30
    )


def host_bytes() -> int:
    """Memory of this host, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def unexpected_cpu_warning(num_params: Callable[[], int] = lambda: 0) -> str | None:
    """A warning that a run is on the CPU although nobody asked for that; None: the CPU was asked
    for or is a likely choice.

    Args:
      num_params: counts the model's parameters; 0: the model's size does not matter.
    """
    asked = _asked_for()
    virtual = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if jax.default_backend() != "cpu" or asked.startswith("cpu") or virtual > 0:
        return None
    here, params = unused_accelerator(), num_params()
    if not asked and here is None and params < LARGE_PARAMS:
        return None
    size = f" of {params:,} parameters" if params else ""
    what, do = here or (
        (
            "no GPU was detected: no NVIDIA driver answers, and there is no /dev/kfd and no"
            " /dev/accel*"
        ),
        "on a machine with one: pip install 'optimus-jax[cuda13]'",
    )
    return (
        f"WARNING: no GPU was found, and this run{size} is on the CPU: {what}\n  do:    {do}; if"
        " the CPU is intended: JAX_PLATFORMS=cpu"
    )


def unused_accelerator() -> tuple[str, str] | None:
    """Why JAX does not use an accelerator of this machine, and what to do about it; None: the
    machine has no accelerator."""
    if (
        count := num_gpus() or sum(entry.name[6:].isdecimal() for entry in _DEV.glob("nvidia*"))
    ) > 0:
        return _nvidia(count)
    if (_DEV / "kfd").exists():
        return (
            "there is an AMD GPU (/dev/kfd), and JAX has no plugin for ROCm that works",
            "pip install jax-rocm7-plugin jax-rocm7-pjrt of jax's version",
        )
    if next(_DEV.glob("accel[0-9]*"), None) is not None:
        return (
            "there is a TPU (/dev/accel*), and JAX has no libtpu that works",
            "pip install 'jax[tpu]'",
        )
    return None


def _nvidia(count: int) -> tuple[str, str]:
    there = f"this machine has {count} NVIDIA GPU{'s' if count > 1 else ''}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not any(
        entry.strip() and not entry.strip().startswith(("-", "NoDevFiles"))
        for entry in visible.split(",")
    ):
        return (
            f"{there}, and CUDA_VISIBLE_DEVICES={visible} hides them",
            "unset CUDA_VISIBLE_DEVICES",
        )
    driver = _driver_cuda()
    fitting = 13 if driver is None or driver >= (13, 0) else 12
    install = f"pip install 'optimus-jax[cuda{fitting}]'"
    installed = {
        cuda: found for cuda, name in _PLUGINS.items() if (found := _version(name)) is not None
    }
    if not installed:
        return f"{there}, and jax is installed without CUDA", install
    newest = max(installed)
    if driver is not None and driver[0] < min(installed):
        return (
            (
                f"{there}; the driver knows CUDA {driver[0]}.{driver[1]}, and {_PLUGINS[newest]}"
                f" needs {newest}"
            ),
            f"{install}, or a newer driver",
        )
    if installed[newest] != (jaxlib := _version("jaxlib")):
        return (
            f"{there}; {_PLUGINS[newest]} is version {installed[newest]}, and jaxlib {jaxlib}",
            f"pip install --upgrade 'optimus-jax[cuda{newest}]'",
        )
    said = getattr(xla_bridge, "_backend_errors", {}).get("cuda")
    libraries = os.environ.get("LD_LIBRARY_PATH")
    why = f"{there}, and JAX cannot start CUDA" + (f": {' '.join(said.split())}" if said else "")
    return (
        (
            f"{why}; LD_LIBRARY_PATH={libraries} may put other libraries before its own",
            "unset LD_LIBRARY_PATH",
        )
        if libraries
        else (why, f"see whether nvidia-smi works, then {install}")
    )


def _cannot_start(said: str) -> ConfigError:
    asked = _asked_for()
    said_by = [
        f"{name}={os.environ[name]}"
        for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
        if os.environ.get(name)
    ]
    given = " ".join(said_by) or (f"platform {asked}" if asked else "JAX_PLATFORMS is not set")
    if asked and not asked.startswith("cpu"):
        found, what, do = _not_found(asked)
        return ConfigError(
            explain(
                f"{found}: JAX cannot start the requested platform: {what}",
                given=f"{given}; JAX: {said}",
                do=f"{do}; or unset JAX_PLATFORMS to use any available device",
            )
        )
    here = unused_accelerator()
    return ConfigError(
        explain(
            "JAX cannot start" + (f": {here[0]}" if here else ""),
            given=f"{given}; JAX: {said}",
            do=(f"{here[1]}; or " if here else "") + "set JAX_PLATFORMS=cpu to use the CPU",
        )
    )


def _not_found(platform: str) -> tuple[str, str, str]:
    """What was not found, why, and what to do, for a platform that JAX cannot start."""
    wants_gpu = any(name in platform for name in ("cuda", "gpu", "rocm"))
    what, do = unused_accelerator() or (
        (
            "no GPU was detected",
            "pip install 'optimus-jax[cuda13]' on a machine with one",
        )
        if wants_gpu
        else (
            (
                "no TPU was detected",
                "pip install 'jax[tpu]' on a machine with one",
            )
            if "tpu" in platform
            else ("JAX does not know it", "choose cpu, cuda, rocm or tpu")
        )
    )
    return f"no {'GPU was' if wants_gpu else 'device was'} found", what, do


def _check_default_device() -> None:
    """Raise ConfigError if JAX's default device is on a platform that JAX has not started: JAX
    could not place its first array.
    """
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(default, str):
        return
    try:
        jax.local_devices(backend=default)
    except Exception as error:  # plugins may raise anything
        found, what, do = _not_found(default)
        if (asked := _asked_for()) and default not in asked.split(","):
            what, do = (
                f"platform {asked} was requested, which leaves it out",
                f"let both name one platform, such as JAX_PLATFORMS={default}",
            )
        given = (
            f"JAX_DEFAULT_DEVICE={default}"
            if os.environ.get("JAX_DEFAULT_DEVICE") == default
            else f"jax_default_device={default!r} in jax.config"
        )
        raise ConfigError(
            explain(
                f"{found}, JAX's default device: {what}",
                given=f"{given}; JAX: {' '.join(str(error).split())}",
                do=f"unset JAX_DEFAULT_DEVICE to use any available device; or {do}",
            )
        ) from error


def _asked_for() -> str:
    """The platform that the user requested; empty: none."""
    older = jax.config.read("jax_platform_name") if "jax_platform_name" in jax.config.values else ""
    return (jax.config.jax_platforms or older or "").strip()  # pyright: ignore[reportAttributeAccessIssue]


def _limit_memory(has_begun: bool) -> None:
    gpu_memory_share()  # an invalid number is reported before anything starts
    has_begun = has_begun and jax.default_backend() == "gpu"
    if not os.environ.get(_FRACTION) and not os.environ.get(_OLDER_FRACTION):
        if has_begun:
            warnings.warn(
                f"JAX was used before this run began, and so may use {float(JAX_OWN_SHARE):.0%}"
                f" of a GPU instead of {float(GPU_MEMORY_SHARE):.0%}: set"
                f" {_FRACTION}={GPU_MEMORY_SHARE}, or begin the run first",
                stacklevel=4,
            )
        os.environ[_OLDER_FRACTION] = JAX_OWN_SHARE if has_begun else GPU_MEMORY_SHARE
    if not os.environ.get(_HOST_LIMIT_GIB):
        os.environ[_HOST_LIMIT_GIB] = (
            JAX_OWN_HOST_GIB
            if has_begun
            else str(max(1, int(HOST_MEMORY_SHARE * host_bytes() / 2**30)))
        )
    host_limit_bytes()


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports; None: unknown."""
    try:
        pynvml.nvmlInit()
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
