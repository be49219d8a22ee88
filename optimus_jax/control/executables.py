"""Executables: everything compiled that a run needs under a plan.

They are made before the run enters the plan, and cached for a while after it has left it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from optimus_jax.config import Config
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep, compile_step
from optimus_jax.reshard.exchange import Device
from optimus_jax.reshard.reshard import Layout
from optimus_jax.reshard.shard_sums import ShardSums
from optimus_jax.training.evaluation import eval_rows, transcript_rows
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program, build_program


@dataclass(frozen=True, kw_only=True)
class Executable:
    """A compiled plan."""

    program: Program
    """The program; its train_step is a compiled executable, and so is what evaluates, once it is
    needed."""
    layout: Layout
    """Layout of the state."""
    sums: ShardSums
    """Computes the checksums of states in this layout."""
    step_bytes: int
    """Bytes that a step needs on a device."""
    compile_s: float
    """Seconds of tracing and compiling."""

    @property
    def plan(self) -> Plan:
        """The plan that it runs."""
        return self.program.plan

    @property
    def can_be_verified(self) -> bool:
        """Whether the programs that verify a switch are compiled too. The probe's is compiled after
        the checksums.
        """
        evaluation = self.program.eval_step
        return not isinstance(evaluation, _CompiledLater) or evaluation.has_probe

    def compile_probe(self) -> None:
        """Compile the evaluation of the probe, which has the shape of a training batch."""
        if isinstance(self.program.eval_step, _CompiledLater):
            self.program.eval_step.compile_probe()

    def compile_evaluation(self) -> None:
        """Compile the evaluation for all batches that a run under the plan evaluates."""
        for function in (self.program.eval_step, self.program.next_tokens):
            if isinstance(function, _CompiledLater):
                function.compile()

    def compile_rest(self) -> None:
        """Compile what a switch needs and a run that stays may not: checksums and evaluation."""
        self.sums.compile()
        self.compile_evaluation()


class _CompiledLater:
    """A jitted function of parameters and a batch, which evaluations call. It can be compiled ahead
    of time, once it is known to be needed.

    Args:
      function: the jitted function.
      params: the parameters that it will be called with, or their shapes.
      batches: shapes of the batches that it will be called with; of the evaluation the probe's,
        then the evaluations'.
    """

    def __init__(
        self, function: Any, params: Any, batches: Sequence[dict[str, jax.ShapeDtypeStruct]]
    ) -> None:
        self._function, self._params = function, params
        self._batches = {batch["tokens"].shape: batch for batch in batches}
        self._probe = batches[0]["tokens"].shape
        self._compiled: dict[tuple[int, ...], Any] = {}

    @property
    def has_probe(self) -> bool:
        """Whether it is compiled for the probe."""
        return self._probe in self._compiled

    def compile_probe(self) -> None:
        """Compile it for the probe; may run in a thread while training continues."""
        self._compile(self._probe)

    def compile(self) -> None:
        """Compile it for all batch shapes; may run in a thread while training continues."""
        for shape in self._batches:
            self._compile(shape)

    def _compile(self, shape: tuple[int, ...]) -> None:
        if shape not in self._compiled:
            batch = self._batches[shape]
            self._compiled[shape] = self._function.lower(self._params, batch).compile()

    def __call__(self, params: Any, batch: dict[str, Any]) -> Any:
        return self._compiled.get(batch["tokens"].shape, self._function)(params, batch)


def layout_of(program: Program) -> Layout:
    """The layout of a program's state."""
    return Layout(leaves=program.abstract_state(), slots=program.shapes.slots)


def compile_plan(
    config: Config,
    plan: Plan,
    *,
    devices: Sequence[Device] | None = None,
    bytes_per_device: int | None = None,
    rest: bool = True,
) -> Executable:
    """Compile steps, evaluation and checksums of `config` under `plan`. Runs nothing on a device.

    Args:
      config: the config with the batches to compile for.
      plan: the plan to compile.
      devices: the devices that the plan uses; None: all.
      bytes_per_device: bytes that JAX may use on each device; None: unknown.
      rest: compile evaluation and checksums now; otherwise they are compiled when first needed.
    Raises:
      PlanError: the plan is not legal, or a step needs more memory than there is.
    """
    started = time.perf_counter()
    plan.validate(
        config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
    )
    step = compile_step(build_program(config, plan, devices), bytes_per_device=bytes_per_device)
    step.check_memory()
    executable = executable_of(step)
    if rest:
        executable.compile_rest()
    return replace(executable, compile_s=time.perf_counter() - started)


def executable_of(step: CompiledStep) -> Executable:
    """The executable of a compiled step; evaluation and checksums are compiled when first
    needed.
    """
    program, layout = step.program, layout_of(step.program)
    state: TrainState = layout.leaves
    batches = [program.abstract_batch()]
    if program.config.eval_every:
        rows, seq_len = eval_rows(program.config, program.plan), program.config.eval_seq_len
        batches.append(program.abstract_batch(rows, seq_len))
    eval_step = _CompiledLater(program.eval_step, state.params, batches)
    next_tokens = program.next_tokens
    if rows := transcript_rows(program.config, program.plan):
        batch = program.abstract_batch(rows, program.config.eval_seq_len)
        next_tokens = _CompiledLater(next_tokens, state.params, [batch])
    return Executable(
        program=replace(
            program, train_step=step.train_step, eval_step=eval_step, next_tokens=next_tokens
        ),
        layout=layout,
        sums=ShardSums(layout),
        step_bytes=step.step_bytes,
        compile_s=step.compile_s,
    )


def batch_of(config: Config) -> BatchShape:
    """The shape of the batches that a config trains on."""
    return BatchShape(config.data.global_batch, config.seq_len)


class ExecutableCache:
    """A least-recently-used cache of executables. Threads may share it.

    Args:
      size: largest number of executables.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._cached: OrderedDict[tuple[Plan, BatchShape, tuple[Device, ...]], Executable] = (
            OrderedDict()
        )
        self._lock = threading.Lock()

    def put(self, executable: Executable) -> None:
        """Add an executable as the most recently used one."""
        key = executable.plan, batch_of(executable.program.config), executable.layout.devices
        with self._lock:
            self._cached[key] = executable
            self._cached.move_to_end(key)
            while len(self._cached) > self._size:
                self._cached.popitem(last=False)

    def get(self, batch: BatchShape, plan: Plan, devices: Sequence[Device]) -> Executable | None:
        """The executable of a plan; None: it is not in the cache."""
        return self._cached.get((plan, batch, tuple(devices)))

    def __len__(self) -> int:
        return len(self._cached)
