"""Which patches of an image are hidden depends on the seed, the step and the example alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optimus_jax.config import Config, DataConfig, PatchMaskingConfig
from optimus_jax.config.model import CLASS_TOKEN, HIDDEN_PATCH, PATCH_TOKEN
from optimus_jax.config.presets import model_preset
from optimus_jax.data.batch import synthetic_batch
from optimus_jax.errors import ConfigError
from optimus_jax.models.keys import make_key
from optimus_jax.training.patch_masking import squares_of, with_hidden_patches
from optimus_jax.training.tasks import check_task

MODEL = model_preset("vit-base-patch16-224")
SIDE = 14


def config_with(task="mim", **masking) -> Config:
    return Config(
        model=MODEL,
        data=DataConfig(seq_len=MODEL.max_length),
        task=task,
        patch_masking=PatchMaskingConfig(**masking),
    )


def hidden(config, examples=(0,), step=1):
    """Which patches of these examples are hidden in this step, bool [examples, rows, columns]."""
    rows = synthetic_batch(
        vocab_size=1,
        rows=len(examples),
        seq_len=MODEL.max_length,
        seed=3,
        patch_values=MODEL.patch_values,
    )
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = fold(jax.random.fold_in(make_key(config.seed), step), jnp.array(examples))
    after = jax.tree.map(np.asarray, with_hidden_patches(config, rows, keys))
    counts = after["loss_mask"]
    assert (after["tokens"][:, 0] == CLASS_TOKEN).all()
    assert not counts[:, 0].any()
    np.testing.assert_array_equal(
        after["tokens"][:, 1:], np.where(counts[:, 1:], HIDDEN_PATCH, PATCH_TOKEN)
    )
    np.testing.assert_array_equal(after["patches"], rows["patches"], "hidden by the tokens alone")
    return counts[:, 1:].reshape(-1, SIDE, SIDE)


@pytest.mark.parametrize("square", [1, 2, 7])
def test_a_share_of_the_squares_is_hidden_whole(square):
    found = hidden(config_with(share=0.5, square=square), range(4))
    num_squares = (SIDE // square) ** 2
    assert (found.sum((1, 2)) == round(num_squares / 2) * square**2).all()
    blocks = found.reshape(4, SIDE // square, square, SIDE // square, square)
    assert (blocks.all((2, 4)) == blocks.any((2, 4))).all()
    assert len({image.tobytes() for image in found}) > 1


def test_squares_at_the_edge_may_be_smaller():
    squares = squares_of(MODEL, 5)
    assert squares[0] == -1, "of the class"
    assert {*squares[1:].tolist()} == {*range(9)}
    assert np.bincount(squares[1:]).tolist() == [25, 25, 20, 25, 25, 20, 20, 20, 16]
    assert hidden(config_with(share=0.01, square=5)).any(), "at least one is hidden"


def test_the_choice_depends_on_the_example_and_the_step_and_not_on_the_batch():
    config = config_with(square=2)
    three, one = hidden(config, (4, 5, 6)), hidden(config, (5,))
    np.testing.assert_array_equal(one[0], three[1])
    assert (three[0] != three[1]).any()
    assert (hidden(config, (5,), step=2) != one).any()


def test_settings_of_another_task_are_refused():
    check_task(config_with(), {"patch_masking.share", "augmentation.flip"})
    with pytest.raises(ConfigError, match="masked tokens"):
        check_task(config_with(), {"masking.share"})
    with pytest.raises(ConfigError, match="hidden patches"):
        check_task(config_with("image_classification"), {"patch_masking.square"})
    with pytest.raises(ConfigError, match=r"patch_masking\.share is the share"):
        PatchMaskingConfig(share=0.0)
