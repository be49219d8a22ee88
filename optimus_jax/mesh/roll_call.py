"""Before the processes of a run are connected: who is there, and who is missed.

JAX's own service says neither, and ends the process when it has waited for too long. So process 0 first listens on the
coordinator's port itself, and each other process tells it which one it is: a line of JSON each way. When all have come,
process 0 frees the port, starts JAX's service there, and lets them go. Nobody waits longer than the deadline, and then
everybody who is there knows who is not. Connections stay until JAX has made its own: who dies in between is missed at once.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from optimus_jax.errors import ConfigError, FaultError, explain
from optimus_jax.mesh.engines import RESTARTING, Launch

TOLD_AFTER_S, TOLD_AGAIN_S = 10.0, 60.0
"""When who waits says for whom, the first time and from then on."""
VERDICT_S = 10.0
"""Beyond the deadline: how long the others wait for process 0 to say who is missing."""
_PORT_FREED_S = 10.0
"""How long the port may still be taken by a process of the same run that is just ending."""
_RETRY_S = 0.05
_SEEN_OFF_S = 1.0
_LONGEST = 4096
"""Bytes of a line."""
_GO, _REFUSED, _MISSING = _ANSWERS = "go", "refused", "missing"
_JOINED = b"joined\n"
"""What the others say last, after their line of JSON."""

Say = Callable[[str], object]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class RollCall:
    """Process 0's side: a context manager; leaving it ends all connections.

    Args:
      launch: of this process.
      deadline: on `time.monotonic`'s clock.
      say: told whom it waits for.
    Raises:
      ConfigError: the port is taken, or the address is not this machine's.
      FaultError: the port is taken, under an engine that starts jobs again.
    """

    def __init__(self, launch: Launch, deadline: float, say: Say = _say) -> None:
        self._launch, self._deadline, self._say = launch, deadline, say
        self._present: dict[int, _Caller] = {}
        self._joined: set[int] = set()
        self._listener = _listen(launch, min(deadline, time.monotonic() + _PORT_FREED_S))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.close()

    @property
    def missing(self) -> list[int]:
        """Processes that have not come, or have gone again."""
        return [number for number in range(1, self._launch.num_processes) if number not in self._present and number not in self._joined]

    def gather(self) -> None:
        """Return when all are there; the port is free then. Raises FaultError, here and there, if the deadline passes."""
        tell_at = time.monotonic() + TOLD_AFTER_S
        while missing := self.missing:
            now = time.monotonic()
            if now >= self._deadline:
                self._answer_all({_MISSING: missing})
                raise _not_come(missing, self._launch, _unresolved(self._launch))
            if now >= tell_at:
                self._say(_waiting(missing, self._launch))
                tell_at = now + TOLD_AGAIN_S
            for key, _ in self._selector.select(min(self._deadline, tell_at) - now):
                self._accept() if key.fileobj is self._listener else self._hear(key.data)
        self._selector.unregister(self._listener)
        self._listener.close()

    def release(self) -> None:
        """Let the others go on: the service is up."""
        self._answer_all({_GO: True})

    def lost(self) -> list[int]:
        """Who has gone since, and is not connected; the others are told."""
        for key, _ in self._selector.select(0):
            self._hear(key.data)
        if missing := self.missing:
            self._answer_all({_MISSING: missing})
        return missing

    def see_off(self) -> None:
        """All are connected: wait for the others to hang up first, since whose side does keeps the port for a while."""
        self._answer_all({_GO: True})
        until = time.monotonic() + _SEEN_OFF_S
        while self._present and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._hear(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has hung up meanwhile
            connection, address = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Caller(connection, address[0]))

    def _hear(self, caller: "_Caller") -> None:
        try:
            received = caller.connection.recv(_LONGEST)
        except OSError:
            received = b""
        caller.heard += received
        if not received or len(caller.heard) > _LONGEST:
            self._hang_up(caller)
        elif caller.number is not None:
            if _JOINED in caller.heard:
                self._joined.add(caller.number)
        elif b"\n" in caller.heard:
            try:
                self._admit(caller, json.loads(caller.heard.partition(b"\n")[0]))
            except Exception:  # no process of ours: whatever a stranger sends, this one goes on
                self._hang_up(caller)

    def _admit(self, caller: "_Caller", said: dict[str, Any]) -> None:
        number, launch = int(said["process"]), self._launch
        caller.name = f"process id {said['pid']} on {said['host']}"
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
            _answer(caller.connection, {_REFUSED: refusal})
            self._hang_up(caller)
        else:
            caller.number, self._present[number] = number, caller

    def _hang_up(self, caller: "_Caller") -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller.number is not None:
            del self._present[caller.number]

    def _answer_all(self, answer: dict[str, Any]) -> None:
        for caller in self._present.values():
            _answer(caller.connection, answer)


class _Caller:
    """Who has connected."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.name = connection, address
        self.heard = b""
        self.number: int | None = None


