"""The command line: one clear message with exit code 2 for every user mistake."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import Ended, run_in_process

from optimus_jax.cli.main import main
from optimus_jax.config.request import make_config
from optimus_jax.devices.backend import host_bytes
from optimus_jax.faults.stopping import TERMINATING
from optimus_jax.mesh.build import discover
from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import make_schedule

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_script(name, *arguments, **options):
    return subprocess.run(
        [sys.executable, SCRIPTS / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


def train(*arguments):
    return run_script("train.py", *arguments)


def fewer_devices(num_devices):
    """The devices of a process with `--cpu-devices`; this one has eight already."""
    found = discover()
    assert found.process_of is not None
    assert found.host_of is not None
    return replace(
        found,
        num_devices=num_devices,
        bytes_per_device=host_bytes() // num_devices,
        process_of=found.process_of[:num_devices],
        host_of=found.host_of[:num_devices],
    )


@pytest.fixture
def run_train(monkeypatch, capfd):
    """Runs `scripts/train.py` in this process. With `--cpu-devices` a plan is chosen for that many
    devices, and cannot be trained.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *TERMINATING)}

    def run(*arguments):
        arguments = [*map(str, arguments)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "train.py"), *arguments])
        monkeypatch.setattr("optimus_jax.cli.train.restart_with_huge_pages", lambda: None)
        if "--cpu-devices" in arguments:
            devices = fewer_devices(int(arguments[arguments.index("--cpu-devices") + 1]))
            monkeypatch.setattr("optimus_jax.run.whole_run.use_cpu_devices", lambda _: None)
            monkeypatch.setattr("optimus_jax.run.whole_run.discover", lambda: devices)
        try:
            code = main("train")
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
        stdout, stderr = capfd.readouterr()
        return Ended(returncode=code, stdout=stdout, stderr=stderr)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("A man, a plan, a canal: Panama. " * 400)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model was named"),
        (("--model", "gpt3"), "unknown model 'gpt3'[\\s\\S]*did you mean 'gpt2'"),
        (
            ("--model", "gpt2-nano", "--global-bach", "8"),
            "unknown argument '--global-bach'[\\s\\S]*did you mean '--global-batch'",
        ),
        (("--model", "gpt2-nano", "--set", "optimizer.bta2=0.9"), "did you mean 'optimizer.beta2'"),
        (("--model", "gpt2-nano", "--set", "optimizer.beta2"), "--set needs a name and a value"),
        (("--model", "gpt2-nano", "--steps", "many"), "steps has the wrong type"),
        (("--model", "gpt2-nano", "--precision", "fp16"), "did you mean 'f16'"),
        (
            ("--model", "gpt2-nano", "--seq-len", "512"),
            "exceeds the longest sequence of gpt2-nano[\\s\\S]*256",
        ),
        (("--model", "gpt2-nano", "--cpu-devices", "2", "--mesh", "dat=2"), "did you mean 'data'"),
        (
            ("--model", "gpt2-nano", "--cpu-devices", "3", "--mesh", "tensor=3"),
            "'heads' of gpt2-nano[\\s\\S]*num_heads=8[\\s\\S]*--mesh pipe=3",
        ),
        (
            ("--model", "gpt2-nano", "--cpu-devices", "3", "--mesh", "data=3"),
            "global_batch=16 over data\\*fsdp=3[\\s\\S]*--global-batch 15",
        ),
        (
            (
                "--model",
                "gpt2-nano",
                "--cpu-devices",
                "2",
                "--mesh",
                "pipe=2",
                "--microbatches",
                "3",
            ),
            "microbatches=3[\\s\\S]*--microbatches 4 or --global-batch 15",
        ),
        (
            (
                "--model",
                "gpt2-nano",
                "--cpu-devices",
                "4",
                "--mesh",
                "pipe=4",
                "--schedule",
                "interleaved",
            ),
            "fewer layers[\\s\\S]*--mesh pipe=2,data=2",
        ),
        (
            (
                "--model",
                "gpt2-nano",
                "--cpu-devices",
                "2",
                "--mesh",
                "pipe=2",
                "--schedule",
                "no.json",
            ),
            "cannot be read[\\s\\S]*no.json: No such file",
        ),
        (
            ("--model", "gpt2-nano", "--cpu-devices", "2", "--mesh", "data=2", "--zero", "1"),
            "mesh axis 'fsdp'[\\s\\S]*--zero 0 or --mesh fsdp=2",
        ),
        (("--model", "gpt2-nano", "--control", "sometimes"), "advise"),
        (("--model", "gpt2-nano", "--phases", "200"), "AFTER_STEP:BATCHxTOKENS[\\s\\S]*200:64x512"),
        (
            ("--model", "gpt2-nano", "--cpu-devices", "4", "--mesh", "data=4", "--phases", "20:18"),
            "the batches after step 20[\\s\\S]*divide evenly[\\s\\S]*--mesh",
        ),
        (
            ("--model", "gpt2-nano", "--cpu-devices", "1", "--set", "parallel.attention=cudnn"),
            "cannot run here[\\s\\S]*cpu",
        ),
        (("--model", "gpt2-nano", "--data", "no-such-file.txt"), "no-such-file.txt"),
        (("--resume",), "no run to resume was named"),
        (("--run-dir", "no-such-run", "--resume"), "no run to resume"),
        (
            ("--model", "gpt2-nano", "--coordinator", "localhost:1"),
            "needs all three distributed settings",
        ),
        (
            (
                "--model",
                "gpt2-nano",
                "--coordinator",
                "foo",
                "--num-processes",
                "2",
                "--process-id",
                "0",
            ),
            "a host and a port",
        ),
        (("--model", "gpt2-nano", "--seed", "3000000000"), "seed is out of range"),
        (("--model", "llama-nano", "--set", "model.head_dim=33"), "odd number[\\s\\S]*32 or 34"),
        (("--config", "no-such-file.json"), "a config cannot be read"),
        (
            ("--resume", "--run-dir", "no-such-run", "--config", "no-such-file.json"),
            "has its own config",
        ),
    ],
)
def test_user_mistakes_end_with_one_message(arguments, message, tmp_path, run_train):
    if "--run-dir" not in arguments and "--resume" not in arguments:
        arguments = (*arguments, "--run-dir", str(tmp_path / "run"))
    check_one_message(run_train(*arguments), message, tmp_path)


