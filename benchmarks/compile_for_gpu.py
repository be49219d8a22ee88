"""Compile a training step for GPUs without having them: memory per device and collectives.

    pip install 'optimus-jax[plan-gpu]'
    python benchmarks/compile_for_gpu.py --model llama3-8b --mesh pipe=4,tensor=2 --microbatches 8

Prints one JSON object: the findings of `optimus_jax.planning.ahead_of_time.compile_check` beside
the planner's estimate. The compiler lays out memory and orders collectives as on the device, but
nothing runs: `wire_gib` are the bytes that a device sends in a step, in rings, and `hidden`, the
share of an exchange's time beside compute, takes that order from the compiler and durations from
the planner's time model. Beside both is what the planner predicts (`planned`).
"""

import argparse
import json
import sys

import jax

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import ConfigError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_check import check
from optimus_jax.planning.cost.cost import hidden_shares
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.wire_bytes import wire_bytes
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.run.command_line import run

DEVICES_PER_HOST = 8


def main() -> None:
    """Parse the flags, compile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama3-8b", help="a preset (default: llama3-8b)")
    parser.add_argument(
        "--device",
        default="h100",
        help="one that optimus_jax/planning/ahead_of_time/targets describes (default: h100)",
    )
    parser.add_argument(
        "--mesh", default="pipe=4,tensor=2", help="sizes of axes (default: pipe=4,tensor=2)"
    )
    parser.add_argument("--microbatches", type=int, default=8, help="parts of a step (default: 8)")
    parser.add_argument(
        "--rows",
        type=int,
        default=1,
        help="examples of a microbatch on each device (default: 1)",
    )
    parser.add_argument(
        "--seq-len", type=int, default=4096, help="tokens of an example (default: 4096)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting (default: none)",
    )
    args = parser.parse_args()
    if wrong := [entry for entry in args.set if "=" not in entry]:
        raise ConfigError(
            explain(
                "a setting has no value",
                given=f"--set {wrong[0]}",
                do=f"write --set {wrong[0]}=VALUE",
            )
        )
    settings = {
        "parallel.microbatches": str(args.microbatches),
        **dict(entry.split("=", 1) for entry in args.set),
    }
    config, plan, cluster = asked(
        args.model,
        args.mesh,
        rows=args.rows,
        seq_len=args.seq_len,
        settings=settings,
        device=args.device,
    )
    print(json.dumps(report(config, plan, cluster), indent=1))


def asked(
    model: str,
    mesh: str,
    *,
    rows: int,
    seq_len: int,
    settings: dict[str, str],
    device: str = "h100",
) -> tuple[Config, Plan, Cluster]:
    """The config, plan and cluster to compile for.

    Each device has `rows` examples of a microbatch. Compute is bf16 unless the settings say
    otherwise.
    """
    axes = AxisSizes.parse(mesh)
    hosts = max(1, axes.num_devices // DEVICES_PER_HOST)
    cluster = Cluster.parse(f"{device}:{hosts}x{axes.num_devices // hosts}")
    values = {
        "precision.compute": "bf16",
        "parallel.mesh": mesh,
        "parallel.microbatches": "1",
        **settings,
    }
    batch = int(values["parallel.microbatches"]) * rows * axes.data * axes.fsdp
    config = Config(
        model=model_preset(model), data=DataConfig(seq_len=seq_len, global_batch=batch)
    ).with_values(values)
    plan = plan_for(config, axes, cluster.topology())
    plan.validate(config.model, global_batch=batch, lengths=(seq_len,))
    return config, plan, cluster


def report(config: Config, plan: Plan, cluster: Cluster) -> dict:
    """The findings of the compiler beside the planner's estimate; memory is in GiB."""
    compiled = check(config, plan, cluster)
    estimate = memory_of_run(config, plan)
    priced = Workload.of(config), plan, cluster, Rates.of(cluster.accelerator)
    sent, planned = compiled.wire_bytes(), wire_bytes(*priced)
    return {
        "plan": plan.describe(),
        "model": config.model.name,
        "global_batch": config.data.global_batch,
        "seq_len": config.seq_len,
        "compile_s": round(compiled.compile_s, 1),
        "jax": jax.__version__,
        "state_gib": gib(compiled.argument_bytes),
        "temp_gib": gib(compiled.temp_bytes),
        "estimate_gib": gib(estimate.total),
        "device_gib": gib(compiled.capacity_bytes or 0),
        "fits": compiled.fits,
        "dot_tflops": round(compiled.dot_flops / 1e12, 3),
        "wire_gib": {
            f"{kind} over {'+'.join(axes) or 'nothing'}": {
                "compiled": gib(sent.get((kind, axes), 0.0)),
                "planned": gib(planned.get((kind, axes), 0.0)),
            }
            for kind, axes in sent | planned
        },
        "hidden": compiled.compare_hidden(hidden_shares(*priced)),
        "sends": [
            {"times": each.times, "work_under": each.work_under}
            for each in compiled.traffic
            if each.kind == "collective-permute"
        ],
        "exposed_collectives": [
            {
                "kind": each.kind,
                "axes": each.axes,
                "mib": round(each.payload_bytes / 2**20, 1),
                "times": each.times,
            }
            for each in compiled.exposed_collectives
        ],
        "made_whole": [str(each) for each in compiled.rematerialised],
    }


def gib(num_bytes: float) -> float:
    """GiB, rounded to two decimals."""
    return round(num_bytes / 2**30, 2)


if __name__ == "__main__":
    sys.exit(run(main))
