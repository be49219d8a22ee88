"""The rendezvous as a process other than 0 sees it: it reports to process 0
(rendezvous_server.py) and receives what that says, until both are connected.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from optimus_jax.cluster.launch import Launch
from optimus_jax.cluster.rendezvous_messages import (
    ANSWERS,
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
    client_waiting_text,
    missing_error,
    print_to_stderr,
    this_process,
    waiting_text,
)
from optimus_jax.errors import ConfigError, explain

ANSWER_WAIT_S = 10.0
"""Beyond the deadline: how long this process waits for process 0 to say who is missing."""


class CoordinatorConnection:
    """Process 0, as another one sees it while both are being connected: a context manager, left
    when they are or cannot be.
    """

    def __init__(self, connection: socket.socket, answers: "_AnswerReader") -> None:
        self._connection, self._answers, self._is_connected = connection, answers, False
        connection.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # process 0 has gone
            if error is None:
                self._connection.sendall(JOINED)
        self.close()

    def close(self) -> None:
        """Hang up, without a word."""
        self._connection.close()

    def lost(self) -> list[int]:
        """Who is not connected and has gone: process 0, or whom it names."""
        if self._is_connected:
            return []
        try:
            answer = self._answers.next()
        except BlockingIOError:
            return []
        except (OSError, EOFError):
            return [0]
        self._is_connected = GO in answer  # it may hang up before this one is
        return [] if self._is_connected else answer.get(MISSING, [0])


def report_to_coordinator(
    launch: Launch, deadline: float, say: Say = print_to_stderr
) -> CoordinatorConnection:
    """The other processes' side: return when process 0 says that all are there.

    Args: as for `RendezvousServer`.
    Raises:
      FaultError: process 0 is not there before the deadline, or misses others.
      ConfigError: it belongs to another run.
    """
    said = json.dumps(
        {
            "process": launch.process_id,
            "of": launch.num_processes,
            "job": launch.job,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
    )
    notice_at, why = time.monotonic() + FIRST_NOTICE_S, "not tried yet"
    while time.monotonic() < deadline:
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(
                    socket.create_connection(
                        address_of(launch),
                        timeout=max(RETRY_S, min(FIRST_NOTICE_S, deadline - time.monotonic())),
                    )
                )
                # the port is one that the system deals out, and nobody listens there
                if connection.getsockname() == connection.getpeername():
                    raise OSError("this process reached itself")
                connection.sendall(said.encode() + b"\n")
                answers = _AnswerReader(connection)
                if (
                    answer := _await_answer(
                        connection,
                        answers,
                        deadline + ANSWER_WAIT_S,
                        notice_at,
                        lambda: say(client_waiting_text(launch)),
                    )
                ) is not None:
                    _check(answer, launch)
                    stack.pop_all()
                    return CoordinatorConnection(connection, answers)
                why = "process 0 was there and has gone"
        except OSError as error:
            why = str(error)
        if time.monotonic() >= notice_at:
            say(waiting_text([0], launch))
            notice_at = time.monotonic() + NOTICE_EVERY_S
        time.sleep(RETRY_S)
    raise missing_error([0], launch, f"; {launch.coordinator}: {why}")


def _check(answer: dict[str, Any], launch: Launch) -> None:
    """Raises what `report_to_coordinator` does, unless process 0 lets this one go on."""
    if MISSING in answer:
        raise missing_error(answer[MISSING], launch)
    if REFUSED in answer:
        raise ConfigError(
            explain(
                "process 0 does not know this process as one of its run",
                given=f"{answer[REFUSED]}; this is {this_process(launch)}",
                do=(
                    "give each process of a run a number of its own and all the same"
                    " --num-processes, and each run a --coordinator of its own"
                ),
            )
        )


class _AnswerReader:
    """What process 0 says, a line each, in whatever pieces it comes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, b""

    def next(self) -> dict[str, Any]:
        """The next of them.

        Raises BlockingIOError or TimeoutError, as the connection is set, while it has not come
        whole, and EOFError if none of ours will.
        """
        while b"\n" not in self._buffer:
            received = self._connection.recv(MAX_LINE_BYTES)
            if not received or len(self._buffer) > MAX_LINE_BYTES:
                raise EOFError
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise EOFError from error
        if not isinstance(answer, dict) or answer.keys().isdisjoint(ANSWERS):
            raise EOFError
        return answer


def _await_answer(
    connection: socket.socket,
    answers: _AnswerReader,
    until: float,
    notice_at: float,
    notify: Callable[[], object],
) -> dict[str, Any] | None:
    """What process 0 says first; None: it has gone, or says nothing of ours."""
    while True:
        now = time.monotonic()
        if now >= until:
            return None
        if now >= notice_at:
            notify()
            notice_at = now + NOTICE_EVERY_S
        connection.settimeout(min(until, notice_at) - now)
        try:
            return answers.next()
        except TimeoutError:
            continue
        except EOFError:
            return None
