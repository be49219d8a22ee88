"""The leaf table: whatever the plan pads, checkpoints may be padded in."""

import jax
import pytest
from helpers import host_leaves
from plans import FAMILY_MODELS, build, case, random_state

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import CheckpointConfig
from optimus_jax.training.state import abstract_stored_state, to_stored


@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_every_dimension_whose_size_follows_the_plan_is_padded(family):
    few, many = (
        build(FAMILY_MODELS[family], each).program.shapes
        for each in (case("data=1"), case("fsdp=3,tensor=2"))
    )
    sizes = zip(jax.tree.leaves_with_path(few.params), jax.tree.leaves(many.params), strict=True)
    for (path, ours), theirs in sizes:
        name = "params/" + jax.tree_util.keystr(path, simple=True, separator="/")
        assert ours.shape == theirs.shape or few.may_be_padded(name), name
        assert few.may_be_padded(name) == many.may_be_padded(name)


def test_a_heads_bias_is_restored_for_other_padding(tmp_path):
    """GPT-J has a bias for every row of its head's table."""
    few, many = (
        build(FAMILY_MODELS["gptj"], each).program
        for each in (case("data=1"), case("fsdp=3,tensor=2"))
    )
    state = random_state(few)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, to_stored(state, few.shapes, few.plan, few.state_shardings), {})
    wanted = abstract_stored_state(
        many.shapes, many.optimizer, many.config.precision, many.plan, many.mesh
    )
    restored = checkpoints.restore(wanted, paddable=many.shapes.may_be_padded).state
    checkpoints.close()
    before, after = (host_leaves(each.params)["head_bias"] for each in (state, restored))
    assert len(before) < len(after)
    assert (after[: len(before)] == before).all()
    assert not after[len(before) :].any()
