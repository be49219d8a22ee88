"""benchmarks/gpu without a GPU: its rows, what it does not believe, and what it feeds the kernels."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def test_each_case_is_measured_once_for_each_commit(tmp_path):
    def measured(*more):
        ended = subprocess.run([sys.executable, FOLDER / "run.py", "--smoke", "--only", "ours", "--out", tmp_path / "rows.jsonl", *more],
                               capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    shown, [row] = measured("--commit", "one")
    assert "failed" not in row, row
    assert (row["attention"], row["model"], row["commit"]) == ("xla", "gpt2-nano", "one")
    assert row["spread_s"][0] <= row["step_s"] <= row["spread_s"][1]
    assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["seq_len"] / row["step_s"])
    assert row["loss"] < row["first_loss"]
    assert "gpt2-nano 4 x 128 | optimus_jax |" in shown
    assert f"{row['date']}, commit one, " in shown
    assert f"optimus_jax: {row['version']}" in shown
    assert len(measured("--commit", "one")[1]) == 1
    assert [each["commit"] for each in measured("--commit", "two")[1]] == ["one", "two"]


def test_pytorch_trains_models_of_the_same_sizes(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    ended = subprocess.run([sys.executable, FOLDER / "run.py", "--smoke", "--only", "eager", "--out", tmp_path / "rows.jsonl"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["name"], row["weights"]) for row in rows] == [("gpt2-nano 4 x 128", "f32"), ("llama-nano 4 x 128, all in bf16", "bf16")]
    for row in rows:
        assert "failed" not in row, row
        assert row["loss"] < row["first_loss"]


@pytest.mark.parametrize(("first", "last"), [(math.nan, math.nan), (5.5, math.nan), (0.0, -1.0), (9.0, 5.5), (5.5, 5.5)])
def test_steps_that_do_not_train_are_a_failure(first, last, scripts):
    from cases import check_losses

    check_losses(5.6, 5.5, 256)
    with pytest.raises(SystemExit, match="no training steps"):
        check_losses(first, last, 256)


@pytest.mark.parametrize(("batch", "length"), [(8, 1024), (2, 4096)])
def test_the_kernels_are_given_rows_of_short_and_of_long_documents(batch, length, scripts):
    from kernels import documents

    numbers = documents(batch, length)
    lengths = [length / len(np.unique(row)) for row in numbers]
    assert lengths == sorted(lengths)
    assert 8 < lengths[0] < 32
    assert lengths[-1] == length
