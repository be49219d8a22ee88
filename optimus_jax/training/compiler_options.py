"""XLA options of the training step, by device and plan, with reasons and sources.

They are printed at the start of a run. All other options keep XLA's defaults
(mesh/xla_options.py has the options of every program on a platform).
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.sharding import Mesh

from optimus_jax.devices.accelerators import accelerator_of_kind
from optimus_jax.devices.backend import gpu_memory_share
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.mesh.xla_options import (
    CPU_OPTIONS,
    GPU,
    MODE,
    QUICK_COMPILATION,
    CompilerOption,
    without_user_flags,
)
from optimus_jax.plan import Plan

_NVIDIA = "https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance"
_BLACKWELL = ("B100", "B200", "GB200", "B300", "GB300")

LATENCY_HIDING = CompilerOption(
    name="xla_gpu_enable_latency_hiding_scheduler",
    value=True,
    source=_NVIDIA,
    why="collectives between devices, and copies from and to the host, run beside compute",
)
_RENAMED = jaxlib.version.__version_info__ >= (0, 11, 1)
"""Whether XLA includes https://github.com/openxla/xla/pull/45836, which renamed the option: each
version rejects the other name."""
_PIPELINED_ALL_GATHER_NAMES = (
    ("xla_gpu_enable_pipelined_all_gather", True),
    ("xla_gpu_pipeline_all_gather", f"{MODE}ON"),
)
PIPELINED_ALL_GATHER = CompilerOption(
    name=_PIPELINED_ALL_GATHER_NAMES[_RENAMED][0],
    value=_PIPELINED_ALL_GATHER_NAMES[_RENAMED][1],
    other_name=_PIPELINED_ALL_GATHER_NAMES[not _RENAMED][0],
    source=_NVIDIA,
    why="a layer's weights are gathered over fsdp while the layer before is computed",
)
BLACKWELL_COMMAND_BUFFERS = CompilerOption(
    name="xla_gpu_enable_command_buffer",
    value="FUSION,CUSTOM_CALL",
    source=_NVIDIA,
    why=(
        "CUDA graphs of these kinds of kernels alone were the quickest to launch in NVIDIA's tests"
        " on B200"
    ),
)

_LAYER_LOOP = "docs/decisions/0035-layers-with-their-own-backward.md"

DOUBLE_BUFFERING = CompilerOption(
    name="xla_gpu_enable_while_loop_double_buffering",
    value=True,
    source=_LAYER_LOOP,
    why="a loop that carries the next layer's weights uses two buffers in turn and copies nothing",
)

NO_EXCESS_PRECISION = CompilerOption(
    name="xla_allow_excess_precision",
    value=False,
    source="docs/decisions/0013-f16-overflows-alike-under-every-plan.md",
    why=(
        "a value that leaves f16's range overflows where the step says so, not only where XLA's"
        " fusions happen to round it"
    ),
)

XLA_MEMORY_SHARE = 0.8
"""Share of a GPU's memory that XLA assumes by default. It subtracts the program's arguments, and
rematerialises until live values fit into the rest."""
FRAGMENTED_SHARE = 0.02
"""Share of JAX's memory lost to fragmentation."""
_COARSE_BYTES = 2**28


def usable_bytes(mesh: Mesh) -> int | None:
    """Memory that JAX may use on a local GPU of the mesh; None: the mesh has no local device, or
    JAX does not report it."""
    here = set(jax.local_devices())
    stats = next((device.memory_stats() for device in mesh.devices.flat if device in here), None)
    return (stats or {}).get("bytes_limit")


