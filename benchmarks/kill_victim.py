"""The training run that benchmarks/kill_fuzz.py kills and resumes. It can be killed at any instant.

The run is real (`optimus_jax.train`, control=auto, 8 virtual devices) except for its advisor, which
follows a script of SCENES: two scenes are switches that are kept, one is rolled back after its
first steps, and one fails its verification. An *instant* is a moment just before or after an action
of a switch, a checkpoint or a resume. Its name is the path of the nested actions:
`switch/commit/write plan/replace <` is just before plan.json is replaced, `>` just after. The run
writes each instant that it reaches into a trace. At the instant that its task names it kills
itself, or asks to be killed from outside some microseconds later.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import jax
from kill_processes import Task

import optimus_jax.control.switch as switch_module
from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import Config
from optimus_jax.config.request import make_config
from optimus_jax.control import assembly, transitions
from optimus_jax.control.canary import Verdict
from optimus_jax.control.controller import Controller
from optimus_jax.control.journal import Journal
from optimus_jax.control.policy import CHOSEN, Alternative, Decision
from optimus_jax.control.preparation import Preparation
from optimus_jax.control.runtime import Policy
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch import Switcher
from optimus_jax.control.switch_state import Event, SwitchState
from optimus_jax.devices.cpu import use_cpu_devices
from optimus_jax.mesh.build import discover
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.local_cluster import LocalCluster
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.reshard.reshard import Move
from optimus_jax.reshard.shard_sums import ShardSums
from optimus_jax.run import api, whole_run
from optimus_jax.run_directory.directory import RunDirectory

DEVICES = 8
STEPS = 24
MODEL = "gpt2-nano"
MOVE_BYTES = 2**14
"""Budget for state that moves at the same time; it gives about ten groups of arrays."""
TINY = {
    "steps": STEPS,
    "global_batch": 8,
    "seq_len": 16,
    "lr": 1e-2,
    "eval_every": 0,
    "progress": "none",
    "control": "auto",
    "checkpoint_every": 3,
    "controller.canary_steps": 2,
    "controller.probe_share": 0,
    "controller.move_bytes": MOVE_BYTES,
    "model.num_layers": 3,
    "model.embed_dim": 16,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_dim": 2,
    "model.mlp_dim": 32,
    "model.dropout": 0.1,
}
START = {"parallel.mesh": "data=8"}

Fate = Literal["kept", "taken back", "failed"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A switch that the script asks for."""

    settings: dict[str, Any]
    """Settings that make the new plan."""
    fate: Fate


SCENES = (
    Scene(
        settings={"parallel.mesh": "pipe=2,data=2,tensor=2", "parallel.microbatches": 2},
        fate="kept",
    ),
    Scene(settings={"parallel.mesh": "fsdp=8", "parallel.zero": 3}, fate="taken back"),
    Scene(settings={"parallel.mesh": "data=4,fsdp=2", "parallel.zero": 1}, fate="failed"),
    Scene(settings={"parallel.mesh": "data=2,tensor=4"}, fate="kept"),
)
FIRST_STEP, SCENE_STEPS = 2, 6
"""Step of the first scene, and steps from it to the second."""
NOTICE_STEPS = 2
"""Steps from a decision to its switch. The plan is prepared meanwhile."""


def config_of(settings: dict[str, Any]) -> Config:
    """The run's config with the settings of a plan."""
    return make_config(MODEL, {**TINY, **settings}, None)


def plan_of(settings: dict[str, Any]) -> Plan:
    """The plan that these settings make on the devices."""
    config = config_of(settings)
    assert config.parallel.axes is not None, "all settings name a mesh"
    return plan_for(config, config.parallel.axes, discover())


# The instants.


