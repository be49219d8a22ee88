"""A run from its settings to its end; its training loop is ours, or the caller's.

Order: config, devices, plan, data, program, state (new or restored), compile, training loop.
Mistakes of the user are found before anything expensive starts.
"""

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import optax

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.checkpoint.reading import Saved
from optimus_jax.cluster.distributed import (
    all_or_none,
    assert_same_everywhere,
    connect,
    is_peer_failure,
    is_writer,
    named,
)
from optimus_jax.cluster.launch_detection import Launch, find_launch
from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.phases import in_phase, phase_after
from optimus_jax.config.request import (
    SAVED_WITH_A_RUN,
    parameters,
)
from optimus_jax.control.deciding.candidates import check_allowed
from optimus_jax.devices.backend import unexpected_cpu_warning
from optimus_jax.devices.cpu import disable_compilation_cache_on_cpu, use_cpu_devices
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import (
    ConfigError,
    FaultError,
    explain,
    first_line,
)
from optimus_jax.faults.error_isolation import isolate_errors
from optimus_jax.faults.progress import Progress
from optimus_jax.faults.stopping import Terminated, exit_code_after, keep_reason
from optimus_jax.faults.watchdog import Watchdog
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.shapes import model_shapes
from optimus_jax.plan import Plan
from optimus_jax.planning.local_cluster import LocalCluster, known_devices, measure_devices
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.phase_plans import plans_ahead
from optimus_jax.run.display import make_display
from optimus_jax.run.first_plan import (
    RunDevices,
    fastest_in_trials,
    for_available_devices,
    is_same_layout,
    plan_of_run,
)
from optimus_jax.run.in_python import GivenData, PythonObjects, with_objects
from optimus_jax.run.inputs import Inputs
from optimus_jax.run.open_directory import (
    finish_upload,
    locate,
    new_directory,
    open_as_writer,
    share_directory,
    start_mirror,
    upload_after_error,
)
from optimus_jax.run.program import run_program
from optimus_jax.run.requested_config import read_resumed_config, requested_config, shared_settings
from optimus_jax.run.resumed_config import ResumedConfig
from optimus_jax.run.stored_run import StoredRun
from optimus_jax.run.trackers import check_trackers, trackers_of
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.shared import check_shared
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.store.mirror import Mirror
from optimus_jax.system.paths import UserPath
from optimus_jax.system.resilient_io import print_to_stderr
from optimus_jax.training.callbacks import Callback, Callbacks, check_callbacks
from optimus_jax.training.own_loop import TrainingLoop
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import build_program
from optimus_jax.training.task import Task
from optimus_jax.training.trainer import Reason
from optimus_jax.version import VERSION
from optimus_jax.weights.published import checked_model


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run."""

    final_loss: float
    """Loss of the last step, in the unit of `StepRecord.loss`; NaN if no step was run."""
    reason: Reason
    """`done`, or what stopped the run."""
    state: TrainState
    """Final state, sharded over the plan's mesh."""
    plan: Plan
    """Plan at the end of the run."""
    history: list[StepRecord]
    """All steps of the run, including those before a resume."""
    run_dir: Path
    """Local directory of the run; a run at a URL has been uploaded from it."""

    @property
    def exit_code(self) -> int:
        """Exit code for a command that ran this run."""
        return exit_code_after(self.reason)


def run_whole(
    model: UserPath | ModelConfig | None,
    *,
    config: Config | UserPath | None,
    run_dir: UserPath | None,
    resume: bool | Literal["auto"],
    data: GivenData | None,
    optimizer: str | optax.GradientTransformation | None,
    task: str | Task | None,
    eval_data: GivenData | None,
    callbacks: Sequence[Callback],
    overrides: dict[str, Any],
    has_own_loop: bool = False,
) -> Generator[TrainingLoop, None, RunResult]:
    """`train` as a generator: with `has_own_loop` it yields the loop once, and finishes the run
    after that; otherwise it yields nothing.
    """
    check_callbacks(callbacks)
    given, overrides = parameters(overrides, {"model": model, "config": config, "run_dir": run_dir})
    model, config, run_dir = given["model"], given["config"], given["run_dir"]
    begun_with = None if model is None else checked_model(model)
    overrides, objects = with_objects(overrides, data, optimizer, task, eval_data)
    objects.install()
    if resume not in (True, False, "auto"):
        raise ConfigError(
            explain(
                "a run is resumed or not",
                given=f"resume={resume!r}",
                do='give True, False or "auto"; run_dir names the run, and'
                " checkpoint.resume_step one of its checkpoints",
            )
        )
    is_auto = resume == "auto"
    stored, run_dir = locate(run_dir, config, overrides)
    resume = bool(resume) and (
        not is_auto or (run_dir is not None and (stored or RunDirectory(run_dir)).is_begun)
    )
    if stored is not None:
        stored.fetch(print_to_stderr) if resume else stored.check_free()
    config = requested_config(begun_with, config, run_dir, resume, overrides, is_auto)
    if config.checkpoint.resume_step is not None and (is_auto or not resume):
        raise ConfigError(
            explain(
                "checkpoint.resume_step applies once, to a run that is resumed",
                given=f"checkpoint.resume_step={config.checkpoint.resume_step} with "
                + ("--resume auto" if is_auto else "a new run"),
                do="give it once with --run-dir DIR --resume; later starts can use --resume auto",
            )
        )
    resumed = None
    if resume and run_dir is not None:
        resumed = read_resumed_config(config, run_dir, overrides)
    config = config if resumed is None else resumed.config
    if has_own_loop:
        _check_own_loop(config)
    launch = find_launch(config.distributed, on_cpu=config.cpu_devices is not None)
    with named(launch), objects.under_way():
        return (
            yield from _train(
                config,
                launch,
                run_dir,
                stored,
                resumed,
                overrides,
                is_auto,
                objects,
                callbacks,
                has_own_loop,
            )
        )


