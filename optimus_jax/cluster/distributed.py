"""Several processes as one run: how they are connected and what they agree on."""

import contextlib
import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.cluster.launch import PROGRAM, Launch
from optimus_jax.cluster.rendezvous_client import report
from optimus_jax.cluster.rendezvous_messages import address_of, bind_address, has_gone
from optimus_jax.cluster.rendezvous_server import RendezvousServer
from optimus_jax.errors import ConfigError, FaultError, OptimusError, explain

_NEVER_S = 7 * 24 * 3600
GOODBYE_S = 30.0
"""For the other processes to come to the run's end as well: all that there was to save is saved."""
_SERVED_S, _POLL_S = 5.0, 0.01
"""How long process 0 waits for its own service to answer before it lets the others try, and how
often it looks."""
_LOOK_S = 0.2
"""Between two looks whether all are still there."""


def connect(launch: Launch, *, timeout_s: float, heartbeat_s: int) -> None:
    """Join the run's other processes, if it has any. Call it before anything asks for a device.

    Args:
      timeout_s: how long this process waits for the others to start.
      heartbeat_s: without a heartbeat of a process JAX aborts the others after so long.
    Raises:
      FaultError: they did not all come in time; one may have died on the way. It names those that
        are missing.
      ConfigError: they cannot be connected.
    """
    if launch.is_alone or launch.engine == PROGRAM:
        return
    # JAX's own handler would swallow the SIGTERM that asks us to save and stop
    # (faults/stopping.py).
    jax.config.update("jax_enable_preemption_service", False)
    deadline = time.monotonic() + timeout_s
    if launch.process_id > 0:
        with report(launch, deadline) as first:
            _join(launch, _joining(launch, heartbeat_s), deadline, first.lost)
        return
    with RendezvousServer(launch, deadline) as server:
        server.gather()
        joining = _joining(launch, heartbeat_s)
        _await_service(launch, joining)
        server.release()
        _join(launch, joining, deadline, server.lost)
        server.see_off()


class _Joining(threading.Thread):
    """JAX waits in C++, where no signal reaches Python; waiting for a thread, we hear them."""

    def __init__(self, launch: Launch, heartbeat_s: int) -> None:
        super().__init__(daemon=True, name="connect")
        self._launch, self._heartbeat_s = launch, heartbeat_s
        self.failure: Exception | None = None

    def run(self) -> None:
        launch = self._launch
        try:
            # JAX ends the whole process, with a page of C++ frames, when its own time-out has
            # passed. What engines.py has found is complete: left to itself JAX would add that a
            # task of SLURM has one GPU.
            jax.distributed.initialize(
                launch.coordinator,
                launch.num_processes,
                launch.process_id,
                initialization_timeout=_NEVER_S,
                heartbeat_timeout_seconds=self._heartbeat_s,
                local_device_ids=launch.local_devices,
                cluster_detection_method="deactivate",
                coordinator_bind_address=bind_address(launch),
            )
        except Exception as error:
            self.failure = error


def _joining(launch: Launch, heartbeat_s: int) -> _Joining:
    thread = _Joining(launch, heartbeat_s)
    thread.start()
    return thread


def _await_service(launch: Launch, joining: _Joining) -> None:
    """Return when JAX's service answers: who is turned away once tries again a second later."""
    until = time.monotonic() + _SERVED_S
    while joining.is_alive() and time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address_of(launch), timeout=_SERVED_S),
        ):
            return
        time.sleep(_POLL_S)


