"""CPU-seconds of a training step on virtual devices.

    python benchmarks/cpu_step.py                       every mesh, a table
    python benchmarks/cpu_step.py --mesh data=8         one mesh, a JSON line

The first row is the step's matrix products alone, which shows how fast the machine is at that
moment. With `--peer`, a row follows for Hugging Face's GPT-2 of the same sizes under PyTorch (extra
`huggingface`). Cores differ and are shared, so compare only ratios within one call.

CPU-seconds of the whole process per step are steady; wall time on shared cores is not. Each mesh
runs in its own process, whose peak memory is reported. Tokens attend across documents, because the
other frameworks' models know no documents.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

MESHES = (
    "data=1",
    "data=8",
    "fsdp=8",
    "data=2,tensor=4",
    "data=2,fsdp=2,tensor=2",
    "pipe=4,data=2",
    "pipe=4,data=2",
)
MICROBATCHES = (1, 1, 1, 1, 1, 4, 8)
"""Number of microbatches for each of MESHES."""
PEER, MATMULS = "huggingface", "matmuls"
STEPS, WARMUP = 10, 2


def measure(mesh: str, settings: dict[str, str]) -> dict:
    """Run STEPS steps under one mesh in this process."""
    started = time.perf_counter()
    from optimus_jax.config.axes import AxisSizes
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.system.huge_pages import restart_with_huge_pages

    restart_with_huge_pages()
    axes = AxisSizes.parse(mesh)
    use_cpu_devices(axes.num_devices)
    import jax.numpy as jnp

    from optimus_jax.config import Config, DataConfig, ModelConfig
    from optimus_jax.data.batch import synthetic_batch
    from optimus_jax.mesh.build import discover
    from optimus_jax.mesh.sharding import put_batch
    from optimus_jax.planning.ahead_of_time.compiled_step import compile_step
    from optimus_jax.planning.search.assemble import plan_for
    from optimus_jax.training.step import build_program

    model = ModelConfig(
        name="bench",
        vocab_size=8192,
        num_layers=4,
        embed_dim=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        mlp_dim=1024,
        max_length=256,
    )
    config = Config(
        model=model, data=DataConfig(global_batch=16, respect_documents=False)
    ).with_values({"parallel.mesh": mesh, **settings})
    plan = plan_for(config, axes, discover())
    plan.validate(model, global_batch=16)
    program = build_program(config, plan)
    state = program.init(jnp.int32(0))
    batch = put_batch(
        synthetic_batch(vocab_size=model.vocab_size, rows=16, seq_len=256, seed=0),
        program.batch_sharding,
        16,
    )
    step = compile_step(program).train_step

    def one_step() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return {"mesh": mesh, "zero": plan.zero, **timed(one_step, started)}


def measure_huggingface() -> dict:
    """Run the same work in PyTorch: GPT2LMHeadModel, AdamW, clipping; one process, all cores."""
    started = time.perf_counter()
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8192,
            n_positions=256,
            n_embd=256,
            n_layer=4,
            n_head=4,
            n_inner=1024,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    tokens = torch.randint(0, 8192, (16, 257))

    def step() -> float:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return {"mesh": "PyTorch, HF GPT-2", "zero": 0, **timed(step, started)}


def measure_matmuls() -> dict:
    """Run only the step's matrix products: forward and both gradients.

    No framework can be much faster than this.
    """
    started = time.perf_counter()
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    tokens, width, layers = 16 * 256, 256, 4
    sizes = [
        (width, 3 * width, layers),
        (width, width, layers),
        (width, 4 * width, layers),
        (4 * width, width, layers),
        (width, 8192, 1),
    ]
    products = []
    for inner, outer, times in sizes:
        x, w, g = jnp.ones((tokens, inner)), jnp.ones((inner, outer)), jnp.ones((tokens, outer))
        products += [(a, b, times) for a, b in ((x, w), (g, w.T), (x.T, g))]
    heads, scores = jnp.ones((64, 256, 64)), jnp.ones((64, 256, 256))
    products += [(heads, heads.swapaxes(1, 2), 2 * layers), (scores, heads, 4 * layers)]
    multiply = jax.jit(jnp.matmul)

    def step() -> float:
        for a, b, times in products:
            for _ in range(times):
                multiply(a, b).block_until_ready()
        return 0.0

    return {"mesh": "matmuls alone", "zero": 0, **timed(step, started)}


def timed(step: Callable[[], float], started: float) -> dict:
    """Medians over STEPS steps that follow WARMUP steps."""
    cpu, wall, first_loss_s = [], [], 0.0
    for number in range(WARMUP + STEPS):
        cpu_before, wall_before = time.process_time(), time.perf_counter()
        loss = step()
        first_loss_s = first_loss_s or time.perf_counter() - started
        if number >= WARMUP:
            cpu.append(time.process_time() - cpu_before)
            wall.append(time.perf_counter() - wall_before)
    return {
        "cpu_s_per_step": statistics.median(cpu),
        "cpu_s_least": min(cpu),
        "wall_s_per_step": statistics.median(wall),
        "first_loss_s": first_loss_s,
        "loss": loss,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", help="measure only this mesh, in this process")
    parser.add_argument(
        "--peer", action="store_true", help="also measure Hugging Face's GPT-2 under PyTorch"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting, such as parallel.zero=1",
    )
    args = parser.parse_args()
    settings = dict(entry.split("=", 1) for entry in args.set)
    if args.mesh:
        row = {PEER: measure_huggingface, MATMULS: measure_matmuls}.get(
            args.mesh, lambda: measure(args.mesh, settings)
        )()
        print(json.dumps(row))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    print(
        f"{'mesh':24} {'CPU s/step':>10} {'least':>7} {'wall s/step':>11} {'first loss s':>12}"
        f" {'peak GB':>8}"
    )
    rows = [
        (MATMULS, 1),
        *([(PEER, 1)] if args.peer else []),
        *zip(MESHES, MICROBATCHES, strict=True),
    ]
    for mesh, microbatches in rows:
        changes = [f"parallel.microbatches={microbatches}", *args.set]
        command = [
            sys.executable,
            __file__,
            "--mesh",
            mesh,
            *(word for entry in changes for word in ("--set", entry)),
        ]
        row = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[
                -1
            ]
        )
        name = row["mesh"] + (f" m={microbatches}" if microbatches > 1 else "")
        print(
            f"{name:24} {row['cpu_s_per_step']:10.3f} {row['cpu_s_least']:7.3f}"
            f" {row['wall_s_per_step']:11.3f} {row['first_loss_s']:12.1f}"
            f" {row['peak_rss_gb']:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