def _train(
    config: Config,
    launch: Launch,
    run_dir: Path | None,
    stored: StoredRun | None,
    resumed: ResumedConfig | None,
    overrides: dict[str, Any],
    is_auto: bool,
    objects: PythonObjects,
    callbacks: Sequence[Callback],
    has_own_loop: bool,
) -> Generator[TrainingLoop, None, RunResult]:
    """`run_whole` after the config and the launch are known."""
    resume = resumed is not None
    if launch.is_alone and not resume and run_dir is not None:
        RunDirectory(run_dir).check_free()
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    jax_notes = check_jax_settings()
    connect(launch, timeout_s=config.faults.connect_s, heartbeat_s=config.faults.heartbeat_s)
    progress = Progress()
    watchdog = Watchdog.of(
        None, progress, config.faults, process=launch.process_id, num_processes=launch.num_processes
    )
    run: RunDirectory | None = None
    inputs: Inputs | None = None
    mirror: Mirror | None = None
    try:
        has_left_cache = disable_compilation_cache_on_cpu()
        topology = discover()
        objects.check()
        # A file server may show a new run to some hosts a minute later than to others, so that
        # processes can disagree on whether it exists.
        assert_same_everywhere(
            {"whether the run is new or resumed": "resumed" if resume else "new"},
            is_transient=is_auto,
        )
        assert_same_everywhere(
            {"versions": f"optimus_jax {VERSION}, jax {jax.__version__}"} | shared_settings(config)
        )
        requested_mesh = config.parallel.mesh
        with all_or_none():
            if resume and run_dir is not None:
                if is_auto or not {"mesh", "parallel.mesh"} & overrides.keys():
                    config = for_available_devices(config, topology)
                if (
                    is_auto
                    and resumed is not None
                    and is_same_layout(resumed.as_requested(config), run_dir)
                ):
                    overrides = {}  # the command requests nothing new
        local_cluster = _local_cluster(config, topology)
        saved = _newest_checkpoint(config, run_dir) if resume and run_dir is not None else None
        devices = RunDevices(topology=topology, local_cluster=local_cluster, launch=launch)
        with all_or_none():
            first_step = saved.step if saved else 0
            now = in_phase(config, phase_after(config, first_step))
            choice = (
                plan_of_run(config, topology, run_dir, overrides, saved, devices.pricing)
                if resume and run_dir is not None
                else None
            ) or choose_plan(
                now, topology, devices.pricing(now), fixed=SAVED_WITH_A_RUN if resume else ()
            )
            if config.parallel.mesh != requested_mesh:
                choice = replace(
                    choice,
                    why=(
                        f"{requested_mesh} does not fit the {topology.num_devices} available"
                        f" devices; {choice.why}"
                    ),
                )
            check_allowed(config.controller.allowed_axes, topology.num_devices)
            plans_ahead(config, choice.plan, first_step, topology, devices.pricing)
            display = isolate_errors(
                make_display(config.log, config.steps, show=is_writer()), "the display"
            )
            for note in [*_notes(config, has_left_cache), *jax_notes]:
                display.message(note)
            if is_writer():
                check_trackers(config.log)
            if resume and run_dir is not None:
                run = open_as_writer(
                    partial(RunDirectory.resume, run_dir, writer=is_writer(), warn=display.message),
                    launch,
                    is_auto,
                )
            inputs = Inputs.of(config, run, objects.records, objects.held_out)
            config, now = inputs.config, in_phase(inputs.config, phase_after(config, first_step))
            if run is None:  # after reading the data, so that a failed start leaves no directory
                run = new_directory(run_dir, config, launch, display, is_auto)
            if stored is not None and run is not None and is_writer():
                mirror = open_as_writer(
                    partial(start_mirror, stored, run, config, resume, display), launch, is_auto
                )
        run = share_directory(run, run_dir)
        check_shared(run)
        assert_same_everywhere(
            {
                "the data": json.dumps(inputs.data.identity),
                "the plan": f"{choice.plan.describe()} ({choice.plan.digest})",
            }
        )
        progress.begin("start")
        if watchdog is not None:
            watchdog.close()
            watchdog = None  # so that an error below does not close it again
        with all_or_none():
            watchdog = Watchdog.of(
                run.path,
                progress,
                config.faults,
                process=launch.process_id,
                num_processes=launch.num_processes,
            )
        tried = None
        if not resume and config.parallel.axes is None:
            choice, tried = fastest_in_trials(now, topology, choice, local_cluster, run, display)
        listening = Callbacks([*trackers_of(config.log), *callbacks], is_writer=run.writer)
        outcome, plan = yield from run_program(
            config,
            devices,
            choice,
            tried.program if tried is not None else build_program(now, choice.plan),
            tried,
            inputs,
            run,
            display,
            resumed,
            progress,
            watchdog.heartbeats if watchdog is not None else None,
            listening,
            has_own_loop=has_own_loop,
        )
        if watchdog is not None:
            watchdog.close()
            watchdog = None
        if stored is not None:
            ending, mirror = mirror, None
            # The others wait here: if they left, JAX would take the uploading process for lost.
            with all_or_none():
                finish_upload(ending, outcome.reason, display)
        result = RunResult(
            final_loss=outcome.last_loss,
            reason=outcome.reason,
            state=outcome.state,
            plan=plan,
            history=run.metrics(),
            run_dir=run.path,
        )
    except BaseException as error:
        keep_reason(error)
        is_fault = not launch.is_alone and is_peer_failure(error)
        fault = (
            FaultError(f"process {jax.process_index()} cannot continue: {first_line(error)}")
            if is_fault
            else None
        )
        if watchdog is not None:  # first, because it notifies the others via the run directory
            if fault is not None:
                watchdog.report(str(fault))
            watchdog.close(fault or error)
        # A run that is terminated or hit by a fault during its start may be resumed, so its
        # directory stays if it has a config.
        if run is not None and not ((is_fault or isinstance(error, Terminated)) and run.is_begun):
            run.discard()
        if mirror is not None:
            upload_after_error(mirror, error, run)
        if fault is not None:
            raise fault from error
        raise
    finally:
        if inputs is not None:
            inputs.put_back()
        if run is not None:
            run.close()
    listening.leave()
    return result


