"""Reference steps: a few small training steps, timed once on the devices that are here.

Probes say how fast matmuls, memory and links are by themselves. How much of that this project's own
step reaches, what launching its kernels costs, and how long devices wait for one another before a
collective, they do not say. Steps that differ in one thing each do: more microbatches (launches), a
wider model (passes), another mesh (collectives). The rates that matter are then fitted to them
(planning/learning/fit.py).
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
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.learning.fit import Sample, fit_to_steps
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.probes import Agenda, Progress
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.trials.trial import Trial, run_trial
from optimus_jax.system.cache import write_atomically
from optimus_jax.system.json_input import parse_json

NUM_STEPS = 8
"""Timed of each; the shortest counts, as in probes."""
BUDGET_S = 75.0
"""No reference step is begun later; with the probes, under two minutes."""
LEAST = 3
"""With fewer steps than that nothing is fitted."""
CPU_OPTIONS = {"launch_s": 1e-5, "launch_overlap": 1.0, "arrival_s": 2e-4, "step_s": 3e-3}
"""Where the fit begins: a CPU launches a kernel when the one before has ended."""
ON_GPU = {"arrival_s": 5e-6}
"""The same."""

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
"""Settings of all reference steps of a platform."""


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One that was timed."""

    settings: dict[str, object]
    """Of its run, by dotted name."""
    step_time_s: float
    """Measured."""

    def sample(self, topology: Topology, cluster: Cluster) -> Sample:
        """As rates are fitted to it."""
        config = Config().with_values(self.settings)
        return Sample(
            model=config.model,
            plan=_plan(config, topology),
            cluster=cluster,
            seq_len=config.seq_len,
            global_batch=config.data.global_batch,
            step_time_s=self.step_time_s,
        )


def reference_settings(num_devices: int, platform: str) -> list[dict[str, object]]:
    """The runs whose steps are timed, the most telling first; some may not be legal."""
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
        {**base, "data.global_batch": 4 * num_devices},
    ]
    if num_devices > 1:
        meshes = (
            AxisSizes(tensor=num_devices),
            AxisSizes(data=half, tensor=2),
            AxisSizes(fsdp=num_devices),
            AxisSizes(fsdp=half, tensor=2),
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
    topology: Topology, *, progress: Progress | None = None
) -> tuple[ReferenceStep, ...]:
    """Time them now, as many as there is time for.

    Every process has to call it; all get what the first has measured.
    """
    runs = [
        (Config().with_values(settings), settings)
        for settings in reference_settings(topology.num_devices, topology.platform)
    ]
    legal = [
        (config, plan, settings) for config, settings in runs if (plan := _legal(config, topology))
    ]
    agenda = Agenda(BUDGET_S, len(legal), progress)
    steps = []
    for number in agenda.through("training step", [(number,) for number in range(len(legal))]):
        config, plan, settings = legal[number[0]]
        time_s = _undisturbed_s(run_trial(config, plan, num_steps=NUM_STEPS), topology)
        steps.append(
            ReferenceStep(settings=settings, step_time_s=float(broadcast_from_0(repr(time_s))))
        )
    if agenda.num_left_out:
        warnings.warn(
            f"{agenda.num_left_out} of {len(legal)} training steps were left out for want of time:"
            " is this machine busy? Measure it again when it is not, with scripts/plan.py"
            " --profile",
            stacklevel=2,
        )
    return tuple(steps)


def fitted(
    rates: Rates, steps: tuple[ReferenceStep, ...], topology: Topology, cluster: Cluster
) -> Rates:
    """`rates` with those that steps tell of; the same if there are too few steps."""
    if len(steps) < LEAST:
        return rates
    start = replace(rates, **(CPU_OPTIONS if topology.platform == "cpu" else ON_GPU))
    return fit_to_steps([step.sample(topology, cluster) for step in steps], start)


def path_of(profile: Path, topology: Topology) -> Path:
    """Where reference steps are kept: beside the hardware profile, under the digest of what is
    timed.
    """
    asked = json.dumps(
        [reference_settings(topology.num_devices, topology.platform), NUM_STEPS], sort_keys=True
    )
    return profile.with_suffix(f".steps-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json")


def read_steps(path: Path) -> tuple[ReferenceStep, ...]:
    """Those that the first process finds there; none if there is no such file.

    One that cannot be used is a warning. Every process calls it.
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
            f"the reference steps {path} cannot be used ({str(error).splitlines()[0]}) and do not"
            " count",
            stacklevel=2,
        )
        return ()
    return found


def write_steps(path: Path, steps: tuple[ReferenceStep, ...]) -> None:
    """Keep them for the next run."""
    if jax.process_index() == 0:
        write_atomically(
            path,
            json.dumps([dataclasses.asdict(step) for step in steps], indent=1) + "\n",
            "the reference steps",
        )


def _undisturbed_s(trial: Trial, topology: Topology) -> float:
    """Seconds of a step while nothing else runs on the machine, as nearly as can be told."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if topology.platform == "cpu" and topology.num_processes == 1 and topology.num_devices >= cores:
        # virtual devices keep all cores busy; what others do there takes time, but not this
        # process's
        return trial.cpu_s / cores
    return trial.shortest_s


def _legal(config: Config, topology: Topology) -> Plan | None:
    try:
        plan = _plan(config, topology)
        plan.validate(config.model, global_batch=config.data.global_batch)
    except PlanError:
        return None
    return plan


def _plan(config: Config, topology: Topology) -> Plan:
    assert config.parallel.axes is not None, "each of reference_settings names its mesh"
    return plan_for(config, config.parallel.axes, topology)