def _join(
    launch: Launch, joining: _Joining, deadline: float, lost: Callable[[], list[int]]
) -> None:
    """Return when JAX has connected all; `lost` are those that have gone instead."""
    gone: list[int] = []
    while joining.is_alive() and not gone and time.monotonic() < deadline:
        joining.join(_LOOK_S)
        gone = lost() if joining.is_alive() else []
    if gone:
        raise has_gone(gone, launch)
    if joining.is_alive():
        raise FaultError(
            explain(
                "the processes of this run have found one another, and JAX has not connected them"
                " in time",
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
    if isinstance(joining.failure, jax.errors.JaxRuntimeError):
        # All have found one another there: who has taken the port since, or a host that is lost, is
        # no reason for an engine to give the job up.
        raise (FaultError if launch.restarts else ConfigError)(
            explain(
                "the processes of this run cannot be connected",
                given=f"{launch.coordinator}: {str(joining.failure).splitlines()[0]}",
                do="give a --coordinator HOST:PORT that is free on the machine of process 0",
            )
        ) from joining.failure
    if joining.failure is not None:
        raise joining.failure


def leave() -> bool:
    """Disconnect, together with the others; False: one has not come to that in GOODBYE_S.

    JAX by itself would wait until its heartbeats fail, and abort.
    """
    has_left = threading.Event()

    def shut_down() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one has been lost
            jax.distributed.shutdown()
            has_left.set()

    thread = threading.Thread(target=shut_down, name="leave", daemon=True)
    thread.start()
    thread.join(GOODBYE_S)
    return has_left.is_set()


@contextlib.contextmanager
def named(launch: Launch) -> Iterator[None]:
    """Errors that leave this say which process of the run has had them, if there are several."""
    try:
        yield
    except Exception as error:
        if not launch.is_alone:
            error.add_note(f"in process {launch.process_id} of {launch.num_processes}")
        raise


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Around what each process does for itself: if one of them has an error, so have all, and none
    waits for it.

    Nothing inside may wait for another process.

    Raises:
      OptimusError: this process's own, or one that says which process has had one.
      FaultError: another process has had an error that is no OptimusError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    outcomes = gather_from_all(
        _WELL if failure is None else _MISTAKE if isinstance(failure, OptimusError) else _FAULT
    )
    if failure is None and any(outcomes):
        is_fault = _FAULT in outcomes
        failure = (FaultError if is_fault else OptimusError)(
            explain(
                "another process of this run cannot go on",
                given=f"process {outcomes.index(max(outcomes))} of {len(outcomes)}",
                do="see what it has printed",
            )
        )
    if failure is not None:
        if isinstance(failure, OptimusError):
            failure.raised_by_all_processes = _FAULT not in outcomes
        raise failure


_WELL, _MISTAKE, _FAULT = range(3)
"""How it went in a process: nothing, an OptimusError, any other."""


_OF_A_COLLECTIVE = re.compile(r"[A-Z_]+: .*\b(Gloo|NCCL)\b")
"""The libraries that carry them, behind the word of a status. TensorStore has ValueErrors of the
same form."""


def has_lost_another(error: BaseException) -> bool:
    """Whether an error is what a process of several has when another or the network has failed in
    what they do together; Orbax reports it as an error of its own.
    """
    if isinstance(error, OptimusError):
        return False
    at: BaseException | None = error
    while at is not None:
        if is_of_runtime(at) and "RESOURCE_EXHAUSTED" not in str(at):
            return True
        at = at.__cause__
    return False


def is_of_runtime(error: BaseException) -> bool:
    """Whether JAX's runtime has raised it: as an error of its own, or, where a program is run
    before the call returns (one device of a CPU here), as a ValueError of a collective.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _OF_A_COLLECTIVE.match(str(error)) is not None
    )


def broadcast_from_0(text: str) -> str:
    """What the first process has; every process has to call it."""
    if jax.process_count() == 1:
        return text
    own = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.array(len(own), np.int32)))
    if length == 0:
        return ""
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.resize(own, length)))).decode()


def gather_from_all(number: int) -> list[int]:
    """What each process has, by its number; every process has to call it."""
    if jax.process_count() == 1:
        return [number]
    return np.asarray(multihost_utils.process_allgather(np.array(number, np.int32))).tolist()


def assert_same_everywhere(facts: Mapping[str, str], *, may_become: bool = False) -> None:
    """Make sure that these are the same in every process; every process has to call it, with the
    same names.

    Args:
      may_become: whether what differs now may be the same when all are started again.
    Raises:
      ConfigError: in every process, naming the first fact in which one differs from process 0, and
        that process.
      FaultError: the same, if they may become the same.
    """
    if jax.process_count() == 1:
        return
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
    if may_become:
        raise FaultError(text)
    error = ConfigError(text)
    error.raised_by_all_processes = True
    raise error


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
        self._largest = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.pmax(x[0], axes),
                mesh=mesh,
                in_specs=PartitionSpec(axes),
                out_specs=PartitionSpec(),
            )
        )

    def __call__(self, number: int) -> jax.Array:
        """int32 scalar, replicated."""
        local = np.full(self._num_local, number, np.int32)
        return self._largest(
            jax.make_array_from_process_local_data(self._sharding, local, (self._num_devices,))
        )
