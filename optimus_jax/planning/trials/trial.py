"""Time a few steps of a run's own program under a plan, on synthetic tokens."""

import statistics
import time
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from optimus_jax.cluster.distributed import gather_from_all
from optimus_jax.config import Config
from optimus_jax.data.batch import synthetic_batch
from optimus_jax.mesh.sharding import local_rows
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import CompiledStep, compile_step
from optimus_jax.training.step import build_program

WARM_UP = 1
"""Steps before the timed ones, which map buffers and fill caches."""


@dataclass(frozen=True, kw_only=True)
class PlanTrial:
    """Measured times of a plan's steps."""

    plan: Plan
    step_time_s: float
    """Median seconds per step."""
    shortest_s: float
    """Seconds of the shortest step, the one least disturbed by other work on the machine."""
    cpu_s: float
    """Fewest CPU seconds that this process spent in a step: steadier than wall time on shared
    cores."""
    compile_s: float
    """Seconds for tracing and compiling."""
    step_bytes: int
    """Bytes that the compiled step needs per device."""
    step: CompiledStep | None = field(default=None, compare=False, repr=False)
    """The compiled step, which a run that continues with this plan reuses; None if it was not
    kept."""


def run_trial(
    config: Config, plan: Plan, *, num_steps: int, bytes_per_device: int | None = None
) -> PlanTrial:
    """Compile the training step of `config` under `plan`, and time `num_steps` steps on all
    devices.

    Raises:
      PlanError: the compiled step needs more than `bytes_per_device` on some process. Raised before
        anything is allocated.
    """
    program = build_program(config, plan)
    step = compile_step(program, bytes_per_device=bytes_per_device)
    if not all(gather_from_all(step.allocated.fits is not False)):
        raise step.does_not_fit()
    rows = local_rows(program.batch_sharding, config.data.global_batch)
    batch = program.put_batch(
        synthetic_batch(
            vocab_size=config.model.vocab_size,
            rows=len(rows),
            seq_len=config.seq_len,
            seed=config.seed,
            examples=rows,
            patch_values=config.model.patch_values,
            frames=config.model.frames,
        )
    )
    state, wall, cpu = program.init(jnp.int32(config.seed)), [], []
    for _ in range(WARM_UP + num_steps):
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        state, metrics = step.train_step(state, batch)
        jax.block_until_ready(metrics)
        wall.append(time.perf_counter() - wall_before)
        cpu.append(time.process_time() - cpu_before)
    return PlanTrial(
        plan=plan,
        step_time_s=statistics.median(wall[WARM_UP:]),
        shortest_s=min(wall[WARM_UP:]),
        cpu_s=min(cpu[WARM_UP:]),
        compile_s=step.compile_s,
        step_bytes=step.step_bytes,
        step=step,
    )
