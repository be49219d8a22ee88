"""The text that each kind of display shows."""

import dataclasses
import io
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import plans
import pytest

from optimus_jax.cluster.launch_detection import NO_LAUNCHER, Launch
from optimus_jax.config import Config, LogConfig
from optimus_jax.config.presets import model_preset
from optimus_jax.mesh.build import discover
from optimus_jax.run.display import (
    PlainDisplay,
    RichDisplay,
    make_display,
    short_count,
    short_duration,
)
from optimus_jax.run.start_table import show_start_table
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
from optimus_jax.training.numbers import perplexity_of, short
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.watchers import Display

RECORD = StepRecord(
    step=0,
    loss=5.12341,
    grad_norm=1.5,
    lr=3e-4,
    tokens=4096,
    step_time_s=0.331,
    tokens_per_s=12345.0,
    mfu=None,
    plan="a1b2c3",
    peak_bytes=None,
)
ESCAPE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


def record(step: int, **values: Any) -> StepRecord:
    return dataclasses.replace(RECORD, step=step, **values)


def evaluation(step: int, **values: Any) -> EvalRecord:
    some = EvalRecord(step=step, loss=1.25, perplexity=3.4903, bits_per_byte=None)
    return dataclasses.replace(some, **values)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    return ESCAPE.sub("", stream.getvalue())


def make(progress: str, stream: io.StringIO, every: int = 10, total_steps: int = 300) -> Display:
    config = LogConfig(progress=progress, every=every)  # pyright: ignore[reportArgumentType]
    return make_display(config, total_steps, stream=stream)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal that rich detects, wherever the tests run."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    ("progress", "stream", "term", "kind"),
    [
        ("auto", Terminal(), "xterm", RichDisplay),
        ("auto", Terminal(), "dumb", PlainDisplay),
        ("auto", io.StringIO(), "xterm", PlainDisplay),
        ("plain", Terminal(), "xterm", PlainDisplay),
        ("rich", io.StringIO(), "xterm", RichDisplay),
        ("none", Terminal(), "xterm", Display),
    ],
)
def test_the_display_kind_follows_the_setting_and_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
    progress: str,
    stream: io.StringIO,
    term: str,
    kind: type[Display],
):
    monkeypatch.setenv("TERM", term)
    assert type(make(progress, stream)) is kind


def test_processes_without_a_display_print_only_their_own_messages(
    capsys: pytest.CaptureFixture[str],
):
    display = make_display(LogConfig(progress="rich"), 300, show=False)
    display.message("all know this")
    assert capsys.readouterr() == ("", "")
    display.process_message("no room is left")
    assert capsys.readouterr() == ("", "process 0: no room is left\n")


def test_output_goes_to_standard_output(capsys: pytest.CaptureFixture[str]):
    make_display(LogConfig(progress="plain"), 300).message("hello")
    assert capsys.readouterr() == ("hello\n", "")


@pytest.mark.parametrize("progress", ["plain", "rich"])
def test_a_run_survives_a_closed_output_pipe(progress: str):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        with make_display(LogConfig(progress=progress), 300, stream=stream) as display:
            display.message("hello")
        print("nothing else that has it fails either", file=stream, flush=True)


def test_a_run_survives_a_full_disk_for_its_output():
    with open("/dev/full", "w") as stream:
        make_display(LogConfig(progress="plain"), 300, stream=stream).message("hello")


def test_a_plain_line_has_loss_speed_mfu_and_eta():
    stream = io.StringIO()
    with make("plain", stream) as display:
        display.step(record(10))
        display.step(
            record(
                20, mfu=0.4123, skipped=True, loss=float("nan"), metrics={"accuracy": 0.5, "z": 1.0}
            )
        )
    assert stream.getvalue().splitlines() == [
        "step 10/300  loss 5.1234  12.3k tokens/s  0.331 s/step  mfu -  eta 1m36s",
        "step 20/300  loss nan (no update)  accuracy 0.5000  z 1.0000  12.3k tokens/s  0.331 s/step"
        "  mfu 41.2%  eta 1m33s",
    ]


