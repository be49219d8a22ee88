"""Whenever a run dies during a switch, it resumes under the old or the new plan, as the journal
says, and no switch is forgotten.
"""

import json
import os
import shutil

import pytest
from plans import GPT, PlanCase, case, make_config, make_plan

from optimus_jax.config import ControlConfig
from optimus_jax.control import journal as journal_module
from optimus_jax.control.assembly import costs_owed, state_after
from optimus_jax.control.journal import Journal, plan_to_resume, switches, unfinished
from optimus_jax.control.switch_state import SwitchRules
from optimus_jax.errors import RunDirectoryError
from optimus_jax.plan import Plan
from optimus_jax.run_directory import directory as run_directory
from optimus_jax.run_directory.directory import RunDirectory

COSTS_S = {"move_s": 0.5}


def a_plan(text: PlanCase) -> Plan:
    return make_plan(make_config(GPT, text))


OLD, NEW = a_plan(case("data=8")), a_plan(case("fsdp=8"))


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "test")
    run.write_config("{}")
    run.write_plan(OLD.to_json())
    yield run
    run.close()


def switch(journal, ending):
    """Write all that a switch writes."""
    journal.begin(OLD, NEW, step=7, why="it is faster", by_choice=True)
    journal.commit(NEW, step=7, costs_s={"move_s": 0.1})
    journal.end(
        ending,
        step=12,
        why="",
        costs_s=COSTS_S,
        back_to=None if ending in ("kept", "stopped") else OLD,
    )


@pytest.mark.parametrize(
    ("ending", "num_switches", "owed_s", "is_barred"),
    [
        ("kept", 1, [], False),
        ("stopped", 1, [0.5], False),
        ("taken back", 1, [0.5], True),
        ("failed", 0, [0.5], True),
        ("died", 1, [0.5], True),
    ],
)
def test_a_resumed_run_knows_what_became_of_its_switches(
    run, ending, num_switches, owed_s, is_barred
):
    switch(Journal(run), ending)
    rules = SwitchRules(settings=ControlConfig(), num_steps=100)
    state = state_after(switches(run.path), rules)
    assert state.num_switches == num_switches
    assert bool(state.why_not(NEW)) == is_barred
    assert costs_owed(switches(run.path)) == owed_s


def test_a_switch_is_recorded(run):
    assert switches(run.path) == []
    switch(Journal(run), "kept")
    [record] = switches(run.path)
    assert (record.source, record.target, record.step, record.ended_step) == (OLD, NEW, 7, 12)
    assert (record.ending, record.costs_s, record.why, record.is_failure) == (
        "kept",
        COSTS_S,
        "it is faster",
        False,
    )
    assert plan_to_resume(run.path) == NEW.to_json() == run.plan_text()
    assert Journal(run).recover(12) is None


def test_a_plan_taken_back_counts_as_a_failure(run):
    switch(Journal(run), "taken back")
    assert switches(run.path)[0].is_failure
    assert plan_to_resume(run.path) == OLD.to_json() == run.plan_text()


def test_a_run_stopped_in_the_canary_resumes_under_the_new_plan(run):
    switch(Journal(run), "stopped")
    assert not switches(run.path)[0].is_failure
    assert plan_to_resume(run.path) == NEW.to_json()


class Killed(BaseException):
    """Raised in place of the process dying."""


def die_at(monkeypatch, number):
    """Die instead of doing the write, rename or sync of this number; returns the calls
    done so far.
    """
    done = []

    def dying_at_number(function):
        def call(*args, **kwargs):
            if len(done) == number:
                raise Killed
            done.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, dying_at_number(getattr(os, name)))
    monkeypatch.setattr(Journal, "_append", dying_at_number(Journal._append))
    monkeypatch.setattr(run_directory, "replace", dying_at_number(run_directory.replace))
    return done