class Instants:
    """Writes the instants that the run reaches into a trace, and kills the run at one of them.

    Args:
      task: names the trace, and the instant of the kill.
      killer: file descriptor of a pipe. A byte written to it asks the parent for a kill.
    """

    def __init__(self, task: Task, killer: int) -> None:
        self._kill, self._killer = task.kill, killer
        self._trace = os.open(task.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._counts: Counter[str] = Counter()
        self._lock, self._of_thread = threading.Lock(), threading.local()

    @property
    def path(self) -> list[str]:
        """The nested actions in progress in this thread."""
        return self._of_thread.__dict__.setdefault("path", [])

    def note(self, **values: object) -> None:
        """Write a line into the trace that is not an instant."""
        os.write(self._trace, json.dumps(values).encode() + b"\n")

    def come_to(self, edge: str, tear: Callable[[], None] | None = None) -> None:
        """Reach the instant before (`<`) or after (`>`) the current action.

        Args:
          tear: called before a kill that has to leave half of a line.
        """
        instant = f"{'/'.join(self.path)} {edge}"
        with self._lock:
            self._counts[instant] += 1
            count = self._counts[instant]
            self.note(instant=instant, count=count, time_s=time.perf_counter())
        if self._kill is None or (instant, count) != (self._kill.instant, self._kill.count):
            return
        if self._kill.delay_s is not None:
            os.write(self._killer, b"!")
            return
        if self._kill.is_torn and tear is not None:
            tear()
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, called: str = "", *, only_nested: bool = False) -> None:
        """Wrap a function of a class or module, so that each call has an instant before and after.

        Args:
          called: name of the action in paths; empty: the function's name.
          only_nested: ignore calls in the main thread that are not inside another action.
        """
        function, called = getattr(owner, name), called or name.strip("_").replace("_", " ")

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if (
                only_nested
                and not self.path
                and threading.current_thread() is threading.main_thread()
            ):
                return function(*args, **kwargs)
            self.path.append(called)
            try:
                self.come_to("<", lambda: _tear(*args) if called == "append" else None)
                result = function(*args, **kwargs)
                self.come_to(">")
                return result
            finally:
                self.path.pop()

        setattr(owner, name, wrapped)


