"""Commands reach all processes once, in order, about every second."""

import jax
import pytest
from plans import GPT, PLANS, make_config, make_plan

from optimus_jax.control import commands as commands_module
from optimus_jax.control.commands import MOST_STEPS, Command, CommandBroadcast

PREPARE = Command(
    kind="prepare",
    plan=make_plan(make_config(GPT, PLANS[0])),
    without=frozenset({3}),
    at_step=7,
    why="it is faster",
)


def test_a_single_process_receives_commands_at_every_step():
    commands = CommandBroadcast()
    commands.send(PREPARE)
    assert commands.is_broadcast_due(1)
    assert tuple(commands.receive(1, [0.01])) == (PREPARE,)
    assert commands.is_broadcast_due(2)
    assert tuple(commands.receive(2, [0.01])) == ()


def test_a_single_process_receives_commands_sent_while_others_are_handled():
    commands, done = CommandBroadcast(), []
    commands.send(PREPARE)
    for command in commands.receive(1, [0.01]):
        done.append(command.kind)
        if command == PREPARE:
            commands.send(Command(kind="switch", plan=PREPARE.plan))
    assert done == ["prepare", "switch"]


@pytest.fixture
def two_processes(monkeypatch):
    """Two processes; the other receives what the first broadcasts."""
    broadcast = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def broadcast_from_0(text):
        broadcast.append(text)
        return broadcast[0]

    monkeypatch.setattr(commands_module, "broadcast_from_0", broadcast_from_0)
    return broadcast


def test_all_processes_receive_the_same_commands_and_next_step(two_processes):
    first, other = CommandBroadcast(), CommandBroadcast()
    probe, withdraw = Command(kind="probe", anew=True), Command(kind="withdraw", why="it is not")
    for command in (PREPARE, probe, PREPARE, withdraw, probe, PREPARE, withdraw):
        first.send(command)
    other.send(Command(kind="keep"))
    received = first.receive(1, [0.3])
    assert received == (PREPARE, probe, withdraw, PREPARE, withdraw), "the same is said once"
    assert other.receive(1, [5.0]) == received
    assert (first.step_time_s, other.step_time_s) == (0.3, 0.3)
    for each in (first, other):
        assert [each.is_broadcast_due(step) for step in (2, 4, 5, 6)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("step_times_s", "pause"),
    [([], MOST_STEPS), ([1e-9], MOST_STEPS), ([9.0, 0.3, 0.1], 4), ([2.0], 1)],
)
def test_broadcasts_are_about_a_second_apart(two_processes, step_times_s, pause):
    commands = CommandBroadcast()
    commands.receive(10, step_times_s)
    assert [commands.is_broadcast_due(step) for step in (10 + pause - 1, 10 + pause)] == [
        False,
        True,
    ]


def test_a_command_not_yet_broadcast_can_be_cancelled(two_processes):
    commands = CommandBroadcast()
    commands.send(Command(kind="switch", plan=PREPARE.plan))
    commands.send(Command(kind="probe"))
    commands.cancel("switch")
    assert commands.receive(1, [0.3]) == (Command(kind="probe"),)