def memory_limit(
    device_kind: str, state_bytes: int, usable_bytes: float | None = None
) -> CompilerOption | None:
    """The option that lets XLA use all memory that a state of `state_bytes` leaves free on each
    device; None: the device's memory is unknown, or the state does not fit.

    XLA assumes a share of the memory that the driver reports, which is up to 7% more than the data
    sheet says. For a local GPU, the driver's number is estimated from `usable_bytes`, rounded
    coarsely, so that processes whose GPUs differ by a page rarely compile different programs. For a
    GPU that is not local, the data sheet's number is used.
    """
    share, accelerator = gpu_memory_share(), accelerator_of_kind(device_kind)
    if usable_bytes:
        usable_bytes -= usable_bytes % _COARSE_BYTES
        card_bytes = (usable_bytes + _COARSE_BYTES) / share
    elif accelerator and accelerator.memory_bytes:
        card_bytes, usable_bytes = accelerator.memory_bytes, share * accelerator.memory_bytes
    else:
        return None
    assumed_bytes, available_bytes = (
        XLA_MEMORY_SHARE * card_bytes - state_bytes,
        (1 - FRAGMENTED_SHARE) * usable_bytes - state_bytes,
    )
    if min(assumed_bytes, available_bytes) <= 0:
        return None
    return CompilerOption(
        name="xla_gpu_memory_limit_slop_factor",
        value=str(math.floor(100 * available_bytes / assumed_bytes)),
        source="https://github.com/openxla/xla/pull/20494",
        why=(
            f"XLA counts on {XLA_MEMORY_SHARE:.0%} of a GPU, and computes again what does not fit"
            " there; in percent of what that leaves beside the state, this is what there is"
        ),
    )


def combined_exchanges(plan: Plan, layer_elements: int) -> Iterator[CompilerOption]:
    """The options that make the gathers of a layer one exchange, and its scatters.

    XLA joins exchanges of one kind up to a size of their results. Larger ones, such as those of
    tables over the vocabulary, stay alone: they begin as soon as each is ready.
    """
    width = jnp.dtype(COMPUTE_DTYPES[plan.precision]).itemsize
    for kind, num_bytes in (
        ("all_gather", width * layer_elements),
        ("reduce_scatter", 4 * layer_elements // plan.axes.fsdp),
    ):
        yield CompilerOption(
            name=f"xla_gpu_{kind}_combine_threshold_bytes",
            value=str(num_bytes),
            source=_LAYER_LOOP,
            why=(
                f"one {kind.replace('_', '-')} for all matrices of a layer, beside the compute of"
                " another"
            ),
        )


def options_for(
    platform: str,
    device_kind: str,
    plan: Plan,
    state_bytes: int | None = None,
    usable_bytes: int | None = None,
    layer_elements: int = 0,
) -> tuple[CompilerOption, ...]:
    """The options that a plan's programs are compiled with, without those set in XLA_FLAGS.

    Args:
      state_bytes: bytes that stay on each device from step to step; None: unknown.
      usable_bytes: memory that JAX may use on a device; None: the device is not local.
      layer_elements: elements of a layer's matrices on a device, whole along fsdp.
    """
    options = _options(platform, device_kind, plan, state_bytes, usable_bytes, layer_elements)
    return without_user_flags(options)


def _options(
    platform: str,
    device_kind: str,
    plan: Plan,
    state_bytes: int | None,
    usable_bytes: int | None,
    layer_elements: int,
) -> Iterator[CompilerOption]:
    if platform == "cpu":
        yield from CPU_OPTIONS
        if plan.precision == "f32":
            yield QUICK_COMPILATION
    if plan.precision == "f16":
        yield NO_EXCESS_PRECISION
    if platform not in GPU:
        return
    if (
        state_bytes is not None
        and (limit := memory_limit(device_kind, state_bytes, usable_bytes)) is not None
    ):
        yield limit
    if plan.num_devices > 1 or plan.offload != "none":
        yield LATENCY_HIDING
    # Inside a loop over microbatches or ticks, XLA would gather the weights of the next iteration
    # in advance: those of all layers at once (docs/decisions/0011).
    gathers = plan.axes.fsdp > 1 and plan.zero == 3 and plan.overlap == "none"
    if gathers and plan.microbatches == 1 and plan.pipeline is None:
        yield PIPELINED_ALL_GATHER
    # All loops get two iterations at a time. Of one over microbatches or ticks, that would double
    # the memory.
    if plan.overlap != "none" and plan.microbatches == 1 and plan.pipeline is None:
        yield DOUBLE_BUFFERING
    # Those of halves must stay apart: each runs beside the other half's compute.
    if plan.overlap == "layers" and plan.axes.fsdp > 1 and plan.zero >= 2:
        yield from combined_exchanges(plan, layer_elements)
    if any(name in device_kind for name in _BLACKWELL):
        yield BLACKWELL_COMMAND_BUFFERS
