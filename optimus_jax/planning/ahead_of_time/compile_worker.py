"""The subprocess of compile_check: a request as JSON on standard input, what was compiled as one
line of JSON on standard output.

    python -m optimus_jax.planning.ahead_of_time.compile_worker < request.json

What the compiler itself says goes to standard error, where `compile_check` reads it.
"""

import json
import os
import sys
import time

# before jax is imported: the CUDA plugin must not look for a device
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from optimus_jax.config import Config
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.mesh.build import build_mesh
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.hlo import Program as Compiled
from optimus_jax.training.state import abstract_state, planned_shapes
from optimus_jax.training.step import Program, build_program

CUDNN_VERSION = 91000
"""9.10, which the descriptions of devices name too (targets/)."""


def main() -> None:
    """Compile what is asked for."""
    request = json.load(sys.stdin)
    # Asked when attention is traced; the library itself is needed only where it runs.
    assert hasattr(fused_attention_stablehlo, "check_cudnn_version"), (
        "this version of JAX asks for cuDNN's version elsewhere"
    )
    fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN_VERSION
    config, plan = Config.from_json(request["config"]), Plan.from_json(request["plan"])
    described = topologies.get_topology_desc(
        "described",
        "cuda",
        target_config=request["target"],
        topology=f"1x{request['num_hosts']}x{request['devices_per_host']}",
    )
    devices = list(described.devices)
    mesh = build_mesh(plan.axes, devices)
    assert list(mesh.devices.flat) == devices, "groups of devices are read as positions in the mesh"
    program = build_program(config, planned_shapes(config.model, plan), plan, mesh)
    started = time.perf_counter()
    compiled = program.train_step.lower(*step_arguments(program)).compile()
    print(
        json.dumps(
            {
                "compile_s": time.perf_counter() - started,
                **_memory(compiled),
                **_read(compiled.as_text() or "", plan),
            }
        )
    )


def step_arguments(program: Program) -> tuple:
    """State and batch of a training step as shapes with shardings."""
    config, sharding = program.config, program.batch_sharding
    state = abstract_state(
        program.shapes, program.optimizer, config.precision, program.plan, program.mesh
    )
    rows, length = config.data.global_batch, config.seq_len
    batch = {
        name: jax.ShapeDtypeStruct(
            (rows, length), jnp.bool_ if name == "loss_mask" else jnp.int32, sharding=sharding
        )
        for name in ("tokens", "targets", "positions", "segments", "loss_mask")
    }
    return state, {**batch, "examples": jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=sharding)}


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    memory = compiled.memory_analysis()
    assert memory is not None, "the GPU compiler always says what it allocated"
    return {
        f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes")
        for name in ("argument", "temp", "output", "alias")
    }


def _read(text: str, plan: Plan) -> dict:
    compiled = Compiled(text)
    sizes = {axis: plan.axes[axis] for axis in MESH_AXES}
    traffic = [
        {
            **{
                field: getattr(each, field)
                for field in (
                    "kind",
                    "payload_bytes",
                    "wire_bytes",
                    "times",
                    "work_under",
                    "source",
                )
            },
            "axes": each.axes(sizes),
        }
        for each in compiled.collectives()
    ]
    return {
        "dot_flops": compiled.dot_flops(),
        "attention": "cudnn" if "__cudnn$fmha" in text else "xla",
        "traffic": traffic,
        "unknown_loops": compiled.unknown_loops,
    }


if __name__ == "__main__":
    main()
