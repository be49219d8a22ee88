"""Before the processes of a run are connected: who is there, and who is missed.

JAX's own service says neither, and ends the process when it has waited for too long. So process 0
first listens on the coordinator's port itself, and each other process tells it which one it is: a
line of JSON each way. When all have come, process 0 frees the port, starts JAX's service there, and
lets them go. Nobody waits longer than the deadline, and then everybody who is there knows who is
not. Connections stay until JAX has made its own: who dies in between is missed at once.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from types import TracebackType
from typing import Any, Self

from optimus_jax.cluster.launch import Launch
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
    print_to_stderr,
    unresolved_host,
    waiting_text,
)
from optimus_jax.errors import ConfigError, FaultError, explain

_PORT_FREED_S = 10.0
"""How long the port may still be taken by a process of the same run that is just ending."""
_DISCONNECT_WAIT_S = 1.0


class RendezvousServer:
    """Process 0's side: a context manager; leaving it ends all connections.

    Args:
      launch: of this process.
      deadline: on `time.monotonic`'s clock.
      say: told whom it waits for.
    Raises:
      ConfigError: the port is taken, or the address is not this machine's.
      FaultError: the port is taken, under an engine that starts jobs again.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.close()

    @property
    def missing(self) -> list[int]:
        """Processes that have not come, or have gone again."""
        return [
            number
            for number in range(1, self._launch.num_processes)
            if number not in self._present and number not in self._joined
        ]

    def gather(self) -> None:
        """Return when all are there; the port is free then.

        Raises FaultError, here and there, if the deadline passes.
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
        """Let the others go on: the service is up."""
        self._answer_all({GO: True})

    def lost(self) -> list[int]:
        """Who has gone since, and is not connected; the others are told."""
        for key, _ in self._selector.select(0):
            self._receive(key.data)
        if missing := self.missing:
            self._answer_all({MISSING: missing})
        return missing

    def await_disconnects(self) -> None:
        """All are connected: wait for the others to hang up first, since whose side does keeps the
        port for a while.
        """
        self._answer_all({GO: True})
        until = time.monotonic() + _DISCONNECT_WAIT_S
        while self._present and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._receive(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has hung up meanwhile
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
            except Exception:  # no process of ours: whatever a stranger sends, this one goes on
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
    """Who has connected."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.name = connection, address
        self.buffer = b""
        self.number: int | None = None


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has hung up
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _listen(launch: Launch, retry_until: float) -> socket.socket:
    """Where JAX's service will."""
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
            # Who had the port before may be just ending, which is no reason for an engine to give
            # the job up.
            kind = (
                FaultError if error.errno == errno.EADDRINUSE and launch.restarts else ConfigError
            )
            raise kind(
                explain(
                    "the processes of this run cannot be connected: process 0 cannot listen",
                    given=f"{bind_address(launch) or launch.coordinator}: {error.strerror}",
                    do=(
                        "give a --coordinator HOST:PORT that is free on the machine of process 0"
                        " (under an engine: JAX_COORDINATOR_PORT); where its machine knows itself"
                        " by another address: --set distributed.bind=ADDRESS, 0.0.0.0 for all"
                    ),
                )
            ) from error
        listener.setblocking(False)
        return listener
