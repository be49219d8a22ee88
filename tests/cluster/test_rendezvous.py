"""The rendezvous before JAX connects: all processes arrive, or the missing ones are named."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from helpers import free_port

from optimus_jax.cluster import distributed, rendezvous_server
from optimus_jax.cluster import rendezvous_client as client_module
from optimus_jax.cluster.distributed import _Joining
from optimus_jax.cluster.launch_detection import Launch
from optimus_jax.cluster.rendezvous_client import report_to_coordinator
from optimus_jax.cluster.rendezvous_messages import address_of
from optimus_jax.cluster.rendezvous_server import RendezvousServer
from optimus_jax.errors import ConfigError, FaultError

LONG_S = 60.0
"""Longer than any wait in these tests."""


@pytest.fixture
def first():
    """The launch of process 0 of three, with a free port."""
    port = free_port()
    return Launch(
        launcher="SLURM",
        why="",
        coordinator=f"127.0.0.1:{port}",
        num_processes=3,
        job="12.0",
        restarts=True,
    )


def other(first, number, **changes):
    return replace(first, process_id=number, **changes)


def deadline(seconds=LONG_S):
    return time.monotonic() + seconds


def test_all_processes_arrive_and_the_port_is_free_for_jax(first):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, deadline()) as server:
        there = [
            pool.submit(report_to_coordinator, other(first, number), deadline())
            for number in (1, 2)
        ]
        server.gather()
        with socket.create_server(address_of(first), family=socket.AF_INET):
            assert not any(each.done() for each in there)  # the service is not up yet
            server.release()
            for each in there:
                each.result(LONG_S).close()


def test_an_unresolvable_coordinator_name_is_reported(first):
    with (
        RendezvousServer(
            replace(first, coordinator=f"no.such.host.invalid:{address_of(first)[1]}"),
            deadline(0.0),
        ) as server,
        pytest.raises(
            FaultError,
            match=(
                r"processes 1, 2 of 3 did not come in time\n.*cannot resolve"
                r" no\.such\.host\.invalid"
            ),
        ),
    ):
        server.gather()


def test_other_processes_may_start_before_process_0(first):
    messages = []
    with ThreadPoolExecutor() as pool:
        there = [
            pool.submit(report_to_coordinator, other(first, number), deadline(), messages.append)
            for number in (1, 2)
        ]
        with RendezvousServer(first, deadline()) as server:
            server.gather()
            server.release()
        for each in there:
            each.result(LONG_S).close()
    assert messages == []


@pytest.fixture
def all_there(first):
    """Process 0 and the connections of the others, after all have arrived and before JAX has
    connected any.
    """
    with ThreadPoolExecutor() as pool, RendezvousServer(first, deadline()) as server:
        there = [
            pool.submit(report_to_coordinator, other(first, number), deadline())
            for number in (1, 2)
        ]
        server.gather()
        server.release()
        others = [each.result(LONG_S) for each in there]
        yield server, others
        for each in others:
            each.close()


def until(look, wanted):
    end = deadline()
    while (found := look()) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert found == wanted


def test_a_process_that_dies_before_jax_connects_is_named_to_all(all_there):
    server, (one, two) = all_there
    assert (server.lost(), one.lost(), two.lost()) == ([], [], [])
    one.close()
    until(server.lost, [1])
    until(two.lost, [1])


def test_the_loss_of_process_0_is_named_too(all_there):
    server, others = all_there
    for caller in server._present.values():
        caller.connection.close()
    for each in others:
        until(each.lost, [0])


def test_a_connected_process_may_leave_before_the_others_are(all_there):
    server, (one, two) = all_there
    with one:
        pass
    until(lambda: (server.lost(), sorted(server._present)), ([], [2]))
    with ThreadPoolExecutor() as pool:
        disconnects = pool.submit(server.await_disconnects)
        until(lambda: two.lost() or two._is_connected, True)
        with two:
            pass
        disconnects.result(LONG_S)
    assert server._present == {}


def test_all_waiting_processes_are_told_who_is_missing(first):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, deadline()) as server:
        there = pool.submit(report_to_coordinator, other(first, 2), deadline())
        while server.missing != [1]:
            server._selector.select()
            handle_messages(server)
        server._deadline = time.monotonic()
        with pytest.raises(FaultError, match="process 1 of 3 did not come in time"):
            server.gather()
        with pytest.raises(
            FaultError, match=r"process 1 of 3 did not come in time\n  given: process 2 of 3"
        ):
            there.result(LONG_S)


def handle_messages(server):
    for key, _ in server._selector.select():
        server._accept() if key.fileobj is server._listener else server._receive(key.data)


@pytest.mark.parametrize("bind", [None, "127.0.0.1"])
def test_the_server_listens_on_the_configured_address(first, bind):
    """Every 127.x.y.z is an address of this machine."""
    port = address_of(first)[1]
    with RendezvousServer(replace(first, bind=bind), deadline()):
        socket.create_connection(("127.0.0.1", port)).close()
        if bind is None:
            socket.create_connection(("127.0.0.2", port)).close()
        else:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port))


def test_an_address_of_another_machine_is_refused_at_once(first):
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:\d+: .*\n.*distributed\.bind"):
        RendezvousServer(replace(first, bind="192.0.2.1"), deadline())


@pytest.mark.parametrize(
    ("bind", "expected"), [(None, None), ("10.0.0.1", "10.0.0.1:{}"), ("::1", "[::1]:{}")]
)
def test_jax_is_given_the_same_listening_address(first, bind, expected, monkeypatch):
    asked = {}
    monkeypatch.setattr("jax.distributed.initialize", lambda *_, **options: asked.update(options))
    _Joining(replace(first, bind=bind), 10).run()
    assert asked["coordinator_bind_address"] == (expected and expected.format(address_of(first)[1]))


def test_a_process_that_cannot_reach_process_0_says_so(first):
    with pytest.raises(FaultError, match=r"process 0 of 3 did not come in time(.|\n)*refused"):
        report_to_coordinator(other(first, 1), deadline(0.1))


def test_the_waiting_notice_names_the_missing_processes(first, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "FIRST_NOTICE_S", 0.0)
    messages = []
    with (
        RendezvousServer(first, deadline(0.1), messages.append) as server,
        pytest.raises(FaultError, match="processes 1, 2 of 3"),
    ):
        server.gather()
    assert messages[0].startswith("waiting for processes 1, 2 of 3; process 0 of 3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": "12.1"}, "another run, 12.0, has this port"),
        ({"num_processes": 4}, "a run of 3 processes"),
    ],
)
def test_a_process_of_another_run_is_refused(first, changes, message):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, deadline()) as server:
        there = pool.submit(report_to_coordinator, other(first, 1, **changes), deadline())
        while not there.done():
            handle_pending_messages(server)
        with pytest.raises(ConfigError, match=message):
            there.result(LONG_S)
        assert server.missing == [1, 2]


def handle_pending_messages(server):
    for key, _ in server._selector.select(0.05):
        server._accept() if key.fileobj is server._listener else server._receive(key.data)


def test_two_processes_with_the_same_number_are_refused(first):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, deadline()) as server:
        both = [pool.submit(report_to_coordinator, other(first, 1), deadline()) for _ in range(2)]
        while not any(each.done() for each in both):
            handle_pending_messages(server)
        with pytest.raises(ConfigError, match="there is a process 1 already"):
            next(each for each in both if each.done()).result()
        assert server.missing == [2]
        server._deadline = time.monotonic()
        with pytest.raises(FaultError):
            server.gather()


def test_a_process_that_left_is_missing_and_may_return(first):
    messages = (
        json.dumps({"process": 1, "of": 3, "job": "12.0", "host": "h", "pid": 7}).encode() + b"\n"
    )
    with RendezvousServer(first, deadline()) as server:
        with socket.create_connection(address_of(first)) as connection:
            connection.sendall(messages)
            while 1 in server.missing:
                handle_messages(server)
        while 1 not in server.missing:
            handle_messages(server)
        with socket.create_connection(address_of(first)) as connection:
            connection.sendall(messages)
            while 1 in server.missing:
                handle_messages(server)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"process": 1}\n',
        b"[]\n",
        b"\0" * 5000,
        b'{"process": 1e999, "pid": 1, "host": "", "job": "", "of": 3}\n',
        b"[" * 4000 + b"\n",
    ],
)
def test_invalid_messages_are_ignored(first, noise):
    with (
        RendezvousServer(first, deadline()) as server,
        socket.create_connection(address_of(first)) as stranger,
    ):
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        handle_messages(server)  # accepts it
        while len(server._selector.get_map()) > 1:
            handle_messages(server)
        assert server.missing == [1, 2]


@pytest.mark.parametrize(("restarts", "kind"), [(False, ConfigError), (True, FaultError)])
def test_a_port_in_use_is_an_error(first, monkeypatch, restarts, kind):
    """A user's mistake if the user chose the port; a restarted job may find it free."""
    monkeypatch.setattr(rendezvous_server, "_PORT_FREED_S", 0.0)
    with (
        socket.create_server(address_of(first)),
        pytest.raises(kind, match="process 0 cannot listen"),
    ):
        RendezvousServer(replace(first, restarts=restarts), deadline())


