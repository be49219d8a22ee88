"""The loop: runs steps under one Plan, writes down what happened, and returns at a step boundary.

A step's numbers are read only after the next step was dispatched, so that the devices never wait
for the host.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import jax
from jax.sharding import Mesh

from optimus_jax.checkpoint import Checkpoints
from optimus_jax.config import Config
from optimus_jax.data.loader import BatchLoader
from optimus_jax.data.sampler import Batch as HostBatch
from optimus_jax.errors import RunDirectoryError, explain
from optimus_jax.mesh.distributed import Agreement
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.flops import step_flops
from optimus_jax.snapshots import Snapshots
from optimus_jax.training.display import Display
from optimus_jax.training.evaluation import eval_rows
from optimus_jax.training.numbers import perplexity_of
from optimus_jax.training.progress import Progress
from optimus_jax.training.run_directory import RunDirectory
from optimus_jax.training.state import TrainState, to_stored
from optimus_jax.training.step import Metrics, Program
from optimus_jax.training.step_record import StepRecord
from optimus_jax.training.stopping import StopRequest
from optimus_jax.training.tensorboard import TensorBoardWriter

Reason = Literal["done", "interrupt", "terminate", "fault", "switch", "phase"]
_REASONS: tuple[Reason, ...] = ("done", "interrupt", "terminate", "fault")
"""By the number that processes agree on: the larger wins. On `switch` they have agreed before they say so, and `phase` all know."""


class StepWatcher(Protocol):
    """Is shown every step and evaluation."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, step: int, loss: float, perplexity: float, bits_per_byte: float | None) -> None: ...


