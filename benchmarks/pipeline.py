"""Cost of pipeline schedules: memory of the compiled step, work per step, and time compared with
the ideal.

    python benchmarks/pipeline.py memory       bytes of the compiled step by schedule and
                                               number of microbatches
    python benchmarks/pipeline.py ticks        CPU time of a step, over that of useful work
    python benchmarks/pipeline.py processes    pipe=2 on two processes pinned to a core each:
                                               step time compared with (m + 1) / m

Virtual devices share the cores of one machine, so `ticks` shows work, not latency. `processes`
measures wall time with a core for each stage.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

ROWS_PER_MICROBATCH = 2
SEQ_LEN = 256
NUM_LAYERS = 8
VOCAB_SIZE = 8192
STAGES = 4
SCHEDULES = (
    ("gpipe", "keep"),
    ("gpipe", "recompute"),
    ("1f1b", "keep"),
    ("1f1b", "recompute"),
    ("interleaved", "keep"),
    ("interleaved", "recompute"),
)


def built(mesh: str, microbatches: int, settings: dict):
    """The program, and the abstract state and batch that it is compiled for."""
    import jax

    from optimus_jax.config import Config, DataConfig, ModelConfig
    from optimus_jax.config.axes import AxisSizes
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.search.assemble import plan_for
    from optimus_jax.training.step import build_program

    axes = AxisSizes.parse(mesh)
    batch = ROWS_PER_MICROBATCH * microbatches * axes.data
    model = ModelConfig(
        name="bench",
        vocab_size=VOCAB_SIZE,
        num_layers=NUM_LAYERS,
        embed_dim=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        mlp_dim=1024,
        max_length=SEQ_LEN,
    )
    config = Config(
        model=model, data=DataConfig(global_batch=batch, respect_documents=False)
    ).with_values({"parallel.mesh": mesh, "parallel.microbatches": microbatches, **settings})
    plan = plan_for(config, axes, discover())
    plan.validate(model, global_batch=batch)
    program = build_program(config, plan, jax.devices()[: plan.num_devices])
    return program, program.abstract_state(), program.abstract_batch()


def memory(microbatches: tuple[int, ...]) -> None:
    """Print temporary memory per device and the number of buffer slots, by schedule."""
    import jax.numpy as jnp

    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.pipeline.buffers import Buffers

    use_cpu_devices(STAGES)
    hidden_mb = ROWS_PER_MICROBATCH * SEQ_LEN * 256 * jnp.float32(0).nbytes / 1e6
    print(
        f"pipe={STAGES}, {NUM_LAYERS} layers of width 256, microbatches of {ROWS_PER_MICROBATCH} x"
        f" {SEQ_LEN} tokens, f32; one stage input {hidden_mb:.2f} MB; MB per device"
    )
    print(
        f"{'schedule':24} {'m':>4} {'temp':>8}   slots: inputs residuals cotangents   max. in"
        " flight"
    )
    for schedule, residuals in SCHEDULES:
        for count in microbatches:
            program, state, batch = built(
                f"pipe={STAGES}",
                count,
                {"parallel.schedule": schedule, "parallel.stage_residuals": residuals},
            )
            # LLVM's optimisation level does not affect layouts and buffers.
            compiled = program.train_step.lower(state, batch).compile(
                {"xla_backend_optimization_level": 0}
            )
            table = program.plan.schedule()
            buffers = Buffers.of(table, keep_residuals=residuals == "keep")
            print(
                f"{schedule + ' ' + residuals:24} {count:4}"
                f" {compiled.memory_analysis().temp_size_in_bytes / 1e6:8.2f}  "
                f" {buffers.num_inputs:13} {buffers.num_residuals:9} {buffers.num_cotangents:10}  "
                f" {int(table.in_flight().max()):14}",
                flush=True,
            )


def cpu_seconds_per_step(program, batch_shapes: dict, *, steps: int = 6) -> tuple[float, float]:
    """Minimum CPU-seconds and minimum wall seconds of a step of this process."""
    import jax
    import jax.numpy as jnp

    from optimus_jax.data.batch import synthetic_batch
    from optimus_jax.mesh.sharding import local_rows, put_batch
    from optimus_jax.planning.ahead_of_time.compiled_step import compile_step

    state = program.init(jnp.int32(0))
    size = batch_shapes["tokens"].shape[0]
    rows = local_rows(program.batch_sharding, size)
    values = synthetic_batch(vocab_size=VOCAB_SIZE, rows=size, seq_len=SEQ_LEN, seed=0)
    batch = put_batch(
        {name: value[rows] for name, value in values.items()}, program.batch_sharding, size
    )
    step = compile_step(program).train_step
    cpu, wall = [], []
    for _ in range(steps + 2):
        cpu_before, wall_before = time.process_time(), time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        cpu.append(time.process_time() - cpu_before)
        wall.append(time.perf_counter() - wall_before)
    return min(cpu[2:]), min(wall[2:])


def ticks(microbatches: tuple[int, ...]) -> None:
    """Print the CPU time of a step by schedule, beside that of the same model on one device."""
    from optimus_jax.devices.cpu import use_cpu_devices

    use_cpu_devices(STAGES)
    one, _, shapes = built("data=1", 1, {})
    per_microbatch_s = cpu_seconds_per_step(one, shapes)[0]
    two, _, shapes = built("data=1", 2, {})
    per_microbatch_s = cpu_seconds_per_step(two, shapes)[0] - per_microbatch_s
    print(
        f"one device: each further microbatch of {ROWS_PER_MICROBATCH} x {SEQ_LEN} tokens takes"
        f" {per_microbatch_s:.3f} CPU-s"
    )
    print(
        f"{'schedule':24} {'m':>4} {'CPU-s/step':>10} {'useful':>8} {'idle slots':>10}"
        f" {'over useful':>11}"
    )
    for schedule, residuals in (
        ("gpipe", "keep"),
        ("1f1b", "keep"),
        ("1f1b", "recompute"),
        ("interleaved", "keep"),
    ):
        for count in microbatches:
            program, _, shapes = built(
                f"pipe={STAGES}",
                count,
                {"parallel.schedule": schedule, "parallel.stage_residuals": residuals},
            )
            cpu_s, _ = cpu_seconds_per_step(program, shapes)
            idle = program.plan.schedule().idle_fraction
            print(
                f"{schedule + ' ' + residuals:24} {count:4} {cpu_s:10.3f}"
                f" {count * per_microbatch_s:8.3f} {idle:10.3f}"
                f" {cpu_s / (count * per_microbatch_s):11.2f}",
                flush=True,
            )


def processes(microbatches: tuple[int, ...]) -> None:
    """Print the step time of two processes with a core each.

    Ideally the fill and drain of two stages add the time of one microbatch. That time is the slope
    of a line through all step times.
    """
    times = {}
    for count in microbatches:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        workers = [
            subprocess.Popen(
                [
                    "taskset",
                    "-c",
                    str(number),
                    sys.executable,
                    __file__,
                    "worker",
                    "--microbatches",
                    str(count),
                    "--process-id",
                    str(number),
                    "--port",
                    str(port),
                ],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for number in range(2)
        ]
        times[count] = max(
            json.loads(worker.communicate()[0].splitlines()[-1])["wall_s"] for worker in workers
        )
    per_microbatch_s = statistics.linear_regression(list(times), list(times.values())).slope
    print(
        f"pipe=2, a process and a core for each stage; a microbatch adds {per_microbatch_s:.4f} s"
    )
    print(
        f"{'m':>4} {'s/step':>8} {'s per microbatch':>16} {'(m+1)/m':>8} {'measured / ideal':>16}"
    )
    for count, time_s in times.items():
        print(
            f"{count:4} {time_s:8.3f} {time_s / count:16.4f} {(count + 1) / count:8.3f}"
            f" {time_s / (per_microbatch_s * (count + 1)):16.3f}"
        )


def worker(count: int, process_id: int, port: int) -> None:
    """Run one of the two processes."""
    from optimus_jax.devices.cpu import use_cpu_devices

    use_cpu_devices(1)
    import jax

    jax.distributed.initialize(f"localhost:{port}", 2, process_id)
    program, _, shapes = built("pipe=2", count, {})
    _, wall_s = cpu_seconds_per_step(program, shapes)
    print(json.dumps({"wall_s": wall_s}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("memory", "ticks", "processes", "worker"))
    parser.add_argument(
        "--microbatches", type=int, nargs="+", help="numbers of microbatches to try"
    )
    parser.add_argument("--process-id", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    defaults: dict[str, tuple[Callable, tuple[int, ...]]] = {
        "memory": (memory, (4, 8, 16, 64)),
        "ticks": (ticks, (4, 16)),
        "processes": (processes, (1, 2, 4, 8, 16)),
    }
    if args.what == "worker":
        worker(args.microbatches[0], args.process_id, args.port)
        return
    function, counts = defaults[args.what]
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    function(tuple(args.microbatches or counts))


if __name__ == "__main__":
    main()
