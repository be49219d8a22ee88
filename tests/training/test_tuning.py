"""Adapters, and models of which only some groups are trained, under the shared list of plans."""

from dataclasses import replace

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, assert_close, host_leaves
from test_equal_to_one_device import Run, one_device, run_case

from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.pipeline.residuals import Residuals

LORA = Tuning(method="lora", rank=4, alpha=2.0, dropout=0.2, base_precision="bf16")
"""On all projections; every leaf of it has a gradient in every step of a random state."""
SOME = Tuning(
    method="lora",
    rank=3,
    alpha=2.0,
    rank_scaling="sqrt_rank",
    targets=("value", "gate", "up"),
    freeze=("mlp",),
)
"""On some projections, and beside it everything but the feed-forward is trained."""
IA3 = Tuning(method="ia3")
GROUPS = Tuning(freeze=("embedding", "attention"))
NF4 = replace(LORA, base_precision="nf4")
INT8 = replace(SOME, base_precision="int8")
TUNINGS = {"lora": LORA, "some": SOME, "ia3": IA3, "groups": GROUPS, "nf4": NF4, "int8": INT8}
DAILY = {
    *(("lora", number) for number in (4, 11, 20, 24)),
    ("some", 9),
    ("ia3", 2),
    ("groups", 3),
    *(("nf4", number) for number in (5, 11, 20)),
    ("int8", 24),
}
"""Pairs of a tuning and the number of a plan that `make test` compares; the others are nightly."""


def tuned(case: plans.PlanCase, number: int, tuning: Tuning) -> ModelConfig:
    model = plans.model_for(case, list(plans.MODELS)[number % len(plans.MODELS)])
    return replace(model, tuning=tuning)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, number),
            marks=() if (name, number) in DAILY else pytest.mark.nightly,
            id=f"{name} {case}",
        )
        for name in TUNINGS
        for number, case in enumerate(plans.PLANS)
    ],
)
def runs(request) -> tuple[Run, Run]:
    """A plan's run, and one device's."""
    name, number = request.param
    case = plans.PLANS[number]
    model = tuned(case, number, TUNINGS[name])
    clip = ("optimizer.clip_norm", 0.01)
    return run_case(model, case, dict([clip])), one_device(model, clip)


def test_it_equals_one_device(runs):
    run, one = runs
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        assert expected["grad_norm"] > run.built.config.optimizer.clip_norm
        assert_close(found, expected, F32_RELATIVE)
    for found, expected in zip(run.states, one.states, strict=True):
        assert_close(found, expected, F32_RELATIVE)


def test_frozen_leaves_stay_and_have_no_moments(runs):
    _, one = runs
    program = one.built.program
    before, after = host_leaves(plans.random_state(program)), one.states[1]
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(program.shapes.leaves)
    }
    assert {leaf.trained for leaf in names.values()} == {True, False}
    for name, leaf in names.items():
        assert (before[f"params/{name}"] != after[f"params/{name}"]).any() == leaf.trained, name
        for moment in ("mu", "nu"):
            assert (f"opt_state/0/{moment}/{name}" in after) == leaf.trained, name
            if leaf.trained:
                assert np.abs(after[f"opt_state/0/{moment}/{name}"]).max() > 0, name


def test_backward_computes_gradients_of_adapters_alone():
    """A product over all tokens gives the gradient of a matrix."""
    tokens, adapters = plans.GLOBAL_BATCH * plans.SEQ_LEN, 7 * 2

    def over_tokens(model: ModelConfig) -> list[hlo.Matmul]:
        text = plans.compiled_step(plans.build(model, plans.ONE_DEVICE)).as_text() or ""
        return [
            product
            for product in hlo.matmuls(text)
            if all(tokens in operand for operand in product.operands)
        ]

    matrices = over_tokens(replace(plans.LLAMA, tuning=Tuning()))
    assert len([each for each in matrices if each.loops]) >= 5, "of every matrix of a layer"
    found = over_tokens(replace(plans.LLAMA, tuning=LORA))
    assert len(found) == adapters
    assert all(any(LORA.rank in operand for operand in each.operands) for each in found)


def test_stages_do_not_keep_frozen_matrices_as_residuals(monkeypatch):
    case = plans.case("pipe=2,fsdp=2,tensor=2", microbatches=4, zero=3)
    model = replace(plans.model_for(case, "llama"), tuning=LORA)
    built, kept, plain = plans.build(model, case), [], Residuals.__init__

    def spied(self, *args):
        plain(self, *args)
        kept.extend(self.like)

    monkeypatch.setattr(Residuals, "__init__", spied)
    state = jax.eval_shape(built.program.init, jnp.int32(0))
    built.program.train_step.trace(state, built.batch)
    rows = plans.GLOBAL_BATCH // 4 // 2
    assert kept
    assert [leaf.shape for leaf in kept if leaf.ndim and rows not in leaf.shape] == []
