"""Compile a plan for GPUs that this machine lacks, and report its memory and collectives.

XLA's GPU compiler needs no GPU, only its wheels (extra `plan-gpu`) and a description of the device
(`targets/`). It runs in a subprocess, so that this process does not load the CUDA plugin and
survives a crash of the compiler. Memory and collectives are those of the program that would run,
except for CAVEATS. The compiler does not report insufficient memory, so this module compares what
the program needs with the device's memory.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from optimus_jax.config import Config
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.errors import PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_report import CompileReport
from optimus_jax.planning.ahead_of_time.hlo import Collective, HloProgram
from optimus_jax.planning.ahead_of_time.rematerialised import rematerialised
from optimus_jax.planning.ahead_of_time.timeline import timed_collectives
from optimus_jax.planning.cost.communication import CommunicationOp
from optimus_jax.planning.cost.communication_time import CommunicationTimes
from optimus_jax.planning.cost.operators import device_time
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.work import Work
from optimus_jax.planning.profiles.cluster import Cluster

HEADROOM_SHARE = 0.06
"""Share of a device's memory that must stay free for what the compiler does not count: the driver's
context and kernels, NCCL's buffers, autotuning, the next batch."""
TIMEOUT_S = 600.0
"""Time limit of one compilation, in seconds. The largest presets take less than two minutes."""
WORKER = "optimus_jax.planning.ahead_of_time.compile_worker"
CAVEATS = (
    "nothing is autotuned",
    "workspace of cuDNN's attention is not counted",
    "borders between hosts are unknown to the compiler",
)
"""Possible differences from the program compiled on the devices; the headroom covers the first
two."""
_TARGETS = Path(__file__).parent / "targets"


def can_compile() -> bool:
    """Whether the CUDA compiler's wheels are installed."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None
        for version in (12, 13)
    )


def targets() -> tuple[str, ...]:
    """Names of the accelerators that a plan can be compiled for."""
    return tuple(sorted(path.stem for path in _TARGETS.glob("*.textproto")))


def check(
    config: Config,
    plan: Plan,
    cluster: Cluster,
    *,
    timeout_s: float = TIMEOUT_S,
) -> CompileReport:
    """Compile the training step of `config` under `plan` for `cluster`, which need not exist.

    Raises:
      PlanError: the compiler is not installed or knows no such device, the plan is for another
        number of devices, or compiling failed or took too long.
    """
    _check_possible(plan, cluster)
    request = {
        "config": config.to_json(),
        "plan": plan.to_json(),
        "target": (_TARGETS / f"{cluster.accelerator.name}.textproto").read_text(),
        "compute_capability": cluster.topology().compute_capability,
        "num_hosts": cluster.num_hosts,
        "devices_per_host": cluster.devices_per_host,
    }
    answer, said = _in_subprocess(request, plan, timeout_s)
    answer |= _read(answer.pop("text"), plan, cluster) | {
        "rematerialised": [dataclasses.asdict(each) for each in rematerialised(said, config, plan)],
        "plan": plan.digest,
        "target": cluster.accelerator.name,
        "num_devices": cluster.num_devices,
        "capacity_bytes": cluster.accelerator.memory_bytes,
        "headroom_share": HEADROOM_SHARE,
    }
    return CompileReport.from_json(json.dumps(answer))


def _read(text: str, plan: Plan, cluster: Cluster) -> dict:
    """What a report says of a program."""
    program, sizes = HloProgram(text), {axis: plan.axes[axis] for axis in MESH_AXES}
    rates = Rates.of(cluster.accelerator)
    network = CommunicationTimes(plan.axes, cluster, rates)

    def exchange_s(each: Collective) -> float:
        axes = each.axes(sizes)
        kind = {"collective-permute": "send", "ragged-all-to-all": "all-to-all"}.get(
            each.kind, each.kind
        )
        op = CommunicationOp(cast(Any, kind), axes, "step", each.payload_bytes, 1)
        return network.time(op) if axes else 0.0

    def compute_s(work: Work) -> float:
        device = device_time(work, rates, f32=plan.precision == "f32")
        return device.total + rates.launch_s * work.kernels

    traffic = [
        {
            **{
                field: getattr(timed.collective, field)
                for field in (
                    "kind",
                    "payload_bytes",
                    "wire_bytes",
                    "times",
                    "work_under",
                    "source",
                )
            },
            "axes": timed.collective.axes(sizes),
            "time_s": timed.time_s,
            "exposed_s": timed.exposed_s,
        }
        for timed in timed_collectives(program, exchange_s, compute_s)
    ]
    return {
        "dot_flops": program.dot_flops(),
        "attention": "cudnn" if "__cudnn$fmha" in text else "xla",
        "traffic": traffic,
        "unknown_loops": program.unknown_loops,
    }


def _check_possible(plan: Plan, cluster: Cluster) -> None:
    name = cluster.accelerator.name
    if not can_compile():
        raise PlanError(
            explain(
                "compiling for GPUs that are not here needs XLA's CUDA compiler",
                given="its wheels are not installed",
                do="pip install 'optimus-jax[plan-gpu]' (Linux; no GPU and no driver are needed)",
            )
        )
    if name not in targets():
        raise PlanError(
            explain(
                f"the compiler has no description of {name}",
                given=f"--cluster {cluster}",
                do=(
                    f"compile for {' or '.join(targets())}, or describe it in"
                    f" {_TARGETS / name}.textproto"
                ),
            )
        )
    if plan.offload != "none":
        raise PlanError(
            explain(
                "without a GPU the compiler does not count host memory, so offloaded plans cannot"
                " be checked",
                given=f"offload={plan.offload}",
                do="check a plan with parallel.offload=none, or measure this one on a GPU",
            )
        )
    if plan.num_devices != cluster.num_devices:
        raise PlanError(
            explain(
                f"the plan is for {plan.num_devices} devices, the cluster has"
                f" {cluster.num_devices}",
                given=f"mesh {plan.axes}",
                do="compile the plan for a cluster of its size",
            )
        )


def _in_subprocess(request: dict, plan: Plan, timeout_s: float) -> tuple[dict, str]:
    """The worker's answer, and the compiler's messages."""
    root = str(Path(__file__).parents[3])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", WORKER],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise PlanError(
            explain(
                f"compiling took longer than {timeout_s:g} s",
                given=plan.describe(),
                do="allow more time, or check fewer plans",
            )
        ) from error
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise PlanError(
            explain(
                "the plan does not compile",
                given=f"{plan.describe()}: exit code {done.returncode}, {last}",
                do="report this plan; another one may be taken meanwhile",
            )
        )
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stderr
