"""Files of a run: numbers keep full precision, and logs can be read after being cut anywhere."""

import contextlib
import dataclasses
import json
import math
import re
import resource
import shutil
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.errors import ConfigError, RunDirectoryError
from optimus_jax.run_directory.directory import EventName, RunDirectory
from optimus_jax.run_directory.files import append
from optimus_jax.run_directory.step_record import StepRecord

float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
field_names = st.from_regex(r"[a-z]{1,12}", fullmatch=True).filter(
    lambda name: name not in ("event", "step", "self")
)


def record(step: int, **values: typing.Any) -> StepRecord:
    some = StepRecord(
        step=step,
        loss=5.125,
        grad_norm=1.5,
        lr=3e-4,
        tokens=4096,
        step_time_s=0.25,
        tokens_per_s=16384.0,
        mfu=None,
        plan="a1b2c3",
        peak_bytes=None,
    )
    return dataclasses.replace(some, **values)


values = st.fixed_dictionaries(
    {
        "loss": float32,
        "grad_norm": float32,
        "plan": st.text(),
        "mfu": st.none() | st.floats(0, 1),
        "peak_bytes": st.none() | st.integers(0, 2**40),
        "skipped": st.booleans(),
        "loss_scale": st.none() | float32,
        "metrics": st.dictionaries(st.text(), float32, max_size=2),
    }
)
records = st.lists(values, min_size=1, max_size=5).map(
    lambda steps: [record(step, **values) for step, values in enumerate(steps, start=1)]
)


@pytest.fixture
def warnings() -> list[str]:
    """Warnings of the run."""
    return []


@pytest.fixture
def run(tmp_path: Path, warnings: list[str]) -> Iterator[RunDirectory]:
    run = RunDirectory.create(tmp_path / "run", "gpt2", warn=warnings.append)
    run.write_config("{}")
    yield run
    run.close()


@given(records)
def test_steps_are_read_as_they_were_logged(logged: list[StepRecord]):
    with tempfile.TemporaryDirectory() as path:
        run = RunDirectory(path)
        for item in logged:
            run.log_step(item)
        assert run.metrics() == logged


@given(float32)
def test_the_loss_keeps_every_digit_of_its_float32(loss: float):
    with tempfile.TemporaryDirectory() as path:
        run = RunDirectory(path)
        run.log_step(record(1, loss=float(np.float32(loss))))
        [line] = (run.path / "metrics.jsonl").read_text().splitlines()
        # Parse it as any other reader would.
        assert np.float32(json.loads(line)["loss"]).tobytes() == np.float32(loss).tobytes()


@given(
    st.dictionaries(field_names, json_values, max_size=4),
    st.sampled_from(typing.get_args(EventName)),
)
def test_events_are_read_as_they_were_logged(fields: dict[str, typing.Any], event: EventName):
    with tempfile.TemporaryDirectory() as path:
        run = RunDirectory(path)
        run.log_event(event, 7, **fields)
        [logged] = run.events()
        assert isinstance(logged.pop("time_s"), float)
        assert logged == {"event": event, "step": 7, **fields}


@given(records, st.data())
def test_a_resumed_run_with_cut_logs_rewrites_the_same_metrics(
    logged: list[StepRecord], data: st.DataObject
):
    with tempfile.TemporaryDirectory() as path:
        run = RunDirectory(path)
        run.write_config("{}")
        for item in logged:
            run.log_step(item)
        metrics = run.path / "metrics.jsonl"
        whole = metrics.read_bytes()
        kept = whole[: data.draw(st.integers(0, len(whole)), label="bytes kept")]
        metrics.write_bytes(kept)

        assert run.metrics() == logged[: kept.count(b"\n")]
        resumed = RunDirectory.resume(path)
        resumed.close()  # releases only the lock; it can still write
        checkpoint = data.draw(st.integers(0, len(logged)), label="step of the checkpoint")
        for item in logged[min(checkpoint, kept.count(b"\n")) :]:
            resumed.log_step(item)
        assert metrics.read_bytes() == whole