@pytest.mark.parametrize("ending", ["kept", "taken back", "failed"])
def test_dying_at_any_write_of_a_switch_leaves_one_of_the_two_plans(
    run, monkeypatch, ending, tmp_path
):
    outcomes = []
    for number in range(100):
        copy = tmp_path / str(number)
        shutil.copytree(run.path, copy)
        with monkeypatch.context() as patch:
            done = die_at(patch, number)
            try:
                switch(Journal(RunDirectory(copy)), ending)
                died = False
            except Killed:
                died = True
        left = Plan.from_json(plan_to_resume(copy))
        records, again = switches(copy), unfinished(copy)
        if ending == "kept" and records and records[0].ending == "kept":
            assert left == NEW
        else:
            assert left == OLD, "a switch without an end has not been"
        Journal(RunDirectory(copy)).recover(9)
        recovered = switches(copy)
        assert unfinished(copy) is None
        assert (
            Plan.from_json(plan_to_resume(copy))
            == left
            == Plan.from_json((copy / "plan.json").read_text())
        )
        assert len(recovered) == len(records), "a switch that began is not forgotten"
        assert (again is not None) == bool(recovered and recovered[0].ending == "died")
        outcomes.append((bool(records), recovered[0].ending if recovered else None))
        if not died:
            break
    assert not died
    assert len(done) >= 8, "every write was a place to die"
    assert {(False, None), (True, "died"), (True, ending)} <= set(outcomes)


def test_dying_during_recovery_does_not_change_the_recovered_plan(run, monkeypatch, tmp_path):
    Journal(run).begin(OLD, NEW, step=7, why="", by_choice=True)
    Journal(run).commit(NEW, step=7, costs_s=COSTS_S)
    assert run.plan_text() == NEW.to_json()
    for number in range(20):
        copy = tmp_path / str(number)
        shutil.copytree(run.path, copy)
        with monkeypatch.context() as patch:
            die_at(patch, number)
            try:
                Journal(RunDirectory(copy)).recover(9)
                died = False
            except Killed:
                died = True
        assert plan_to_resume(copy) == OLD.to_json()
        Journal(RunDirectory(copy)).recover(9)
        assert [(record.ending, record.costs_s) for record in switches(copy)] == [("died", COSTS_S)]
        assert plan_to_resume(copy) == OLD.to_json()
        if not died:
            break
    assert not died


def test_a_torn_line_does_not_damage_other_records(run):
    switch(Journal(run), "kept")
    path = run.path / "switches.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        before = switches(run.path)
        Journal(run).begin(NEW, OLD, step=20, why="back", by_choice=True)
        assert switches(run.path)[:-1] == before, (
            "what is written next does not change what the record says"
        )
        assert [record.step for record in switches(run.path)][-1] == 20
        assert all(
            isinstance(json.loads(line), dict) for line in path.read_bytes().splitlines()[-1:]
        )


def test_a_process_that_is_not_the_writer_writes_nothing(run):
    switch(Journal(RunDirectory(run.path, writer=False)), "kept")
    assert not (run.path / "switches.jsonl").exists()
    assert run.plan_text() == OLD.to_json()


def full(descriptor):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_an_error_with_its_cause(run, monkeypatch):
    monkeypatch.setattr(journal_module.os, "fsync", full)
    with pytest.raises(RunDirectoryError, match="No space left"):
        Journal(run).begin(OLD, NEW, step=1, why="", by_choice=True)


def test_an_end_that_cannot_be_written_keeps_the_state(run, monkeypatch):
    """The trainer notices the failure, saves the state, and raises it."""
    journal = Journal(run)
    journal.begin(OLD, NEW, step=7, why="", by_choice=True)
    journal.commit(NEW, step=7, costs_s={})
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "fsync", full)
        journal.end("taken back", step=9, why="", costs_s=COSTS_S, back_to=OLD)
    with pytest.raises(RunDirectoryError, match="No space left"):
        run.check()
    assert plan_to_resume(run.path) == OLD.to_json()
