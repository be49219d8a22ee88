"""No API or script takes `~` or a URL literally: no directory called `gs:` is ever created."""

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest

import optimus_jax
from optimus_jax.config import Config
from optimus_jax.config.request import read_config
from optimus_jax.data.tokenizers import load_tokenizer
from optimus_jax.devices.cpu import disable_compilation_cache_on_cpu
from optimus_jax.errors import ConfigError, OptimusError
from optimus_jax.inference.loading import load_text_model
from optimus_jax.report.run_report import run_report
from optimus_jax.run.command_line import run
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.paths import path_argument

LITERAL = (
    "gs:/b/x",
    "hf://b/x",
    "./s3://b/x",
    "https://h/x",
    "~nobody-of-this-name/x",
    "",
    "C:\\x",
)
"""Paths that are refused wherever something would be written."""


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Run in an empty directory, in which nothing may be created, with another home directory."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.chdir(here)
    yield home
    assert os.listdir(here) == []


def script(name, *arguments, monkeypatch):
    """The exit code of a script, run in this process."""
    module = import_module(f"optimus_jax.cli.{name}")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    for stream in ("stdout", "stderr"):  # restored when the test ends
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    return run(module.main)


@pytest.mark.parametrize("typed", LITERAL)
@pytest.mark.parametrize(
    "entry_point",
    [
        lambda text: optimus_jax.train("gpt2-nano", run_dir=text),
        lambda text: optimus_jax.train(run_dir=text, resume=True),
        lambda text: optimus_jax.train("gpt2-nano", run_dir=text, resume="auto"),
        lambda text: RunDirectory.create(text, "x"),
        lambda text: RunDirectory.resume(text),
        lambda text: Config().with_values({"checkpoint.snapshot_dir": text}),
        lambda text: Config().with_values({"store.local_dir": text}),
    ],
)
def test_unusable_output_paths_are_refused(entry_point, typed):
    with pytest.raises(ConfigError, match=r"(?s)given:.*do:"):
        entry_point(typed)


@pytest.mark.parametrize("typed", sorted(set(LITERAL) - {"https://h/x"}))
@pytest.mark.parametrize(
    "entry_point",
    [
        load_text_model,
        run_report,
        read_config,
        load_tokenizer,
        lambda text: optimus_jax.train("gpt2-nano", data=text),
        lambda text: optimus_jax.train("gpt2-nano", tokenizer=text),
        lambda text: optimus_jax.train("gpt2-nano", config=text),
        lambda text: optimus_jax.train(init_from=text),
        lambda text: optimus_jax.train("gpt2-nano", schedule=text),
        path_argument,
    ],
)
def test_unusable_input_paths_are_refused(entry_point, typed):
    with pytest.raises((OptimusError, argparse.ArgumentTypeError), match=r"(?s)given:.*do:"):
        entry_point(typed)


def test_a_tilde_means_the_home_directory(home, monkeypatch):
    RunDirectory.create("~/run", "x").write_config(Config().to_json())
    assert (home / "run" / "config.json").exists()
    assert read_config(Path("~/run/config.json")) == Config()
    with pytest.raises(ConfigError, match="already holds a run"):
        optimus_jax.train("gpt2-nano", run_dir="~/run")
    before = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    }
    try:
        jax.config.update("jax_compilation_cache_dir", "~/xla")
        assert disable_compilation_cache_on_cpu()
        assert jax.config.jax_compilation_cache_dir == str(home / "xla")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("tokenize", ["~/*.txt", "--out", "~/t.bin"], 0),
        ("tokenize", ["~/*.txt", "--out", "gs://b/t.bin"], 2),
        ("tokenize", ["~/*.txt", "--out", "~/u.bin", "--tokenizer", "ftp://x/y.json"], 2),
        ("schedule", ["--stages", "2", "--microbatches", "2", "--json", "~/s.json"], 0),
        ("schedule", ["--stages", "2", "--microbatches", "2", "--json", "gs://b/s.json"], 2),
        ("schedule", ["--stages", "2", "--microbatches", "2", "--picture", "s3://b/s.svg"], 2),
        ("schedule", ["--table", "gs:/b/s.json"], 2),
        ("report", ["gs:/b/run"], 2),
        ("report", ["~/no-run", "--out", "gs://b/x.html"], 2),
        ("launch", ["--processes", "1", "gs://b/x.py"], 2),
        ("simulate", ["--replay", "gs:/b/run"], 2),
        ("simulate", ["--scenario", "hf://b/x.json"], 2),
        ("generate", ["--run", "~nobody-of-this-name/x", "--prompt", "x"], 2),
        ("export", ["--run", "~nobody-of-this-name/x", "--to", "x"], 2),
        ("export", ["--run", "x", "--to", "s3://b/x"], 2),
        ("summary", ["--model", "gpt2-nano", "--data", "gs:/b/x.txt"], 2),
        ("profile", ["gs:/b/run"], 2),
        ("plan", ["--model", "gpt2-nano", "--cluster", "h100:1", "--schedule", "C:\\x.json"], 2),
    ],
)
def test_scripts_accept_tildes_and_refuse_urls(name, arguments, code, home, monkeypatch, capsys):
    (home / "a.txt").write_text("some text")
    assert script(name, *arguments, monkeypatch=monkeypatch) == code, capsys.readouterr().err
    if code:
        assert "do:" in capsys.readouterr().err
