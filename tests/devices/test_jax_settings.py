"""Every setting of JAX is decided; those that would break a run are refused, by the name that the
user gave.
"""

import jax
import pytest

from optimus_jax import find_plans
from optimus_jax.devices.jax_settings import (
    HARMLESS,
    REFUSED,
    REPORTED,
    SET_HERE,
    check_jax_settings,
)
from optimus_jax.errors import ConfigError

DECIDED = [*REFUSED, *REPORTED, *SET_HERE, *(name for names in HARMLESS.values() for name in names)]


@pytest.fixture
def setting():
    """Changes settings of JAX for one test."""
    before = {}

    def change(name, value):
        before.setdefault(name, jax.config.values[name])
        jax.config.update(name, value)

    yield change
    for name, value in before.items():
        jax.config.update(name, value)


def test_each_setting_is_decided_once():
    assert len(set(DECIDED)) == len(DECIDED)
    if jax.__version__ == "0.10.2":
        assert set(DECIDED) == set(jax.config.values)


def test_jax_as_it_comes_is_not_spoken_of():
    assert check_jax_settings() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_threefry_partitionable", False),
        ("jax_debug_nans", True),
        ("jax_debug_infs", True),
        ("jax_no_tracing", True),
        ("jax_disable_jit", True),
        ("jax_no_execution", True),
        ("jax_scan3", True),
        ("jax_custom_vjp3", True),
        ("jax_transfer_guard", "disallow"),
        ("jax_error_checking_behavior_nan", "raise"),
        ("jax_debug_key_reuse", True),
        ("jax_auto_pcast", False),
        ("jax_transfer_guard_host_to_device", "disallow"),
        ("jax_default_matmul_precision", "F16_F16_F16"),
    ],
)
def test_what_breaks_a_run_is_refused(setting, monkeypatch, name, value):
    setting(name, value)
    with pytest.raises(
        ConfigError,
        match=rf"given: {name}={value!r} in jax.config\n +do: +call jax.config.update\('{name}', ",
    ):
        check_jax_settings()
    monkeypatch.setenv(name.upper(), "as it was given")
    with pytest.raises(
        ConfigError,
        match=(
            rf"given: {name.upper()}=as it was given in the environment, (.|\n)*do: +unset"
            rf" {name.upper()}, or call"
        ),
    ):
        find_plans("gpt2-nano", "h100:8")


def test_a_setting_of_a_thread_counts_too():
    with jax.enable_x64(True), pytest.raises(ConfigError, match="jax_enable_x64=True"):
        check_jax_settings()
    check_jax_settings()


def test_how_float32_is_multiplied_is_said(setting):
    setting("jax_default_matmul_precision", "highest")
    assert [line.partition(":")[0] for line in check_jax_settings()] == [
        "jax_default_matmul_precision=highest"
    ]


@pytest.mark.parametrize("in_file", [False, True])
def test_xla_has_to_honour_what_is_not_finite(monkeypatch, tmp_path, in_file):
    flags = "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false"
    (tmp_path / "flags").write_text(flags)
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags") if in_file else flags)
    with pytest.raises(
        ConfigError, match=r"given: --xla_cpu_fast_math_honor_nans=false in XLA_FLAGS"
    ):
        check_jax_settings()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert check_jax_settings() == []
