"""A few steps under a plan, timed: the same program as in a run, on made-up tokens."""

import statistics
import time
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from optimus_jax.cluster.distributed import gather_from_all
from optimus_jax.config import Config
from optimus_jax.data.batch import synthetic_batch
from optimus_jax.mesh.sharding import local_rows, put_batch
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep, compile_step
from optimus_jax.training.step import build_program

WARM_UP = 1
"""Steps before the clock counts: buffers are mapped, caches filled."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a plan's steps took; all measured."""

    plan: Plan
    step_time_s: float
    """Median of the steps."""
    shortest_s: float
    """The shortest of them: what other work on the machine has disturbed least."""
    cpu_s: float
    """CPU-seconds of this process for a step, least of all: steadier than time where cores are
    shared."""
    compile_s: float
    """Tracing and compiling."""
    step_bytes: int
    """That the compiled step needs on a device."""
    step: CompiledStep | None = field(default=None, compare=False, repr=False)
    """What was compiled, for a run that goes on with this plan; None: nothing was kept."""


def run_trial(
    config: Config, plan: Plan, *, num_steps: int, bytes_per_device: int | None = None
) -> Trial:
    """Compile the training step of `config` under `plan`, and time `num_steps` of them on all
    devices.

    Raises:
      PlanError: the compiled step needs more than `bytes_per_device`, here or in another process;
        nothing was allocated then.
    """
    program = build_program(config, plan)
    step = compile_step(program, bytes_per_device=bytes_per_device)
    if not all(gather_from_all(step.allocated.fits is not False)):
        raise step.does_not_fit()
    rows = local_rows(program.batch_sharding, config.data.global_batch)
    batch = put_batch(
        synthetic_batch(
            vocab_size=config.model.vocab_size,
            rows=len(rows),
            seq_len=config.seq_len,
            seed=config.seed,
            examples=rows,
        ),
        program.batch_sharding,
        config.data.global_batch,
    )
    state, wall, cpu = program.init(jnp.int32(config.seed)), [], []
    for _ in range(WARM_UP + num_steps):
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        state, metrics = step.train_step(state, batch)
        jax.block_until_ready(metrics)
        wall.append(time.perf_counter() - wall_before)
        cpu.append(time.process_time() - cpu_before)
    return Trial(
        plan=plan,
        step_time_s=statistics.median(wall[WARM_UP:]),
        shortest_s=min(wall[WARM_UP:]),
        cpu_s=min(cpu[WARM_UP:]),
        compile_s=step.compile_s,
        step_bytes=step.step_bytes,
        step=step,
    )
