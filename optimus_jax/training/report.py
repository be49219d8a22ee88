"""What you actually got: the choices made for a run, shown before its first step."""

import math
from pathlib import Path
from typing import Any

import jax

from optimus_jax.config import Config
from optimus_jax.data.dataset import Data
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import ZERO_STAGES
from optimus_jax.training.display import Display
from optimus_jax.training.optimizer import peak_learning_rate
from optimus_jax.training.step import Program

LARGEST = 8
"""Tensors listed one by one."""


def start_report(display: Display, *, config: Config, topology: Topology, why: str, program: Program, data: Data,
                 compile_s: float, step_bytes: int, run_dir: Path) -> None:
    """Show the run's settings, given and derived, and how its tensors lie on the devices.

    Args:
      why: where the plan comes from.
      compile_s: seconds that the training step took to compile.
      step_bytes: bytes per device that the compiled step needs, its arguments included.
    """
    plan, shapes = program.plan, program.shapes
    padding = shapes.vocab_rows - config.model.vocab_size
    warmup, peak = config.warmup_steps, peak_learning_rate(config.optimizer, shapes.num_params)
    display.table("what you got", [
        ["run", str(run_dir)],
        ["model", f"{config.model.name}, {shapes.num_params:,} parameters" + (f" (+ {padding} rows of vocabulary padding)" if padding else "")],
        ["data", data.description],
        ["devices", str(topology)],
        ["mesh", f"{plan.axes} ({why})"],
        ["sharded over fsdp", f"zero={plan.zero}: {ZERO_STAGES[plan.zero]}" if plan.axes.fsdp > 1 else "nothing (fsdp=1)"],
        ["batch", f"{config.data.global_batch} sequences x {config.seq_len} tokens, {plan.microbatches} microbatch(es), "
                  f"documents {'kept apart' if config.data.respect_documents else 'not regarded'}"],
        ["attention kernel", plan.attention],
        ["precision", f"{plan.precision} compute, f32 master weights, moments and gradient sums"],
        ["remat", plan.remat],
        ["learning rate", f"{peak:g} peak, {config.optimizer.schedule}, {warmup} warm-up steps of {config.steps}"],
        ["step, compiled", f"{step_bytes / 2**20:,.0f} MiB per device, {compile_s:.1f} s to compile"],
        ["plan", plan.digest],
    ])
    display.table("largest tensors: shape, parameter / gradient while summed / moments on one device", _tensor_rows(program))


def _tensor_rows(program: Program) -> list[list[str]]:
    plan = program.plan
    opt_state: Any = program.state_shardings.opt_state
    leaves = jax.tree_util.tree_leaves_with_path(program.shapes.params)
    params = jax.tree.leaves(program.state_shardings.params)
    moments = jax.tree.leaves(opt_state[0].mu)
    rows = [[_path(path), "x".join(map(str, leaf.shape)), str(param.spec), _bytes(leaf, param),
             _bytes(leaf, moment if plan.zero >= 2 else param), _bytes(leaf, moment)]
            for (path, leaf), param, moment in zip(leaves, params, moments, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: -leaves[i][1].size)
    return [["tensor", "shape", "spec", "parameter", "gradient", "each moment"], *(rows[i] for i in order[:LARGEST])]


def _path(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _bytes(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> str:
    size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return f"{size / 2**20:,.2f} MiB"
