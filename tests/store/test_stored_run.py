"""A run's directory mirrored to a store and brought back; the store is fsspec's in memory."""

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


class Recorded(Objects):
    """Which notes what is written and deleted, and fails as often as it is told."""

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
    found = Recorded(Url("memory", f"{abs(hash(request.node.nodeid))}/run"))
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
    """As if it outlived its process."""
    monkeypatch.setattr(Url, "is_writable", True)


def started(directory, *starts, step=0):
    """Files of a run that was started at these times, and that has metrics until `step`."""
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
    """A checkpoint, which appears in one go."""
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
    """Everything that is there is uploaded."""
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


def test_a_checkpoint_is_complete_only_with_its_last_object(run):
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


def test_rotated_checkpoints_go_after_the_newer_one_is_complete(run):
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
    saved(run.directory, 3)  # the run has gone back to an earlier course
    shutil.rmtree(run.directory / "checkpoints" / "6")
    shutil.rmtree(run.directory / "checkpoints" / "4")
    mirrored(run, keep=2, keep_every=3)
    assert complete_steps(run.objects.sizes()) == [3]


def test_another_machine_goes_on_where_this_one_was_killed(run, tmp_path):
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
    # It trains on; the first machine comes back, is older, and gets what is new.
    started(there.directory, (1.0, 0), (2.0, 4), step=6)
    saved(there.directory, 6)
    mirrored(there)
    assert complete_steps(run.objects.sizes()) == [4, 6]
    run.fetch(lambda text: None)
    assert (run.directory / "checkpoints" / "6").is_dir()
    assert (run.directory / "events.jsonl").read_bytes() == (
        there.directory / "events.jsonl"
    ).read_bytes()


def test_what_is_newer_here_stays_and_is_uploaded(run):
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
    # It went back to an earlier checkpoint, the newest being damaged: that one stays away.
    started(run.directory, (1.0, 0), (2.0, 4), (3.0, 4), step=4)
    shutil.rmtree(run.directory / "checkpoints" / "8")
    before = content_of(run.directory)
    run.fetch(pytest.fail)
    assert content_of(run.directory) == before


def test_a_step_that_is_saved_again_is_uploaded_again(run):
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


def test_a_checkpoint_that_only_the_store_has_is_fetched(run):
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
def test_copies_that_both_went_on_are_left_alone(run, tmp_path, starts_there, starts_here):
    started(run.directory, *starts_here, step=8)
    saved(run.directory, 4)
    saved(run.directory, 8)  # which was not uploaded when another machine took over
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


def test_a_fetch_that_broke_off_is_begun_anew(run, tmp_path, monkeypatch):
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
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, tmp_path, damage):
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
    said = []
    there = elsewhere(run, tmp_path)
    there.fetch(said.append)
    assert os.listdir(there.directory / "checkpoints") == ["2"]
    assert any("step 4" in text and "skipped" in text for text in said)


def test_a_failed_upload_is_told_at_once_and_tried_again(run):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    run.objects.num_failures = 3
    told = []
    mirrored(run, warn=told.append)
    assert [text.partition(":")[0] for text in told] == ["an upload to memory", "uploads to memory"]
    assert complete_steps(run.objects.sizes()) == [4]


def test_what_cannot_be_uploaded_at_the_end_is_an_error_that_names_the_directory(run):
    started(run.directory, (1.0, 0), step=4)
    saved(run.directory, 4)
    run.objects.num_failures = 10**6
    with pytest.raises(StoreError, match=r"(?s)failed 6 times.*given:.*do:") as caught:
        mirrored(run, warn=lambda text: None)
    assert str(run.directory) in str(caught.value)
    assert (run.directory / "checkpoints" / "4").is_dir()


