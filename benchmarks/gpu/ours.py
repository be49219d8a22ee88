"""One case of ours, or the ceiling: python ours.py CASE, which prints a line of JSON. Started by run.py."""

import json
import re
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from cases import STEPS, WARMUP, Case, read_case

from optimus_jax.config import Config, DataConfig
from optimus_jax.mesh.axes import AxisSizes
from optimus_jax.mesh.build import build_mesh, discover
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.models.flops import step_flops
from optimus_jax.models.shapes import planned_shapes
from optimus_jax.planning.assemble import plan_for
from optimus_jax.planning.compile_report import check_executable
from optimus_jax.planning.memory import estimate_memory
from optimus_jax.presets import model_preset
from optimus_jax.training.step import build_program

KERNELS = {"cudnn": r"__cudnn\$fmha", "triton": r"__triton", "cublas": r"__cublas\$"}
"""Of custom calls in the compiled step."""


def config_of(case: Case, compute: str) -> Config:
    """A case as a run's config, on one device."""
    return Config(model=model_preset(case.model), data=DataConfig(global_batch=case.batch, seq_len=case.seq_len, respect_documents=False)).with_values({
        "parallel.mesh": "data=1", "parallel.remat": case.remat, "parallel.microbatches": case.microbatches, "precision.compute": compute,
        **dict(entry.split("=", 1) for entry in case.settings)})


def train(case: Case) -> dict:
    """Steps of one plan on one device."""
    config = config_of(case, "bf16" if jax.default_backend() == "gpu" else "f32")
    model = config.model
    plan = plan_for(config, AxisSizes.parse("data=1"), discover())
    plan.validate(model, global_batch=case.batch)
    program = build_program(config, planned_shapes(model, plan), plan, build_mesh(plan, jax.devices()[:1]))
    state, rows = program.init(jnp.int32(0)), batch_of(model.vocab_size, case)
    batch = put_batch(rows, program.batch_sharding, case.batch)
    started = time.perf_counter()
    compiled = program.train_step.lower(state, batch).compile()
    compile_s = time.perf_counter() - started

    def step() -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    times_s, loss = timed(step)
    text, stats = compiled.as_text() or "", jax.devices()[0].memory_stats() or {}
    step_s, tokens = statistics.median(times_s), case.batch * case.seq_len
    return {
        "step_s": step_s, "spread_s": [min(times_s), max(times_s)], "tokens_per_s": tokens / step_s, "loss": float(loss),
        "tflops": step_flops(model, num_sequences=case.batch, seq_len=case.seq_len) / step_s / 1e12, "compile_s": compile_s,
        "peak_bytes": stats.get("peak_bytes_in_use"), "predicted_bytes": estimate_memory(model, plan, seq_len=case.seq_len, global_batch=case.batch).total,
        "compiled_bytes": check_executable(compiled.memory_analysis(), None).total_bytes, "attention": plan.attention,
        "custom_calls": {name: len(re.findall(pattern, text)) for name, pattern in KERNELS.items()}, "layout": plan.describe(),
        "version": f"jax {jax.__version__}", "device": jax.devices()[0].device_kind}


def batch_of(vocab_size: int, case: Case) -> dict[str, np.ndarray]:
    """Random tokens, one document an example."""
    shape = (case.batch, case.seq_len)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (case.batch, case.seq_len + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": np.broadcast_to(np.arange(case.seq_len, dtype=np.int32), shape),
            "segments": np.zeros(shape, np.int32), "loss_mask": np.ones(shape, bool), "examples": np.arange(case.batch, dtype=np.int32)}


def matmul(size: int) -> dict:
    """What products of matrices reach here, on random numbers: zeros draw less power and are faster."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2))
    multiply = jax.jit(jnp.matmul)
    times_s, _ = timed(lambda: multiply(a, b))
    step_s = statistics.median(times_s)
    return {"step_s": step_s, "spread_s": [min(times_s), max(times_s)], "tflops": 2 * size**3 / step_s / 1e12, "version": f"jax {jax.__version__}",
            "device": jax.devices()[0].device_kind}


def timed(step: Callable[[], jax.Array]) -> tuple[list[float], jax.Array]:
    """Seconds of each step, while the next is already asked for, as in training."""
    ends, before = [], step()
    for _ in range(WARMUP + STEPS):
        after = step()
        before.block_until_ready()
        ends.append(time.perf_counter())
        before = after
    before.block_until_ready()
    return [late - early for early, late in zip(ends[WARMUP - 1:-1], ends[WARMUP:], strict=True)], before


if __name__ == "__main__":
    case = read_case()
    print(json.dumps(matmul(case.batch) if case.who == "matmul" else train(case)))
