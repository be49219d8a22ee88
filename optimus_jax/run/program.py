"""A run from its program to its end: state (new or restored), run files, compile, training loop."""

from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import replace

import jax

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.checkpoint.disk_space import check_disk_space, disk_space_of, max_checkpoints
from optimus_jax.checkpoint.saving import Retries
from optimus_jax.checkpoint.snapshots import bytes_of_host
from optimus_jax.cluster.distributed import all_or_none, assert_same_everywhere, is_writer
from optimus_jax.config import Config
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.config.phases import TrainingPhase, in_phase, phase_after
from optimus_jax.control.assembly import make_controller
from optimus_jax.control.controller import Controller
from optimus_jax.control.disk_transfer import DiskTransfer
from optimus_jax.control.executables import executable_of
from optimus_jax.control.journal import Journal
from optimus_jax.control.phase_changes import PhaseChanges
from optimus_jax.control.switch import Switcher
from optimus_jax.data.given import given_in_python
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import OptimusError, PlanError, explain, first_line
from optimus_jax.faults.error_isolation import isolate_errors
from optimus_jax.faults.heartbeat import Heartbeats
from optimus_jax.faults.progress import Progress
from optimus_jax.faults.stopping import StopRequest
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep, StepCompilation
from optimus_jax.planning.local_cluster import known_devices
from optimus_jax.planning.search.choice import Choice
from optimus_jax.planning.search.phase_plans import plan_of, plans_ahead
from optimus_jax.run.background_exports import BackgroundExports
from optimus_jax.run.first_plan import RunDevices
from optimus_jax.run.first_state import first_state, make_snapshots
from optimus_jax.run.inputs import Inputs
from optimus_jax.run.mesh_changes import MeshChanges
from optimus_jax.run.resumed_config import ResumedConfig
from optimus_jax.run.start_log import derived_settings, log_start
from optimus_jax.run.start_table import show_start_table
from optimus_jax.run.step_profiler import StepProfiler
from optimus_jax.run.stored_config import describe_changes
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.command import typed_command
from optimus_jax.training.callbacks import ERROR, Callbacks, RunInfo
from optimus_jax.training.optimizer import peak_learning_rate
from optimus_jax.training.own_loop import TrainingLoop
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.tasks import NEXT_TOKEN, task_name
from optimus_jax.training.trainer import Trainer, TrainingResult, described
from optimus_jax.training.watchers import Display