class First:
    """Process 0, as another one sees it while both are being connected: a context manager, left when they are or cannot be."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._is_connected = connection, False
        connection.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # process 0 has gone
            if error is None:
                self._connection.sendall(_JOINED)
        self.close()

    def close(self) -> None:
        """Hang up, without a word."""
        self._connection.close()

    def lost(self) -> list[int]:
        """Who is not connected and has gone: process 0, or whom it names."""
        if self._is_connected:
            return []
        try:
            answer = json.loads(self._connection.recv(_LONGEST).partition(b"\n")[0] or "{}")
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            return [0]
        self._is_connected = _GO in answer  # it may hang up before this one is
        return [] if self._is_connected else answer.get(_MISSING, [0])


def report(launch: Launch, deadline: float, say: Say = _say) -> First:
    """The other processes' side: return when process 0 says that all are there.

    Args: as for `RollCall`.
    Raises:
      FaultError: process 0 is not there before the deadline, or misses others.
      ConfigError: it belongs to another run.
    """
    said = json.dumps({"process": launch.process_id, "of": launch.num_processes, "job": launch.job, "host": socket.gethostname(), "pid": os.getpid()})
    tell_at, why = time.monotonic() + TOLD_AFTER_S, "not tried yet"
    while time.monotonic() < deadline:
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(
                    socket.create_connection(address_of(launch), timeout=max(_RETRY_S, min(TOLD_AFTER_S, deadline - time.monotonic()))))
                if connection.getsockname() == connection.getpeername():  # the port is one that the system deals out, and nobody listens there
                    raise OSError("this process reached itself")
                connection.sendall(said.encode() + b"\n")
                if (answer := _await_answer(connection, deadline + VERDICT_S, tell_at, lambda: say(_waiting_along(launch)))) is not None:
                    _check(answer, launch)
                    stack.pop_all()
                    return First(connection)
                why = "process 0 was there and has gone"
        except OSError as error:
            why = str(error)
        if time.monotonic() >= tell_at:
            say(_waiting([0], launch))
            tell_at = time.monotonic() + TOLD_AGAIN_S
        time.sleep(_RETRY_S)
    raise _not_come([0], launch, f"; {launch.coordinator}: {why}")


def _check(answer: dict[str, Any], launch: Launch) -> None:
    """Raises what `report` does, unless process 0 lets this one go on."""
    if _MISSING in answer:
        raise _not_come(answer[_MISSING], launch)
    if _REFUSED in answer:
        raise ConfigError(explain("process 0 does not know this process as one of its run", given=f"{answer[_REFUSED]}; this is {_oneself(launch)}",
                                  do="give each process of a run a number of its own and all the same --num-processes, and each run a --coordinator of its own"))


def _await_answer(connection: socket.socket, until: float, tell_at: float, tell: Callable[[], object]) -> dict[str, Any] | None:
    """What process 0 says; None: it has gone, or says nothing of ours."""
    heard = b""
    while b"\n" not in heard and len(heard) < _LONGEST:
        now = time.monotonic()
        if now >= until:
            return None
        if now >= tell_at:
            tell()
            tell_at = now + TOLD_AGAIN_S
        connection.settimeout(min(until, tell_at) - now)
        try:
            received = connection.recv(_LONGEST)
        except TimeoutError:
            continue
        if not received:
            return None
        heard += received
    try:
        answer = json.loads(heard.partition(b"\n")[0])
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and not answer.keys().isdisjoint(_ANSWERS) else None


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has hung up
        connection.sendall(json.dumps(answer).encode() + b"\n")


def address_of(launch: Launch) -> tuple[str, int]:
    """Host and port of process 0."""
    assert launch.coordinator is not None
    host, _, port = launch.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def bind_address(launch: Launch) -> str | None:
    """`HOST:PORT` that process 0 listens on; None: all addresses, at the coordinator's port."""
    if launch.bind is None:
        return None
    return f"{f'[{launch.bind}]' if ':' in launch.bind else launch.bind}:{address_of(launch)[1]}"


def _listen(launch: Launch, patience_until: float) -> socket.socket:
    """Where JAX's service will."""
    port = address_of(launch)[1]
    both = launch.bind is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (launch.bind or "") else socket.AF_INET
    while True:
        try:
            listener = socket.create_server((launch.bind or "", port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < patience_until:
                time.sleep(_RETRY_S)
                continue
            # Who had the port before may be just ending, which is no reason for an engine to give the job up.
            kind = FaultError if error.errno == errno.EADDRINUSE and launch.engine in RESTARTING else ConfigError
            raise kind(explain(
                "the processes of this run cannot be connected: process 0 cannot listen", given=f"{bind_address(launch) or launch.coordinator}: {error.strerror}",
                do="give a --coordinator HOST:PORT that is free on the machine of process 0 (under an engine: JAX_COORDINATOR_PORT); where its "
                   "machine knows itself by another address: --set distributed.bind=ADDRESS, 0.0.0.0 for all")) from error
        listener.setblocking(False)
        return listener


def has_gone(lost: list[int], launch: Launch) -> FaultError:
    """What to raise for processes that ended when all had been there."""
    return FaultError(explain(
        f"the processes of this run had found one another, and {_named(lost)} of {launch.num_processes} ended before JAX had connected them",
        given=_oneself(launch), do="see what it has printed, then start all again"))


def _not_come(missing: list[int], launch: Launch, more: str = "") -> FaultError:
    return FaultError(explain(
        f"the processes of this run have not found one another: {_named(missing)} of {launch.num_processes} did not come in time",
        given=f"{_oneself(launch)}{more}",
        do="see whether each of them is running and what it has printed, and whether --coordinator can be reached from there; "
           "for a process that is meant to be alone: --set distributed.engine=none"))


def _unresolved(launch: Launch) -> str:
    """What is wrong with the coordinator's name, which process 0 does not need and the others do."""
    host = address_of(launch)[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"; here nothing is known by the name of {host}: {error.strerror}"
    return ""


def _waiting(missing: list[int], launch: Launch) -> str:
    return f"waiting for {_named(missing)} of {launch.num_processes}; {_oneself(launch)}"


def _waiting_along(launch: Launch) -> str:
    return f"waiting with process 0 at {launch.coordinator} for others; {_oneself(launch)}"


def _oneself(launch: Launch) -> str:
    return f"process {launch.process_id} of {launch.num_processes}, process 0 expected at {launch.coordinator} ({launch})"


def _named(numbers: list[int]) -> str:
    """`process 1`, `processes 1, 2, 5`; of many the first few."""
    shown = ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
