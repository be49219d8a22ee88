"""Local copies of data, tokenizers and configs from URLs: fetched once, complete, and again when
changed.
"""

import json
import os
import threading
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.request import read_config
from optimus_jax.data.dataset import load_data
from optimus_jax.data.sources import read_documents
from optimus_jax.data.tokenizers import ByteTokenizer, encode_documents
from optimus_jax.data.tokens import write_token_file
from optimus_jax.errors import ConfigError, DataError, StoreError
from optimus_jax.store import local_copies as copies
from optimus_jax.store.local_copies import local_copies, local_file
from optimus_jax.system.paths import Url


@pytest.fixture
def bucket(request, tmp_path, monkeypatch):
    """The name of a bucket, and a function that puts an object there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, system = f"b{abs(hash(request.node.nodeid))}", MemoryFileSystem()
    system.mkdir(f"/{name}")

    def put(key, content):
        system.pipe_file(f"/{name}/{key}", content)
        return f"memory://{name}/{key}"

    return name, put


def test_an_object_is_fetched_once_and_again_when_it_has_changed(bucket):
    name, put = bucket
    url, messages = Url("memory", f"{name}/a/[x].txt"), []
    put("a/[x].txt", b"first")  # a name with glob characters
    put("a/x.txt", b"other")
    for _ in range(2):
        (path,) = local_copies(url, say=messages.append)
        assert (path.name, path.read_bytes(), len(messages)) == ("[x].txt", b"first", 1)
    put("a/[x].txt", b"other")
    (changed,) = local_copies(url, say=messages.append)
    assert (changed.read_bytes(), path.read_bytes(), len(messages)) == (b"other", b"first", 2)


def test_a_glob_of_urls_has_the_order_of_local_files(bucket, tmp_path):
    name, put = bucket
    documents = {"a.txt": "one", "b-b/c.txt": "two", "b/c.txt": "three"}
    for key, text in documents.items():
        put(f"corpus/{key}", text.encode())
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_text(text)
    here = list(read_documents([f"{tmp_path}/**/*.txt"], "text"))
    assert list(read_documents([f"memory://{name}/corpus/**/*.txt"], "text")) == here


@pytest.mark.parametrize(("key", "is_advised"), [("corpus", True), ("corpus/*.txt", False)])
def test_a_url_of_a_folder_gets_the_advice_to_use_a_glob(bucket, key, is_advised):
    bucket[1]("corpus/a.jsonl", b"{}")
    with pytest.raises(StoreError) as error:
        local_copies(Url("memory", f"{bucket[0]}/{key}"))
    assert ("*.jsonl" in str(error.value)) == is_advised


def test_an_incomplete_fetch_leaves_no_file(bucket, monkeypatch):
    name, put = bucket
    put("x.txt", b"whole")
    monkeypatch.setattr(
        MemoryFileSystem,
        "get_file",
        lambda self, key, target, **_: Path(target).write_bytes(b"who"),
    )
    with pytest.raises(StoreError, match=r"its transfer was cut off(?s:.*)3 of 5 bytes"):
        local_copies(Url("memory", f"{name}/x.txt"))
    assert not [
        path
        for path in copies.cache_directory().rglob("*")
        if path.is_file() and path.suffix != ".lock"
    ]


def test_processes_of_a_host_fetch_an_object_once(bucket):
    name, put = bucket
    put("x.txt", b"text")
    messages, barrier = [], threading.Barrier(3)

    def fetch():
        barrier.wait()
        local_copies(Url("memory", f"{name}/x.txt"), say=messages.append)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(messages) == 1


def test_a_token_file_is_fetched_with_its_header(bucket, tmp_path):
    _, put = bucket
    tokenizer, here = ByteTokenizer(), tmp_path / "t.bin"
    write_token_file(here, encode_documents(tokenizer, ["some text to train on. "] * 9), tokenizer)
    url = put("t.bin", here.read_bytes())
    load = {"seq_len": 8, "vocab_size": 257, "model_name": "x"}
    with pytest.raises(DataError, match="no header"):
        load_data(DataConfig(sources=(url,)), **load)
    put("t.bin.json", (tmp_path / "t.bin.json").read_bytes())
    there = load_data(DataConfig(sources=(url,)), **load)
    assert there.identity == load_data(DataConfig(sources=(str(here),)), **load).identity


def test_configs_are_read_from_urls_and_the_home_directory(bucket, tmp_path, monkeypatch):
    _, put = bucket
    config = Config(seed=7).with_values({"store.local_dir": "/scratch/run"})
    url = put("config.json", config.to_json().encode())
    assert read_config(url) == Config(seed=7), "where another run works is no setting of a new one"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.json").write_text(config.to_json())
    assert read_config("~/c.json") == Config(seed=7)
    (tmp_path / "d.txt").write_text("text")
    assert (
        list(read_documents(["~/*.txt"], "text"))
        == list(read_documents([f"file://{tmp_path}/d.txt"], "text"))
        == ["text"]
    )


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("memory://no-such/x.txt", "check the URL"),
        ("memory://no-such/*.txt", "there is no object"),
        ("gs://bucket/x.txt", r"pip install 'optimus-jax\[gcs\]'"),
        ("abfss://c@a/x.txt", r"pip install 'optimus-jax\[azure\]'"),
    ],
)
def test_unreadable_urls_are_refused_with_a_remedy(url, wrong, bucket, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    monkeypatch.setitem(__import__("sys").modules, "adlfs", None)
    with pytest.raises(StoreError, match=rf"(?s)given:.*{wrong}|{wrong}.*do:"):
        local_file(url, what="--tokenizer")


@pytest.mark.parametrize(
    "setting",
    [
        {"data": ""},
        {"data": "gs:/x"},
        {"tokenizer": "ftp://x"},
        {"schedule": "C:\\x.json"},
        {"checkpoint.snapshot_dir": "s3://b/x"},
        {"store.local_dir": "s3://b/x"},
        {"data": "~no-such-user/x"},
    ],
)
def test_invalid_paths_in_settings_are_refused_at_once(setting):
    from optimus_jax.config.request import make_config

    with pytest.raises(ConfigError, match=r"(?s)^(--|checkpoint|store).*given:.*do:"):
        make_config("gpt2-nano", setting)


def test_the_cache_directory_does_not_depend_on_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value, expected in [("~/c", "home/c"), ("", "home/.cache"), ("c", "c")]:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert copies.cache_directory() == tmp_path / expected / "optimus_jax"
    assert json.dumps(os.listdir(tmp_path)) == "[]"