def run_program(
    config: Config,
    devices: RunDevices,
    choice: Choice,
    program: Program,
    tried: CompiledStep | None,
    inputs: Inputs,
    run: RunDirectory,
    display: Display,
    resumed: ResumedConfig | None,
    progress: Progress,
    heartbeats: Heartbeats | None,
    callbacks: Callbacks,
    *,
    has_own_loop: bool,
) -> Generator[TrainingLoop, None, tuple[TrainingResult, Plan]]:
    """Prepare the state, compile, train; return the outcome and the plan at the end. Every process
    must run this.

    Args:
      config: config of the whole run; a resumed run may start in a later phase.
      choice: the plan of `program`, and the reason for it.
      tried: the compiled step of `program`, if a trial compiled it; None: compile it.
      run: the run directory, locked if this process writes it.
      resumed: config of a resumed run, whose state is read from the newest valid checkpoint or
        snapshot; None for a new run.
      progress: records what this process is doing, for the watchdog.
      heartbeats: heartbeats of the run's processes; None without a watchdog.
      callbacks: of the user, and trackers.
      has_own_loop: whether the caller trains, with the loop that is yielded, and then goes on with
        this; otherwise nothing is yielded.
    Raises:
      OptimusError: a mistake that the user can fix; what was trained so far is saved.
    """
    topology = devices.topology
    exports = BackgroundExports(config, run, inputs.data.tokenizer, display)

    def saved_checkpoint(step: int, blocked_s: float) -> None:
        run.log_event("checkpoint", step, blocked_s=blocked_s)
        exports.saved(step)

    checkpoints = Checkpoints(
        run.checkpoints,
        config.checkpoint,
        warn=display.message,
        saved=saved_checkpoint,
        limits=lambda: (*learning.limits, *exports.limits),
    )
    resume = resumed is not None
    compilation = StepCompilation(
        program, bytes_per_device=topology.bytes_per_device, compiled=tried
    )
    first = first_state(program, inputs, checkpoints, run, resume, display)
    now = in_phase(config, phase_after(config, int(first.state.step)))
    # the newest checkpoint is damaged, and the one before it belongs to an earlier phase
    if now != program.config:
        plan = plan_of(
            phase_after(config, int(first.state.step)),
            config,
            choice.plan,
            topology,
            devices.pricing,
        )
        choice = replace(choice, plan=plan)
        program = build_program(now, choice.plan)
        first = first_state(program, inputs, checkpoints, run, resume, display)
    state, learning, saved = first.state, first.learning, first.saved
    first_step = int(state.step)
    exports.begin(first_step)
    if resumed is not None:
        # The config before the resume is the checkpoint's: config.json may have been edited since.
        resumed = (resumed if saved is None else replace(resumed, before=saved)).from_step(
            first_step
        )
        config = config.with_values({"optimizer.decay_steps": resumed.config.optimizer.decay_steps})
        if (now := in_phase(config, phase_after(config, first_step))) != program.config:
            program = build_program(now, choice.plan)  # a different learning rate, the same state
        exact = config.with_values(
            {
                "optimizer.lr": peak_learning_rate(config.optimizer, program.shapes.num_params),
                "precision.compute": program.plan.precision,
            }
        )
        if saved is not None and (told := describe_changes(saved, exact)) is not None:
            display.message(told)
    assert_same_everywhere({"the step to resume from": str(first_step)})
    saved_steps = tuple(checkpoints.steps_for_all()) if resume else ()
    with all_or_none():
        log_start(
            config,
            devices,
            choice,
            program,
            inputs,
            run,
            display,
            first_step,
            resumed,
            saved_steps,
            first.weights,
        )
    num_bytes_of_host = bytes_of_host(state)
    snapshots = make_snapshots(config, run, display)
    with all_or_none():
        snapshots.delete_after(first_step)
        snapshots.prepare(num_bytes_of_host)
        if is_writer() and (note := _check_disk_space(config, run, state, first_step)) is not None:
            display.message(note)
    progress.begin("compile")
    batches = inputs.phase_batches(program, first_step)
    step = compilation.of(program)
    step.check_memory(do="use more --microbatches, --remat full, or more devices along fsdp")
    run.log_event(
        "compile", first_step, compile_time_s=step.compile_s, step_bytes_per_device=step.step_bytes
    )
    show_start_table(
        display,
        config=config,
        topology=topology,
        why=choice.why,
        program=program,
        data=inputs.data,
        compile_s=step.compile_s,
        step_bytes=step.step_bytes,
        run_dir=run.path,
        launch=devices.launch,
        evaluation="when the loop asks for it" if has_own_loop else inputs.evaluation,
        weights=first.weights,
        later_phases=plans_ahead(config, choice.plan, first_step, topology, devices.pricing),
    )
    metadata = {
        "config": config.to_json(derived=derived_settings(config, choice.plan, program)),
        "data": inputs.data.identity,
    }
    disk_transfer = DiskTransfer(
        checkpoints,
        lambda program, step: described(
            program, step, metadata | inputs.position_after(step), learning
        ),
    )
    switcher = Switcher(
        running=executable_of(step),
        settings=config.controller,
        journal=Journal(run),
        bytes_per_device=topology.bytes_per_device,
        probe=inputs.probe,
        disk_transfer=disk_transfer,
    )
    controller, changes = _make_controllers(
        config,
        devices,
        switcher,
        step.compile_s,
        choice.tried_s,
        heartbeats,
        run,
        display,
    )

    def report_failed_save(text: str) -> None:
        display.process_message(text)
        run.log_event("fault", progress.at.done, what=text.splitlines()[0])

    with (
        StopRequest(num_processes=topology.num_processes, last_step=config.steps) as stop,
        callbacks,
    ):
        started = RunInfo(
            config=config,
            plan=program.plan,
            run_dir=run.path,
            first_step=first_step + 1,
            stop=stop.request,
        )
        run.listeners.append(display)
        run.listen(callbacks.start(started, run.checkpoints))
        trainer = Trainer(
            program=program,
            train_step=step.train_step,
            topology=topology,
            loader=batches.loader,
            held_out=batches.held_out,
            bits_per_token=isinstance(inputs.data.tokenizer, ByteTokenizer)
            and task_name(inputs.config) == NEXT_TOKEN,
            metadata=metadata,
            position_after=inputs.position_after,
            checkpoints=checkpoints,
            run=run,
            display=display,
            stop=stop,
            overseer=controller,
            progress=progress,
            profiler=_profiler(config, devices, run, display, first_step),
            snapshots=snapshots,
            learning=learning,
            retries=Retries(report_failed_save, is_alone=topology.num_processes == 1),
        )
        try:
            with display:
                try:
                    if has_own_loop:
                        meshes = MeshChanges(
                            devices=devices,
                            switcher=switcher,
                            inputs=inputs,
                            run=run,
                            display=display,
                        )
                        outcome = yield from _own_loop(TrainingLoop(trainer, state, meshes))
                    else:
                        outcome = _train_all_phases(
                            trainer, state, first_step, inputs, controller, changes
                        )
                finally:
                    progress.begin("end")
                    (controller or switcher).close()
        except Exception as error:
            with suppress(OptimusError):  # the first error says more
                checkpoints.close()
            exports.finish(progress, is_wanted=False)
            if not callbacks.has_ended:
                why = f"{type(error).__name__}: {first_line(error)}".rstrip(": ")
                run.log_event("end", callbacks.last_step, reason=ERROR, why=why)
            raise
        # A KeyboardInterrupt skips this: a second Ctrl-C does not wait for a save in progress.
        checkpoints.close()
        if exports.every:
            with all_or_none():  # if the others left, JAX would take process 0 for lost
                exports.finish(progress, is_wanted=outcome.reason == "done")
        snapshots.discard()
        _show_end(display, outcome, run, config)
        with all_or_none():  # if the others left, JAX would take a slow process for lost
            callbacks.finish()
        return outcome, switcher.running.plan


