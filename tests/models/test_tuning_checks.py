"""What is frozen is what a user named, or an error."""

import pytest

from optimus_jax import find_plans
from optimus_jax.config.request import make_config
from optimus_jax.errors import ConfigError
from optimus_jax.models.tuning_checks import check_freeze
from optimus_jax.run.requested_config import requested_config


@pytest.mark.parametrize(
    ("model", "freeze", "wrong"),
    [
        ("gpt2-nano", "head", r"(?s)head of gpt2-nano is its embedding.*tied=true.*add embedding"),
        ("gpt2-nano", "head,mlp", "is its embedding"),
        ("gpt2-nano", "embedding,attention,mlp,norm", "(?s)nothing of gpt2-nano.*mlp, norm"),
        ("gpt2-nano", "embedding,head", None),
        ("gpt2-nano", "embedding", None),
        ("llama-nano", "head", None),
        ("llama-nano", "embedding,attention,mlp,norm", None),
    ],
)
def test_a_frozen_group_is_not_part_of_a_trained_one(model: str, freeze: str, wrong: str | None):
    settings = {"model.tuning.freeze": freeze}
    found = make_config(model, settings).model
    if wrong is None:
        check_freeze(found)
        requested_config(model, None, None, False, settings, False)
        return
    with pytest.raises(ConfigError, match=wrong):
        check_freeze(found)
    with pytest.raises(ConfigError, match=wrong):
        requested_config(model, None, None, False, settings, False)
    with pytest.raises(ConfigError, match=wrong):
        find_plans(model, "h100:1x1", **settings)
