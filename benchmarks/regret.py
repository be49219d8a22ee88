"""Quality of the planner's choice on this machine: measures every legal plan of two small models on
8 virtual devices.

    python benchmarks/regret.py measure --out plans.jsonl
    python benchmarks/regret.py contend --out plans.jsonl
    python benchmarks/regret.py report --out plans.jsonl

`measure` runs all plans (half an hour on 2 cores); called again, it runs the missing ones.
`contend` runs the plans that matter again, longer and in several rounds. `report` prints the regret
of the planner and of simpler rules, and the errors of predictions.

A plan's figure is the minimum CPU-seconds of its steps. Virtual devices share the cores, so wall
time is a noisier multiple of it. Regret is the figure of the chosen plan over that of the best
plan, minus 1. The fastest of many plans measured once is partly luck. Therefore the plans that came
out best, the planner's choices and the plans of the simple rules are measured again, and regret
uses only these figures. Plans are measured in random order, so that a machine that slows down does
not favour one kind of plan.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
from pathlib import Path

from optimus_jax.system.paths import path_argument

NUM_DEVICES = 8
NUM_STEPS = 4
CONTENDERS, ROUNDS, CONTENDING_STEPS = 8, 3, 16
"""Number of fastest plans per model that are measured again, in how many rounds, and for how many
steps."""
TRIED = 3
"""Number of candidates that a run would measure."""
RULES = {
    "fsdp=8, zero 3": (f"fsdp={NUM_DEVICES}", 3),
    "data=8": (f"data={NUM_DEVICES}", 0),
    "a rule table: tensor=2 inside, data outside": ("data=4,tensor=2", 0),
}
"""Usual choices without a planner: axes and ZeRO stage."""
MODELS = {
    "gpt": {
        "model.num_layers": 2,
        "model.embed_dim": 256,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "model.head_dim": 64,
        "model.mlp_dim": 1024,
        "model.vocab_size": 2048,
        "data.seq_len": 256,
        "data.global_batch": 8,
    },
    "llama": {
        "model.family": "llama",
        "model.tied": False,
        "model.num_layers": 3,
        "model.embed_dim": 192,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_dim": 96,
        "model.mlp_dim": 512,
        "model.vocab_size": 4096,
        "data.seq_len": 256,
        "data.global_batch": 4,
    },
}


def config_of(name: str):
    """The config of a model's run. Remat is fixed, because everything fits."""
    from optimus_jax.config import Config

    return Config().with_values(
        {
            **MODELS[name],
            "model.name": name,
            "parallel.remat": "none",
            "parallel.stage_residuals": "keep",
        }
    )


def plans_of(name: str) -> list:
    """All legal plans on this machine's devices."""
    from optimus_jax.mesh.build import discover
    from optimus_jax.plan import Plan
    from optimus_jax.planning.search.layouts import layouts

    return [layout for layout in layouts(config_of(name), discover()) if isinstance(layout, Plan)]


def measure(out: Path, limit: int | None) -> None:
    """Measure the plans that are missing in the file, and append a line for each."""
    done = {(row["model"], row["plan"]) for row in rows(out)}
    todo = [
        (name, plan)
        for name in MODELS
        for plan in plans_of(name)
        if (name, plan.digest) not in done
    ]
    random.Random(0).shuffle(todo)
    run_all(out, todo[:limit], 0, NUM_STEPS)


def contend(out: Path) -> None:
    """Measure the plans that regret depends on in further rounds, and append a line for each."""
    cluster, todo = measured_devices(), []
    for name in MODELS:
        plans, swept = (
            {plan.digest: plan for plan in plans_of(name)},
            measured_in(out, name, first=True),
        )
        order = ranked(cluster, name, {digest: plans[digest] for digest in swept})
        wanted = {
            *sorted(swept, key=lambda digest: swept[digest])[:CONTENDERS],
            order[0],
            *candidates(order, plans)[:TRIED],
            *filter(None, (find(plans, axes, zero) for axes, zero in RULES.values())),
        }
        todo += [(name, plans[digest]) for digest in sorted(wanted)]
    done = max((row["round"] for row in rows(out)), default=0)
    for number in range(done + 1, done + 1 + ROUNDS):
        random.Random(number).shuffle(todo)
        run_all(out, todo, number, CONTENDING_STEPS)


def run_all(out: Path, todo: list, number: int, num_steps: int) -> None:
    """Measure each plan, and append a line."""
    from rich.progress import track

    from optimus_jax.planning.trials.trial import run_trial

    with out.open("a") as file:
        for name, plan in track(todo, f"round {number}, {len(todo)} plans"):
            trial = run_trial(config_of(name), plan, num_steps=num_steps)
            row = {
                "model": name,
                "round": number,
                "plan": plan.digest,
                "layout": plan.describe(),
                **{
                    key: round(getattr(trial, key), 5)
                    for key in ("cpu_s", "step_time_s", "compile_s")
                },
            }
            file.write(json.dumps(row) + "\n")
            file.flush()


