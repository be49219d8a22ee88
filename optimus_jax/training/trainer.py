"""The training loop: runs steps under one Plan, records them, and returns at a step boundary.

The metrics of a step are read after the next step is dispatched, so that the devices never wait for
the host. If steps are slow (SLOW_STEP_S), a single process reads the metrics before it dispatches
the next step, so that a requested stop takes effect after the current step and not one later.

The order at a step boundary is: metrics, end of a profile, save, evaluation, snapshot, probe. The
save starts before everything else that can fail, so that the state is safe if a later part fails
(in a single process, if anything fails). A profile isolates its errors.
"""

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from optimus_jax.checkpoint.checkpoints import Checkpoints, NotFiniteError
from optimus_jax.checkpoint.saving import Retries, Saving
from optimus_jax.checkpoint.snapshots import Snapshots
from optimus_jax.cluster.distributed import Agreement
from optimus_jax.config import Config
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.data.loader import BatchLoader
from optimus_jax.errors import OptimusError, RunDirectoryError, explain
from optimus_jax.faults.divergence import (
    WINDOW_STEPS,
    LearningHealth,
    Trouble,
    describe_trouble,
    learning_error,
    newest,
    rollback_advice,
)
from optimus_jax.faults.progress import Progress
from optimus_jax.faults.stopping import StopRequest
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.flops import step_flops
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
from optimus_jax.training.evaluation import HeldOut, held_out_sums
from optimus_jax.training.numbers import perplexity_of
from optimus_jax.training.optimizer import peak_learning_rate, usual_learning_rate
from optimus_jax.training.state import TrainState, to_stored
from optimus_jax.training.step import STEP_METRICS, Metrics, Program
from optimus_jax.training.tasks import task_of
from optimus_jax.training.watchers import ControllerHooks, Display, ProfilerHooks, StepWatcher

