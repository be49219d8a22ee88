"""A switch keeps the state bit for bit; if anything fails at any time, the old plan and state
remain.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from plans import LLAMA, case, host_batch, make_config, make_plan, random_state
from switch_cases import compiled_quickly, copied

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import CheckpointConfig, ControlConfig
from optimus_jax.control import executables as executables_module
from optimus_jax.control import switch as switch_module
from optimus_jax.control.disk_transfer import DiskTransfer
from optimus_jax.control.executables import ExecutableCache, batch_of, compile_plan
from optimus_jax.control.journal import Journal, switches
from optimus_jax.control.switch import Prepared, StateLostError, Switcher
from optimus_jax.errors import FaultError, PlanError, RunDirectoryError
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.plan import Plan
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.reshard import Move
from optimus_jax.run_directory.directory import RunDirectory

MODEL = replace(LLAMA, num_layers=3)
SETTINGS = ControlConfig(move_bytes=2**15, executables=2)
"""The move budget allows some leaves at a time."""


def batch(program, step=1):
    return put_batch(host_batch(step), program.batch_sharding, program.config.data.global_batch)


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with compiled_quickly():
        yield


# Takes up to 30 seconds on busy cores: two steps and their checksums are compiled, once for the
# file.
@pytest.fixture(scope="module")
def executables():
    """Executables of a plan without stages, and of one with uneven stages."""

    def compiled(text):
        config = make_config(MODEL, text)
        return compile_plan(config, make_plan(config))

    return compiled(case("data=2,fsdp=4", zero=1)), compiled(
        case("pipe=2,tensor=4", microbatches=4, layers_per_stage=(2, 1))
    )


@pytest.fixture(scope="module")
def prepared(executables):
    old, new = executables
    forward, reverse = (
        Move(*ends, budget_bytes=SETTINGS.move_bytes)
        for ends in ((old.layout, new.layout), (new.layout, old.layout))
    )
    forward.compile()
    reverse.compile()
    assert len(forward.groups) > 3
    return Prepared(source=old, target=new, forward=forward, reverse=reverse, compile_s=1.0)


@pytest.fixture
def run(executables, tmp_path):
    run = RunDirectory.create(tmp_path / "run", "test")
    run.write_config("{}")
    run.write_plan(executables[0].plan.to_json())
    yield run
    run.close()


@pytest.fixture
def switcher(executables, run):
    return Switcher(running=executables[0], settings=SETTINGS, journal=Journal(run), probe=batch)


@pytest.fixture
def state(executables):
    """The state after a step, so that moments are not zero."""
    program = executables[0].program
    return program.train_step(random_state(program), batch(program))[0]


def sums_of(executable, state):
    return executable.sums.of(named_leaves(state), executable.layout.named)


def plan_on_disk(run):
    return Plan.from_json(run.plan_text())


def test_a_switch_keeps_the_state_and_is_recorded(switcher, prepared, state, run):
    before = sums_of(prepared.source, copied(state))
    switched = switcher.switch(state, prepared, step=1, why="it is faster")
    assert (switched.is_done, switched.why_not) == (True, "")
    assert set(switched.costs_s) == {"agree_s", "probe_s", "move_s", "verify_s", "commit_s"}
    assert sums_of(prepared.target, switched.state) == before
    assert switcher.running is switched.executable is prepared.target
    assert plan_on_disk(run) == prepared.target.plan
    assert switches(run.path)[0].ending is None
    switcher.keep(step=6, why="0.1 s per step", costs_s=switched.costs_s)
    switcher.stop(step=7, costs_s={})
    [record] = switches(run.path)
    assert (record.ending, record.ended_step, record.costs_s) == ("kept", 6, switched.costs_s)


def test_a_switch_can_be_taken_back_after_a_step(switcher, prepared, state, run):
    """The step done under the new plan is not lost."""
    switched = switcher.switch(state, prepared, step=1, why="")
    program = prepared.target.program
    later, _ = program.train_step(switched.state, batch(program, 2))
    before = sums_of(prepared.target, later)
    back = switcher.take_back(later, step=2, why="it was slower", costs_s=switched.costs_s)
    assert back.is_done
    assert int(back.state.step) == 2
    assert sums_of(prepared.source, back.state) == before
    assert switcher.running is back.executable is prepared.source
    assert plan_on_disk(run) == prepared.source.plan
    assert [record.ending for record in switches(run.path)] == ["taken back"]
    prepared.source.program.train_step(back.state, batch(prepared.source.program, 3))


def test_a_run_that_stops_in_the_canary_is_no_failure_of_the_plan(switcher, prepared, state, run):
    switched = switcher.switch(state, prepared, step=1, why="", by_choice=False)
    before = switches(run.path)[0].costs_s
    # the costs known if it died now
    assert before.keys() == {"agree_s", "probe_s", "move_s", "verify_s", "commit_s"}
    switcher.stop(step=2, costs_s=switched.costs_s)
    [record] = switches(run.path)
    assert (record.is_failure, record.by_choice, record.costs_s) == (False, False, switched.costs_s)


def flipped(leaf):
    """Flip one bit of one copy on one device."""
    shards = [shard.data for shard in leaf.addressable_shards]
    bits = np.asarray(shards[-1]).copy()
    bits.view(np.uint32).reshape(-1)[-1] ^= 1
    shards[-1] = jax.device_put(bits, shards[-1].device)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def corrupt_call(monkeypatch, prepared, number, corrupt):
    """Corrupt the result of call `number` of `carry` on the way there."""
    carry, calls = Move.carry, []

    def corrupted(self, group, leaves):
        arrived = carry(self, group, leaves)
        if self is prepared.forward:
            calls.append(group)
            if len(calls) == number:
                return corrupt(arrived)
        return arrived

    monkeypatch.setattr(Move, "carry", corrupted)


def flip_a_bit(arrived):
    path = next(iter(arrived))
    return arrived | {path: flipped(arrived[path])}


def no_memory(arrived):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def assert_stayed(switched, switcher, prepared, run, before):
    assert not switched.is_done
    assert switcher.running is switched.executable is prepared.source
    assert sums_of(prepared.source, switched.state) == before
    for path, leaf in named_leaves(switched.state).items():
        assert leaf.sharding.is_equivalent_to(
            prepared.source.layout.named[path].sharding, leaf.ndim
        )
    assert plan_on_disk(run) == prepared.source.plan
    assert [record.ending for record in switches(run.path)] == ["failed"]
    prepared.source.program.train_step(switched.state, batch(prepared.source.program, 2))


@pytest.mark.parametrize("number", [0, 2, -1])
@pytest.mark.parametrize(
    ("corrupt", "why"),
    [(flip_a_bit, "hold different bits|checksum"), (no_memory, "RESOURCE_EXHAUSTED")],
)
def test_errors_during_the_move_are_detected_and_the_state_remains(
    switcher, prepared, state, run, monkeypatch, number, corrupt, why
):
    before = sums_of(prepared.source, state)
    moving = [
        group
        for group in prepared.forward.groups
        if any(not prepared.forward.exchange(path).is_identity for path in group.paths)
    ]
    corrupt_call(monkeypatch, prepared, prepared.forward.groups.index(moving[number]) + 1, corrupt)
    switched = switcher.switch(state, prepared, step=1, why="")
    assert_stayed(switched, switcher, prepared, run, before)
    assert any(word in switched.why_not for word in why.split("|"))


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (4.0, 4.00003, True),
        (4.0, 4.00005, False),
        (1e-4, 1.001e-4, True),
        (1e-4, 1.3e-4, False),
        (float("nan"), float("nan"), True),
        (4.0, float("nan"), False),
        (None, None, True),
    ],
)
def test_losses_are_compared_within_rounding(before, after, is_same):
    with nullcontext() if is_same else pytest.raises(Exception, match="the loss of a batch was"):
        switch_module._check_loss(before, after, "f32")


@pytest.mark.parametrize("what", ["loss", "step", "commit"])
def test_an_error_after_the_move_moves_the_state_back(
    switcher, prepared, state, run, monkeypatch, what
):
    before = sums_of(prepared.source, state)
    step = 1
    if what == "loss":
        losses = iter([2.0, 2.0001])
        monkeypatch.setattr(switch_module, "_loss", lambda *args: next(losses))
    elif what == "step":
        step = 2
    else:

        def fail(*args, **kwargs):
            raise RunDirectoryError("the disk is full")

        monkeypatch.setattr(Journal, "commit", fail)
    switched = switcher.switch(state, prepared, step=step, why="")
    assert_stayed(switched, switcher, prepared, run, before)
    assert {"loss": "2.0001", "step": "of step 1", "commit": "disk is full"}[
        what
    ] in switched.why_not


def test_a_state_that_cannot_be_moved_back_is_a_fault_with_a_remedy(
    switcher, prepared, state, monkeypatch
):
    carry = Move.carry

    def corrupted(self, group, leaves):
        arrived = carry(self, group, leaves)
        return (
            flip_a_bit(arrived)
            if self is prepared.reverse or group is prepared.forward.groups[-1]
            else arrived
        )

    monkeypatch.setattr(Move, "carry", corrupted)
    with pytest.raises(StateLostError, match="--resume") as caught:
        switcher.switch(state, prepared, step=1, why="")
    assert isinstance(caught.value, FaultError)


def test_a_switch_does_not_begin_if_the_journal_cannot_be_written(
    switcher, prepared, state, run, monkeypatch
):
    def fail(*args, **kwargs):
        raise RunDirectoryError("the disk is full")

    monkeypatch.setattr(Journal, "begin", fail)
    switched = switcher.switch(state, prepared, step=1, why="")
    assert (switched.is_done, switched.why_not, switched.executable) == (
        False,
        "the disk is full",
        switcher.running,
    )
    assert switched.state is state
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert switches(run.path) == []


def test_if_taking_back_fails_the_new_plan_is_kept(switcher, prepared, state, run, monkeypatch):
    """The run continues under the new plan, the switch has ended, and another may follow."""
    switched = switcher.switch(state, prepared, step=1, why="")
    before = sums_of(prepared.target, switched.state)
    losses = iter([2.0, 2.0001])
    monkeypatch.setattr(switch_module, "_loss", lambda *args: next(losses))
    back = switcher.take_back(switched.state, step=1, why="it was slower", costs_s={})
    assert not back.is_done
    assert switcher.running is back.executable is prepared.target
    assert sums_of(prepared.target, back.state) == before
    assert plan_on_disk(run) == prepared.target.plan
    [record] = switches(run.path)
    assert (record.ending, "2.0001" in record.ended_why) == ("kept", True)
    switcher.stop(step=2, costs_s={})
    assert [record.ending for record in switches(run.path)] == ["kept"]


def test_preparing_in_the_background_uses_the_executable_cache(
    executables, switcher, prepared, state
):
    """The executable is cached if the run has been under the plan before."""
    old, new = executables
    switcher._executables.put(new)
    preparation = switcher.prepare(new.plan)
    made = preparation.result()
    assert preparation.is_ready_everywhere()
    assert preparation.failure == ""
    assert (made.source, made.target) == (old, new)
    assert switcher.is_compiled(new.plan)
    assert switcher.switch(state, made, step=1, why="").is_done


@dataclass
class Compiled:
    """A function that counts as compiled."""

    function: Any

    def lower(self, *args):
        return self

    def compile(self):
        return self.function


class Uncompiled:
    """An executable whose step is compiled, and whose other programs are compiled by name."""

    def __init__(self, executable, done):
        self._executable, self._done = executable, done
        self.sums = SimpleNamespace(compile=lambda: done.append("sums"))

    def __getattr__(self, name):
        return getattr(self._executable, name)

    def compile_probe(self):
        self._done.append("probe")

    def compile_evaluation(self):
        self._done.append("evaluation")

    @property
    def can_be_verified(self):
        return "probe" in self._done


@pytest.mark.parametrize("withdrawn_by", ["a decision", "the end of the run"])
def test_a_withdrawn_preparation_keeps_the_step(executables, monkeypatch, withdrawn_by):
    """What was compiled is not compiled again when the plan is requested again."""
    old, new = executables
    steps, of_old, of_new, jobs = [], [], [], []
    target = Uncompiled(new, of_new)
    monkeypatch.setattr(
        switch_module, "compile_plan", lambda *_, **__: steps.append("step") or target
    )
    switcher = Switcher(running=Uncompiled(old, of_old), settings=SETTINGS)
    monkeypatch.setattr(switcher, "_worker", Jobs(jobs))

    def withdraw():
        of_old.append("probe")
        if withdrawn_by == "a decision":
            preparation.withdraw()
        else:
            switcher.close()

    with monkeypatch.context() as patch:
        patch.setattr(switcher.running, "compile_probe", withdraw, raising=False)
        preparation = switcher.prepare(new.plan)
        jobs.pop()()
    assert "was withdrawn" in preparation.failure
    assert (steps, of_old, of_new) == (["step"], ["sums", "probe"], [])
    assert not switcher.is_compiled(new.plan), "the rest would still slow the run"
    preparation = switcher.prepare(new.plan)
    jobs.pop()()
    assert preparation.result().target is target
    assert (steps, of_new) == (["step"], ["sums", "probe", "evaluation"])
    assert "evaluation" not in of_old, "nothing is evaluated under the plan that the run leaves"
    assert switcher.is_compiled(new.plan)


class Jobs:
    """A worker whose jobs a test runs."""

    def __init__(self, jobs):
        self._jobs = jobs

    def __call__(self, job):
        self._jobs.append(job)

    def finish(self):
        pass


@pytest.mark.parametrize("what", ["not legal", "too large", "no room to move"])
def test_errors_while_preparing_are_reported(executables, what, monkeypatch):
    old, new = executables
    plan, bytes_per_device = new.plan, None
    if what == "not legal":
        plan = replace(plan, microbatches=5)
    elif what == "too large":
        bytes_per_device = new.step_bytes // 2
        compiled = replace(
            new.program,
            train_step=Compiled(new.program.train_step),
            eval_step=Compiled(new.program.eval_step),
        )
        monkeypatch.setattr(executables_module, "build_program", lambda *_: compiled)
    else:
        bytes_per_device = max(old.layout.num_bytes(), new.layout.num_bytes())
        monkeypatch.setattr(switch_module, "compile_plan", lambda *args, **kwargs: new)
    switcher = Switcher(running=old, settings=SETTINGS, bytes_per_device=bytes_per_device)
    preparation = switcher.prepare(plan)
    with pytest.raises(PlanError):
        preparation.result()
    assert preparation.is_done
    assert preparation.failure
    with pytest.raises(PlanError):
        preparation.is_ready_everywhere()


def test_the_executable_cache_evicts_the_least_recently_used(executables):
    old, new = executables
    cache = ExecutableCache(1)
    cache.put(old)
    assert cache.get(batch_of(old.program.config), old.plan, old.layout.devices) is old
    cache.put(new)
    assert len(cache) == 1
    assert cache.get(batch_of(old.program.config), old.plan, old.layout.devices) is None
    assert cache.get(batch_of(new.program.config), new.plan, new.layout.devices[:4]) is None


@pytest.fixture
def disk_transfer(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    yield DiskTransfer(
        checkpoints, lambda program, step: {"plan": program.plan.to_json(), "next_step": step + 1}
    )
    checkpoints.close()


@pytest.fixture
def switcher_without_room(executables, run, disk_transfer):
    """A switcher on devices with room for each state but not for a move."""
    return Switcher(
        running=executables[0],
        settings=SETTINGS,
        journal=Journal(run),
        probe=batch,
        bytes_per_device=1,
        disk_transfer=disk_transfer,
    )


@pytest.fixture
def over_disk(switcher_without_room, executables, monkeypatch):
    monkeypatch.setattr(switch_module, "compile_plan", lambda *_, **__: executables[1])
    preparation = switcher_without_room.prepare(executables[1].plan)
    assert preparation.result().over_disk
    return preparation.result()


def test_a_state_without_room_to_move_goes_over_the_disk_and_back(
    switcher_without_room, over_disk, state, run
):
    before = sums_of(over_disk.source, copied(state))
    switched = switcher_without_room.switch(state, over_disk, step=1, why="it is faster")
    assert (switched.is_done, switched.why_not) == (True, "")
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert sums_of(over_disk.target, switched.state) == before
    assert plan_on_disk(run) == over_disk.target.plan
    program = over_disk.target.program
    after, _ = program.train_step(switched.state, batch(program, 2))
    there = sums_of(over_disk.target, copied(after))
    back = switcher_without_room.take_back(after, step=2, why="slower", costs_s={})
    assert back.is_done
    assert sums_of(over_disk.source, back.state) == there
    assert plan_on_disk(run) == over_disk.source.plan


@pytest.mark.parametrize("fails", ["put", "fetch", "accept"])
def test_a_failed_transfer_over_disk_keeps_the_state(
    switcher_without_room, over_disk, state, run, disk_transfer, monkeypatch, fails
):
    before, fetch = sums_of(over_disk.source, copied(state)), DiskTransfer.fetch
    if fails == "put":
        monkeypatch.setattr(disk_transfer, "put", failing(OSError("the disk is full")))
    elif fails == "fetch":
        monkeypatch.setattr(
            DiskTransfer,
            "fetch",
            lambda self, target, step: (
                fetch(self, target, step)
                if target is over_disk.source
                else failing(OSError("no"))()
            ),
        )
    else:
        monkeypatch.setattr(switcher_without_room, "_commit", failing(RunDirectoryError("no")))
    switched = switcher_without_room.switch(state, over_disk, step=1, why="")
    assert (switched.is_done, switched.executable) == (False, over_disk.source)
    assert sums_of(over_disk.source, switched.state) == before
    assert switches(run.path)[0].ending == "failed"


def test_a_disk_transfer_that_cannot_go_back_raises(
    switcher_without_room, over_disk, state, monkeypatch
):
    monkeypatch.setattr(DiskTransfer, "fetch", failing(OSError("the disk is gone")))
    with pytest.raises(StateLostError, match="went over the disk"):
        switcher_without_room.switch(state, over_disk, step=1, why="")


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_batches_match_the_abstract_batch_of_the_program(executables):
    for executable in executables:
        program = executable.program
        real = batch(program)
        assert {
            name: (array.shape, array.dtype, array.sharding) for name, array in real.items()
        } == {
            name: (array.shape, array.dtype, array.sharding)
            for name, array in program.abstract_batch().items()
        }
