"""benchmarks/gpu without a GPU: its rows, the results it rejects, and the inputs of the kernels."""

import importlib
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


# Takes 20 seconds or more: the script runs several times, and each run imports JAX and compiles.
def test_each_case_is_measured_once_per_commit(tmp_path):
    def measured(*more):
        ended = subprocess.run(
            [
                sys.executable,
                FOLDER / "run.py",
                "--smoke",
                "--only",
                "ours",
                "--out",
                tmp_path / "rows.jsonl",
                *more,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, [
            json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()
        ]

    shown, [row] = measured("--commit", "one")
    assert "failed" not in row, row
    assert (row["attention"], row["model"], row["commit"]) == ("xla", "gpt2-nano", "one")
    assert row["spread_s"][0] <= row["step_s"] <= row["spread_s"][1]
    assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["seq_len"] / row["step_s"])
    assert row["loss"] < row["first_loss"]
    assert "gpt2-nano 4 x 128 | optimus_jax |" in shown
    assert f"{row['date']}, commit one, " in shown
    assert f"optimus_jax: {row['version']}" in shown
    assert row["options"][0][0] == "xla_cpu_enable_concurrency_optimized_scheduler=false"
    assert (
        shown.count("xla_cpu_enable_concurrency_optimized_scheduler=false`: virtual devices") == 1
    )
    again, rows = measured("--commit", "one")
    assert "already there: optimus_jax: gpt2-nano 4 x 128\n" in again
    assert len(rows) == 1
    shown, rows = measured("--commit", "two")
    assert [each["commit"] for each in rows] == ["one", "two"]
    assert shown[shown.index("## ") :].count("| gpt2-nano 4 x 128 |") == 1, (
        "the table has the newest"
    )


def test_without_a_matching_case_or_a_gpu_nothing_is_run(tmp_path):
    def run_script(*more):
        ended = subprocess.run(
            [sys.executable, FOLDER / "run.py", "--out", tmp_path / "rows.jsonl", *more],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "", "PYTHONPATH": str(FOLDER.parents[1])},
        )
        return ended.returncode, ended.stderr

    assert (code_and_text := run_script("--smoke", "--only", "no such case"))[0] == 2
    assert "no case contains what --only says\n  given: no such case" in code_and_text[1]
    assert (code_and_text := run_script())[0] == 2
    assert "nvidia-smi shows no GPU" in code_and_text[1]


H200, H100 = "NVIDIA H200, 570.1, 1980 MHz, 700 W", "NVIDIA H100 80GB HBM3, 570.1, 1980 MHz, 700 W"


