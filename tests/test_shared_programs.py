"""Programs share compiled functions if, and only if, they compute the same."""

import jax
import plans
import pytest
from shared_programs import SharedPrograms

TWO_DEVICES = plans.case("data=2")


@pytest.fixture(scope="module")
def build():
    """Builds the program of some settings."""
    programs = SharedPrograms()

    def build(settings):
        config = plans.make_config(plans.GPT, TWO_DEVICES, settings)
        return programs.build(config, plans.make_plan(config), jax.devices()[:2])

    return build


@pytest.fixture(scope="module")
def first(build):
    return build({})


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [
        ({}, True),
        ({"steps": 9, "optimizer.decay_steps": 8}, True),
        ({"checkpoint.every": 3, "eval_every": 0, "evaluation.examples": 5}, True),
        ({"data.sources": ("other.txt",), "data.seq_len": plans.SEQ_LEN}, True),
        ({"precision.compute": "f32", "model.name": "other"}, True),
        ({"steps": 9}, False),
        ({"seed": 1}, False),
        ({"optimizer.lr": 0.02}, False),
        ({"optimizer.clip_norm": 1.0}, False),
        ({"optimizer.name": "sgd"}, False),
        ({"data.respect_documents": False}, False),
        ({"model.dropout": 0.2}, False),
        ({"parallel.microbatches": 2}, False),
        ({"precision.compute": "f16"}, False),
    ],
    ids=str,
)
def test_programs_that_compute_the_same_are_shared(build, first, settings, is_shared):
    other = build(settings)
    for name in ("init", "train_step", "eval_step", "next_tokens"):
        assert (getattr(first, name) is getattr(other, name)) == is_shared
    assert other.config == plans.make_config(plans.GPT, TWO_DEVICES, settings)
