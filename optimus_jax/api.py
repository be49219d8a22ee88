"""`train`: the whole main job, from names and overrides to a trained state.

Order: config, devices, plan, data, program, state (fresh or restored), compile, loop. Whatever a
user can get wrong is found before anything expensive begins.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from optimus_jax import __version__
from optimus_jax.checkpoint import Checkpoints, Saved
from optimus_jax.config import Config, DistributedConfig
from optimus_jax.control.deciding.candidates import check_allowed
from optimus_jax.errors import ConfigError, FaultError, explain
from optimus_jax.first_plan import fastest_tried, is_same_layout, on_what_is_there, own_plan
from optimus_jax.inputs import Inputs
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.cpu import leave_compilation_cache, use_cpu_devices
from optimus_jax.mesh.distributed import (
    check_alike,
    connect,
    has_lost_another,
    is_writer,
    named,
    of_first_process,
    together,
)
from optimus_jax.mesh.engines import RESTARTING, Launch, find_launch
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.families import check_family
from optimus_jax.phases import in_phase, phase_after
from optimus_jax.plan import Plan
from optimus_jax.planning.choice import choose_plan
from optimus_jax.planning.here import Here, known_devices, measure_devices
from optimus_jax.planning.phase_plans import plans_ahead
from optimus_jax.request import (
    SAVED_WITH_A_RUN,
    dotted,
    make_config,
    parameters,
    read_config,
    repeated_config,
    resumed_config,
)
from optimus_jax.run import Devices, program_of, run_program
from optimus_jax.training.display import Display, make_display
from optimus_jax.training.progress import Progress
from optimus_jax.training.run_directory import AlreadyBegunError, RunDirectory
from optimus_jax.training.run_lock import LockedError
from optimus_jax.training.shared_directory import check_shared
from optimus_jax.training.state import TrainState
from optimus_jax.training.step_record import StepRecord
from optimus_jax.training.stopping import EXIT_RESTART, Terminated, keep_reason
from optimus_jax.training.tensorboard import check_installed
from optimus_jax.training.trainer import Reason
from optimus_jax.training.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left behind."""

    final_loss: float
    """Loss of the last step; NaN if no step was run."""
    reason: Reason
    """`done`, or who asked it to stop."""
    state: TrainState
    """Sharded over the plan's mesh."""
    plan: Plan
    history: list[StepRecord]
    """Every step of the run until now, those before a resume included."""
    run_dir: Path

    @property
    def exit_code(self) -> int:
        """Of a command that ran it."""
        return EXIT_RESTART if self.reason == "terminate" else 0


def train(model: str | None = None, *, config: Config | str | Path | None = None, run_dir: str | Path | None = None,
          resume: bool | Literal["auto"] = False, **overrides: Any) -> RunResult:
    """Train a model, or go on training one.

    Signals are the caller's until the first step; from then on SIGINT and SIGTERM stop the run (training/stopping.py).

    Args:
      model: name of a preset; needed unless resuming or a config is given, whose model it replaces.
      config: settings to begin with, as a value or the path of a config.json.
      run_dir: where the run is kept; None: a new directory under `runs/`.
      resume: go on with the run in `run_dir` from its newest good checkpoint; `auto`: if there is one, and begin it otherwise, so that
        a job that is started again can use the same words each time.
      overrides: settings by short name (`mesh="data=2,fsdp=4"`, `lr=1e-3`, `data="a.txt"` or a list of paths)
        or, in a dict, by dotted name (`**{"optimizer.beta2": 0.99}`), which takes text as `--set` does. Words of other frameworks
        that mean the same (`learning_rate`, `max_steps`, `output_dir`) are taken for ours, with a note (config/aliases.py).
    Raises:
      OptimusError: something that the user can mend; its text says how.
      FaultError: of several processes, another one or the network has failed; the run is worth resuming.
    """
    asked, overrides = parameters(overrides, {"model": model, "config": config, "run_dir": run_dir})
    model, config, run_dir = asked["model"], asked["config"], asked["run_dir"]
    overrides = dotted(overrides)
    is_repeated = resume == "auto"
    resume = bool(resume) and (not is_repeated or (run_dir is not None and RunDirectory(run_dir).is_begun))
    config = _config_of(model, config, run_dir, resume, overrides, is_repeated)
    launch = find_launch(config.distributed, on_cpu=config.cpu_devices is not None)
    with named(launch):
        return _train(config, launch, run_dir, resume, overrides, is_repeated)