def row(**more) -> dict:
    """The row of a step of half a second with half of the data sheet's FLOPs."""
    return {
        "who": "ours",
        "name": "gpt2-xl 16 x 1024",
        "machine": H200,
        "device": "NVIDIA H200",
        "commit": "abc",
        "flags": "",
        "date": "2026-11-24",
        "command": "run.py",
        "step_s": 0.5,
        "spread_s": [0.4, 0.6],
        "tokens_per_s": 32768.0,
        "tflops": 494.5,
        "compile_s": 40.2,
        "peak_bytes": 50 * 2**30,
        "peak_before_steps_bytes": 20 * 2**30,
        "predicted_bytes": 48 * 2**30,
        "attention": "cudnn",
        "custom_calls": {"cudnn": 96, "cublas": 300, "triton": 0},
        **more,
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_the_right_units(scripts):
    from rows import table

    titles, _, *lines = table(
        [
            row(),
            row(
                who="eager",
                compile_s=None,
                peak_before_steps_bytes=None,
                predicted_bytes=None,
                custom_calls={},
                attention="flash",
            ),
            row(peak_before_steps_bytes=50 * 2**30),
            {
                key: value
                for key, value in row(who="matmul", device="a card of the future").items()
                if key
                in (
                    "who",
                    "name",
                    "device",
                    "commit",
                    "flags",
                    "step_s",
                    "spread_s",
                    "tflops",
                )
            },
            {
                "who": "compile",
                "name": "gpt2 32 x 1024",
                "commit": "abc",
                "flags": "",
                "failed": "not done after 330 s: no output",
            },
        ]
    ).splitlines()
    assert cells(titles) == [
        "case",
        "by",
        "step: median (least, most)",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "peak memory (predicted)",
        "compile",
        "attention",
    ]
    ours, eager, before, product, failed = map(cells, lines)
    assert ours == [
        "gpt2-xl 16 x 1024",
        "optimus_jax",
        "500.0 ms (400.0, 600.0)",
        "32,768",
        "494",
        "50.0%",
        "50.0 GiB (48.0)",
        "40 s",
        "cudnn: 96 cudnn, 300 cublas",
    ]
    assert eager[6:] == ["50.0 GiB", "-", "flash"]
    assert before[6] == "at most 50.0 GiB, reached before the steps (48.0)"
    assert product[3:] == ["-", "494", "-", "-", "-", "-"]
    assert failed == [
        "gpt2 32 x 1024",
        "PyTorch, torch.compile",
        "failed: not done after 330 s: no output",
        *[""] * 6,
    ]


def test_each_gpu_has_its_table_and_corrected_failures_are_dropped(scripts):
    from rows import report

    failed = {
        key: row()[key] for key in ("who", "name", "machine", "commit", "flags", "date", "command")
    } | {"failed": "exit code 1"}
    text = report(
        [
            failed,
            row(machine=H100, device="NVIDIA H100 80GB HBM3"),
            row(),
            row(who="eager", commit="abd"),
            row(flags="--xla_gpu_autotune_level=0", options=[("a=1", "it helps", "a link")]),
        ]
    )
    first, second = (part for part in re.split("^## ", text, flags=re.MULTILINE) if part)
    assert first.startswith(H100)
    assert second.startswith(H200)
    assert "failed" not in text
    assert (first.count("gpt2-xl 16 x 1024"), second.count("gpt2-xl 16 x 1024")) == (1, 3)
    assert cells(first.splitlines()[2])[-1] == "attention"
    assert cells(second.splitlines()[2])[-2:] == ["commit", "XLA_FLAGS"]
    assert [cells(line)[-2:] for line in second.splitlines()[4:7]] == [
        ["abc", "-"],
        ["abd", "-"],
        ["abc", "--xla_gpu_autotune_level=0"],
    ]
    assert "MFU: of 989 TFLOP/s, dense bf16" in first
    assert "`a=1`: it helps (a link)" in second
    assert "Model FLOPs" in first


@pytest.mark.parametrize(
    ("there", "asked", "done"),
    [
        ({}, {}, True),
        ({"failed": "exit code 1"}, {}, False),
        ({"left_out": "no time"}, {}, False),
        ({}, {"commit": "abd"}, False),
        ({"commit": ""}, {"commit": ""}, False),
        ({"commit": "abc+"}, {"commit": "abc+"}, False),
        ({}, {"machine": H100}, False),
        ({}, {"flags": "--xla_gpu_autotune_level=0"}, False),
        ({}, {"who": "eager"}, False),
    ],
)
def test_a_case_is_done_if_code_gpu_and_flags_are_the_same(there, asked, done, scripts):
    from rows import is_done

    assert is_done([row(**there)], row(**asked)) is done


def card(gib: int, name: str = "NVIDIA H100 80GB HBM3"):
    from card import Card

    return Card(device_kind=name, text=name, memory_bytes=gib * 2**30, capability=(9, 0))


def test_cases_without_room_on_the_gpu_are_left_out_with_a_reason(
    scripts, tmp_path, monkeypatch, capsys
):
    import run
    from cases import CASES

    monkeypatch.delenv("XLA_FLAGS")
    cases_run = []
    monkeypatch.setattr(
        run, "measured", lambda case, *_, **__: cases_run.append(case) or {"failed": "never"}
    )
    assert len(
        run.fill(
            tmp_path / "80.jsonl",
            CASES,
            1e4,
            card(80),
            {"machine": "80", "command": "", "commit": "abc"},
        )
    ) == len(cases_run)
    left_out = {
        tuple(cells(line)[:3])
        for line in capsys.readouterr().out.splitlines()
        if "left out" in line
    }
    eager = {
        case
        for case in CASES
        if case.who == "eager" and case.model == "gpt2-xl" and case.batch == 16
    }
    # 60 GiB of state, and little else
    in_bf16_again = {
        case
        for case in CASES
        if case.model == "llama3-8b" and case.weights == "bf16" and case.remat == "full"
    }
    adapters = {
        case for case in CASES if any("tuning.method" in setting for setting in case.settings)
    }
    assert len(eager) == len(in_bf16_again) == 1
    assert len(adapters) == 2
    whole = {case for case in CASES if case.model == "llama3-8b"} - in_bf16_again - adapters
    assert whole | eager == set(CASES) - set(cases_run)
    assert len(left_out) == len(CASES) - len(cases_run)
    assert any(
        case == "llama3-8b 2 x 4096, precision.moments=bf16"
        and re.fullmatch(r"left out: planned to take 113\.\d of 73\.6 GiB", why)
        for case, _, why in left_out
    ), left_out
    rows = [json.loads(line) for line in (tmp_path / "80.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "left_out" in row]) == len(left_out)
    run.fill(
        tmp_path / "80.jsonl",
        CASES,
        0.0,
        card(80),
        {"machine": "80", "command": "", "commit": "abc"},
    )
    assert len((tmp_path / "80.jsonl").read_text().splitlines()) == len(rows), (
        "what was left out before is not said again"
    )
    capsys.readouterr()
    assert len(
        run.fill(
            tmp_path / "141.jsonl",
            CASES,
            1e4,
            card(140, "NVIDIA H200"),
            {"machine": "141", "command": "", "commit": "abc"},
        )
    ) == len(CASES)
    capsys.readouterr()
    assert not run.fill(
        tmp_path / "late.jsonl",
        CASES,
        10.0,
        card(140),
        {"machine": "141", "command": "", "commit": "abc"},
    )
    assert capsys.readouterr().out.count("left out: no time") == len(CASES)


@pytest.mark.parametrize(("limit_s", "why"), [(1000.0, "failed"), (0.2, "left_out")])
def test_a_case_stopped_for_lack_of_time_has_not_failed(
    limit_s, why, scripts, tmp_path, monkeypatch
):
    import run
    from cases import SMOKE

    monkeypatch.setattr(run, "LONGEST_OTHER_S", 0.4)
    figures = run.measured(SMOKE[1], limit_s, tmp_path / "said", smoke=True)
    assert list(figures) == ["took_s", why]


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        ([{}, {"failed": "late"}], 0),
        ([{}, {"failed": "late", "commit": "abd"}], 1),
        ([{"failed": "late"}, {}], 1),
        ([{}, {"left_out": "no time", "commit": "abd"}], 0),
        ([{"failed": "late"}, {"left_out": "no time"}], 0),
        ([{"left_out": "no time"}, {"failed": "late"}], 1),
        ([{"left_out": "no time"}, {"left_out": "no room"}], 1),
        ([{}, {}], 1),
    ],
)
def test_of_several_rows_of_a_case_the_newest_result_counts(rows, counts, scripts):
    from rows import newest

    made = [row(**more) for more in rows]
    assert newest(made)[0] is made[counts]
    assert len(newest(made)) == 1


@pytest.mark.parametrize(("commit", "is_said"), [("abc", False), ("abc+", True), ("", True)])
def test_an_unreproducible_commit_is_reported(commit, is_said, scripts, tmp_path, capsys):
    import run

    run.fill(
        tmp_path / "new" / "rows.jsonl",
        (),
        1.0,
        card(140),
        {"machine": "141", "command": "", "commit": commit},
    )
    assert ("--commit NAME" in capsys.readouterr().out) == is_said


def test_terminating_the_script_ends_its_case(tmp_path):
    """The case would keep the GPU."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/bash\necho $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid\nexec"
        " sleep 100\n"
    )
    python.chmod(0o755)
    program = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import run; sys.argv = ['run.py',"
        f" '--smoke', '--out', {str(tmp_path / 'rows.jsonl')!r}]; sys.executable = {str(python)!r};"
        " sys.exit(run.main())"
    )
    script = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    until((tmp_path / "pid").exists)
    script.terminate()
    assert script.wait(60) == 128 + 15
    until(lambda: not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists())


def until(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_one_run_reaches_every_model_of_both_frameworks_first(scripts):
    """By the script's own estimates of durations."""
    from cases import CASES
    from run import LIKELY_OTHER_S, LIKELY_S

    left_s, reached = 460.0, set()
    for case in CASES:
        likely_s = LIKELY_S.get((case.who, case.model), LIKELY_OTHER_S)
        if left_s < likely_s:
            break
        left_s -= likely_s
        reached.add((case.who == "ours", case.model))
    models = ("gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b")
    assert {(ours, model) for ours in (True, False) for model in models} <= reached


def test_the_exit_code_is_1_if_all_cases_failed(scripts, tmp_path, monkeypatch):
    import run
    from card import Card

    monkeypatch.setattr(Card, "of_this_machine", lambda: card(80))
    answers = iter([*[{"failed": "a"}] * 3, row(), *[{"failed": "b"}] * 2])
    monkeypatch.setattr(run, "measured", lambda *_, **__: next(answers))
    monkeypatch.setattr(
        "sys.argv",
        [
            "run.py",
            "--out",
            str(tmp_path / "rows.jsonl"),
            "--only",
            "eager gpt2",
            "--commit",
            "abc",
        ],
    )
    assert [run.main(), run.main()] == [1, 0]


def test_a_case_over_its_time_limit_is_ended_with_its_children(scripts):
    import run

    command = [
        sys.executable,
        "-c",
        "import subprocess; print('said', flush=True); subprocess.run(['sleep', '60'])",
    ]
    assert run._run(command, {}, 1.0) == ("said\n", "", "not done after 1 s")


def test_the_output_of_nvidia_smi_is_parsed(scripts, tmp_path, monkeypatch):
    from card import Card

    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.86.15, 1980, 700.00, 143771, 9.0'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert Card.of_this_machine() == Card(
        device_kind="NVIDIA H200",
        text="NVIDIA H200, 570.86.15, 1980 MHz, 700.00 W",
        memory_bytes=143771 * 2**20,
        capability=(9, 0),
    )
    monkeypatch.setenv("PATH", "")
    assert Card.of_this_machine() is None


