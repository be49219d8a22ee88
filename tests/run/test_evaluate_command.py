"""A run's model measured again, on another mesh and on other data."""

import json
import math
import sys

import numpy as np
import pytest
from helpers import F32_RELATIVE
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.cli import evaluate as command
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import CheckpointError, ConfigError, DataError
from optimus_jax.run.evaluate import _bytes_in
from optimus_jax.run_directory.directory import RunDirectory

OPTIONS = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "seq_len": 32,
    "global_batch": 8,
    "lr": 1e-2,
    "progress": "none",
    "control": "off",
    "evaluation.examples": 12,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on texts, with a held-out part."""
    folder = tmp_path_factory.mktemp("evaluated")
    texts = [
        f"the sum of {n} and {n} is {2 * n}, and that of {n} and 1 {n + 1}" for n in range(200)
    ]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    optimus_jax.train(
        "gpt2-nano",
        data=str(folder / "texts.jsonl"),
        mesh="data=2,fsdp=2,tensor=2",
        steps=6,
        eval_every=3,
        run_dir=folder / "run",
        **{"data.eval_fraction": 0.2},
        **OPTIONS,
    )
    return folder / "run"


def evaluations(run):
    return {each["step"]: each for each in RunDirectory(run).events() if each["event"] == "eval"}


def test_what_a_run_holds_out_has_the_loss_of_its_own_evaluation(run):
    last = evaluations(run)[6]
    found = optimus_jax.evaluate(run, examples=12, mesh="pipe=2,data=4", warn=lambda text: None)
    assert found.loss == pytest.approx(last["loss"], rel=F32_RELATIVE)
    assert found.num_terms == last["tokens"]
    assert found.perplexity == pytest.approx(last["perplexity"], rel=F32_RELATIVE)
    assert found.bits_per_byte == pytest.approx(last["bits_per_byte"], rel=F32_RELATIVE)
    assert found.weights.endswith("run@6")
    assert found.term == "token"
    loaded = optimus_jax.load(run, warn=lambda text: None)
    whole = loaded.evaluate(mesh="data=8", seq_len=16)
    assert whole.num_examples > found.num_examples == 12
    assert whole.num_terms <= 16 * whole.num_examples


def test_other_data_is_measured_whole(run, capsys, monkeypatch, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("the sum of 3 and 4 is 7. " * 40)
    words = ["evaluate", "--run", str(run), "--data", str(other), "--mesh", "data=8", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    command.main()
    found = json.loads(capsys.readouterr().out)
    assert found["num_examples"] == (len(other.read_bytes()) + 1) // 32
    assert 0 < found["loss"] < math.log(model_preset("gpt2-nano").vocab_size)
    monkeypatch.setattr(sys, "argv", [*words[:-1], "--examples", "2"])
    command.main()
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["examples  ".strip()].strip().startswith("2, ")


def test_what_cannot_be_measured_is_said(run, tmp_path):
    with pytest.raises(CheckpointError, match="step 5"):
        optimus_jax.evaluate(run, step=5, mesh="data=8", warn=lambda text: None)
    with pytest.raises(ConfigError, match="two steps"):
        optimus_jax.evaluate(f"{run}@6", step=5, warn=lambda text: None)
    with pytest.raises(ConfigError, match="no weights"):
        optimus_jax.evaluate(run, data=["a=1:x.txt", "b=2:y.txt"], warn=lambda text: None)
    other = tmp_path / "other.txt"
    other.write_text("short")
    with pytest.raises(DataError, match="shorter than one example"):
        optimus_jax.evaluate(run, data=other, mesh="data=8", warn=lambda text: None)


def test_bytes_of_other_tokens_are_those_of_their_text():
    class Words:
        eos = 9

        def decode(self, tokens):
            return "".join({1: "a", 2: "bc", 3: "é"}[token] for token in tokens)

    batch = {
        "targets": np.array([[1, 2, 9, 3], [3, 3, 2, 1]]),
        "segments": np.array([[0, 0, 0, 1], [0, 0, 0, 0]]),
        "loss_mask": np.array([[True, True, True, True], [True, False, True, False]]),
    }
    assert _bytes_in(batch, Words()) == 3 + 2 + 2 + 2
