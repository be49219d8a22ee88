"""The commands of docs/howto/tune_a_published_model.md, in the order of the page, at tiny sizes: on
a model with random parameters and a few lines of data, at the paths that the page names.

They run in this process: a dozen starts of Python would take longer than all the rest. `make test`
only parses them.
"""

import json
import re
import shlex
from importlib import import_module
from math import log
from pathlib import Path
from typing import Any

import pytest
from chat_templates import MODELS, save_tokenizer
from published_models import LLAMA_LIKE, libraries

from optimus_jax.cli import train as train_command
from optimus_jax.config.request import make_config
from optimus_jax.run.api import train
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.weights.directory import open_model
from optimus_jax.weights.peft_directory import read_peft

PAGE = Path(__file__).parents[2] / "docs/howto/tune_a_published_model.md"
COMMANDS = re.compile(r"^python scripts/(\w+)\.py ((?:.*\\\n)*.*)$", re.MULTILINE)
LINES = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LENGTH = 128
TINY = {
    "--seq-len": str(LENGTH),
    "--global-batch": "8",
    "--steps": "2",
    "--mesh": "fsdp=4,tensor=2",
    "--eval-every": "0",
    "--progress": "none",
}
"""Flags of training that are replaced, or added."""


def commands() -> list[tuple[str, list[str]]]:
    """The name and arguments of every command of the page."""
    found = COMMANDS.findall(PAGE.read_text(encoding="utf-8"))
    return [(name, shlex.split(text.replace("\\\n", " "))) for name, text in found]


def tiny(arguments: list[str]) -> list[str]:
    """The arguments of `train` with the values of TINY."""
    arguments = list(arguments)
    for flag, value in TINY.items():
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [flag, value]
    return arguments


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what the page takes for granted."""
    torch, transformers = libraries()
    torch.manual_seed(0)
    base = save_tokenizer(tmp_path / "models" / "base", **MODELS["chatml"])
    sizes = LLAMA_LIKE | {"vocab_size": 640, "max_position_embeddings": LENGTH}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    (tmp_path / "papers").mkdir()
    for name in ("papers/a.jsonl", "web.jsonl"):
        lines = [json.dumps({"text": f"{name} the cat and the hat {n}"}) for n in range(400)]
        (tmp_path / name).write_text("\n".join(lines))
    chat, pair = (json.dumps(json.loads(each)) for each in LINES.findall(PAGE.read_text("utf-8")))
    for name, line in {"chats": chat, "more_chats": chat, "pairs": pair}.items():
        lines = [line.replace("1 + 1", f"1 + {number}") for number in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does, but for signals and exit codes of training."""
    if name == "train":
        given: dict[str, Any] = train_command.parser().read(tiny(arguments))
        overrides = train_command.settings(given, note=pytest.fail)
        train(given.get("model"), run_dir=given["run_dir"], **overrides)
        return
    monkeypatch.setattr("sys.argv", [name, *arguments])
    import_module(f"optimus_jax.cli.{name}").main()


@pytest.mark.nightly
def test_every_command_of_the_page_runs(folder: Path, monkeypatch, capsys):
    for name, arguments in commands():
        run(name, arguments, monkeypatch)
    assert "mesh" not in capsys.readouterr().out  # --chat prints the answer alone

    runs = {path.name: RunDirectory(path) for path in (folder / "runs").iterdir()}
    assert runs.keys() == {"continued", "sft", "sft-2", "qlora", "dpo"}
    weights = {
        name: event["weights"]
        for name, each in runs.items()
        for event in each.events()
        if event["event"] == "start"
    }
    assert {name: Path(path).name for name, path in weights.items()} == {
        "continued": "base",
        "sft": "base",
        "sft-2": "base",
        "qlora": "base",
        "dpo": "sft",
    }
    assert runs["dpo"].metrics()[0].loss == pytest.approx(log(2), abs=1e-3)
    for name in ("continued", "sft", "qlora", "dpo"):
        assert open_model(folder / "models" / name).dtype == "bfloat16"
    assert read_peft(folder / "adapters" / "sft")[0]["base_model_name_or_path"] == str(
        folder / "models" / "base"
    )


def test_every_command_of_the_page_can_be_parsed():
    for name, arguments in commands():
        given = import_module(f"optimus_jax.cli.{name}").parser().read(arguments)
        if name == "train":
            settings = train_command.settings(given, note=pytest.fail)
            make_config("llama3.1-8b", settings)  # in place of the page's model


def test_the_page_has_commands_with_flags_to_replace():
    names = [name for name, _ in commands()]
    assert names.count("train") == 5
    assert {*names} == {"train", "export", "generate"}
    for name, arguments in commands():
        if name == "train":
            assert {"--seq-len", "--global-batch", "--steps", "--run-dir"} <= {*arguments}
