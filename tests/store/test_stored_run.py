"""A run directory mirrored to an object store and fetched from it; the store is fsspec's
in memory.
"""

import json
import os
import shutil
import signal
import time

import pytest

from optimus_jax.config import CheckpointConfig, Config, StoreConfig
from optimus_jax.errors import ConfigError, StoreError
from optimus_jax.run.stored_run import StoredRun, run_to_read
from optimus_jax.run_directory.directory import RunExistsError
from optimus_jax.store import lease as leases
from optimus_jax.store import mirror as mirrors
from optimus_jax.store.lease import LEASE, Lease, LeaseHeldError
from optimus_jax.store.mirror import Mirror
from optimus_jax.store.objects import Objects
from optimus_jax.store.run_objects import complete_steps
from optimus_jax.system.paths import Url


class RecordingObjects(Objects):
    """An object store that records writes and deletions, and fails `num_failures` times."""

    def __init__(self, url):
        super().__init__(url)
        self.done, self.num_failures = [], 0

    def _fail(self):
        if self.num_failures > 0:
            self.num_failures -= 1
            raise StoreError("the store cannot be reached")

    def write(self, name, content):
        self._fail()
        super().write(name, content)
        self.done.append(name)

    def put(self, source, name):
        self._fail()
        super().put(source, name)
        self.done.append(name)

    def delete(self, names):
        names = list(names)
        super().delete(names)
        self.done += [f"-{name}" for name in names]


@pytest.fixture
def objects(request):
    found = RecordingObjects(Url("memory", f"{abs(hash(request.node.nodeid))}/run"))
    found._fs.mkdir(found._root.rpartition("/")[0])
    return found


