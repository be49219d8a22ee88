"""Client side of the rendezvous: a process other than 0 reports to process 0 (rendezvous_server.py)
and reads its answers, until JAX has connected both.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Self

from optimus_jax.cluster.launch_detection import Launch
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
    this_process,
    waiting_text,
)
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.resilient_io import print_to_stderr

ANSWER_WAIT_S = 10.0
"""How long after the deadline this process waits for process 0 to say which processes are
missing."""


class CoordinatorConnection:
    """Connection to process 0 until JAX has connected the processes: a context manager."""

    def __init__(self, connection: socket.socket, answers: "_AnswerReader") -> None:
        self._connection, self._answers, self._is_connected = connection, answers, False
        connection.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with contextlib.suppress(OSError):  # process 0 has gone
            if error is None:
                self._connection.sendall(JOINED)
        self.close()

    def close(self) -> None:
        """Close the connection without sending anything."""
        self._connection.close()

    def lost(self) -> list[int]:
        """Processes that ended before they were connected: process 0, or those that it names."""
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
    """Report to process 0, and return when it answers that all processes have come.

    Args: as for `RendezvousServer`.
    Raises:
      FaultError: process 0 cannot be reached before the deadline, or others are missing.
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
                # on an ephemeral port without a listener, TCP can connect a socket to itself
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
                why = "process 0 closed the connection"
        except OSError as error:
            why = str(error)
        if time.monotonic() >= notice_at:
            say(waiting_text([0], launch))
            notice_at = time.monotonic() + NOTICE_EVERY_S
        time.sleep(RETRY_S)
    raise missing_error([0], launch, f"; {launch.coordinator}: {why}")


def _check(answer: dict[str, Any], launch: Launch) -> None:
    """Raise the errors of `report_to_coordinator`, unless process 0 has accepted this process."""
    if MISSING in answer:
        raise missing_error(answer[MISSING], launch)
    if REFUSED in answer:
        raise ConfigError(
            explain(
                "process 0 refused this process",
                given=f"{answer[REFUSED]}; this is {this_process(launch)}",
                do=(
                    "give each process a unique --process-id and the same --num-processes, and each"
                    " run its own --coordinator"
                ),
            )
        )


class _AnswerReader:
    """Reads the answers of process 0, one line of JSON each, however TCP splits them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, b""

    def next(self) -> dict[str, Any]:
        """The next answer.

        Raises BlockingIOError or TimeoutError (by the socket's mode) while it is incomplete, and
        EOFError if the connection ends or the line is not a known answer.
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
    """The first answer of process 0; None: it ended, did not answer in time, or is another
    program."""
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
