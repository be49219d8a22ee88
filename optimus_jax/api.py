"""`train`: the whole main job, from names and overrides to a trained state.

Order: config, devices, plan, data, program, state (fresh or restored), compile, loop. Whatever a
user can get wrong is found before anything expensive begins.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from optimus_jax.checkpoint import Checkpoints
from optimus_jax.config import Config
from optimus_jax.data.dataset import load_data
from optimus_jax.data.loader import BatchLoader, eval_batches
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import ConfigError, PlanError, explain
from optimus_jax.mesh.build import build_mesh, discover
from optimus_jax.mesh.cpu import return_freed_memory, use_cpu_devices
from optimus_jax.mesh.distributed import connect, is_writer
from optimus_jax.mesh.sharding import local_rows
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.shapes import planned_shapes
from optimus_jax.plan import Plan
from optimus_jax.planning.search import Choice, choose_plan, gib
from optimus_jax.request import make_config, resumed_config
from optimus_jax.training.display import Display, make_display
from optimus_jax.training.report import start_report
from optimus_jax.training.run_directory import RunDirectory, StepRecord
from optimus_jax.training.state import TrainState, abstract_stored_state, check_stored_model, from_stored, may_be_padded
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.stopping import EXIT_RESTART, StopRequest
from optimus_jax.training.tensorboard import TensorBoardWriter
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


def train(model: str | None = None, *, run_dir: str | Path | None = None, resume: bool = False, **overrides: Any) -> RunResult:
    """Train a model, or go on training one.

    Args:
      model: name of a preset; needed unless resuming.
      run_dir: where the run is kept; None: a new directory under `runs/`.
      resume: go on with the run in `run_dir` from its newest good checkpoint.
      overrides: settings by short name (`mesh="data=2,fsdp=4"`, `lr=1e-3`) or, in a dict, by dotted
        name (`**{"optimizer.beta2": 0.99}`).
    Raises:
      OptimusError: something that the user can mend; its text says how.
    """
    with StopRequest() as stop:
        config = _config_of(model, run_dir, resume, overrides)
        if config.cpu_devices is not None:
            use_cpu_devices(config.cpu_devices)
        connect(config.distributed)
        topology = discover()
        choice = choose_plan(config, topology)
        run = _open(run_dir, config, resume)
        display = make_display(config.log, config.steps, show=is_writer())
        outcome = _run(config, topology, choice, run, display, stop, resume)
        return RunResult(final_loss=outcome.last_loss, reason=outcome.reason, state=outcome.state, plan=choice.plan,
                         history=run.metrics(), run_dir=run.path)


def _config_of(model: str | None, run_dir: str | Path | None, resume: bool, overrides: dict[str, Any]) -> Config:
    """What is to be run; touches no device and writes nothing."""
    if resume:
        if run_dir is None:
            raise ConfigError(explain("there is no telling which run to resume", given="--resume without a directory",
                                      do="give --run-dir DIR --resume"))
        return resumed_config(RunDirectory.resume(run_dir, writer=False).config_text(), model, overrides)
    if model is None:
        raise ConfigError(explain("no model was named", given="neither --model nor --resume", do="give --model NAME, such as gpt2-nano"))
    config = make_config(model, overrides)
    if run_dir is not None:
        RunDirectory(run_dir).check_free()
    elif config.distributed.num_processes is not None:
        raise ConfigError(explain("processes must agree on the run directory", given="no --run-dir",
                                  do="give the same --run-dir to every process"))
    return config


def _open(run_dir: str | Path | None, config: Config, resume: bool) -> RunDirectory:
    """The run's directory: that of a run which goes on, or a new one, which process 0 makes."""
    if resume:
        assert run_dir is not None
        return RunDirectory.resume(run_dir, writer=is_writer())
    if is_writer():
        return RunDirectory.create(run_dir, config.model.name)
    assert run_dir is not None
    return RunDirectory(run_dir, writer=False)


