"""The subprocess of compile_check, which compiles one plan.

It reads a request as JSON from standard input, and writes the program's HLO text and memory as one
line of JSON to standard output:

    python -m optimus_jax.planning.ahead_of_time.compile_worker < request.json

The compiler's own messages go to standard error, where `compile_check` reads them.
"""

import json
import os
import sys

# Set before jax is imported: the CUDA plugin must not look for a device.
os.environ["JAX_PLATFORMS"] = "cpu"

from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from optimus_jax.config import Config
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compiled_step import compile_step
from optimus_jax.training.step import build_program

CUDNN_VERSION = 91000
"""cuDNN 9.10, as in the device descriptions (targets/)."""


def main() -> None:
    """Compile the requested plan and print what came of it."""
    request = json.load(sys.stdin)
    # JAX asks for the version of cuDNN and the device's capability when it traces attention; the
    # library and the device are needed only at run time.
    for name in ("check_cudnn_version", "check_compute_capability"):
        assert hasattr(fused_attention_stablehlo, name), (
            f"this version of JAX has no {name} to answer for the described device"
        )
    capability = tuple(request["compute_capability"])
    fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN_VERSION
    fused_attention_stablehlo.check_compute_capability = lambda least: (
        capability >= tuple(map(int, least.split(".")))
    )
    config, plan = Config.from_json(request["config"]), Plan.from_json(request["plan"])
    described = topologies.get_topology_desc(
        "described",
        "cuda",
        target_config=request["target"],
        topology=f"1x{request['num_hosts']}x{request['devices_per_host']}",
    )
    devices = list(described.devices)
    program = build_program(config, plan, devices)
    assert list(program.mesh.devices.flat) == devices, (
        "groups of devices are read as positions in the mesh"
    )
    step = compile_step(program)
    memory = {
        f"{name}_bytes": getattr(step.allocated, f"{name}_bytes")
        for name in ("argument", "temp", "output", "alias")
    }
    text = step.train_step.as_text() or ""
    print(json.dumps({"compile_s": step.compile_s, **memory, "text": text}))


if __name__ == "__main__":
    main()
