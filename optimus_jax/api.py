"""`train`: the whole main job, from names and overrides to a trained state.

Order: config, devices, plan, data, program, state (fresh or restored), compile, loop. Whatever a
user can get wrong is found before anything expensive begins.
"""

import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

from optimus_jax.checkpoint import Checkpoints, Saved
from optimus_jax.config import Config
from optimus_jax.control.assembly import make_controller
from optimus_jax.control.controller import Controller
from optimus_jax.control.executables import Executable, of_running
from optimus_jax.control.journal import Journal
from optimus_jax.control.phase_changes import PhaseChanges
from optimus_jax.control.switch import Switcher
from optimus_jax.data.loader import BatchLoader
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import ConfigError, FaultError, OptimusError, PlanError, explain
from optimus_jax.first_plan import fastest_tried, is_same_layout, on_what_is_there, own_plan
from optimus_jax.first_state import first_state, snapshots_of
from optimus_jax.inputs import Inputs
from optimus_jax.mesh.build import build_mesh, discover
from optimus_jax.mesh.cpu import return_freed_memory, use_cpu_devices
from optimus_jax.mesh.distributed import connect, is_writer, named, together
from optimus_jax.mesh.engines import Launch, find_launch
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.families import check_family
from optimus_jax.models.shapes import planned_shapes
from optimus_jax.phases import Phase, in_phase, phase_after
from optimus_jax.plan import Plan
from optimus_jax.planning.choice import Choice, choose_plan
from optimus_jax.planning.compile_report import check_executable
from optimus_jax.planning.explain import gib
from optimus_jax.planning.here import Here, known_devices, measure_devices
from optimus_jax.planning.kept import of_first_process
from optimus_jax.planning.phase_plans import plan_of, plans_ahead
from optimus_jax.planning.search import Pricing
from optimus_jax.request import FIXED_FOR_A_RUN, make_config, read_config, repeated_config, resumed_config
from optimus_jax.training.display import Display, make_display
from optimus_jax.training.fault_log import take_over
from optimus_jax.training.optimizer import peak_learning_rate
from optimus_jax.training.progress import Progress
from optimus_jax.training.report import start_report
from optimus_jax.training.run_directory import RunDirectory, StepRecord
from optimus_jax.training.state import (
    TrainState,
)
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.stopping import EXIT_RESTART, StopRequest, Terminated
from optimus_jax.training.tensorboard import TensorBoardWriter, check_installed
from optimus_jax.training.trainer import Outcome, Reason, Trainer
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
        or, in a dict, by dotted name (`**{"optimizer.beta2": 0.99}`), which takes text as `--set` does.
    Raises:
      OptimusError: something that the user can mend; its text says how.
      FaultError: of several processes, another one or the network has failed; the run is worth resuming.
    """
    is_repeated = resume == "auto"
    resume = bool(resume) and (not is_repeated or (run_dir is not None and RunDirectory(run_dir).is_begun))
    config = _config_of(model, config, run_dir, resume, overrides, is_repeated)
    launch = find_launch(config.distributed, on_cpu=config.cpu_devices is not None)
    with named(launch):
        return _train(config, launch, run_dir, resume, overrides, is_repeated)


def _train(config: Config, launch: Launch, run_dir: str | Path | None, resume: bool, overrides: dict[str, Any], is_repeated: bool) -> RunResult:
    """`train`, from what was asked for and who else there is."""
    if launch.is_alone and not resume and run_dir is not None:
        RunDirectory(run_dir).check_free()
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    connect(launch, timeout_s=config.faults.connect_s, heartbeat_s=config.faults.heartbeat_s)
    topology = discover()
    asked_mesh = config.parallel.mesh
    if resume and run_dir is not None:
        if is_repeated or not {"mesh", "parallel.mesh"} & overrides.keys():
            config = on_what_is_there(config, topology)
        if is_repeated and is_same_layout(config, run_dir):
            overrides = {}  # nothing is asked for that the run was not asked for before
    here = _here(config, topology)
    saved = _newest(config, run_dir) if resume and run_dir is not None else None
    devices = _Devices(topology=topology, here=here, launch=launch)
    now = in_phase(config, phase_after(config, saved.step if saved else 0))
    choice = own_plan(config, topology, run_dir, overrides, saved, devices.pricing) if resume and run_dir is not None else None
    choice = choice or choose_plan(now, topology, devices.pricing(now), kept=FIXED_FOR_A_RUN if resume else ())
    if config.parallel.mesh != asked_mesh:
        choice = replace(choice, why=f"{asked_mesh} is not for the {topology.num_devices} devices that are there; {choice.why}")
    plans_ahead(config, choice.plan, saved.step if saved else 0, topology, devices.pricing)
    display = make_display(config.log, config.steps, show=is_writer())
    run: RunDirectory | None = None
    progress, watchdog = Progress(), None
    try:
        with together():
            if config.log.tensorboard and is_writer():
                check_installed()
            if resume and run_dir is not None:
                run = RunDirectory.resume(run_dir, writer=is_writer(), warn=display.message)
            inputs = Inputs.of(config)
            if run is None:  # after the data, so that a start which fails leaves nothing behind
                run = _new_directory(run_dir, config, display)
        run = _known_to_all(run, run_dir)
        progress.begin("start")
        watchdog = Watchdog.of(run.path, progress, config.faults, process=jax.process_index(), num_processes=topology.num_processes)
        if here is not None and choice.ranked and not resume and config.parallel.mesh == "auto":
            choice = fastest_tried(now, topology, choice, here, run, display)
        outcome, plan = _run(config, devices, choice, _program(now, choice), inputs, run, display, resume, progress)
        if watchdog is not None:
            watchdog.close()
            watchdog = None
        return RunResult(final_loss=outcome.last_loss, reason=outcome.reason, state=outcome.state, plan=plan,
                         history=run.metrics(), run_dir=run.path)
    except BaseException as error:
        # What several processes do together fails in one of them when another or the network has failed.
        is_fault = topology.num_processes > 1 and isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
        fault = FaultError(f"process {jax.process_index()} cannot go on: {str(error).splitlines()[0]}") if is_fault else None
        # Who is told to end while it starts, or has to, may be started again with --resume; that takes a config.
        if run is not None and not ((is_fault or isinstance(error, Terminated)) and run.is_begun):
            run.discard()
        if watchdog is not None:
            if fault is not None:
                watchdog.tell(str(fault))
            watchdog.close(fault or error)
        if fault is not None:
            raise fault from error
        raise
    finally:
        if run is not None:
            run.close()


@dataclass(frozen=True, kw_only=True)
class _Devices:
    """What a run has."""

    launch: Launch
    topology: Topology
    here: Here | None
    """How fast they are; None: nobody needs to know, or nobody does."""

    def pricing(self, config: Config) -> Pricing | None:
        """What plans cost there."""
        return None if self.here is None else self.here.pricing(config)


def _newest(config: Config, run_dir: str | Path) -> Saved | None:
    """The checkpoint that says which phase a run goes on in; None: it has none, or one phase only."""
    if not config.data.phases:
        return None
    return Checkpoints(RunDirectory(run_dir, writer=False).checkpoints, config.checkpoint).latest()


def _program(config: Config, choice: Choice) -> Program:
    return build_program(config, planned_shapes(config.model, choice.plan), choice.plan, build_mesh(choice.plan))


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


def _new_directory(run_dir: str | Path | None, config: Config, display: Display) -> RunDirectory | None:
    """A directory that process 0 makes; None in the others while only that knows where."""
    if is_writer():
        return RunDirectory.create(run_dir, config.model.name, warn=display.message)
    return None if run_dir is None else RunDirectory(run_dir, writer=False)


def _known_to_all(run: RunDirectory | None, run_dir: str | Path | None) -> RunDirectory:
    """In every process the directory, which process 0 has named where the user did not; every process has to call it."""
    if run is not None and run_dir is not None:
        return run
    path = of_first_process("" if run is None else str(run.path))
    return RunDirectory(path, writer=False) if run is None else run


def _run(config: Config, devices: _Devices, choice: Choice, program: Program, inputs: Inputs, run: RunDirectory, display: Display,
         resume: bool, progress: Progress) -> tuple[Outcome, Plan]:
    """State, compile, loop; with the plan that the run ended under."""
    topology = devices.topology
    checkpoints = Checkpoints(
        run.checkpoints, config.checkpoint, warn=display.message,
        saved=lambda step, blocked_s: run.log_event("checkpoint", step, blocked_s=blocked_s))
    state = first_state(program, inputs, checkpoints, run, resume, display)
    now = in_phase(config, phase_after(config, int(state.step)))
    if now != program.config:  # the newest checkpoint was damaged, and the one before it is of an earlier phase
        plan = plan_of(phase_after(config, int(state.step)), config, choice.plan, topology, devices.pricing)
        choice = replace(choice, plan=plan)
        program = _program(now, choice)
        state = first_state(program, inputs, checkpoints, run, resume, display)
    first_step = int(state.step)
    with together():
        _write_down(config, devices, choice, program, inputs, run, display, first_step, resume)
    with together():
        snapshots = snapshots_of(config, run, display)
        snapshots.forget_after(first_step)
        snapshots.prepare(state)
    started = time.perf_counter()
    progress.begin("compile")
    dealt = inputs.dealt(program, first_step)
    train_step, step_bytes = _compiled(program, state, dealt.loader, topology)
    compile_s = time.perf_counter() - started
    run.log_event("compile", first_step, compile_time_s=compile_s, step_bytes_per_device=step_bytes)
    start_report(display, config=config, topology=topology, why=choice.why, program=program, data=inputs.data,
                 compile_s=compile_s, step_bytes=step_bytes, run_dir=run.path, launch=devices.launch,
                 ahead=plans_ahead(config, choice.plan, first_step, topology, devices.pricing))
    tensorboard = TensorBoardWriter(run.path / "tensorboard", first_step=first_step + 1) if config.log.tensorboard and run.writer else None
    controller, changes = _directors(config, devices, of_running(program, train_step, step_bytes), compile_s, inputs, run, display)
    with StopRequest() as stop:
        trainer = Trainer(
            program=program, train_step=train_step, topology=topology, loader=dealt.loader, eval_batches=dealt.eval_batches,
            bits_per_token=isinstance(inputs.data.tokenizer, ByteTokenizer), metadata={"config": config.to_json(), "data": inputs.data.identity},
            checkpoints=checkpoints, run=run, display=display, tensorboard=tensorboard, stop=stop, overseer=controller,
            progress=progress, snapshots=snapshots)
        try:
            with display, tensorboard or nullcontext():
                trainer, outcome = _trained(trainer, state, first_step, inputs, controller, changes)
            progress.begin("end")
        except Exception:
            with suppress(OptimusError):  # the error on its way says more
                checkpoints.close()
            raise
        checkpoints.close()  # not for a KeyboardInterrupt: who insists does not wait for the save under way
        snapshots.discard()
        _say_goodbye(display, outcome, run)
        return outcome, trainer.program.plan


def _directors(config: Config, devices: _Devices, running: Executable, compile_s: float, inputs: Inputs, run: RunDirectory,
               display: Display) -> tuple[Controller | None, PhaseChanges | None]:
    """Who brings a run to other plans, and who to other batches; None where the run has only one."""
    has_controller, topology = config.control != "off" and devices.here is not None, devices.topology
    if not has_controller and not config.data.phases:
        return None, None
    switcher = Switcher(running=running, settings=config.controller, journal=Journal(run),
                        bytes_per_device=topology.bytes_per_device, probe=inputs.probe)

    def plan_in(phase: Phase, plan: Plan) -> Plan:
        return plan_of(phase, config, plan, replace(topology, num_devices=plan.num_devices), devices.pricing)

    changes = PhaseChanges(config, plan_in, switcher, run, display) if config.data.phases else None
    if not has_controller or devices.here is None:
        return None, changes
    return make_controller(config, topology, devices.here, switcher, compile_s=compile_s, changes=changes, run=run, display=display), changes


def _trained(trainer: Trainer, state: TrainState, step: int, inputs: Inputs, controller: Controller | None,
             changes: PhaseChanges | None) -> tuple[Trainer, Outcome]:
    """The run to its end, under one plan and in one phase after the other; with the trainer of the last."""
    while True:
        if changes is not None and controller is None:
            changes.prepare(step)
        trainer = replace(trainer, last_step=phase_after(inputs.config, step).last_step)
        outcome = trainer.train(state)
        if outcome.reason not in ("switch", "phase"):
            break
        state, step, is_switch = outcome.state, outcome.last_step, outcome.reason == "switch"
        del outcome  # what it holds of the state on devices that are left now would stay there
        with trainer.progress.during("switch"):
            if is_switch and controller is not None:
                state, executable = controller.carry_out(state, step)
                trainer = trainer.under(executable.program)
            if changes is not None and changes.is_due(step):
                state, trainer = _in_next_phase(trainer, state, step, controller, changes)
        trainer.progress.forget_steps()
        dealt = inputs.dealt(trainer.program, step)
        trainer = replace(trainer, loader=dealt.loader, eval_batches=dealt.eval_batches)
    if controller is not None:
        controller.close(outcome.last_step)
    elif changes is not None:
        changes.close()
    return trainer, outcome


def _in_next_phase(trainer: Trainer, state: TrainState, step: int, controller: Controller | None, changes: PhaseChanges) -> tuple[TrainState, Trainer]:
    """The state and what trains on with the batches of the next phase. Raises PlanError, with the state saved, if that cannot be."""
    try:
        switched = changes.enter(state, step)
    except PlanError:
        trainer.save(state, step)
        raise
    if not switched.is_done:
        trainer.save(switched.state, step)
        raise PlanError(explain(
            f"the state could not be moved to the plan for the batches after step {step}", given=switched.why_not,
            do="start again with --resume: the state is saved, and is read under the new plan"))
    if controller is not None:
        controller.enter_phase(switched, trainer.program.plan)
    return switched.state, trainer.under(switched.executable.program)


def _write_down(config: Config, devices: _Devices, choice: Choice, program: Program, inputs: Inputs, run: RunDirectory,
                display: Display, first_step: int, resume: bool) -> None:
    """What is about to run; from here on it can be resumed."""
    if first_step > config.steps:
        raise ConfigError(explain(
            f"the run has come to step {first_step} already", given=f"--steps {config.steps}",
            do=f"leave --steps out, or give more than {first_step}"))
    take_over(run)
    if abandoned := run.go_back_to(first_step):
        display.message(f"metrics of {abandoned} step(s) after step {first_step} were moved to metrics.abandoned.jsonl: they are run again")
    run.write_config(config.to_json(derived=_derived(config, choice.plan, program)))
    if (died := Journal(run).recover(first_step)) is not None:
        display.message(f"the run ended while it tried {died.target.describe()}: it goes on under the plan from before")
    run.write_plan(choice.plan.to_json())
    run.log_event("resume" if resume else "start", first_step, devices=str(devices.topology), data=inputs.data.description,
                  engine=devices.launch.engine, launch=devices.launch.why)
    run.log_event("plan", first_step, digest=choice.plan.digest, layout=choice.plan.describe(), why=choice.why,
                  crosses=devices.topology.crossed(choice.plan.axes))
    run.check()


def _derived(config: Config, plan: Plan, program: Program) -> dict[str, Any]:
    """What was left open in the config, by the names of the settings."""
    return {
        "data.seq_len": config.seq_len, "optimizer.lr": peak_learning_rate(config.optimizer, program.shapes.num_params),
        "optimizer.warmup_steps": config.warmup_steps, "parallel.mesh": str(plan.axes), "parallel.zero": plan.zero,
        "parallel.microbatches": plan.microbatches, "parallel.attention": plan.attention,
        "parallel.loss_chunk_tokens": plan.loss_chunk_tokens}


def _compiled(program: Program, state: TrainState, loader: BatchLoader, topology: Topology) -> tuple[Any, int]:
    """The training step, compiled for the arrays it will get, and the bytes per device that it needs.

    Raises:
      PlanError: the compiled program needs more memory than a device has.
    """
    rows = {name: jax.ShapeDtypeStruct((loader.global_batch, *array.shape[1:]), array.dtype, sharding=program.batch_sharding)
            for name, array in loader.batch(loader.steps_before + 1).items()}
    compiled = program.train_step.lower(state, rows).compile()
    if topology.platform == "cpu":
        return_freed_memory()
    allocated = check_executable(compiled.memory_analysis(), topology.bytes_per_device)
    if allocated.fits is False:
        raise PlanError(explain(
            f"the compiled step needs {gib(allocated.total_bytes)} per device, {gib(topology.bytes_per_device or 0)} are there",
            given=program.plan.describe(), do="use more --microbatches, --remat full, or more devices along fsdp"))
    return compiled, allocated.total_bytes


def _say_goodbye(display: Display, outcome: Outcome, run: RunDirectory) -> None:
    if outcome.reason == "done":
        display.message(f"done: {outcome.last_step} steps, in {run.path}")
    else:
        display.message(f"stopped after step {outcome.last_step} and saved; go on with: "
                        f"python scripts/train.py --run-dir {run.path} --resume")
