"""Reference steps: a few small training steps, timed once on the devices of this run.

Probes measure matmuls, memory and links in isolation. They do not show what share of these speeds a
training step reaches, what launching kernels costs, or how long devices wait for each other before
a collective. Steps that differ in one respect show this: more microbatches (launches), a wider
model (memory passes), recomputing (what is saved), another mesh (collectives). The remaining rates
are fitted to them (planning/learning/fit.py).
"""

import dataclasses
import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from optimus_jax.cluster.distributed import broadcast_from_0
from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.settings import with_right_types
from optimus_jax.errors import ConfigError, PlanError, first_line
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.learning.fit import Sample, fit_to_steps
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.probes import ProbeBudget, ReportTime
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.trials.trial import PlanTrial, run_trial
from optimus_jax.system.cache import write_atomically
from optimus_jax.system.command import typed_command
from optimus_jax.system.json_input import parse_json

NUM_STEPS = 8
"""Timed steps per run. The shortest one is used, as for probes."""
BUDGET_S = 180.0
"""Seconds after which no further reference step starts. They take about a minute, on slow cores
two; what is skipped is not known of this machine, and predictions of such plans are worse."""
LEAST = 3
"""Minimum number of reference steps for a fit."""
ON_CPU = {
    "launch_s": 1e-5,
    "launch_overlap": 1.0,
    "arrival_s": 2e-4,
    "step_s": 3e-3,
    "saved_copies": 2.0,
}
"""Initial rates of the fit on a CPU, which launches a kernel after the previous one has finished,
and whose compiler fills the stacks of what is saved with copies."""
ON_GPU = {"arrival_s": 5e-6}
"""Initial rates of the fit on a GPU."""

