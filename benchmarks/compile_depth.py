"""Compile time of a training step by depth. Layers are scanned, so it should hardly grow.

    python benchmarks/compile_depth.py [--mesh fsdp=8] [--layers 6 48]
    python benchmarks/compile_depth.py --set parallel.remat=full --set parallel.overlap=layers

Prints CPU-seconds and wall seconds of lowering and compiling, each the minimum of three, and the
ratio to the first depth.
"""

import argparse
import sys
import time

from optimus_jax.config.axes import AxisSizes
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.command_line import run

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="fsdp=8")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 48])
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting (default: none)",
    )
    args = parser.parse_args()
    if wrong := [entry for entry in args.set if "=" not in entry]:
        raise ConfigError(
            explain(
                "a setting has no value",
                given=f"--set {wrong[0]}",
                do=f"write --set {wrong[0]}=VALUE",
            )
        )
    settings = dict(entry.split("=", 1) for entry in args.set)
    from optimus_jax.devices.cpu import use_cpu_devices

    axes = AxisSizes.parse(args.mesh)
    use_cpu_devices(axes.num_devices)
    times = {
        layers: min(compile_time(layers, axes, settings) for _ in range(REPEATS))
        for layers in args.layers
    }
    for layers, (cpu, wall) in times.items():
        print(
            f"{layers:4} layers: {cpu:6.2f} CPU s, {wall:6.2f} s,"
            f" {cpu / times[args.layers[0]][0]:.2f} of the first"
        )


def compile_time(num_layers: int, axes: AxisSizes, settings: dict[str, str]) -> tuple[float, float]:
    """(CPU-seconds, wall seconds) of tracing, lowering and compiling. Clears JAX's caches first."""
    import jax

    from optimus_jax.config import Config, DataConfig, ModelConfig
    from optimus_jax.mesh.build import discover
    from optimus_jax.planning.ahead_of_time.compiled_step import compile_step
    from optimus_jax.planning.search.assemble import plan_for
    from optimus_jax.training.step import build_program

    jax.clear_caches()
    model = ModelConfig(
        vocab_size=8192,
        num_layers=num_layers,
        embed_dim=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        mlp_dim=1024,
        max_length=256,
    )
    config = Config(model=model, data=DataConfig(global_batch=16)).with_values(
        {"parallel.mesh": str(axes), **settings}
    )
    plan = plan_for(config, axes, discover())
    program = build_program(config, plan)
    cpu, wall = time.process_time(), time.perf_counter()
    compile_step(program)
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    sys.exit(run(main))