Reason = Literal["done", "interrupt", "terminate", "fault", "switch", "phase", "not learning"]
AGREED: tuple[Reason, ...] = ("done", "interrupt", "terminate", "fault")
"""Reasons on which processes agree by their index here; the largest index wins. The other reasons
need no agreement: `switch` was agreed on before, and all processes derive `phase` and `not
learning` from the same values."""
SLOW_STEP_S = 2.0
"""Step time, in seconds, from which a step is dispatched only after the previous one has ended:
this costs less than 0.1% of such a step."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The state and the reason with which `Trainer.train` returned."""

    state: TrainState
    reason: Reason
    last_step: int
    last_loss: float
    """Loss of the last step; NaN if no step was run."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains one run under one Plan."""

    program: Program
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    """`program.train_step`, compiled."""
    topology: Topology
    loader: BatchLoader
    held_out: HeldOut | None
    """Data of evaluations; None: no evaluations."""
    bits_per_token: bool
    """Whether a token is a byte, so that loss / ln 2 is bits per byte."""
    metadata: Mapping[str, Any]
    """Metadata of checkpoints besides plan and step. Its entry `config`, the run's JSON, must have
    the model."""
    checkpoints: Checkpoints
    run: RunDirectory
    display: Display
    stop: StopRequest
    position_after: Callable[[int], Mapping[str, Any]] = lambda step: {}
    """Metadata of the checkpoint after a step that says where the data is, if it has a state."""
    overseer: ControllerHooks | None = None
    """Receives measurements of the loop, and may request a switch; None: there is no controller."""
    profiler: ProfilerHooks | None = None
    """Traces some steps; None: none. Its errors are its own."""
    last_step: int | None = None
    """Last step of the current phase; None: the phase lasts until the run ends."""
    progress: Progress = field(default_factory=Progress)
    """Current activity of this process, for the watchdog."""
    snapshots: Snapshots | None = None
    """Snapshots in host memory; None: off."""
    learning: LearningHealth = field(default_factory=LearningHealth)
    """The learning health of the run: whether it still learns."""
    retries: Retries = field(default_factory=lambda: Retries(warnings.warn, is_alone=False))
    """Retries of failed saves."""
    _last: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=1))
    """The record of the last step."""

    def train(self, state: TrainState) -> TrainingResult:
        """Train from the step after `state.step` to the config's last step or until a stop is
        requested, and then save; or return without a save when another phase begins or the
        controller requests another plan.

        Raises:
          RunDirectoryError: a log still could not be written at the end, or the run directory has
            failed. The state was saved first.
          CheckpointError: a checkpoint cannot be written, after all retries.
          LearningError: the run no longer learns. Earlier checkpoints are kept.
        """
        config, step, last_loss = self._config, int(state.step), math.nan
        self.count_flops()
        agree = None if self.is_alone else Agreement(self.program.mesh)
        reason: Reason = "done"
        pending: PendingStep | None = None
        is_slow = True  # until a step was timed
        clock = time.perf_counter()
        self.progress.begin("step")
        self.stop.ended(step)
        batches = self.loader.iterate(step + 1)
        try:
            while step < config.steps and reason == "done":
                asked_at = time.perf_counter()
                upcoming, host_batch = next(batches)
                waited_s, before_s = time.perf_counter() - asked_at, 0.0
                if pending is not None and pending.finished_at is None:
                    # Devices that still work have not waited. If they have ended, the wait is in
                    # the time of the step that they have done.
                    waited_s = waited_s if _is_ready(pending.metrics["loss"]) else 0.0
                    before_s, pending = waited_s, replace(pending, data_wait_s=waited_s)
                batch = self.program.put_batch(host_batch)
                if agree is None:
                    if is_slow and pending is not None:
                        before = clock
                        last_loss, clock, _ = self.record(pending, clock)
                        pending, is_slow = None, clock - before >= SLOW_STEP_S
                    if (reason := self._stop_before(upcoming)) != "done":
                        break
                else:
                    self.stop.begins(upcoming)
                if self.profiler is not None and self.profiler.begins_after(step):
                    self.begin_profile(step)  # nothing is pending: the devices are idle
                    clock, waited_s, before_s = time.perf_counter(), 0.0, 0.0
                has_ended = pending is not None and _is_ready(pending.metrics["loss"])
                called_at = time.perf_counter()
                self.progress.enter(upcoming)
                state, metrics = self.train_step(state, batch)
                step = upcoming
                if self.overseer is not None:
                    self.overseer.dispatched(
                        dispatch_s=time.perf_counter() - called_at, batch=host_batch
                    )
                evaluates = self.held_out is not None and (
                    _due(step, config.eval_every) or step == config.steps
                )
                saves = (
                    _due(step, config.checkpoint.every)
                    or step == config.steps
                    or self.retries.is_due
                )
                snapshot_due = (
                    self.snapshots is not None
                    and self.snapshots.is_due(step)
                    and step < config.steps
                )
                # A single process can stop at once. Several processes stop a step later, when all
                # have read the agreed reason.
                pauses_for = None if self.overseer is None else self.overseer.pauses_for(step)
                profiles = self.profiler is not None and (
                    self.profiler.begins_after(step) or self.profiler.ends_after(step)
                )
                reads_now = evaluates or saves or snapshot_due or pauses_for is not None or profiles
                agreed = (
                    (0, 0)
                    if agree is None
                    else agree(AGREED.index(self.requested_stop), round(1000 * waited_s))
                )
                # On a CPU, dispatching waits for earlier collectives, so the step may have ended
                # by now.
                finished_at = time.perf_counter() if _is_ready(metrics["loss"]) else None
                if pending is not None and pending.finished_at is None:
                    pending = replace(
                        pending,
                        finished_at=(
                            called_at
                            if has_ended
                            else _estimated_end(max(clock, called_at), finished_at)
                        ),
                    )
                waiting = [
                    pending,
                    PendingStep(
                        step,
                        metrics,
                        agreed,
                        finished_at,
                        data_wait_s=waited_s - before_s,
                        before_s=before_s,
                    ),
                ]
                pending = None if reads_now else waiting.pop()
                for item in filter(None, waiting):
                    before = clock
                    last_loss, clock, asked = self.record(item, clock)
                    is_slow = clock - before >= SLOW_STEP_S
                    reason = AGREED[max(AGREED.index(reason), asked)]
                if self.profiler is not None and self.profiler.ends_after(step):
                    self.end_profile(step)
                self.poll_saves()
                if self.trouble() is not None:
                    reason = "not learning"
                if saves and reason == "done":
                    self.begin_save(state, step)
                if evaluates and reason == "done":
                    self.evaluate(state, step)
                if self.trouble() is not None:
                    reason = "not learning"
                if snapshot_due and reason == "done" and self.snapshots is not None:
                    with self.progress.during("snapshot"):
                        self.snapshots.take(step, self._stored(state), self._described(step))
                if pauses_for is not None and self.overseer is not None:
                    with self.progress.during(pauses_for):
                        self.overseer.pause(step)
                if agree is None and self.requested_stop != "done":
                    pass  # do not switch: the run ends before the next step
                elif (
                    reason == "done"
                    and step < config.steps
                    and self.overseer is not None
                    and self.overseer.leaves(step)
                ):
                    reason = "switch"
                elif reason == "done" and step < config.steps and step == self.last_step:
                    reason = "phase"
                if reads_now:
                    clock = time.perf_counter()
            if pending is not None:
                last_loss, clock, _ = self.record(pending, clock)
            self.end_profile(step)
        except Exception as error:
            self.save_after_error(state, step, error)
            raise
        finally:
            if self.profiler is not None:
                self.profiler.abandon()
            batches.close()
        # if a log could not be written, the first step under the next plan reports it
        if reason in ("switch", "phase"):
            return TrainingResult(state=state, reason=reason, last_step=step, last_loss=last_loss)
        return self.ended(
            TrainingResult(state=state, reason=reason, last_step=step, last_loss=last_loss)
        )

    def ended(self, outcome: TrainingResult) -> TrainingResult:
        """Save the state if needed, log the end of the run, and raise its error if there is one."""
        state, reason, step = outcome.state, outcome.reason, outcome.last_step
        if reason != "not learning":
            try:
                self._saving.finish(
                    lambda: self.save(state, step),
                    step,
                    is_stopping=lambda: self.stop.reason is not None,
                )
            except NotFiniteError as error:
                self.learning.broken = error.leaf
        elif not self._saving.wait_succeeded():
            self._say("a save that was under way has failed; older checkpoints are whole")
        if (trouble := self.trouble(is_at_end=reason == "done")) is not None:
            steps = self.checkpoints.steps()
            good, last = (
                newest(steps, self.learning.good_limit),
                self._last[-1] if self._last else None,
            )
            optimizer, num_params = self._config.optimizer, self.program.shapes.num_params
            error = learning_error(
                self.learning,
                trouble,
                self._config,
                steps,
                step=step,
                last=last,
                lr=peak_learning_rate(optimizer, num_params),
                usual_lr=usual_learning_rate(optimizer, num_params),
            )
            self.run.log_event(
                "fault", step, what=describe_trouble(self.learning, trouble), back_to=good
            )
            self.run.log_event(
                "end",
                step,
                reason="not learning",
                why=describe_trouble(self.learning, trouble),
                back_to=good,
            )
            raise error
        self.run.log_event("end", step, reason="fault" if self.run.failure else reason)
        if self.run.failure:
            self._say(f"stopped after step {step}, whose state is saved")
        self.run.check()
        if reason == "fault":
            raise RunDirectoryError(
                explain(
                    "another process of this run cannot write its run directory",
                    given=f"stopped and saved at step {step}",
                    do="see what process 0 has printed",
                )
            )
        return outcome

    @property
    def is_alone(self) -> bool:
        return self.topology.num_processes == 1

    @property
    def requested_stop(self) -> Reason:
        """Why this process requests the end of the run; `done`: it does not."""
        return "fault" if self.run.failure else self.stop.reason or "done"

    def _stop_before(self, upcoming: int) -> Reason:
        """Why a run of one process should end before step `upcoming`; `done`: it should not, and
        the step is registered as begun.
        """
        if self.trouble() is not None:
            return "not learning"
        return (
            self.requested_stop
            if self.requested_stop != "done" or not self.stop.begins(upcoming)
            else "done"
        )

    def trouble(self, *, is_at_end: bool = False) -> Trouble | None:
        """Why the run no longer learns; None: it does, or the plan is on trial and would be rolled
        back.
        """
        if self.overseer is not None and self.overseer.is_on_trial and not is_at_end:
            return None
        return self.learning.trouble(self._config.optimizer.max_skipped_steps, is_at_end=is_at_end)

    def under(self, program: Program) -> "Trainer":
        """The same run under another, compiled program; the caller sets its batches."""
        return replace(self, program=program, train_step=program.train_step)

    @property
    def watchers(self) -> Sequence[StepWatcher]:
        """What steers or watches over the run, and receives every step and evaluation; what only
        shows it listens to the run directory."""
        return (self.progress,) if self.overseer is None else (self.progress, self.overseer)

    @property
    def _config(self) -> Config:
        return self.program.config

    def record(self, item: "PendingStep", clock: float) -> tuple[float, float, int]:
        """Record a step; returns its loss, the time at which it finished, and the index into AGREED
        of what processes have asked for.
        """
        metrics, (asked, longest_ms) = jax.device_get((item.metrics, item.agreed))
        now = time.perf_counter() if item.finished_at is None else item.finished_at
        seconds = now - clock
        tokens = int(metrics["tokens"])
        config = self._config
        # What does not count for the loss is computed as well.
        computed = config.data.global_batch * config.seq_len
        is_counted = task_of(config).term == "token"
        record = StepRecord(
            step=item.step,
            loss=float(metrics["loss"]),
            grad_norm=float(metrics["grad_norm"]),
            lr=float(metrics["lr"]),
            tokens=tokens,
            step_time_s=seconds,
            tokens_per_s=(tokens if is_counted else computed) / seconds,
            mfu=self._mfu(seconds),
            plan=self.program.plan.digest,
            peak_bytes=_peak_bytes(self.program.mesh),
            skipped=bool(metrics["skipped"]),
            loss_scale=(
                float(metrics["loss_scale"]) if self.program.plan.precision == "f16" else None
            ),
            metrics={
                name: float(value) for name, value in metrics.items() if name not in STEP_METRICS
            },
            data_wait_s=(
                None
                if item.data_wait_s is None
                else max(item.data_wait_s, int(longest_ms) / 1000 - item.before_s)
            ),
        )
        self.stop.ended(item.step)
        self.run.log_step(record)
        self._last.append(record)
        for watcher in self.watchers:
            watcher.step(record)
        if record.skipped:
            self._say(f"step {item.step}: loss or gradient was not finite; the update was left out")
        self.learning.step(record)
        if self.learning.rises(item.step, self._config.optimizer.loss_rise):
            self._warn_loss_rise(item.step)
        return record.loss, now, int(asked)

    def count_flops(self) -> None:
        """Count the model's FLOPs now, and not while a step is timed."""
        self._mfu(1.0)

    def _mfu(self, seconds: float) -> float | None:
        """Model FLOPs of a step of that many seconds over the devices' peak; None if it is
        unknown.
        """
        peak = self.topology.dense_peak_flops(self.program.plan.precision)
        if not peak:
            return None
        flops = step_flops(
            self._config.model,
            num_sequences=self._config.data.global_batch,
            seq_len=self._config.seq_len,
            num_references=task_of(self._config).num_references,
        )
        return flops / seconds / peak / self.program.plan.num_devices

    def _warn_loss_rise(self, step: int) -> None:
        since, best, steps = self.learning.above_since, self.learning.best, self.checkpoints.steps()
        what = f"the loss has been far above its lowest since step {since}"
        is_own = self._config.optimizer.name == IN_PYTHON
        rate = "learning rate of its optimizer" if is_own else "--lr"
        self._say(
            f"step {step}: {what} (lowest median of {WINDOW_STEPS} steps {best:.4f}, now"
            f" {statistics.median(self.learning.recent):.4f}): the run may be diverging. It goes"
            f" on; to undo that, {rollback_advice(self.learning, steps)}, with a lower {rate}"
        )
        self.run.log_event(
            "fault",
            step,
            what=what,
            lowest_loss=best,
            since=since,
            back_to=newest(steps, self.learning.good_limit),
        )

    def evaluate(self, state: TrainState, step: int) -> EvalRecord | None:
        """Measure the held-out loss; None: it is not known.

        A failure does not end the run, unless it occurs in only one of several processes; the state
        is saved first.
        """
        assert self.held_out is not None
        try:
            with self.progress.during("evaluation"):
                found = held_out_sums(
                    self.program,
                    state,
                    self.held_out,
                    stops=lambda: self.is_alone and self.requested_stop != "done",
                )
        except Exception as error:
            if not (
                self.is_alone or (isinstance(error, OptimusError) and error.raised_by_all_processes)
            ):
                raise
            self.save_after_error(state, step, error)
            self._say(
                f"step {step}: the evaluation has failed, so the held-out loss is unknown; the run"
                f" goes on. {type(error).__name__}: {error}"
            )
            self.run.log_event(
                "fault", step, what=f"the evaluation has failed: {type(error).__name__}: {error}"
            )
            return None
        if found is None:
            self._say(f"step {step}: the evaluation was cancelled because the run is stopping")
            return None
        if not found.tokens:
            self._say(
                f"step {step}: the held-out loss is unknown, because no token of the held-out"
                " text counts"
            )
            self.run.log_event(
                "eval", step, loss=None, perplexity=None, bits_per_byte=None, tokens=0
            )
            return None
        loss = found.mean_loss
        record = EvalRecord(
            step=step,
            loss=loss,
            perplexity=perplexity_of(loss) if task_of(self._config).has_perplexity else None,
            bits_per_byte=loss / math.log(2) if self.bits_per_token else None,
            metrics=found.mean_metrics,
        )
        self.run.log_event(
            "eval",
            step,
            loss=loss,
            perplexity=record.perplexity,
            bits_per_byte=record.bits_per_byte,
            tokens=found.tokens,
            metrics=record.metrics,
        )
        for watcher in self.watchers:
            watcher.evaluation(record)
        self.learning.evaluation(step, loss)
        if self.learning.bad_evaluations:
            self._say(
                f"step {step}: the held-out loss is not finite; if that of the next evaluation is"
                " not either, the run ends"
            )
        return record

    def save(self, state: TrainState, step: int) -> None:
        """Start to save the state after `step`.

        Raises CheckpointError if this or the previous save fails.
        """
        with self.progress.during("write"):
            self.checkpoints.wait()
            # the save below would fail too, and report it
            with suppress(RunDirectoryError):
                self.run.restore_files()
        with self.progress.during("save"):
            self.checkpoints.save(step, self._stored(state), self._described(step))

    def begin_profile(self, step: int) -> None:
        """Trace from the step after `step` on; nothing runs on the devices."""
        if self.profiler is not None:
            with self.progress.during("profile"):
                self.profiler.start(step)

    def end_profile(self, step: int) -> None:
        """End the trace, if one is under way."""
        if self.profiler is not None and self.profiler.is_tracing:
            with self.progress.during("profile"):
                self.profiler.stop(step, self.program, self.train_step)

    def begin_save(self, state: TrainState, step: int) -> None:
        """Start a save; if it fails it is retried later."""
        try:
            self._saving.begin(lambda: self.save(state, step))
        except NotFiniteError as error:
            self.learning.broken = error.leaf

    def poll_saves(self) -> None:
        """Handle the result of a save that has ended, if one has."""
        self._saving.poll()

    def save_after_error(self, state: TrainState, step: int, error: Exception) -> None:
        """After an error, save the state after `step` unless it is saved.

        Before the first step there is nothing to save.
        """
        if step:
            self._saving.save_after_error(lambda: self.save(state, step), state, step, error)

    @property
    def _saving(self) -> Saving:
        return Saving(
            checkpoints=self.checkpoints,
            retries=self.retries,
            progress=self.progress,
            is_alone=self.is_alone,
            say=self._say,
        )

    def _say(self, text: str) -> None:
        self.display.message(text)

    def _stored(self, state: TrainState) -> TrainState:
        """The state as on disk; if the plan orders layers differently, they are copied on the
        devices.
        """
        program = self.program
        return to_stored(state, program.shapes, program.plan, program.state_shardings)

    def _described(self, step: int) -> dict[str, Any]:
        metadata = {**self.metadata, **self.position_after(step)}
        return described(self.program, step, metadata, self.learning)