def _run(config: Config, topology: Topology, choice: Choice, run: RunDirectory, display: Display, stop: StopRequest,
         resume: bool) -> Outcome:
    """Data, program, state, compile, loop."""
    plan, model = choice.plan, config.model
    data = load_data(config.data, seq_len=config.seq_len, vocab_size=model.vocab_size, model_name=model.name)
    shapes = planned_shapes(model, plan)
    program = build_program(config, shapes, plan, build_mesh(plan))
    rows = local_rows(program.batch_sharding, config.data.global_batch)
    cut = {"seq_len": config.seq_len, "global_batch": config.data.global_batch, "rows": rows,
           "respect_documents": config.data.respect_documents}
    loader = BatchLoader(data.train, seed=config.seed, **cut)
    held_out = data.held_out if config.eval_every else None
    if held_out is not None:
        eval_batches(held_out, num_batches=1, **cut)  # too short a held-out text is found now, not after hours
    checkpoints = Checkpoints(run.checkpoints, config.checkpoint, warn=display.message)
    state = _first_state(config, program, checkpoints, resume, display)
    run.write_config(config.to_json())
    run.write_plan(plan.to_json())
    first_step = int(state.step)
    run.log_event("resume" if resume else "start", first_step, devices=str(topology), data=data.description)
    run.log_event("plan", first_step, digest=plan.digest, why=choice.why)
    started = time.perf_counter()
    train_step, step_bytes = _compiled(program, state, loader, topology)
    compile_s = time.perf_counter() - started
    run.log_event("compile", first_step, compile_time_s=compile_s, step_bytes_per_device=step_bytes)
    start_report(display, config=config, topology=topology, why=choice.why, program=program, data=data,
                 compile_s=compile_s, step_bytes=step_bytes, run_dir=run.path)
    tensorboard = TensorBoardWriter(run.path / "tensorboard", first_step=first_step + 1) if config.log.tensorboard and run.writer else None
    trainer = Trainer(
        program=program, train_step=train_step, topology=topology, loader=loader,
        eval_batches=None if held_out is None else
            lambda: eval_batches(held_out, num_batches=config.eval_batches, **cut),
        bits_per_token=isinstance(data.tokenizer, ByteTokenizer), checkpoints=checkpoints, run=run, display=display,
        tensorboard=tensorboard, stop=stop)
    try:
        with display, tensorboard or nullcontext():
            outcome = trainer.train(state)
    finally:
        checkpoints.close()
    _say_goodbye(display, outcome, run)
    return outcome


def _first_state(config: Config, program: Program, checkpoints: Checkpoints, resume: bool, display: Display) -> TrainState:
    """Fresh, or restored onto this plan's mesh whatever mesh saved it."""
    if resume and checkpoints.steps():
        if (latest := checkpoints.latest()) is not None:
            check_stored_model(latest.metadata, config.model)
        target = abstract_stored_state(program.shapes, program.optimizer, config.precision, program.plan, program.mesh)
        restored = checkpoints.restore(target, paddable=may_be_padded)
        display.message(f"resumed from the checkpoint of step {restored.step}")
        return from_stored(restored.state, program.shapes, program.plan, program.state_shardings)
    if resume:
        display.message("the run has no checkpoint yet: it starts again at step 1")
    return program.init(jnp.int32(config.seed))


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
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    if topology.bytes_per_device is not None and needed > topology.bytes_per_device:
        raise PlanError(explain(
            f"the compiled step needs {gib(needed)} per device, {gib(topology.bytes_per_device)} are there",
            given=program.plan.describe(), do="use more --microbatches, --remat full, or more devices along fsdp"))
    return compiled, needed


def _say_goodbye(display: Display, outcome: Outcome, run: RunDirectory) -> None:
    if outcome.reason == "done":
        display.message(f"done: {outcome.last_step} steps, in {run.path}")
    else:
        display.message(f"stopped after step {outcome.last_step} and saved; go on with: "
                        f"python scripts/train.py --run-dir {run.path} --resume")
