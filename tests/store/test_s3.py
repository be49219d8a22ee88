"""A run on a local S3 server (moto): killed, its directory lost, resumed."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import optimus_jax
from optimus_jax.errors import StoreError
from optimus_jax.inference.loading import load_text_model
from optimus_jax.run_directory.directory import RunExistsError
from optimus_jax.store.objects import Objects
from optimus_jax.store.run_objects import complete_steps
from optimus_jax.system.paths import Url

TINY = {
    "steps": 6,
    "global_batch": 8,
    "seq_len": 32,
    "lr": 1e-2,
    "eval_every": 0,
    "progress": "none",
    "mesh": "data=8",
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "checkpoint.every": 2,
}
DATA, RUN = "s3://bucket/corpus/*.jsonl", "s3://bucket/runs/one"
KILLED = f"""
import os, signal, time
import optimus_jax
from optimus_jax.system.paths import Url
from optimus_jax.store.objects import Objects
from optimus_jax.run_directory.directory import RunDirectory

log_step, there = RunDirectory.log_step, Objects(Url("s3", "bucket/runs/one"))

def log_or_die(self, record):
    log_step(self, record)
    while record.step == 5:
        if there.read("checkpoints/4.json") is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)

RunDirectory.log_step = log_or_die
optimus_jax.train("gpt2-nano", data={DATA!r}, run_dir={RUN!r}, **{TINY!r})
"""


@pytest.fixture(scope="module")
def s3():
    """A server with a corpus in a bucket, in the environment of this process and its children."""
    moto_server = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        system = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        system.mkdir("bucket")
        lines = [
            json.dumps({"text": f"{n} bottles of beer, take {n % 7} down and pass them around."})
            for n in range(300)
        ]
        for part in (0, 1):
            system.pipe_file(f"bucket/corpus/{part}.jsonl", "\n".join(lines[part::2]).encode())
        yield system
    server.stop()


def losses(result):
    assert [record.step for record in result.history] == list(range(1, 7)), (
        "each step once, in order"
    )
    return [record.loss for record in result.history]


def test_a_killed_run_resumes_without_its_local_directory(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    url = Url("s3", "bucket/runs/one")
    assert max(complete_steps(Objects(url).sizes())) == 4
    (directory,) = (
        path for path in (tmp_path / "optimus_jax" / "runs").iterdir() if path.suffix != ".transfer"
    )
    shutil.rmtree(tmp_path / "optimus_jax")  # runs, and copies of the data
    with pytest.raises(RunExistsError, match=f"{RUN} --resume"):
        optimus_jax.train("gpt2-nano", data=DATA, run_dir=RUN, **TINY)

    resumed = optimus_jax.train(run_dir=RUN, resume=True, progress="none")

    assert resumed.run_dir == directory
    whole = optimus_jax.train("gpt2-nano", data=DATA, run_dir=tmp_path / "whole", **TINY)
    assert losses(resumed) == losses(whole), "bit for bit"
    names = Objects(url).sizes()
    assert complete_steps(names)[-2:] == [4, 6]
    assert "writer.json" not in names
    for name in ("config.json", "plan.json", "metrics.jsonl", "events.jsonl"):
        assert Objects(url).read(name) == (directory / name).read_bytes(), name
    shutil.rmtree(directory)
    assert load_text_model(RUN, warn=lambda text: None).step == 6
    assert not {"s3:", "~"} & set(os.listdir(tmp_path))


def test_a_missing_bucket_or_credentials_are_errors_with_a_remedy(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StoreError, match=r"bucket does not exist(?s:.*)do: +check the URL"):
        optimus_jax.train("gpt2-nano", data=DATA, run_dir="s3://no-such-bucket/run", **TINY)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(Path(tmp_path, "none")))
    with pytest.raises(StoreError, match=r"(?s)redentials.*do: +give credentials"):
        optimus_jax.train("gpt2-nano", data=DATA, run_dir=RUN, resume=True)


def test_an_object_is_created_only_once(s3):
    objects = Objects(Url("s3", "bucket/x"))
    assert objects.create("writer.json", b"one")
    assert not objects.create("writer.json", b"two")
    assert objects.read("writer.json") == b"one"
    objects.delete(["writer.json", "never-there"])
    assert objects.read("writer.json") is None
