"""No environment variable of a user ends in a traceback."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from optimus_jax.errors import ConfigError
from optimus_jax.system.cache import measurements_directory
from optimus_jax.system.environment import (
    check_dump_folder,
    check_xla_flags,
    import_jax,
    positive_number_from_environment,
)

ROOT = Path(__file__).parents[2]


def test_programs_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_DUMP_IR_TO", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="JAX_DUMP_IR_TO="):
        check_dump_folder()


@pytest.mark.parametrize("text", ["abc", "-1", "0", "nan", "inf", "1,5"])
def test_numbers_that_are_none(monkeypatch, text):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", text)
    with pytest.raises(
        ConfigError, match=rf"XLA_CLIENT_MEM_FRACTION={text}\n.*such as 0.92, or unset it"
    ):
        positive_number_from_environment("XLA_CLIENT_MEM_FRACTION", float, 0.92)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    assert positive_number_from_environment("XLA_CLIENT_MEM_FRACTION", float, 0.92) == 0.92


def test_flags_that_would_end_the_process(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_nonsense=1")
    for _ in range(2):  # what is refused is not remembered
        with pytest.raises(
            ConfigError, match=r"XLA_FLAGS=(.|\n)*Unknown flag in XLA_FLAGS: --xla_nonsense=1"
        ):
            check_xla_flags()


def test_a_user_without_a_home(monkeypatch):
    def nobody(key):
        raise KeyError(key)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert measurements_directory().is_relative_to(tempfile.gettempdir())
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-that-name/cache")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        measurements_directory()


def test_jax_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigError, match="JAX cannot be imported in this environment"):
        import_jax()


def test_what_jax_cannot_read_is_named_by_the_command():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), "--model", "gpt2-nano"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_ENABLE_X64": "abc"},
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: JAX cannot be imported in this environment\n  given: JAX_ENABLE_X64=abc: "
    )
    assert "Traceback" not in done.stderr


def test_flags_that_are_taken_are_tried_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    check_xla_flags()
    monkeypatch.setattr(subprocess, "run", None)
    check_xla_flags()
