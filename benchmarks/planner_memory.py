"""Accuracy of the planner's memory estimate: the estimate beside the figure of the compiled step,
for H100s, which need not be present.

    pip install 'optimus-jax[plan-gpu]'
    python benchmarks/planner_memory.py --out memory.jsonl             # about 10 s per plan
    python benchmarks/planner_memory.py --out memory.jsonl --write

Called again, it compiles only the plans that are missing in the file. --write adds the table to its
page in benchmarks/results/.

There are four lists of plans on 8 to 256 GPUs, mostly of gpt2-xl, llama3-8b and llama3.3-70b. The
formulas of the estimate were developed on *studied* with XLA's attention. After *fresh* with XLA's
attention they were changed once (the shares of attention scores). *drawn* is drawn at random from
the legal plans (--seed); nothing was changed after it. For cuDNN's attention one constant was
changed (STREAMS_AGAIN, what a recomputed layer produces), because of two cases of benchmarks/gpu
and not because of these lists. *families* has other families than GPT-2 and Llama, and plans that
split the stream's tokens; GATHERED_STREAMS was chosen before it was compiled. A line is a plan:
model, tokens per example, examples of a microbatch on a device, mesh, settings.
"""

import argparse
import datetime
import json
import random
from collections.abc import Iterable
from pathlib import Path

import jax
from compile_for_gpu import asked

from optimus_jax.config import Config
from optimus_jax.errors import OptimusError
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_check import HEADROOM_SHARE, check
from optimus_jax.planning.cost.memory import MemoryEstimate, memory_of_run
from optimus_jax.planning.search.layouts import axis_sizes
from optimus_jax.planning.search.search import USABLE_SHARE
from optimus_jax.system.paths import path_argument