def test_ctrl_c_gives_up_an_upload_at_the_end(run, monkeypatch):
    monkeypatch.setattr(mirrors, "_LEAST_BACKOFF_S", 60.0)
    started(run.directory, (1.0, 0))
    run.objects.num_failures = 10**6
    mirror = mirror_of(run, warn=lambda text: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(StoreError, match="given up by Ctrl-C"):
        mirror.finish(lambda text: None)


def test_a_run_that_was_discarded_leaves_its_name_free(run):
    started(run.directory, (1.0, 0))
    mirror = mirror_of(run, every_s=1e-3)
    deadline_s = time.monotonic() + 30
    while "events.jsonl" not in run.objects.done and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (run.directory / "config.json").unlink()
    mirror.finish(lambda text: None)
    run.check_free()
    assert run.objects.sizes() == {}


def test_nothing_is_overwritten(run, tmp_path):
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


def test_where_it_works(run, tmp_path, memory_is_kept):
    named = StoredRun.at(run.url, None).directory
    assert named.parent == tmp_path / "cache" / "optimus_jax" / "runs"
    assert named != StoredRun.at(run.url / "x", None).directory
    assert StoredRun.at(run.url, str(tmp_path / "x")).directory == tmp_path / "x"
    config = Config(store=StoreConfig(local_dir=str(tmp_path / "y")))
    run.objects.write("config.json", config.to_json().encode())
    assert StoredRun.at(run.url, None).directory == tmp_path / "y", (
        "a run that goes on works where it did"
    )


def test_a_copy_to_read_is_brought_up_to_date(run):
    started(run.directory, (1.0, 0), step=2)
    saved(run.directory, 2)
    mirrored(run)

    def read(checkpoint=None):
        said = []
        copy = run_to_read(str(run.url), what="--run", checkpoint=checkpoint, say=said.append)
        return (
            copy,
            sorted(os.listdir(copy / "checkpoints")) if (copy / "checkpoints").exists() else [],
            len(said),
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
    told = []
    lease = Lease(objects, tmp_path, warn=told.append, pause=how.pop("pause", pytest.fail), **how)
    return lease, told


def test_one_writer_at_a_time(objects, tmp_path, monkeypatch):
    first, told = take(objects, tmp_path)
    assert not told

    def renewed(seconds):
        first._count += 1
        objects.write(LEASE, first._content())

    with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} on "):
        take(objects, tmp_path, pause=renewed)
    first.release()
    assert objects.read(LEASE) is None
    second, told = take(objects, tmp_path)
    # On another host, and not renewed: it has died.
    monkeypatch.setattr(leases, "_died_on_this_host", lambda held: False)
    waits = []
    third, told = take(objects, tmp_path, pause=waits.append)
    assert sum(waits) >= leases.EXPIRE_S
    assert len(told) == 1
    # It was alive after all, and finds out.
    lost = []
    second._on_lost = lost.append
    second.check()
    assert second.is_lost
    assert len(lost) == 1
    second.release()
    assert not third.is_lost
    assert objects.read(LEASE) is not None, "it is the other's"
    third.release()


def test_a_writer_that_was_killed_on_this_host_is_not_waited_for(objects, tmp_path):
    lease, _ = take(objects, tmp_path)
    held = json.loads(lease._content())
    for gone in ({"process": 2**22 + 1}, {"process_start": "1"}):
        objects.write(LEASE, json.dumps(held | gone).encode())
        take(objects, tmp_path)[0].release()
    lease.release()


def test_a_writer_that_lost_its_place_writes_no_more(run, tmp_path):
    started(run.directory, (1.0, 0), step=4)
    lease, _ = take(run.objects, run.directory)
    run.objects.write(LEASE, b'{"token": "another"}')
    saved(run.directory, 4)
    with pytest.raises(StoreError, match="another process has taken over this run"):
        mirrored(run, lease=lease)
    assert complete_steps(run.objects.sizes()) == []
    assert run.objects.read(LEASE) == b'{"token": "another"}'


def test_a_run_that_went_on_while_we_waited_is_not_gone_on_with(run, tmp_path):
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
