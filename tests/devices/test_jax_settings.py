"""Every setting of JAX is classified; those that would break a run are refused, by the name that
the user gave.
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

CLASSIFIED = [
    *REFUSED,
    *REPORTED,
    *SET_HERE,
    *(name for names in HARMLESS.values() for name in names),
]


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


def test_each_jax_setting_is_classified_once():
    assert len(set(CLASSIFIED)) == len(CLASSIFIED)
    if jax.__version__ == "0.10.2":
        assert set(CLASSIFIED) == set(jax.config.values)


def test_default_jax_settings_give_no_message():
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
def test_settings_that_break_a_run_are_refused(setting, monkeypatch, name, value):
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


def test_setting_of_a_thread_is_checked_too():
    with jax.enable_x64(True), pytest.raises(ConfigError, match="jax_enable_x64=True"):
        check_jax_settings()
    check_jax_settings()


def test_default_matmul_precision_is_reported(setting):
    setting("jax_default_matmul_precision", "highest")
    assert [line.partition(":")[0] for line in check_jax_settings()] == [
        "jax_default_matmul_precision=highest"
    ]


@pytest.mark.parametrize("in_file", [False, True])
def test_fast_math_that_ignores_nans_is_refused(monkeypatch, tmp_path, in_file):
    flags = "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false"
    (tmp_path / "flags").write_text(flags)
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags") if in_file else flags)
    with pytest.raises(
        ConfigError, match=r"given: --xla_cpu_fast_math_honor_nans=false in XLA_FLAGS"
    ):
        check_jax_settings()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert check_jax_settings() == []
