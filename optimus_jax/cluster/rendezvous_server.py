"""Server side of the rendezvous: process 0 gathers the others before JAX connects them, and reports
which are missing.

JAX's own service reports neither, and aborts the process at its time-out. So process 0 first
listens on the coordinator's port itself, and each other process sends its index: one line of JSON
each way. When all have come, process 0 frees the port, starts JAX's service there, and tells the
others to connect. At the deadline every process that has come learns which are missing. Connections
stay open until JAX has connected all, so that a process which dies in between is noticed at once.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from typing import Any, Self

from optimus_jax.cluster.launch_detection import Launch
from optimus_jax.cluster.rendezvous_messages import (
    FIRST_NOTICE_S,
    GO,
    JOINED,
    MAX_LINE_BYTES,
    MISSING,
    NOTICE_EVERY_S,
    REFUSED,
    RETRY_S,
    Say,
    address_of,
    bind_address,
    missing_error,
    unresolved_host,
    waiting_text,
)
from optimus_jax.errors import ConfigError, FaultError, explain
from optimus_jax.system.resilient_io import print_to_stderr

_PORT_FREED_S = 10.0
"""How long to retry while the port is in use, perhaps by a process of the same run that is
ending."""
_DISCONNECT_WAIT_S = 1.0


class RendezvousServer:
    """Listens in process 0: a context manager that closes all connections on exit.

    Args:
      launch: how this process was started.
      deadline: on `time.monotonic`'s clock.
      say: called with a text about the processes that are missing.
    Raises:
      ConfigError: the port is taken, or the address is not this machine's.
      FaultError: the port is taken, under a launcher that restarts jobs.
    """

    def __init__(self, launch: Launch, deadline: float, say: Say = print_to_stderr) -> None:
        self._launch, self._deadline, self._say = launch, deadline, say
        self._present: dict[int, _Client] = {}
        self._joined: set[int] = set()
        self._listener = _listen(launch, min(deadline, time.monotonic() + _PORT_FREED_S))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.close()

    @property
    def missing(self) -> list[int]:
        """Processes that have not come, or have disconnected."""
        return [
            number
            for number in range(1, self._launch.num_processes)
            if number not in self._present and number not in self._joined
        ]

    def gather(self) -> None:
        """Return when all processes have come; the port is free then.

        Raises FaultError, in the other processes too, if the deadline passes.
        """
        notice_at = time.monotonic() + FIRST_NOTICE_S
        while missing := self.missing:
            now = time.monotonic()
            if now >= self._deadline:
                self._answer_all({MISSING: missing})
                raise missing_error(missing, self._launch, unresolved_host(self._launch))
            if now >= notice_at:
                self._say(waiting_text(missing, self._launch))
                notice_at = now + NOTICE_EVERY_S
            for key, _ in self._selector.select(min(self._deadline, notice_at) - now):
                self._accept() if key.fileobj is self._listener else self._receive(key.data)
        self._selector.unregister(self._listener)
        self._listener.close()

    def release(self) -> None:
        """Tell the others to connect: JAX's service is up."""
        self._answer_all({GO: True})

    def lost(self) -> list[int]:
        """Processes that have disconnected before JAX connected them; tells the others."""
        for key, _ in self._selector.select(0):
            self._receive(key.data)
        if missing := self.missing:
            self._answer_all({MISSING: missing})
        return missing

    def await_disconnects(self) -> None:
        """Wait until the others have closed their connections: the side that closes first keeps the
        port in TIME_WAIT.
        """
        self._answer_all({GO: True})
        until = time.monotonic() + _DISCONNECT_WAIT_S
        while self._present and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._receive(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has disconnected meanwhile
            connection, address = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(
                connection, selectors.EVENT_READ, _Client(connection, address[0])
            )

    def _receive(self, client: "_Client") -> None:
        try:
            received = client.connection.recv(MAX_LINE_BYTES)
        except OSError:
            received = b""
        client.buffer += received
        if not received or len(client.buffer) > MAX_LINE_BYTES:
            self._hang_up(client)
        elif client.number is not None:
            if JOINED in client.buffer:
                self._joined.add(client.number)
        elif b"\n" in client.buffer:
            try:
                self._admit(client, json.loads(client.buffer.partition(b"\n")[0]))
            except Exception:  # not a process of a run: ignore whatever it sends
                self._hang_up(client)

    def _admit(self, client: "_Client", said: dict[str, Any]) -> None:
        number, launch = int(said["process"]), self._launch
        client.name = f"process id {said['pid']} on {said['host']}"
        refusal = None
        if said["job"] != launch.job:
            refusal = f"another run, {launch.job or 'without a name'}, has this port"
        elif said["of"] != launch.num_processes:
            refusal = f"process 0 belongs to a run of {launch.num_processes} processes"
        elif not 0 < number < launch.num_processes:
            refusal = f"there is a process {number} already"
        elif number in self._present:
            refusal = f"there is a process {number} already ({self._present[number].name})"
        if refusal is not None:
            _answer(client.connection, {REFUSED: refusal})
            self._hang_up(client)
        else:
            client.number, self._present[number] = number, client

    def _hang_up(self, client: "_Client") -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        if client.number is not None:
            del self._present[client.number]

    def _answer_all(self, answer: dict[str, Any]) -> None:
        for client in self._present.values():
            _answer(client.connection, answer)


class _Client:
    """A connected process."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.name = connection, address
        self.buffer = b""
        self.number: int | None = None


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has disconnected
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _listen(launch: Launch, retry_until: float) -> socket.socket:
    """Listen on the address that JAX's service will use."""
    port = address_of(launch)[1]
    both = launch.bind is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (launch.bind or "") else socket.AF_INET
    while True:
        try:
            listener = socket.create_server(
                (launch.bind or "", port), family=family, dualstack_ipv6=both, backlog=1024
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < retry_until:
                time.sleep(RETRY_S)
                continue
            # The previous owner of the port may be ending: a launcher should restart the job.
            kind = (
                FaultError if error.errno == errno.EADDRINUSE and launch.restarts else ConfigError
            )
            raise kind(
                explain(
                    "the processes of this run cannot be connected: process 0 cannot listen",
                    given=f"{bind_address(launch) or launch.coordinator}: {error.strerror}",
                    do=(
                        "give a --coordinator HOST:PORT that is free on the machine of process 0"
                        " (under a launcher: JAX_COORDINATOR_PORT); if that machine has another"
                        " local address: --set distributed.bind=ADDRESS, 0.0.0.0 for all"
                    ),
                )
            ) from error
        listener.setblocking(False)
        return listener