@pytest.mark.parametrize(
    ("first", "expected"), [(1, [1, 10, 20, 25]), (13, [13, 20, 25]), (25, [25])]
)
def test_plain_display_shows_the_first_last_and_every_tenth_step(first: int, expected: list[int]):
    stream = io.StringIO()
    with make("plain", stream, total_steps=25) as display:
        for step in range(first, 26):
            display.step(record(step))
    assert [int(step) for step in re.findall(r"step (\d+)/25", stream.getvalue())] == expected


def test_one_slow_step_does_not_change_the_eta():
    stream = io.StringIO()
    with make("plain", stream, every=1) as display:
        for step, step_time_s in ((1, 60.0), (2, 1.0), (3, 1.0), (4, 30.0), (5, 1.0)):
            display.step(record(step, step_time_s=step_time_s))
    assert stream.getvalue().splitlines()[-1].endswith("eta 4m55s")


def test_steps_that_were_seen_in_bursts_show_the_speed_of_all_of_them():
    """A busy host sees two steps end at once: one takes twice as long, the other nothing."""
    stream = io.StringIO()
    with make("plain", stream, every=10) as display:
        for step in range(1, 11):
            late = step % 2 == 1
            time_s = 0.998 if late else 0.002
            display.step(
                record(step, tokens_per_s=1000 / time_s, step_time_s=time_s, mfu=0.1 / time_s)
            )
    assert "2.0k tokens/s  0.500 s/step  mfu 20.0%" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_rich_display_shows_numbers_and_keeps_prints(stream: io.StringIO):
    with make("rich", stream) as display:
        print("printed by someone else")
        display.message("plan [data=2,fsdp=4]" + 100 * ".")
        display.step(record(10, mfu=0.4123, peak_bytes=3 * 2**29))
    text = shown(stream)
    assert "printed by someone else\n" in text
    assert "plan [data=2,fsdp=4]" + 100 * "." + "\n" in text
    bar, numbers = text.splitlines()[-2:]
    assert re.fullmatch(r"step +10/300 \S+ +eta 1m36s", bar.strip())
    assert (
        numbers.strip() == "loss 5.1234  12.3k tokens/s  0.331 s/step  mfu 41.2%  memory 1.50 GiB"
    )


def test_rich_display_restores_the_terminal():
    stream, stdout, stderr = Terminal(), sys.stdout, sys.stderr
    display = make("rich", stream)

    def interrupted() -> None:
        with display:
            assert sys.stdout is not stdout
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert stream.getvalue().rindex(show) > stream.getvalue().index(hide)


@pytest.mark.parametrize("progress", ["plain", "rich"])
def test_an_evaluation_is_shown_on_one_line(progress: str):
    stream = Terminal()
    display = make(progress, stream)
    display.evaluation(evaluation(100))
    display.evaluation(evaluation(200, bits_per_byte=1.80337, metrics={"accuracy": 0.25}))
    assert stream.getvalue().splitlines() == [
        "step 100  held-out loss 1.2500  perplexity 3.49",
        "step 200  held-out loss 1.2500  perplexity 3.49  1.8034 bits/byte  accuracy 0.2500",
    ]


ROWS = [("mesh", "[data=2]", "given"), ("attention", "xla", "no GPU")]


def test_plain_table_is_aligned():
    stream = io.StringIO()
    make("plain", stream).table("gpt2", ROWS)
    make("plain", stream).table("nothing", [])
    assert stream.getvalue().splitlines() == [
        "gpt2",
        "  mesh       [data=2]  given",
        "  attention  xla       no GPU",
        "nothing",
    ]


