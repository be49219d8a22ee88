"""Addresses, wire format and texts of the rendezvous."""

import socket
from collections.abc import Callable

from optimus_jax.cluster.launch_detection import Launch
from optimus_jax.errors import FaultError, explain

FIRST_NOTICE_S, NOTICE_EVERY_S = 10.0, 60.0
"""When a waiting process first prints which processes it waits for, and the interval after that."""
RETRY_S = 0.05
MAX_LINE_BYTES = 4096
"""Most bytes of a line."""
GO, REFUSED, MISSING = ANSWERS = "go", "refused", "missing"
"""Keys of the JSON line with which process 0 answers."""
JOINED = b"joined\n"
"""Last message of the other processes, after their line of JSON."""

Say = Callable[[str], object]


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
    """The error for processes that ended after all had come."""
    return FaultError(
        explain(
            f"the processes of this run had met at the rendezvous, and {processes_text(lost)} of"
            f" {launch.num_processes} ended before JAX had connected them",
            given=this_process(launch),
            do="see what it has printed, then start all again",
        )
    )


def missing_error(missing: list[int], launch: Launch, more: str = "") -> FaultError:
    return FaultError(
        explain(
            "the processes of this run did not all meet at the rendezvous:"
            f" {processes_text(missing)} of {launch.num_processes} did not come in time",
            given=f"{this_process(launch)}{more}",
            do=(
                "see whether each of them is running and what it has printed, and whether"
                " --coordinator can be reached from there; for a single process:"
                " --set distributed.launcher=none"
            ),
        )
    )


def unresolved_host(launch: Launch) -> str:
    """A text if the coordinator's name cannot be resolved, else "": the other processes need the
    name, process 0 does not."""
    host = address_of(launch)[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"; process 0 cannot resolve {host}: {error.strerror}"
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
    """`process 1` or `processes 1, 2, 5`; the first 20 of many."""
    shown = ", ".join(map(str, numbers[:20])) + (
        f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
    )
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
