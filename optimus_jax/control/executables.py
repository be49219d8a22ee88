"""Everything compiled that a run needs under a plan, made before the run comes to it and kept for a
while after it has left.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from optimus_jax.config import Config
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep, compile_step
from optimus_jax.reshard.exchange import Device
from optimus_jax.reshard.reshard import Layout
from optimus_jax.reshard.shard_sums import ShardSums
from optimus_jax.training.evaluation import eval_rows
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program, build_program


@dataclass(frozen=True, kw_only=True)
class Executable:
    """A plan, compiled."""

    program: Program
    """Whose train_step and eval_step are executables."""
    layout: Layout
    """Of the state."""
    sums: ShardSums
    """Of such states."""
    step_bytes: int
    """That a step needs on a device."""
    compile_s: float
    """Tracing and compiling."""

    @property
    def plan(self) -> Plan:
        """That it runs."""
        return self.program.plan

    def compile_rest(self) -> None:
        """Compile what a switch from here needs and a run that stays does not: the evaluation and
        checksums.
        """
        if isinstance(self.program.eval_step, _CompiledLater):
            self.program.eval_step.compile()
        self.sums.compile()


class _CompiledLater:
    """The evaluation, jitted, which can be compiled before it is called, once it is clear that it
    will be.

    Args:
      function: jitted.
      params: what it will be called with.
      batches: the shapes of batches beside them: that of the probe, and that of evaluations.
    """

    def __init__(
        self, function: Any, params: Any, batches: Sequence[dict[str, jax.ShapeDtypeStruct]]
    ) -> None:
        self._function, self._params = function, params
        self._batches = {batch["tokens"].shape: batch for batch in batches}
        self._compiled: dict[tuple[int, ...], Any] = {}

    def compile(self) -> None:
        """May run in a thread while training goes on."""
        for shape, batch in self._batches.items():
            if shape not in self._compiled:
                self._compiled[shape] = self._function.lower(self._params, batch).compile()

    def __call__(self, params: Any, batch: dict[str, Any]) -> Any:
        return self._compiled.get(batch["tokens"].shape, self._function)(params, batch)


def layout_of(program: Program) -> Layout:
    """How a program's state lies."""
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
      devices: that the plan is for; None: all.
      bytes_per_device: that JAX may use on each; None: unknown.
      rest: whether evaluation and checksums are compiled now; otherwise they are when first needed.
    Raises:
      PlanError: the plan is not legal, or a step needs more memory than there is.
    """
    started = time.perf_counter()
    plan.validate(config.model, global_batch=config.data.global_batch)
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
    return Executable(
        program=replace(program, train_step=step.train_step, eval_step=eval_step),
        layout=layout,
        sums=ShardSums(layout),
        step_bytes=step.step_bytes,
        compile_s=step.compile_s,
    )


Batch = tuple[int, int]
"""Examples of a step, tokens of each."""


def batch_of(config: Config) -> Batch:
    """What a config trains on."""
    return config.data.global_batch, config.seq_len


class ExecutableCache:
    """Executables that were used or compiled last; the others are forgotten. Threads may share one.

    Args:
      size: how many are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[tuple[Plan, Batch, tuple[Device, ...]], Executable] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, executable: Executable) -> None:
        """Keep this one, as the last used."""
        key = executable.plan, batch_of(executable.program.config), executable.layout.devices
        with self._lock:
            self._kept[key] = executable
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def get(self, batch: Batch, plan: Plan, devices: Sequence[Device]) -> Executable | None:
        """The executable of a plan, if it is still there."""
        return self._kept.get((plan, batch, tuple(devices)))

    def __len__(self) -> int:
        return len(self._kept)
