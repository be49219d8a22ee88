"""The current activity of a process, on a clock that only the test advances."""

import pytest

from optimus_jax.faults.progress import Progress
from optimus_jax.run_directory.step_record import StepRecord


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def record(step, step_time_s):
    return StepRecord(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens=8,
        step_time_s=step_time_s,
        tokens_per_s=1.0,
        mfu=None,
        plan="p",
        peak_bytes=None,
    )


def test_an_interruption_is_timed_separately_and_restarts_the_step_timer():
    clock = Clock()
    progress = Progress(clock)
    progress.begin("step")
    progress.enter(1)
    clock.now += 2
    progress.step(record(1, 2.0))
    with progress.during("save"):
        clock.now += 50
        assert (progress.at.doing, progress.at.since_s, progress.at.entered, progress.at.done) == (
            "save",
            102.0,
            1,
            1,
        )
    assert (progress.at.doing, progress.at.since_s) == ("step", 152.0)
    assert (
        progress.durations_s("step"),
        progress.durations_s("save"),
        progress.durations_s("switch"),
    ) == ((2.0,), (50.0,), ())
    progress.forget_steps()
    assert (progress.durations_s("step"), progress.durations_s("save")) == ((), (50.0,))


def test_an_interruption_that_raises_ends_too():
    progress = Progress(Clock())
    progress.begin("step")
    with pytest.raises(OSError, match="full"), progress.during("save"):
        raise OSError("full")
    assert progress.at.doing == "step"
