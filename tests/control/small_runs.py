"""Whole runs of a tiny model on eight devices. Identical programs are compiled once, without
optimisation.

What a test compares bit for bit comes from the same executables, or from executables compiled with
the same options.
"""

import functools
import json
from dataclasses import replace
from typing import ClassVar

import jax
import pytest
from switch_cases import compiled_quickly

import optimus_jax
from optimus_jax.config import CheckpointConfig, ControlConfig, DistributedConfig, LogConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.request import make_config
from optimus_jax.control import assembly, constants, executables
from optimus_jax.control.deciding.candidates import search_now
from optimus_jax.control.policy import CHOSEN, Alternative, Decision
from optimus_jax.control.runtime import Policy
from optimus_jax.mesh.build import discover
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.trials import trial
from optimus_jax.run import program as run
from optimus_jax.run import whole_run
from optimus_jax.training import step as step_module

TINY = {
    "global_batch": 8,
    "seq_len": 32,
    "lr": 1e-2,
    "eval_every": 0,
    "progress": "none",
    "controller.canary_steps": 2,
    "controller.probe_share": 0,
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
}


class AtOnce:
    """Runs jobs in the foreground: these runs would end before a thread has compiled."""

    def __init__(self, name):
        pass

    def __call__(self, job):
        job()

    def finish(self):
        pass


class Scripted(Policy):
    """An advisor that follows `script`: decisions by the step at whose boundary they are made."""

    script: ClassVar[dict[int, Decision]] = {}
    messages: ClassVar[list[str]] = []

    def __init__(self, **_):
        self.messages.clear()

    def decide(self, observation):
        return self.script.get(observation.step)

    def switched(self, plan, costs_s, made):
        self.messages.append(f"switched to {plan.axes}")

    def failed(self, plan, why, *, trial_s=None):
        self.messages.append(f"{plan.axes} failed: {why}")


def switch_at(step, plan, *, at_step=None, without=frozenset()):
    chosen = Alternative(
        plan=plan,
        switch_method="remesh",
        step_time_s=1e3,
        gain_s=1.0,
        cost_s=0.1,
        probability=0.95,
        verdict=CHOSEN,
    )
    return Decision(
        step=step,
        action="switch",
        why="the script says so",
        plan=plan,
        switch_method="remesh",
        at_step=at_step,
        without=without,
        alternatives=(chosen,),
    )


def plan_on(mesh, **settings):
    """The plan of a tiny run on a mesh, which may need fewer devices than there are."""
    config = make_config("gpt2-nano", {**TINY, "mesh": mesh, **settings}, None)
    axes = AxisSizes.parse(mesh)
    return plan_for(config, axes, replace(discover(), num_devices=axes.num_devices))


_build_program = functools.cache(step_module.build_program)


def build_once(config, plan, devices=None):
    """`build_program`, cached: configs that do not differ in what they compute share compiled
    programs.
    """
    alike = replace(
        config,
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
        distributed=DistributedConfig(),
        controller=ControlConfig(),
        control="off",
        eval_every=0,
        parallel=replace(config.parallel, mesh="auto"),
    )
    devices = tuple(jax.devices() if devices is None else devices)
    return replace(_build_program(alike, plan, devices), config=config)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(
        "".join(
            f"{n} bottles of beer on the wall, take {n % 7} down and pass them around.\n"
            for n in range(300)
        )
    )
    return str(path)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Compile without optimisation, and start without predictions learnt in runs of other tests."""
    learnt = tmp_path_factory.mktemp("learnt")
    with compiled_quickly(), pytest.MonkeyPatch.context() as patch:
        for module in (whole_run, run, executables, trial):
            patch.setattr(module, "build_program", build_once)
        patch.setattr("optimus_jax.control.switch.Worker", AtOnce)
        patch.setattr(constants, "CANARY_NOISE", 1e9)  # steps of this size are noise
        patch.setattr(assembly, "measurements_directory", lambda: learnt)
        patch.setattr(assembly, "_BackgroundSearch", lambda: search_now)
        yield patch


@pytest.fixture(scope="module")
def slow_devices(quick, tmp_path_factory):
    """The devices' rates are known, and so slow that the number of devices decides."""
    rates = Rates(
        accelerator="cpu",
        source="made up",
        matmul_flops_per_s=1e6,
        f32_matmul_flops_per_s=1e6,
        memory_bytes_per_s=6e9,
        num_cores=0.0,
    )
    here = LocalCluster(
        cluster=replace(
            Cluster.of(discover()),
            intra_host=Link(name="memory", bytes_per_s=7e9, latency_s=1e-5, source="made up"),
        ),
        rates=rates,
        records=tmp_path_factory.mktemp("records") / "records.jsonl",
    )
    quick.setattr(whole_run, "known_devices", lambda _: here)
    return here


def run_tiny(run_dir, text, script=None, **settings):
    """A new run; with a script, under an advisor that follows it."""
    Scripted.script = script or {}
    return optimus_jax.train("gpt2-nano", run_dir=run_dir, data=text, **TINY | settings)


def losses(result):
    assert [record.step for record in result.history] == list(range(1, len(result.history) + 1)), (
        "each step once, in order"
    )
    return [record.loss for record in result.history]


def events(result, *names):
    return [
        event
        for event in map(json.loads, (result.run_dir / "events.jsonl").read_text().splitlines())
        if event["event"] in names
    ]


def devices_of(tree):
    """Ids of all devices that hold a shard."""
    return {device.id for leaf in jax.tree.leaves(tree) for device in leaf.sharding.device_set}