def test_rich_table_holds_every_cell():
    stream = Terminal()
    make("rich", stream).table("gpt2", ROWS)
    text = shown(stream)
    assert all(cell in text for cell in ("gpt2", *ROWS[0], *ROWS[1]))


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (
            plans.case("pipe=4,data=2", microbatches=8),
            {
                "stages": "4 with 2+2+3+3 layers; each tick takes as long as 3 layers",
                "schedule": ("1f1b, 8 microbatches in 14 ticks: bubble 37.5% of the busy time"),
                "in flight": "at most 7 tasks per stage, each storing its residuals",
            },
        ),
        (
            plans.case(
                "pipe=2,tensor=2",
                schedule="interleaved",
                microbatches=4,
                send_slack=True,
                stage_residuals="recompute",
            ),
            {
                "stages": (
                    "2 with 2+2+3+3 layers, each visited 2 times (layers by visit, in order); each"
                    " tick takes as long as 3 layers"
                ),
                "schedule": (
                    "interleaved, 4 microbatches in 16 ticks, a tick of slack for sends: bubble"
                    " 25.0% of the busy time"
                ),
                "in flight": (
                    "at most 8 tasks per stage, each storing the stage's input (residuals are"
                    " recomputed)"
                ),
            },
        ),
        (plans.case("data=2"), {}),
    ],
)
def test_the_start_table_describes_the_pipeline(case: plans.PlanCase, rows: dict[str, str]):
    assert (
        dict(
            re.findall(
                r"^  (stages|schedule|in flight)  +(.*)$", start_table_of(case), re.MULTILINE
            )
        )
        == rows
    )


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, {}),
        (
            {"optimizer.lr_factors.norm": 2.0, "optimizer.layer_lr_decay": 0.9},
            {"learning rate times": "2 for norm, 0.9 from each layer to the one below"},
        ),
        (
            {"model.tuning.freeze": "embedding,norm", "model.tuning.freeze_layers": 2},
            {
                "trained": "28,128 parameters; frozen, in f32: embedding (also the head), norm;"
                " frozen layers: the lowest 2"
            },
        ),
        (
            {"model.tuning.method": "lora", "model.tuning.targets": "qkvo,up"},
            {
                "trained": "34,560 parameters: lora of rank 16, times 2, on qkvo, up; frozen, in"
                " f32: embedding, attention, mlp, norm, head"
            },
        ),
        (
            {"model.tuning.method": "lora", "model.tuning.base_precision": "int8"},
            {
                "trained": "41,472 parameters: lora of rank 16, times 2, on all; frozen, in bf16:"
                " embedding, head; frozen, in int8: attention, mlp; frozen, in f32: norm"
            },
        ),
        (
            {"model.tuning.method": "lora", "model.tuning.freeze": ""},
            {"trained": "132,144 parameters: lora of rank 16, times 2, on all"},
        ),
        (
            {
                "model.tuning.method": "lora",
                "model.tuning.rank": 64,
                "model.tuning.targets": "query",
            },
            {
                "trained": "27,648 parameters: lora of rank 64, times 0.5, on query (a rank"
                " above 48 adds nothing to the narrowest of these matrices); frozen, in f32:"
                " embedding, attention, mlp, norm, head"
            },
        ),
    ],
)
def test_the_start_table_says_what_is_trained_and_how_fast(
    settings: dict[str, Any], rows: dict[str, str]
):
    shown = start_table_of(plans.ONE_DEVICE, settings)
    assert dict(re.findall(r"^  (trained|learning rate times) +(.*)$", shown, re.MULTILINE)) == rows


@pytest.mark.parametrize(
    ("weights", "settings", "said"),
    [
        ("seed 3", {}, ", drawn at random (seed 3)"),
        (None, {}, ""),  # resumed
        ("runs/base@4", {"init_from": "runs/base"}, ""),
    ],
)
def test_the_start_table_says_if_parameters_are_drawn(
    weights: str | None, settings: dict[str, Any], said: str
):
    shown = start_table_of(plans.ONE_DEVICE, settings, weights)
    assert re.findall(r"^  model +.* of vocabulary padding\)(.*)$", shown, re.MULTILINE) == [said]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "vit-nano",
            {"batch": "48 images x 17 tokens, 4 microbatch(es)", "stages": "2 with 2+2 layers"},
        ),
        (
            "whisper-nano",
            {
                "batch": "48 recordings x 128 tokens, 4 microbatch(es)",
                "stages": "2 with 1+3 layers; each stage has memory for 3 layers",
            },
        ),
    ],
)
def test_the_start_table_of_images_and_sound(name: str, rows: dict[str, str]):
    """Their examples hold no documents; layers of two sides take unequal times."""
    model = model_preset(name)
    case = plans.case("pipe=2", microbatches=4)
    config = plans.make_config(model, case, {"data.seq_len": model.max_length})
    plan = plans.make_plan(config)
    shown = start_table(config, build_program(config, plan, jax.devices()[:2]))
    assert dict(re.findall(r"^  (batch|stages) +(.*)$", shown, re.MULTILINE)) == rows


