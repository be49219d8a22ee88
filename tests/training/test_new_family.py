"""A family that the package does not know is one row: it trains and is planned like the others."""

from dataclasses import replace

import jax
import plans
import pytest
from helpers import F32_RELATIVE, assert_close
from test_equal_to_one_device import run_case

from optimus_jax.config import Features
from optimus_jax.models.families import FAMILIES
from optimus_jax.models.shapes import model_shapes
from optimus_jax.planning.api import find_plans
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.training.state import bytes_on_device

MADE_UP = replace(
    FAMILIES["llama"],
    parallel=True,
    qk_norm="head",
    layer_types=("window", "full"),
    biases=("out", "up"),
)
"""Parallel residual, norms of queries and keys, and a window in every other layer."""
MODEL = replace(
    plans.LLAMA, name="made-up", family="made_up", num_kv_heads=8, features=Features(window=5)
)


@pytest.fixture(autouse=True)
def row(monkeypatch):
    monkeypatch.setitem(FAMILIES, "made_up", MADE_UP)


@pytest.mark.parametrize(
    "case",
    [
        plans.case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2, remat="full"),
        plans.case("pipe=2,data=2,tensor=2", microbatches=4, sequence_parallel=True),
    ],
    ids=str,
)
def test_it_equals_one_device(case):
    model = replace(MODEL, num_layers=plans.model_for(case, "llama").num_layers)
    run, one = (run_case(model, each) for each in (case, plans.ONE_DEVICE))
    for ours, theirs in zip(run.states, one.states, strict=True):
        for path in theirs:
            assert_close(ours[path], theirs[path], F32_RELATIVE)
    state = run.built.program.abstract_state()
    scalars = 64
    memory = memory_of_run(run.built.config, run.built.plan)
    assert memory.states == pytest.approx(bytes_on_device(state), abs=scalars)


def test_it_is_planned_for_a_cluster():
    shapes = model_shapes(MODEL, MODEL.vocab_size)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes.params)) == shapes.num_params
    wider = {"embed_dim": 2048, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    best = find_plans(
        "llama3-8b",
        "h100:8",
        **{f"model.{name}": value for name, value in wider.items()},
        **{"model.family": "made_up", "model.features.window": 512},
    )
    assert best[0].prediction.step_time_s > 0
