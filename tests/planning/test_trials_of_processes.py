"""Two processes try the plans that process 0 names, and start with the one that was fastest by its
clock.
"""

import json
import subprocess
import sys

import pytest
from helpers import free_port
from quick_flags import QUICK_FLAGS

PROCESS = """
import json, sys
from dataclasses import replace
from pathlib import Path
number, address, run_dir, text, fails = sys.argv[1:]
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_platforms", "cpu")
import optimus_jax
from optimus_jax.run import whole_run
from optimus_jax.run import first_plan
from optimus_jax.errors import PlanError
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.trials.measure import measure
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.trials.trial import run_trial

tried = []


def known_devices(topology):
    link = Link(name="memory", bytes_per_s=7e9, latency_s=1e-5, source="made up")
    rates = Rates(
        accelerator="cpu", source="made up", matmul_flops_per_s=5e10,
        f32_matmul_flops_per_s=5e10, memory_bytes_per_s=6e9, num_cores=0.0)
    cluster = replace(Cluster.of(topology), intra_host=link)
    records = Path(run_dir).parent / "records.jsonl"
    return LocalCluster(cluster=cluster, rates=rates, records=records)


def trial(config, plan, **more):
    tried.append(plan.digest)
    if fails == "all":
        raise PlanError("there is no room for it")
    return replace(run_trial(config, plan, **more), step_time_s=1.0 / len(tried))


def measured(ranked, run, *, num_steps, **more):
    assert number == "0", "the others do as they are told"
    return measure(ranked, run, num_steps=10**9, **more)


whole_run.known_devices, first_plan.run_trial, first_plan.measure = known_devices, trial, measured
plan = None
try:
    plan = optimus_jax.train(
        "gpt2-nano", data=text, run_dir=run_dir,
        coordinator=address, num_processes=2, process_id=int(number),
        steps=2, global_batch=8, seq_len=32, eval_every=0, progress="none",
        **{"model.num_layers": 2}).plan.digest
except PlanError as error:
    print(error, file=sys.stderr)
print(json.dumps([tried, plan]))
"""


def run_both(tmp_path, fails="none"):
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROCESS,
                str(number),
                address,
                tmp_path / "run",
                tmp_path / "text.txt",
                fails,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PYTHONPATH": ":".join(sys.path),
                "PATH": "",
                "HOME": str(tmp_path),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": QUICK_FLAGS,
            },
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [
        errors[-2000:] for _, errors in outputs
    ]
    return [(*json.loads(output.splitlines()[-1]), errors) for output, errors in outputs]


# Takes half a minute: two processes compile and time at least three plans.
@pytest.mark.parametrize("fails", ["none", pytest.param("all", marks=pytest.mark.nightly)])
def test_processes_try_the_same_plans_and_start_with_the_fastest(tmp_path, fails):
    first, second = run_both(tmp_path, fails)
    tried, plan, _ = first
    assert tried == second[0]
    assert len(set(tried)) == len(tried) >= 3
    if fails == "all":
        assert all(
            "none of the planner's best plans fits" in errors for _, _, errors in (first, second)
        )
        return
    assert plan == second[1] == tried[-1]
    decisions = [
        event
        for event in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if event["event"] == "decision"
    ]
    assert [event["plan"] for event in decisions] == tried
