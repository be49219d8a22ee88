"""Who is there is known, and who is not is named."""

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
from optimus_jax.cluster import rendezvous_client as reporting
from optimus_jax.cluster.distributed import _Joining
from optimus_jax.cluster.launch import Launch
from optimus_jax.cluster.rendezvous_client import report_to_coordinator
from optimus_jax.cluster.rendezvous_messages import address_of
from optimus_jax.cluster.rendezvous_server import RendezvousServer
from optimus_jax.errors import ConfigError, FaultError

LONG_S = 60.0
"""Nobody waits for so long here."""


@pytest.fixture
def first():
    """The launch of process 0 of three, with a port that is free."""
    port = free_port()
    return Launch(
        engine="SLURM",
        why="",
        coordinator=f"127.0.0.1:{port}",
        num_processes=3,
        job="12.0",
        restarts=True,
    )


def other(first, number, **changes):
    return replace(first, process_id=number, **changes)


def soon(seconds=LONG_S):
    return time.monotonic() + seconds


def test_all_come_and_the_port_is_free_for_the_service(first):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, soon()) as call:
        there = [
            pool.submit(report_to_coordinator, other(first, number), soon()) for number in (1, 2)
        ]
        call.gather()
        with socket.create_server(address_of(first), family=socket.AF_INET):
            assert not any(each.done() for each in there)  # the service is not up yet
            call.release()
            for each in there:
                each.result(LONG_S).close()


def test_a_coordinator_that_nobody_finds_is_said_to_be_one(first):
    with (
        RendezvousServer(
            replace(first, coordinator=f"no.such.host.invalid:{address_of(first)[1]}"), soon(0.0)
        ) as call,
        pytest.raises(
            FaultError,
            match=(
                r"processes 1, 2 of 3 did not come in time\n.*cannot resolve"
                r" no\.such\.host\.invalid"
            ),
        ),
    ):
        call.gather()


def test_others_may_come_first(first):
    said = []
    with ThreadPoolExecutor() as pool:
        there = [
            pool.submit(report_to_coordinator, other(first, number), soon(), said.append)
            for number in (1, 2)
        ]
        with RendezvousServer(first, soon()) as call:
            call.gather()
            call.release()
        for each in there:
            each.result(LONG_S).close()
    assert said == []


@pytest.fixture
def all_there(first):
    """Process 0 and how the others see it, when all have come and JAX has connected none."""
    with ThreadPoolExecutor() as pool, RendezvousServer(first, soon()) as call:
        there = [
            pool.submit(report_to_coordinator, other(first, number), soon()) for number in (1, 2)
        ]
        call.gather()
        call.release()
        others = [each.result(LONG_S) for each in there]
        yield call, others
        for each in others:
            each.close()


def until(look, wanted):
    end = soon()
    while (found := look()) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert found == wanted


def test_who_dies_before_it_is_connected_is_named_to_all(all_there):
    call, (one, two) = all_there
    assert (call.lost(), one.lost(), two.lost()) == ([], [], [])
    one.close()
    until(call.lost, [1])
    until(two.lost, [1])


def test_process_0_may_die_too(all_there):
    call, others = all_there
    for caller in call._present.values():
        caller.connection.close()
    for each in others:
        until(each.lost, [0])


def test_who_is_connected_may_go_before_the_others_are(all_there):
    call, (one, two) = all_there
    with one:
        pass
    until(lambda: (call.lost(), sorted(call._present)), ([], [2]))
    with ThreadPoolExecutor() as pool:
        seen_off = pool.submit(call.await_disconnects)
        until(lambda: two.lost() or two._is_connected, True)
        with two:
            pass
        seen_off.result(LONG_S)
    assert call._present == {}


def test_all_who_are_there_hear_who_is_missing(first):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, soon()) as call:
        there = pool.submit(report_to_coordinator, other(first, 2), soon())
        while call.missing != [1]:
            call._selector.select()
            hear(call)
        call._deadline = time.monotonic()
        with pytest.raises(FaultError, match="process 1 of 3 did not come in time"):
            call.gather()
        with pytest.raises(
            FaultError, match=r"process 1 of 3 did not come in time\n  given: process 2 of 3"
        ):
            there.result(LONG_S)


def hear(call):
    for key, _ in call._selector.select():
        call._accept() if key.fileobj is call._listener else call._receive(key.data)


@pytest.mark.parametrize("bind", [None, "127.0.0.1"])
def test_it_listens_where_it_is_told_to(first, bind):
    """Every 127.x.y.z is an address of this machine."""
    port = address_of(first)[1]
    with RendezvousServer(replace(first, bind=bind), soon()):
        socket.create_connection(("127.0.0.1", port)).close()
        if bind is None:
            socket.create_connection(("127.0.0.2", port)).close()
        else:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port))


def test_an_address_of_another_machine_is_refused_at_once(first):
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:\d+: .*\n.*distributed\.bind"):
        RendezvousServer(replace(first, bind="192.0.2.1"), soon())


@pytest.mark.parametrize(
    ("bind", "expected"), [(None, None), ("10.0.0.1", "10.0.0.1:{}"), ("::1", "[::1]:{}")]
)
def test_jax_listens_there_too(first, bind, expected, monkeypatch):
    asked = {}
    monkeypatch.setattr("jax.distributed.initialize", lambda *_, **options: asked.update(options))
    _Joining(replace(first, bind=bind), 10).run()
    assert asked["coordinator_bind_address"] == (expected and expected.format(address_of(first)[1]))


def test_who_never_finds_process_0_says_so(first):
    with pytest.raises(FaultError, match=r"process 0 of 3 did not come in time(.|\n)*refused"):
        report_to_coordinator(other(first, 1), soon(0.1))