PATIENCE_S = 120.0
"""For the lock of a writer that has died with its host, which a file server may keep for a lease of 90 s."""


def _train(config: Config, launch: Launch, run_dir: str | Path | None, resume: bool, overrides: dict[str, Any], is_repeated: bool) -> RunResult:
    """`train`, from what was asked for and who else there is."""
    if launch.is_alone and not resume and run_dir is not None:
        RunDirectory(run_dir).check_free()
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    connect(launch, timeout_s=config.faults.connect_s, heartbeat_s=config.faults.heartbeat_s)
    progress = Progress()
    watchdog = Watchdog.of(None, progress, config.faults, process=launch.process_id, num_processes=launch.num_processes)
    run: RunDirectory | None = None
    try:
        has_left_cache = leave_compilation_cache()
        topology = discover()
        # Whoever asks for either is told so by a file server, which may tell a host of the run a minute later than others.
        check_alike({"whether the run is begun or resumed": "resumed" if resume else "begun"}, may_become=is_repeated)
        check_alike({"versions": f"optimus_jax {__version__}, jax {jax.__version__}", **_settings(config)})
        asked_mesh = config.parallel.mesh
        with together():
            if resume and run_dir is not None:
                if is_repeated or not {"mesh", "parallel.mesh"} & overrides.keys():
                    config = on_what_is_there(config, topology)
                if is_repeated and is_same_layout(config, run_dir):
                    overrides = {}  # nothing is asked for that the run was not asked for before
        here = _here(config, topology)
        saved = _newest(config, run_dir) if resume and run_dir is not None else None
        devices = Devices(topology=topology, here=here, launch=launch)
        with together():
            now = in_phase(config, phase_after(config, saved.step if saved else 0))
            choice = own_plan(config, topology, run_dir, overrides, saved, devices.pricing) if resume and run_dir is not None else None
            choice = choice or choose_plan(now, topology, devices.pricing(now), kept=SAVED_WITH_A_RUN if resume else ())
            if config.parallel.mesh != asked_mesh:
                choice = replace(choice, why=f"{asked_mesh} is not for the {topology.num_devices} devices that are there; {choice.why}")
            check_allowed(config.controller.allow, topology.num_devices)
            plans_ahead(config, choice.plan, saved.step if saved else 0, topology, devices.pricing)
            display = make_display(config.log, config.steps, show=is_writer())
            if has_left_cache:
                display.message("JAX's compilation cache is not used: programs for several CPU devices that come out of it get stuck")
            if config.log.tensorboard and is_writer():
                check_installed()
            if resume and run_dir is not None:
                run = _opened(partial(RunDirectory.resume, run_dir, writer=is_writer(), warn=display.message), launch, is_repeated)
            inputs = Inputs.of(config)
            if run is None:  # after the data, so that a start which fails leaves nothing behind
                run = _new_directory(run_dir, config, launch, display, is_repeated)
        run = _known_to_all(run, run_dir)
        check_shared(run)
        check_alike({"the data": json.dumps(inputs.data.identity), "the plan": f"{choice.plan.describe()} ({choice.plan.digest})"})
        progress.begin("start")
        if watchdog is not None:
            watchdog.close()
            watchdog = None  # a second close is none
        with together():
            watchdog = Watchdog.of(run.path, progress, config.faults, process=launch.process_id, num_processes=launch.num_processes)
        if not resume and config.parallel.mesh == "auto":
            choice = fastest_tried(now, topology, choice, here, run, display)
        outcome, plan = run_program(config, devices, choice, program_of(now, choice), inputs, run, display, resume, progress,
                                    watchdog.signs if watchdog is not None else None)
        if watchdog is not None:
            watchdog.close()
            watchdog = None
        return RunResult(final_loss=outcome.last_loss, reason=outcome.reason, state=outcome.state, plan=plan,
                         history=run.metrics(), run_dir=run.path)
    except BaseException as error:
        keep_reason(error)
        is_fault = not launch.is_alone and has_lost_another(error)
        fault = FaultError(f"process {jax.process_index()} cannot go on: {str(error).splitlines()[0]}") if is_fault else None
        if watchdog is not None:  # first, for others hear of it by way of the run directory
            if fault is not None:
                watchdog.tell(str(fault))
            watchdog.close(fault or error)
        # Who is told to end while it starts, or has to, may be started again with --resume; that takes a config.
        if run is not None and not ((is_fault or isinstance(error, Terminated)) and run.is_begun):
            run.discard()
        if fault is not None:
            raise fault from error
        raise
    finally:
        if run is not None:
            run.close()