@pytest.fixture
def run(objects, tmp_path):
    return StoredRun(url=objects.url, objects=objects, directory=tmp_path / "here")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch, tmp_path):
    monkeypatch.setattr(mirrors, "_LEAST_BACKOFF_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def memory_is_kept(monkeypatch):
    """Treat the memory store as if it outlived its process."""
    monkeypatch.setattr(Url, "is_writable", True)


def started(directory, *starts, step=0):
    """Write the files of a run with these starts (time, step) and with metrics until `step`."""
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(Config().to_json())
    events = [
        {"event": "resume" if at else "start", "time_s": time_s, "step": at}
        for time_s, at in starts
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (directory / "metrics.jsonl").write_text(
        "".join(f'{{"step": {k}}}\n' for k in range(1, step + 1))
    )
    (directory / "lock").touch()
    (directory / "progress").mkdir(exist_ok=True)
    (directory / "progress" / "0").touch()


def saved(directory, step, content="weights"):
    """Write a checkpoint, which appears atomically."""
    unfinished = directory / "checkpoints" / f"{step}.orbax-checkpoint-tmp"
    (unfinished / "state" / "d").mkdir(parents=True)
    (unfinished / "state" / "d" / "data").write_text(f"{content} of {step}")
    (unfinished / "_METADATA").write_text("{}")
    unfinished.rename(directory / "checkpoints" / str(step))


def mirror_of(run, keep=2, keep_every=None, warn=pytest.fail, lease=None, every_s=1e9):
    return Mirror(
        run.directory,
        run.objects,
        staging=run._staging,
        lease=lease,
        every_s=every_s,
        keep=keep,
        keep_every=keep_every,
        warn=warn,
        settle_s=0,
    )


def mirrored(run, keep=2, keep_every=None, warn=pytest.fail, lease=None):
    """Upload everything in the run directory."""
    mirror = mirror_of(run, keep, keep_every, warn, lease)
    mirror.finish(lambda text: None)


def elsewhere(run, tmp_path, name="there"):
    """The same run, on another machine."""
    return StoredRun(url=run.url, objects=run.objects, directory=tmp_path / name)


def content_of(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_what_others_wrote_stays_in_the_directory(objects, tmp_path):
    stored = StoredRun(url=objects.url, objects=objects, directory=tmp_path / "work" / "run")
    for name in ("config.json", "events.jsonl", f"{tmp_path}/absolute", "../above", "a/../../up"):
        objects.write(name, b"{}")
    stored.fetch_copy("none", lambda text: None)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[:2] for path in files} == {("work", "run"), ("work", "run.transfer")}


def test_a_checkpoint_is_complete_only_with_its_manifest(run):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    mirrored(run)
    done = run.objects.done
    assert done.index("checkpoints/4.json") > max(
        done.index(name) for name in done if name.startswith("checkpoints/4/")
    )
    assert done.index("checkpoints/4.json") > done.index("metrics.jsonl"), (
        "no log ends before a checkpoint that is there"
    )
    names = run.objects.sizes()
    assert not any(name.startswith(("lock", "progress")) or "tmp" in name for name in names)
    assert not run._staging.exists()


def test_old_checkpoints_are_deleted_after_a_newer_one_is_complete(run):
    started(run.directory, (1.0, 0))
    for step in (2, 4, 5):
        saved(run.directory, step)
        mirrored(run)
    shutil.rmtree(run.directory / "checkpoints" / "2")
    shutil.rmtree(run.directory / "checkpoints" / "5")
    saved(run.directory, 6)
    run.objects.done.clear()
    mirrored(run, keep=2, keep_every=None)
    done = run.objects.done
    assert complete_steps(run.objects.sizes()) == [4, 5, 6], (
        "two newest in the store, and what is here"
    )
    assert done.index("-checkpoints/2.json") > done.index("checkpoints/6.json")
    assert done.index("-checkpoints/2.json") < done.index("-checkpoints/2/_METADATA"), (
        "half of one is none"
    )
    saved(run.directory, 3)  # the run has gone back to an earlier step
    shutil.rmtree(run.directory / "checkpoints" / "6")
    shutil.rmtree(run.directory / "checkpoints" / "4")
    mirrored(run, keep=2, keep_every=3)
    assert complete_steps(run.objects.sizes()) == [3]


def test_another_machine_resumes_a_killed_run_from_the_store(run, tmp_path):
    started(run.directory, (1.0, 0), step=5)
    saved(run.directory, 2)
    saved(run.directory, 4)
    mirrored(run)
    there = elsewhere(run, tmp_path)
    there.fetch(lambda text: None)
    assert content_of(there.directory) == {
        name: content
        for name, content in content_of(run.directory).items()
        if not name.startswith(("lock", "progress", "checkpoints/2/"))
    }
    # It continues training; the first machine returns, is older, and fetches what is new.
    started(there.directory, (1.0, 0), (2.0, 4), step=6)
    saved(there.directory, 6)
    mirrored(there)
    assert complete_steps(run.objects.sizes()) == [4, 6]
    run.fetch(lambda text: None)
    assert (run.directory / "checkpoints" / "6").is_dir()
    assert (run.directory / "events.jsonl").read_bytes() == (
        there.directory / "events.jsonl"
    ).read_bytes()


def test_newer_local_files_are_kept_and_uploaded(run):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    mirrored(run)
    started(run.directory, (1.0, 0), (2.0, 4), step=8)
    saved(run.directory, 8)
    before = content_of(run.directory)
    run.fetch(pytest.fail)
    assert content_of(run.directory) == before
    mirrored(run)
    assert complete_steps(run.objects.sizes()) == [4, 8]
    # It went back to an earlier checkpoint, since the newest was damaged: that one is not fetched
    # again.
    started(run.directory, (1.0, 0), (2.0, 4), (3.0, 4), step=4)
    shutil.rmtree(run.directory / "checkpoints" / "8")
    before = content_of(run.directory)
    run.fetch(pytest.fail)
    assert content_of(run.directory) == before


def test_a_checkpoint_saved_again_is_uploaded_again(run):
    started(run.directory, (1.0, 0))
    saved(run.directory, 4)
    saved(run.directory, 6)
    mirrored(run)
    started(run.directory, (1.0, 0), (2.0, 4))
    shutil.rmtree(run.directory / "checkpoints" / "6")
    mirror = mirror_of(run, every_s=1e-3)
    deadline_s = time.monotonic() + 30
    while mirror._complete is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    saved(run.directory, 6, "other weights")
    mirror.finish(lambda text: None)
    shutil.rmtree(run.directory)
    run.fetch(lambda text: None)
    data = run.directory / "checkpoints" / "6" / "state" / "d" / "data"
    assert data.read_text() == "other weights of 6"


def test_a_checkpoint_missing_locally_is_fetched(run):
    started(run.directory, (1.0, 0), step=9)
    saved(run.directory, 8)
    mirrored(run)
    shutil.rmtree(run.directory / "checkpoints" / "8")
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10}\n')
    run.fetch(lambda text: None)
    assert os.listdir(run.directory / "checkpoints") == ["8"]
    assert (run.directory / "metrics.jsonl").read_text().endswith('{"step": 10}\n'), "logs stay"


@pytest.mark.parametrize("starts_there", [[(1.0, 0), (3.0, 4)], [(9.0, 0)]])
@pytest.mark.parametrize("starts_here", [[(1.0, 0)], [(1.0, 0), (2.0, 4)]])
def test_diverged_copies_of_a_run_are_refused_and_left_unchanged(
    run, tmp_path, starts_there, starts_here
):
    started(run.directory, *starts_here, step=8)
    saved(run.directory, 4)
    saved(run.directory, 8)  # not yet uploaded when another machine took over
    there = elsewhere(run, tmp_path)
    started(there.directory, *starts_there, step=6)
    saved(there.directory, 6)
    mirrored(there)
    before = content_of(run.directory)
    with pytest.raises(StoreError, match="have both been trained") as caught:
        run.fetch(pytest.fail)
    assert str(run.directory) in str(caught.value)
    assert str(run.url) in str(caught.value)
    assert content_of(run.directory) == before


def test_an_interrupted_fetch_starts_anew(run, tmp_path, monkeypatch):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    mirrored(run)
    there = elsewhere(run, tmp_path)
    get = Objects.get

    def broken(self, name, target):
        if name == "config.json":
            raise StoreError("broken off")
        return get(self, name, target)

    monkeypatch.setattr(Objects, "get", broken)
    with pytest.raises(StoreError):
        there.fetch(lambda text: None)
    monkeypatch.undo()
    there.fetch(lambda text: None)
    assert there.is_begun
    assert (there.directory / "checkpoints" / "4").is_dir()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "manifest"])
