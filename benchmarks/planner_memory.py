"""Accuracy of the planner's memory estimate: the estimate beside the figure of the compiled step,
for H100s, which need not be present.

    pip install 'optimus-jax[plan-gpu]'
    python benchmarks/planner_memory.py --out memory.jsonl             # about 10 s per plan
    python benchmarks/planner_memory.py --out memory.jsonl --write

Called again, it compiles only the plans that are missing in the file. --write adds the table to its
page in benchmarks/results/.

There are five lists of plans on 8 to 256 GPUs, mostly of gpt2-xl, llama3-8b and llama3.3-70b:
those of planner_memory_cases.py, and *drawn*, which is drawn at random from the legal plans
(--seed).
"""

import argparse
import datetime
import json
import random
from collections.abc import Iterable
from pathlib import Path

import jax
from compile_for_gpu import asked
from planner_memory_cases import FAMILIES, FRESH, LOOPS, STUDIED

from optimus_jax.config import Config
from optimus_jax.errors import OptimusError
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_check import HEADROOM_SHARE, check
from optimus_jax.planning.cost.memory import MemoryEstimate, memory_of_run
from optimus_jax.planning.search.layouts import axis_sizes
from optimus_jax.planning.search.search import USABLE_SHARE
from optimus_jax.system.paths import path_argument

CAPACITIES = {"A100 40 GB": 40e9, "H100 80 GB": 80e9, "H200 141 GB": 141e9}
"""Device memory for which each figure is checked: does the plan fit? Three sizes give more plans
near a limit."""
DRAWN_BETWEEN = (5e9, 150e9)
"""Range of the estimated bytes of drawn plans."""
DRAWN_DEVICES, DRAWN_MODELS = (
    (8, 64, 256),
    {"gpt2-xl": (512, 1024), "llama3-8b": (2048, 4096, 8192), "llama3.3-70b": (2048, 4096, 8192)},
)
RESULTS = Path(__file__).with_name("results")


def main() -> None:
    """Compile the plans that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("planner_memory.jsonl"),
        help="JSON Lines of compiled plans; these are not compiled again",
    )
    parser.add_argument(
        "--draw", type=int, default=24, help="number of plans drawn at random (default: 24)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kernels",
        default="xla,cudnn",
        help="attention kernels; every plan is compiled with each (default: xla,cudnn)",
    )
    parser.add_argument("--list", help="lists to compile, such as families,loops (default: all)")
    parser.add_argument("--only-report", action="store_true", help="compile nothing")
    parser.add_argument("--write", action="store_true", help="add the table to its results page")
    args = parser.parse_args()
    lists = {
        "studied": lines(STUDIED),
        "fresh": lines(FRESH),
        "drawn": drawn(args.draw, args.seed),
        "families": lines(FAMILIES),
        "loops": lines(LOOPS),
    }
    if args.list:
        lists = {name: lists[name] for name in args.list.split(",")}
    cases = [
        (name, f"{line} attention={kernel}")
        for name, group in lists.items()
        for kernel in args.kernels.split(",")
        for line in group
    ]
    if not args.only_report:
        compile_missing(args.out, [line for _, line in cases])
    text = table(cases, known(args.out))
    print(text)
    if args.write:
        page = RESULTS / "planner-memory.md"
        head, earlier = page.read_text(encoding="utf-8").split("\n## ", 1)
        chosen = f"--list {args.list}" if args.list else f"--draw {args.draw} --seed {args.seed}"
        page.write_text(
            f"{head}\n## {datetime.date.today()}\n\n`python benchmarks/planner_memory.py {chosen}"
            f" --kernels {args.kernels}`, jax {jax.__version__};\ncompiled for H100 SXM,"
            f" not run.\n\n{text}\n\n## {earlier}",
            encoding="utf-8",
        )


def lines(text: str) -> list[str]:
    """The plans of a list, with single spaces."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def parsed(line: str) -> tuple[Config, Plan, MemoryEstimate]:
    """The plan of a line, and its estimate. Raises OptimusError if the plan is not legal."""
    model, seq_len, rows, mesh, *settings = line.split()
    config, plan, _ = asked(
        model,
        mesh,
        rows=int(rows),
        seq_len=int(seq_len),
        settings={
            f"parallel.{name}": value for name, value in (each.split("=", 1) for each in settings)
        },
    )
    return (
        config,
        plan,
        memory_of_run(config, plan),
    )


