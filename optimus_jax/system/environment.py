"""Checks of environment variables before JAX is used, with readable errors.

JAX reads its settings from environment variables at import and raises various exceptions; here they
become a ConfigError that names the variable. devices/jax_settings.py decides which of JAX's valid
settings a run can use.
"""

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version

from optimus_jax.errors import ConfigError, explain, first_line
from optimus_jax.system.cache import measurements_directory


def import_jax(*, only_cpu: bool = False) -> None:
    """Import JAX. Call it before any other module that imports JAX.

    Args:
      only_cpu: use no accelerator, here and in child processes, for commands that only calculate.
        JAX takes most of a GPU's memory as soon as it uses it for anything, beside the job that is
        running there.

    Raises:
      ConfigError: JAX cannot read a variable, or is not installed correctly.
    """
    if only_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        import jax  # noqa: F401
    except Exception as error:
        said = {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("JAX_", "PYTHONWARNINGS", "LD_LIBRARY_PATH"))
        }
        blamed = {
            name: value
            for name, value in said.items()
            if name in str(error) or repr(value) in str(error)
        } or said
        listed = " ".join(f"{name}={value}" for name, value in blamed.items())
        raise ConfigError(
            explain(
                "JAX cannot be imported in this environment",
                given=(
                    f"{listed}{': ' if listed else ''}{type(error).__name__}: {first_line(error)}"
                ),
                do=(
                    f"fix or unset {' or '.join(blamed)}"
                    if blamed
                    else "install it again: pip install optimus-jax"
                ),
            )
        ) from error
    check_dump_folder()


def check_dump_folder() -> None:
    """Raises ConfigError if the directory in JAX_DUMP_IR_TO cannot be written."""
    if (folder := os.environ.get("JAX_DUMP_IR_TO", "")) and folder != "sponge":
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                explain(
                    "JAX cannot write its programs to JAX_DUMP_IR_TO",
                    given=f"JAX_DUMP_IR_TO={folder}: {error.strerror}",
                    do="name a folder that can be written, or unset JAX_DUMP_IR_TO",
                )
            ) from error


def check_xla_flags() -> None:
    """Check XLA_FLAGS in a subprocess, because XLA aborts the process on an unknown flag.

    The result is cached per version of jaxlib.

    Raises:
      ConfigError: XLA does not accept the flags.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not flags:
        return
    import subprocess

    # The check takes half a second; the cache makes only the first run pay it.
    taken = (
        measurements_directory()
        / "xla_flags"
        / hashlib.sha256(f"{version('jaxlib')} {flags}".encode(errors="replace")).hexdigest()[:16]
    )
    # flags in a file may change, so they are not cached
    is_kept = all(flag.startswith("--") for flag in flags.split())
    with contextlib.suppress(OSError):
        if is_kept and taken.exists():
            return
    tried = subprocess.run(
        [sys.executable, "-c", _TRY_FLAGS],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    # any other failure is not about the flags
    if tried.returncode == 0 or "parse_flags_from_env" not in tried.stderr:
        if tried.returncode == 0 and is_kept:
            with contextlib.suppress(OSError):
                taken.parent.mkdir(parents=True, exist_ok=True)
                taken.touch()
        return
    said = [
        line.partition("] ")[2]
        for line in tried.stderr.splitlines()
        if re.match(r"[EF]\d{4} ", line)
    ]
    raise ConfigError(
        explain(
            "XLA does not accept XLA_FLAGS and would abort this process",
            given=f"XLA_FLAGS={flags}: {said[0] if said else 'no reason given'}",
            do="remove or fix that flag; flags differ between versions of jaxlib",
        )
    )


_TRY_FLAGS = "from jaxlib import _jax\n_jax.get_tfrt_cpu_client(asynchronous=True)"


def positive_number_from_environment(
    name: str, kind: Callable[[str], float], default: float
) -> float:
    """A positive number from an environment variable; the default if it is not set.

    Raises ConfigError for anything else.
    """
    if not (text := os.environ.get(name, "").strip()):
        return default
    try:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(
            explain(
                f"{name} is a number above 0",
                given=f"{name}={text}",
                do=f"give a number, such as {default:g}, or unset it",
            )
        ) from None
    return number


def replace_unencodable_characters() -> None:
    """Let standard output and error print a replacement for characters outside their encoding, as
    with PYTHONIOENCODING=ascii or LC_ALL=POSIX.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
