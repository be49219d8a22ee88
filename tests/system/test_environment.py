"""Invalid environment variables are errors without a traceback."""

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


def test_an_unwritable_dump_folder_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_DUMP_IR_TO", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="JAX_DUMP_IR_TO="):
        check_dump_folder()


@pytest.mark.parametrize("text", ["abc", "-1", "0", "nan", "inf", "1,5"])
def test_invalid_numbers_in_environment_variables_are_refused(monkeypatch, text):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", text)
    with pytest.raises(
        ConfigError, match=rf"XLA_CLIENT_MEM_FRACTION={text}\n.*such as 0.92, or unset it"
    ):
        positive_number_from_environment("XLA_CLIENT_MEM_FRACTION", float, 0.92)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    assert positive_number_from_environment("XLA_CLIENT_MEM_FRACTION", float, 0.92) == 0.92


def test_unknown_xla_flags_are_refused_before_they_abort_the_process(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_nonsense=1")
    for _ in range(2):  # a refusal is not cached
        with pytest.raises(
            ConfigError, match=r"XLA_FLAGS=(.|\n)*Unknown flag in XLA_FLAGS: --xla_nonsense=1"
        ):
            check_xla_flags()


def test_a_user_without_a_home_directory_gets_a_temporary_cache(monkeypatch):
    def nobody(key):
        raise KeyError(key)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert measurements_directory().is_relative_to(tempfile.gettempdir())
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-that-name/cache")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        measurements_directory()


def test_a_missing_jax_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigError, match="JAX cannot be imported in this environment"):
        import_jax()


def test_an_invalid_jax_variable_is_named_by_the_command():
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


def test_accepted_xla_flags_are_checked_only_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    check_xla_flags()
    monkeypatch.setattr(subprocess, "run", None)
    check_xla_flags()