def described(
    program: Program, step: int, metadata: Mapping[str, Any], learning: LearningHealth
) -> dict[str, Any]:
    """Metadata of the checkpoint after `step` under a program."""
    return {
        "plan": program.plan.to_json(),
        "next_step": step + 1,
        "seed": program.config.seed,
        "learning": learning.to_json(),
        **metadata,
    }


@dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose metrics have not been read yet."""

    step: int
    metrics: Metrics
    agreed: Any
    """Index into AGREED, and for how many milliseconds devices may have waited for the batch: a
    pair, or an array if processes agreed on their maxima."""
    finished_at: float | None
    """Time on the trainer's clock, if the step had finished when dispatch returned; None: known
    when its metrics are read."""
    data_wait_s: float | None
    """For how long devices may have waited, in this step's time and as this process knows: for the
    step's own batch, or for the next one if the step had ended unnoticed before. None: unknown."""
    before_s: float = 0.0
    """For how long they may have waited for this step's batch in the time of the step before."""


def _estimated_end(called_at: float, finished_at: float | None) -> float | None:
    """Estimated end of a step that still ran at `called_at`, when the next one was dispatched, and
    had ended by `finished_at`, when the next one had too: the middle of the two. None: not known
    yet.
    """
    return None if finished_at is None else 0.5 * (called_at + finished_at)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_ready(array: Any) -> bool:
    return array.is_ready()


def _peak_bytes(mesh: Mesh) -> int | None:
    """Peak bytes in use on this process's first device of the mesh; None: JAX does not report them,
    as for a lost device."""
    stats = [device.memory_stats() for device in mesh.local_devices[:1]]
    return max(
        (s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s), default=None
    )
