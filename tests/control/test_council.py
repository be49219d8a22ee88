"""Orders reach all processes once, in order, about every second."""

import jax
import pytest
from plans import GPT, PLANS, make_config, make_plan

from optimus_jax.control import council as council_module
from optimus_jax.control.council import MOST_STEPS, Council, Order

PREPARE = Order(kind="prepare", plan=make_plan(make_config(GPT, PLANS[0])), without=frozenset({3}), at_step=7, why="it is faster")


def test_alone_orders_are_heard_at_every_step():
    council = Council()
    council.give(PREPARE)
    assert council.is_held(1)
    assert tuple(council.hear(1, [0.01])) == (PREPARE,)
    assert council.is_held(2)
    assert tuple(council.hear(2, [0.01])) == ()


def test_who_is_alone_hears_what_is_given_while_orders_are_carried_out():
    council, done = Council(), []
    council.give(PREPARE)
    for order in council.hear(1, [0.01]):
        done.append(order.kind)
        if order == PREPARE:
            council.give(Order(kind="go", plan=PREPARE.plan))
    assert done == ["prepare", "go"]


@pytest.fixture
def several(monkeypatch):
    """Two processes; what the first says is heard by the other."""
    said = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def of_first_process(text):
        said.append(text)
        return said[0]

    monkeypatch.setattr(council_module, "of_first_process", of_first_process)
    return said


def test_all_hear_what_the_first_has_given_and_when_they_meet_again(several):
    first, other = Council(), Council()
    for order in (PREPARE, Order(kind="probe", anew=True), PREPARE, Order(kind="withdraw", why="it is not")):
        first.give(order)
    other.give(Order(kind="keep"))
    heard = first.hear(1, [0.3])
    assert heard == (PREPARE, Order(kind="probe", anew=True), Order(kind="withdraw", why="it is not")), "the same is said once"
    assert other.hear(1, [5.0]) == heard
    for each in (first, other):
        assert [each.is_held(step) for step in (2, 4, 5, 6)] == [False, False, True, True]


@pytest.mark.parametrize(("step_times_s", "pause"), [([], MOST_STEPS), ([1e-9], MOST_STEPS), ([9.0, 0.3, 0.1], 4), ([2.0], 1)])
def test_councils_are_about_a_second_apart(several, step_times_s, pause):
    council = Council()
    council.hear(10, step_times_s)
    assert [council.is_held(step) for step in (10 + pause - 1, 10 + pause)] == [False, True]


def test_what_was_not_heard_can_be_taken_back(several):
    council = Council()
    council.give(Order(kind="go", plan=PREPARE.plan))
    council.give(Order(kind="probe"))
    council.take_back("go")
    assert council.hear(1, [0.3]) == (Order(kind="probe"),)
