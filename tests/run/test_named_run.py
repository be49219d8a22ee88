"""What is given for a run and is none: the error says what it is, and what to type instead."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import optimus_jax
from optimus_jax.config import Config
from optimus_jax.config.request import read_config
from optimus_jax.errors import ConfigError
from optimus_jax.run.named_run import check_names_run
from optimus_jax.weights.published import model_named

READERS = [
    ("generate", ["--run", "{}", "--prompt", "a"]),
    ("export", ["--run", "{}", "--to", "out"]),
    ("export", ["--run", "{}", "--to", "out", "--adapters"]),
    ("report", ["{}"]),
    ("profile", ["{}"]),
    ("simulate", ["--replay", "{}"]),
]
"""Commands that read a run."""


@pytest.fixture(autouse=True)
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one of each kind."""
    contents = {
        "model/config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "adapters/adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "a/b"},
        "run/config.json": json.loads(Config().to_json()),
        "list/config.json": [],
        "other/config.json": {"a": 1},
    }
    for name, value in contents.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(value))
    for name in ("model", "list"):
        (tmp_path / name / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a command."""
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    with pytest.raises(ConfigError) as caught:
        import_module(f"optimus_jax.cli.{command}").main()
    return str(caught.value)


@pytest.mark.parametrize(("command", "arguments"), READERS)
def test_what_is_published_is_no_run(command, arguments, monkeypatch):
    for name, flag in (("model", "--model"), ("adapters", "--init-from")):
        if command == "generate":  # it takes these too
            continue
        text = error_of(command, [each.format(name) for each in arguments], monkeypatch)
        assert re.search(rf"(?s) names .*published {name} .*, not a run.*train {flag} {name}", text)


@pytest.mark.parametrize(("command", "arguments"), READERS)
def test_a_step_has_a_flag_of_its_own(command, arguments, monkeypatch):
    text = error_of(command, [each.format("run@3") for each in arguments], monkeypatch)
    steps = "--run run --step 3" if "--run" in arguments else "(--replay )?run$"
    assert re.search(rf"without a step\n.*run@3\n.*give {steps}", text)


def test_a_run_may_have_a_name_with_a_step(named):
    (named / "run").rename("run@3")
    check_names_run("run@3", what="--run")
    check_names_run("missing@3", what="--run")  # whoever reads it says that it is missing


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model", r"published model .*--model model"),
        ("adapters", r"published adapters .*--init-from adapters"),
        ("run@3", r"--run-dir run --resume --set checkpoint.resume_step=3"),
    ],
)
def test_only_a_run_is_resumed(name, wanted):
    with pytest.raises(ConfigError, match=f"(?s){wanted}"):
        optimus_jax.train(run_dir=name, resume=True)


def test_a_published_config_is_not_that_of_a_run(named):
    with pytest.raises(ConfigError, match=r"(?s)published model.*--model model"):
        read_config("model/config.json")
    with pytest.raises(ConfigError, match=r"(?s)published adapters.*--init-from adapters"):
        read_config("adapters/adapter_config.json")
    with pytest.raises(ConfigError, match="published model"):  # such as one in a store
        Config.from_json((named / "model" / "config.json").read_text())
    assert read_config("run/config.json") == Config()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("adapters", r"published adapters .*, not a model\n.*a/b\n.*--init-from ./adapters"),
        ("run", r"names a run\n.*\n.*--init-from ./run"),
        ("list", r"config.json is not the config of a model\n.*a list"),
        ("other", r"no model\n.*whose config.json is not that of a published model"),
    ],
)
def test_model_names_a_published_model(name, wanted):
    with pytest.raises(ConfigError, match=wanted):
        model_named(f"./{name}")


def test_a_published_model_has_no_checkpoints():
    with pytest.raises(ConfigError, match=r"(?s)no checkpoints.*leave @3 out"):
        optimus_jax.train(init_from="model@3")