def _profiler(
    config: Config, devices: RunDevices, run: RunDirectory, display: Display, first_step: int
) -> StepProfiler | None:
    """What traces the steps that a config names, if it does.

    Args:
      first_step: the step after which the run begins or is resumed.
    """
    steps = config.log.profiled_steps
    if steps is None:
        return None
    if first_step >= steps[1]:
        display.message(
            f"step {first_step} is done, so --profile {config.log.profile} traces nothing"
        )
        return None
    cluster = devices.local_cluster or known_devices(devices.topology)
    pricing = None if cluster is None else cluster.pricing
    return isolate_errors(StepProfiler(steps, run, display, pricing), "the profile")


def _make_controllers(
    config: Config,
    devices: RunDevices,
    switcher: Switcher,
    compile_s: float,
    tried_s: Mapping[Plan, float],
    heartbeats: Heartbeats | None,
    run: RunDirectory,
    display: Display,
) -> tuple[Controller | None, PhaseChanges | None]:
    """The controller and the phase changes of a run; None for what the run does not need."""
    topology = devices.topology
    has_controller = config.control != "off" and devices.local_cluster is not None
    if not has_controller and not config.data.phases:
        return None, None

    def plan_in(phase: TrainingPhase, plan: Plan) -> Plan:
        return plan_of(
            phase, config, plan, replace(topology, num_devices=plan.num_devices), devices.pricing
        )

    changes = PhaseChanges(config, plan_in, switcher, run, display) if config.data.phases else None
    if not has_controller or devices.local_cluster is None:
        return None, changes
    return (
        make_controller(
            config,
            topology,
            devices.local_cluster,
            switcher,
            compile_s=compile_s,
            tried_s=tried_s,
            changes=changes,
            heartbeats=heartbeats,
            run=run,
            display=display,
        ),
        changes,
    )


