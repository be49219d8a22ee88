"""The loop of a run, written by its user: `with optimus_jax.training_loop(...) as loop`.

The run is the same as with `train`: its directory, its steps and their order, its checkpoints, and
what stops it. What the loop does between steps is the caller's.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from optimus_jax.cluster.distributed import Agreement
from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.data.batch import HostBatch
from optimus_jax.errors import ConfigError, FaultError, PlanError, explain
from optimus_jax.faults.stopping import exit_code_after
from optimus_jax.plan import Plan
from optimus_jax.run_directory.step_record import EvalRecord
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Metrics
from optimus_jax.training.trainer import (
    AGREED,
    PendingStep,
    Reason,
    Trainer,
    TrainingResult,
)

ChangeMesh = Callable[
    [Trainer, TrainState, int, Mapping[str, Any]], tuple[Trainer, TrainState, str]
]
"""Moves the state after a step to another plan (run/mesh_changes.py)."""


class TrainingLoop:
    """The loop of a run. Every process of a run must call it alike.

    Iterating over it gives the batches of the steps that follow, up to the last one of the run, or
    to one after which the run is to stop (Ctrl-C, SIGTERM). Each must be learnt by `step` before
    the next one::

        for batch in loop:
            metrics = loop.step(batch)

    `step` also takes batches of another kind of loader, in which case `is_stopping` says whether to
    go on.
    """

    def __init__(self, trainer: Trainer, state: TrainState, change_mesh: ChangeMesh) -> None:
        self._trainer, self._state, self._change_mesh = trainer, state, change_mesh
        self._number = int(state.step)
        self._agree = None if trainer.is_alone else Agreement(trainer.program.mesh)
        self._pending: PendingStep | None = None
        self._reason: Reason = "done"
        self._last_loss = float("nan")
        self._is_over = False
        self._given: HostBatch | None = None
        """The batch that iterating has given and that is not learnt yet."""
        self._like: dict[str, str] | None = None
        """The arrays of a batch of the run; None: nobody has asked."""
        trainer.count_flops()
        trainer.stop.ended(self._number)
        trainer.progress.begin("caller")
        self._clock = time.perf_counter()

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self._trainer.program.config

    @property
    def plan(self) -> Plan:
        """The layout that it trains under."""
        return self._trainer.program.plan

    @property
    def run_dir(self) -> Path:
        """The directory of the run on this machine."""
        return self._trainer.run.path

    @property
    def state(self) -> TrainState:
        """The state after the last step, sharded over the mesh. `step` donates it: what is to stay
        must be copied."""
        return self._state

    @property
    def steps_done(self) -> int:
        """The newest step that was begun, in this start or an earlier one; 0: none."""
        return self._number

    @property
    def reason(self) -> Reason:
        """Why the run ends or has ended: `done`, or what stopped it. A loop that was left before
        its last step was interrupted."""
        return self._reason

    @property
    def exit_code(self) -> int:
        """Exit code for a program that is this run: 75 says that it is worth starting again."""
        return exit_code_after(self._reason)

    @property
    def is_stopping(self) -> bool:
        """Whether the run is to end: all its steps are done, or it was asked to stop."""
        if self._reason == "done" and self._trainer.trouble() is not None:
            self._reason = "not learning"
        is_last = self._number >= self.config.steps
        if self._agree is None and self._reason == "done" and not is_last:
            self._reason = self._trainer.requested_stop
        return self._reason != "done" or is_last

    def __iter__(self) -> Iterator[HostBatch]:
        """The batches of the steps that follow, as arrays on the host by name: this process's rows
        of what the run's task reads. Of a model of texts `tokens`, `targets`, `positions` and
        `segments`, int32 [B, L], `loss_mask`, bool [B, L], and `examples`, int32 [B], of B rows of
        L tokens (data/batch.py).

        Raises ConfigError, when the next batch is asked for, unless `step` has learnt the one
        before.
        """
        loader = self._trainer.loader
        batches = loader.iterate(self._number + 1)
        try:
            while not self.is_stopping:
                if loader is not self._trainer.loader:  # another mesh may read other rows
                    batches.close()
                    loader = self._trainer.loader
                    batches = loader.iterate(self._number + 1)
                number, batch = next(batches)
                if not self._trainer.stop.begins(number):
                    continue  # a stop was requested meanwhile
                self._given = batch
                yield batch
                if self._number != number:
                    raise ConfigError(
                        explain(
                            "the batches of a run belong to its steps, so that none is left out",
                            given=f"the batch of step {number}, and {self._number} steps are done",
                            do="call loop.step(batch) once for every batch of `for batch in loop`",
                        )
                    )
        finally:
            self._given = None  # the next iteration gives the batch again
            batches.close()

    def step(self, batch: Mapping[str, np.ndarray]) -> Metrics:
        """Learn from a batch. Returns before the devices are done: a number of the metrics waits
        for them, as `float(metrics["loss"])` does.

        Args:
          batch: this process's rows, with the names, dtypes and shapes of those that iterating
            gives.
        Returns:
          Scalars over the global batch, which all devices have: loss (float32, in the unit of
          `StepRecord.loss`), grad_norm (float32, before clipping), lr (float32, of this update),
          tokens (int32, what counts in the loss), skipped (bool: the loss or a gradient was not
          finite, so that nothing was learnt), loss_scale (float32; 1 unless f16), and metrics of
          the task and auxiliary sums (float32 means).
        Raises:
          ConfigError: the run has no more steps or is over, or the batch has other arrays.
        """
        self._check_open()
        trainer, upcoming = self._trainer, self._number + 1
        if self._number >= self.config.steps:
            raise ConfigError(
                explain(
                    "the run has no more steps",
                    given=f"steps={self.config.steps}",
                    do="give more steps, or leave the loop when loop.is_stopping",
                )
            )
        if trainer.profiler is not None and trainer.profiler.begins_after(self._number):
            self._read()
            trainer.begin_profile(self._number)
        self._check_batch(batch)
        self._given = None
        if self._pending is None:
            self._clock = time.perf_counter()  # the caller's time before is no step's
        trainer.stop.begins(upcoming)
        trainer.progress.begin("step")
        arrays = trainer.program.put_batch(dict(batch))
        trainer.progress.enter(upcoming)
        self._state, metrics = trainer.train_step(self._state, arrays)
        self._number = upcoming
        asked = AGREED.index(trainer.requested_stop), 0
        agreed = (0, 0) if self._agree is None else self._agree(*asked)
        before = self._pending
        self._pending = PendingStep(upcoming, metrics, agreed, None, data_wait_s=None)
        if before is not None:
            self._record(before)
        trainer.poll_saves()
        if trainer.retries.is_due:
            self._read()
            trainer.begin_save(self._state, self._number)
        if trainer.profiler is not None and trainer.profiler.ends_after(upcoming):
            self._read()
            trainer.end_profile(upcoming)
        trainer.progress.begin("caller")
        return metrics

    def remesh(self, mesh: str | AxisSizes | Mapping[str, int], **settings: Any) -> Plan:
        """Go on under another layout: the state moves from device to device and is verified, and
        no step is lost. The new plan is compiled first, and training waits for it; a plan that the
        run was under before is kept compiled (`controller.executables`).

        Every process calls it after the same step.

        Args:
          mesh: sizes of the axes, such as "fsdp=4,tensor=2", also as a dict or AxisSizes; auto:
            the planner chooses.
          settings: others of `parallel`, such as zero=1 or microbatches=4. Those of the layout that
            are not given are as at a start with this mesh.
        Returns:
          The plan that the run is under now: its own, if the run is to end (`is_stopping`).
        Raises:
          ConfigError: the run is over, a batch that was given is not learnt yet, or a setting is
            none of `parallel`.
          PlanError: there is no such plan, it does not fit into memory, or the state could not be
            moved. The run goes on under its plan.
          FaultError: the state was moved in part and is lost; its newest checkpoint is not.
        """
        self._check_open()
        if self._given is not None:
            raise ConfigError(
                explain(
                    "a batch was given under the present mesh, and is not learnt yet",
                    given=f"remesh({mesh!r}) before the step {self._number + 1}",
                    do="call loop.step(batch) first",
                )
            )
        self._read()
        if self.is_stopping:
            return self.plan
        self._trainer.end_profile(self._number)
        try:
            trainer, self._state, why_not = self._change_mesh(
                self._trainer, self._state, self._number, {"mesh": mesh, **settings}
            )
        except FaultError:
            self._is_over = True
            raise
        if why_not:
            raise PlanError(
                explain(
                    "the state could not be moved to another mesh, and the run keeps its own",
                    given=f"{mesh}: {why_not}",
                    do="stay, or start with --resume under that mesh",
                )
            )
        self._trainer, self._like = trainer, None
        if self._agree is not None:
            self._agree = Agreement(trainer.program.mesh)
        trainer.count_flops()
        return self.plan

    def evaluate(self) -> EvalRecord | None:
        """Measure what the run holds out; None: it cannot be measured, and a message says why.

        Raises ConfigError if the run holds nothing out, or is over.
        """
        self._check_open()
        if self._trainer.held_out is None:
            every, share = self.config.eval_every, self.config.data.eval_fraction
            is_asked = every and share
            raise ConfigError(
                explain(
                    "the run holds nothing out",
                    given="data of which nothing can be held out, such as an iterator"
                    if is_asked
                    else f"eval_every={every}, data.eval_fraction={share}",
                    do="give eval_data"
                    if is_asked
                    else "give both a value above 0, or leave them out",
                )
            )
        self._read()
        return self._trainer.evaluate(self._state, self._number)

    def save(self) -> None:
        """Write a checkpoint of the state, in the background; the end of the loop does it too.

        Raises ConfigError if the run is over.
        """
        self._check_open()
        self._read()
        if not self._trainer.checkpoints.holds(self._number):
            self._trainer.begin_save(self._state, self._number)

    def close(self) -> None:
        """Wait for the newest step; no other can follow. Like the methods below, called at the end
        of the block of `training_loop`.
        """
        self._is_over = True
        self._read()
        self._trainer.end_profile(self._number)

    def end(self) -> TrainingResult:
        """After `close`, save the state, log the end of the run, and raise its error if there is
        one."""
        if not self.is_stopping:
            self._reason = "interrupt"  # the loop was left
        return self._trainer.ended(
            TrainingResult(
                state=self._state,
                reason=self._reason,
                last_step=self._number,
                last_loss=self._last_loss,
            )
        )

    def abandon(self, error: Exception) -> None:
        """After an error, save the state as well as that is possible."""
        self._is_over = True
        if self._trainer.is_alone:  # of several processes, another one may never end the step
            with suppress(Exception):
                self._read()
        self._trainer.save_after_error(self._state, self._number, error)

    def stop_tracing(self) -> None:
        """End a trace that is still under way, without a result."""
        if self._trainer.profiler is not None:
            self._trainer.profiler.abandon()

    def _check_batch(self, batch: Mapping[str, np.ndarray]) -> None:
        """Raise ConfigError if a batch of another loader is not like one of the run's own."""
        if batch is self._given:
            return
        if self._like is None:
            self._like = _described(self._trainer.loader.batch(self._number + 1))
        like, found = self._like, _described(batch)
        if wrong := [name for name in like | found if found.get(name) != like.get(name)]:
            raise ConfigError(
                explain(
                    "a batch has other arrays than those of the run",
                    given="; ".join(f"{name}: {found.get(name, 'missing')}" for name in wrong),
                    do="give "
                    + "; ".join(f"{name}: {like.get(name, 'leave it out')}" for name in wrong),
                )
            )

    def _check_open(self) -> None:
        if self._is_over:
            raise ConfigError(
                explain(
                    "the run is over, and another process may write its directory",
                    given=f"a loop that has ended after step {self._number}",
                    do="train in the `with` block; training_loop(run_dir=..., resume=True) goes on",
                )
            )

    def _read(self) -> None:
        """Wait for the newest step, and record it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._record(pending)

    def _record(self, item: PendingStep) -> None:
        self._last_loss, self._clock, asked = self._trainer.record(item, self._clock)
        if self._reason == "done":
            self._reason = AGREED[asked]


def _described(batch: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The dtype and shape of each array."""
    return {name: f"{array.dtype} {list(array.shape)}" for name, array in batch.items()}
