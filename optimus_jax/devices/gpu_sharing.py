"""How the processes of one host share its GPUs."""

import os

import pynvml

from optimus_jax.errors import ConfigError, explain

LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""Environment variable, which JAX reads too, that lists the GPUs of a process."""


def gpus_of_process(
    local_index: int | None, local_count: int | None, *, on_cpu: bool
) -> tuple[int, ...] | None:
    """The GPUs that a process uses, as indices among those it sees; None: all of them.

    Args:
      local_index: index of this process among those of its host; None: unknown.
      local_count: number of processes on this host; None: unknown.
      on_cpu: whether GPUs do not matter, or each process sees only its own.
    Raises:
      ConfigError: the processes of this host cannot share its GPUs evenly, or their number is
        unknown.
    """
    if on_cpu or has_device_list() or local_index is None or local_count == 1:
        return None
    num_gpus = num_visible_gpus()
    if local_count is None:
        if num_gpus is None or num_gpus < 2:
            return None
        raise ConfigError(
            explain(
                "nothing says how many processes share the GPUs of this host",
                given=f"local process {local_index}, {num_gpus} GPUs",
                do=(
                    f"set LOCAL_WORLD_SIZE (with LOCAL_RANK), or {LOCAL_DEVICES}, or"
                    " CUDA_VISIBLE_DEVICES in each process"
                ),
            )
        )
    if num_gpus is None:
        # GPUs of other vendors are not counted here; JAX gives one to each process
        return (local_index,)
    if num_gpus < local_count:
        return None  # each sees its own, or there is nothing to share
    if num_gpus % local_count:
        raise ConfigError(
            explain(
                "the processes of this host cannot share its GPUs evenly",
                given=f"{local_count} processes, {num_gpus} GPUs",
                do=(
                    "start one process per host or as many as divide its GPUs, or set"
                    f" {LOCAL_DEVICES} in each"
                ),
            )
        )
    each = num_gpus // local_count
    return tuple(range(local_index * each, (local_index + 1) * each))


def has_device_list() -> bool:
    """Whether the user lists this process's devices in JAX_LOCAL_DEVICE_IDS.

    Raises ConfigError if the list is invalid.
    """
    if not (text := os.environ.get(LOCAL_DEVICES, "").strip()):
        return False
    if not all(entry.strip().isascii() and entry.strip().isdecimal() for entry in text.split(",")):
        raise ConfigError(
            explain(
                f"{LOCAL_DEVICES} lists the devices of this process",
                given=f"{LOCAL_DEVICES}={text}",
                do="give numbers from 0, such as 0,1, or unset it",
            )
        )
    return True


def num_visible_gpus() -> int | None:
    """Number of NVIDIA GPUs that this process sees; None: no driver answers."""
    if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return sum(
            bool(entry.strip()) and not entry.strip().startswith(("-", "NoDevFiles"))
            for entry in listed.split(",")
        )
    return num_gpus()


def num_gpus() -> int | None:
    """Number of NVIDIA GPUs of this machine; None: no driver answers."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None