def connect_to_itself(address, **_):
    """A connection to a port that nobody listens on, for which the system chose the same port on
    this side.
    """
    connection = socket.socket()
    connection.bind(("127.0.0.1", 0))
    connection.connect(connection.getsockname())
    return connection


def test_a_connection_to_itself_is_not_process_0(first, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    with pytest.raises(
        FaultError, match=r"process 0 of 3 did not come in time(.|\n)*reached itself"
    ):
        report_to_coordinator(other(first, 1), deadline(0.2))


def test_an_echoed_message_is_not_an_answer(first, monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_WAIT_S", 0.0)
    with socket.create_server(address_of(first)) as listener, ThreadPoolExecutor() as pool:
        lost = pool.submit(report_to_coordinator, other(first, 1), deadline(0.5))
        connection, _ = listener.accept()
        connection.sendall(connection.recv(4096))
        with pytest.raises(FaultError, match="did not come in time"):
            lost.result(LONG_S)
        connection.close()


def test_answers_of_process_0_are_read_in_any_pieces(first):
    """The permission to continue and the lost processes in one piece, or the latter in two
    pieces.
    """
    missing = json.dumps({"missing": [2]}).encode() + b"\n"
    for pieces in ([b'{"go": true}\n' + missing], [b'{"go": true}\n', missing[:5], missing[5:]]):
        with socket.create_server(address_of(first)) as listener, ThreadPoolExecutor() as pool:
            reached = pool.submit(report_to_coordinator, other(first, 1), deadline())
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(pieces[0])
            seen = reached.result(LONG_S)
            for place, piece in enumerate(pieces[1:]):
                assert seen.lost() == []
                connection.sendall(piece)
                if place == 0:
                    assert seen.lost() == []
            found, until = [], deadline()
            while not found and time.monotonic() < until:
                found = seen.lost()
            connection.close()
            seen.close()
        assert found == [2]


@pytest.mark.parametrize(("restarts", "kind"), [(False, ConfigError), (True, FaultError)])
def test_a_process_lost_while_jax_connects_is_a_fault_if_jobs_restart(first, restarts, kind):
    joining = SimpleNamespace(
        is_alive=lambda: False,
        failure=jax.errors.JaxRuntimeError("UNAVAILABLE: a heartbeat failed"),
    )
    with pytest.raises(kind, match="a heartbeat failed"):
        distributed._join(replace(first, restarts=restarts), joining, deadline(), list)


def test_a_port_that_is_still_in_use_is_waited_for(first):
    taken = socket.create_server(address_of(first))
    freed = threading.Timer(0.1, taken.close)
    freed.start()
    with RendezvousServer(first, deadline()):
        freed.join()