_COMMON = {
    "model.name": "reference",
    "model.num_layers": 2,
    "model.head_dim": 32,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "parallel.remat": "none",
    "parallel.stage_residuals": "keep",
}
_SMALL = {
    **_COMMON,
    "model.embed_dim": 192,
    "model.mlp_dim": 768,
    "model.vocab_size": 1024,
    "data.seq_len": 256,
}
_LARGE = {
    **_COMMON,
    "model.head_dim": 128,
    "model.embed_dim": 1024,
    "model.mlp_dim": 4096,
    "model.vocab_size": 16384,
    "data.seq_len": 1024,
    "precision.compute": "bf16",
}
SIZES: Mapping[str, Mapping[str, object]] = {"cpu": _SMALL, "gpu": _LARGE}
"""Common settings of the reference steps, by platform."""


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One timed reference step."""

    settings: dict[str, object]
    """Settings of the run, by dotted name."""
    step_time_s: float
    """Measured seconds per step."""

    def sample(self, topology: Topology, cluster: Cluster) -> Sample:
        """The step as an input of the fit."""
        config = Config().with_values(self.settings)
        return Sample(
            workload=Workload.of(config),
            plan=_plan(config, topology),
            cluster=cluster,
            step_time_s=self.step_time_s,
        )


def reference_settings(num_devices: int, platform: str) -> list[dict[str, object]]:
    """Settings of the runs to time, most informative first. Some may be illegal."""
    half = num_devices // 2
    base = {
        **SIZES.get(platform, _LARGE),
        "data.global_batch": num_devices,
        "parallel.mesh": str(AxisSizes(data=num_devices)),
    }
    wide = {name: 2 * int(str(base[name])) for name in ("model.embed_dim", "model.mlp_dim")}
    runs = [
        base,
        {**base, **wide},
        {**base, "data.global_batch": 4 * num_devices, "parallel.microbatches": 4},
        {**base, "parallel.remat": "full"},
        {**base, "data.global_batch": 4 * num_devices},
    ]
    if num_devices > 1:
        meshes = (
            AxisSizes(tensor=num_devices),
            AxisSizes(data=half, tensor=2),
            AxisSizes(fsdp=num_devices),
            AxisSizes(fsdp=half, tensor=2),
            AxisSizes(pipe=2, data=max(1, half // 2), tensor=2),
        )
        runs += [{**base, "parallel.mesh": str(axes)} for axes in meshes]
        runs.append(
            {
                **base,
                "data.global_batch": 4 * num_devices,
                "parallel.mesh": str(AxisSizes(pipe=2, data=half)),
                "parallel.microbatches": 4,
            }
        )
    return runs


def time_reference_steps(
    topology: Topology, *, progress: ReportTime | None = None
) -> tuple[ReferenceStep, ...]:
    """Time as many reference steps as the budget allows.

    Every process must call it, and all get the times measured by the first process.
    """
    runs = [
        (Config().with_values(settings), settings)
        for settings in reference_settings(topology.num_devices, topology.platform)
    ]
    legal = [
        (config, plan, settings) for config, settings in runs if (plan := _legal(config, topology))
    ]
    budget = ProbeBudget(BUDGET_S, len(legal), progress)
    steps = []
    for number in budget.through("training step", [(number,) for number in range(len(legal))]):
        config, plan, settings = legal[number[0]]
        time_s = _undisturbed_s(run_trial(config, plan, num_steps=NUM_STEPS), topology)
        steps.append(
            ReferenceStep(settings=settings, step_time_s=float(broadcast_from_0(repr(time_s))))
        )
    if budget.num_left_out:
        warnings.warn(
            f"{budget.num_left_out} of {len(legal)} training steps were skipped because time ran"
            " out. Is this machine busy? Measure it again when it is not:"
            f" {typed_command('plan')} --measure",
            stacklevel=2,
        )
    return tuple(steps)


def fitted(
    rates: Rates, steps: tuple[ReferenceStep, ...], topology: Topology, cluster: Cluster
) -> Rates:
    """`rates` fitted to the steps; unchanged if there are fewer than LEAST."""
    if len(steps) < LEAST:
        return rates
    start = replace(rates, **(ON_CPU if topology.platform == "cpu" else ON_GPU))
    return fit_to_steps([step.sample(topology, cluster) for step in steps], start)


def path_of(profile: Path, topology: Topology) -> Path:
    """Path of the stored reference steps: next to the hardware profile, with a digest of their
    settings in its name.
    """
    asked = json.dumps(
        [reference_settings(topology.num_devices, topology.platform), NUM_STEPS], sort_keys=True
    )
    return profile.with_suffix(f".steps-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json")


def read_steps(path: Path) -> tuple[ReferenceStep, ...]:
    """The reference steps that the first process reads from `path`; empty if there is no such file.

    An unusable file causes a warning. Every process must call it.
    """
    text = broadcast_from_0(
        path.read_text(encoding="utf-8") if jax.process_index() == 0 and path.is_file() else ""
    )
    if not text:
        return ()
    try:
        found = tuple(with_right_types(ReferenceStep(**each)) for each in parse_json(text))
        for step in found:
            Config().with_values(step.settings)
            if not 0 < step.step_time_s < math.inf:
                raise ValueError(f"step_time_s={step.step_time_s}")
    except (ValueError, TypeError, ConfigError) as error:
        warnings.warn(
            f"the reference steps {path} cannot be used ({first_line(error)}) and do not count",
            stacklevel=2,
        )
        return ()
    return found


def write_steps(path: Path, steps: tuple[ReferenceStep, ...]) -> None:
    """Store the steps for later runs."""
    if jax.process_index() == 0:
        write_atomically(
            path,
            json.dumps([dataclasses.asdict(step) for step in steps], indent=1) + "\n",
            "the reference steps",
        )


def _undisturbed_s(trial: PlanTrial, topology: Topology) -> float:
    """Best estimate of the step time in seconds on an otherwise idle machine."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if topology.platform == "cpu" and topology.num_processes == 1 and topology.num_devices >= cores:
        # Virtual devices keep all cores busy; other work on the machine lengthens wall time, but
        # not this process's CPU time.
        return trial.cpu_s / cores
    return trial.shortest_s


def _legal(config: Config, topology: Topology) -> Plan | None:
    try:
        plan = _plan(config, topology)
        plan.validate(
            config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
        )
    except PlanError:
        return None
    return plan


def _plan(config: Config, topology: Topology) -> Plan:
    assert config.parallel.axes is not None, "each of reference_settings names its mesh"
    return plan_for(config, config.parallel.axes, topology)
