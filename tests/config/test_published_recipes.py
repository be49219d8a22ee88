"""Recipes are settings to start from."""

import pytest

from optimus_jax.config.presets import model_preset
from optimus_jax.config.recipes import RECIPES
from optimus_jax.config.request import make_config
from optimus_jax.config.settings import value_of
from optimus_jax.errors import ConfigError
from optimus_jax.models.families import check_family, features_of
from optimus_jax.training.tasks import check_task

MODELS = {
    "megatron-gpt2": "gpt2-xl",
    "megatron-bert": "bert-large-cased",
    "electra": "electra-base-discriminator",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_a_model_that_can_be_trained(name):
    config = make_config(MODELS[name], {"recipe": name})
    check_family(config.model)
    check_task(config)
    for setting, value in RECIPES[name].settings.items():
        assert value_of(config, setting) == value
    assert config.recipe == name
    assert "arXiv" in RECIPES[name].source


def test_other_settings_replace_those_of_a_recipe():
    config = make_config("gpt2-nano", {"recipe": "megatron-gpt2", "steps": 100, "seq_len": 64})
    assert (config.steps, config.data.seq_len) == (100, 64)
    assert config.optimizer.weight_decay == 0.01


def test_megatrons_bert_has_its_norms_before_each_sublayer():
    recipe = make_config("bert-base-cased", {"recipe": "megatron-bert"})
    found, usual = features_of(recipe.model), features_of(model_preset("bert-base-cased"))
    assert (found.norm_place, usual.norm_place) == ("pre", "post")
    assert found.final_norm
    assert not usual.final_norm


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ConfigError, match="unknown recipe") as error:
        make_config("gpt2-nano", {"recipe": "megatron-gpt"})
    assert "megatron-gpt2" in str(error.value)