def test_a_damaged_checkpoint_is_skipped_for_an_older_one(run, tmp_path, damage):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 2)
    saved(run.directory, 4)
    mirrored(run)
    name = "checkpoints/4/state/d/data"
    if damage == "gone":
        run.objects._fs.rm_file(run.objects._key(name))
    elif damage == "manifest":
        run.objects.write("checkpoints/4.json", b"{")
    else:
        run.objects.write(name, b"weights o" if damage == "cut" else b"weightz of 4")
    messages = []
    there = elsewhere(run, tmp_path)
    there.fetch(messages.append)
    assert os.listdir(there.directory / "checkpoints") == ["2"]
    assert any("step 4" in text and "skipped" in text for text in messages)


def test_a_failed_upload_is_reported_at_once_and_retried(run):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    run.objects.num_failures = 3
    warnings = []
    mirrored(run, warn=warnings.append)
    assert [text.partition(":")[0] for text in warnings] == [
        "an upload to memory",
        "uploads to memory",
    ]
    assert complete_steps(run.objects.sizes()) == [4]


def test_a_final_upload_that_fails_is_an_error_with_the_directory(run):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    run.objects.num_failures = 10**6
    with pytest.raises(StoreError, match=r"(?s)failed 6 times.*given:.*do:") as caught:
        mirrored(run, warn=lambda text: None)
    assert str(run.directory) in str(caught.value)
    assert (run.directory / "checkpoints" / "4").is_dir()


