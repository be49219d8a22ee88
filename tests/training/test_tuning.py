"""Adapters, and models of which only some groups are trained, under the shared list of plans."""

from dataclasses import replace
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, assert_close, host_leaves
from test_equal_to_one_device import Run, one_device, run_case

from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.errors import ConfigError
from optimus_jax.models.flops import step_flops
from optimus_jax.models.program_reader import ProgramReader, needed
from optimus_jax.models.shapes import model_shapes
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
LAYERS = Tuning(freeze=("embedding",), freeze_layers=2)
LORA_LAYERS = replace(LORA, freeze_layers=1)
NF4 = replace(LORA, base_precision="nf4")
INT8 = replace(SOME, base_precision="int8")
TUNINGS = {
    "lora": LORA,
    "some": SOME,
    "ia3": IA3,
    "groups": GROUPS,
    "layers": LAYERS,
    "lora layers": LORA_LAYERS,
    "nf4": NF4,
    "int8": INT8,
}
DAILY = {
    *(("lora", number) for number in (11, 30)),
    ("some", 9),
    ("ia3", 2),
    ("groups", 3),
    *(("layers", number) for number in (9, 31)),
    ("nf4", 11),
    ("int8", 24),
}
"""Pairs of a tuning and the number of a plan that `make test` compares; the others are nightly.
Plans 30 and 31 have stages."""


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
        num_frozen = program.config.model.tuning.freeze_layers if leaf.is_in_layers else 0
        changed = before[f"params/{name}"] != after[f"params/{name}"]
        assert not changed[:num_frozen].any(), name
        assert changed[num_frozen:].any() == leaf.trained, name
        for moment in ("mu", "nu"):
            assert (f"opt_state/0/{moment}/{name}" in after) == leaf.trained, name
            if leaf.trained:
                size = np.abs(after[f"opt_state/0/{moment}/{name}"])
                assert not size[:num_frozen].any(), name
                assert size[num_frozen:].max() > 0, name


def flops(num_layers: int, tuning: Tuning) -> float:
    """FLOPs of products in the traced step of a model with so many layers."""
    model = replace(plans.LLAMA, num_layers=num_layers, dropout=0.0, tuning=tuning)
    program = plans.build(model, plans.case("fsdp=2,tensor=2", zero=3, remat="none")).program
    traced = program.train_step.trace(program.abstract_state(), program.abstract_batch())
    products = ProgramReader().part(needed(traced.jaxpr.jaxpr)).products
    return sum(product.flops(()) for product in products)


def test_backward_leaves_out_what_frozen_layers_do_not_need():
    """Without a trained embedding nothing of theirs; with it, gradients of their inputs alone."""
    one_layer = flops(4, Tuning()) - flops(3, Tuning())
    forward = flops(4, LAYERS) - flops(3, replace(LAYERS, freeze_layers=1))
    assert flops(3, Tuning(freeze=("embedding",))) == flops(3, Tuning()), "a lookup"
    no_products = flops(3, Tuning()) - flops(3, replace(LAYERS, freeze_layers=1))
    assert no_products == one_layer - forward
    assert forward == pytest.approx(one_layer / 3)
    of_inputs = flops(3, Tuning(freeze_layers=1)) - flops(3, replace(LAYERS, freeze_layers=1))
    assert 0 < of_inputs < one_layer - forward


def test_flops_that_count_leave_out_the_same():
    def counted(num_layers: int, tuning: Tuning) -> float:
        model = replace(plans.LLAMA, num_layers=num_layers, tuning=tuning)
        return step_flops(model, num_sequences=1, seq_len=plans.SEQ_LEN)

    one_layer = counted(4, Tuning()) - counted(3, Tuning())
    forward = counted(4, LAYERS) - counted(3, replace(LAYERS, freeze_layers=1))
    assert forward == one_layer / 3
    of_inputs = counted(3, Tuning(freeze_layers=1)) - counted(3, replace(LAYERS, freeze_layers=1))
    assert 0 < of_inputs < one_layer - forward


def test_parameters_of_frozen_layers_are_not_counted_as_trained():
    def num_trained(**settings: Any) -> int:
        return model_shapes(replace(plans.GPT, tuning=Tuning(**settings)), 104).num_trained

    of_layer = (num_trained() - num_trained(freeze_layers=2)) // 2
    assert num_trained(freeze_layers=1) == num_trained() - of_layer
    rows = plans.VOCAB_SIZE + plans.SEQ_LEN
    outside = (rows + 2) * plans.GPT.embed_dim
    assert num_trained() == outside + 3 * of_layer


@pytest.mark.parametrize(
    ("number", "message"), [(3, "no layer would be trained"), (-1, "cannot be negative")]
)
def test_a_number_of_frozen_layers_that_makes_no_sense_is_refused(number, message):
    with pytest.raises(ConfigError, match=message):
        plans.make_config(replace(plans.GPT, tuning=Tuning(freeze_layers=number)), plans.ONE_DEVICE)


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
