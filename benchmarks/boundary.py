"""Cost of a mesh axis that crosses processes: two processes with a core each, compared with one
process with both cores.

    python benchmarks/boundary.py [--steps 60] [--repetitions 3] [--model-width 384]

There are two devices and one axis of size 2. In one process the devices share its memory. As two
processes, pinned to a core each, they communicate over the loopback device (gloo). Nothing else
differs. The two kinds of run alternate. A run's figure is its median step time without the first
quarter of its steps; a table cell is the median over runs.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).resolve().parent.parent / "scripts" / "train.py"
AXES = {
    "data=2": ("", ["--mesh", "data=2"]),
    "fsdp=2": ("zero 3", ["--mesh", "fsdp=2", "--zero", "3"]),
    "tensor=2": ("", ["--mesh", "tensor=2"]),
    "pipe=2": ("8 microbatches", ["--mesh", "pipe=2", "--microbatches", "8"]),
}
GLOBAL_BATCH, SEQ_LEN = 8, 128


def flags_of(width: int, steps: int) -> list[str]:
    return [
        "--model",
        "gpt2-nano",
        "--set",
        "model.num_layers=4",
        "--set",
        f"model.embed_dim={width}",
        "--set",
        f"model.num_heads={width // 64}",
        "--set",
        f"model.num_kv_heads={width // 64}",
        "--set",
        "model.head_dim=64",
        "--set",
        f"model.mlp_dim={4 * width}",
        "--seq-len",
        str(SEQ_LEN),
        "--global-batch",
        str(GLOBAL_BATCH),
        "--steps",
        str(steps),
        "--set",
        "eval_every=0",
        "--set",
        "checkpoint.every=0",
        "--progress",
        "none",
    ]


def step_s(flags: list[str], num_processes: int) -> tuple[float, float]:
    """Median step time in seconds, and the last loss."""
    with tempfile.TemporaryDirectory() as folder:
        directory, processes = Path(folder) / "run", []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for number in range(num_processes):
            several = (
                [
                    "--coordinator",
                    f"127.0.0.1:{port}",
                    "--num-processes",
                    "2",
                    "--process-id",
                    str(number),
                ]
                if num_processes == 2
                else []
            )
            processes.append(
                subprocess.Popen(
                    [
                        "taskset",
                        "-c",
                        str(number) if several else "0,1",
                        sys.executable,
                        str(TRAIN),
                        "--run-dir",
                        str(directory),
                        "--cpu-devices",
                        str(2 // num_processes),
                        *several,
                        *flags,
                    ],
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ,
                )
            )
        said = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("\n".join(said))
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_time_s"] for row in rows[len(rows) // 4 :]), rows[-1]["loss"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (default: 60)")
    parser.add_argument("--repetitions", type=int, default=3, help="runs per axis (default: 3)")
    parser.add_argument(
        "--model-width",
        type=int,
        default=384,
        help="embed_dim of the model, a multiple of 128 (default: 384)",
    )
    args = parser.parse_args()
    flags = flags_of(args.model_width, args.steps)
    print(
        "| axis between the processes | one process: s per step | two processes: s per step |"
        " cost of the boundary | losses differ by |\n|---|---|---|---|---|",
        flush=True,
    )
    for axis, (more, layout) in AXES.items():
        one, two = [], []
        for _ in range(args.repetitions):
            one.append(step_s([*flags, *layout], 1))
            two.append(step_s([*flags, *layout], 2))
        medians = [statistics.median(each for each, _ in runs) for runs in (one, two)]
        spread = [
            f"{medians[index]:.3f} ({min(runs)[0]:.3f} to {max(runs)[0]:.3f})"
            for index, runs in enumerate((one, two))
        ]
        print(
            f"| {axis}{more and ', ' + more} | {spread[0]} | {spread[1]} |"
            f" {medians[1] / medians[0] - 1:+.0%} | {abs(one[0][1] / two[0][1] - 1):.1e} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
