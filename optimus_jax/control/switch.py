"""Moves a running job to another plan: prepare, move, verify, commit; and takes the switch back.

* PREPARE, while training continues: a thread compiles the plan and the programs that move the
  state, forward and in reverse, and checks whether steps and move fit into memory. An error there
  is part of the result of the preparation, and never an exception in training.
* MOVE and VERIFY, at a step boundary: the leaves move in groups (reshard/reshard.py). Checksums of
  a group are computed before and after it moves, and its old shards are deleted only if they agree.
  So nothing is lost until the last group is verified: groups that have moved can be moved back, and
  the others are still in their old layout. Then the step number is checked, and the loss of a fixed
  batch is compared under both plans. (A run has no other state: batches and random numbers depend
  on the step alone.)
  If device memory does not suffice, the state moves through the disk (control/disk_transfer.py),
  and can be read back from there.
* COMMIT: plan.json and the journal (control/journal.py) are written.
* The controller watches the first steps under the new plan (control/canary.py). Then it calls
  `keep`, or `take_back`, which moves the state of the present step, not that of the switch: no step
  is lost or done twice.

If a group cannot be moved back either (`StateLostError`), devices or programs are faulty, and only
the newest checkpoint can be trusted.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from optimus_jax.cluster.distributed import all_or_none
from optimus_jax.config import Config, ControlConfig, Precision
from optimus_jax.control.background import Worker
from optimus_jax.control.disk_transfer import DiskTransfer
from optimus_jax.control.executables import Executable, ExecutableCache, batch_of, compile_plan
from optimus_jax.control.journal import Ending, Journal
from optimus_jax.control.preparation import Preparation, Prepared, check_room
from optimus_jax.data.batch import BatchShape
from optimus_jax.devices.hosts import devices_by_host
from optimus_jax.errors import FaultError, OptimusError, PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.exchange import Device
from optimus_jax.reshard.reshard import Group, Move
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program
from optimus_jax.training.task import Batch

PROBE_RELATIVE: dict[Precision, float] = {"f32": 1e-5, "bf16": 2e-3, "f16": 1e-3}
"""Largest relative difference of one batch's loss between plans, which sum in different orders
numbers that are rounded to 2^-24 (f32), 2^-8 (bf16) or 2^-11 (f16).

