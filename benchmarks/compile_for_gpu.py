"""Compile a training step for H100s that are not there: memory per device, and how stages send.

    pip install jax-cuda12-pjrt jax-cuda12-plugin nvidia-cuda-nvcc-cu12
    python benchmarks/compile_for_gpu.py --model llama3-8b --devices 8 --mesh pipe=4,tensor=2 --microbatches 8

Prints one JSON object. The compiler lays out memory and orders collectives as on the device, but nothing
runs: there is no time in it. It knows no host boundaries and never reports that memory is short.
Attention is XLA's, since cuDNN's asks a library that is not there for its version.
"""

import argparse
import json
import os
import re
import time
from collections import Counter
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: the CUDA plugin must not look for a device

TARGET = Path(__file__).with_name("h100_sxm.textproto")
DEVICES_PER_HOST = 8
DEVICE_BYTES = 84942979072


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--mesh", default="pipe=4,tensor=2")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="examples of a microbatch on a device")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting")
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from optimus_jax.config import Config, DataConfig
    from optimus_jax.mesh.axes import AxisSizes
    from optimus_jax.mesh.build import build_mesh
    from optimus_jax.mesh.topology import Topology
    from optimus_jax.models.shapes import planned_shapes
    from optimus_jax.planning.memory import estimate_memory
    from optimus_jax.planning.search import plan_for
    from optimus_jax.presets import model_preset
    from optimus_jax.training.step import build_program

    hosts = max(1, args.devices // DEVICES_PER_HOST)
    described = topologies.get_topology_desc("plan", "cuda", target_config=TARGET.read_text(), topology=f"1x{hosts}x{args.devices // hosts}")
    axes, model = AxisSizes.parse(args.mesh), model_preset(args.model)
    batch = args.microbatches * args.rows * axes.data * axes.fsdp
    config = Config(model=model, data=DataConfig(seq_len=args.seq_len, global_batch=batch)).with_values({
        "parallel.mesh": args.mesh, "parallel.microbatches": args.microbatches, "precision.compute": "bf16", "parallel.attention": "xla",
        **dict(entry.split("=", 1) for entry in args.set)})
    topology = Topology(num_devices=args.devices, num_processes=hosts, platform="cuda", device_kind="NVIDIA H100 80GB HBM3", bytes_per_device=DEVICE_BYTES)
    plan = plan_for(config, axes, topology)
    plan.validate(model, global_batch=batch)
    program = build_program(config, planned_shapes(model, plan), plan, build_mesh(plan, list(described.devices)))
    state = jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                         jax.eval_shape(program.init, jnp.int32(0)), program.state_shardings)
    length = (config.seq_len,)
    rows = {"tokens": length, "targets": length, "positions": length, "segments": length, "loss_mask": length, "examples": ()}
    arrays = {name: jax.ShapeDtypeStruct((batch, *shape), jnp.bool_ if name == "loss_mask" else jnp.int32, sharding=program.batch_sharding)
              for name, shape in rows.items()}
    started = time.perf_counter()
    compiled = program.train_step.lower(state, arrays).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    print(json.dumps({
        "plan": plan.describe(), "model": model.name, "rows_per_microbatch": args.rows, "seq_len": config.seq_len,
        "compile_s": round(time.perf_counter() - started, 1), "jax": jax.__version__,
        "state_gib": round(memory.argument_size_in_bytes / 2**30, 2), "temp_gib": round(memory.temp_size_in_bytes / 2**30, 2),
        "estimate_gib": round(estimate_memory(model, plan, seq_len=config.seq_len, global_batch=batch).total / 2**30, 2),
        "device_gib": round(DEVICE_BYTES / 2**30, 2),
        "collectives": dict(Counter(re.findall(r" ((?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?)\(", text))),
        "work_under_sends": work_under_sends(text)}, indent=1))


def work_under_sends(text: str) -> list[int]:
    """For every send between stages, in the order of the program: instructions that compute between its start and its end."""
    counts, lines = [], text.splitlines()
    for index, line in enumerate(lines):
        if start := re.search(r"%(collective-permute-start[\w.]*) = ", line):
            end = next(i for i in range(index, len(lines)) if f"collective-permute-done(%{start[1]})" in lines[i])
            counts.append(sum(bool(re.search(r" (fusion|custom-call|while|dot)\(", between)) for between in lines[index + 1: end]))
    return counts


if __name__ == "__main__":
    main()