def test_a_torn_event_is_dropped_and_the_next_one_is_complete(run: RunDirectory):
    run.log_event("start", 0)
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "checkpoi')
    assert [event["event"] for event in run.events()] == ["start"]
    run.close()
    resumed = RunDirectory.resume(run.path)
    resumed.log_event("resume", 3)
    assert [event["event"] for event in resumed.events()] == ["start", "resume"]


def test_a_logged_step_is_written_at_once(run: RunDirectory):
    run.log_step(record(1))
    assert (run.path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_no_step_appears_twice_in_the_metrics(run: RunDirectory):
    for step in (1, 2, 3, 2, 3, 4):
        run.log_step(record(step))
    assert [item.step for item in run.metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_numbers_that_are_not_finite_are_null_and_marked(run: RunDirectory, name: str, bad: float):
    run.log_step(record(1, **{name: bad}))
    line = json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line[name], line["skipped"]) == (None, True)
    [back] = run.metrics()
    assert math.isnan(getattr(back, name))
    assert back.skipped


def test_a_metric_that_is_not_finite_is_null_and_read_as_nan(run: RunDirectory):
    run.log_step(record(1, metrics={"accuracy": math.nan, "balance": 2.0}))
    line = json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["metrics"] == {"accuracy": None, "balance": 2.0}
    [back] = run.metrics()
    assert math.isnan(back.metrics["accuracy"])
    assert back.metrics["balance"] == 2


def test_numbers_inside_an_event_that_are_not_finite_are_null(run: RunDirectory):
    run.log_event("fault", 3, losses=[1.0, math.nan], worst={"loss": math.inf})
    [event] = run.events()
    assert (event["losses"], event["worst"]) == ([1.0, None], {"loss": None})


def test_a_metrics_line_has_the_documented_fields(run: RunDirectory):
    run.log_step(record(1))
    run.log_step(record(2, skipped=True, loss_scale=32768.0, metrics={"accuracy": 0.5}))
    plain, extra = (
        json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()
    )
    assert list(plain) == [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "step_time_s",
        "tokens_per_s",
        "mfu",
        "plan",
        "peak_bytes",
    ]
    assert extra.keys() - plain.keys() == {"skipped", "loss_scale", "metrics"}


def test_unknown_event_names_are_refused(run: RunDirectory):
    with pytest.raises(AssertionError, match="party"):
        run.log_event("party", 1)  # pyright: ignore[reportArgumentType]


def test_config_and_plan_files_are_replaced_atomically(run: RunDirectory):
    run.write_config('{"a": 1}')
    assert run.plan_text() is None
    run.write_plan("a long plan")
    run.write_plan("plan")
    assert (run.config_text(), run.plan_text()) == ('{"a": 1}', "plan")
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "config.json",
        "lock",
        "plan.json",
    ]


def test_a_failed_write_keeps_the_old_file(run: RunDirectory):
    with pytest.raises(UnicodeEncodeError):
        run.write_config("half of it \ud800")
    assert run.config_text() == "{}"


def test_default_directory_names_are_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20250131-120000")
    names = [
        RunDirectory.create(None, model).path.relative_to(tmp_path).as_posix()
        for model in ("gpt2", "gpt2", "gpt2", "meta-llama/Llama-3")
    ]
    assert names == [
        "runs/gpt2-20250131-120000",
        "runs/gpt2-20250131-120000-2",
        "runs/gpt2-20250131-120000-3",
        "runs/Llama-3-20250131-120000",
    ]


def test_default_directory_names_contain_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"gpt2-\d{8}-\d{6}", RunDirectory.create(None, "gpt2").path.name)


def test_an_existing_run_is_never_overwritten(run: RunDirectory):
    with pytest.raises(ConfigError, match="--resume"):
        RunDirectory.create(run.path, "gpt2")
    assert run.config_text() == "{}"


