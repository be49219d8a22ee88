"""`train`: the whole main job, from names and overrides to a trained state.

Order: config, devices, plan, data, program, state (fresh or restored), compile, loop. Whatever a
user can get wrong is found before anything expensive begins.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from optimus_jax.checkpoint.checkpoints import Checkpoints, Saved
from optimus_jax.cluster.distributed import (
    all_or_none,
    assert_same_everywhere,
    broadcast_from_0,
    connect,
    is_peer_failure,
    is_writer,
    named,
)
from optimus_jax.cluster.launch import Launch, find_launch
from optimus_jax.config import Config, DataConfig, DistributedConfig
from optimus_jax.config.phases import in_phase, phase_after
from optimus_jax.config.request import (
    SAVED_WITH_A_RUN,
    dotted,
    make_config,
    named_settings,
    parameters,
    read_config,
    repeated_config,
    resumed_config,
)
from optimus_jax.control.deciding.candidates import check_allowed
from optimus_jax.devices.backend import warning_of_cpu
from optimus_jax.devices.cpu import leave_compilation_cache, use_cpu_devices
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import (
    ConfigError,
    FaultError,
    PlanError,
    RunDirectoryError,
    StoreError,
    explain,
)
from optimus_jax.faults.error_isolation import isolate_errors
from optimus_jax.faults.progress import Progress
from optimus_jax.faults.stopping import EXIT_RESTART, ImmediateStop, Terminated, keep_reason
from optimus_jax.faults.watchdog import Watchdog
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.families import check_family
from optimus_jax.models.shapes import model_shapes
from optimus_jax.plan import Plan
from optimus_jax.planning.local_cluster import LocalCluster, known_devices, measure_devices
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.phase_plans import plans_ahead
from optimus_jax.run.display import make_display
from optimus_jax.run.first_plan import fastest_tried, is_same_layout, on_what_is_there, own_plan
from optimus_jax.run.inputs import Inputs
from optimus_jax.run.program import Devices, run_program
from optimus_jax.run.resumed import Resumed
from optimus_jax.run.stored_run import StoredRun
from optimus_jax.run.tensorboard import check_installed
from optimus_jax.run_directory.directory import RunDirectory, RunExistsError
from optimus_jax.run_directory.lock import LockedError
from optimus_jax.run_directory.shared import check_shared
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.store.lease import LeaseHeldError
from optimus_jax.store.mirror import Mirror
from optimus_jax.system.paths import UserPath, user_path
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import build_program
from optimus_jax.training.trainer import Reason
from optimus_jax.training.watchers import Display
from optimus_jax.version import VERSION

T = TypeVar("T")


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
    """Where it is on this machine; that of a URL has been uploaded from there."""

    @property
    def exit_code(self) -> int:
        """Of a command that ran it."""
        return EXIT_RESTART if self.reason == "terminate" else 0


def train(
    model: str | None = None,
    *,
    config: Config | UserPath | None = None,
    run_dir: UserPath | None = None,
    resume: bool | Literal["auto"] = False,
    **overrides: Any,
) -> RunResult:
    """Train a model, or go on training one.

    Signals are the caller's until the first step; from then on SIGINT and SIGTERM stop the run
    (faults/stopping.py).

    Args:
      model: name of a preset; needed unless resuming or a config is given, whose model it replaces.
      config: settings to begin with, as a value or the path or URL of a config.json.
      run_dir: where the run is kept, a directory or a URL of a store; None: a new directory under
        `runs/`.
      resume: go on with the run in `run_dir` from its newest good checkpoint; `auto`: if there is
        one, and begin it otherwise, so that a job that is started again can use the same words each
        time.
      overrides: settings by short name (`mesh="data=2,fsdp=4"`, `lr=1e-3`, `data="a.txt"` or a list
        of paths) or, in a dict, by dotted name (`**{"optimizer.beta2": 0.99}`), which takes text as
        `--set` does. Words of other frameworks that mean the same (`learning_rate`, `max_steps`,
        `output_dir`) are taken for ours, with a note (config/aliases.py).
    Raises:
      OptimusError: something that the user can mend; its text says how.
      FaultError: of several processes, another one or the network has failed; the run is worth
        resuming.
    """
    asked, overrides = parameters(overrides, {"model": model, "config": config, "run_dir": run_dir})
    model, config, run_dir = asked["model"], asked["config"], asked["run_dir"]
    overrides = dotted(overrides)
    is_repeated = resume == "auto"
    stored, run_dir = _place_of(run_dir, config, overrides)
    resume = bool(resume) and (
        not is_repeated or (run_dir is not None and (stored or RunDirectory(run_dir)).is_begun)
    )
    if stored is not None:
        stored.fetch(_say) if resume else stored.check_free()
    config = _config_of(model, config, run_dir, resume, overrides, is_repeated)
    if config.checkpoint.resume_step is not None and (is_repeated or not resume):
        raise ConfigError(
            explain(
                "a run can go back to an older checkpoint once, when it is resumed",
                given=f"checkpoint.resume_step={config.checkpoint.resume_step} with "
                + ("--resume auto" if is_repeated else "a new run"),
                do="give it with --run-dir DIR --resume, once; --resume auto goes on from there",
            )
        )
    resumed = _resumed(config, run_dir, overrides) if resume and run_dir is not None else None
    config = config if resumed is None else resumed.config
    launch = find_launch(config.distributed, on_cpu=config.cpu_devices is not None)
    with named(launch):
        return _train(config, launch, run_dir, stored, resumed, overrides, is_repeated)


PATIENCE_S = 120.0
"""For the lock of a writer that has died with its host, which a file server may keep for a lease of
90 s."""


def _train(
    config: Config,
    launch: Launch,
    run_dir: Path | None,
    stored: StoredRun | None,
    resumed: Resumed | None,
    overrides: dict[str, Any],
    is_repeated: bool,
) -> RunResult:
    """`train`, from what was asked for and who else there is."""
    resume = resumed is not None
    if launch.is_alone and not resume and run_dir is not None:
        RunDirectory(run_dir).check_free()
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    of_jax = check_jax_settings()
    connect(launch, timeout_s=config.faults.connect_s, heartbeat_s=config.faults.heartbeat_s)
    progress = Progress()
    watchdog = Watchdog.of(
        None, progress, config.faults, process=launch.process_id, num_processes=launch.num_processes
    )
    run: RunDirectory | None = None
    mirror: Mirror | None = None
    try:
        has_left_cache = leave_compilation_cache()
        topology = discover()
        # Whoever asks for either is told so by a file server, which may tell a host of the run a
        # minute later than others.
        assert_same_everywhere(
            {"whether the run is begun or resumed": "resumed" if resume else "begun"},
            is_transient=is_repeated,
        )
        assert_same_everywhere(
            {"versions": f"optimus_jax {VERSION}, jax {jax.__version__}", **_settings(config)}
        )
        asked_mesh = config.parallel.mesh
        with all_or_none():
            if resume and run_dir is not None:
                if is_repeated or not {"mesh", "parallel.mesh"} & overrides.keys():
                    config = on_what_is_there(config, topology)
                if (
                    is_repeated
                    and resumed is not None
                    and is_same_layout(resumed.as_asked(config), run_dir)
                ):
                    overrides = {}  # nothing is asked for that the run was not asked for before
        here = _here(config, topology)
        saved = _newest(config, run_dir) if resume and run_dir is not None else None
        devices = Devices(topology=topology, here=here, launch=launch)
        with all_or_none():
            now = in_phase(config, phase_after(config, saved.step if saved else 0))
            choice = (
                own_plan(config, topology, run_dir, overrides, saved, devices.pricing)
                if resume and run_dir is not None
                else None
            )
            choice = choice or choose_plan(
                now, topology, devices.pricing(now), kept=SAVED_WITH_A_RUN if resume else ()
            )
            if config.parallel.mesh != asked_mesh:
                choice = replace(
                    choice,
                    why=(
                        f"{asked_mesh} is not for the {topology.num_devices} devices that are"
                        f" there; {choice.why}"
                    ),
                )
            check_allowed(config.controller.allowed_axes, topology.num_devices)
            plans_ahead(config, choice.plan, saved.step if saved else 0, topology, devices.pricing)
            display = isolate_errors(
                make_display(config.log, config.steps, show=is_writer()), "the display"
            )
            if (
                warning := warning_of_cpu(
                    lambda: model_shapes(config.model, config.model.vocab_size).num_params
                )
            ) is not None:
                display.message(warning)
            if has_left_cache:
                display.message(
                    "JAX's compilation cache is not used: programs for several CPU devices that"
                    " come out of it get stuck"
                )
            for line in of_jax:
                display.message(line)
            if config.log.tensorboard and is_writer():
                check_installed()
            if resume and run_dir is not None:
                run = _opened(
                    partial(RunDirectory.resume, run_dir, writer=is_writer(), warn=display.message),
                    launch,
                    is_repeated,
                )
            inputs = Inputs.of(config, run)
            if run is None:  # after the data, so that a start which fails leaves nothing behind
                run = _new_directory(run_dir, config, launch, display, is_repeated)
            if stored is not None and run is not None and is_writer():
                mirror = _opened(
                    partial(_mirror, stored, run, config, resume, display), launch, is_repeated
                )
        run = _known_to_all(run, run_dir)
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
            watchdog = None  # a second close is none
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
            choice, tried = fastest_tried(now, topology, choice, here, run, display)
        outcome, plan = run_program(
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
        )
        if watchdog is not None:
            watchdog.close()
            watchdog = None
        if stored is not None:
            ending, mirror = mirror, None
            with all_or_none():  # the others wait: JAX would take the one that uploads for lost
                _upload_the_rest(ending, outcome.reason, display)
        return RunResult(
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
            FaultError(f"process {jax.process_index()} cannot go on: {str(error).splitlines()[0]}")
            if is_fault
            else None
        )
        if watchdog is not None:  # first, for others hear of it by way of the run directory
            if fault is not None:
                watchdog.report(str(fault))
            watchdog.close(fault or error)
        # Who is told to end while it starts, or has to, may be started again with --resume; that
        # takes a config.
        if run is not None and not ((is_fault or isinstance(error, Terminated)) and run.is_begun):
            run.discard()
        if mirror is not None:
            _upload_after(mirror, error, run)
        if fault is not None:
            raise fault from error
        raise
    finally:
        if run is not None:
            run.close()


def _place_of(
    run_dir: UserPath | None, base: Config | UserPath | None, overrides: dict[str, Any]
) -> tuple[StoredRun | None, Path | None]:
    """Where a run is kept: in a store or not, and the directory that it works in."""
    path = None if run_dir is None else user_path(run_dir, what="--run-dir")
    if path is None or isinstance(path, Path):
        return None, path
    asked = {name: value for name, value in overrides.items() if name == "store.local_dir"}
    stored = StoredRun.at(
        path, (base if isinstance(base, Config) else Config()).with_values(asked).store.local_dir
    )
    return stored, stored.directory


def _mirror(
    stored: StoredRun,
    run: RunDirectory,
    config: Config,
    resume: bool,
    display: Display,
    *,
    patience_s: float,
) -> Mirror:
    """Begin to upload a run.

    Another writer that takes its place ends it, with its state saved, as a log that cannot be
    written does.
    """

    def on_lost(error: RunDirectoryError) -> None:
        run.failure = run.failure or error

    mirror = stored.mirror(
        config.checkpoint,
        config.store,
        is_resumed=resume,
        warn=display.message,
        on_lost=on_lost,
        patience_s=patience_s,
    )
    run.address = str(stored.url)
    display.message(
        f"the run is kept in {stored.url}; it works in {run.path}, which is uploaded as it grows"
    )
    return mirror


def _upload_the_rest(mirror: Mirror | None, reason: Reason, display: Display) -> None:
    """Raises StoreError, or FaultError if the run is to be started again anyway, for what cannot be
    uploaded.
    """
    if mirror is None:
        return
    try:
        mirror.finish(display.message)
    except StoreError as error:
        if reason == "terminate":
            raise FaultError(str(error)) from error
        raise


def _upload_after(mirror: Mirror, error: BaseException, run: RunDirectory | None) -> None:
    """Upload what there is when `error` ends the run, which keeps its reason; who insists on ending
    at once does not wait for that.
    """
    if isinstance(error, ImmediateStop):
        mirror.abandon()
        _say(
            "what is not uploaded yet is in"
            f" {run.path if run else 'the directory that it works in'}: --resume uploads it"
        )
        return
    try:
        mirror.finish(_say)
    except StoreError as late:
        if not mirror.is_lost:
            error.add_note(str(late))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _settings(config: Config) -> dict[str, str]:
    """What the config has in common in all processes, each setting by its name: an error has to say
    which one differs.

    Where the data lies is a host's own affair; what it holds is compared once it is read.
    """
    nowhere = replace(config.data, sources=DataConfig().sources, tokenizer=DataConfig().tokenizer)
    sections = json.loads(replace(config, distributed=DistributedConfig(), data=nowhere).to_json())
    return {
        f"{section}.{name}" if name else section: json.dumps(value)
        for section, values in sections.items()
        for name, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def _newest(config: Config, run_dir: Path) -> Saved | None:
    """The checkpoint that says which phase a run goes on in; None: it has none, or one phase
    only."""
    if not config.data.phases:
        return None
    return Checkpoints(RunDirectory(run_dir, writer=False).checkpoints, config.checkpoint).latest(
        config.checkpoint.resume_step
    )


def _here(config: Config, topology: Topology) -> LocalCluster | None:
    """How fast the devices are, where the run needs to know; None: it does not, or the planner goes
    by a simple rule.
    """
    if config.control == "off" and config.parallel.axes is not None:
        return None
    here = known_devices(topology)
    if here is None and config.control != "off":
        if is_writer():
            print(
                "the controller needs to know how fast these devices are: measuring them, once, in"
                " about a minute",
                file=sys.stderr,
                flush=True,
            )
        here = measure_devices(topology)
    return here


def _config_of(
    model: str | None,
    base: Config | UserPath | None,
    run_dir: Path | None,
    resume: bool,
    overrides: dict[str, Any],
    is_repeated: bool,
) -> Config:
    """What is to be run; touches no device and writes nothing."""
    if is_repeated and run_dir is None:
        raise ConfigError(
            explain(
                "there is no telling which run to resume",
                given="--resume auto without a directory",
                do="give --run-dir DIR --resume auto",
            )
        )
    if resume and is_repeated and not (model is None and base is None):
        assert run_dir is not None
        wanted = make_config(
            model,
            overrides,
            base if base is None or isinstance(base, Config) else read_config(base),
        )
        config = repeated_config(RunDirectory.resume(run_dir, writer=False).config_text(), wanted)
        check_family(config.model)
        return config
    if resume:
        if run_dir is None:
            raise ConfigError(
                explain(
                    "there is no telling which run to resume",
                    given="--resume without a directory",
                    do="give --run-dir DIR --resume",
                )
            )
        if base is not None:
            raise ConfigError(
                explain(
                    "a resumed run has its own config",
                    given="--resume with --config",
                    do="leave --config out; settings that may change have flags and --set",
                )
            )
        config = resumed_config(
            RunDirectory.resume(run_dir, writer=False).config_text(), model, overrides
        )
        check_family(config.model)
        return config
    if model is None and base is None:
        raise ConfigError(
            explain(
                "no model was named",
                given="neither --model nor --config nor --resume",
                do="give --model NAME, such as gpt2-nano",
            )
        )
    config = make_config(
        model, overrides, base if base is None or isinstance(base, Config) else read_config(base)
    )
    check_family(config.model)
    return config


def _resumed(asked: Config, run_dir: Path, overrides: dict[str, Any]) -> Resumed:
    """The run in a directory, which goes on as `asked` for; touches no device and writes
    nothing."""
    run = RunDirectory.resume(run_dir, writer=False)
    precision = None
    # if the plan is needed for more, its error is raised then
    with suppress(OSError, ValueError, PlanError):
        precision = Plan.from_json(run.plan_text() or "").precision
    return Resumed.of(run.config_text(), asked, named_settings(overrides), precision)


def _new_directory(
    run_dir: Path | None, config: Config, launch: Launch, display: Display, is_repeated: bool
) -> RunDirectory | None:
    """A directory that process 0 makes; None in the others while only that knows where."""
    if is_writer():
        return _opened(
            partial(RunDirectory.create, run_dir, config.model.name, warn=display.message),
            launch,
            is_repeated,
        )
    return None if run_dir is None else RunDirectory(run_dir, writer=False)


def _opened(open_it: Callable[..., T], launch: Launch, is_repeated: bool) -> T:
    """What process 0 alone writes: the directory, or its place in a store.

    Raises FaultError if another process writes there that an engine may be about to end, or did
    until just now.
    """
    try:
        return open_it(patience_s=PATIENCE_S if is_repeated else 0.0)
    except (LockedError, LeaseHeldError, RunExistsError) as error:
        if is_repeated and launch.restarts:
            raise FaultError(str(error)) from error
        raise


def _known_to_all(run: RunDirectory | None, run_dir: Path | None) -> RunDirectory:
    """In every process the directory, which process 0 has named where the user did not; every
    process has to call it.
    """
    if run is not None and run_dir is not None:
        return run
    path = broadcast_from_0("" if run is None else str(run.path))
    return RunDirectory(path, writer=False) if run is None else run
