"""Every plan of tests/plans.py trains like one device, and really is another layout.

Two steps from a random state, on batches whose rows have different numbers of tokens that count,
with dropout, packed documents, weight decay and a gradient norm above the clipping threshold.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import hlo
import jax
import numpy as np
import plans
import pytest
from helpers import BF16_LOSS_RELATIVE, BF16_RELATIVE, F32_RELATIVE, assert_close, host_leaves
from jax.sharding import NamedSharding

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.errors import PlanError
from optimus_jax.mesh.axes import LENGTH
from optimus_jax.reshard.checksum import named_leaves

FIRST_MOMENT, SECOND_MOMENT = "opt_state/0/mu/", "opt_state/0/nu/"
TENSOR_DIMS = {"vocab", "heads", "kv_heads", "mlp"}
TENSOR_DIMS |= {"generator_heads", "generator_kv_heads", "generator_mlp"}
PIPE_DIMS = {"layers", "vocab"}


@dataclass(frozen=True)
class Run:
    """Results of two steps under one plan."""

    built: plans.Built
    text: str
    """The compiled step."""
    metrics: list[dict[str, np.ndarray]]
    states: list[dict[str, np.ndarray]]
    """Whole leaves on the host, by path, after each step."""
    layouts: dict[str, jax.Array]
    """Leaves after the last step, on their devices."""


def run_case(
    model: ModelConfig, case: plans.PlanCase, settings: Mapping[str, Any] | None = None
) -> Run:
    built = plans.build(model, case, settings)
    state, metrics, states = plans.random_state(built.program), [], []
    step = plans.compiled_step(built)
    for number in (1, 2):
        state, found = step(state, plans.batch_of_step(built.program, number))
        metrics.append(jax.device_get(found))
        states.append(plans.in_order(built.program, host_leaves(state)))
    return Run(built, step.as_text() or "", metrics, states, named_leaves(state))


@functools.cache
def one_device(model: ModelConfig, *settings: tuple[str, Any]) -> Run:
    """The run that others are compared with."""
    return run_case(model, plans.ONE_DEVICE, dict(settings))


def pytest_generate_tests(metafunc):
    """Every plan of the list with both models, an encoder and those of INPUT_MODELS, or those that
    `make parity` asks for.

    `make test` takes one of the two for each plan in turn, and both where key/value heads are
    shared and there are no stages.
    """
    if "runs" not in metafunc.fixturenames:
        return
    plan_id, model = metafunc.config.getoption("plan"), metafunc.config.getoption("model")
    cases = plans.PLANS if plan_id is None else [plans.PlanCase.parse(plan_id)]
    known = [*plans.MODELS, *plans.FAMILY_MODELS, *plans.INPUT_MODELS]
    if model not in (None, *known):
        raise pytest.UsageError(f"--model {model}: not one of {', '.join(known)}")
    names = [*plans.MODELS, "bert", *plans.INPUT_MODELS] if model is None else [model]
    metafunc.parametrize(
        "runs",
        [
            pytest.param(
                (name, case),
                marks=pytest.mark.nightly
                if plan_id is None and model is None and not is_daily(name, number, case)
                else (),
            )
            for name in names
            for number, case in enumerate(cases)
        ],
        indirect=True,
        scope="module",
        ids=lambda param: f"{param[0]} {param[1]}",
    )


def is_daily(name: str, number: int, case: plans.PlanCase) -> bool:
    """Whether `make test` compares the plan with this number under the model called `name`."""
    if name not in plans.MODELS:
        return False
    return list(plans.MODELS).index(name) == number % len(plans.MODELS) or (
        name == "llama" and case.axes.tensor >= 4 and case.axes.pipe == 1
    )


@pytest.fixture(scope="module")
def runs(request):
    """A plan's run, and one device's."""
    name, case = request.param
    model = plans.model_for(case, name)
    for refused, setting, message in (
        ("vit", "parallel.sequence_parallel", "cannot be split evenly"),
        ("whisper", "parallel.overlap", "encoder"),
    ):
        if name == refused and setting in dict(case.settings):
            with pytest.raises(PlanError, match=message):
                plans.build(model, case)
            pytest.skip(f"{name} has no such plan")
    # The small models of other families have smaller gradients, which are clipped too.
    settings = {} if name in plans.MODELS else {"optimizer.clip_norm": 0.1}
    return run_case(model, case, settings), one_device(model, *settings.items())


def test_loss_and_gradient_norm_equal_one_device(runs):
    run, reference = runs
    for found, expected in zip(run.metrics, reference.metrics, strict=True):
        assert found["tokens"] == expected["tokens"] > 0
        assert not found["skipped"]
        assert expected["grad_norm"] > run.built.config.optimizer.clip_norm
        assert_close(found, expected, F32_RELATIVE)
    assert len({float(found["loss"]) for found in run.metrics}) == 2


def test_gradients_equal_one_device(runs):
    run, _ = runs
    found, expected = (
        {path: leaf for path, leaf in side.states[0].items() if path.startswith(FIRST_MOMENT)}
        for side in runs
    )
    assert len(found) == len(jax.tree.leaves(run.built.program.shapes.params))
    assert all(np.abs(leaf).max() > 0 for leaf in expected.values())
    assert_close(found, expected, F32_RELATIVE)


def test_state_after_two_steps_equals_one_device(runs):
    run, reference = runs
    before = host_leaves(plans.random_state(reference.built.program))
    assert all(
        (leaf != before[path]).any()
        for path, leaf in reference.states[1].items()
        if not path.startswith("loss_scale")
    )
    assert_close(run.states[1], reference.states[1], F32_RELATIVE)


def test_state_is_sharded_as_the_plan_says(runs):
    run, reference = runs
    plan, model = run.built.plan, run.built.config.model
    assert plan.num_devices > 1 == reference.built.plan.num_devices
    names = {
        "/".join(key.key for key in path): leaf.dims
        for path, leaf in jax.tree.leaves_with_path(run.built.program.shapes.leaves)
    }
    whole_over_tensor = {rule.partition("=")[0] for rule in run.built.config.parallel.rules}
    if "heads" in whole_over_tensor or model.num_kv_heads % plan.axes.tensor:
        whole_over_tensor.add("kv_heads")
    whole_over_tensor |= {f"generator_{dim}" for dim in whole_over_tensor}

    for path, leaf in run.layouts.items():
        assert len(leaf.sharding.device_set) == plan.num_devices
        logical = names.get(
            path.removeprefix("params/").removeprefix(FIRST_MOMENT).removeprefix(SECOND_MOMENT), ()
        )
        stored_along = None
        if "embed" in logical and plan.zero >= 1:
            stored_along = "vocab" if "vocab" in logical else "embed"
        expected = []
        for dim in logical:
            axes = ("pipe",) if dim in PIPE_DIMS else ()
            axes += ("tensor",) if dim in TENSOR_DIMS - whole_over_tensor else ()
            axes += ("fsdp",) if dim == stored_along else ()
            expected.append(tuple(axis for axis in axes if plan.axes[axis] > 1))
        ways = [math.prod(plan.axes[axis] for axis in axes) for axes in expected]
        shard = tuple(size // way for size, way in zip(leaf.shape, ways, strict=True))
        assert {piece.data.shape for piece in leaf.addressable_shards} == {shard}, path
        assert _axes(leaf, plan) == expected, path


def _axes(leaf: jax.Array, plan: Any) -> list[tuple[str, ...]]:
    """The mesh axes of more than one device that split each dimension."""
    assert isinstance(leaf.sharding, NamedSharding)
    spec = (*leaf.sharding.spec, *(None,) * leaf.ndim)[: leaf.ndim]
    return [
        tuple(
            axis
            for axis in ((entry,) if isinstance(entry, str) else entry or ())
            if plan.axes[axis] > 1
        )
        for entry in spec
    ]


def test_collectives_run_along_the_axes_that_the_plan_splits(runs):
    run, reference = runs
    plan = run.built.plan
    assert hlo.collectives(reference.text, reference.built.program.mesh) == []
    axes_by_kind: dict[str, set[str]] = {}
    for moved in hlo.collectives(run.text, run.built.program.mesh):
        axes_by_kind.setdefault(moved.kind, set()).update(moved.axes)
    expected = {"all-reduce": {axis for axis in MESH_AXES if plan.axes[axis] > 1}}
    if plan.axes.pipe > 1:
        expected |= {"collective-permute": {"pipe"}}
    if plan.zero:
        scatter = "all-to-all" if plan.scatter == "exchange" else "reduce-scatter"
        expected |= {"all-gather": {"fsdp"}, scatter: {"fsdp"}}
    if plan.axes.pipe > 1 and plan.axes.tensor > 1:
        # Stages send parts of what devices along tensor hold alike, or tokens are split.
        expected["all-gather"] = {*expected.get("all-gather", ()), "tensor"}
    if LENGTH in dict(plan.rules):
        for kind in ("all-gather", "reduce-scatter"):
            expected[kind] = {*expected.get(kind, ()), "tensor"}
    if run.built.config.model.generator is not None:
        # What it writes is drawn from sums over the parts of the vocabulary.
        parts = {axis for axis in dict(plan.rules)["vocab"] if plan.axes[axis] > 1}
        if parts:
            expected["all-gather"] = {*expected.get("all-gather", ()), *parts}
    assert axes_by_kind == expected


def test_vocabulary_padding_stays_zero(runs):
    run, _ = runs
    model = run.built.config.model
    rows = run.built.plan.padded_vocab(model)
    tables = {path: leaf for path, leaf in run.states[1].items() if path.endswith("/table")}
    assert tables
    for path, leaf in tables.items():
        assert len(leaf) == rows > model.vocab_size
        assert not leaf[model.vocab_size :].any(), path
        assert leaf[: model.vocab_size].any(axis=1).all(), path


@pytest.mark.parametrize(
    "case",
    [
        plans.case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2),
        plans.case("fsdp=4,tensor=2", zero=2),
    ],
    ids=str,
)
def test_bf16_equals_one_device_within_its_own_rounding(case):
    bf16 = ("precision.compute", "bf16")
    run, reference, exact = (
        run_case(plans.GPT, case, dict([bf16])),
        one_device(plans.GPT, bf16),
        one_device(plans.GPT),
    )
    assert "bf16[" in run.text
    assert "bf16[" not in exact.text
    for side in (run, reference):
        assert side.metrics[0]["loss"] != exact.metrics[0]["loss"]
    for path, leaf in run.layouts.items():
        assert leaf.dtype != "bfloat16", path
    found, expected = (
        {path: leaf for path, leaf in side.states[0].items() if SECOND_MOMENT not in path}
        for side in (run, reference)
    )
    assert_close(found, expected, BF16_RELATIVE)
    for found, expected in zip(run.metrics, reference.metrics, strict=True):
        assert_close(found["loss"], expected["loss"], BF16_LOSS_RELATIVE)