def test_ctrl_c_gives_up_the_final_upload(run, monkeypatch):
    monkeypatch.setattr(mirrors, "_LEAST_BACKOFF_S", 60.0)
    started(run.directory, (1.0, 0))
    run.objects.num_failures = 10**6
    mirror = mirror_of(run, warn=lambda text: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(StoreError, match="given up by Ctrl-C"):
        mirror.finish(lambda text: None)


def test_a_discarded_run_leaves_no_objects(run):
    started(run.directory, (1.0, 0))
    mirror = mirror_of(run, every_s=1e-3)
    deadline_s = time.monotonic() + 30
    while "events.jsonl" not in run.objects.done and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (run.directory / "config.json").unlink()
    mirror.finish(lambda text: None)
    run.check_free()
    assert run.objects.sizes() == {}


def test_existing_objects_are_not_overwritten(run, tmp_path):
    run.check_free()
    run.objects.write(LEASE, b"{}")
    run.check_free()
    run.objects.write("notes.txt", b"")
    with pytest.raises(ConfigError, match=r"do not belong to a run(?s:.*)notes.txt"):
        run.check_free()
    run.objects.write("config.json", Config().to_json().encode())
    with pytest.raises(RunExistsError, match=f"{run.url} --resume"):
        run.check_free()
    with pytest.raises(ConfigError, match="no run can be kept"):
        StoredRun.at(Url("https", "host/run"), None)
    other = StoredRun(url=run.url / "x", objects=Objects(run.url / "x"), directory=tmp_path / "x")
    with pytest.raises(ConfigError, match="there is no run to resume"):
        other.fetch(pytest.fail)


def test_the_local_directory_comes_from_the_url_or_the_config(run, tmp_path, memory_is_kept):
    named = StoredRun.at(run.url, None).directory
    assert named.parent == tmp_path / "cache" / "optimus_jax" / "runs"
    assert named != StoredRun.at(run.url / "x", None).directory
    assert StoredRun.at(run.url, str(tmp_path / "x")).directory == tmp_path / "x"
    config = Config(store=StoreConfig(local_dir=str(tmp_path / "y")))
    run.objects.write("config.json", config.to_json().encode())
    assert StoredRun.at(run.url, None).directory == tmp_path / "y", (
        "a run that goes on works where it did"
    )


def test_a_copy_for_reading_is_updated_from_the_store(run):
    started(run.directory, (1.0, 0), step=2)
    saved(run.directory, 2)
    mirrored(run)

    def read(checkpoint=None):
        messages = []
        copy = run_to_read(str(run.url), what="--run", checkpoint=checkpoint, say=messages.append)
        return (
            copy,
            sorted(os.listdir(copy / "checkpoints")) if (copy / "checkpoints").exists() else [],
            len(messages),
        )

    assert read("none")[1:] == ([], 0)
    assert read()[1:] == (["2"], 1)
    assert read()[1:] == (["2"], 0), "it is not fetched again"
    saved(run.directory, 4)
    mirrored(run)
    assert read()[1:] == (["2", "4"], 1)
    assert read(2)[1:] == (["2", "4"], 0)
    assert (read("none")[0] / "metrics.jsonl").read_bytes() == (
        run.directory / "metrics.jsonl"
    ).read_bytes()
    with pytest.raises(ConfigError, match=r"no complete checkpoint of step 3(?s:.*)steps 2, 4"):
        read(3)
    assert run_to_read("~/x", what="--run", say=pytest.fail).name == "x"


def take(objects, tmp_path, **how):
    warnings = []
    lease = Lease(
        objects, tmp_path, warn=warnings.append, pause=how.pop("pause", pytest.fail), **how
    )
    return lease, warnings


def test_a_second_writer_waits_for_the_lease(objects, tmp_path, monkeypatch):
    first, warnings = take(objects, tmp_path)
    assert not warnings

    def renewed(seconds):
        first._count += 1
        objects.write(LEASE, first._content())

    with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} on "):
        take(objects, tmp_path, pause=renewed)
    first.release()
    assert objects.read(LEASE) is None
    second, warnings = take(objects, tmp_path)
    # On another host and not renewed: the holder counts as dead.
    monkeypatch.setattr(leases, "_died_on_this_host", lambda held: False)
    waits = []
    third, warnings = take(objects, tmp_path, pause=waits.append)
    assert sum(waits) >= leases.EXPIRE_S
    assert len(warnings) == 1
    # It was alive after all, and notices that the lease is lost.
    lost = []
    second._on_lost = lost.append
    second.check()
    assert second.is_lost
    assert len(lost) == 1
    second.release()
    assert not third.is_lost
    assert objects.read(LEASE) is not None, "it is the other's"
    third.release()


def test_a_writer_killed_on_this_host_is_not_waited_for(objects, tmp_path):
    lease, _ = take(objects, tmp_path)
    held = json.loads(lease._content())
    for gone in ({"process": 2**22 + 1}, {"process_start": "1"}):
        objects.write(LEASE, json.dumps(held | gone).encode())
        take(objects, tmp_path)[0].release()
    lease.release()


def test_a_writer_that_lost_its_lease_uploads_nothing(run, tmp_path):
    started(run.directory, (1.0, 0), step=4)
    lease, _ = take(run.objects, run.directory)
    run.objects.write(LEASE, b'{"token": "another"}')
    saved(run.directory, 4)
    with pytest.raises(StoreError, match="another process has taken over this run"):
        mirrored(run, lease=lease)
    assert complete_steps(run.objects.sizes()) == []
    assert run.objects.read(LEASE) == b'{"token": "another"}'


def test_a_resume_is_refused_if_the_run_continued_during_the_wait(run, tmp_path):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    mirrored(run)
    there = elsewhere(run, tmp_path)
    there.fetch(lambda text: None)
    saved(run.directory, 5)
    mirrored(run)
    arguments = {"warn": pytest.fail, "on_lost": pytest.fail, "patience_s": 0.0}
    with pytest.raises(LeaseHeldError, match="continued the run while"):
        there.mirror(CheckpointConfig(), StoreConfig(), is_resumed=True, **arguments)
    with pytest.raises(RunExistsError):
        there.mirror(CheckpointConfig(), StoreConfig(), is_resumed=False, **arguments)
    assert run.objects.read(LEASE) is None
