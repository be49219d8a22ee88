"""The command line: help on one screen, and one clear message with exit code 2 for whatever a user gets wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SCREEN_LINES, SCREEN_COLUMNS = 40, 120


def train(*arguments):
    return subprocess.run([sys.executable, SCRIPTS / "train.py", *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("A man, a plan, a canal: Panama. " * 400)
    return path


def test_help_fits_a_screen_and_shows_defaults():
    shown = train("--help")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    flags = [line for line in lines if re.match(r"  --(?!model|set|resume|help|coordinator|num-proc|process)", line)]
    assert all("(default: " in line for line in flags), [line for line in flags if "default" not in line]


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "no model was named"),
    (("--model", "gpt3"), "unknown model 'gpt3'[\\s\\S]*did you mean 'gpt2'"),
    (("--model", "gpt2-nano", "--global-bach", "8"), "unknown argument '--global-bach'[\\s\\S]*did you mean '--global-batch'"),
    (("--model", "gpt2-nano", "--set", "optimizer.bta2=0.9"), "did you mean 'optimizer.beta2'"),
    (("--model", "gpt2-nano", "--set", "optimizer.beta2"), "--set needs a name and a value"),
    (("--model", "gpt2-nano", "--steps", "many"), "steps has the wrong type"),
    (("--model", "gpt2-nano", "--precision", "fp16"), "did you mean 'f16'"),
    (("--model", "gpt2-nano", "--seq-len", "512"), "longer than the positions of gpt2-nano[\\s\\S]*256"),
    (("--model", "gpt2-nano", "--cpu-devices", "2", "--mesh", "data=4"), "needs 4 devices; this run has 2[\\s\\S]*set data=2"),
    (("--model", "gpt2-nano", "--cpu-devices", "2", "--mesh", "dat=2"), "did you mean 'data'"),
    (("--model", "gpt2-nano", "--cpu-devices", "3", "--mesh", "tensor=3"), "'heads' of gpt2-nano[\\s\\S]*num_heads=8[\\s\\S]*tensor=2 or 4"),
    (("--model", "gpt2-nano", "--cpu-devices", "3", "--mesh", "data=3"), "global_batch=16 over data\\*fsdp=3[\\s\\S]*15 or 18"),
    (("--model", "gpt2-nano", "--cpu-devices", "2", "--mesh", "pipe=2"), "pipeline stages are not built yet"),
    (("--model", "gpt2-nano", "--cpu-devices", "2", "--mesh", "data=2", "--zero", "1"), "mesh axis 'fsdp'[\\s\\S]*fsdp=2"),
    (("--model", "gpt2-nano", "--control", "auto"), "no controller yet"),
    (("--model", "gpt2-nano", "--cpu-devices", "1", "--set", "parallel.attention=cudnn"), "cannot run here[\\s\\S]*cpu"),
    (("--model", "gpt2-nano", "--data", "no-such-file.txt"), "no-such-file.txt"),
    (("--model", "llama3.3-70b", "--cpu-devices", "2", "--seq-len", "64"), "does not fit: about .* GiB per device are needed"),
    (("--resume",), "which run to resume"),
    (("--run-dir", "no-such-run", "--resume"), "no run to resume"),
    (("--model", "gpt2-nano", "--coordinator", "localhost:1"), "needs all three distributed settings"),
])
def test_the_users_mistakes_end_with_one_message(arguments, message, tmp_path):
    failed = train(*arguments, *(() if "--run-dir" in arguments or "--resume" in arguments else ("--run-dir", tmp_path / "run")))
    assert failed.returncode == 2
    assert re.search(message, failed.stderr), failed.stderr
    assert "Traceback" not in failed.stderr
    assert "do: " in failed.stderr
    assert not list((tmp_path).glob("run/*")), "nothing was written"


@pytest.mark.parametrize(("content", "message"), [("", "empty"), ("too short", "shorter than one example")])
def test_unusable_text(tmp_path, content, message):
    (tmp_path / "text.txt").write_text(content)
    failed = train("--model", "gpt2-nano", "--data", tmp_path / "text.txt", "--run-dir", tmp_path / "run")
    assert failed.returncode == 2
    assert message in failed.stderr


def test_a_run_ends_where_it_says(tmp_path, text):
    done = train("--model", "llama-nano", "--data", text, "--steps", 2, "--seq-len", 32, "--cpu-devices", 2, "--mesh", "fsdp=2",
                 "--eval-every", 2, "--run-dir", tmp_path / "run", "--set", "model.num_layers=1")
    assert done.returncode == 0, done.stderr
    for shown in ("attention kernel", "xla", "zero=3", "fsdp=2", "step 2/2", "held-out loss", str(tmp_path / "run")):
        assert shown in done.stdout
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {"config.json", "plan.json", "metrics.jsonl", "events.jsonl", "checkpoints"}
    assert json.loads((run / "plan.json").read_text())["axes"] == {"pipe": 1, "data": 1, "fsdp": 2, "tensor": 1}
    # On one device, with other steps than planned before: what was saved on two goes on.
    resumed = train("--run-dir", run, "--resume", "--steps", 3, "--mesh", "auto", "--cpu-devices", 1)
    assert resumed.returncode == 0, resumed.stderr
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
