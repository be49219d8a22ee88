"""Several processes as one run: how they find one another and what they agree on."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import DistributedConfig


def connect(config: DistributedConfig) -> None:
    """Join the run's other processes, if it has any. Call it before anything asks for a device."""
    if config.num_processes is None:
        return
    # JAX's own handler would swallow the SIGTERM that asks us to save and stop (training/stopping.py).
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)


def is_writer() -> bool:
    """Whether this process writes what only one may write."""
    return jax.process_index() == 0


class Agreement:
    """The largest of one small number per process, known to all of them; costs one tiny collective.

    The answer is an array that nobody has to wait for: read it a step later.
    """

    def __init__(self, mesh: Mesh) -> None:
        axes = mesh.axis_names
        self._sharding = NamedSharding(mesh, PartitionSpec(axes))
        self._num_local, self._num_devices = len(mesh.local_devices), mesh.size
        self._largest = jax.jit(jax.shard_map(lambda x: jax.lax.pmax(x[0], axes), mesh=mesh, in_specs=PartitionSpec(axes),
                                              out_specs=PartitionSpec()))

    def __call__(self, number: int) -> jax.Array:
        """int32 scalar, replicated."""
        local = np.full(self._num_local, number, np.int32)
        return self._largest(jax.make_array_from_process_local_data(self._sharding, local, (self._num_devices,)))
