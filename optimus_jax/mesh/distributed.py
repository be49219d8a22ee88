"""Several processes as one run: how they find one another and what they agree on."""

import contextlib
import threading
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import DistributedConfig
from optimus_jax.errors import ConfigError, FaultError, OptimusError, explain

_NEVER_S = 7 * 24 * 3600


def connect(config: DistributedConfig, *, timeout_s: float, heartbeat_s: int) -> None:
    """Join the run's other processes, if it has any. Call it before anything asks for a device.

    Args:
      timeout_s: how long this process waits for the others to start.
      heartbeat_s: without a heartbeat of a process JAX aborts the others after so long.
    Raises:
      FaultError: they did not all come in time; one may have died on the way.
      ConfigError: they cannot be connected.
    """
    if config.num_processes is None:
        return
    # JAX's own handler would swallow the SIGTERM that asks us to save and stop (training/stopping.py).
    jax.config.update("jax_enable_preemption_service", False)
    failures: list[Exception] = []

    def initialize() -> None:
        try:
            # JAX ends the whole process, with a page of C++ frames, when its own time-out has passed.
            jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id, initialization_timeout=_NEVER_S,
                                       heartbeat_timeout_seconds=heartbeat_s)
        except Exception as error:
            failures.append(error)

    # JAX waits in C++, where no signal reaches Python; waiting for a thread, we hear them.
    thread = threading.Thread(target=initialize, daemon=True, name="connect")
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise FaultError(explain(
            f"the processes of this run have not found one another in {timeout_s:g} s",
            given=f"process {config.process_id} of {config.num_processes}, process 0 expected at {config.coordinator}",
            do="see whether each of them is running and what it has printed, and whether --coordinator can be reached from here"))
    if failures and isinstance(failures[0], jax.errors.JaxRuntimeError):
        raise ConfigError(explain(
            "the processes of this run cannot be connected", given=f"{config.coordinator}: {str(failures[0]).splitlines()[0]}",
            do="give a --coordinator HOST:PORT that is free on the machine of process 0")) from failures[0]
    if failures:
        raise failures[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around what each process does for itself: if one of them raises an OptimusError, so do all, and none waits for it.

    Nothing inside may wait for another process.

    Raises:
      OptimusError: this process's own, or one that says which process has had one.
    """
    failure: OptimusError | None = None
    try:
        yield
    except OptimusError as error:
        failure = error
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.array(failure is not None))
        if failure is None and failed.any():
            raise OptimusError(explain(
                "another process of this run cannot go on", given=f"process {int(np.argmax(failed))} of {jax.process_count()}",
                do="see what it has printed"))
    if failure is not None:
        raise failure


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
