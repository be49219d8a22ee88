"""Measures one case of ours, or a matrix product alone. Prints a line of JSON.

run.py starts it as `python ours.py CASE`.
"""

import json
import re
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from cases import STEPS, WARMUP, Case, check_losses, read_case

from optimus_jax.config import Config, DataConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.control.executables import compile_plan
from optimus_jax.data.batch import HostBatch, synthetic_batch
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.models.flops import step_flops
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.search.assemble import plan_for

KERNELS = {"cudnn": r"__cudnn\$fmha", "triton": r"__triton", "cublas": r"__cublas\$"}
"""Kinds of kernels -> pattern of the names of their custom calls in the compiled step."""
PRODUCTS = 500
"""Matrix products in a row. They take most of a second, so that the power limit takes effect as in
training."""
DOCUMENT_BEGINS = 1 / 300
"""Probability that a document begins at a token."""


def config_of(case: Case) -> Config:
    """The config of a case, on one device."""
    return Config(
        model=model_preset(case.model),
        data=DataConfig(
            global_batch=case.batch, seq_len=case.seq_len, respect_documents=case.packed
        ),
    ).with_values(
        {
            "parallel.mesh": "data=1",
            "parallel.remat": case.remat,
            "parallel.microbatches": case.microbatches,
            **dict(entry.split("=", 1) for entry in case.settings),
        }
    )


def train(case: Case) -> dict:
    """Train on one device, and return the figures."""
    # first, because it limits how much memory of the GPU and the host may be used
    topology = discover()
    config = config_of(case)
    model = config.model
    plan = plan_for(config, AxisSizes.parse("data=1"), topology)
    # before the state exists, so that autotuning kernels does not compete with it for memory
    executable = compile_plan(config, plan, devices=jax.devices()[:1], rest=False)
    program, compiled = executable.program, executable.program.train_step
    state, batch = (
        program.init(jnp.int32(0)),
        put_batch(batch_of(config), program.batch_sharding, case.batch),
    )
    jax.block_until_ready(state)
    before_bytes = peak_bytes()

    def step() -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    times_s, first, last = timed(step)
    check_losses(float(first), float(last), model.vocab_size)
    text = compiled.as_text() or ""
    calls = {name: len(re.findall(pattern, text)) for name, pattern in KERNELS.items()}
    step_s, tokens = statistics.median(times_s), case.batch * case.seq_len
    return {
        "step_s": step_s,
        "spread_s": [min(times_s), max(times_s)],
        "tokens_per_s": tokens / step_s,
        "first_loss": float(first),
        "loss": float(last),
        "tflops": step_flops(model, num_sequences=case.batch, seq_len=case.seq_len) / step_s / 1e12,
        "compile_s": executable.compile_s,
        "peak_bytes": peak_bytes(),
        "peak_before_steps_bytes": before_bytes,
        "predicted_bytes": memory_of_run(config, plan).total,
        "compiled_bytes": executable.step_bytes,
        "attention": "cudnn" if calls["cudnn"] else "xla",
        "planned_attention": plan.attention,
        "custom_calls": calls,
        "layout": plan.describe(),
        "options": [(option.text, option.why, option.source) for option in program.options],
        **where(),
    }


def peak_bytes() -> int | None:
    """Peak memory of the device since the process started; None: it is unknown."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def where() -> dict:
    """The device and the versions that a figure was measured with."""
    device = jax.devices()[0]
    return {
        "version": (
            f"jax {jax.__version__}, jaxlib {version('jaxlib')},"
            f" {' '.join(device.client.platform_version.split())}"
        ),
        "device": device.device_kind,
    }


def batch_of(config: Config) -> HostBatch:
    """Random tokens. An example is one document, or, if documents are respected, several of 300
    tokens on average.
    """
    rows, seq_len = config.data.global_batch, config.seq_len
    batch = synthetic_batch(vocab_size=config.model.vocab_size, rows=rows, seq_len=seq_len, seed=0)
    if config.data.respect_documents:
        at = batch["positions"]
        begins = np.random.default_rng(1).random(at.shape) < DOCUMENT_BEGINS
        begins[:, 0] = True
        batch["segments"] = np.cumsum(begins, axis=1, dtype=np.int32) - 1
        batch["positions"] = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    return batch


def matmul(size: int) -> dict:
    """The speed of matrix products on this device.

    The operands are random, because zeros draw less power and are faster.
    """
    a, b = (
        jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2)
    )
    multiply = jax.jit(jnp.matmul)
    times_s, *_ = timed(lambda: multiply(a, b), steps=PRODUCTS)
    step_s = statistics.median(times_s)
    return {
        "step_s": step_s,
        "spread_s": [min(times_s), max(times_s)],
        "tflops": 2 * size**3 / step_s / 1e12,
        **where(),
    }


def timed(
    step: Callable[[], jax.Array], steps: int = STEPS
) -> tuple[list[float], jax.Array, jax.Array]:
    """Seconds of each step, the result of the first step, and that of the last.

    The next step is dispatched before the previous one has ended, as in training.
    """
    first = before = step()
    ends = []
    for _ in range(WARMUP + steps):
        after = step()
        before.block_until_ready()
        ends.append(time.perf_counter())
        before = after
    before.block_until_ready()
    return (
        [late - early for early, late in zip(ends[WARMUP - 1 : -1], ends[WARMUP:], strict=True)],
        first,
        before,
    )


if __name__ == "__main__":
    case, _ = read_case()
    print(json.dumps(matmul(case.batch) if case.who == "matmul" else train(case)))
