"""Connects the processes of a run, and runs small collectives on the host: broadcast, gather,
agreement on a value, errors on all processes."""

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.cluster.launch_detection import PROGRAM, Launch
from optimus_jax.cluster.rendezvous_client import report_to_coordinator
from optimus_jax.cluster.rendezvous_messages import address_of, bind_address, ended_error
from optimus_jax.cluster.rendezvous_server import RendezvousServer
from optimus_jax.errors import ConfigError, FaultError, OptimusError, explain, first_line

_NO_TIMEOUT_S = 7 * 24 * 3600
SHUTDOWN_WAIT_S = 30.0
"""How long a process waits for the others at the end of a run, when everything is saved."""
_SERVICE_WAIT_S, _POLL_S = 5.0, 0.01
"""How long process 0 waits for JAX's service to answer before it lets the others connect, and the
interval between two tries."""
_CHECK_S = 0.2
"""Interval between two checks that no process has ended."""


def connect(launch: Launch, *, timeout_s: float, heartbeat_s: int) -> None:
    """Join the run's other processes, if it has any. Call it before anything asks for a device.

    Args:
      timeout_s: how long this process waits for the others to start.
      heartbeat_s: JAX aborts the other processes when one has sent no heartbeat for this long.
    Raises:
      FaultError: not all processes connected in time; the message lists those that are missing.
      ConfigError: they cannot be connected.
    """
    if launch.is_alone or launch.launcher == PROGRAM:
        return
    # JAX's own handler would swallow the SIGTERM that asks us to save and stop
    # (faults/stopping.py).
    jax.config.update("jax_enable_preemption_service", False)
    deadline = time.monotonic() + timeout_s
    if launch.process_id > 0:
        with report_to_coordinator(launch, deadline) as first:
            _join(launch, _start_joining(launch, heartbeat_s), deadline, first.lost)
        return
    with RendezvousServer(launch, deadline) as server:
        server.gather()
        joining = _start_joining(launch, heartbeat_s)
        _await_service(launch, joining)
        server.release()
        _join(launch, joining, deadline, server.lost)
        server.await_disconnects()


class _Joining(threading.Thread):
    """Calls `jax.distributed.initialize` in a thread: it waits in C++, where the main thread could
    not handle signals."""

    def __init__(self, launch: Launch, heartbeat_s: int) -> None:
        super().__init__(daemon=True, name="connect")
        self._launch, self._heartbeat_s = launch, heartbeat_s
        self.failure: Exception | None = None

    def run(self) -> None:
        launch = self._launch
        try:
            # JAX ends the whole process, with a page of C++ frames, when its own time-out has
            # passed. JAX's cluster detection is off: launch_detection.py has found everything, and
            # JAX would add that a task of SLURM has one GPU.
            jax.distributed.initialize(
                launch.coordinator,
                launch.num_processes,
                launch.process_id,
                initialization_timeout=_NO_TIMEOUT_S,
                heartbeat_timeout_seconds=self._heartbeat_s,
                local_device_ids=launch.local_devices,
                cluster_detection_method="deactivate",
                coordinator_bind_address=bind_address(launch),
            )
        except Exception as error:
            self.failure = error


def _start_joining(launch: Launch, heartbeat_s: int) -> _Joining:
    thread = _Joining(launch, heartbeat_s)
    thread.start()
    return thread


def _await_service(launch: Launch, joining: _Joining) -> None:
    """Return when JAX's service accepts connections; a client that is refused would retry only a
    second later."""
    until = time.monotonic() + _SERVICE_WAIT_S
    while joining.is_alive() and time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address_of(launch), timeout=_SERVICE_WAIT_S),
        ):
            return
        time.sleep(_POLL_S)


