"""Virtual CPU devices, for running several devices on one machine."""

import ctypes
import os
import sys
from pathlib import Path

import jax

from optimus_jax.devices.backend import start_backend
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.paths import user_path


def return_freed_memory() -> None:
    """Return memory that compilation has freed to the system; glibc would keep some 200 MB for
    later."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def disable_compilation_cache_on_cpu() -> bool:
    """Disable JAX's persistent compilation cache (JAX_COMPILATION_CACHE_DIR) if the devices are
    CPUs; returns whether there was one to disable.

    A program from the cache orders the collectives of several CPU devices differently from the
    program that was stored, so they wait for one another until XLA ends the process (jax 0.10.2).
    Call this before anything is compiled.

    Raises:
      PathError: the variable does not name a possible directory. JAX takes it literally, and would
        create a directory called ~.
    """
    start_backend()
    text: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not text:
        return False
    directory = user_path(text, what="JAX_COMPILATION_CACHE_DIR")
    if isinstance(directory, Path):  # a URL is left as it is
        jax.config.update("jax_compilation_cache_dir", str(directory))
    if jax.default_backend() != "cpu":
        return False
    jax.config.update("jax_enable_compilation_cache", False)
    return True


def use_cpu_devices(num_devices: int) -> None:
    """Make JAX run on this many virtual CPU devices.

    Call it before anything asks for a device.

    JAX settings that name another platform are ignored, and a note on stderr says so.

    Raises:
      ConfigError: JAX has already started with other devices.
    """
    others = _other_platforms()
    try:
        jax.config.update("jax_platforms", "cpu")
        if "jax_platform_name" in jax.config.values:  # the older name would win
            jax.config.update("jax_platform_name", "")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        found = jax.local_devices()
        if found[0].platform != "cpu" or len(found) != num_devices:
            raise ConfigError(
                explain(
                    "JAX has started already and cannot change its devices",
                    given=f"cpu_devices={num_devices}, JAX has {len(found)} x {found[0].platform}",
                    do="set cpu_devices before the first use of JAX in this program",
                )
            ) from None
    if "jax_default_device" in others:
        jax.config.update("jax_default_device", None)
    if others:
        said = [
            (
                f"{name.upper()}={value}"
                if os.environ.get(name.upper()) == value
                else f"{name}={value!r} in jax.config"
            )
            for name, value in others.items()
        ]
        print(
            f"note: {' and '.join(said)} {'is' if len(said) == 1 else 'are'} not followed:"
            f" {num_devices} virtual CPU devices were requested",
            file=sys.stderr,
        )


def _other_platforms() -> dict[str, str]:
    """JAX settings whose first platform is not the CPU, and their values."""
    values = {
        name: jax.config.values.get(name)
        for name in ("jax_platforms", "jax_platform_name", "jax_default_device")
    }
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, str) and value and value.partition(",")[0].strip() != "cpu"
    }
