"""One process of a run whose controller follows a script: python two_processes.py NUMBER ADDRESS
RUN_DIR TEXT JSON.

The JSON gives `mesh`, `steps`, `script` (mesh to switch to, by the step at which that is decided)
and `keep`, the verdict of the canary.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

number, address, run_dir, text, options = sys.argv[1:]
options = json.loads(options)

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_platforms", "cpu")

import pytest  # noqa: E402
from small_runs import TINY, AtOnce, Scripted, switch_at  # noqa: E402

import optimus_jax  # noqa: E402
from optimus_jax.config.axes import AxisSizes  # noqa: E402
from optimus_jax.config.request import make_config  # noqa: E402
from optimus_jax.control import assembly, commands, constants, transitions  # noqa: E402
from optimus_jax.control.canary import judge  # noqa: E402
from optimus_jax.planning.cost.rates import Rates  # noqa: E402
from optimus_jax.planning.local_cluster import LocalCluster  # noqa: E402
from optimus_jax.planning.profiles.cluster import Cluster  # noqa: E402
from optimus_jax.planning.profiles.links import Link  # noqa: E402
from optimus_jax.planning.search.assemble import plan_for  # noqa: E402
from optimus_jax.run import whole_run  # noqa: E402

RATES = Rates(
    accelerator="cpu",
    source="made up",
    matmul_flops_per_s=5e10,
    f32_matmul_flops_per_s=5e10,
    memory_bytes_per_s=6e9,
    num_cores=0.0,
)


class Script(Scripted):
    """An advisor that makes its plans once the devices are known: all processes ask for them
    together.
    """

    def decide(self, observation):
        if (mesh := options["script"].get(str(observation.step))) is None:
            return None
        config = make_config("gpt2-nano", TINY | settings | {"mesh": mesh}, None)
        return switch_at(observation.step, plan_for(config, AxisSizes.parse(mesh), there[0]))


def known_devices(topology):
    there.append(topology)
    link = Link(name="memory", bytes_per_s=7e9, latency_s=1e-5, source="made up")
    return LocalCluster(
        cluster=replace(Cluster.of(topology), intra_host=link),
        rates=RATES,
        records=Path(run_dir).parent / "records.jsonl",
    )


# What a thread would compile during steps is compiled within a step here, and both processes share
# the cores.
settings, there = {"model.num_layers": 2, "faults.floor_s": 240.0}, []
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(whole_run, "known_devices", known_devices)
    patch.setattr(assembly, "Advisor", Script)
    patch.setattr("optimus_jax.control.switch.Worker", AtOnce)
    patch.setattr(commands, "MOST_STEPS", 2)  # few steps suffice then
    patch.setattr(constants, "STEADY_FACTOR", 1e9)  # steps of this size are noise
    patch.setattr(
        transitions,
        "judge",
        lambda *args, **more: replace(judge(*args, **more), keep=options["keep"]),
    )
    result = optimus_jax.train(
        "gpt2-nano",
        run_dir=run_dir,
        data=text,
        mesh=options["mesh"],
        steps=options["steps"],
        control="auto",
        **TINY | settings | {"coordinator": address, "num_processes": 2, "process_id": int(number)},
    )
print(json.dumps({"plan": result.plan.describe(), "messages": Scripted.messages}))