def _tear(journal: Journal, values: dict[str, Any]) -> None:
    """Write half of a journal line, as a crash may."""
    line = json.dumps(values).encode()
    with open(journal._path, "ab", buffering=0) as file:
        file.write(line[: len(line) // 2])


def instrument(instants: Instants) -> None:
    """Add instants to every action of a switch, a checkpoint and a resume."""
    for owner, names in (
        (Preparation, ("do",)),
        (Switcher, ("_prepared", "switch", "take_back", "keep", "stop")),
        (Controller, ("carry_out",)),
        (Move, ("compile", "carry", "release")),
        (switch_module, ("compile_plan", "_loss", "_brought_back")),
        (Journal, ("begin", "commit", "end", "recover", "_append")),
        (RunDirectory, ("write_config", "write_plan", "go_back_to")),
        (Checkpoints, ("save", "wait", "restore")),
    ):
        for name in names:
            instants.around(owner, name)
    instants.around(ShardSums, "of", "sums")
    for name in ("fsync", "replace", "rename"):
        instants.around(os, name, only_nested=True)
    step = Controller.step

    def watched(self: Controller, record: Any) -> None:
        instants.path.append("first steps")
        if self._trial is not None:
            instants.come_to("<")
        step(self, record)
        instants.path.pop()

    Controller.step = watched


PHASES = (
    ("rollback", {"take back", "brought back"}),
    ("canary", {"keep", "stop", "first steps"}),
    ("resume", {"recover", "go back to", "write config", "restore"}),
    ("checkpoint", {"save", "wait"}),
    ("prepare", {"do"}),
    ("move", {"carry", "release"}),
    ("verify", {"sums", "loss"}),
    ("commit", {"commit"}),
    ("rollback", {"end"}),
    ("quiesce", {"carry out"}),
)
"""Phases of a run, and the actions that belong to each. The first phase that matches counts."""


def phase_of(instant: str) -> str:
    """The phase of an instant.

    An instant outside all phases belongs to the start of a run if plan.json is being written, and
    otherwise to a checkpoint.
    """
    under_way = set(instant[:-2].split("/"))
    found = next((phase for phase, names in PHASES if names & under_way), None)
    return found or ("resume" if "write plan" in under_way else "checkpoint")


# The run.


class Scripted(Policy):
    """An advisor that follows the scenes of its task, but does not choose a plan that has failed
    (unless the task is stubborn).
    """

    instants: Instants
    task: Task

    def __init__(self, *, plan: Plan, **_: Any) -> None:
        self._plan, self._came_from, self._failed = plan, plan, set[str]()
        self._asked: Scene | None = None
        self.instants.note(begins=plan.digest)
        fulfil(self)

    def notices(self, observation: Observation, state: SwitchState) -> Sequence[Event]:
        """Learn which plans have failed, then decide."""
        self._failed = set(state.failures)
        return super().notices(observation, state)

    def decide(self, observation: Observation) -> Decision | None:
        number = min((observation.step - FIRST_STEP) // SCENE_STEPS, len(self.task.scenes) - 1)
        scene = SCENES[self.task.scenes[number]] if number >= 0 else None
        if scene is None or scene is self._asked:
            return None
        self._asked, plan = scene, plan_of(scene.settings)
        if plan == self._plan or (plan.digest in self._failed and not self.task.is_stubborn):
            return None
        chosen = Alternative(
            plan=plan,
            switch_method="remesh",
            step_time_s=1.0,
            gain_s=1.0,
            cost_s=0.1,
            probability=0.95,
            verdict=CHOSEN,
        )
        return Decision(
            step=observation.step,
            action="switch",
            why="the script says so",
            plan=plan,
            switch_method="remesh",
            at_step=observation.step + NOTICE_STEPS,
            alternatives=(chosen,),
        )

    @property
    def fate(self) -> Fate:
        """The scripted outcome of the last switch."""
        return "kept" if self._asked is None else self._asked.fate

    def switched(self, plan: Plan, *args: Any, **more: Any) -> None:
        self._plan, self._came_from = plan, self._plan

    def failed(self, plan: Plan, why: str, *, is_back: bool = False) -> None:
        if plan == self._plan:
            self._plan = self._came_from


def fulfil(advisor: Scripted) -> None:
    """Make verification and first steps end as the script says."""
    check_loss = switch_module._check_loss

    def check(*args: Any) -> None:
        check_loss(*args)
        if advisor.fate == "failed":
            raise switch_module._NotTheSameError("the script says so")

    def judge(times_s: Any, **_: object) -> Verdict:
        return Verdict(
            keep=advisor.fate != "taken back",
            why="the script says so",
        )

    switch_module._check_loss = check
    transitions.judge = judge


def known_devices(_: object) -> LocalCluster:
    """The devices with fixed rates, so that nothing is measured."""
    cluster = Cluster.of(discover())
    rates = Rates(
        accelerator="cpu",
        source="made up",
        matmul_flops_per_s=5e10,
        f32_matmul_flops_per_s=5e10,
        memory_bytes_per_s=6e9,
        num_cores=0.0,
    )
    return LocalCluster(
        cluster=replace(
            cluster,
            intra_host=Link(name="memory", bytes_per_s=7e9, latency_s=1e-5, source="made up"),
        ),
        rates=rates,
        records=Path("unused"),
    )


def use_devices(cache: str, *, is_kept: bool) -> None:
    """Use virtual CPU devices, and a directory of compiled programs.

    Args:
      is_kept: whether newly compiled programs are added to the directory. A process that may be
        killed while it writes must not do so.
    """
    use_cpu_devices(DEVICES)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if is_kept else 1e9)


def run(task: Task, killer: int) -> None:
    """Start or resume the run, and complete it unless killed."""
    instants = Instants(task, killer)
    instrument(instants)
    use_devices(task.cache, is_kept=task.kill is None)
    is_ready = Preparation.is_ready_everywhere

    def wait(self: Preparation) -> bool:
        with suppress(Exception):
            # so that switches happen at the scripted steps, however long compiling takes
            self.result()
        return is_ready(self)

    quarantined = assembly.quarantined

    def noted(state: SwitchState, plan: Plan, *more: Any) -> SwitchState:
        instants.note(failed=plan.digest)
        return quarantined(state, plan, *more)

    Preparation.is_ready_everywhere, assembly.quarantined = wait, noted
    Scripted.instants, Scripted.task = instants, task
    assembly.Advisor = Scripted
    whole_run.known_devices = known_devices
    resume = (Path(task.run_dir) / "config.json").exists()
    own: dict[str, Any] = {} if resume else TINY | START | {"data": task.text}
    api.train(None if resume else MODEL, run_dir=task.run_dir, resume=resume, **own)