def start_table_of(
    case: plans.PlanCase,
    settings: Mapping[str, Any] | None = None,
    weights: str | None = None,
) -> str:
    built = plans.build(plans.model_for(case, "gpt"), case, settings)
    return start_table(built.config, built.program, weights)


def start_table(config: Config, program: Program, weights: str | None = None) -> str:
    stream = io.StringIO()
    data: Any = SimpleNamespace(description="words", tokenizer=SimpleNamespace(end="'</s>', id 2"))
    show_start_table(
        make("plain", stream),
        config=config,
        topology=discover(),
        why="given",
        program=program,
        data=data,
        compile_s=1.0,
        step_bytes=2**20,
        run_dir=Path("runs/x"),
        launch=Launch(launcher=NO_LAUNCHER, why="nothing says that there are others"),
        evaluation="none",
        weights=weights,
    )
    return stream.getvalue()


@pytest.mark.parametrize(
    ("case", "table", "layers"),
    [
        (plans.case("fsdp=4", zero=0), (1, 1, 1), (1, 1, 1)),
        (plans.case("fsdp=4", zero=1), (4, 1, 4), (4, 1, 4)),
        (plans.case("fsdp=4", zero=2), (4, 4, 4), (4, 4, 4)),
        (plans.case("fsdp=4", zero=3), (4, 4, 4), (4, 4, 4)),
        # Stages split the embedding table's rows, and reduce its gradient whole along fsdp.
        (plans.case("pipe=2,fsdp=4", zero=2, microbatches=2), (8, 2, 8), (8, 8, 8)),
        (plans.case("pipe=2,fsdp=4", zero=3, microbatches=2), (8, 2, 8), (8, 8, 8)),
    ],
)
def test_the_start_table_shows_bytes_per_device(
    case: plans.PlanCase, table: tuple[int, ...], layers: tuple[int, ...]
):
    """Number of parts that the parameter, its gradient and its moments are split into."""
    shown = start_table_of(case, {"log.verbose": True})
    for name, parts in (("embedding/table", table), ("layers/mlp/up", layers)):
        shape, *sizes = re.findall(
            rf"{name} +([\dx]+) .*?([\d.]+) MiB +([\d.]+) MiB +([\d.]+) MiB", shown
        )[0]
        whole = math.prod(map(int, shape.split("x"))) * 4 / 2**20
        assert [float(size) for size in sizes] == [round(whole / n, 2) for n in parts]


def test_no_display_is_silent(capsys: pytest.CaptureFixture[str]):
    with make_display(LogConfig(progress="none"), 300) as display:
        display.step(record(1))
        display.message("hello")
        display.evaluation(evaluation(1))
        display.table("gpt2", ROWS)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5.0"),
        (999.94, "999.9"),
        (999.96, "1.0k"),
        (12345, "12.3k"),
        (2.5e6, "2.5M"),
        (4e12, "4000.0G"),
    ],
)
def test_short_count(value: float, text: str):
    assert short_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (96, "1m36s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (273600, "3d04h"),
    ],
)
def test_short_duration(seconds: float, text: str):
    assert short_duration(seconds) == text


def test_numbers_of_a_diverged_run_fit_a_line():
    assert [short(value, 2) for value in (12.345, -999999.0, 1.234e30, math.inf, math.nan)] == [
        "12.35",
        "-999999.00",
        "1.2e+30",
        "inf",
        "nan",
    ]
    assert [perplexity_of(loss) for loss in (0.0, 1e30, math.inf)] == [1.0, math.inf, math.inf]
    stream = io.StringIO()
    display = make("plain", stream)
    display.evaluation(
        evaluation(1, loss=700.0, perplexity=perplexity_of(700.0), bits_per_byte=1e9)
    )
    display.step(record(1, loss=1e300))
    assert stream.getvalue().startswith(
        "step 1  held-out loss 700.0000  perplexity 1e+304  1e+09 bits/byte\nstep 1/300  loss"
        " 1e+300  "
    )
