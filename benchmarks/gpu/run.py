"""Training steps on one GPU, ours beside what a user would run instead, in the same minutes on the same card.

    python benchmarks/gpu/run.py --out gpu.jsonl                     every case that the time suffices for (8 minutes), and the table; called again, the cases that are left
    python benchmarks/gpu/run.py --out gpu.jsonl --table             of what is in the file
    python benchmarks/gpu/run.py --out options.jsonl --experiments   options of XLA's instead
    python benchmarks/gpu/run.py --out smoke.jsonl --smoke           small ones on a CPU: that the script works

Each case is a process of its own, so that it has the card's memory to itself and no other's failure; what a failed one said lies beside the file. A case is a plan of one device with random tokens; model FLOPs
are 6 per parameter and token and the causal half of attention, for all alike (optimus_jax/models/flops.py); MFU is their share of the data sheet's dense bf16.
Needs torch and transformers beside ours, for the others.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cases import CASES, EXPERIMENTS, SMOKE, Case, Who, as_argument

from optimus_jax.mesh.accelerators import accelerator_of_kind

HERE = Path(__file__).resolve().parent
NAMES = {"ours": "optimus_jax", "eager": "PyTorch, eager", "compile": "PyTorch, torch.compile", "matmul": "matrix product alone"}
LONGEST_S = 240.0
"""Of a case."""
LIKELY_S: dict[Who, float] = {"matmul": 20, "ours": 60, "eager": 60, "compile": 120}
"""With less time left a case is not begun."""


def measured(case: Case, limit_s: float, complaints: Path) -> dict:
    """A row: figures, or why there are none; the whole of what a failed case said is added to `complaints`."""
    program = HERE / ("ours.py" if case.who in ("ours", "matmul") else "theirs.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]),
                   "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {case.xla_flags}".strip()}
    started = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, str(program), as_argument(case)], capture_output=True, text=True, timeout=limit_s, env=environment)
        said, errors, why = done.stdout, done.stderr, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        said, errors, why = _text(late.stdout), _text(late.stderr), f"not done after {limit_s:.0f} s"
    figures = _figures(said)
    if not figures:
        with complaints.open("a") as file:
            file.write(f"{NAMES[case.who]}: {case}: {why}\n{errors}\n")
        figures = {"failed": f"{why}: {_reason(errors)}"}
    return {**asdict(case), "name": str(case), "date": time.strftime("%Y-%m-%d"), "took_s": round(time.perf_counter() - started, 1), **figures}


def _figures(said: str) -> dict:
    """The last line, of a process that may have hung or failed after it; {} if that are no figures."""
    try:
        found = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _reason(errors: str) -> str:
    lines = [line for line in errors.strip().splitlines() if line.strip()] or ["it said nothing"]
    told = [line for line in lines if any(sign in line for sign in ("RESOURCE_EXHAUSTED", "Check failed", "Unknown flag", "Error"))]
    return (told or lines)[-1][:300]


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = ["| case | by | step: median (least, most) | tokens/s | TFLOP/s | MFU | peak memory (predicted) | compile | attention |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        head = f"| {row['name']} | {NAMES[row['who']]} |"
        if "failed" in row:
            lines.append(f"{head} failed: {row['failed']} | | | | | | |")
            continue
        accelerator = accelerator_of_kind(row["device"])
        mfu = f"{row['tflops'] * 1e12 / accelerator.dense_peak_flops:.1%}" if accelerator and accelerator.dense_peak_flops else "-"
        least, most = row["spread_s"]
        memory = f"{row['peak_bytes'] / 2**30:.1f} GiB" if row.get("peak_bytes") else "-"
        memory += f" ({row['predicted_bytes'] / 2**30:.1f})" if row.get("predicted_bytes") else ""
        calls = ", ".join(f"{count} {name}" for name, count in row.get("custom_calls", {}).items() if count)
        lines.append(f"{head} {1e3 * row['step_s']:.1f} ms ({1e3 * least:.1f}, {1e3 * most:.1f}) | {row.get('tokens_per_s', 0):,.0f} | {row['tflops']:.0f} | {mfu} | {memory} "
                     f"| {row.get('compile_s', 0):.0f} s | {row.get('attention', '-')}{calls and f': {calls}'} |")
    return "\n".join(lines)


def provenance(rows: list[dict]) -> str:
    """On what, when, of which commits and versions, with which commands the rows were measured."""
    lines = ["", *dict.fromkeys(f"{row['date']}, commit {row['commit'] or 'unknown'}, {row['machine']}: `{row['command']}`" for row in rows)]
    return "\n".join([*lines, *dict.fromkeys(f"{NAMES[row['who']]}: {row['version']}" for row in rows if "version" in row)])


def machine() -> str:
    """The card, its driver and clocks, as nvidia-smi has them."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"no NVIDIA GPU, {platform.machine()}"


def commit() -> str:
    """Of the project, with a + if something was changed since; empty: this is no clone of it."""
    try:
        asked = ["git", "-C", str(HERE), "describe", "--always", "--exclude=*", "--dirty=+"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def rows_of(out: Path) -> list[dict]:
    """What has been measured so far."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def fill(out: Path, cases: Sequence[Case], limit_s: float, only: str, about: dict[str, str]) -> None:
    """Measure the cases that contain `only` and have no figures of this commit in `out` yet, while there is time; each row tells `about` it."""
    print(about["machine"], flush=True)
    done, until = {(row["who"], row["name"]) for row in rows_of(out) if "failed" not in row and row["commit"] == about["commit"]}, time.perf_counter() + limit_s
    for case in cases:
        if only not in f"{case.who} {case}" or (case.who, str(case)) in done:
            continue
        left_s = until - time.perf_counter()
        if left_s < LIKELY_S[case.who]:
            print(f"left out, no time: {NAMES[case.who]}: {case}", flush=True)
            continue
        row = measured(case, min(LONGEST_S, left_s), out.with_suffix(".stderr")) | about
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]).splitlines()[-1], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="JSON Lines, added to (default: gpu.jsonl)")
    parser.add_argument("--limit-s", type=float, default=460.0, help="for all cases together (default: 460)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that contain this, as in 'ours gpt2-xl 16 x 1024' (who: ours, eager, compile, matmul)")
    parser.add_argument("--commit", default=commit(), help="of this project, for the rows; those of another one are measured again (default: what git says)")
    parser.add_argument("--table", action="store_true", help="only print what is in the file")
    parser.add_argument("--experiments", action="store_true", help="one case under several of XLA's options")
    parser.add_argument("--smoke", action="store_true", help="small cases for a machine without a GPU")
    args = parser.parse_args()
    if not args.table:
        fill(args.out, SMOKE if args.smoke else EXPERIMENTS if args.experiments else CASES, args.limit_s, args.only, {
            "machine": machine(), "command": " ".join(["benchmarks/gpu/run.py", *sys.argv[1:]]), "commit": args.commit})
    rows = rows_of(args.out)
    print(table(rows))
    print(provenance(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