STUDIED = """
gpt2-xl      1024 2  data=8
gpt2-xl      1024 4  data=8                       microbatches=2 remat=selective
gpt2-xl      1024 8  fsdp=8
llama3-8b    4096 1  fsdp=8
llama3-8b    4096 2  fsdp=8                       remat=selective
llama3-8b    4096 1  pipe=4,tensor=2              microbatches=8
llama3.3-70b 4096 1  fsdp=64                      remat=full
llama3.3-70b 4096 1  pipe=8,tensor=8              microbatches=16 remat=selective
gpt2-xl      1024 4  fsdp=8                       zero=1 microbatches=4
gpt2-xl      1024 4  fsdp=8                       zero=2 microbatches=2 remat=dots
gpt2-xl      1024 16 fsdp=8                       microbatches=2 remat=full
gpt2-xl      1024 2  pipe=4,data=2                microbatches=8
gpt2-xl      1024 2  pipe=2,fsdp=4                microbatches=8 stage_residuals=recompute \
    remat=full
gpt2-xl      1024 2  pipe=4,fsdp=2                microbatches=8 zero=1 schedule=interleaved
gpt2-xl      1024 4  data=4,tensor=2              remat=selective rules=heads=none
llama3-8b    8192 1  fsdp=8                       remat=full
llama3-8b    2048 1  fsdp=8                       zero=1 microbatches=4 remat=full
llama3-8b    4096 2  tensor=8
llama3-8b    4096 2  fsdp=4,tensor=2              remat=dots
llama3-8b    4096 1  pipe=2,fsdp=2,tensor=2       microbatches=8 zero=2 stage_residuals=recompute \
    remat=full
llama3-8b    4096 1  pipe=2,tensor=4              microbatches=8 schedule=interleaved repeats=4 \
    stage_residuals=recompute remat=full
llama3-8b    2048 2  fsdp=2,tensor=4              zero=1 microbatches=4 remat=selective
llama3.3-70b 4096 1  fsdp=8                       remat=full
llama3.3-70b 4096 1  pipe=2,tensor=4              microbatches=4 stage_residuals=recompute \
    remat=full
gpt2-xl      1024 4  data=64                      remat=selective
gpt2-xl      1024 8  fsdp=64
gpt2-xl      1024 4  data=8,fsdp=8                zero=2 microbatches=4 remat=full
gpt2-xl      1024 1  pipe=8,data=8                microbatches=32 schedule=gpipe \
    stage_residuals=recompute
gpt2-xl      1024 2  pipe=8,data=8                microbatches=16 remat=selective
gpt2-xl      1024 2  pipe=4,data=16               microbatches=8 schedule=interleaved repeats=4 \
    remat=dots
llama3-8b    8192 1  fsdp=64
llama3-8b    4096 2  data=8,fsdp=8                microbatches=2 remat=selective
llama3-8b    4096 2  data=8,tensor=8              microbatches=2
llama3-8b    4096 1  pipe=4,data=8,tensor=2       microbatches=16 remat=selective
llama3-8b    2048 1  pipe=8,fsdp=8                microbatches=16 zero=1 remat=dots
llama3-8b    4096 2  data=4,fsdp=4,tensor=4       zero=2 remat=full
llama3-8b    2048 1  pipe=4,data=16               microbatches=8 schedule=gpipe \
    stage_residuals=recompute
llama3.3-70b 4096 2  fsdp=8,tensor=8              remat=selective
llama3.3-70b 4096 1  pipe=4,fsdp=4,tensor=4       microbatches=16 stage_residuals=recompute \
    remat=full
llama3.3-70b 4096 1  pipe=8,tensor=8              microbatches=16 schedule=interleaved
gpt2-xl      1024 2  data=256
gpt2-xl      1024 8  data=32,fsdp=8               remat=selective
gpt2-xl      1024 2  pipe=16,data=16              microbatches=32 stage_residuals=recompute \
    remat=full
gpt2-xl      1024 2  pipe=8,data=8,fsdp=4         microbatches=16 schedule=interleaved
llama3-8b    4096 1  data=32,fsdp=8
llama3-8b    4096 4  fsdp=64,tensor=4             remat=selective
llama3-8b    4096 1  pipe=8,data=16,tensor=2      microbatches=32 schedule=interleaved
llama3-8b    4096 1  pipe=2,data=4,fsdp=32        microbatches=8 stage_residuals=recompute \
    remat=dots
llama3.3-70b 4096 1  fsdp=256
llama3.3-70b 4096 1  data=4,fsdp=8,tensor=8       remat=dots
llama3.3-70b 4096 1  pipe=8,data=4,tensor=8       microbatches=32
llama3.3-70b 4096 1  pipe=16,fsdp=2,tensor=8      microbatches=32 zero=1 \
    stage_residuals=recompute remat=full
llama3.3-70b 4096 1  pipe=4,data=2,fsdp=4,tensor=8 microbatches=16 zero=2 schedule=gpipe remat=full
"""
FRESH = """
llama2-13b   4096 1  fsdp=16                      remat=selective
llama2-13b   2048 1  pipe=4,fsdp=4,tensor=2       microbatches=12 remat=full
gpt2-large   1024 4  pipe=2,data=4                microbatches=8 schedule=gpipe remat=selective
gpt2-large   1024 8  fsdp=4,data=2                zero=2 microbatches=3 remat=none
llama3.2-1b  8192 2  data=8                       remat=full
llama3.2-1b  4096 4  fsdp=2,tensor=4              zero=3 remat=selective
llama3-8b    4096 1  fsdp=8                       remat=full
llama3-8b    8192 1  pipe=4,tensor=8              microbatches=8 remat=full
llama3-8b    4096 1  pipe=2,fsdp=4                microbatches=8 schedule=interleaved repeats=2 \
    remat=selective
llama3-8b    2048 3  fsdp=16                      microbatches=2 remat=dots
llama3-8b    4096 1  pipe=8,data=4                microbatches=8 send_slack=true remat=selective
llama3.3-70b 8192 1  fsdp=32,tensor=8             remat=full
llama3.3-70b 2048 1  pipe=16,fsdp=8               microbatches=32 remat=full
llama3.3-70b 4096 1  pipe=8,fsdp=4,tensor=4       zero=1 microbatches=16 schedule=interleaved \
    stage_residuals=recompute remat=selective
llama3.3-70b 4096 1  data=8,fsdp=32               microbatches=2 remat=full
gpt2-xl      1024 4  pipe=8,fsdp=8                microbatches=8 zero=2 schedule=gpipe remat=dots
gpt2-xl      1024 4  fsdp=64                      microbatches=4 remat=selective
llama3-8b    4096 1  data=4,tensor=4              zero=0 microbatches=4 rules=mlp=none \
    remat=selective
"""
FAMILIES = """
mistral-7b   4096 1  fsdp=8
mistral-7b   4096 2  fsdp=4,tensor=2              remat=full
qwen3-8b     4096 1  fsdp=8                       remat=selective
qwen3-8b     4096 1  pipe=4,tensor=2              microbatches=8
qwen3-8b     4096 2  tensor=8                     sequence_parallel=true
gpt-j-6b     2048 2  fsdp=8
gpt-j-6b     2048 1  pipe=4,fsdp=2                microbatches=8 remat=full
gemma3-4b    4096 1  fsdp=8                       remat=full
llama3-8b    4096 4  tensor=8                     remat=full sequence_parallel=true
llama3-8b    4096 1  pipe=2,tensor=4              microbatches=8 sequence_parallel=true
llama3.3-70b 8192 1  pipe=4,fsdp=2,tensor=8       microbatches=8 remat=selective \
    sequence_parallel=true
"""
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
    parser.add_argument("--list", help="lists to compile, such as fresh,families (default: all)")
    parser.add_argument("--only-report", action="store_true", help="compile nothing")
    parser.add_argument("--write", action="store_true", help="add the table to its results page")
    args = parser.parse_args()
    lists = {
        "studied": lines(STUDIED),
        "fresh": lines(FRESH),
        "drawn": drawn(args.draw, args.seed),
        "families": lines(FAMILIES),
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
        page.write_text(
            f"{head}\n## {datetime.date.today()}\n\n`python benchmarks/planner_memory.py --draw"
            f" {args.draw} --seed {args.seed}`, jax {jax.__version__}; compiled for H100 SXM, not"
            f" run.\n\n{text}\n\n## Earlier: {earlier}",
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
    for key in sorted({(name, kernel_of(line)) for name, line, *_ in rows}, reverse=True):
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
    out.append(summary("all", "both", [(estimate, compiled) for *_, estimate, compiled in rows]))
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