def rows(out: Path) -> list[dict]:
    """All measurements. A line without a round belongs to the first round."""
    return (
        [{"round": 0, **json.loads(line)} for line in out.read_text().splitlines()]
        if out.exists()
        else []
    )


def measured_in(out: Path, name: str, *, first: bool) -> dict[str, float]:
    """CPU-seconds of a step by plan: of the first round, or the median of the other rounds."""
    found: dict[str, list[float]] = {}
    for row in rows(out):
        if row["model"] == name and (row["round"] == 0) == first:
            found.setdefault(row["plan"], []).append(row["cpu_s"])
    return {digest: statistics.median(values) for digest, values in found.items()}


def measured_devices():
    """This machine's devices and rates, without a calibration from earlier steps."""
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.local_cluster import measure_devices

    return measure_devices(discover())


def predictions(cluster, name: str, plans: dict) -> dict[str, float]:
    """Predicted step times in seconds, uncalibrated."""
    pricing = dataclasses.replace(
        cluster.pricing(config_of(name)), calibration=type(cluster.calibration)()
    )
    return {digest: pricing.predicted(plan).step_time_s for digest, plan in plans.items()}


def ranked(cluster, name: str, plans: dict) -> list[str]:
    """Digests of the plans, fastest predicted first."""
    predicted = predictions(cluster, name, plans)
    return sorted(plans, key=lambda digest: predicted[digest])


def report(out: Path) -> None:
    """Print the regret of each rule, and how well predictions order the plans."""
    import numpy as np

    cluster = measured_devices()
    for name in MODELS:
        plans = {plan.digest: plan for plan in plans_of(name)}
        measured, final = measured_in(out, name, first=True), measured_in(out, name, first=False)
        plans = {digest: plans[digest] for digest in measured}
        predicted, order = predictions(cluster, name, plans), ranked(cluster, name, plans)
        best = min(final.values())
        simple = {
            "the planner": final[order[0]],
            f"the planner, {TRIED} measured": min(
                final[digest] for digest in candidates(order, plans)[:TRIED]
            ),
            **{
                rule: final[digest]
                for rule, (axes, zero) in RULES.items()
                if (digest := find(plans, axes, zero))
            },
            "a random legal plan (mean of the first round)": statistics.mean(measured.values()),
        }
        print(
            f"\n{name}: {len(measured)} of {len(plans_of(name))} legal plans measured, {len(final)}"
            f" of them again; best {best:.3f} CPU-s per step, slowest of the first round"
            f" {max(measured.values()):.3f}"
        )
        print(f"  best plan: {plans[min(final, key=lambda digest: final[digest])].describe()}")
        print(f"  chosen:    {plans[order[0]].describe()}")
        for rule, cpu_s in simple.items():
            print(f"  {rule:45} {cpu_s:7.3f} CPU-s   regret {cpu_s / best - 1:7.1%}")
        logs = np.log([measured[digest] / predicted[digest] for digest in measured])
        ranks = [
            np.argsort(np.argsort([values[digest] for digest in measured]))
            for values in (measured, predicted)
        ]
        print(
            f"  Spearman {np.corrcoef(ranks[0], ranks[1])[0, 1]:.3f}; spread of measured over"
            f" predicted, apart from a common factor: {logs.std():.1%}"
        )


def candidates(order: list[str], plans: dict) -> list[str]:
    """The best plan of each mesh, in the order of the search."""
    kinds: dict = {}
    for digest in order:
        plan = plans[digest]
        kinds.setdefault((plan.axes, plan.rules, plan.pipeline and plan.pipeline.repeats), digest)
    return list(kinds.values())


def find(plans: dict, axes: str, zero: int) -> str | None:
    """The plan with one microbatch and default rules on these axes; None: it is not legal."""
    return next(
        (
            digest
            for digest, plan in plans.items()
            if str(plan.axes) == axes
            and plan.zero == zero
            and plan.microbatches == 1
            and {"mlp", "heads"} <= dict(plan.rules).keys()
        ),
        None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "contend", "report", "count"))
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("plans.jsonl"),
        help="JSON Lines of measurements (default: plans.jsonl)",
    )
    parser.add_argument("--limit", type=int, help="measure at most this many plans in this call")
    args = parser.parse_args()
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.system.huge_pages import restart_with_huge_pages

    restart_with_huge_pages()
    use_cpu_devices(NUM_DEVICES)
    if args.what == "measure":
        measure(args.out, args.limit)
    elif args.what == "contend":
        contend(args.out)
    elif args.what == "count":
        print({name: len(plans_of(name)) for name in MODELS})
    else:
        report(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
