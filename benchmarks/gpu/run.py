"""Training steps on one GPU: ours, and PyTorch's for the same models, measured in one session on
the same GPU.

    pip install -e '.[cuda13,huggingface]'                           # or cuda12
    python benchmarks/gpu/run.py --out gpu.jsonl                     # all cases, 8 minutes a call
    python benchmarks/gpu/run.py --out gpu.jsonl --table             # only print the table
    python benchmarks/gpu/run.py --out options.jsonl --experiments   # XLA options instead
    python benchmarks/gpu/run.py --out smoke.jsonl --smoke           # small cases on a CPU

The extra `huggingface` (torch and transformers) is for PyTorch's cases. A call measures as many
cases as its time allows and prints the table; the next call measures the cases that are left.

Each case runs in its own process, so that it has all of the GPU's memory and is not affected by the
failure of another. The output of a failed case is written to a file beside --out. A case is a plan
of one device with random tokens, and runs as a user's run would: with the share of memory that this
project gives JAX, and the environment's XLA_FLAGS. A row of tokens is one document, in PyTorch too,
unless the case says packed. Model FLOPs are counted alike for all (optimus_jax/models/flops.py): 6
for each token and element of a matrix that it is multiplied by (not the embedding's rows), and the
causal half of attention. MFU is their share of the data sheet's dense bf16 peak.

Figures of the same commit, GPU and XLA_FLAGS are not measured again, unless files were changed or
the commit is unknown (--commit NAME gives it). Exit code 1: no case that was started has figures;
2: there was nothing to start.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax
from card import NO_CARD, Card, flags_of, has_no_room
from cases import CASES, EXPERIMENTS, SMOKE, Case, as_argument
from rows import (
    NAMES,
    commit_here,
    has_figures,
    identity,
    is_done,
    is_known,
    report,
    rows_of,
    table,
)

from optimus_jax.system.paths import path_argument

HERE = Path(__file__).resolve().parent
LONGEST_S = {"compile": 330.0}
"""Time limit of a case. torch.compile compiles gpt2-xl's 48 layers one by one."""
LONGEST_OTHER_S = 240.0
LIKELY_S = {
    ("matmul", ""): 15,
    ("compile", "gpt2-xl"): 170,
    ("compile", "llama3-8b"): 90,
    ("compile", "llama3.2-1b"): 60,
    ("compile", "gpt2"): 50,
    ("ours", "gpt2-xl"): 45,
    ("ours", "llama3-8b"): 45,
}
"""A case is not started with less time left than this. The figures are guesses."""
LIKELY_OTHER_S = 35
LATE = "not done after"


def measured(case: Case, left_s: float, complaints: Path, *, smoke: bool) -> dict:
    """Measure a case. Returns its figures, or why there are none.

    The output of a failed case is appended to the file `complaints`.
    """
    limit_s = min(LONGEST_S.get(case.who, LONGEST_OTHER_S), left_s)
    program = HERE / ("ours.py" if case.who in ("ours", "matmul") else "theirs.py")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="torchinductor-") as cache:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
            ),
            "XLA_FLAGS": flags_of(case),
            "TORCHINDUCTOR_CACHE_DIR": cache,
            **({} if smoke else {"JAX_PLATFORMS": "cuda"}),
        }
        # compile time is measured without a cache, for both
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        said, errors, why = _run(
            [sys.executable, str(program), as_argument(case), *["--smoke"] * smoke],
            environment,
            limit_s,
        )
    figures = _figures(said)
    if not figures:
        with complaints.open("a") as file:
            file.write(f"{NAMES[case.who]}: {case}: {why}\n{errors}\n")
        figures = (
            {"left_out": f"{why}, which were left of all"}
            if why.startswith(LATE) and limit_s == left_s
            else {"failed": f"{why}: {_reason(errors)}"}
        )
    return {"took_s": round(time.perf_counter() - started, 1), **figures}


