"""Layers with and without a window, each of which reads only keys that it may see, train like
layers that read all keys and mask them, under every kind of plan.
"""

import functools
from dataclasses import replace

import plans
import pytest
from helpers import F32_RELATIVE, assert_close
from test_equal_to_one_device import run_case

from optimus_jax.models import blockwise_attention, kernels

SHORT = 2
"""Tokens of the shortest block, so that the short examples of tests have several."""
SETTINGS = {"optimizer.clip_norm": 0.1}


@pytest.fixture
def branches(monkeypatch):
    """Counts the traced branches between the two kinds of layer."""
    traced, either = [], kernels.either

    def counted(*args):
        traced.append(args)
        return either(*args)

    monkeypatch.setattr(kernels, "either", counted)
    return traced


@functools.cache
def masked_run(model):
    """Of layers that read all keys: `MIN_BLOCK` is longer than the examples."""
    return run_case(model, plans.ONE_DEVICE, SETTINGS)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        (
            "gemma3_text",
            plans.case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2, remat="dots"),
        ),
        ("gpt_neo", plans.case("fsdp=2,tensor=2", zero=2, remat="selective")),
        ("gemma2", plans.case("data=2,tensor=2", sequence_parallel=True, remat="full")),
        (
            "gemma3_text",
            plans.case("pipe=2,data=2,tensor=2", microbatches=4, sequence_parallel=True),
        ),
        ("gpt_neo", plans.case("pipe=3", microbatches=3, remat="selective")),
    ],
    ids=str,
)
def test_layers_that_differ_equal_masked_ones(family, case, branches, monkeypatch):
    model = plans.FAMILY_MODELS[family]
    features = replace(model.features, layer_types=("window", "full"))
    model = replace(model, num_layers=5 if case.axes.pipe == 3 else 4, features=features)
    masked = masked_run(model)
    assert not branches
    monkeypatch.setattr(blockwise_attention, "MIN_BLOCK", SHORT)
    branching = run_case(model, case, SETTINGS)
    assert branches
    for found, expected in zip(branching.metrics, masked.metrics, strict=True):
        assert_close(found, expected, F32_RELATIVE)
    for ours, theirs in zip(branching.states, masked.states, strict=True):
        for path in theirs:
            assert_close(ours[path], theirs[path], F32_RELATIVE)


def test_dropout_of_layers_that_differ_does_not_depend_on_the_plan(branches, monkeypatch):
    model = plans.FAMILY_MODELS["gpt_neo"]
    model = replace(model, num_layers=4, dropout=0.1)
    monkeypatch.setattr(blockwise_attention, "MIN_BLOCK", SHORT)
    case = plans.case("fsdp=2,tensor=4", zero=3, remat="selective")
    run, one = (run_case(model, each) for each in (case, plans.ONE_DEVICE))
    assert branches
    for ours, theirs in zip(run.states, one.states, strict=True):
        for path in theirs:
            assert_close(ours[path], theirs[path], F32_RELATIVE)
