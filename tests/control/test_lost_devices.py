"""A device that is reported bad is not used from the next boundary on, and used again when the
report is gone.
"""

from types import SimpleNamespace

import jax
import pytest
from helpers import F32_RELATIVE
from small_runs import devices_of, events, losses, quick, run_tiny, slow_devices, text  # noqa: F401

from optimus_jax.control import live
from optimus_jax.control import reported_devices as reported
from optimus_jax.control.controller import Controller
from optimus_jax.control.journal import switches
from optimus_jax.training import step, trainer
from optimus_jax.training.watchers import Display

BAD = 3
STEPS, LOST_AFTER, BACK_AFTER = 24, 4, 12
BATCH = 24
"""Divides over 8 devices, 6 and 4, but not 7."""
SETTINGS = {
    "steps": STEPS,
    "global_batch": BATCH,
    "eval_every": 3,
    "eval_batches": 1,
    "data.eval_fraction": 0.3,
    "controller.cooldown_steps": 1,
    "controller.window_steps": 4,
}


@pytest.fixture
def predicted(slow_devices, monkeypatch):  # noqa: F811
    """The controller sees the predicted step times, on a clock that only steps advance."""
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(live, "time", clock)
    plain = Controller.step

    def timed_step(self, record):
        running = self._switcher.running
        time_s = slow_devices.pricing(running.program.config).step_time_s(running.plan)
        clock.now_s += time_s
        plain(self, trainer.replace(record, step_time_s=time_s))

    monkeypatch.setattr(Controller, "step", timed_step)


@pytest.fixture
def used(monkeypatch):
    """Ids of the devices of every batch, in order."""
    found, plain = [], step.put_batch

    def put(batch, sharding, global_batch):
        found.append({device.id for device in sharding.device_set})
        return plain(batch, sharding, global_batch)

    monkeypatch.setattr(step, "put_batch", put)
    return found


@pytest.fixture
def lost(monkeypatch, tmp_path):
    """The file reports the device after LOST_AFTER and is removed after BACK_AFTER; yields the
    arrays that were on the device in between.
    """
    monkeypatch.setattr(reported, "POLL_S", 0.0)
    arrays_on_device, others = [], jax.live_arrays()  # arrays of earlier tests
    known = set(map(id, others))

    def show(self, record):
        path = tmp_path / "run" / reported.FILE
        if record.step == LOST_AFTER:
            path.write_text(f"[{BAD}]")
        elif record.step == BACK_AFTER:
            path.unlink()
        if LOST_AFTER + 2 < record.step <= BACK_AFTER:
            arrays_on_device.append(
                [
                    array
                    for array in jax.live_arrays()
                    if id(array) not in known
                    and BAD in {device.id for device in array.sharding.device_set}
                ]
            )

    monkeypatch.setattr(Display, "step", show)
    yield arrays_on_device
    assert len(others) == len(known), "kept until here, so that nothing else has got their places"


def test_a_run_leaves_a_lost_device_and_uses_it_again(
    predicted,
    lost,
    used,
    text,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    result = run_tiny(tmp_path / "run", text, mesh="data=8", control="auto", **SETTINGS)
    away, back = events(result, "remesh")
    assert (away["step"], back["step"]) == (LOST_AFTER + 1, BACK_AFTER), (
        "the file is seen when the step that was under way is done"
    )
    assert [event["why"].partition(":")[0] for event in (away, back)] == [
        "devices are lost",
        "devices are back",
    ]
    assert [(record.ending, record.target.num_devices) for record in switches(result.run_dir)] == [
        ("kept", 6),
        ("kept", 8),
    ], "and not taken back for being slower"
    without = [ids for ids in used if BAD not in ids]
    assert len(without) == BACK_AFTER - LOST_AFTER - 1 + 3 + 2, (
        "each step and evaluation on the others, two checks of switches, and no other batch"
    )
    assert {len(ids) for ids in without} == {6}
    assert devices_of(result.state) == set(range(8))
    of_state = {
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in jax.tree.leaves(result.state)
        if leaf.ndim > 1
    }
    assert lost
    assert not [array.shape for arrays in lost for array in arrays if array.shape in of_state], (
        "nothing of the state is left there"
    )
    monkeypatch.undo()
    assert losses(result) == pytest.approx(
        losses(run_tiny(tmp_path / "whole", text, mesh="data=8", **SETTINGS)), rel=F32_RELATIVE
    )
