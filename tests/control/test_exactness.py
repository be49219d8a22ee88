"""A switch equals a checkpoint and a restart bit for bit, and a run without switches within
rounding, in a model with dropout.
"""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import F32_RELATIVE
from plans import batch_of_step, compiled_step, random_state
from switch_cases import PLANS, built, compiled_quickly, copied, layout_of

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import CheckpointConfig
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.reshard import Move
from optimus_jax.reshard.shard_sums import ShardSums
from optimus_jax.training.state import abstract_stored_state, from_stored, to_stored

PLAN_SEQUENCE = (
    "data",
    "fsdp, zero 3",
    "1f1b",
    "attention over tensor, feed-forward not",
    "gpipe, uneven",
    "interleaved, zero 1",
    "data",
)
"""The plans cover each mesh axis, with and without stages; each kind of schedule; and ZeRO 0, 1 and
3.
"""
STEPS_EACH = 2
BUDGET_BYTES = 2**20


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with compiled_quickly():
        yield


@cache
def step_of(name):
    """The compiled step of a plan."""
    return compiled_step(built(name))


def trained(program, step, state, first):
    """The state after STEPS_EACH steps, and their losses, bit for bit."""
    losses = []
    for number in range(first, first + STEPS_EACH):
        state, metrics = step(state, batch_of_step(program, number))
        losses.append(np.asarray(metrics["loss"]))
    return state, losses


def saved(state, source, directory, step):
    """Save the state as a checkpoint."""
    checkpoints = Checkpoints(directory, CheckpointConfig())
    checkpoints.save(step, to_stored(state, source.shapes, source.plan, source.state_shardings), {})
    checkpoints.close()


def restored_from(directory, target, step):
    """The state that was saved under one plan, restored under another, as a run does."""
    checkpoints = Checkpoints(directory, CheckpointConfig())
    wanted = abstract_stored_state(
        target.shapes, target.optimizer, target.config.precision, target.plan, target.mesh
    )
    stored = checkpoints.restore(wanted, step, paddable=target.shapes.may_be_padded).state
    checkpoints.close()
    return from_stored(stored, target.shapes, target.plan, target.state_shardings)


def assert_same_state(state, other, target):
    """Assert that two states are equal bit for bit."""
    sums, paths = ShardSums(layout_of(target)), layout_of(target).named
    assert sums.of(named_leaves(state), paths) == sums.of(named_leaves(other), paths)


# Takes a minute or more: the steps of six plans and six switches are compiled. Fewer plans would
# not cover each schedule and ZeRO stage.
def test_a_switch_equals_a_restart_and_the_unswitched_run(tmp_path):
    name = PLAN_SEQUENCE[0]
    program = built(name).program
    start = random_state(program)
    stayed, expected, done = copied(start), [], 0
    for _ in PLAN_SEQUENCE:
        stayed, losses = trained(program, step_of(name), stayed, done + 1)
        expected, done = expected + losses, done + STEPS_EACH
    state, losses = trained(program, step_of(name), start, 1)
    seen, done = list(losses), STEPS_EACH
    for other in PLAN_SEQUENCE[1:]:
        target = built(other).program
        saved(state, program, tmp_path / f"at-{done}", done)
        restored = restored_from(tmp_path / f"at-{done}", target, done)
        state = Move(layout_of(program), layout_of(target), budget_bytes=BUDGET_BYTES).run(state)
        assert int(state.step) == done
        state, losses = trained(target, step_of(other), state, done + 1)
        restored, losses_restored = trained(target, step_of(other), restored, done + 1)
        assert losses == losses_restored, f"{name} -> {other}"
        assert_same_state(state, restored, target)
        seen, done, name, program = seen + losses, done + STEPS_EACH, other, target
    np.testing.assert_allclose(seen, expected, rtol=F32_RELATIVE)
    assert seen != expected, (
        "other plans add in another order: the same bits would mean the same plan"
    )
    assert jax.tree.structure(state) == jax.tree.structure(stayed)


@pytest.mark.nightly  # a quarter of an hour; the test before covers one path through the plans
@pytest.mark.parametrize("name", PLANS)
def test_a_switch_between_every_pair_of_plans_equals_a_restart(name, tmp_path):
    """For every ordered pair: the switch equals the restart bit for bit, and losses equal those of
    a run that does not switch within rounding.
    """
    program = built(name).program
    state, _ = trained(program, step_of(name), random_state(program), 1)
    saved(state, program, tmp_path, STEPS_EACH)
    _, expected = trained(program, step_of(name), copied(state), STEPS_EACH + 1)
    for other in [each for each in PLANS if each != name]:
        target = built(other).program
        moved = Move(layout_of(program), layout_of(target), budget_bytes=BUDGET_BYTES).run(
            copied(state)
        )
        moved, losses = trained(target, step_of(other), moved, STEPS_EACH + 1)
        restored, losses_restored = trained(
            target, step_of(other), restored_from(tmp_path, target, STEPS_EACH), STEPS_EACH + 1
        )
        assert losses == losses_restored, f"{name} -> {other}"
        assert_same_state(moved, restored, target)
        np.testing.assert_allclose(
            losses, expected, rtol=F32_RELATIVE, err_msg=f"{name} -> {other}"
        )
