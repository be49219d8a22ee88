"""Compile each of our cases for one GPU without having it: memory, FLOPs and collectives, beside
the planner's figures.

    pip install 'optimus-jax[plan-gpu]'
    python benchmarks/gpu/compiled.py --out compiled.jsonl

This takes some minutes and prints a table. Exit code 1: nothing compiles; 2: the device is unknown.

Nothing runs, so there are no times. Without a GPU the compiler ignores that an array is on the
host, so for such cases the table has only the planner's figure. For plans of several devices see
benchmarks/compile_for_gpu.py, which shows their collectives.
"""

import argparse
import json
import sys
import time

import jax
from cases import CASES, Case
from ours import config_of
from rows import commit_here, is_of_commit, rows_of

from optimus_jax.config.axes import AxisSizes
from optimus_jax.errors import OptimusError
from optimus_jax.models.flops import step_flops
from optimus_jax.planning.ahead_of_time.compile_check import check
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.system.paths import path_argument

GIB = 2**30


def compiled(case: Case, cluster: Cluster) -> dict:
    """A row: the compiler's figures or why there are none, and the planner's."""
    config = config_of(case)
    plan = plan_for(config, AxisSizes(), cluster.topology())
    plan.validate(config.model, global_batch=case.batch)
    row = {
        "name": str(case),
        "layout": plan.describe(),
        "target": cluster.accelerator.name,
        "capacity_bytes": cluster.accelerator.memory_bytes,
        "model_flops": step_flops(config.model, num_sequences=case.batch, seq_len=case.seq_len),
        "predicted_bytes": memory_of_run(config, plan).total,
        "version": f"jax {jax.__version__}",
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        report = check(config, plan, cluster)
    except OptimusError as error:
        return row | {"failed": str(error).splitlines()[0]}
    return row | {
        "state_bytes": report.argument_bytes,
        "temp_bytes": report.temp_bytes,
        "total_bytes": report.total_bytes,
        "fits": report.fits,
        "dot_flops": report.dot_flops,
        "collectives": len(report.traffic),
        "attention": report.attention,
        "compile_s": report.compile_s,
    }


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    lines = [
        (
            "| case | state, GiB | whole step, GiB | planner, GiB | fits | products, TFLOP |"
            " model, TFLOP | collectives | attention |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted, model = row["predicted_bytes"], f"{row['model_flops'] / 1e12:,.1f}"
        if "failed" in row:
            lines.append(
                f"| {row['name']} | | not compiled: {row['failed']} | {predicted / GIB:.1f} | | |"
                f" {model} | | |"
            )
            continue
        total = row["total_bytes"]
        lines.append(
            f"| {row['name']} | {row['state_bytes'] / GIB:.1f} | {total / GIB:.1f} |"
            f" {predicted / GIB:.1f} ({predicted / total - 1:+.0%}) |"
            f" {'yes' if row['fits'] else 'NO'} | {row['dot_flops'] / 1e12:,.1f} | {model} |"
            f" {row['collectives'] or 'none'} | {row['attention']} |"
        )
    return "\n".join(lines)


def newest(rows: list[dict], target: str) -> list[dict]:
    """The last row of each case for one device."""
    return list({row["name"]: row for row in rows if row["target"] == target}.values())


def main() -> int:
    """Compile the cases that the file does not have at this commit, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="h200",
        help="an accelerator that optimus_jax/planning/targets describes (default: h200)",
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        help=(
            "JSON Lines of rows; a row of the same, unmodified commit is not compiled again"
            " (default: no file)"
        ),
    )
    parser.add_argument(
        "--commit",
        default=commit_here(),
        help="commit of this project, for the rows (default: from git)",
    )
    args = parser.parse_args()
    try:
        cluster = Cluster.parse(f"{args.device}:1x1")
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = newest(rows_of(args.out) if args.out else [], args.device)
    for case in [each for each in CASES if each.who == "ours"]:
        if any(row["name"] == str(case) and is_of_commit(row, args.commit) for row in rows):
            continue
        print(f"{case} ...", file=sys.stderr)
        rows.append(compiled(case, cluster) | {"commit": args.commit})
        if args.out and "failed" not in rows[-1]:
            with args.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    rows = newest(rows, args.device)
    print(table(rows))
    print(
        "\n".join(
            [
                "",
                *dict.fromkeys(
                    f"{row['date']}, commit {row.get('commit') or 'unknown'}, {row['version']}"
                    for row in rows
                ),
            ]
        )
    )
    return int(all("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