def test_a_killed_start_does_not_block_a_new_run(tmp_path: Path):
    """Killed while it wrote its first file: no run exists yet, and the directory can be used."""
    (tmp_path / "config.tmp").write_text("{")
    run = RunDirectory.create(tmp_path, "gpt2")
    run.write_config("{}")
    run.close()
    assert run.is_begun
    assert not (tmp_path / "config.tmp").exists()


def test_a_start_killed_after_plan_trials_does_not_block_a_new_run(tmp_path: Path):
    """Then there are events, the last of which may be torn, but no config yet."""
    killed = RunDirectory.create(tmp_path, "gpt2")
    killed.log_event("decision", 0, plan="a")
    killed.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event"')
    run = RunDirectory.create(tmp_path, "gpt2")
    run.log_event("start", 0)
    assert [event["event"] for event in run.events()] == ["decision", "start"]


@pytest.mark.parametrize("name", ["thesis.tex", "events.jsonl"])
def test_directories_with_foreign_files_are_refused(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=name):
        RunDirectory.create(tmp_path, "gpt2")


def test_a_path_of_a_file_is_refused_as_directory(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        RunDirectory.create(tmp_path / "thesis.tex", "gpt2")


def test_an_empty_directory_is_accepted(tmp_path: Path):
    assert RunDirectory.create(tmp_path, "gpt2").path == tmp_path


def test_resume_needs_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        RunDirectory.resume(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        RunDirectory.resume(tmp_path / "nowhere")


def test_only_the_writer_writes(run: RunDirectory):
    run.log_step(record(1))
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b"being written by the wri")
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    other = RunDirectory.resume(run.path, writer=False)
    other.write_config("another")
    other.write_plan("another")
    other.log_step(record(2))
    other.log_event("end", 2)
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before
    assert (other.config_text(), [item.step for item in other.metrics()]) == ("{}", [1])


def test_going_back_moves_lines_of_later_steps_to_another_file(run: RunDirectory):
    for step in (1, 2, 3):
        run.log_step(record(step))
    metrics, abandoned = run.path / "metrics.jsonl", run.path / "metrics.abandoned.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    assert run.go_back_to(3) == 0
    assert not abandoned.exists()
    assert run.go_back_to(1) == 2
    run.log_step(record(2, loss=4.5))
    assert [(item.step, item.loss) for item in run.metrics()] == [(1, 5.125), (2, 4.5)]
    assert abandoned.read_bytes() == b"".join(lines[1:])
    assert run.go_back_to(0) == 2
    assert len(abandoned.read_bytes().splitlines()) == 4, "nothing is lost"
    assert run.metrics() == []


@pytest.mark.parametrize(
    "garbage",
    [b"garbage", b"\xff\xfe\x00", b"[1, 2]", b'{"step": 2}', b'{"step": "2", "loss": 1}', b""],
)
def test_a_damaged_line_is_skipped_with_one_warning(run: RunDirectory, garbage: bytes):
    run.log_step(record(1))
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(garbage + b"\n")
    run.log_step(record(2))
    run.close()
    warned: list[str] = []
    resumed = RunDirectory.resume(run.path, warn=warned.append)
    assert [item.step for item in resumed.metrics()] == [1, 2]
    assert resumed.go_back_to(1) == 1
    resumed.log_step(record(2))
    assert [item.step for item in resumed.metrics()] == [1, 2]
    assert warned == [f"{run.path / 'metrics.jsonl'}, line 2, is damaged and skipped"]
    resumed.close()


def test_unknown_fields_of_another_version_are_accepted(run: RunDirectory):
    run.log_step(record(1))
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("}", ', "colour": "red"}'))
    assert run.metrics() == [record(1)]