class Overseer(StepWatcher, Protocol):
    """Who measures the run and may ask for another plan: control/controller.py, as far as the loop needs it."""

    def dispatched(self, *, data_wait_s: float, dispatch_s: float, batch: HostBatch) -> None:
        """A step was handed to the devices."""
        ...

    def is_probe_due(self, step: int) -> bool:
        """Whether to let the devices finish `step` and call `probe`."""
        ...

    def probe(self, step: int) -> None:
        """The devices have finished `step`, and are free."""
        ...

    def leaves(self, step: int) -> bool:
        """Whether the run is to go on under another plan after `step`; the same answer in every process."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where a run was left."""

    state: TrainState
    reason: Reason
    last_step: int
    last_loss: float
    """Of the last step run now; NaN if there was none."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One run under one Plan."""

    program: Program
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    """`program.train_step`, compiled."""
    topology: Topology
    loader: BatchLoader
    eval_batches: Callable[[], Iterable[HostBatch]] | None
    """A fresh pass over the held-out batches; None: there are none."""
    bits_per_token: bool
    """Whether a token is a byte, so that loss / ln 2 is bits per byte."""
    metadata: Mapping[str, Any]
    """What checkpoints say beside plan and step; of `config`, the run's JSON, they need the model."""
    checkpoints: Checkpoints
    run: RunDirectory
    display: Display
    tensorboard: TensorBoardWriter | None
    stop: StopRequest
    overseer: Overseer | None = None
    """Who is told what only the loop can measure, and may end it; None: nobody."""
    last_step: int | None = None
    """Of the phase whose batches these are; None: it lasts until the run ends."""
    progress: Progress = field(default_factory=Progress)
    """What this process is at, for those who watch it."""
    snapshots: Snapshots | None = None
    """The second tier, in host memory; None: there is none."""

    def train(self, state: TrainState) -> Outcome:
        """Run from the step after `state.step` to the config's last, or until asked to stop, and save then; or until another phase begins, or the
        overseer asks for another plan, and leave the rest to what comes next.

        Raises:
          RunDirectoryError: a log cannot be written. The state of the step was saved first.
          CheckpointError: a checkpoint cannot be written.
        """
        config, step, last_loss = self._config, int(state.step), math.nan
        agree = Agreement(self.program.mesh) if self.topology.num_processes > 1 else None
        reason: Reason = "done"
        unread: _Unread | None = None
        clock = time.perf_counter()
        self.progress.begin("step")
        batches = self.loader.iterate(step + 1)
        try:
            while step < config.steps and reason == "done":
                asked_at = time.perf_counter()
                step, host_batch = next(batches)
                loaded_at = time.perf_counter()
                batch = put_batch(host_batch, self.program.batch_sharding, config.data.global_batch)
                has_ended = unread is not None and _is_ready(unread.metrics["loss"])
                called_at = time.perf_counter()
                self.progress.enter(step)
                state, metrics = self.train_step(state, batch)
                if self.overseer is not None:
                    self.overseer.dispatched(data_wait_s=loaded_at - asked_at, dispatch_s=time.perf_counter() - called_at, batch=host_batch)
                wish = _REASONS.index("fault" if self.run.failure else self.stop.reason or "done")
                evaluates = self.eval_batches is not None and (_due(step, config.eval_every) or step == config.steps)
                saves = _due(step, config.checkpoint.every) or step == config.steps
                snapshot_due = self.snapshots is not None and self.snapshots.is_due(step) and step < config.steps
                # Alone, we can stop at once. Several processes stop a step later, at which all have read the wish.
                probes = self.overseer is not None and self.overseer.is_probe_due(step)
                reads_now = evaluates or saves or snapshot_due or probes or (agree is None and wish > 0)
                agreed = wish if agree is None else agree(wish)
                # Collectives on a CPU are waited for when the next is dispatched: then this is the end of the step.
                finished_at = time.perf_counter() if _is_ready(metrics["loss"]) else None
                if unread is not None and unread.finished_at is None:
                    unread = replace(unread, finished_at=called_at if has_ended else _between(max(clock, called_at), finished_at))
                waiting = [unread, _Unread(step, metrics, agreed, finished_at)]
                unread = None if reads_now else waiting.pop()
                for item in filter(None, waiting):
                    last_loss, clock = self._record(item, clock)
                    reason = _REASONS[max(_REASONS.index(reason), int(item.wish))]
                if evaluates:
                    with self.progress.during("evaluation"):
                        self._evaluate(state, step)
                if saves or reason != "done":
                    self.save(state, step)
                if snapshot_due and reason == "done" and self.snapshots is not None:
                    with self.progress.during("snapshot"):
                        self.snapshots.take(step, self._stored(state), self._described(step))
                if probes and self.overseer is not None:
                    with self.progress.during("probe"):
                        self.overseer.probe(step)
                if reason == "done" and step < config.steps and self.overseer is not None and self.overseer.leaves(step):
                    reason = "switch"
                elif reason == "done" and step < config.steps and step == self.last_step:
                    reason = "phase"
                if reads_now:
                    clock = time.perf_counter()
            if unread is not None:
                last_loss, clock = self._record(unread, clock)
        finally:
            batches.close()
        if reason in ("switch", "phase"):  # if a log could not be written, the first step under the next plan finds that out
            return Outcome(state=state, reason=reason, last_step=step, last_loss=last_loss)
        with self.progress.during("write"):
            self.checkpoints.wait()
        self.run.log_event("end", step, reason="fault" if self.run.failure else reason)
        if self.run.failure:
            self.display.message(f"stopped after step {step}, whose state is saved")
        self.run.check()
        if reason == "fault":
            raise RunDirectoryError(explain("another process of this run cannot write its logs", given=f"stopped and saved at step {step}",
                                            do="see what process 0 has printed"))
        return Outcome(state=state, reason=reason, last_step=step, last_loss=last_loss)

    def under(self, program: Program) -> "Trainer":
        """The same run under another program, whose step is compiled; its batches are still to be given."""
        return replace(self, program=program, train_step=program.train_step)

    @property
    def watchers(self) -> Sequence[StepWatcher]:
        """Who is shown every step and evaluation."""
        return tuple(watcher for watcher in (self.progress, self.display, self.tensorboard, self.overseer) if watcher is not None)

    @property
    def _config(self) -> Config:
        return self.program.config

    def _record(self, item: "_Unread", clock: float) -> tuple[float, float]:
        """Write a step down; returns its loss and the time at which it was finished."""
        metrics = jax.device_get(item.metrics)
        now = time.perf_counter() if item.finished_at is None else item.finished_at
        seconds = now - clock
        tokens = int(metrics["tokens"])
        peak = self.topology.dense_peak_flops(self.program.plan.precision)
        flops = step_flops(self._config.model, num_sequences=self._config.data.global_batch, seq_len=self._config.seq_len)
        record = StepRecord(
            step=item.step, loss=float(metrics["loss"]), grad_norm=float(metrics["grad_norm"]), lr=float(metrics["lr"]),
            tokens=tokens, step_time_s=seconds, tokens_per_s=tokens / seconds,
            mfu=flops / seconds / peak / self.program.plan.num_devices if peak else None,
            plan=self.program.plan.digest, peak_bytes=_peak_bytes(self.program.mesh), skipped=bool(metrics["skipped"]),
            loss_scale=float(metrics["loss_scale"]) if self.program.plan.precision == "f16" else None)
        self.run.log_step(record)
        for watcher in self.watchers:
            watcher.step(record)
        if record.skipped:
            self.display.message(f"step {item.step}: loss or gradient was not finite; the update was left out")
        return record.loss, now

    def _evaluate(self, state: TrainState, step: int) -> None:
        assert self.eval_batches is not None
        num_rows = eval_rows(self._config, self.program.plan)
        sums = [self.program.eval_step(state.params, put_batch(batch, self.program.batch_sharding, num_rows))
                for batch in self.eval_batches()]
        losses, tokens = zip(*jax.device_get(sums), strict=True)
        loss = float(sum(map(float, losses)) / sum(map(int, tokens)))
        perplexity = perplexity_of(loss)
        bits = loss / math.log(2) if self.bits_per_token else None
        self.run.log_event("eval", step, loss=loss, perplexity=perplexity, bits_per_byte=bits, tokens=sum(map(int, tokens)))
        for watcher in self.watchers:
            watcher.evaluation(step, loss, perplexity, bits)

    def save(self, state: TrainState, step: int) -> None:
        """Begin to save the state after `step`. Raises CheckpointError if it, or the one before it, cannot be written."""
        with self.progress.during("write"):
            self.checkpoints.wait()
        with self.progress.during("save"):
            self.checkpoints.save(step, self._stored(state), self._described(step))

    def _stored(self, state: TrainState) -> TrainState:
        """As on disk: where the plan has layers in another order, a copy of them, until they have been copied to the host."""
        program = self.program
        return to_stored(state, program.shapes, program.plan, program.state_shardings)

    def _described(self, step: int) -> dict[str, Any]:
        return described(self.program, step, self.metadata)


def described(program: Program, step: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint of a state under a program says, after `step`."""
    return {"plan": program.plan.to_json(), "next_step": step + 1, "seed": program.config.seed, **metadata}


@dataclass(frozen=True)
class _Unread:
    """A dispatched step whose numbers nobody has waited for yet."""

    step: int
    metrics: Metrics
    wish: Any
    """Index into _REASONS: a number, or the processes' agreed one as an array."""
    finished_at: float | None
    """Time on the trainer's clock if it was finished as soon as dispatched; None: reading its numbers will tell."""


def _between(called_at: float, finished_at: float | None) -> float | None:
    """When a step ended that had not when the next was dispatched, at `called_at`, and that has ended at `finished_at` as the next has; None: not known yet."""
    return None if finished_at is None else 0.5 * (called_at + finished_at)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_ready(array: Any) -> bool:
    return array.is_ready()


def _peak_bytes(mesh: Mesh) -> int | None:
    """Of the first device here that the run uses: one that is lost may not answer."""
    stats = [device.memory_stats() for device in mesh.local_devices[:1]]
    return max((s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s), default=None)
