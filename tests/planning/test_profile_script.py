"""`optimus profile`: what a model and a data set consist of, for people and as JSON."""

import json
import subprocess
import sys
from pathlib import Path

PROFILE = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "profile.py")]


def run_script(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROFILE, *flags], capture_output=True, text=True, check=False)


def test_script_profiles_a_model_and_its_data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(2000)))
    found = json.loads(
        run_script("--model", "gpt2-nano", "--data", str(text), "--seq-len", "64", "--json").stdout
    )
    assert found["data"]["seq_len"] == 64
    assert found["data"]["num_documents"] == 1
    output = run_script(
        "--model",
        "gpt2-nano",
        "--data",
        str(text),
        "--seq-len",
        "64",
        "--global-batch",
        "128",
        "--steps",
        "400",
    ).stdout
    assert "feed-forward" in output
    assert "packing" in output
    assert "note: 400 steps see the data" in output


def test_a_model_alone_needs_no_data():
    output = run_script("--model", "llama3-8b", "--seq-len", "8192", "--precision", "bf16")
    assert "8,030,261,248 parameters" in output.stdout
    assert "packing" not in output.stdout


def test_invalid_arguments_end_with_an_error_message():
    for flags in (
        ("--model", "gpt9"),
        ("--model", "gpt2-nano", "--data", "nowhere.txt"),
        ("--model", "gpt2-nano", "--set", "seq_len"),
    ):
        refused = run_script(*flags)
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
