"""Training steps on one GPU, ours beside what a user would run instead, in the same minutes on the
same card.

    pip install -e '.[cuda13,huggingface]'                           or cuda12; torch and
    transformers are for the others python benchmarks/gpu/run.py --out gpu.jsonl
    every case that the time suffices for (8 minutes), and the table; called again, the cases that
    are left python benchmarks/gpu/run.py --out gpu.jsonl --table             of what is in the file
    python benchmarks/gpu/run.py --out options.jsonl --experiments   options of XLA's instead python
    benchmarks/gpu/run.py --out smoke.jsonl --smoke           small ones on a CPU: that the script
    works

Each case is a process of its own, so that it has the card's memory to itself and no other's
failure; what a failed one said lies beside the file. A case is a plan of one device with random
tokens, and runs as a user's would: with the share of memory that the project gives JAX, and
XLA_FLAGS as they are; but a row of tokens is one document, which those of PyTorch are too, unless
it says packed. Model FLOPs are those of optimus_jax/models/flops.py: 6 for each token and element
of a matrix that it is multiplied by (not the embedding's rows), and the causal half of attention,
for all alike; MFU is their share of the data sheet's dense bf16.

Figures of the same commit, card and XLA_FLAGS are not measured again, unless the commit is unknown
(then --commit NAME says which) or something was changed since. Exit code 1: no case that was begun
has figures; 2: there was nothing to begin.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

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
"""Of a case; torch.compile takes gpt2-xl's 48 layers one by one."""
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
"""With less time left a case is not begun. Guesses: nobody has timed them."""
LIKELY_OTHER_S = 35
LATE = "not done after"


def measured(case: Case, left_s: float, complaints: Path, *, smoke: bool) -> dict:
    """A row: figures, or why there are none; the whole of what a failed case said is added to
    `complaints`.
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
        # what compiling takes is measured, of both from nothing
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
    """Both outputs, and how it ended.

    A process that is late is ended with those that it started, which would hold the card and the
    pipes.
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
    """The last line, of a process that may have hung or failed after it; {} if that are no
    figures."""
    try:
        found = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _reason(errors: str) -> str:
    lines = [line for line in errors.strip().splitlines() if line.strip()] or ["it said nothing"]
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
    """Measure the cases that fit and have no figures in `out` yet, while there is time, and add
    them to it; each row tells `about` it. What was begun.
    """
    print(about["machine"], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    if card is not None and not is_known(about["commit"]):
        print(
            f"commit {about['commit'] or 'unknown'}: called again, all is measured again; say which"
            " code this is by --commit NAME",
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("gpu.jsonl"),
        help="JSON Lines, added to (default: gpu.jsonl)",
    )
    parser.add_argument(
        "--limit-s", type=float, default=460.0, help="for all cases together (default: 460)"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help=(
            "cases that contain this, as in 'ours gpt2-xl 16 x 1024' (who: ours, eager, compile,"
            " matmul)"
        ),
    )
    parser.add_argument(
        "--commit",
        default=commit_here(),
        help=(
            "of this project, for the rows; those of another one are measured again (default: what"
            " git says)"
        ),
    )
    parser.add_argument("--table", action="store_true", help="only print what is in the file")
    parser.add_argument(
        "--experiments", action="store_true", help="one case under several of XLA's options"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="small cases for a machine without a GPU"
    )
    args = parser.parse_args()
    # an exception, so that a case does not go on holding the card
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begun = []
    if not args.table:
        card = None if args.smoke else Card.here()
        if card is None and not args.smoke:
            print(
                "error: nvidia-smi shows no GPU, and on a CPU these cases would take days; --smoke"
                " has small ones",
                file=sys.stderr,
            )
            return 2
        cases = [
            case
            for case in (SMOKE if args.smoke else EXPERIMENTS if args.experiments else CASES)
            if args.only in f"{case.who} {case}"
        ]
        if not cases:
            print(
                f"error: no case contains what --only says\n  given: {args.only}\n  do:    take a"
                f" part of a line such as 'ours {CASES[1]}'",
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
                "command": " ".join(["benchmarks/gpu/run.py", *sys.argv[1:]]),
                "commit": args.commit,
            },
        )
    print(report(rows_of(args.out)))
    return int(bool(begun) and not any(map(has_figures, begun)))


if __name__ == "__main__":
    sys.exit(main())
