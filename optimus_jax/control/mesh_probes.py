"""Small programs that time the links and devices of the run's own mesh, compiled once for each
mesh.

There are two kinds: an all-reduce along one mesh axis, in all groups of the axis at once; and a
chain of matmuls on each of this process's devices, in which no process waits for another. On a GPU
they are repeated inside the program, so that the time of its launch hardly counts. The chain also
runs alone on single devices, to compare those that the run leaves out with those in use.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from statistics import median_low
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config.axes import MESH_AXES
from optimus_jax.control.baselines import AllReduce, Matmuls, ProbeWork, messages_of
from optimus_jax.reshard.exchange import Device

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_RUNS = 5
"""Number of runs of each program, of which the shortest counts: in the first one, processes that
arrive at different times also wait for each other."""
_COMPARED = 3
"""Number of devices of the mesh that devices outside it are compared with."""


class Programs(Protocol):
    """The programs that a round of probes runs."""

    @property
    def axes(self) -> Sequence[str]:
        """Mesh axes that can be probed, slowest link first; the same in every process."""
        ...

    @property
    def messages(self) -> tuple[int, int]:
        """Bytes of a small and a large message."""
        ...

    def work(self, axis: str, num_bytes: int) -> AllReduce:
        """An all-reduce along `axis`."""
        ...

    @property
    def compute(self) -> Matmuls:
        """The matmuls that time each device."""
        ...

    def time_s(self, axis: str, num_bytes: int) -> float:
        """Seconds of an all-reduce along `axis`; every process has to call it."""
        ...

    def compute_time_s(self) -> float:
        """Seconds of the matmuls on this process's devices."""
        ...

    def outside_ratios(self, lost: Collection[int]) -> dict[int, float]:
        """Compute time of each device outside the mesh, by id, over that of devices in it.

        Devices that are `lost` are not touched.
        """
        ...


class MeshProbes:
    """The probes of a mesh. The constructor compiles nothing; `compile` may run in the background.

    Args:
      mesh: the run's mesh.
      outside: devices of the run that are not in the mesh; only in a run of one process, because in
        others each process runs the same rounds on devices of its own.
      clock: returns the time in seconds.
    """

    def __init__(
        self,
        mesh: Mesh,
        outside: Sequence[Device] = (),
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mesh, self._outside, self._clock = mesh, tuple(outside), clock
        self._alone: dict[Device, Callable[[], object]] = {}
        self._sizes = dict(mesh.shape)
        self.axes = [axis for axis in MESH_AXES if self._sizes[axis] > 1]
        platform = mesh.devices.flat[0].platform
        self.messages, on_cpu = messages_of(platform), platform == "cpu"
        self._repeats = 1 if on_cpu else 8
        # Shapes that planning/profiles/probes.py measures too, so that there is a baseline. They
        # take a tenth of a millisecond on a GPU.
        self.compute = (
            Matmuls(m=512, k=256, dtype="f32", repeats=1)
            if on_cpu
            else Matmuls(m=1024, k=1024, dtype="bf16", repeats=16)
        )
        self._programs: dict[ProbeWork, Callable[[], object]] = {}

    def work(self, axis: str, num_bytes: int) -> AllReduce:
        """An all-reduce along `axis`."""
        stride = math.prod(self._sizes[later] for later in MESH_AXES[MESH_AXES.index(axis) + 1 :])
        return AllReduce(
            axis_size=self._sizes[axis], stride=stride, num_bytes=num_bytes, repeats=self._repeats
        )

    def compile(self) -> None:
        """Compile all programs without running them."""
        for axis in self.axes:
            for num_bytes in self.messages:
                self._program_of(axis, num_bytes)
        self._matmuls()
        for device in [*self._outside, *self._compared] if self._outside else []:
            self._matmuls_on(device)

    def time_s(self, axis: str, num_bytes: int) -> float:
        """Seconds of an all-reduce along `axis`; every process has to call it."""
        return self._shortest_s(self._program_of(axis, num_bytes))

    def compute_time_s(self) -> float:
        """Seconds of the matmuls on this process's devices."""
        return self._shortest_s(self._matmuls())

    def outside_ratios(self, lost: Collection[int]) -> dict[int, float]:
        """Compute time of each device outside the mesh, by id, over that of devices in it.

        Devices that are `lost` are not touched. The others are timed one by one, as the devices of
        the mesh that they are compared with: devices may share cores, or power.
        """
        sound = [device for device in self._outside if device.id not in lost]
        if not sound:
            return {}
        usual_s = median_low(
            [self._shortest_s(self._matmuls_on(device)) for device in self._compared]
        )
        return {device.id: self._shortest_s(self._matmuls_on(device)) / usual_s for device in sound}

    @property
    def _compared(self) -> Sequence[Device]:
        return self._mesh.local_devices[:_COMPARED]

    def _program_of(self, axis: str, num_bytes: int) -> Callable[[], object]:
        work = self.work(axis, num_bytes)
        if work not in self._programs:

            def all_reduce(x: Array) -> Array:
                return lax.psum(x, axis)

            # they stay zeros, however often they are summed
            zeros = np.zeros(num_bytes // 4, np.float32)
            self._programs[work] = _compiled(self._mesh, all_reduce, work.repeats, zeros)
        return self._programs[work]

    def _matmuls(self) -> Callable[[], object]:
        work = self.compute
        if work not in self._programs:
            self._programs[work] = self._chain(self._mesh.local_devices)
        return self._programs[work]

    def _matmuls_on(self, device: Device) -> Callable[[], object]:
        if device not in self._alone:
            self._alone[device] = self._chain([device])
        return self._alone[device]

    def _chain(self, devices: Sequence[Device]) -> Callable[[], object]:
        """The matmuls on each of these devices."""
        work = self.compute
        noise = (
            np.random.default_rng(0)
            .normal(size=(2, max(work.m, work.k), work.k), scale=work.k**-0.5)
            .astype(_DTYPES[work.dtype])
        )
        mine = Mesh(np.array(devices), ("mine",))
        return _compiled(mine, jnp.matmul, work.repeats, noise[0, : work.m], noise[1, : work.k])

    def _shortest_s(self, program: Callable[[], object]) -> float:
        return min(self._seconds(program) for _ in range(_RUNS))

    def _seconds(self, program: Callable[[], object]) -> float:
        start_s = self._clock()
        jax.block_until_ready(program())
        return self._clock() - start_s


def _compiled(
    mesh: Mesh, operation: Callable[..., Array], repeats: int, *each: np.ndarray
) -> Callable[[], object]:
    """Compile `operation` for each device's own operands, repeated `repeats` times.

    Each repetition takes the result of the one before as its first operand.
    """
    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)

    def repeated(x: Array, *others: Array) -> Array:
        x, others = x[0], tuple(other[0] for other in others)
        # A loop of one iteration makes XLA copy the operand on a CPU.
        return (
            operation(x, *others)
            if repeats == 1
            else lax.fori_loop(0, repeats, lambda _, x: operation(x, *others), x)
        )[None]

    operands = [
        jax.make_array_from_callback(
            (mesh.size, *one.shape), sharding, lambda _, one=one: one[None]
        )
        for one in each
    ]
    # With check_vma, types of varying axes would require casts around the loop; only gradients need
    # them, and a probe has none.
    program = (
        jax.jit(jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        .lower(*operands)
        .compile()
    )
    return lambda: program(*operands)
