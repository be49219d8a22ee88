"""`train`: the whole main job, from names and overrides to a trained state.

Order: config, devices, plan, data, program, state (fresh or restored), compile, loop. Whatever a
user can get wrong is found before anything expensive begins.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from optimus_jax.checkpoint import Checkpoints
from optimus_jax.config import Config, Precision
from optimus_jax.control.assembly import make_controller
from optimus_jax.control.controller import Controller
from optimus_jax.control.journal import Journal
from optimus_jax.data.dataset import Data, load_data
from optimus_jax.data.loader import BatchLoader, eval_batches
from optimus_jax.data.sampler import Batch
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import ConfigError, DataError, OptimusError, PlanError, explain
from optimus_jax.first_plan import fastest_tried, own_plan
from optimus_jax.mesh.build import build_mesh, discover
from optimus_jax.mesh.cpu import return_freed_memory, use_cpu_devices
from optimus_jax.mesh.distributed import connect, is_writer, together
from optimus_jax.mesh.sharding import local_rows, put_batch
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.families import check_family
from optimus_jax.models.shapes import planned_shapes
from optimus_jax.plan import Plan
from optimus_jax.planning.choice import Choice, choose_plan
from optimus_jax.planning.compile_report import check_executable
from optimus_jax.planning.explain import gib
from optimus_jax.planning.here import Here, known_devices, measure_devices
from optimus_jax.request import FIXED_FOR_A_RUN, make_config, read_config, resumed_config
from optimus_jax.training.display import Display, make_display
from optimus_jax.training.optimizer import peak_learning_rate
from optimus_jax.training.report import start_report
from optimus_jax.training.run_directory import RunDirectory, StepRecord
from optimus_jax.training.state import (
    TrainState,
    abstract_stored_state,
    check_stored_model,
    from_stored,
    initial_loss_scale,
    may_be_padded,
)
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.stopping import EXIT_RESTART, StopRequest, Terminated
from optimus_jax.training.tensorboard import TensorBoardWriter, check_installed
from optimus_jax.training.trainer import Outcome, Reason, Trainer


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
          resume: bool = False, **overrides: Any) -> RunResult:
    """Train a model, or go on training one.

    Signals are the caller's until the first step; from then on SIGINT and SIGTERM stop the run (training/stopping.py).

    Args:
      model: name of a preset; needed unless resuming or a config is given, whose model it replaces.
      config: settings to begin with, as a value or the path of a config.json.
      run_dir: where the run is kept; None: a new directory under `runs/`.
      resume: go on with the run in `run_dir` from its newest good checkpoint.
      overrides: settings by short name (`mesh="data=2,fsdp=4"`, `lr=1e-3`, `data="a.txt"` or a list of paths)
        or, in a dict, by dotted name (`**{"optimizer.beta2": 0.99}`), which takes text as `--set` does.
    Raises:
      OptimusError: something that the user can mend; its text says how.
    """
    config = _config_of(model, config, run_dir, resume, overrides)
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    connect(config.distributed)
    topology = discover()
    here = _here(config, topology)
    choice = own_plan(config, topology, run_dir, overrides) if resume and run_dir is not None else None
    choice = choice or choose_plan(config, topology, here and here.pricing(config), kept=FIXED_FOR_A_RUN if resume else ())
    display = make_display(config.log, config.steps, show=is_writer())
    program = build_program(config, planned_shapes(config.model, choice.plan), choice.plan, build_mesh(choice.plan))
    run: RunDirectory | None = None
    try:
        with together():
            if config.log.tensorboard and is_writer():
                check_installed()
            if resume and run_dir is not None:
                run = RunDirectory.resume(run_dir, writer=is_writer(), warn=display.message)
            inputs = _inputs(config, program)
            if run is None:  # after the data, so that a start which fails leaves nothing behind
                run = _new_directory(run_dir, config, display)
        if here is not None and choice.ranked and not resume and config.parallel.mesh == "auto":
            tried = fastest_tried(config, topology, choice, here, run, display)
            if tried.plan != choice.plan:
                program = build_program(config, planned_shapes(config.model, tried.plan), tried.plan, build_mesh(tried.plan))
                inputs = _inputs(config, program)
            choice = tried
        outcome, plan = _run(config, topology, choice, program, inputs, run, display, resume, here)
        return RunResult(final_loss=outcome.last_loss, reason=outcome.reason, state=outcome.state, plan=plan,
                         history=run.metrics(), run_dir=run.path)
    except BaseException as error:
        # Who is told to end while it starts may be started again with --resume; that takes a config.
        if run is not None and not (isinstance(error, Terminated) and run.is_begun):
            run.discard()
        raise
    finally:
        if run is not None:
            run.close()


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
               overrides: dict[str, Any]) -> Config:
    """What is to be run; touches no device and writes nothing."""
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
    if config.distributed.num_processes is None:
        if run_dir is not None:
            RunDirectory(run_dir).check_free()
    elif run_dir is None:
        raise ConfigError(explain("processes must agree on the run directory", given="no --run-dir",
                                  do="give the same --run-dir to every process"))
    return config


def _new_directory(run_dir: str | Path | None, config: Config, display: Display) -> RunDirectory:
    """A directory that process 0 makes."""
    if is_writer():
        return RunDirectory.create(run_dir, config.model.name, warn=display.message)
    assert run_dir is not None
    return RunDirectory(run_dir, writer=False)


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What a run reads."""

    data: Data
    loader: BatchLoader
    eval_batches: Callable[[], Iterator[Batch]] | None

    def dealt_out(self, program: Program) -> "_Inputs":
        """The same batches, as the processes of another program share them."""
        return _cut(self.data, program)

    def probe(self, program: Program) -> Any:
        """The first batch, on a program's devices."""
        return put_batch(self.dealt_out(program).loader.batch(1), program.batch_sharding, program.config.data.global_batch)