def _settings(config: Config) -> dict[str, str]:
    """What the config has in common in all processes, each setting by its name: an error has to say which one differs."""
    sections = json.loads(replace(config, distributed=DistributedConfig()).to_json())
    return {f"{section}.{name}" if name else section: json.dumps(value)
            for section, values in sections.items() for name, value in (values.items() if isinstance(values, dict) else [("", values)])}


def _newest(config: Config, run_dir: str | Path) -> Saved | None:
    """The checkpoint that says which phase a run goes on in; None: it has none, or one phase only."""
    if not config.data.phases:
        return None
    return Checkpoints(RunDirectory(run_dir, writer=False).checkpoints, config.checkpoint).latest()


def _here(config: Config, topology: Topology) -> Here | None:
    """How fast the devices are, where the run needs to know; None: it does not, or the planner goes by a simple rule."""
    if config.control == "off" and config.parallel.mesh != "auto":
        return None
    here = known_devices(topology)
    if here is None and config.control != "off":
        if is_writer():
            print("the controller needs to know how fast these devices are: measuring them, once, in about a minute", file=sys.stderr, flush=True)
        here = measure_devices(topology)
    return here


def _config_of(model: str | None, base: Config | str | Path | None, run_dir: str | Path | None, resume: bool,
               overrides: dict[str, Any], is_repeated: bool) -> Config:
    """What is to be run; touches no device and writes nothing."""
    if is_repeated and run_dir is None:
        raise ConfigError(explain("there is no telling which run to resume", given="--resume auto without a directory",
                                  do="give --run-dir DIR --resume auto"))
    if resume and is_repeated and not (model is None and base is None):
        assert run_dir is not None
        wanted = make_config(model, overrides, base if base is None or isinstance(base, Config) else read_config(base))
        config = repeated_config(RunDirectory.resume(run_dir, writer=False).config_text(), wanted)
        check_family(config.model)
        return config
    if resume:
        if run_dir is None:
            raise ConfigError(explain("there is no telling which run to resume", given="--resume without a directory",
                                      do="give --run-dir DIR --resume"))
        if base is not None:
            raise ConfigError(explain("a resumed run has its own config", given="--resume with --config",
                                      do="leave --config out; settings that may change have flags and --set"))
        config = resumed_config(RunDirectory.resume(run_dir, writer=False).config_text(), model, overrides)
        check_family(config.model)
        return config
    if model is None and base is None:
        raise ConfigError(explain("no model was named", given="neither --model nor --config nor --resume",
                                  do="give --model NAME, such as gpt2-nano"))
    config = make_config(model, overrides, base if base is None or isinstance(base, Config) else read_config(base))
    check_family(config.model)
    return config


def _new_directory(run_dir: str | Path | None, config: Config, launch: Launch, display: Display, is_repeated: bool) -> RunDirectory | None:
    """A directory that process 0 makes; None in the others while only that knows where."""
    if is_writer():
        return _opened(partial(RunDirectory.create, run_dir, config.model.name, warn=display.message), launch, is_repeated)
    return None if run_dir is None else RunDirectory(run_dir, writer=False)


def _opened(open_it: Callable[..., RunDirectory], launch: Launch, is_repeated: bool) -> RunDirectory:
    """The directory that process 0 writes. Raises FaultError if another process writes there that an engine may be about to end, or did until just now."""
    try:
        return open_it(patience_s=PATIENCE_S if is_repeated else 0.0)
    except (LockedError, AlreadyBegunError) as error:
        if is_repeated and launch.engine in RESTARTING:
            raise FaultError(str(error)) from error
        raise


def _known_to_all(run: RunDirectory | None, run_dir: str | Path | None) -> RunDirectory:
    """In every process the directory, which process 0 has named where the user did not; every process has to call it."""
    if run is not None and run_dir is not None:
        return run
    path = of_first_process("" if run is None else str(run.path))
    return RunDirectory(path, writer=False) if run is None else run