def _own_loop(loop: TrainingLoop) -> Generator[TrainingLoop, None, TrainingResult]:
    """Let the caller train; return the outcome."""
    try:
        with suppress(SystemExit):  # a caller who leaves the program is done; `training_loop`
            yield loop  # raises it again when the run has ended in order
        loop.close()
    except Exception as error:
        loop.abandon(error)
        raise
    finally:
        loop.stop_tracing()
    return loop.end()


def _train_all_phases(
    trainer: Trainer,
    state: TrainState,
    step: int,
    inputs: Inputs,
    controller: Controller | None,
    changes: PhaseChanges | None,
) -> TrainingResult:
    """Train to the end of the run, across plans and phases."""
    while True:
        if changes is not None and controller is None:
            changes.prepare(step)
        trainer = replace(trainer, last_step=phase_after(inputs.config, step).last_step)
        outcome = trainer.train(state)
        if outcome.reason not in ("switch", "phase"):
            break
        state, step, is_switch = outcome.state, outcome.last_step, outcome.reason == "switch"
        del outcome  # it would keep the old state's arrays alive on the devices
        with trainer.progress.during("switch"):
            if is_switch and controller is not None:
                state, executable = controller.carry_out(state, step)
                trainer.learning.reset_skipped()
                trainer = trainer.under(executable.program)
            if changes is not None and changes.is_due(step):
                state, trainer = _in_next_phase(trainer, state, step, controller, changes)
        trainer.progress.forget_steps()
        batches = inputs.phase_batches(trainer.program, step)
        trainer = replace(trainer, loader=batches.loader, held_out=batches.held_out)
    if controller is not None:
        controller.stop(outcome.last_step)
    return outcome


def _in_next_phase(
    trainer: Trainer,
    state: TrainState,
    step: int,
    controller: Controller | None,
    changes: PhaseChanges,
) -> tuple[TrainState, Trainer]:
    """The state and the trainer for the batches of the next phase.

    Raises PlanError, after saving the state, if the phase cannot be entered.
    """
    try:
        switched = changes.enter(state, step)
    except PlanError:
        trainer.save(state, step)
        raise
    if not switched.is_done:
        trainer.save(switched.state, step)
        raise PlanError(
            explain(
                f"the state could not be moved to the plan for the batches after step {step}",
                given=switched.why_not,
                do="restart with --resume: the state is saved and will be read under the new plan",
            )
        )
    if controller is not None:
        controller.enter_phase(switched, trainer.program.plan)
    return switched.state, trainer.under(switched.executable.program)


def _check_disk_space(
    config: Config, run: RunDirectory, state: TrainState, first_step: int
) -> str | None:
    """A warning if disk space for checkpoints is scarce, else None.

    Raises CheckpointError if there is not enough.
    """
    room = disk_space_of(run.checkpoints)
    wanted = max_checkpoints(
        config.checkpoint, first_step, config.steps, room.num_checkpoints if room is not None else 0
    )
    return check_disk_space(
        room,
        sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        wanted=wanted,
        num_processes=jax.process_count(),
        directory=run.checkpoints,
    )


def _show_end(display: Display, outcome: TrainingResult, run: RunDirectory, config: Config) -> None:
    objects = "".join(
        f", {name}=..."
        for name, is_object in (
            ("data", given_in_python(config.data.sources)),
            ("eval_data", given_in_python(config.evaluation.data)),
            ("optimizer", config.optimizer.name == IN_PYTHON),
            ("task", config.task == IN_PYTHON),
        )
        if is_object
    )
    if outcome.reason == "done":
        display.message(f"done: {outcome.last_step} steps, in {run.address}")
    else:
        options = f"--run-dir {run.address} --resume"
        if objects:
            how = f'in Python: optimus_jax.train(run_dir="{run.address}", resume=True{objects})'
        elif jax.process_count() == 1:
            how = f"with: {typed_command('train')} {options}"
        else:
            how = f"with the command of the first start, on any number of processes, and {options}"
        display.message(f"stopped after step {outcome.last_step} and saved; resume {how}")