def _inputs(config: Config, program: Program) -> _Inputs:
    """Data and batches; nothing here waits for another process."""
    model = config.model
    return _cut(load_data(config.data, seq_len=config.seq_len, vocab_size=model.vocab_size, model_name=model.name), program)


def _cut(data: Data, program: Program) -> _Inputs:
    """Data as batches, this process's rows of them."""
    config = program.config
    rows = local_rows(program.batch_sharding, config.data.global_batch)
    cut = {"seq_len": config.seq_len, "global_batch": config.data.global_batch, "rows": rows,
           "respect_documents": config.data.respect_documents}
    loader = BatchLoader(data.train, seed=config.seed, **cut)
    held_out = data.held_out if config.eval_every else None
    if held_out is None:
        return _Inputs(data=data, loader=loader, eval_batches=None)
    eval_batches(held_out, num_batches=1, **cut)  # too short a held-out text is found now, not after hours
    return _Inputs(data=data, loader=loader, eval_batches=lambda: eval_batches(held_out, num_batches=config.eval_batches, **cut))


def _run(config: Config, topology: Topology, choice: Choice, program: Program, inputs: _Inputs, run: RunDirectory, display: Display,
         resume: bool, here: Here | None) -> tuple[Outcome, Plan]:
    """State, compile, loop; with the plan that the run ended under."""
    checkpoints = Checkpoints(
        run.checkpoints, config.checkpoint, warn=display.message,
        saved=lambda step, blocked_s: run.log_event("checkpoint", step, blocked_s=blocked_s))
    state = _first_state(config, program, inputs, checkpoints, resume, display)
    first_step = int(state.step)
    with together():
        _write_down(config, topology, choice, program, inputs, run, display, first_step, resume)
    started = time.perf_counter()
    train_step, step_bytes = _compiled(program, state, inputs.loader, topology)
    compile_s = time.perf_counter() - started
    run.log_event("compile", first_step, compile_time_s=compile_s, step_bytes_per_device=step_bytes)
    start_report(display, config=config, topology=topology, why=choice.why, program=program, data=inputs.data,
                 compile_s=compile_s, step_bytes=step_bytes, run_dir=run.path)
    tensorboard = TensorBoardWriter(run.path / "tensorboard", first_step=first_step + 1) if config.log.tensorboard and run.writer else None
    controller = None
    if config.control != "off" and here is not None:
        controller = make_controller(config, topology, here, program, train_step, step_bytes, probe=inputs.probe, run=run, display=display)
    with StopRequest() as stop:
        trainer = Trainer(
            program=program, train_step=train_step, topology=topology, loader=inputs.loader, eval_batches=inputs.eval_batches,
            bits_per_token=isinstance(inputs.data.tokenizer, ByteTokenizer), metadata={"data": inputs.data.identity},
            checkpoints=checkpoints, run=run, display=display, tensorboard=tensorboard, stop=stop, overseer=controller)
        try:
            with display, tensorboard or nullcontext():
                trainer, outcome = _trained(trainer, state, inputs, controller)
        except Exception:
            with suppress(OptimusError):  # the error on its way says more
                checkpoints.close()
            raise
        checkpoints.close()  # not for a KeyboardInterrupt: who insists does not wait for the save under way
        _say_goodbye(display, outcome, run)
        return outcome, trainer.program.plan


def _trained(trainer: Trainer, state: TrainState, inputs: _Inputs, controller: Controller | None) -> tuple[Trainer, Outcome]:
    """The run to its end, under one plan after the other; with the trainer of the last."""
    outcome = trainer.train(state)
    while outcome.reason == "switch" and controller is not None:
        state, executable = controller.carry_out(outcome.state, outcome.last_step)
        dealt = inputs.dealt_out(executable.program)
        trainer = replace(trainer, program=executable.program, train_step=executable.program.train_step, loader=dealt.loader, eval_batches=dealt.eval_batches)
        outcome = trainer.train(state)
    if controller is not None:
        controller.close(outcome.last_step)
    return trainer, outcome


