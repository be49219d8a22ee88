"""A path typed by a user becomes a path, a URL, or an error that says what to do."""

import os
from pathlib import Path

import pytest

from optimus_jax.system.paths import (
    SCHEMES,
    PathError,
    Url,
    directory_of_environment,
    local_path,
    local_pattern,
    user_path,
)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "ho[m]e"))
    return tmp_path / "ho[m]e"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("runs/x", "runs/x"),
        ("/abs/x", "/abs/x"),
        (".", "."),
        ("~", "HOME"),
        ("~/", "HOME"),
        ("~/x", "HOME/x"),
        ("~//x", "HOME/x"),
        (Path("~/x"), "HOME/x"),
        ("./~", "~"),
        ("./~/x", "~/x"),
        ("a/~", "a/~"),
        ("x~", "x~"),
        ("$HOME/x", "$HOME/x"),
        ("a$b/${c}", "a$b/${c}"),
        ("file:///tmp/a%20b", "/tmp/a b"),
        ("FILE:///tmp/x", "/tmp/x"),
        ("file://localhost/tmp/x", "/tmp/x"),
        ("./gs:/x", "gs:/x"),
        ("./://x", ":/x"),
        ("a/://x", "a/:/x"),
        ("./ x", " x"),
        ("a:b", "a:b"),
        ("x y", "x y"),
        ("ünï", "ünï"),
        (b"a/b", "a/b"),
    ],
)
def test_local_paths_are_parsed(typed, expected, home):
    assert (
        user_path(typed, what="--run-dir")
        == local_path(typed, what="--run-dir")
        == Path(expected.replace("HOME", str(home)) if expected.startswith("HOME") else expected)
    )


def test_a_tilde_with_a_user_name_is_that_users_home(home):
    assert user_path("~root/x", what="--data") == Path(os.path.expanduser("~root")) / "x"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("gs://bucket/run", Url("gs", "bucket/run")),
        ("S3://bucket/run/", Url("s3", "bucket/run")),
        ("s3://bucket", Url("s3", "bucket")),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            Url("abfs", "container@account.dfs.core.windows.net/x"),
        ),
        ("https://host:8080/a//b.jsonl?x=1", Url("https", "host:8080/a//b.jsonl?x=1")),
        ("memory://a/~/$b", Url("memory", "a/~/$b")),
    ],
)
def test_urls_are_parsed_and_refused_where_a_local_path_is_needed(typed, expected):
    assert user_path(typed, what="--data") == expected
    with pytest.raises(PathError, match=r"checkpoint\.snapshot_dir cannot be a URL"):
        local_path(typed, what="checkpoint.snapshot_dir")


@pytest.mark.parametrize(
    "typed",
    [
        "",
        " ",
        "\t",
        "a\0b",
        " a",
        "a\n",
        "~nobody-of-this-name/x",
        "~+/x",
        "C:\\data",
        "c:/data",
        "\\\\server\\share",
        "\udcff",
        "a" * 256,
        "a/" * 2048 + "a",
        "gs:/bucket/x",
        "gs:x",
        Path("gs://bucket/x"),
        "file:/x",
        "file:x",
        "file://",
        "file:///",
        "file://host/x",
        "file://~/x",
        "file:///a%00b",
        "s3://",
        "s3:///x",
        "s3://b/../x",
        "s3://b//x",
        "s3://key:secret@b/x",
        "https://u:p@host/x",
        "s3://b/x::memory://y",
        "simplecache::s3://b/x",
        "hdfs://host/x",
        "hf://datasets/x",
        "gopher://x",
        "runs/gs://bucket/x",
        "./s3://bucket/x",
        "~/s3://bucket",
        3,
        None,
        True,
        ["a"],
    ],
)
def test_invalid_paths_are_refused_without_showing_secrets(typed):
    with pytest.raises(PathError, match=r"(?s)^--run-dir .*given:.*do:") as caught:
        user_path(typed, what="--run-dir")
    assert "secret" not in str(caught.value)


def test_a_tilde_without_a_home_directory_is_an_error(monkeypatch):
    monkeypatch.setenv("HOME", "")
    with pytest.raises(PathError, match="HOME is not an absolute path"):
        user_path("~/x", what="--run-dir")


def test_a_glob_works_in_a_home_directory_with_brackets(home):
    home.mkdir()
    (home / "a.txt").touch()
    import glob

    assert glob.glob(local_pattern("~/*.txt", what="--data")) == [str(home / "a.txt")]


def test_directories_in_environment_variables_are_parsed(monkeypatch, home):
    for text, expected in [("~/cache", home / "cache"), ("", None), ("/x", Path("/x"))]:
        monkeypatch.setenv("XDG_CACHE_HOME", text)
        assert directory_of_environment("XDG_CACHE_HOME") == expected
    monkeypatch.setenv("XDG_CACHE_HOME", "gs://bucket/cache")
    with pytest.raises(PathError, match="XDG_CACHE_HOME cannot be a URL"):
        directory_of_environment("XDG_CACHE_HOME")


def test_every_extra_of_a_url_scheme_is_declared():
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {scheme.extra for scheme in SCHEMES.values() if scheme.extra} <= set(extras)