def _join(
    launch: Launch, joining: _Joining, deadline: float, lost: Callable[[], list[int]]
) -> None:
    """Return when JAX has connected all processes; `lost` lists those that have ended before."""
    gone: list[int] = []
    while joining.is_alive() and not gone and time.monotonic() < deadline:
        joining.join(_CHECK_S)
        gone = lost() if joining.is_alive() else []
    if gone:
        raise ended_error(gone, launch)
    if joining.is_alive():
        raise FaultError(
            explain(
                "the processes met at the rendezvous, but JAX did not connect them in time",
                given=(
                    f"process {launch.process_id} of {launch.num_processes}, process 0 at"
                    f" {launch.coordinator}"
                ),
                do=(
                    "see what each of them has printed, and unset proxies in the environment"
                    " (https_proxy and others)"
                ),
            )
        )
    failure = joining.failure
    if failure is not None and isinstance(failure, jax.errors.JaxRuntimeError):
        # All have met at the rendezvous: who has taken the port since, or a host that is lost, is
        # no reason for a launcher to give the job up.
        raise (FaultError if launch.restarts else ConfigError)(
            explain(
                "the processes of this run cannot be connected",
                given=f"{launch.coordinator}: {first_line(failure)}",
                do="give a --coordinator HOST:PORT that is free on the machine of process 0",
            )
        ) from failure
    if failure is not None:
        raise failure


def disconnect() -> bool:
    """Disconnect together with the other processes; False: one of them did not within
    SHUTDOWN_WAIT_S.

    JAX alone would wait until its heartbeats fail, and abort.
    """
    has_left = threading.Event()

    def shut_down() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one has been lost
            jax.distributed.shutdown()
            has_left.set()

    thread = threading.Thread(target=shut_down, name="disconnect", daemon=True)
    thread.start()
    thread.join(SHUTDOWN_WAIT_S)
    return has_left.is_set()


@contextlib.contextmanager
def named(launch: Launch) -> Iterator[None]:
    """Add a note to errors which says in which process of the run they occurred, if there are
    several."""
    try:
        yield
    except Exception as error:
        if not launch.is_alone:
            error.add_note(f"in process {launch.process_id} of {launch.num_processes}")
        raise


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Context in which an error of one process is raised in all, so that none waits for it.

    The body is what each process does alone; it must not wait for another process.

    Raises:
      OptimusError: this process's own error, or one that names the process which failed.
      FaultError: another process failed with an error that is not an OptimusError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    codes = gather_from_all(
        _OK if failure is None else _USER_ERROR if isinstance(failure, OptimusError) else _FAULT
    )
    if failure is None and any(codes):
        is_fault = _FAULT in codes
        failure = (FaultError if is_fault else OptimusError)(
            explain(
                "another process of this run cannot continue",
                given=f"process {codes.index(max(codes))} of {len(codes)}",
                do="see what it has printed",
            )
        )
    if failure is not None:
        if isinstance(failure, OptimusError):
            failure.raised_by_all_processes = _FAULT not in codes
        raise failure


_OK, _USER_ERROR, _FAULT = range(3)
"""Codes that processes exchange: no error, an OptimusError, any other error."""


_COLLECTIVE_ERROR = re.compile(r"[A-Z_]+: .*\b(Gloo|NCCL)\b")
"""A status followed by the name of a collectives library. TensorStore raises ValueErrors of the
same form, without that name."""


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error means that another process or the network failed during a collective; causes
    are followed, as Orbax wraps such errors in its own.
    """
    if isinstance(error, OptimusError):
        return False
    at: BaseException | None = error
    while at is not None:
        if is_runtime_error(at) and "RESOURCE_EXHAUSTED" not in str(at):
            return True
        at = at.__cause__
    return False


def is_runtime_error(error: BaseException) -> bool:
    """Whether JAX's runtime raised the error: a JaxRuntimeError, or a ValueError of a collective,
    which it raises when the program runs before the call returns (one CPU device per process).
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _COLLECTIVE_ERROR.match(str(error)) is not None
    )


_alone: ContextVar[str | None] = ContextVar("_alone", default=None)
"""Who is called in this process alone; None: nobody, and all processes do the same."""


