"""Programs that time operations on the devices.

These are matmuls, passes over memory, collectives, matmuls that overlap with a collective, and
copies to and from the host.

Each program runs on all devices at once inside one `shard_map`, as a training step does, because
virtual CPU devices share cores, and GPUs share power and links. The operation is repeated inside
its program, so that launch time hardly matters. Each repeat depends on one element of the previous
one, so that XLA can neither drop nor hoist it. Operand and result are donated and so keep their
memory from run to run, because on a CPU the first use of new memory can take longer than the
operation itself. The result is the shortest of several runs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from optimus_jax.planning.profiles.measurements import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    CollectiveTime,
    HostCopyTime,
    MatmulTime,
    MemoryTime,
    OverlapTime,
)
from optimus_jax.reshard.memory_kinds import DEVICE_MEMORY, HOST_MEMORY


class Device(Protocol):
    """The attributes of a JAX device that are used here."""

    platform: str
    device_kind: str
    process_index: int


Devices = Sequence[Device]
"""Devices in mesh order."""
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
"""Number formats by their names in plans."""
_GROUP = "group"
_AXES = ("outer", _GROUP, "inner")
_NOISE_LENGTH = 2**16
_MAX_REPEATS = 64
_MIN_REPEATS = 2
"""XLA does not treat one repeat as a loop, and then copies operands although they are donated."""
_MAX_CHAIN = 16

_COLLECTIVES: dict[str, Callable[[Array, int], Array]] = {
    ALL_REDUCE: lambda x, size: lax.psum(x, _GROUP),
    ALL_GATHER: lambda x, size: lax.all_gather(x, _GROUP, tiled=True),
    REDUCE_SCATTER: lambda x, size: lax.psum_scatter(x, _GROUP, tiled=True),
    ALL_TO_ALL: lambda x, size: lax.all_to_all(x, _GROUP, 0, 0, tiled=True),
    PERMUTE: lambda x, size: lax.ppermute(x, _GROUP, [(i, (i + 1) % size) for i in range(size)]),
}
KINDS = tuple(_COLLECTIVES)
"""Kinds of collectives."""


@dataclass(frozen=True)
class Timing:
    """How long a probe's program should take, and how often it runs."""

    guessed_flops_per_s: float
    """Rough speed of a device. Together with `guessed_bytes_per_s` it only decides how often a
    program repeats its operation."""
    guessed_bytes_per_s: float
    """The same for memory and links."""
    program_s: float
    """Approximate seconds that a program should take."""
    runs: int
    """Timed runs of each program."""

    def repeats(self, *, flops: float = 0.0, num_bytes: float = 0.0) -> int:
        """How often a program repeats an operation."""
        guess_s = flops / self.guessed_flops_per_s + num_bytes / self.guessed_bytes_per_s
        return min(_MAX_REPEATS, max(_MIN_REPEATS, round(self.program_s / guess_s)))


def time_launch(devices: Devices, timing: Timing) -> float:
    """Seconds from calling a program that does almost nothing until it has finished."""
    mesh = _mesh(devices)
    return _shortest_of_each_s(
        [partial(_program(mesh, lambda x: x + 1), _zeros(mesh, (1,), jnp.dtype(jnp.float32)))],
        timing.runs,
    )[0]


def time_matmul(devices: Devices, timing: Timing, m: int, k: int, n: int, dtype: str) -> MatmulTime:
    """Time a matmul of [m, k] by [k, n] on every device."""
    mesh, kind = _mesh(devices), jnp.dtype(DTYPES[dtype])
    time_s = _repeated_s(
        mesh,
        lambda x, w: x @ w,
        [_noise(mesh, (m, k), kind), _noise(mesh, (k, n), kind)],
        (m, n),
        timing,
        timing.repeats(flops=2 * m * k * n),
    )
    return MatmulTime(m=m, k=k, n=n, dtype=dtype, time_s=time_s)


