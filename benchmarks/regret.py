"""How good the planner's choice is on this machine: every legal plan of two small models on 8 virtual devices, measured.

    python benchmarks/regret.py measure --out plans.jsonl     run all plans (an hour or two on 2 cores; goes on where it stopped)
    python benchmarks/regret.py report --out plans.jsonl      regret of the planner and of simpler rules, and errors of predictions

A plan's figure is the least CPU-seconds of its steps: virtual devices share the cores, so that their wall time is its
multiple and noisier. Regret is the chosen plan's figure over the best one's, less 1. Plans are measured in an order
drawn at random, so that a machine that slows down does not favour some kind.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
from pathlib import Path

NUM_DEVICES = 8
NUM_STEPS = 4
TRIED = 3
"""Candidates that a run would measure."""
MODELS = {
    "gpt": {"model.num_layers": 2, "model.embed_dim": 256, "model.num_heads": 4, "model.num_kv_heads": 4, "model.head_dim": 64,
            "model.mlp_dim": 1024, "model.vocab_size": 2048, "data.seq_len": 256, "data.global_batch": 4},
    "llama": {"model.family": "llama", "model.tied": False, "model.num_layers": 3, "model.embed_dim": 192, "model.num_heads": 2,
              "model.num_kv_heads": 1, "model.head_dim": 96, "model.mlp_dim": 512, "model.vocab_size": 4096, "data.seq_len": 256, "data.global_batch": 4},
}


def config_of(name: str):
    """A model's run; recomputing is fixed, since everything fits."""
    from optimus_jax.config import Config

    return Config().with_values({**MODELS[name], "model.name": name, "parallel.remat": "none", "parallel.stage_residuals": "keep"})


def plans_of(name: str) -> list:
    """All legal plans on the devices that are here."""
    from optimus_jax.mesh.build import discover
    from optimus_jax.plan import Plan
    from optimus_jax.planning.layouts import layouts

    return [layout for layout in layouts(config_of(name), discover()) if isinstance(layout, Plan)]


def measure(out: Path, limit: int | None) -> None:
    """Append a line for each plan that has none."""
    from rich.progress import track

    from optimus_jax.planning.trial import run_trial

    done = {(row["model"], row["plan"]) for row in rows(out)}
    todo = [(name, plan) for name in MODELS for plan in plans_of(name) if (name, plan.digest) not in done]
    random.Random(0).shuffle(todo)
    with out.open("a") as file:
        for name, plan in track(todo[:limit], f"{len(todo)} of {len(todo) + len(done)} plans are left"):
            trial = run_trial(config_of(name), plan, num_steps=NUM_STEPS)
            row = {"model": name, "plan": plan.digest, "layout": plan.describe(), **{
                key: round(value, 5) for key, value in dataclasses.asdict(trial).items() if key in ("cpu_s", "step_time_s", "compile_s")}}
            file.write(json.dumps(row) + "\n")
            file.flush()


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def report(out: Path) -> None:
    """Regret by rule, and how well predictions order the plans."""
    import numpy as np

    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.here import measure_devices

    topology = discover()
    here = measure_devices(topology)
    for name in MODELS:
        config, plans = config_of(name), {plan.digest: plan for plan in plans_of(name)}
        measured = {row["plan"]: row["cpu_s"] for row in rows(out) if row["model"] == name and row["plan"] in plans}
        pricing = dataclasses.replace(here.pricing(config), calibration=type(here.calibration)())
        foretold = {digest: pricing.predicted(plans[digest]).step_time_s for digest in measured}
        best = min(measured.values())
        order = sorted(measured, key=lambda digest: foretold[digest])
        top = candidates(order, plans)[:TRIED]
        simple = {"the planner": measured[order[0]], f"the planner, {TRIED} measured": min(measured[digest] for digest in top),
                  "a random legal plan (mean)": statistics.mean(measured.values()),
                  "fsdp=8, zero 3": lookup(measured, plans, f"fsdp={NUM_DEVICES}", 3), "data=8": lookup(measured, plans, f"data={NUM_DEVICES}", 0),
                  "a rule table: tensor=2 inside, data outside": lookup(measured, plans, "data=4,tensor=2", 0)}
        print(f"\n{name}: {len(measured)} of {len(plans)} legal plans measured; best {best:.3f}, worst {max(measured.values()):.3f} CPU-s per step")
        print(f"  best plan: {plans[min(measured, key=lambda digest: measured[digest])].describe()}")
        for rule, cpu_s in simple.items():
            print(f"  {rule:45} {cpu_s:7.3f} CPU-s   regret {cpu_s / best - 1:7.1%}")
        logs = np.log([measured[digest] / foretold[digest] for digest in measured])
        ranks = [np.argsort(np.argsort([values[digest] for digest in measured])) for values in (measured, foretold)]
        print(f"  Spearman {np.corrcoef(ranks[0], ranks[1])[0, 1]:.3f}; measured over predicted, but for a common factor: spread {logs.std():.1%}")


def candidates(order: list[str], plans: dict) -> list[str]:
    """The best of each mesh, as the search ranks them."""
    kinds: dict = {}
    for digest in order:
        plan = plans[digest]
        kinds.setdefault((plan.axes, plan.rules, plan.pipeline and plan.pipeline.repeats), digest)
    return list(kinds.values())


def lookup(measured: dict[str, float], plans: dict, axes: str, zero: int) -> float:
    """The plan with one microbatch and default rules on these axes."""
    found = [cpu_s for digest, cpu_s in measured.items()
             if str(plans[digest].axes) == axes and plans[digest].zero == zero and plans[digest].microbatches == 1 and "mlp" in dict(plans[digest].rules)
             and "heads" in dict(plans[digest].rules)]
    return found[0] if found else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "report", "count"))
    parser.add_argument("--out", type=Path, default=Path("plans.jsonl"), help="JSON Lines of measurements")
    parser.add_argument("--limit", type=int, help="measure at most this many now")
    args = parser.parse_args()
    from optimus_jax.mesh.cpu import restart_with_huge_pages, use_cpu_devices

    restart_with_huge_pages()
    use_cpu_devices(NUM_DEVICES)
    if args.what == "measure":
        measure(args.out, args.limit)
    elif args.what == "count":
        print({name: len(plans_of(name)) for name in MODELS})
    else:
        report(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
