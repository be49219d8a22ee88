"""The preparation of a switch: compiling a plan in a thread while training continues, in every
process.

Errors are part of the result, and are raised when it is requested, never in training.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from optimus_jax.control.executables import Executable
from optimus_jax.errors import OptimusError, PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_report import LIMIT_HEADROOM_SHARE
from optimus_jax.planning.search.explain import gib
from optimus_jax.reshard.reshard import Move


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a switch needs, compiled.

    `forward` moves the state from `source` to `target`, `reverse` from `target` to `source`.
    """

    source: Executable
    """The executable that the run leaves."""
    target: Executable
    forward: Move
    reverse: Move
    compile_s: float
    """Seconds of compiling what was not in the cache: steps, evaluation, checksums and moves."""
    over_disk: bool = False
    """Whether the state moves through the disk, because device memory does not suffice."""

    @property
    def has_same_batches(self) -> bool:
        """Whether both plans train on the same batches."""
        source, target = self.source.program.config, self.target.program.config
        return (source.data.global_batch, source.seq_len) == (
            target.data.global_batch,
            target.seq_len,
        )

    @property
    def stays(self) -> bool:
        """Whether no state moves, because plan and devices are the same."""
        return (self.source.plan, self.source.layout.devices) == (
            self.target.plan,
            self.target.layout.devices,
        )

    @property
    def move_bytes(self) -> int:
        """Peak bytes on a device while the state moves: the larger state, and data in transfer."""
        states = self.source.layout.num_bytes(), self.target.layout.num_bytes()
        return max(states) + max(self.forward.way_bytes, self.reverse.way_bytes)


class Preparation:
    """A plan that is being prepared for a switch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._future: Future[Prepared] = Future()
        self._is_wanted = True

    def withdraw(self) -> None:
        """Cancel it: nobody waits for it any more.

        In a run of one process it ends before its next program is compiled. Several processes go on
        to its end: on GPUs they share the autotuning of a program, and one that has begun it waits
        for the others.
        """
        self._is_wanted = False

    def do(self, work: Callable[[], Prepared]) -> None:
        """Run `work`, unless this was withdrawn, and keep its result or exception.

        Called in the thread.
        """
        try:
            self._check_wanted()
            self._future.set_result(work())
        except Exception as error:
            self._future.set_exception(error)

    def compile(self, *programs: Callable[[], object]) -> None:
        """Call these functions in order, in the thread; each compiles some of the programs.

        Raises PlanError when this is withdrawn.
        """
        for program in programs:
            self._check_wanted()
            program()

    def _check_wanted(self) -> None:
        if not self._is_wanted and jax.process_count() == 1:
            raise PlanError(
                explain(
                    "this preparation was withdrawn",
                    given=self.plan.describe(),
                    do="prepare the plan again",
                )
            )

    @property
    def is_done(self) -> bool:
        """Whether it has ended in this process, successfully or not."""
        return self._future.done()

    def wait(self, most_s: float) -> None:
        """Wait until it has ended, successfully or not, but at most `most_s` seconds."""
        wait([self._future], timeout=most_s)

    @property
    def failure(self) -> str:
        """Why it has failed; empty: it has not failed."""
        error = self._future.exception() if self.is_done else None
        return "" if error is None else str(error) or type(error).__name__

    def result(self) -> Prepared:
        """Wait for the result; raises what went wrong."""
        return self._future.result()

    def is_ready_everywhere(self) -> bool:
        """Whether every process is ready for this plan.

        It is a small collective: all processes have to call it at the same step boundary.

        Raises OptimusError, in all processes, if one of them prepares another plan or has failed.
        """
        mine = np.array(
            [*bytes.fromhex(self.plan.digest), self.is_done, bool(self.failure)], np.uint8
        )
        all_of_them = (
            multihost_utils.process_allgather(mine) if jax.process_count() > 1 else mine[None]
        )
        *digests, done, failed = all_of_them.T
        if any((part != part[0]).any() for part in digests):
            raise OptimusError(
                explain(
                    "the processes of this run prepare different plans",
                    given=f"{self.plan.digest} here",
                    do="start all processes from the same version and settings",
                )
            )
        if failed.any():
            raise PlanError(self.failure or "another process cannot prepare the plan")
        return bool(done.all())


def check_room(prepared: Prepared, bytes_per_device: int | None) -> None:
    """Raise PlanError if the move needs more than a device's memory.

    `bytes_per_device`: bytes that JAX may use on a device; None: unknown, and nothing is raised.
    """
    if (
        bytes_per_device is not None
        and prepared.move_bytes > (1 - LIMIT_HEADROOM_SHARE) * bytes_per_device
    ):
        raise PlanError(
            explain(
                f"moving the state needs {gib(prepared.move_bytes)} per device,"
                f" {gib(bytes_per_device)} are available",
                given=prepared.target.plan.describe(),
                do="use a smaller controller.move_bytes, or another plan",
            )
        )