def _write_down(config: Config, topology: Topology, choice: Choice, program: Program, inputs: _Inputs, run: RunDirectory,
                display: Display, first_step: int, resume: bool) -> None:
    """What is about to run; from here on it can be resumed."""
    if first_step > config.steps:
        raise ConfigError(explain(
            f"the run has come to step {first_step} already", given=f"--steps {config.steps}",
            do=f"leave --steps out, or give more than {first_step}"))
    if abandoned := run.go_back_to(first_step):
        display.message(f"metrics of {abandoned} step(s) after step {first_step} were moved to metrics.abandoned.jsonl: they are run again")
    run.write_config(config.to_json(derived=_derived(config, choice.plan, program)))
    if (died := Journal(run).recover(first_step)) is not None:
        display.message(f"the run ended while it tried {died.target.describe()}: it goes on under the plan from before")
    run.write_plan(choice.plan.to_json())
    run.log_event("resume" if resume else "start", first_step, devices=str(topology), data=inputs.data.description)
    run.log_event("plan", first_step, digest=choice.plan.digest, layout=choice.plan.describe(), why=choice.why)
    run.check()


def _derived(config: Config, plan: Plan, program: Program) -> dict[str, Any]:
    """What was left open in the config, by the names of the settings."""
    return {
        "data.seq_len": config.seq_len, "optimizer.lr": peak_learning_rate(config.optimizer, program.shapes.num_params),
        "optimizer.warmup_steps": config.warmup_steps, "parallel.mesh": str(plan.axes), "parallel.zero": plan.zero,
        "parallel.microbatches": plan.microbatches, "parallel.attention": plan.attention,
        "parallel.loss_chunk_tokens": plan.loss_chunk_tokens}


def _first_state(config: Config, program: Program, inputs: _Inputs, checkpoints: Checkpoints, resume: bool, display: Display) -> TrainState:
    """Fresh, or restored onto this plan's mesh whatever mesh saved it."""
    if resume and checkpoints.steps():
        if (latest := checkpoints.latest()) is not None:
            check_stored_model(latest.metadata, config.model)
        target = abstract_stored_state(program.shapes, program.optimizer, config.precision, program.plan, program.mesh)
        restored = checkpoints.restore(target, paddable=may_be_padded)
        display.message(f"resumed from the checkpoint of step {restored.step}")
        _check_same_data(restored.metadata.get("data"), inputs.data, config, display)
        state = from_stored(restored.state, program.shapes, program.plan, program.state_shardings)
        return _in_precision(config, json.loads(restored.metadata["plan"])["precision"], state, program, display)
    if resume:
        display.message("the run has no checkpoint yet: it starts again at step 1")
    return program.init(jnp.int32(config.seed))


def _check_same_data(before: dict[str, Any] | None, data: Data, config: Config, display: Display) -> None:
    """Raise DataError if the run that saved `before` had other data: its step k would then be another batch."""
    if before is None or before == data.identity:
        return
    changed = ", ".join(f"{name} was {before.get(name)} and is {data.identity.get(name)}"
                        for name in {**before, **data.identity} if before.get(name) != data.identity.get(name))
    if not config.data.allow_change:
        raise DataError(explain(
            "the data is not what this run was trained on", given=f"{data.train.name}: {changed}",
            do="bring back the data, or go on with the new: --set data.allow_change=true"))
    display.message(f"the data has changed, which data.allow_change allows: {changed}")


def _in_precision(config: Config, before: Precision, state: TrainState, program: Program, display: Display) -> TrainState:
    """`state`, with a loss scale that begins anew if f16 was left or entered: only f16 has one."""
    now = config.precision.compute
    if now == before or "f16" not in (now, before):
        return state
    display.message(f"precision was {before} and is {now}: the loss scale begins anew"
                    + (f" at {config.precision.loss_scale:g}" if now == "f16" else ", at 1"))
    fresh = jax.jit(lambda: initial_loss_scale(config.precision), out_shardings=program.state_shardings.loss_scale)
    return replace(state, loss_scale=fresh())


def _compiled(program: Program, state: TrainState, loader: BatchLoader, topology: Topology) -> tuple[Any, int]:
    """The training step, compiled for the arrays it will get, and the bytes per device that it needs.

    Raises:
      PlanError: the compiled program needs more memory than a device has.
    """
    rows = {name: jax.ShapeDtypeStruct((loader.global_batch, *array.shape[1:]), array.dtype, sharding=program.batch_sharding)
            for name, array in loader.batch(1).items()}
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
