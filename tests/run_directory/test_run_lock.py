"""The lock of a run directory: one writer at a time."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from optimus_jax.errors import RunDirectoryError
from optimus_jax.run_directory import lock as run_lock
from optimus_jax.run_directory.lock import LockedError, RunLock

HOLD = (
    "import sys, pathlib; from optimus_jax.run_directory.lock import RunLock; lock ="
    " RunLock(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
)


def test_a_second_process_is_refused_and_told_the_holder(tmp_path: Path):
    first = RunLock(tmp_path / "lock")
    with pytest.raises(
        RunDirectoryError,
        match=f"another process is writing(.|\\n)*process {os.getpid()} on {socket.gethostname()}",
    ):
        RunLock(tmp_path / "lock")
    first.release()
    first.release()
    RunLock(tmp_path / "lock").release()


def test_with_patience_a_process_waits_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, notices = RunLock(tmp_path / "lock"), list[str]()
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: first.release())
    RunLock(tmp_path / "lock", notices.append, patience_s=100.0).release()
    assert len(notices) == 1
    assert "waiting up to 100 s" in notices[0]


def test_waiting_for_the_lock_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, clock = RunLock(tmp_path / "lock"), [0.0]
    monkeypatch.setattr(
        run_lock,
        "time",
        SimpleNamespace(
            monotonic=lambda: clock[0], sleep=lambda time_s: clock.append(clock.pop() + time_s)
        ),
    )
    with pytest.raises(RunDirectoryError, match="another process is writing"):
        RunLock(tmp_path / "lock", lambda _: None, patience_s=7.5)
    assert clock == [7.5]
    first.release()


def test_a_lock_whose_file_was_removed_is_not_acquired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A failed start removes its files, including the lock: writing to the removed directory would
    be lost.
    """
    first = RunLock(tmp_path / "lock")

    def go(seconds: float) -> None:
        (tmp_path / "lock").unlink()
        first.release()

    monkeypatch.setattr("time.sleep", go)
    with pytest.raises(LockedError):
        RunLock(tmp_path / "lock", lambda text: None, patience_s=60.0)
    RunLock(tmp_path / "lock").release()


def test_a_lock_is_released_when_its_process_dies(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"process {holder.pid} on"):
            RunLock(tmp_path / "lock")
        holder.kill()
        holder.wait()
    RunLock(tmp_path / "lock").release()


def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    warned: list[str] = []
    RunLock(tmp_path / "lock", warned.append).release()
    assert "ENOLCK" in warned[0]


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(RunDirectoryError, match=r"cannot be written(.|\n)*No such file"):
        RunLock(tmp_path / "missing" / "lock")