def test_a_config_that_is_not_text_is_an_error(run: RunDirectory):
    (run.path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(RunDirectoryError, match=r"cannot be read(.|\n)*config\.json"):
        run.config_text()


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Limit the size of files to this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_is_not_appended_to_a_torn_one(tmp_path: Path):
    path = tmp_path / "log"
    for content, expected in ((b"", b"2\n"), (b"1\n", b"1\n2\n"), (b"1\nto", b"1\nto\n2\n")):
        path.write_bytes(content)
        append(path, b"2\n")
        assert path.read_bytes() == expected
    path.write_bytes(b"to")
    with full_disk(4), pytest.raises(OSError, match="part of a line"):
        append(path, b"3456\n")
    assert path.read_bytes() == b"to"


def test_log_lines_are_kept_until_the_disk_has_room(run: RunDirectory, warnings: list[str]):
    run.log_step(record(1))
    size = (run.path / "metrics.jsonl").stat().st_size
    with full_disk(size + 20):
        run.log_step(record(2))
        run.log_event("eval", 2)
        run.log_step(record(3))
        assert (run.path / "metrics.jsonl").stat().st_size == size, "no torn line"
        with pytest.raises(
            RunDirectoryError,
            match=r"metrics\.jsonl of the run cannot be read or written(.|\n)*do: ",
        ):
            run.check()
        assert len(warnings) == 1, "once, and not at every step"
    assert run.failure is None
    run.check()
    assert warnings[1:] == ["the logs of the run are written again, and no line is missing"]
    run.log_step(record(4))
    assert [item.step for item in run.metrics()] == [1, 2, 3, 4]
    assert [event["event"] for event in run.events()] == ["eval"]


def test_a_removed_directory_is_restored(run: RunDirectory, warnings: list[str]):
    run.write_plan("{}")
    run.log_step(record(1))
    shutil.rmtree(run.path)
    run.log_step(record(2))
    run.restore_files()
    assert (run.config_text(), run.plan_text()) == ("{}", "{}")
    assert "deleted during the run" in warnings[-1]
    run.check()
    assert [item.step for item in run.metrics()] == [2]
    with pytest.raises(RunDirectoryError, match="in use by process"):
        RunDirectory.resume(run.path)
    num_warnings = len(warnings)
    run.restore_files()
    assert len(warnings) == num_warnings


def test_a_config_that_does_not_fit_on_the_disk_is_an_error(run: RunDirectory):
    with full_disk(10), pytest.raises(RunDirectoryError, match="File too large"):
        run.write_config("{" + " " * 100 + "}")
    assert run.config_text() == "{}"
    assert not list(run.path.glob("*.tmp"))


def test_a_default_directory_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(
        ConfigError, match=f"cannot be made(.|\\n)*{tmp_path / 'runs'}(.|\\n)*--run-dir"
    ):
        RunDirectory.create(None, "gpt2")
    (tmp_path / "runs").unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    for path in (None, tmp_path / "run"):
        with pytest.raises(ConfigError, match=r"cannot be made(.|\n)*Permission denied"):
            RunDirectory.create(path, "gpt2")


def test_a_discarded_run_removes_its_files(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for name, is_left in (("new", False), ("mine", True)):
        run = RunDirectory.create(tmp_path / name, "gpt2")
        run.write_config("{}")
        run.write_plan("{}")
        run.log_event("start", 0)
        run.discard()
        run.close()
        assert run.path.exists() == is_left
        assert not list(run.path.glob("*"))


def test_a_run_with_checkpoints_or_steps_is_not_discarded(run: RunDirectory):
    (run.checkpoints / "1").mkdir()
    run.discard()
    assert run.config_text() == "{}"
    (run.checkpoints / "1").rmdir()
    run.log_step(record(1))
    run.discard()
    run.close()
    RunDirectory.resume(run.path).discard()
    assert run.config_text() == "{}"


def test_a_second_writer_is_refused(run: RunDirectory):
    with pytest.raises(RunDirectoryError, match="another process is writing this run"):
        RunDirectory.resume(run.path)
    (run.path / "config.json").unlink()
    (run.path / "checkpoints").rmdir()
    with pytest.raises(RunDirectoryError, match="another process is writing this run"):
        RunDirectory.create(run.path, "gpt2")
    assert RunDirectory(run.path, writer=False).metrics() == [], "reading needs no lock"
    run.close()
    RunDirectory.create(run.path, "gpt2").close()
