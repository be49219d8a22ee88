"""Exports while a run trains: they are those of the command, and never end the run."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.config import Config
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import CheckpointError, ConfigError
from optimus_jax.faults.fault_log import read_faults
from optimus_jax.faults.progress import Progress
from optimus_jax.run.background_exports import BackgroundExports
from optimus_jax.run.export import OTHER_FILES_BYTES, RunToExport
from optimus_jax.run.exported_weights import StoppedError
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.watchers import Display

TINY: dict[str, Any] = {
    "steps": 4,
    "global_batch": 8,
    "seq_len": 16,
    "eval_every": 0,
    "progress": "none",
    "data.eval_fraction": 0.0,
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
}


class Messages(Display):
    """Keeps what it is told to show."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that exported every second checkpoint, on fsdp x tensor."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    optimus_jax.train(
        "llama-nano",
        run_dir=directory,
        mesh="data=2,fsdp=2,tensor=2",
        **TINY,
        **{"export.every": 2, "export.dtype": "bf16"},
    )
    return directory


def test_exports_are_those_of_the_command(run: Path, tmp_path: Path):
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["step-2", "step-4"]
    assert read_faults(run) == []
    for step in (2, 4):
        done = optimus_jax.export(run, tmp_path / str(step), step=step, dtype="bf16")
        # of a step in the middle, the log may not have the last line yet
        names = {path.name for path in done.directory.iterdir()} - {"README.md"}
        for path in (done.directory / name for name in names):
            other = run / "exports" / f"step-{step}" / path.name
            assert path.read_bytes() == other.read_bytes(), path.name


def test_a_failed_export_does_not_end_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("no directory")
    directory = tmp_path / "run"
    done = optimus_jax.train(
        "llama-nano",
        run_dir=directory,
        **TINY,
        **{"export.every": 4, "export.dir": str(tmp_path / "file")},
    )
    assert done.reason == "done"
    (fault,) = read_faults(directory)
    assert fault["step"] == 4
    assert fault["what"].startswith("the checkpoint of step 4 was not exported: export.dir cannot")
    again = optimus_jax.train(run_dir=directory, resume=True, steps=5, progress="none")
    assert again.reason == "done"


def test_a_model_that_transformers_has_not_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="no class of transformers has such a model"):
        optimus_jax.train(
            "llama-nano",
            run_dir=tmp_path / "run",
            **TINY,
            **{"export.every": 2, "model.features.activation": "relu"},
        )
    assert not (tmp_path / "run").exists()


def exports_of(run: Path, every: int = 10) -> tuple[BackgroundExports, Messages]:
    config = Config().with_values({"export.every": every, "model.vocab_size": 257})
    directory, messages = RunDirectory(run), Messages()
    return BackgroundExports(config, directory, ByteTokenizer(), messages), messages


def test_the_first_checkpoint_after_each_multiple_is_exported(tmp_path: Path, monkeypatch):
    steps, limits = [], []
    monkeypatch.setattr(
        RunToExport,
        "write",
        lambda self, step, to, settings, show_progress: (
            steps.append((step, to.name)) or SimpleNamespace(directory=to)
        ),
    )
    exports, messages = exports_of(tmp_path)
    exports.begin(12)
    for step in (15, 19, 21, 25, 30, 47, 49, 50):
        exports.saved(step)
        limits.append(exports.limits)
        exports.finish(Progress(), is_wanted=True)
    assert steps == [(step, f"step-{step}") for step in (21, 30, 47, 50)]
    assert limits == [(), (), (21,), (21,), (21, 30), (30, 47), (30, 47), (47, 50)]
    assert messages.texts[0] == f"step 21: exported to {tmp_path}/exports/step-21"
    other, _ = exports_of(tmp_path, every=0)
    other.saved(100)
    assert other.limits == ()


def test_an_export_is_left_out_while_another_is_written_and_given_up_at_the_end(
    tmp_path: Path, monkeypatch
):
    begun = threading.Event()

    def write(self: RunToExport, *arguments: object, **settings: object) -> None:
        begun.set()
        while not self.is_stopping():
            pass
        raise StoppedError

    monkeypatch.setattr(RunToExport, "write", write)
    exports, messages = exports_of(tmp_path)
    exports.saved(10)
    assert begun.wait(10)
    exports.saved(20)
    assert exports.limits == (10, 20)
    exports.finish(Progress(), is_wanted=False)
    assert messages.texts == [
        "the checkpoint of step 20 was not exported: the one before it is still being written",
        "the checkpoint of step 10 was not exported: the run ended",
    ]
    assert [fault["what"] for fault in read_faults(tmp_path)] == messages.texts


def test_room_for_the_next_checkpoint_is_left(run: Path, tmp_path: Path, monkeypatch):
    whole = RunToExport.at(run, given=run)
    settings = whole.config.export
    weights = whole.write(4, tmp_path / "a", settings, show_progress=False).num_bytes
    free = weights + OTHER_FILES_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    whole.write(4, tmp_path / "b", settings, show_progress=False)
    beside = RunToExport(
        run=whole.run,
        config=whole.config,
        tokenizer=whole.tokenizer,
        leaves_room_for_checkpoint=True,
    )
    with pytest.raises(CheckpointError, match="no room for the exported model"):
        beside.write(4, tmp_path / "c", settings, show_progress=False)
