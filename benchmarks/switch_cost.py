"""Cost of each phase of a plan switch, compared with memory bandwidth and with a restart.

    python benchmarks/switch_cost.py               # switches between four plans
    python benchmarks/switch_cost.py --restart     # also the first change by checkpoint and restart
    python benchmarks/switch_cost.py --moves       # only moves, five of each; nothing is trained

The state has 100M parameters on 8 virtual devices. The bound of a move is the number of bytes to
read from old shards and to write to new shards, over all devices, divided by the rate at which the
same devices copy the state to new memory in the same run (best of three). Leaves with the same
sharding under both plans count for nothing. Steps are timed alone, and again while the next plan is
compiled in the background.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEVICES = 8
REPEATS = 5
SEQ_LEN = 32
GLOBAL_BATCH = 8
JOURNEY = (
    {"parallel.mesh": "data=2,fsdp=4", "parallel.zero": 3},
    {"parallel.mesh": "data=2,tensor=4"},
    {
        "parallel.mesh": "pipe=2,data=2,tensor=2",
        "parallel.microbatches": 2,
        "parallel.layers_per_stage": (6, 5),
    },
    {"parallel.mesh": "fsdp=8", "parallel.zero": 3},
)


def config_of(settings: dict):
    from optimus_jax.config import Config, DataConfig, ModelConfig

    model = ModelConfig(
        name="bench-100m",
        vocab_size=32000,
        num_layers=11,
        embed_dim=768,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        mlp_dim=3072,
        max_length=SEQ_LEN,
    )
    return Config(
        model=model, data=DataConfig(seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH)
    ).with_values(settings)


def plan_of(config):
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.search.assemble import plan_for

    assert config.parallel.axes is not None, "all settings name a mesh"
    return plan_for(config, config.parallel.axes, discover())


def batch_for(program):
    """Random tokens, one document per example."""

    from optimus_jax.data.batch import synthetic_batch
    from optimus_jax.mesh.sharding import put_batch

    return put_batch(
        synthetic_batch(
            vocab_size=program.config.model.vocab_size,
            rows=GLOBAL_BATCH,
            seq_len=SEQ_LEN,
            seed=0,
        ),
        program.batch_sharding,
        GLOBAL_BATCH,
    )


def stepped(executable, state):
    """The state after a step, and the seconds of the step."""
    import jax

    batch = batch_for(executable.program)
    started = time.perf_counter()
    state, metrics = executable.program.train_step(state, batch)
    jax.block_until_ready((state, metrics))
    return state, time.perf_counter() - started


def copy_rate(state) -> tuple[float, float]:
    """Bytes read and written per second, and per CPU-second, while every device copies its shards
    to new memory; best of three.
    """
    import jax
    import jax.numpy as jnp

    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
    best_s = best_cpu_s = math.inf
    for _ in range(3):
        started, cpu_started = time.perf_counter(), time.process_time()
        copies = [jax.block_until_ready(jnp.copy(leaf)) for leaf in leaves]
        best_s, best_cpu_s = (
            min(best_s, time.perf_counter() - started),
            min(best_cpu_s, time.process_time() - cpu_started),
        )
        del copies
    num_bytes = 2 * sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return num_bytes / best_s, num_bytes / best_cpu_s


def necessary_bytes(move) -> int:
    """Bytes that a move must read and write, over all devices."""
    return DEVICES * sum(
        (math.prod(exchange.old) + math.prod(exchange.new)) * leaf.dtype.itemsize
        for path, leaf in move.source.named.items()
        if not (exchange := move.exchange(path)).is_identity
    )


def phases() -> None:
    """Switch through the plans of JOURNEY, and print the cost of every switch."""
    import jax.numpy as jnp

    from optimus_jax.config import ControlConfig
    from optimus_jax.control.executables import compile_plan
    from optimus_jax.control.journal import Journal
    from optimus_jax.control.switch import Switcher
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.run_directory.directory import RunDirectory

    use_cpu_devices(DEVICES)
    config = config_of(JOURNEY[0])
    running = compile_plan(config, plan_of(config))
    state = running.program.init(jnp.int32(0))
    num_params = running.program.shapes.num_params
    print(
        f"{num_params / 1e6:.1f}M parameters, one copy of the state {12 * num_params / 1e9:.2f} GB;"
        f" {DEVICES}"
        f" virtual devices, {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as directory:
        run = RunDirectory.create(Path(directory) / "run", "bench")
        run.write_config("{}")
        run.write_plan(running.plan.to_json())
        switcher = Switcher(
            running=running,
            settings=ControlConfig(executables=4),
            journal=Journal(run),
            probe=batch_for,
        )
        for settings in (*JOURNEY[1:], JOURNEY[0]):
            state = one_switch(switcher, state, settings)
        run.close()


def one_switch(switcher, state, settings: dict):
    """Prepare a switch while steps run, make it and print its costs. Returns the state after it."""
    from optimus_jax.control.canary import judge

    alone_s, beside_s = [], []
    for _ in range(3):
        state, step_s = stepped(switcher.running, state)
        alone_s.append(step_s)
    config = config_of(settings)
    started = time.perf_counter()
    preparation = switcher.prepare(plan_of(config), config=config)
    while not preparation.is_done:
        state, step_s = stepped(switcher.running, state)
        beside_s.append(step_s)
    prepared, prepared_s = preparation.result(), time.perf_counter() - started
    (rate, _), num_bytes = copy_rate(state), necessary_bytes(prepared.forward)
    started = time.perf_counter()
    switched = switcher.switch(state, prepared, step=int(state.step), why="measured")
    delay_s = time.perf_counter() - started
    assert switched.is_done, switched.why_not
    state, first_s = stepped(switcher.running, switched.state)
    state, second_s = stepped(switcher.running, state)
    verdict = judge(
        [first_s, second_s],
        losses=[0.0],
        before_s=alone_s,
        predicted_s=statistics.median(alone_s),
        steps_left=10**6,
        back_s=delay_s,
    )
    switcher.keep(step=int(state.step), why=verdict.why, costs_s=switched.costs_s)
    move_s, bound_s, step_s = (
        switched.costs_s["move_s"],
        num_bytes / rate,
        statistics.median(alone_s),
    )
    print(f"{prepared.source.plan.axes} -> {prepared.target.plan.axes}")
    print(
        f"  prepare {prepared_s:.1f} s in the background; steps {step_s:.2f} s alone,"
        f" {statistics.mean(beside_s or [step_s]):.2f} s meanwhile"
    )
    print(
        "  "
        + ", ".join(f"{name} {value:.3f}" for name, value in switched.costs_s.items())
        + f"; delay {delay_s:.2f} s, first step {first_s:.2f} s, then {second_s:.2f} s"
    )
    print(
        f"  move {move_s:.3f} s, bound {bound_s:.3f} s ({num_bytes / 1e9:.2f} GB at"
        f" {rate / 1e9:.1f} GB/s): {move_s / bound_s:.2f}x; delay without move"
        f" {(delay_s - move_s) / step_s:.2f} steps; in flight"
        f" {prepared.forward.way_bytes / 2**20:.0f} MiB per device, state"
        f" {prepared.source.layout.num_bytes() / 2**20:.0f} ->"
        f" {prepared.target.layout.num_bytes() / 2**20:.0f}",
        flush=True,
    )
    return state


def moves() -> None:
    """Print the times of each move of JOURNEY, there and back, and the bound of each."""
    import jax
    import jax.numpy as jnp

    from optimus_jax.config import ControlConfig
    from optimus_jax.control.executables import layout_of
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.reshard.reshard import Move
    from optimus_jax.training.step import build_program

    use_cpu_devices(DEVICES)
    configs = [config_of(settings) for settings in (*JOURNEY, JOURNEY[0])]
    plans = [plan_of(config) for config in configs]
    programs = [build_program(config, plan) for config, plan in zip(configs, plans, strict=True)]
    layouts = [layout_of(program) for program in programs]
    state = programs[0].init(jnp.int32(0))
    for number, (source, target) in enumerate(itertools.pairwise(layouts)):
        ways = [
            Move(*ends, budget_bytes=ControlConfig().move_bytes)
            for ends in ((source, target), (target, source))
        ]
        started = time.perf_counter()
        for way in ways:
            way.compile()
        compile_s = time.perf_counter() - started
        seconds: list[list[float]] = [[], []]
        ratios: list[list[float]] = [[], []]
        cpu_ratios: list[list[float]] = [[], []]
        for _ in range(REPEATS):
            for which, way in enumerate(ways):
                rate, cpu_rate = copy_rate(state)
                started, cpu_started = time.perf_counter(), time.process_time()
                state = jax.block_until_ready(way.run(state))
                seconds[which].append(time.perf_counter() - started)
                ratios[which].append(seconds[which][-1] * rate / necessary_bytes(way))
                cpu_ratios[which].append(
                    (time.process_time() - cpu_started) * cpu_rate / necessary_bytes(way)
                )
        state = ways[0].run(state)
        print(
            f"{plans[number].axes} -> {plans[number + 1].axes} and back: compile {compile_s:.1f} s;"
            f" in flight {ways[0].way_bytes / 2**20:.0f} MiB per device"
        )
        for which, way in enumerate(ways):
            print(
                f"  {'back' if which else 'there'}: median {statistics.median(seconds[which]):.3f}"
                f" s for {necessary_bytes(way) / 1e9:.2f} GB ({way.sent_bytes / 1e9:.2f} between"
                f" devices), {statistics.median(ratios[which]):.2f}x the bound"
                f" ({min(ratios[which]):.2f} to {max(ratios[which]):.2f}),"
                f" {statistics.median(cpu_ratios[which]):.2f}x in CPU-seconds",
                flush=True,
            )


def restart() -> None:
    """Time the first change of plan by a checkpoint and a new process."""
    import jax.numpy as jnp

    from optimus_jax.checkpoint.checkpoints import Checkpoints
    from optimus_jax.config import CheckpointConfig
    from optimus_jax.control.executables import compile_plan
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.training.state import to_stored

    use_cpu_devices(DEVICES)
    config = config_of(JOURNEY[0])
    running = compile_plan(config, plan_of(config))
    state, _ = stepped(running, running.program.init(jnp.int32(0)))
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        checkpoints = Checkpoints(directory, CheckpointConfig())
        checkpoints.save(
            1,
            to_stored(state, running.program.shapes, running.plan, running.program.state_shardings),
            {},
        )
        checkpoints.close()
        saved_s = time.perf_counter() - started
        del state
        started = time.perf_counter()
        found = subprocess.run(
            [sys.executable, __file__, "--restored", directory],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        whole_s = time.perf_counter() - started
    parts = json.loads(found.splitlines()[-1])
    print(
        f"checkpoint and restart {running.plan.axes} -> {JOURNEY[1]['parallel.mesh']}: save"
        f" {saved_s:.1f} s, new process {whole_s:.1f} s (compile {parts['compile_s']:.1f}, restore"
        f" {parts['restore_s']:.1f}): {saved_s + whole_s:.1f} s in all,"
        f" {saved_s + parts['restore_s']:.1f} s of it for save and restore"
    )


def restored(directory: str) -> None:
    """The new process: compile and restore, until it could do a step."""
    from optimus_jax.checkpoint.checkpoints import Checkpoints
    from optimus_jax.config import CheckpointConfig
    from optimus_jax.control.executables import compile_plan
    from optimus_jax.devices.cpu import use_cpu_devices
    from optimus_jax.training.state import abstract_stored_state, from_stored

    use_cpu_devices(DEVICES)
    config = config_of(JOURNEY[1])
    running = compile_plan(config, plan_of(config))
    program, started = running.program, time.perf_counter()
    wanted = abstract_stored_state(
        program.shapes, program.optimizer, config.precision, program.plan, program.mesh
    )
    stored = (
        Checkpoints(directory, CheckpointConfig())
        .restore(wanted, paddable=program.shapes.may_be_padded)
        .state
    )
    from_stored(stored, program.shapes, program.plan, program.state_shardings)
    print(json.dumps({"compile_s": running.compile_s, "restore_s": time.perf_counter() - started}))


def main() -> None:
    from optimus_jax.system.huge_pages import restart_with_huge_pages

    restart_with_huge_pages()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--restart", action="store_true", help="also measure checkpoint and restart"
    )
    parser.add_argument("--moves", action="store_true", help="measure only moves")
    parser.add_argument("--restored", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.restored:
        restored(arguments.restored)
        return
    if arguments.moves:
        moves()
        return
    phases()
    if arguments.restart:
        restart()


if __name__ == "__main__":
    main()
