"""Where the processes of a run meet before they are connected, and in which words: on the wire, and
to whoever reads along.
"""

import socket
import sys
from collections.abc import Callable

from optimus_jax.cluster.launch import Launch
from optimus_jax.errors import FaultError, explain

FIRST_NOTICE_S, NOTICE_EVERY_S = 10.0, 60.0
"""When who waits says for whom, the first time and from then on."""
RETRY_S = 0.05
MAX_LINE_BYTES = 4096
"""Bytes of a line."""
GO, REFUSED, MISSING = ANSWERS = "go", "refused", "missing"
"""What process 0 answers: keys of a line of JSON."""
JOINED = b"joined\n"
"""What the others say last, after their line of JSON."""

Say = Callable[[str], object]


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def ended_error(lost: list[int], launch: Launch) -> FaultError:
    """What to raise for processes that ended when all had been there."""
    return FaultError(
        explain(
            f"the processes of this run had found one another, and {processes_text(lost)} of"
            f" {launch.num_processes} ended before JAX had connected them",
            given=this_process(launch),
            do="see what it has printed, then start all again",
        )
    )


def missing_error(missing: list[int], launch: Launch, more: str = "") -> FaultError:
    return FaultError(
        explain(
            f"the processes of this run have not found one another: {processes_text(missing)} of"
            f" {launch.num_processes} did not come in time",
            given=f"{this_process(launch)}{more}",
            do=(
                "see whether each of them is running and what it has printed, and whether"
                " --coordinator can be reached from there; for a process that is meant to be alone:"
                " --set distributed.engine=none"
            ),
        )
    )


def unresolved_host(launch: Launch) -> str:
    """What is wrong with the coordinator's name, which process 0 does not need and the others
    do."""
    host = address_of(launch)[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"; here nothing is known by the name of {host}: {error.strerror}"
    return ""


def waiting_text(missing: list[int], launch: Launch) -> str:
    return (
        f"waiting for {processes_text(missing)} of {launch.num_processes}; {this_process(launch)}"
    )


def client_waiting_text(launch: Launch) -> str:
    return f"waiting with process 0 at {launch.coordinator} for others; {this_process(launch)}"


def this_process(launch: Launch) -> str:
    return (
        f"process {launch.process_id} of {launch.num_processes}, process 0 expected at"
        f" {launch.coordinator} ({launch})"
    )


def processes_text(numbers: list[int]) -> str:
    """`process 1`, `processes 1, 2, 5`; of many the first few."""
    shown = ", ".join(map(str, numbers[:20])) + (
        f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
    )
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