def check_one_message(failed, message, tmp_path):
    assert failed.returncode == 2
    assert re.search(message, failed.stderr), failed.stderr
    assert "Traceback" not in failed.stderr
    assert "do: " in failed.stderr
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "gpt2-nano", "--cpu-devices", "2", "--mesh", "data=4"),
            (
                "needs 4 devices; this run has 2[\\s\\S]*nearest first: --mesh data=2 or"
                " --cpu-devices 4"
            ),
        ),
        (
            ("--model", "llama3.3-70b", "--cpu-devices", "2", "--seq-len", "64"),
            "does not fit: about .* GiB per device is needed",
        ),
    ],
)
def test_a_process_with_its_own_devices_ends_with_one_message(arguments, message, tmp_path):
    failed = train(*arguments, "--run-dir", tmp_path / "run")
    check_one_message(failed, message, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("", "empty"), ("too short", "shorter than one example")]
)
def test_empty_or_too_short_text_is_refused(tmp_path, content, message, run_train):
    (tmp_path / "text.txt").write_text(content)
    failed = run_train(
        "--model", "gpt2-nano", "--data", tmp_path / "text.txt", "--run-dir", tmp_path / "run"
    )
    assert failed.returncode == 2
    assert message in failed.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_writes_its_files_and_can_be_resumed_on_fewer_devices(tmp_path, text):
    done = train(
        "--model",
        "llama-nano",
        "--data",
        text,
        "--steps",
        2,
        "--seq-len",
        32,
        "--cpu-devices",
        2,
        "--mesh",
        "fsdp=2",
        "--eval-every",
        2,
        "--run-dir",
        tmp_path / "run",
        "--set",
        "model.num_layers=1",
    )
    assert done.returncode == 0, done.stderr
    for shown in (
        "attention kernel",
        "xla",
        "zero=3",
        "fsdp=2",
        "step 2/2",
        "held-out loss",
        str(tmp_path / "run"),
    ):
        assert shown in done.stdout
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "plan.json",
        "metrics.jsonl",
        "events.jsonl",
        "checkpoints",
        "lock",
    }
    assert json.loads((run / "plan.json").read_text())["axes"] == {
        "pipe": 1,
        "data": 1,
        "fsdp": 2,
        "tensor": 1,
    }
    # The run of two devices is resumed on one, with more steps.
    resumed = train(
        "--run-dir", run, "--resume", "--steps", 3, "--mesh", "auto", "--cpu-devices", 1
    )
    assert resumed.returncode == 0, resumed.stderr
    assert [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]


