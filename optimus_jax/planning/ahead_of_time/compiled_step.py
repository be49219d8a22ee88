"""Compile a plan's training step. This is the one place where steps are lowered and compiled.

Runs, trials, the controller's changes of plan and ahead-of-time checks all use it. A run starts
with the step that its trial compiled, if there was one (run/first_plan.py).
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

import jax

from optimus_jax.devices.cpu import return_freed_memory
from optimus_jax.errors import PlanError, explain
from optimus_jax.planning.ahead_of_time.compile_report import Allocated, check_executable
from optimus_jax.planning.search.explain import gib
from optimus_jax.training.step import Program


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled training step, with the memory that it needs."""

    program: Program
    """The jitted program; its `train_step` is what was compiled."""
    train_step: jax.stages.Compiled
    """(state, batch) -> (state, metrics), as in `Program.train_step`."""
    allocated: Allocated
    """Memory needed on each device."""
    compile_s: float
    """Seconds of tracing, lowering and compiling."""

    @property
    def step_bytes(self) -> int:
        """Bytes per device that a step needs."""
        return self.allocated.total_bytes

    def check_memory(self, *, do: str = "leave this plan out") -> None:
        """Raise PlanError, with the advice `do`, if a step needs more memory than a device has."""
        if self.allocated.fits is False:
            raise self.does_not_fit(do=do)

    def does_not_fit(self, *, do: str = "leave this plan out") -> PlanError:
        """The error of `check_memory`, for processes that fail because another one does."""
        return PlanError(
            explain(
                f"the compiled step needs {gib(self.step_bytes)} per device,"
                f" {gib(self.allocated.capacity_bytes or 0)} are available",
                given=self.program.plan.describe(),
                do=do,
            )
        )


def compile_step(program: Program, *, bytes_per_device: int | None = None) -> CompiledStep:
    """Compile the training step of `program`, without running anything on a device.

    Args:
      bytes_per_device: memory that JAX may use on each device; None: unknown.
    """
    started = time.perf_counter()
    arguments = program.abstract_state(), program.abstract_batch()
    compiled = program.train_step.lower(*arguments).compile()
    if program.mesh.devices.flat[0].platform == "cpu":
        return_freed_memory()
    return CompiledStep(
        program=program,
        train_step=compiled,
        allocated=check_executable(compiled.memory_analysis(), bytes_per_device),
        compile_s=time.perf_counter() - started,
    )


class StepCompilation:
    """Compiles the step of a program in a thread, while the state is made or read. XLA does not
    hold Python's lock.
    """

    def __init__(
        self,
        program: Program,
        *,
        bytes_per_device: int | None = None,
        compiled: CompiledStep | None = None,
    ):
        """`compiled`: the step, if it was compiled already."""
        self._program, self._bytes_per_device = program, bytes_per_device
        self._done: Future[CompiledStep] = Future()
        if compiled is not None:
            self._done.set_result(compiled)
        else:
            # No daemon: XLA aborts a process that ends in the middle of a compilation. A run that
            # fails meanwhile says so at once, and its process ends when the step is compiled.
            Thread(target=self._compile, name="compile").start()

    def of(self, program: Program) -> CompiledStep:
        """The compiled step of a program: this one's, or of another that came to be needed
        instead. Raises what compiling has raised.
        """
        if program is self._program:
            return self._done.result()
        return compile_step(program, bytes_per_device=self._bytes_per_device)

    def _compile(self) -> None:
        try:
            self._done.set_result(
                compile_step(self._program, bytes_per_device=self._bytes_per_device)
            )
        except BaseException as error:
            self._done.set_exception(error)