def _check_own_loop(config: Config) -> None:
    """Raise ConfigError if a config asks for what a loop of the caller's own does not do."""
    asked = {
        "control": config.control != "off" and config.control,
        "data.phases": ",".join(map(str, config.data.phases)),
        "checkpoint.snapshot_every": config.checkpoint.snapshot_every,
    }
    if given := [f"{name}={value}" for name, value in asked.items() if value]:
        raise ConfigError(
            explain(
                "a loop of your own changes no plan, batch or snapshot by itself",
                given=", ".join(given),
                do='leave it out (of a resumed run: control="off"), or use optimus_jax.train',
            )
        )


def _notes(config: Config, has_left_cache: bool) -> Iterator[str]:
    """What a user should know about the devices before the first step."""
    warning = unexpected_cpu_warning(
        lambda: model_shapes(config.model, config.model.vocab_size).num_params
    )
    if warning is not None:
        yield warning
    if has_left_cache:
        yield (
            "JAX's compilation cache is not used: cached programs for several CPU devices can hang"
        )


def _newest_checkpoint(config: Config, run_dir: Path) -> Saved | None:
    """The checkpoint that determines the phase in which a run resumes; None without a checkpoint or
    without phases."""
    if not config.data.phases:
        return None
    return Checkpoints(RunDirectory(run_dir, writer=False).checkpoints, config.checkpoint).latest(
        config.checkpoint.resume_step
    )


def _local_cluster(config: Config, topology: Topology) -> LocalCluster | None:
    """Measured speed of the devices, if the run needs it. None if it does not, or if it is unknown
    and the planner uses a simple rule instead.
    """
    if config.control == "off" and config.parallel.axes is not None:
        return None
    local_cluster = known_devices(topology)
    if local_cluster is None and config.control != "off":
        if is_writer():
            print(
                "the controller needs the speed of these devices: measuring it once, in one to"
                " three minutes",
                file=sys.stderr,
                flush=True,
            )
        local_cluster = measure_devices(topology)
    return local_cluster