def test_cudnn_kernels_are_found_in_a_compiled_step(scripts):
    from ours import KERNELS

    text = """%a = (bf16[8]) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"
%b = (bf16[8]) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
%c = bf16[8] custom-call(%q), custom_call_target="__cublas$lt$matmul"
%d = bf16[8] custom-call(%q), custom_call_target="__cudnn$convForward\""""
    assert {name: len(re.findall(pattern, text)) for name, pattern in KERNELS.items()} == {
        "cudnn": 2,
        "triton": 0,
        "cublas": 1,
    }


@pytest.mark.slow  # imports PyTorch
@pytest.mark.parametrize(
    ("kernels", "kind"),
    [
        (
            [
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64",
                "ampere_bf16_s16816gemm",
            ],
            "cudnn",
        ),
        (
            [
                "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>",
                "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
            ],
            "flash",
        ),
        (["fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)"], "efficient"),
        (
            ["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "flash_fwd_kernel"],
            "cudnn, flash",
        ),
        (["softmax_warp_forward"], "math"),
        ([], "not known: the profiler saw no kernels"),
    ],
)
def test_the_attention_kernel_of_pytorch_is_recognised(kernels, kind, scripts):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert importlib.import_module("theirs").whose(kernels) == kind


def test_pytorch_without_a_gpu_is_refused(scripts, monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from cases import SMOKE

    with pytest.raises(SystemExit, match="PyTorch sees no GPU"):
        importlib.import_module("theirs").train(SMOKE[2], smoke=False)


@pytest.mark.nightly  # half a minute: trains with PyTorch, for a script that a GPU runs
def test_pytorch_trains_models_of_the_same_sizes(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    ended = subprocess.run(
        [
            sys.executable,
            FOLDER / "run.py",
            "--smoke",
            "--only",
            "eager",
            "--out",
            tmp_path / "rows.jsonl",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["name"], row["weights"]) for row in rows] == [
        ("gpt2-nano 4 x 128", "f32"),
        ("llama-nano 4 x 128, all in bf16", "bf16"),
    ]
    for row in rows:
        assert "failed" not in row, row
        assert row["loss"] < row["first_loss"]


@pytest.mark.parametrize(
    ("first", "last"), [(math.nan, math.nan), (5.5, math.nan), (0.0, -1.0), (9.0, 5.5), (5.5, 5.5)]
)
def test_losses_that_show_no_training_are_a_failure(first, last, scripts):
    from cases import check_losses

    check_losses(5.6, 5.5, 256)
    with pytest.raises(SystemExit, match="no training steps"):
        check_losses(first, last, 256)


@pytest.mark.parametrize(("batch", "length"), [(8, 1024), (2, 4096)])
def test_attention_kernels_get_rows_of_short_and_long_documents(batch, length, scripts):
    from attention_kernels import documents

    numbers = documents(batch, length)
    lengths = [length / len(np.unique(row)) for row in numbers]
    assert lengths == sorted(lengths)
    assert 8 < lengths[0] < 32
    assert lengths[-1] == length


def test_a_nan_gradient_counts_as_wrong(scripts):
    from attention_kernels import error, is_wrong

    right = tuple(jnp.full(3, value) for value in (1.0, 2.0, 3.0, 4.0))
    assert error(right, right) == 0.0
    assert error((*right[:2], right[2] + 0.3, right[3]), right) == pytest.approx(0.1)
    for place in range(4):
        broken = [*right]
        broken[place] = broken[place].at[1].set(math.nan)
        assert math.isnan(error(broken, right)), place
    assert not is_wrong(0.01, 0.01)
    assert is_wrong(0.1, 0.01)
    assert is_wrong(math.nan, 0.01)
    assert is_wrong(0.01, math.nan)


@pytest.mark.parametrize("script", ["attention_kernels.py", "fp8.py"])
def test_without_a_gpu_the_scripts_end_with_one_line(script):
    ended = subprocess.run(
        [sys.executable, FOLDER / script],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "PYTHONPATH": str(FOLDER.parents[1])},
    )
    assert ended.returncode == 2
    assert "there is none" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_fp8_matmuls_are_counted(scripts):
    from fp8 import PRODUCTS, fp8_kernels

    assert (
        fp8_kernels(
            'custom_call_target="__cublas$lt$matmul$f8"\ncustom_call_target="__cublas$lt$matmul"\n'
            * PRODUCTS
        )
        == PRODUCTS
    )


def test_programs_compiled_for_another_commit_are_compiled_again(
    scripts, tmp_path, monkeypatch, capsys
):
    import compiled
    from cases import CASES

    ours, made, answers = [case for case in CASES if case.who == "ours"], [], {}
    monkeypatch.setattr(
        compiled,
        "compiled",
        lambda case, cluster: (
            made.append(case)
            or {
                "name": str(case),
                "target": "h200",
                "model_flops": 1.0,
                "predicted_bytes": 1,
                "version": "jax",
                "date": "today",
                **answers,
            }
        ),
    )
    monkeypatch.setattr(compiled, "table", lambda rows: str(len(rows)))

    def number_made(commit: str) -> tuple[int, int]:
        made.clear()
        monkeypatch.setattr(
            "sys.argv", ["compiled.py", "--out", str(tmp_path / "rows.jsonl"), "--commit", commit]
        )
        code = compiled.main()
        assert capsys.readouterr().out.startswith(f"{len(ours)}\n")
        return code, len(made)

    assert [number_made(commit) for commit in ("one", "one", "two", "two+", "two+", "")] == [
        (0, len(ours)),
        (0, 0),
        *[(0, len(ours))] * 4,
    ]
    answers["failed"] = "the plan does not compile"
    assert number_made("three") == (1, len(ours))


def test_only_takes_whole_lines_first_and_keeps_the_order(scripts):
    import run
    from cases import CASES

    found = run.named(["ours gpt2-xl 16 x 1024", "compile gpt2"], CASES)
    assert [f"{case.who} {case}" for case in found] == [
        "ours gpt2-xl 16 x 1024",
        "compile gpt2 32 x 1024",
        "compile gpt2-xl 16 x 1024",
    ]
    assert run.named([""], CASES) == list(CASES)
    assert run.named(["no such case"], CASES) == []