def _run(
    command: Sequence[str], environment: dict[str, str], limit_s: float
) -> tuple[str, str, str]:
    """Run a command. Returns its standard output, its standard error and how it ended.

    After `limit_s` the whole process group is killed, because child processes would keep the GPU
    and the pipes open.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    try:
        said, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return *process.communicate(), f"{LATE} {limit_s:.0f} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return said, errors, f"exit code {process.returncode}"


def _figures(said: str) -> dict:
    """The figures in the last line of the output; {} if there are none.

    The process may have hung or failed after printing them.
    """
    try:
        found = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _reason(errors: str) -> str:
    lines = [line for line in errors.strip().splitlines() if line.strip()] or ["no output"]
    told = [
        line
        for line in lines
        if any(
            sign in line for sign in ("RESOURCE_EXHAUSTED", "Check failed", "Unknown flag", "Error")
        )
    ]
    return (told or lines)[-1][:300]


def fill(
    out: Path, cases: Sequence[Case], limit_s: float, card: Card | None, about: dict[str, str]
) -> list[dict]:
    """Measure the cases that fit and have no figures in `out` yet, while there is time.

    Every row is appended to `out`, together with `about`. Returns the rows of the cases that were
    started.
    """
    print(about["machine"], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    if card is not None and not is_known(about["commit"]):
        print(
            f"commit {about['commit'] or 'unknown'}: the next call measures everything again; name"
            " the code with --commit NAME",
            flush=True,
        )
    done, begun, until = rows_of(out), [], time.perf_counter() + limit_s
    for case in cases:
        asked = {
            **asdict(case),
            "name": str(case),
            "flags": flags_of(case),
            "date": time.strftime("%Y-%m-%d"),
            **about,
        }
        left_s = until - time.perf_counter()
        if is_done(done, asked):
            print(f"already there: {NAMES[case.who]}: {case}", flush=True)
            continue
        if card is not None and (too_large := has_no_room(case, card)):
            row = asked | {"left_out": too_large}
        elif left_s < LIKELY_S.get((case.who, case.model), LIKELY_OTHER_S):
            row = asked | {"left_out": "no time"}
        else:
            row = asked | measured(case, left_s, out.with_suffix(".stderr"), smoke=card is None)
            begun.append(row)
        if "left_out" not in row or not any(identity(row) == identity(before) for before in done):
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(table([row]).splitlines()[-1], flush=True)
    return begun


def named(texts: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """The cases whose line is one of `texts`, or else contains it, in the order of `texts`."""
    lines = {f"{case.who} {case}": case for case in cases}
    return list(
        dict.fromkeys(
            case
            for text in texts
            for case in (
                [lines[text]]
                if text in lines
                else [case for line, case in lines.items() if text in line]
            )
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("gpu.jsonl"),
        help="JSON Lines, appended to (default: gpu.jsonl)",
    )
    parser.add_argument(
        "--limit-s", type=float, default=460.0, help="seconds for all cases together (default: 460)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help=(
            "only cases whose line is one of these, or contains it, in their order, such as 'ours"
            " gpt2-xl 16 x 1024'; a line begins with ours, eager, compile or matmul"
        ),
    )
    parser.add_argument(
        "--commit",
        default=commit_here(),
        help=(
            "commit of this project, for the rows; rows of another commit are measured again"
            " (default: from git)"
        ),
    )
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument(
        "--experiments", action="store_true", help="measure one case under several XLA options"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run small cases on a machine without a GPU"
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # the GPU's memory is for the cases' processes
    # SIGTERM raises an exception, so that the case is killed and releases the GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begun = []
    if not args.table:
        card = None if args.smoke else Card.of_this_machine()
        if card is None and not args.smoke:
            print(
                "error: nvidia-smi shows no GPU, and on a CPU these cases would take days; --smoke"
                " runs small cases",
                file=sys.stderr,
            )
            return 2
        cases = named(
            args.only, SMOKE if args.smoke else EXPERIMENTS if args.experiments else CASES
        )
        if not cases:
            print(
                "error: no case contains what --only says\n"
                f"  given: {' '.join(args.only)}\n"
                f"  do:    take a part of a line such as 'ours {CASES[1]}'",
                file=sys.stderr,
            )
            return 2
        begun = fill(
            args.out,
            cases,
            args.limit_s,
            card,
            {
                "machine": card.text if card else NO_CARD,
                "command": shlex.join(["benchmarks/gpu/run.py", *sys.argv[1:]]),
                "commit": args.commit,
            },
        )
    print(report(rows_of(args.out)))
    return int(bool(begun) and not any(map(has_figures, begun)))


if __name__ == "__main__":
    sys.exit(main())
