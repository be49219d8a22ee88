"""What a program of ours needs of its environment before it uses JAX, told in words where it lacks it.

JAX reads its settings from variables when it is imported, and raises what it raises; some of its settings no run of ours can
have. Both end here in a ConfigError that names the variable.
"""

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version

from optimus_jax.errors import ConfigError, explain
from optimus_jax.kept import cache_directory


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


_TRANSFERS = (_is(None, "allow", "log", "log_explicit"), "a run moves batches, metrics and states between host and devices")
_FINITE = (_is(False), "a step that is not finite is left out and counted, and JAX would end the run with a traceback")
_CHECKS = (_is("ignore"), "a step is compiled without the checks that it asks for; one that is not finite is left out and counted")
_ALLOWED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "jax_disable_jit": (_is(False), "a step is one compiled program"),
    "jax_no_tracing": (_is(False), "every program of a run is traced"),
    "jax_no_execution": (_is(False), "programs that are not executed train nothing"),
    "jax_auto_pcast": (_is(True), "shard_map casts between the axes that a value varies over"),
    "jax_scan3": (_is(False), "layers run in a scan, whose new implementation lacks what they need"),
    "jax_custom_vjp3": (_is(False), "kernels have gradients of their own, which its new implementation does not take"),
    "jax_debug_nans": _FINITE,
    "jax_debug_infs": _FINITE,
    "jax_error_checking_behavior_nan": _CHECKS,
    "jax_error_checking_behavior_oob": _CHECKS,
    "jax_error_checking_behavior_divide": _CHECKS,
    "jax_transfer_guard": _TRANSFERS,
    "jax_transfer_guard_host_to_device": _TRANSFERS,
    "jax_transfer_guard_device_to_device": _TRANSFERS,
    "jax_transfer_guard_device_to_host": _TRANSFERS,
}
"""Settings of JAX with which a step cannot be traced, compiled or run: the values that can be, and why the others cannot."""


def import_jax() -> None:
    """Import JAX. Call it before whatever imports it too.

    Raises:
      ConfigError: a variable holds what JAX cannot read or what no run can have, or JAX is not installed as it should be.
    """
    try:
        import jax  # noqa: F401
    except Exception as error:
        said = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("JAX_", "PYTHONWARNINGS", "LD_LIBRARY_PATH"))}
        blamed = {name: value for name, value in said.items() if name in str(error) or repr(value) in str(error)} or said
        listed = " ".join(f"{name}={value}" for name, value in blamed.items())
        raise ConfigError(explain(
            "JAX cannot be imported in this environment", given=f"{listed}{': ' if listed else ''}{type(error).__name__}: {_first_line(error)}",
            do=f"mend or unset {' or '.join(blamed)}" if blamed else "install it again: pip install optimus-jax")) from error
    check_jax_settings()


def check_jax_settings() -> None:
    """Raises ConfigError if JAX has a setting with which no run works, whether a variable or the program has set it."""
    import jax

    if (folder := os.environ.get("JAX_DUMP_IR_TO", "")) and folder != "sponge":
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(explain("JAX cannot write its programs where it is to", given=f"JAX_DUMP_IR_TO={folder}: {error.strerror}",
                                      do="name a folder that can be written, or unset JAX_DUMP_IR_TO")) from error
    for name, (is_allowed, why) in _ALLOWED.items():
        value = getattr(jax.config, name, None)
        if value is not None and not is_allowed(value):
            raise ConfigError(explain(f"{name} cannot be {value} in a run: {why}", given=f"{_setter(name)}={value}",
                                      do=f"unset {name.upper()}, or leave jax.config.{name} as JAX has it"))


def check_xla_flags() -> None:
    """XLA ends the process where it does not know one of XLA_FLAGS: another one tries them first, once for a version of jaxlib.

    Raises:
      ConfigError: XLA does not take them.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not flags:
        return
    import subprocess

    # Half a second that only the first run of several pays.
    taken = cache_directory() / "xla_flags" / hashlib.sha256(f"{version('jaxlib')} {flags}".encode(errors="replace")).hexdigest()[:16]
    is_kept = all(flag.startswith("--") for flag in flags.split())  # a file of flags may change
    with contextlib.suppress(OSError):
        if is_kept and taken.exists():
            return
    tried = subprocess.run([sys.executable, "-c", _TRY_FLAGS], capture_output=True, text=True, errors="replace", check=False,
                           env={"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)})
    if tried.returncode == 0 or "parse_flags_from_env" not in tried.stderr:  # else it says nothing about them
        if tried.returncode == 0 and is_kept:
            with contextlib.suppress(OSError):
                taken.parent.mkdir(parents=True, exist_ok=True)
                taken.touch()
        return
    said = [line.partition("] ")[2] for line in tried.stderr.splitlines() if re.match(r"[EF]\d{4} ", line)]
    raise ConfigError(explain("XLA does not take XLA_FLAGS, and would end this process", given=f"XLA_FLAGS={flags}: {said[0] if said else 'no reason given'}",
                              do="leave out or mend that flag; other versions of jaxlib have other flags"))


_TRY_FLAGS = "from jaxlib import _jax\n_jax.get_tfrt_cpu_client(asynchronous=True)"


def number_of(name: str, kind: Callable[[str], float], default: float) -> float:
    """A positive number in an environment variable; the default if it is not set. Raises ConfigError if it holds something else."""
    if not (text := os.environ.get(name, "").strip()):
        return default
    try:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(explain(f"{name} is a number above 0", given=f"{name}={text}", do=f"give a number, such as {default:g}, or unset it")) from None
    return number


def show_every_character() -> None:
    """A terminal or file that lacks a character shows another instead: PYTHONIOENCODING=ascii, LC_ALL=POSIX."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _setter(name: str) -> str:
    """Who has set it: the variable, or the program."""
    return name.upper() if name.upper() in os.environ else f"jax.config.{name}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