For bf16 it is about ten times what tests measure between plans (1.5e-4); for f32 it is what every
plan has to meet. For a loss below 1 it is absolute: rounding affects the logits, and a loss is a
difference of logits.
"""


class StateLostError(FaultError):
    """A state was moved in part and cannot be moved back, for example because another process was
    lost meanwhile. The run has to resume from a checkpoint.
    """


class _NotTheSameError(Exception):
    """The state that has arrived is not the one that was sent."""


@dataclass(frozen=True, kw_only=True)
class Switched:
    """The result of a switch. The state that was given to it is donated in any case."""

    state: TrainState
    executable: Executable
    """The executable that `state` is laid out for: the new one, or the old one after a failure."""
    is_done: bool
    why_not: str
    """What went wrong; empty: nothing."""
    costs_s: dict[str, float]
    """Delay of the run in seconds, by phase: agree_s, probe_s, move_s, verify_s, commit_s."""


class Switcher:
    """Prepares and makes the switches of a run, and holds its executables.

    Args:
      running: the executable that the run begins with.
      settings: budgets.
      journal: the record of switches on disk; None: there is none.
      bytes_per_device: bytes that JAX may use on each device; None: unknown.
      probe: returns the fixed batch on a program's devices; None: no loss is compared.
      disk_transfer: moves states for which device memory does not suffice; None: such a switch
        cannot be prepared.
    """

    def __init__(
        self,
        *,
        running: Executable,
        settings: ControlConfig,
        journal: Journal | None = None,
        bytes_per_device: int | None = None,
        probe: Callable[[Program], Batch] | None = None,
        disk_transfer: DiskTransfer | None = None,
    ) -> None:
        self.running, self._disk_transfer = running, disk_transfer
        self._settings, self._journal, self._bytes_per_device, self._probe = (
            settings,
            journal,
            bytes_per_device,
            probe,
        )
        self._executables, self._worker = ExecutableCache(settings.executables), Worker("compile")
        self._executables.put(running)
        self._on_trial: Prepared | None = None
        self._in_progress: Preparation | None = None

    def prepare(
        self,
        plan: Plan,
        *,
        config: Config | None = None,
        devices: Sequence[Device] | None = None,
        avoid: frozenset[Device] = frozenset(),
        also: Callable[[Executable], object] = lambda _: None,
    ) -> Preparation:
        """Begin to prepare a switch to `plan` in a thread; preparations are done one by one.

        Args:
          plan: the plan to switch to.
          config: the config to compile for, perhaps with other batches; None: the run's.
          devices: the devices that the plan uses; None: the run's.
          avoid: devices that are read from only for data that no other device has.
          also: called in the thread with the compiled executable.
        """
        preparation, source = Preparation(plan), self.running
        config = config or source.program.config
        chosen = tuple(devices or source.layout.devices)

        def prepared() -> Prepared:
            found = self._prepared(preparation, source, config, chosen, avoid)
            preparation.compile(lambda: also(found.target))
            return found

        def job() -> None:
            self._in_progress = preparation
            preparation.do(prepared)

        self._worker(job)
        return preparation

    @property
    def is_compiling(self) -> bool:
        """Whether this process is preparing a switch or a phase, wanted or not any more."""
        return self._in_progress is not None and not self._in_progress.is_done

    def is_compiled(
        self,
        plan: Plan,
        batch: BatchShape | None = None,
        without: frozenset[int] = frozenset(),
    ) -> bool:
        """Whether all programs of a switch to the plan, except moves, are in the cache.

        Args:
          plan: the plan.
          batch: shape of the batches; None: the run's.
          without: ids of devices that the plan does not use.
        """
        devices = [device for device in devices_by_host() if device.id not in without][
            : plan.num_devices
        ]
        found = self._executables.get(batch or batch_of(self.running.program.config), plan, devices)
        stays = (plan, tuple(devices)) == (self.running.plan, self.running.layout.devices)
        return found is not None and (stays or found.can_be_verified)

    def switch(
        self, state: TrainState, prepared: Prepared, *, step: int, why: str, by_choice: bool = True
    ) -> Switched:
        """Move the state, which is donated, and verify it; on failure the run stays under its plan.

        Args:
          state: the state in the layout of the running executable.
          prepared: the prepared switch.
          step: number of steps done.
          why: the reason, for the journal.
          by_choice: whether the run could have stayed.
        Raises:
          OptimusError: the processes are about to switch to different plans.
          StateLostError: the state was moved in part and cannot be moved back.
        """
        assert prepared.source is self.running, "prepared under another plan than the run's"
        clock = _Clock()
        with clock.phase("agree_s"):
            _check_agreed(prepared.target.plan)
        try:
            # Only one process writes; if it cannot, no process may move.
            with clock.phase("commit_s"), all_or_none():
                self._begin(prepared, step, why, by_choice)
        # Nothing has moved yet: the run continues with its state.
        except OptimusError as error:
            return Switched(
                state=state,
                executable=prepared.source,
                is_done=False,
                why_not=str(error),
                costs_s=clock.seconds,
            )
        switched = self._moved(
            state,
            prepared,
            step,
            clock,
            lambda prepared, at: self._commit(prepared, at, clock.seconds),
        )
        if switched.is_done:
            self.running, self._on_trial = prepared.target, prepared
            self._executables.put(prepared.target)
        else:
            self._end("failed", step, switched.why_not, switched.costs_s, prepared.source.plan)
        return switched

    def enter(
        self,
        state: TrainState,
        prepared: Prepared,
        *,
        step: int,
        why: str,
        by_choice: bool = False,
        kept_why: str = "the batches need it",
    ) -> Switched:
        """Switch without a trial, since the run cannot go back: to other batches, or as its user
        asks.

        Under the same plan no state moves. Arguments as for `switch`, and the reason, for the
        journal, why the plan is kept.
        """
        if self._on_trial is not None:
            self.keep(
                step=step, why="other batches began before the first steps were done", costs_s={}
            )
        if prepared.stays:
            assert prepared.source is self.running, "prepared under another plan than the run's"
            self.running = prepared.target
            self._executables.put(prepared.target)
            return Switched(
                state=state, executable=prepared.target, is_done=True, why_not="", costs_s={}
            )
        switched = self.switch(state, prepared, step=step, why=why, by_choice=by_choice)
        if switched.is_done:
            kept = "other batches begin" if by_choice else kept_why
            self.keep(step=step, why=kept, costs_s=switched.costs_s)
        return switched

    def close(self) -> None:
        """Wait until the program that is being compiled is done, and start no others.

        A process that exits in the middle of a compilation would abort.
        """
        if self._in_progress is not None:
            self._in_progress.withdraw()
        self._worker.finish()

    def keep(self, *, step: int, why: str, costs_s: dict[str, float]) -> None:
        """End the trial and keep the new plan; the way back is no longer held ready."""
        self._end("kept", step, why, costs_s)
        self._on_trial = None

    def stop(self, *, step: int, costs_s: dict[str, float]) -> None:
        """Record that the run ends on purpose: a plan on trial has not failed.

        `costs_s`: costs of the switch to that plan, by phase.
        """
        if self._on_trial is not None:
            self._end("stopped", step, "the run ended before the first steps were done", costs_s)

    def take_back(
        self, state: TrainState, *, step: int, why: str, costs_s: dict[str, float]
    ) -> Switched:
        """Move the present state back to the plan before the last switch; on failure the run stays
        under the new plan.

        Args:
          state: the state in the layout of the new plan; donated.
          step: number of steps done.
          why: the reason, for the journal.
          costs_s: costs of the switch that is taken back, by phase, for the journal.
        Raises:
          StateLostError: the state was moved in part and cannot be moved to either plan.
        """
        trial = self._on_trial
        assert trial is not None, "no switch is on trial"
        back = Prepared(
            source=trial.target,
            target=trial.source,
            forward=trial.reverse,
            reverse=trial.forward,
            compile_s=0.0,
            over_disk=trial.over_disk,
        )
        clock = _Clock()

        def both_ways_s() -> dict[str, float]:
            return {**costs_s, "back_s": sum(clock.seconds.values())}

        switched = self._moved(
            state,
            back,
            step,
            clock,
            lambda prepared, at: self._end(
                "taken back", at, why, both_ways_s(), prepared.target.plan
            ),
        )
        if switched.is_done:
            self.running = trial.source
            self._executables.put(trial.source)
        else:
            self._end("kept", step, f"it cannot be taken back: {switched.why_not}", both_ways_s())
        self._on_trial = None
        return switched

    def _prepared(
        self,
        preparation: Preparation,
        source: Executable,
        config: Config,
        devices: tuple[Device, ...],
        avoid: frozenset[Device],
    ) -> Prepared:
        """Compile a switch. The step is first: most errors are found there, and it stays in the
        cache if the preparation is withdrawn.
        """
        started, plan = time.perf_counter(), preparation.plan
        stays = (plan, devices) == (source.plan, source.layout.devices)
        target = self._executables.get(batch_of(config), plan, devices) or compile_plan(
            config, plan, devices=devices, bytes_per_device=self._bytes_per_device, rest=False
        )
        self._executables.put(target)
        forward, reverse = (
            Move(*ends, budget_bytes=self._settings.move_bytes, avoid=avoid)
            for ends in ((source.layout, target.layout), (target.layout, source.layout))
        )
        preparation.compile(forward.compile, reverse.compile)
        if not stays:
            for executable in (source, target):
                preparation.compile(executable.sums.compile, executable.compile_probe)
        if config.eval_every:
            preparation.compile(target.compile_evaluation)
        prepared = Prepared(
            source=source,
            target=target,
            forward=forward,
            reverse=reverse,
            compile_s=time.perf_counter() - started,
        )
        try:
            check_room(prepared, self._bytes_per_device)
        except PlanError:
            if self._disk_transfer is None:
                raise
            return replace(prepared, over_disk=True)
        return prepared

    def _moved(
        self,
        state: TrainState,
        prepared: Prepared,
        step: int,
        clock: "_Clock",
        commit: Callable[[Prepared, int], None],
    ) -> Switched:
        """MOVE, VERIFY and `commit`; if any of them fails, the state is moved back."""
        if prepared.over_disk:
            return self._moved_over_disk(state, prepared, step, clock, commit)
        leaves, sums, moved = named_leaves(state), {}, []
        probed = self._probe_of(prepared)
        try:
            with clock.phase("probe_s"):
                before = _loss(prepared.source, state, probed)
            self._carry(prepared, leaves, sums, moved, clock)
            new: TrainState = prepared.forward.target_state(leaves)
            self._accept(new, before, prepared, step, clock, commit)
        except Exception as error:
            with clock.phase("move_s"):
                old = _brought_back(prepared, leaves, moved, sums)
            return Switched(
                state=old,
                executable=prepared.source,
                is_done=False,
                why_not=str(error) or type(error).__name__,
                costs_s=clock.seconds,
            )
        return Switched(
            state=new, executable=prepared.target, is_done=True, why_not="", costs_s=clock.seconds
        )

    def _moved_over_disk(
        self,
        state: TrainState,
        prepared: Prepared,
        step: int,
        clock: "_Clock",
        commit: Callable[[Prepared, int], None],
    ) -> Switched:
        """The same as `_moved` through a checkpoint, which also serves to go back."""
        assert self._disk_transfer is not None
        is_written, new = False, None
        try:
            with clock.phase("probe_s"):
                before = _loss(prepared.source, state, self._probe_of(prepared))
            with clock.phase("move_s"):
                self._disk_transfer.put(state, prepared.source, step)
                is_written = True
                new = self._disk_transfer.fetch(prepared.target, step)
            self._accept(new, before, prepared, step, clock, commit)
        except Exception as error:
            if is_written:
                with clock.phase("move_s"):
                    state = self._fetched_back(new, prepared, step)
            return Switched(
                state=state,
                executable=prepared.source,
                is_done=False,
                why_not=str(error) or type(error).__name__,
                costs_s=clock.seconds,
            )
        return Switched(
            state=new, executable=prepared.target, is_done=True, why_not="", costs_s=clock.seconds
        )

    def _fetched_back(self, new: TrainState | None, prepared: Prepared, step: int) -> TrainState:
        """The state in the old layout, read from disk; frees the memory of the new one first."""
        assert self._disk_transfer is not None
        for leaf in jax.tree.leaves(new):
            leaf.delete()
        try:
            return self._disk_transfer.fetch(prepared.source, step)
        except Exception as error:
            raise StateLostError(
                explain(
                    "a state that went over the disk cannot be read again",
                    given=f"{prepared.source.plan.describe()}: {error}",
                    do=(
                        "start again with --resume: the run continues from its newest good"
                        " checkpoint, under the plan from before"
                    ),
                )
            ) from error

    def _accept(
        self,
        new: TrainState,
        before: float | None,
        prepared: Prepared,
        step: int,
        clock: "_Clock",
        commit: Callable[[Prepared, int], None],
    ) -> None:
        """Check the step of the new state and its loss on the probe, then `commit`.

        `before`: loss of the probe under the old plan; None: it is not compared.
        """
        if int(new.step) != step:
            raise _NotTheSameError(f"the state is of step {int(new.step)}, not {step}")
        with clock.phase("probe_s"):
            _check_loss(
                before,
                _loss(prepared.target, new, self._probe_of(prepared)),
                prepared.target.plan.precision,
            )
        with clock.phase("commit_s"), all_or_none():  # only one process writes
            commit(prepared, step)

    def _carry(
        self,
        prepared: Prepared,
        leaves: dict[str, Array],
        sums: dict[str, int],
        moved: list[str],
        clock: "_Clock",
    ) -> None:
        """Move every leaf in `leaves` to its new layout, and verify it.

        `sums` and `moved` receive the checksums and paths of the leaves that have been moved, so
        that the caller knows how far it has come if this raises.
        """
        for group in prepared.forward.groups:
            changed = [path for path in group.paths if not prepared.forward.stays(path)]
            with clock.phase("verify_s"):
                sums |= prepared.source.sums.of(leaves, changed)
            with clock.phase("move_s"):
                arrived = prepared.forward.carry(group, leaves)
            with clock.phase("verify_s"):
                _check_same(sums, prepared.target.sums.of(arrived, changed))
            with clock.phase("move_s"):
                prepared.forward.release(group, leaves, arrived)
                moved += group.paths

    def _probe_of(self, prepared: Prepared) -> Callable[[Program], Batch] | None:
        """The probe, if both plans train on the same batches."""
        return self._probe if prepared.has_same_batches else None

    def _begin(self, prepared: Prepared, step: int, why: str, by_choice: bool) -> None:
        if self._journal is not None:
            self._journal.begin(
                prepared.source.plan, prepared.target.plan, step=step, why=why, by_choice=by_choice
            )

    def _commit(self, prepared: Prepared, step: int, costs_s: Mapping[str, float]) -> None:
        if self._journal is not None:
            self._journal.commit(prepared.target.plan, step=step, costs_s=costs_s)

    def _end(
        self,
        ending: Ending,
        step: int,
        why: str,
        costs_s: dict[str, float],
        back_to: Plan | None = None,
    ) -> None:
        if self._journal is not None:
            self._journal.end(ending, step=step, why=why, costs_s=costs_s, back_to=back_to)


def _brought_back(
    prepared: Prepared, leaves: dict[str, Array], moved: Iterable[str], sums: dict[str, int]
) -> TrainState:
    """The state in the old layout: moves back and verifies the leaves in `moved`."""
    to_move_back = set(moved)
    try:
        for group in prepared.reverse.groups:
            part = Group(
                paths=tuple(path for path in group.paths if path in to_move_back),
                way_bytes=group.way_bytes,
            )
            arrived = prepared.reverse.carry(part, leaves)
            changed = [path for path in part.paths if path in sums]
            _check_same(sums, prepared.source.sums.of(arrived, changed))
            prepared.reverse.release(part, leaves, arrived)
    except Exception as error:
        raise StateLostError(
            explain(
                "a state that was moved in part cannot be moved back",
                given=f"{prepared.target.plan.describe()}: {error}",
                do=(
                    "start again with --resume: the run continues from its newest checkpoint under"
                    " the plan from before"
                ),
            )
        ) from error
    return prepared.reverse.target_state(leaves)


def _check_same(sent: dict[str, int], arrived: dict[str, int]) -> None:
    wrong = [path for path, value in arrived.items() if value != sent[path]]
    if wrong:
        raise _NotTheSameError(f"the checksum of {', '.join(wrong)} is not what it was before")


def _loss(
    executable: Executable, state: TrainState, probe: Callable[[Program], Batch] | None
) -> float | None:
    """Mean loss of the probe's tokens; None: there is no probe."""
    if probe is None:
        return None
    sums = jax.device_get(executable.program.eval_step(state.params, probe(executable.program)))
    return float(sums.loss) / float(sums.tokens)


def _check_loss(before: float | None, after: float | None, precision: Precision) -> None:
    if before is None or after is None or (math.isnan(before) and math.isnan(after)):
        return
    if not abs(after - before) <= PROBE_RELATIVE[precision] * max(1.0, abs(before)):
        raise _NotTheSameError(f"the loss of a batch was {before!r} and is {after!r}")


def _check_agreed(plan: Plan) -> None:
    """Raise OptimusError in all processes unless all are about to switch to this plan."""
    if jax.process_count() > 1:
        mine = np.frombuffer(bytes.fromhex(plan.digest), np.uint8)
        if (multihost_utils.process_allgather(mine) != mine).any():
            raise OptimusError(
                explain(
                    "the processes of this run switch to different plans",
                    given=f"{plan.digest} here",
                    do="start all processes from the same version and settings",
                )
            )


class _Clock:
    """Measures the seconds spent in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the context to the phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