def time_pass(devices: Devices, timing: Timing, num_bytes: int) -> MemoryTime:
    """Time reading an array of `num_bytes` and writing one of the same size, on every device."""
    mesh, kind = _mesh(devices), jnp.dtype(jnp.float32)
    shape = (max(1, num_bytes // kind.itemsize),)
    moved = 2 * shape[0] * kind.itemsize
    return MemoryTime(
        num_bytes=moved,
        time_s=_repeated_s(
            mesh,
            lambda x: 0.5 * x,
            [_noise(mesh, shape, kind)],
            shape,
            timing,
            timing.repeats(num_bytes=moved),
        ),
    )


def time_host_copy(devices: Devices, timing: Timing, num_bytes: int) -> HostCopyTime:
    """Time copying arrays of `num_bytes` between pinned host memory and every local device.

    Both directions and all devices copy at the same time, because devices share the host.
    """
    mine = [device for device in devices if device.process_index == jax.process_index()]
    on_device, on_host = (
        [SingleDeviceSharding(device, memory_kind=kind) for device in mine]
        for kind in (DEVICE_MEMORY, HOST_MEMORY)
    )
    bits = np.resize(
        np.random.default_rng(0).integers(0, 256, _NOISE_LENGTH, dtype=np.uint8), num_bytes
    )
    arrays = jax.device_put([bits] * 2 * len(mine), on_host + on_device)
    return HostCopyTime(
        num_bytes=num_bytes,
        time_s=_shortest_of_each_s(
            [lambda: jax.device_put(arrays, on_device + on_host, may_alias=False)], timing.runs
        )[0],
    )


def time_collective(
    devices: Devices,
    timing: Timing,
    kind: str,
    axis_size: int,
    stride: int,
    num_bytes: int,
    dtype: str,
) -> CollectiveTime:
    """Time a collective of about `num_bytes` in all groups of a mesh axis at once."""
    mesh, element = _mesh(devices, axis_size, stride), jnp.dtype(DTYPES[dtype])
    part = max(1, round(num_bytes / element.itemsize / axis_size))
    message = part * axis_size
    # Zeros, because they stay zeros however often they are summed.
    operand = _zeros(mesh, (part if kind == ALL_GATHER else message,), element)
    # Only XLA's GPU compiler reuses the operand's buffer for the result of an all-reduce.
    in_place = kind == ALL_REDUCE and mesh.devices.flat[0].platform != "cpu"
    time_s = _repeated_s(
        mesh,
        lambda x: _COLLECTIVES[kind](x, axis_size),
        [operand],
        (part if kind == REDUCE_SCATTER else message,),
        timing,
        timing.repeats(num_bytes=num_bytes),
        in_place=in_place,
    )
    return CollectiveTime(
        kind=kind,
        axis_size=axis_size,
        stride=stride,
        num_bytes=message * element.itemsize,
        time_s=time_s,
    )


def time_overlap(
    devices: Devices, timing: Timing, matmul: MatmulTime, all_reduce: CollectiveTime
) -> OverlapTime:
    """Time an all-reduce over all devices that overlaps with a chain of square matmuls of similar
    duration.

    Args:
      matmul: measured time of a square matmul, [m, k] by [k, k].
      all_reduce: measured time of the all-reduce.
    """
    mesh, kind = _mesh(devices, len(devices)), jnp.dtype(DTYPES[matmul.dtype])
    chain = min(_MAX_CHAIN, max(1, round(all_reduce.time_s / matmul.time_s)))

    def matmuls(x: Array, w: Array) -> Array:
        for _ in range(chain):
            x = x @ w
        return x

    def overlapped(x: Array, w: Array, zeros: Array) -> tuple[Array, Array]:
        return matmuls(x, w), lax.psum(zeros, _GROUP)

    operands = (_noise(mesh, (matmul.m, matmul.k), kind), _noise(mesh, (matmul.k, matmul.k), kind))
    zeros = _zeros(mesh, (max(1, all_reduce.num_bytes // kind.itemsize),), kind)
    matmul_s, collective_s, together_s = _shortest_of_each_s(
        [
            partial(_program(mesh, matmuls), *operands),
            partial(_program(mesh, lambda x: lax.psum(x, _GROUP)), zeros),
            partial(_program(mesh, overlapped), *operands, zeros),
        ],
        2 * timing.runs,
    )
    return OverlapTime(matmul_s=matmul_s, collective_s=collective_s, together_s=together_s)


def _repeated_s(
    mesh: Mesh,
    operation: Callable[..., Array],
    operands: list[Array],
    result_shape: tuple[int, ...],
    timing: Timing,
    repeats: int,
    *,
    in_place: bool = False,
) -> float:
    """Seconds of one execution of `operation` on each device's part of `operands`.

    The result has `result_shape` and the format of the first operand.

    `in_place` means that the compiler writes the result over the operand, and would copy an operand
    that is needed again. Each repeat therefore works on the previous result.
    """

    def run(x: Array, result: Array, *others: Array) -> tuple[Array, Array]:
        def once(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            x, result = carry
            if in_place:
                return x, operation(result, *others)
            x = lax.dynamic_update_slice(
                x, lax.slice(result, (0,) * result.ndim, (1,) * result.ndim), (0,) * x.ndim
            )
            return x, operation(x, *others)

        return lax.fori_loop(0, repeats, once, (x, result))

    program = _program(mesh, run, donate=(0, 1))
    x, *others = operands
    kept = (x, _zeros(mesh, result_shape, x.dtype))

    def run_again() -> object:
        nonlocal kept
        kept = program(*kept, *others)
        return kept

    return _shortest_of_each_s([run_again], timing.runs)[0] / repeats


def _mesh(devices: Devices, axis_size: int = 1, stride: int = 1) -> Mesh:
    return Mesh(np.array(devices).reshape(-1, axis_size, stride), _AXES)


def _program(mesh: Mesh, on_device: Callable, donate: tuple[int, ...] = ()) -> Callable:
    """A jitted program that applies `on_device` to each device's part of its operands.

    Dim 0 of operands and results is the device.
    """

    def mine(*operands: Array) -> Array | tuple[Array, ...]:
        return jax.tree.map(lambda x: x[None], on_device(*(x[0] for x in operands)))

    spec = PartitionSpec(_AXES)
    # check_vma would require a cast wherever a loop begins. Only gradients need it, and a probe has
    # none.
    return jax.jit(
        jax.shard_map(mine, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        donate_argnums=donate,
    )


def _noise(mesh: Mesh, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """An array of `shape` on each device, with random values because GPUs are faster on constants.

    Values are small enough for a chain of matmuls.
    """
    noise = np.random.default_rng(0).normal(size=_NOISE_LENGTH, scale=shape[0] ** -0.5)
    return _array(mesh, np.resize(noise.astype(dtype), shape))


def _zeros(mesh: Mesh, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return _array(mesh, np.zeros(shape, dtype))


def _array(mesh: Mesh, each: np.ndarray) -> Array:
    sharding = NamedSharding(mesh, PartitionSpec(_AXES))
    return jax.make_array_from_callback((mesh.size, *each.shape), sharding, lambda _: each[None])


def _shortest_of_each_s(runs: Sequence[Callable[[], object]], times: int) -> list[float]:
    """The shortest of `times` times of each of `runs`, after one call that compiles.

    They take turns, so that other load on the machine affects all of them.
    """
    for run in runs:
        jax.block_until_ready(run())
    return [
        min(seconds)
        for seconds in zip(*([_seconds(run) for run in runs] for _ in range(times)), strict=True)
    ]


def _seconds(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start_s
