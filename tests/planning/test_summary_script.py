"""`optimus summary`: what a model and a data set consist of, for people and as JSON."""

import json
import subprocess
import sys

import numpy as np
import pytest
from in_process import SCRIPTS, Ended, run_in_process


def summary(*flags: str) -> Ended:
    return run_in_process("summary", *flags)


def test_script_describes_a_model_and_its_data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(2000)))
    flags = ("--model", "gpt2-nano", "--data", str(text), "--seq-len", "64")
    script = [sys.executable, SCRIPTS / "summary.py", *flags, "--json"]
    found = json.loads(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    assert found["data"]["seq_len"] == 64
    assert found["data"]["num_documents"] == 1
    output = summary(*flags, "--global-batch", "128", "--steps", "400").stdout
    assert "feed-forward" in output
    assert "packing" in output
    assert "note: 400 steps see the data" in output


def test_a_model_alone_needs_no_data():
    output = summary("--model", "llama3-8b", "--seq-len", "8192", "--precision", "bf16")
    assert "8,030,261,248 parameters" in output.stdout
    assert "packing" not in output.stdout


def test_data_is_read_as_a_run_reads_it(tmp_path):
    pairs = [{"chosen": f"yes {number}", "rejected": f"no {number}"} for number in range(200)]
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags = ("--model", "gpt2-nano", "--seq-len", "64", "--data", str(tmp_path / "pairs.jsonl"))
    shown = summary(*flags, "--set", "task=dpo", "--set", "model.tuning.method=lora", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["data"]["num_documents"] > 300
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(20):
            pixels = np.full((8, 8), number, np.uint8)
            pillow.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    refused = summary("--model", "vit-nano", "--data", str(tmp_path / "photos"))
    assert refused.returncode == 2
    assert "40 images" in refused.stderr or "images are neither packed nor cut" in refused.stderr


def test_invalid_arguments_end_with_an_error_message():
    for flags in (
        ("--model", "gpt9"),
        ("--model", "gpt2-nano", "--data", "nowhere.txt"),
        ("--model", "gpt2-nano", "--set", "seq_len"),
    ):
        refused = summary(*flags)
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