def test_who_waits_says_for_whom(first, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "FIRST_NOTICE_S", 0.0)
    said = []
    with (
        RendezvousServer(first, soon(0.1), said.append) as call,
        pytest.raises(FaultError, match="processes 1, 2 of 3"),
    ):
        call.gather()
    assert said[0].startswith("waiting for processes 1, 2 of 3; process 0 of 3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": "12.1"}, "another run, 12.0, has this port"),
        ({"num_processes": 4}, "a run of 3 processes"),
    ],
)
def test_a_process_of_another_run_is_turned_away(first, changes, message):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, soon()) as call:
        there = pool.submit(report_to_coordinator, other(first, 1, **changes), soon())
        while not there.done():
            hear_if_any(call)
        with pytest.raises(ConfigError, match=message):
            there.result(LONG_S)
        assert call.missing == [1, 2]


def hear_if_any(call):
    for key, _ in call._selector.select(0.05):
        call._accept() if key.fileobj is call._listener else call._receive(key.data)


def test_two_processes_cannot_have_one_number(first):
    with ThreadPoolExecutor() as pool, RendezvousServer(first, soon()) as call:
        both = [pool.submit(report_to_coordinator, other(first, 1), soon()) for _ in range(2)]
        while not any(each.done() for each in both):
            hear_if_any(call)
        with pytest.raises(ConfigError, match="there is a process 1 already"):
            next(each for each in both if each.done()).result()
        assert call.missing == [2]
        call._deadline = time.monotonic()
        with pytest.raises(FaultError):
            call.gather()


def test_who_has_gone_is_missing_again_and_may_come_back(first):
    said = (
        json.dumps({"process": 1, "of": 3, "job": "12.0", "host": "h", "pid": 7}).encode() + b"\n"
    )
    with RendezvousServer(first, soon()) as call:
        with socket.create_connection(address_of(first)) as connection:
            connection.sendall(said)
            while 1 in call.missing:
                hear(call)
        while 1 not in call.missing:
            hear(call)
        with socket.create_connection(address_of(first)) as connection:
            connection.sendall(said)
            while 1 in call.missing:
                hear(call)


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
def test_strangers_are_passed_over(first, noise):
    with (
        RendezvousServer(first, soon()) as call,
        socket.create_connection(address_of(first)) as stranger,
    ):
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        hear(call)  # accepts it
        while len(call._selector.get_map()) > 1:
            hear(call)
        assert call.missing == [1, 2]


@pytest.mark.parametrize(("restarts", "kind"), [(False, ConfigError), (True, FaultError)])
def test_a_port_that_is_taken(first, monkeypatch, restarts, kind):
    """To be mended by who gave it; a job that starts again may find it free."""
    monkeypatch.setattr(rendezvous_server, "_PORT_FREED_S", 0.0)
    with (
        socket.create_server(address_of(first)),
        pytest.raises(kind, match="process 0 cannot listen"),
    ):
        RendezvousServer(replace(first, restarts=restarts), soon())


def reach_oneself(address, **_):
    """What the system does with a connection to a port that nobody has if it deals out that same
    port for this side of it.
    """
    connection = socket.socket()
    connection.bind(("127.0.0.1", 0))
    connection.connect(connection.getsockname())
    return connection


def test_a_process_that_reaches_itself_has_found_nobody(first, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", reach_oneself)
    with pytest.raises(
        FaultError, match=r"process 0 of 3 did not come in time(.|\n)*reached itself"
    ):
        report_to_coordinator(other(first, 1), soon(0.2))


def test_an_echo_is_no_answer(first, monkeypatch):
    monkeypatch.setattr(reporting, "ANSWER_WAIT_S", 0.0)
    with socket.create_server(address_of(first)) as listener, ThreadPoolExecutor() as pool:
        lost = pool.submit(report_to_coordinator, other(first, 1), soon(0.5))
        connection, _ = listener.accept()
        connection.sendall(connection.recv(4096))
        with pytest.raises(FaultError, match="did not come in time"):
            lost.result(LONG_S)
        connection.close()


def test_process_0_is_understood_in_whatever_pieces_it_speaks(first):
    """In one piece what lets this process go on and who has gone since, or the latter in two."""
    missing = json.dumps({"missing": [2]}).encode() + b"\n"
    for pieces in ([b'{"go": true}\n' + missing], [b'{"go": true}\n', missing[:5], missing[5:]]):
        with socket.create_server(address_of(first)) as listener, ThreadPoolExecutor() as pool:
            reached = pool.submit(report_to_coordinator, other(first, 1), soon())
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(pieces[0])
            seen = reached.result(LONG_S)
            for place, piece in enumerate(pieces[1:]):
                assert seen.lost() == []
                connection.sendall(piece)
                if place == 0:
                    assert seen.lost() == []
            found, until = [], soon()
            while not found and time.monotonic() < until:
                found = seen.lost()
            connection.close()
            seen.close()
        assert found == [2]


@pytest.mark.parametrize(("restarts", "kind"), [(False, ConfigError), (True, FaultError)])
def test_who_is_lost_while_jax_connects_is_no_mistake_of_a_job(first, restarts, kind):
    joining = SimpleNamespace(
        is_alive=lambda: False,
        failure=jax.errors.JaxRuntimeError("UNAVAILABLE: a heartbeat failed"),
    )
    with pytest.raises(kind, match="a heartbeat failed"):
        distributed._join(replace(first, restarts=restarts), joining, soon(), list)


def test_a_port_that_becomes_free_is_waited_for(first):
    taken = socket.create_server(address_of(first))
    freed = threading.Timer(0.1, taken.close)
    freed.start()
    with RendezvousServer(first, soon()):
        freed.join()