def drawn(count: int, seed: int) -> list[str]:
    """Legal plans drawn at random; the same plans for the same seed."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        model = draw.choice(list(DRAWN_MODELS))
        axes = draw.choice(list(axis_sizes(draw.choice(DRAWN_DEVICES))))
        settings = [
            f"remat={draw.choice(('none', 'selective', 'dots', 'full'))}",
            f"microbatches={draw.choice((1, 2, 4, 8, 16, 32))}",
        ]
        if axes.fsdp > 1:
            settings.append(f"zero={draw.choice((1, 2, 3))}")
        if axes.pipe > 1:
            settings += [
                f"schedule={draw.choice(('gpipe', '1f1b', 'interleaved'))}",
                f"stage_residuals={draw.choice(('keep', 'recompute'))}",
            ]
        line = " ".join(
            [
                model,
                str(draw.choice(DRAWN_MODELS[model])),
                str(draw.choice((1, 2, 4))),
                str(axes),
                *settings,
            ]
        )
        try:
            low, high = DRAWN_BETWEEN
            if low <= parsed(f"{line} attention=xla")[2].total <= high:
                found.append(line)
        except OptimusError:
            continue  # not legal, so draw another
    return found


def known(path: Path) -> dict[str, dict]:
    """The records of compiled plans, by line."""
    return (
        {record["plan"]: record for record in map(json.loads, path.read_text().splitlines())}
        if path.exists()
        else {}
    )


def compile_missing(path: Path, wanted: Iterable[str]) -> None:
    """Compile the missing plans one after the other, and append each record at once."""
    missing = [line for line in wanted if line not in known(path)]
    for done, line in enumerate(missing, start=1):
        model, seq_len, rows, mesh, *settings = line.split()
        config, plan, cluster = asked(
            model,
            mesh,
            rows=int(rows),
            seq_len=int(seq_len),
            settings={
                f"parallel.{name}": value
                for name, value in (each.split("=", 1) for each in settings)
            },
        )
        print(f"compiling {done} of {len(missing)}: {line}", flush=True)
        try:
            report = check(config, plan, cluster)
        except OptimusError as error:
            print(error, flush=True)
            continue
        record = {
            "plan": line,
            "compiled_bytes": report.total_bytes,
            "argument_bytes": report.argument_bytes,
            "compile_s": report.compile_s,
            "jax": jax.__version__,
        }
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def table(cases: list[tuple[str, str]], records: dict[str, dict]) -> str:
    """Markdown: a table of the errors of each list, and a table of all compiled plans."""
    rows = [
        (name, line, parsed(line)[2], records[line]["compiled_bytes"])
        for name, line in cases
        if line in records
    ]
    out = [
        (
            "A plan is estimated to fit if it needs at most 90% of a device, and compiled to fit"
            f" if it leaves {HEADROOM_SHARE:.0%}."
        ),
        "",
        "| list | kernel | plans | mean error | worst too low | worst too high | "
        + " | ".join(f"wrongly fits / wrongly refused, {name}" for name in CAPACITIES)
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(CAPACITIES),
    ]
    groups = sorted({(name, kernel_of(line)) for name, line, *_ in rows}, reverse=True)
    for key in groups:
        out.append(
            summary(
                *key,
                [
                    (estimate, compiled)
                    for name, line, estimate, compiled in rows
                    if (name, kernel_of(line)) == key
                ],
            )
        )
    if len(groups) > 1:
        every = [(estimate, compiled) for *_, estimate, compiled in rows]
        out.append(summary("all", "both", every))
    out += ["", "| list | plan | compiled GiB | estimated GiB | error |", "|---|---|---|---|---|"]
    out += [
        f"| {name} | {line} | {compiled / 2**30:.2f} | {estimate.total / 2**30:.2f} |"
        f" {estimate.total / compiled - 1:+.1%} |"
        for name, line, estimate, compiled in rows
    ]
    return "\n".join(out)


def summary(name: str, kernel: str, pairs: list[tuple[MemoryEstimate, int]]) -> str:
    """The table row of one list."""
    errors = [estimate.total / compiled - 1 for estimate, compiled in pairs]
    verdicts = []
    for capacity in CAPACITIES.values():
        both = [
            (estimate.total <= USABLE_SHARE * capacity, compiled <= (1 - HEADROOM_SHARE) * capacity)
            for estimate, compiled in pairs
        ]
        verdicts.append(f"{both.count((True, False))} / {both.count((False, True))}")
    return (
        f"| {name} | {kernel} | {len(pairs)} | {sum(map(abs, errors)) / len(errors):.1%} |"
        f" {min(errors):+.1%} | {max(errors):+.1%} | " + " | ".join(verdicts) + " |"
    )


def kernel_of(line: str) -> str:
    """The attention kernel that a line names."""
    return line.rsplit("attention=", 1)[1]


if __name__ == "__main__":
    main()
