"""Faults logged by any process are copied into the run's events once."""

import contextlib

from optimus_jax.faults.fault_log import read_faults, take_over, write_fault
from optimus_jax.run_directory.directory import RunDirectory


def test_the_next_start_copies_new_faults_into_the_events(tmp_path):
    with contextlib.closing(RunDirectory.create(tmp_path / "run", "model")) as run:
        run.log_event("start", 0)
        write_fault(run.path, 1, 5, what="process 0 is silent", late=["process 0"])
        write_fault(run.path, 0, 4, what="step 5 takes long")
        with open(run.path / "faults" / "1.jsonl", "ab") as file:
            file.write(b'{"event": "fault", "st')
        assert [event["process"] for event in read_faults(run.path)] == [1, 0]
        assert take_over(run) == 2
        assert take_over(run) == 0
        assert take_over(run) == 0
        write_fault(run.path, 1, 9, what="again")
        assert take_over(run) == 1, "half of a line does not take the next one along"
        copied = [
            (event["event"], event["step"], event.get("process"), event.get("what"))
            for event in run.events()
        ]
    assert copied == [
        ("start", 0, None, None),
        ("fault", 5, 1, "process 0 is silent"),
        ("fault", 4, 0, "step 5 takes long"),
        ("fault", 9, 1, "again"),
    ]


def test_a_process_that_is_not_the_writer_copies_nothing(tmp_path):
    with contextlib.closing(RunDirectory.create(tmp_path / "run", "model")) as run:
        write_fault(run.path, 0, 1, what="x")
        assert take_over(RunDirectory(run.path, writer=False)) == 0
        assert run.events() == []