def run_after(program, *arguments):
    """Run scripts/train.py after `program` has changed something in the package."""
    start = (
        f"{program}\nimport runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0],"
        " run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", start, SCRIPTS / "train.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


ONE_LAYER = (
    "--model",
    "gpt2-nano",
    "--set",
    "model.num_layers=1",
    "--seq-len",
    32,
    "--eval-every",
    0,
    "--progress",
    "plain",
)
SIGNALS = """
import os, signal
from optimus_jax.run.display import PlainDisplay
from optimus_jax.training.trainer import Trainer
from optimus_jax.planning.ahead_of_time.compiled_step import StepCompilation
"""


@pytest.mark.parametrize(
    ("when", "code", "message"),
    [
        (
            (
                "PlainDisplay.step = lambda self, record: [os.kill(os.getpid(), signal.SIGINT) for"
                " _ in range(2)]"
            ),
            130,
            "stopped without saving",
        ),
        (
            "StepCompilation.of = lambda *_: os.kill(os.getpid(), signal.SIGINT)",
            130,
            "stopped before training had begun",
        ),
        (
            "StepCompilation.of = lambda *_: os.kill(os.getpid(), signal.SIGTERM)",
            75,
            "stopped before training had begun",
        ),
    ],
    ids=["twice", "while compiling", "terminated while compiling"],
)
def test_signals_during_startup_end_with_one_line(tmp_path, text, when, code, message):
    ended = run_after(
        SIGNALS + when, *ONE_LAYER, "--data", text, "--steps", 1000, "--run-dir", tmp_path / "run"
    )
    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    # A cluster may restart it with --resume.
    assert (tmp_path / "run" / "config.json").exists() == (
        message == "stopped without saving" or code == 75
    )


def test_an_unreachable_coordinator_is_a_fault_with_a_message(tmp_path):
    ended = run_after(
        "",
        "--model",
        "gpt2-nano",
        "--coordinator",
        "127.0.0.1:9",
        "--num-processes",
        2,
        "--process-id",
        1,
        "--run-dir",
        tmp_path / "run",
        "--set",
        "faults.connect_s=0.1",
    )
    assert ended.returncode == 75, "a process that is missing may be there next time"
    assert re.search(
        r"\nfault: the processes of this run did not all meet at the rendezvous: process 0 of 2 did"
        r" not come in time\n"
        r"[\s\S]*process 1 of 2[\s\S]*127.0.0.1:9[\s\S]*do: [\s\S]*\n  in process 1 of 2\n",
        ended.stderr,
    )
    assert "Traceback" not in ended.stderr


def test_sigterm_is_handled_while_processes_connect(tmp_path):
    ended = run_after(
        "import os, signal\nfrom optimus_jax.cluster import"
        " rendezvous_client\nrendezvous_client.socket.create_connection = lambda *_, **__:"
        " os.kill(os.getpid(), signal.SIGTERM)\n",
        "--model",
        "gpt2-nano",
        "--coordinator",
        "127.0.0.1:9",
        "--num-processes",
        2,
        "--process-id",
        1,
        "--run-dir",
        tmp_path / "run",
    )
    assert ended.returncode == 75
    assert ended.stderr.endswith("\nstopped before training had begun\n")
    assert "Traceback" not in ended.stderr


def test_cpu_programs_are_not_cached(tmp_path, text, monkeypatch):
    """CPU executables from JAX's compilation cache hang."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    done = train(
        *ONE_LAYER,
        "--data",
        text,
        "--steps",
        1,
        "--cpu-devices",
        2,
        "--mesh",
        "fsdp=2",
        "--run-dir",
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    assert "JAX's compilation cache is not used" in done.stdout
    assert not list((tmp_path / "cache").glob("*"))


def test_the_config_of_a_run_can_start_another_run(tmp_path, text):
    (tmp_path / "config.json").write_text(
        make_config(
            "gpt2-nano",
            {
                "steps": 2,
                "seq_len": 32,
                "data": str(text),
                "model.num_layers": 1,
                "eval_every": 0,
                "global_batch": 4,
            },
        ).to_json(derived={"lr": 1})
    )
    done = train(
        "--config",
        tmp_path / "config.json",
        "--steps",
        1,
        "--cpu-devices",
        1,
        "--run-dir",
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["global_batch"] == 4


def test_a_schedule_is_shown_written_and_read_again(tmp_path):
    asked = ("--schedule", "1f1b", "--stages", 4, "--microbatches", 6)
    shown = run_script(
        "schedule.py", *asked, "--json", "own.json", "--picture", "own.svg", cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    for line in (
        "1f1b: stages 4, microbatches 6",
        "stage 3 F  .  .  .  0  1  2",
        "12 ticks, bubble 50.0%, at most 6 tasks in flight",
        (
            "residuals 6, inputs 1, cotangents 1 if residuals are kept; inputs 6, cotangents 1 if"
            " stages are recomputed"
        ),
    ):
        assert line in shown.stdout
    assert Schedule.from_json((tmp_path / "own.json").read_text()) == make_schedule("1f1b", 4, 6)
    assert (tmp_path / "own.svg").read_bytes().startswith(b"<?xml")
    again = run_in_process("schedule", "--table", tmp_path / "own.json")
    assert again.stdout in shown.stdout
    refused = run_in_process("schedule", *asked[:-1], 8, "--json", "own.json", cwd=tmp_path)
    assert (refused.returncode, "never overwritten" in refused.stderr) == (2, True)
    assert json.loads((tmp_path / "own.json").read_text())["microbatches"] == 6


def test_the_docs_page_on_pipelines_shows_the_output_of_the_script():
    page = (SCRIPTS.parent / "docs" / "pipelines.md").read_text()
    chart = run_in_process(
        "schedule", "--schedule", "1f1b", "--stages", 4, "--microbatches", 6
    ).stdout
    assert "".join(chart.splitlines(keepends=True)[:-2]) in page
    table = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert table is not None
    assert Schedule.from_json(table[1]).num_ticks == 5
    slots = re.findall(
        r"^\| (gpipe|1f1b|interleaved)(?:, V=(\d))?( with slack)? \| ([\d.]+)% \| (\d+), (\d+),"
        r" (\d+)[^|]*\| (\d+), (\d+) \|$",
        page,
        re.MULTILINE,
    )
    assert len(slots) == 5
    for name, repeats, slack, bubble, *counts in slots:
        schedule = make_schedule(name, 4, 16, int(repeats or 1), 2 if slack else 1)
        kept, recomputed = Buffers.of(schedule, keep_residuals=True), Buffers.of(schedule)
        assert [
            kept.num_residuals,
            kept.num_inputs,
            kept.num_cotangents,
            recomputed.num_inputs,
            recomputed.num_cotangents,
        ] == list(map(int, counts))
        assert f"{schedule.bubble():.1%}" == f"{bubble}%"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the number of stages is missing"),
        (("--stages", 4, "--microbatches", 6, "--schedule", "gpip"), "did you mean 'gpipe'"),
        (
            ("--stages", 4, "--microbatches", 6, "--schedule", "interleaved", "--repeats", 2),
            "choose microbatches=4 or 8",
        ),
        (
            ("--stages", 4, "--table", "own.json"),
            "already chooses the schedule[\\s\\S]*leave out --stages",
        ),
        (("--table", "no-such-file.json"), "no-such-file.json"),
        (
            ("--stages", 4, "--microbatches", 6, "--json", "own"),
            "must end in .json[\\s\\S]*own.json",
        ),
    ],
)
def test_user_mistakes_about_a_schedule_end_with_one_message(arguments, message, tmp_path):
    failed = run_in_process("schedule", *arguments, cwd=tmp_path)
    check_one_message(failed, message, tmp_path)
