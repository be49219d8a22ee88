"""The state that a run starts from: its newest valid checkpoint or snapshot, or an initial one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from optimus_jax.checkpoint.checkpoints import ABANDONED_DIR, Checkpoints
from optimus_jax.checkpoint.reading import Restored
from optimus_jax.checkpoint.snapshots import Snapshots
from optimus_jax.cluster.distributed import broadcast_from_0, is_writer
from optimus_jax.config import Config, Precision
from optimus_jax.faults.divergence import LearningHealth, describe_trouble, rollback_advice
from optimus_jax.run.initial_weights import initial_weights
from optimus_jax.run.inputs import Inputs
from optimus_jax.run.stored_config import check_stored_config, saved_config
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import check_same_data, identity_in_run, weights_in_run
from optimus_jax.training.state import (
    TrainState,
    abstract_stored_state,
    from_stored,
    initial_loss_scale,
)
from optimus_jax.training.step import Program
from optimus_jax.training.watchers import Display


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstState:
    """The state of a run before its first step, and where it came from."""

    state: TrainState
    learning: LearningHealth
    """Record of how the run has learned."""
    saved: Config | None = None
    """The config in the checkpoint, because config.json may have been edited since; None for an
    initial state."""
    weights: str | None = None
    """Where the parameters of an initial state came from; None: restored from a checkpoint."""


def first_state(
    program: Program,
    inputs: Inputs,
    checkpoints: Checkpoints,
    run: RunDirectory,
    resume: bool,
    display: Display,
) -> FirstState:
    """The state before the first step: restored if the run has a checkpoint, otherwise initial.

    It is restored onto this plan's mesh, whatever mesh saved it.

    Raises:
      OptimusError: there is no checkpoint of the requested step, or none is valid; or the initial
        parameters cannot be read.
    """
    config = inputs.config
    if (
        resume
        and (restored := _restore_newest(program, config, checkpoints, run, display)) is not None
    ):
        learning = LearningHealth.from_json(restored.metadata.get("learning"))
        _warn_if_not_learning(learning, restored.step, checkpoints, display)
        check_same_data(restored.metadata.get("data"), inputs.data, config.data, display.message)
        inputs.go_on(restored.metadata)
        state = from_stored(restored.state, program.shapes, program.plan, program.state_shardings)
        return FirstState(
            state=_with_loss_scale(
                config, json.loads(restored.metadata["plan"])["precision"], state, program, display
            ),
            learning=learning,
            saved=saved_config(restored.metadata),
        )
    used_before = None
    if resume:
        begun_with, used_before = json.loads(
            broadcast_from_0(json.dumps([identity_in_run(run), weights_in_run(run)]))
        )
        check_same_data(begun_with, inputs.data, config.data, display.message)
        display.message("the run has no checkpoint yet: it starts over at step 1")
    source = initial_weights(config, inputs.data.identity, used_before)
    state, weights = source.initial_state(program, display.message)
    return FirstState(state=state, learning=LearningHealth(), weights=weights)


def _restore_newest(
    program: Program, config: Config, checkpoints: Checkpoints, run: RunDirectory, display: Display
) -> Restored | None:
    """The newest valid checkpoint or snapshot, as stored; None if there is none.

    Damaged checkpoints are moved aside.
    """
    target = _stored_target(program)
    check = partial(check_stored_config, config=config)
    if config.checkpoint.resume_step is not None:
        return _restore_step(program, config.checkpoint.resume_step, check, checkpoints, display)
    latest = checkpoints.latest()

    def from_memory(newer_than: int) -> Restored | None:
        found = make_snapshots(config, run, display).restore(
            target, newer_than, paddable=program.shapes.may_be_padded, check=check
        )
        if found is not None:
            display.message(f"resumed from the in-memory snapshot of step {found.step}")
        return found

    if (
        found := from_memory(latest.step if latest is not None else 0)
    ) is not None or not checkpoints.steps_for_all():
        return found
    restored = checkpoints.restore(target, paddable=program.shapes.may_be_padded, check=check)
    if restored.damaged:
        if is_writer():
            for path in checkpoints.set_aside(restored.damaged):
                display.message(f"the damaged checkpoint was moved to {path}")
        if (found := from_memory(restored.step)) is not None:
            return found
    display.message(f"resumed from the checkpoint of step {restored.step}")
    return restored


def _stored_target(program: Program) -> TrainState:
    """What to restore: the state as checkpoints store it."""
    return abstract_stored_state(
        program.shapes, program.optimizer, program.config.precision, program.plan, program.mesh
    )


def _restore_step(
    program: Program,
    step: int,
    check: Callable[[Mapping[str, Any]], None],
    checkpoints: Checkpoints,
    display: Display,
) -> Restored:
    """The state of the requested checkpoint.

    After it is restored, later checkpoints are moved aside: the run no longer continues from them.
    """
    restored = checkpoints.restore(
        _stored_target(program), step, paddable=program.shapes.may_be_padded, check=check
    )
    if is_writer():
        for path in checkpoints.set_aside(
            [later for later in checkpoints.steps() if later > step], ABANDONED_DIR
        ):
            display.message(f"a later checkpoint was moved to {path}")
    display.message(f"resumed from the checkpoint of step {step}, as requested")
    return restored


def _warn_if_not_learning(
    learning: LearningHealth, step: int, checkpoints: Checkpoints, display: Display
) -> None:
    """Warn if the run had stopped learning before its checkpoint of `step` was written."""
    trouble = learning.trouble(1, is_at_end=True)
    if trouble is None:
        return
    display.message(
        f"the run had stopped learning before its checkpoint of step {step} was written:"
        f" {describe_trouble(learning, trouble)}; {rollback_advice(learning, checkpoints.steps())}"
    )


def make_snapshots(config: Config, run: RunDirectory, display: Display) -> Snapshots:
    """The in-memory snapshots of a run whose directory exists. Every process must call this."""
    begun = [
        (event["time_s"], event["step"])
        for event in run.events()
        if event["event"] in ("start", "resume")
    ]
    # a file server may show other hosts a version that is a minute old
    begun = json.loads(broadcast_from_0(json.dumps(begun)))
    started = str(begun[0][0] if begun else None)
    return Snapshots(
        config.checkpoint.snapshot_dir,
        run.path,
        started,
        config.checkpoint.snapshot_every,
        [step for _, step in begun],
        warn=display.message,
        warn_here=display.process_message,
    )


def _with_loss_scale(
    config: Config, before: Precision, state: TrainState, program: Program, display: Display
) -> TrainState:
    """`state`, with a new loss scale if the precision changed to or from f16, which alone has
    one."""
    now = program.plan.precision
    if now == before:
        return state
    if "f16" not in (now, before):
        display.message(f"precision changed from {before} to {now}")
        return state
    display.message(
        f"precision changed from {before} to {now}: the loss scale restarts at"
        f" {f'{config.precision.loss_scale:g}' if now == 'f16' else '1'}"
    )
    fresh = jax.jit(
        lambda: initial_loss_scale(config.precision, program.plan),
        out_shardings=program.state_shardings.loss_scale,
    )
    return replace(state, loss_scale=fresh())