@contextlib.contextmanager
def called_alone(name: str) -> Iterator[None]:
    """What is called meanwhile is called in this process alone: what all processes have to do
    together is refused, where it would wait for ever.

    Args:
      name: who is called, for the error.
    """
    before = _alone.set(name)
    try:
        yield
    finally:
        _alone.reset(before)


def _check_together() -> None:
    """Raise ConfigError if this process alone calls what all have to call."""
    if (name := _alone.get()) is not None:
        raise ConfigError(
            explain(
                "this takes all processes of the run, and one alone has called it",
                given=f"{name}, in process {jax.process_index()} of {jax.process_count()}",
                do="do it in a program of its own, such as generate.py --run RUN --step N",
            )
        )


def broadcast_from_0(text: str) -> str:
    """The text of process 0; every process must call it."""
    if jax.process_count() == 1:
        return text
    _check_together()
    own = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.array(len(own), np.int32)))
    if length == 0:
        return ""
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.resize(own, length)))).decode()


def gather_json_from_all(value: Any) -> list[Any]:
    """The JSON values of all processes, by process id; every process must call it."""
    if jax.process_count() == 1:
        return json.loads(json.dumps([value]))
    _check_together()
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(text.size, np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: text.size] = text
    return [
        json.loads(row[:length].tobytes())
        for row, length in zip(multihost_utils.process_allgather(padded), lengths, strict=True)
    ]


def gather_from_all(number: int) -> list[int]:
    """Each process's number, in the order of process ids; every process must call it."""
    if jax.process_count() == 1:
        return [number]
    _check_together()
    return np.asarray(multihost_utils.process_allgather(np.array(number, np.int32))).tolist()


def assert_same_everywhere(facts: Mapping[str, str], *, is_transient: bool = False) -> None:
    """Raise unless the facts are equal in every process; every process must call it, with the same
    names.

    Args:
      is_transient: whether a restart of all processes may resolve the difference.
    Raises:
      ConfigError: in every process; it names the first fact that differs, and a process in which it
        does.
      FaultError: the same, if `is_transient`.
    """
    if jax.process_count() == 1:
        return
    _check_together()
    own = np.array(
        [list(hashlib.sha256(value.encode()).digest()[:8]) for value in facts.values()], np.uint8
    )
    everyones = np.asarray(multihost_utils.process_allgather(own))
    differing = (everyones != everyones[0]).any(axis=2)
    if not differing.any():
        return
    fact = int(np.argmax(differing.any(axis=0)))
    name, value = list(facts.items())[fact]
    text = explain(
        f"the processes of this run do not agree on {name}",
        given=(
            f"process {int(np.argmax(differing[:, fact]))} differs from process 0; here it is"
            f" {value[:200]}"
        ),
        do=(
            "start all from the same command, files and versions, and with a run directory and data"
            " that all of them see"
        ),
    )
    if is_transient:
        raise FaultError(text)
    error = ConfigError(text)
    error.raised_by_all_processes = True
    raise error


def is_writer() -> bool:
    """Whether this process writes the files that only one process may write."""
    return jax.process_index() == 0


class Agreement:
    """The maxima over processes of a few small numbers each, in all of them; a tiny collective.

    The result is an asynchronous array: read it a step later, so that nothing waits for it.
    """

    def __init__(self, mesh: Mesh) -> None:
        axes = mesh.axis_names
        self._sharding = NamedSharding(mesh, PartitionSpec(axes))
        self._num_local, self._num_devices = len(mesh.local_devices), mesh.size
        self._largest = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.pmax(x[0], axes),
                mesh=mesh,
                in_specs=PartitionSpec(axes),
                out_specs=PartitionSpec(),
            )
        )

    def __call__(self, *numbers: int) -> jax.Array:
        """int32[len(numbers)], replicated."""
        local = np.tile(np.array(numbers, np.int32), (self._num_local, 1))
        shape = (self._num_devices, len(numbers))
        return self._largest(jax.make_array_from_process_local_data(self._sharding, local, shape))
