"""Which tokens are masked depends on the seed, the step and the example alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optimus_jax.config import Config, MaskingConfig
from optimus_jax.config.presets import PRESETS, PUBLISHED, model_preset
from optimus_jax.data.batch import synthetic_batch
from optimus_jax.errors import ConfigError
from optimus_jax.models.keys import make_key
from optimus_jax.run.inputs import unused_vocabulary, with_mask_token, with_random_tokens
from optimus_jax.training.masking import with_masked_tokens, with_words
from optimus_jax.training.tasks import check_task

VOCAB_SIZE, LENGTH = 1000, 4096
MASK = VOCAB_SIZE - 1


def config_with(**masking) -> Config:
    model = replace(model_preset("bert-nano"), vocab_size=VOCAB_SIZE)
    return Config(model=model, masking=MaskingConfig(**masking))


def masked(config, examples=(0,), step=1, changes=()):
    """A batch before and after, of these examples in this step."""
    rows = synthetic_batch(vocab_size=MASK, rows=len(examples), seq_len=LENGTH, seed=3)
    rows |= dict(changes)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    rows = with_words(rows)
    keys = fold(jax.random.fold_in(make_key(config.seed), step), jnp.array(examples))
    return rows, jax.tree.map(np.asarray, with_masked_tokens(config, rows, keys))


def test_shares_of_tokens_are_those_of_the_settings():
    """Each within four standard deviations."""
    config = config_with(share=0.3, masked=0.6, random=0.3)
    before, after = masked(config, range(8))
    chosen, tokens = after["loss_mask"], after["tokens"]
    hidden, kept = tokens == MASK, tokens == before["tokens"]
    for found, total, expected in (
        (chosen, chosen.size, 0.3),
        (hidden, chosen.sum(), 0.6),
        (chosen & ~hidden & ~kept, chosen.sum(), 0.3),
        (chosen & kept, chosen.sum(), 0.1),
    ):
        spread = (expected * (1 - expected) / total) ** 0.5
        assert abs(found.sum() / total - expected) < 4 * spread
    assert (kept | chosen).all(), "what is not restored is seen as it is"
    np.testing.assert_array_equal(after["targets"], before["tokens"])


def test_tokens_that_do_not_count_are_not_chosen():
    counts = np.arange(LENGTH)[None] % 3 == 0
    before, after = masked(config_with(), changes={"loss_mask": counts})
    assert after["loss_mask"].any()
    assert not (after["loss_mask"] & ~counts).any()
    assert (after["tokens"] == before["tokens"])[~counts].all()


def test_the_choice_depends_on_the_example_and_the_step_and_not_on_the_batch():
    config = config_with()
    tokens = np.full((3, LENGTH), 7, np.int32)
    _, three = masked(config, (4, 5, 6), changes={"tokens": tokens})
    _, one = masked(config, (5,), changes={"tokens": tokens[:1]})
    np.testing.assert_array_equal(one["tokens"][0], three["tokens"][1])
    assert (three["tokens"][0] != three["tokens"][1]).any()
    _, later = masked(config, (5,), step=2, changes={"tokens": tokens[:1]})
    assert (later["tokens"] != one["tokens"]).any()


def test_whole_words_are_chosen_together():
    begins = np.arange(LENGTH)[None] % 4 == 0
    positions = np.where(np.arange(LENGTH) < 2046, np.arange(LENGTH), np.arange(LENGTH) - 2046)
    changes = {"begins_word": begins, "positions": positions[None].astype(np.int32)}
    _, after = masked(config_with(share=0.5), changes=changes)
    chosen = after["loss_mask"][0]
    words = np.cumsum(begins[0] | (positions == 0))
    for word in range(1, words.max() + 1):
        assert len({*chosen[words == word].tolist()}) == 1
    assert 0.4 < chosen.mean() < 0.6
    assert chosen[2044] != chosen[2046], "a document begins a word; of this seed they differ"


class FakeTokenizer:
    def __init__(self, vocab_size, mask=None):
        self.vocab_size, self.mask = vocab_size, mask


def test_the_mask_token_is_the_tokenizers_or_an_id_that_it_does_not_use():
    config = config_with()
    assert with_mask_token(config, FakeTokenizer(VOCAB_SIZE, mask=103)).mask_token == 103
    assert with_mask_token(config, FakeTokenizer(MASK)).mask_token == MASK
    named = config_with(token=5)
    assert with_mask_token(named, FakeTokenizer(VOCAB_SIZE)) == named
    with pytest.raises(ConfigError, match="no id for the mask token") as error:
        with_mask_token(config, FakeTokenizer(VOCAB_SIZE))
    assert f"model.vocab_size={VOCAB_SIZE + 1}" in str(error.value)
    decoder = Config(model=model_preset("gpt2-nano"))
    assert with_mask_token(decoder, FakeTokenizer(257)) == decoder


def test_random_tokens_are_those_of_the_tokenizer():
    config = with_random_tokens(config_with(share=1.0, masked=0.0, random=1.0), FakeTokenizer(50))
    assert config.masking.random_below == 50
    before, after = masked(config, changes={"tokens": np.full((1, LENGTH), 700, np.int32)})
    assert before["loss_mask"].any()
    seen = after["tokens"][after["loss_mask"]]
    assert {*seen.tolist()} == {*range(50)}
    named = config_with(random_below=9)
    assert with_random_tokens(named, FakeTokenizer(50)).num_random_tokens == 9
    assert with_random_tokens(config_with(), FakeTokenizer(5000)).num_random_tokens == VOCAB_SIZE


def test_a_published_model_with_a_small_tokenizer_is_told_of_its_own():
    model = model_preset("bert-base-cased")
    (note,) = unused_vocabulary(Config(model=model), FakeTokenizer(257))
    assert "28,996" in note
    assert "--tokenizer hf://google-bert/bert-base-cased" in note
    assert not unused_vocabulary(Config(model=model), FakeTokenizer(28996))
    assert not unused_vocabulary(Config(model=model, init_from="a/dir"), FakeTokenizer(257))
    assert not unused_vocabulary(Config(model=model_preset("bert-nano")), FakeTokenizer(60))


def test_every_preset_but_the_small_ones_has_a_published_name():
    assert {*PUBLISHED} == {name for name in PRESETS if not name.endswith("-nano")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_below": 0}, "random_below"),
        ({"share": 0.0}, "share of tokens"),
        ({"masked": 0.8, "random": 0.3}, "more than all of them"),
        ({"token": -1}, "token id"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        MaskingConfig(**changes)


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        ("gpt2-nano", "mlm", "all tokens of a document"),
        ("bert-nano", "next_token", "earlier tokens only"),
    ],
)
def test_a_task_needs_its_kind_of_model(model, task, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_task(Config(model=model_preset(model), task=task))
    assert "--set task=" in str(error.value)


def test_a_mask_token_must_be_one_of_the_models():
    config = config_with(token=VOCAB_SIZE)
    with pytest.raises(ConfigError, match="does not have the mask token"):
        check_task(config)


def test_settings_of_masks_have_no_use_in_other_tasks():
    decoder = Config(model=model_preset("gpt2-nano"))
    with pytest.raises(ConfigError, match="settings of masked tokens have no use in task next_to"):
        check_task(decoder, {"masking.share"})
    check_task(config_with(), {"masking.share"})
