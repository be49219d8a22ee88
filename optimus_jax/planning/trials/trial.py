"""A few steps under a plan, timed: the same program as in a run, on made-up tokens."""

import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.cluster.distributed import gather_from_all
from optimus_jax.config import Config
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.build import build_mesh
from optimus_jax.mesh.sharding import local_rows, put_batch
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_report import check_executable
from optimus_jax.planning.search.explain import gib
from optimus_jax.training.state import planned_shapes
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


def run_trial(
    config: Config, plan: Plan, *, num_steps: int, bytes_per_device: int | None = None
) -> Trial:
    """Compile the training step of `config` under `plan`, and time `num_steps` of them on all
    devices.

    Raises:
      PlanError: the compiled step needs more than `bytes_per_device`, here or in another process;
        nothing was allocated then.
    """
    started = time.perf_counter()
    program = build_program(config, planned_shapes(config.model, plan), plan, build_mesh(plan.axes))
    batch = put_batch(
        _made_up_batch(config, local_rows(program.batch_sharding, config.data.global_batch)),
        program.batch_sharding,
        config.data.global_batch,
    )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(program.init, jnp.int32(0)),
        program.state_shardings,
    )
    step = program.train_step.lower(abstract, batch).compile()
    compile_s = time.perf_counter() - started
    allocated = check_executable(step.memory_analysis(), bytes_per_device)
    if not all(gather_from_all(allocated.fits is not False)):
        raise PlanError(
            explain(
                f"the compiled step needs {gib(allocated.total_bytes)} per device,"
                f" {gib(bytes_per_device or 0)} are there",
                given=plan.describe(),
                do="leave this plan out",
            )
        )
    state, wall, cpu = program.init(jnp.int32(config.seed)), [], []
    for _ in range(WARM_UP + num_steps):
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        wall.append(time.perf_counter() - wall_before)
        cpu.append(time.process_time() - cpu_before)
    return Trial(
        plan=plan,
        step_time_s=statistics.median(wall[WARM_UP:]),
        shortest_s=min(wall[WARM_UP:]),
        cpu_s=min(cpu[WARM_UP:]),
        compile_s=compile_s,
        step_bytes=allocated.total_bytes,
    )


def _made_up_batch(config: Config, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Random tokens, one document per example."""
    size, length = len(rows), config.seq_len
    tokens = np.random.default_rng(config.seed).integers(
        0, config.model.vocab_size, (size, length + 1), dtype=np.int32
    )
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(length, dtype=np.int32), (size, 1)),
        "segments": np.zeros((size, length), np.int32),
        "loss_mask": np.ones((size, length), bool),
        "examples": rows.astype(np.int32),
    }
