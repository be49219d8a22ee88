"""Direct preference optimization: its loss, metrics and gradients, and under the shared plans."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, assert_close
from test_equal_to_one_device import one_device, run_case

from optimus_jax.config import Config, Tuning
from optimus_jax.errors import ConfigError
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.shapes import model_shapes
from optimus_jax.training.tasks import check_task

LORA = Tuning(method="lora", rank=4, alpha=2.0, dropout=0.2)
SETTINGS = {"task": "dpo", "preference.beta": 0.5, "preference.label_smoothing": 0.1}
DAILY = (
    plans.case("fsdp=2,tensor=4", zero=3, sequence_parallel=True, microbatches=2),
    plans.case(
        "pipe=4,fsdp=2", schedule="interleaved", microbatches=4, zero=3, stage_residuals="recompute"
    ),
)
"""Plans that `make test` trains under; the others are nightly. Split tokens and vocabulary, shards,
a schedule, and residuals that are computed again."""


REWARDS = ("reward_margin", "reward_chosen", "reward_rejected")
REWARD_ERROR = F32_RELATIVE * 0.5 * plans.SEQ_LEN * np.log(plans.VOCAB_SIZE)
"""A reward is a difference of two sums of logarithms: its error is relative to these."""


def without_rewards(metrics):
    return {name: value for name, value in metrics.items() if name not in REWARDS}


def model_for(case, number=1):
    """With frozen matrices in float32 or, for half of the plans, in 4 bits."""
    tuning = replace(LORA, base_precision=("f32", "nf4")[number // 2 % 2])
    return replace(plans.model_for(case, list(plans.MODELS)[number % 2]), tuning=tuning)


def test_daily_plans_are_of_the_shared_list():
    assert set(DAILY) <= set(plans.PLANS)


@pytest.mark.parametrize(
    ("number", "case"),
    [
        pytest.param(number, case, marks=() if case in DAILY else pytest.mark.nightly, id=str(case))
        for number, case in enumerate(plans.PLANS)
    ],
)
def test_it_equals_one_device(number, case):
    model = model_for(case, number)
    run, one = run_case(model, case, SETTINGS), one_device(model, *SETTINGS.items())
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        assert expected["grad_norm"] > 0
        assert_close(without_rewards(found), without_rewards(expected), F32_RELATIVE)
        for name in REWARDS:
            assert abs(found[name] - expected[name]) < REWARD_ERROR < abs(expected[name]) / 4
    for found, expected in zip(run.states, one.states, strict=True):
        assert_close(found, expected, F32_RELATIVE)


def log_probabilities(model, params, rows):
    """Logarithm of the probability of every continuation, [rows, pairs, 2], written plainly."""
    shapes = model_shapes(model, model.vocab_size)
    run = ForwardContext(
        comm=Collectives(jnp.dtype(jnp.float32)), visibility=Visibility(rows["segments"])
    )
    decoder = shapes.module(params, run.comm)
    hidden = decoder.hidden(rows["tokens"], rows["positions"], run)
    log_p = jax.nn.log_softmax(decoder.logits(hidden, run))
    log_p = jnp.take_along_axis(log_p, rows["targets"][..., None], axis=-1)[..., 0]
    ids = jnp.arange(plans.SEQ_LEN)[None, None]
    counts = (rows["segments"][..., None] == ids) & rows["loss_mask"][..., None]
    return jnp.where(counts, log_p[..., None], 0).sum(1).reshape(len(log_p), -1, 2), counts.any(1)


def test_loss_and_gradients_are_those_of_the_equation():
    model = replace(model_for(plans.ONE_DEVICE), tuning=replace(LORA, dropout=0.0), dropout=0.0)
    built = plans.build(model, plans.ONE_DEVICE, SETTINGS)
    state, rows = plans.random_state(built.program), plans.host_batch(1)
    rows = {name: jnp.asarray(array) for name, array in rows.items()}
    vocab = model.vocab_size
    params = jax.tree.map(
        lambda leaf: leaf[:vocab] if leaf.shape[0] > vocab else leaf, jax.device_get(state.params)
    )
    reference, _ = log_probabilities(model.base, without_adapters(params), rows)

    def equation(params):
        policy, counts = log_probabilities(model, params, rows)
        rewards = 0.5 * (policy - jax.lax.stop_gradient(reference))
        margin = rewards[..., 0] - rewards[..., 1]
        is_pair = counts.reshape(len(margin), -1, 2).all(-1)
        losses = -0.9 * jax.nn.log_sigmoid(margin) - 0.1 * jax.nn.log_sigmoid(-margin)
        pairs = is_pair.sum().astype(jnp.float32)
        mean = lambda values: jnp.where(is_pair, values, 0).sum() / pairs  # noqa: E731
        return mean(losses), {
            "preference_accuracy": mean((margin > 0).astype(jnp.float32)),
            "reward_margin": mean(margin),
            "reward_chosen": mean(rewards[..., 0]),
            "reward_rejected": mean(rewards[..., 1]),
        }

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(equation, has_aux=True))(params)
    _, found = built.program.train_step(state, built.batch)
    adapters = [
        gradient
        for path, gradient in jax.tree.leaves_with_path(gradients)
        if "adapter" in jax.tree_util.keystr(path)
    ]
    norm = np.sqrt(sum(np.square(np.asarray(gradient, np.float64)).sum() for gradient in adapters))
    assert_close(found["loss"], loss, F32_RELATIVE)
    assert_close(found["grad_norm"], np.float32(norm), F32_RELATIVE)
    for name, value in metrics.items():
        assert abs(found[name] - value) < REWARD_ERROR, name


def without_adapters(params):
    """The parameters that a model has without adapters."""
    if not isinstance(params, dict):
        return params
    return {
        name: without_adapters(part)
        for name, part in params.items()
        if not name.endswith("adapter")
    }


@pytest.mark.parametrize(
    "tuning", [Tuning(), Tuning(freeze=("mlp",)), Tuning(method="lora", freeze=("mlp",))]
)
def test_without_a_reference_that_stays_it_is_refused(tuning):
    model = replace(plans.GPT, tuning=tuning)
    with pytest.raises(ConfigError, match=r"(?s)only adapters may be trained.*lora"):
        check_task(Config(model=model, task="dpo"))
    check_task(Config(model=replace(plans.GPT, tuning=LORA), task="dpo"))


def test_settings_of_pairs_need_a_task_that_learns_from_them():
    named = {"preference.beta": 0.2, "steps": 3}
    with pytest.raises(ConfigError, match=r"preference.beta; task=next_token\n.*--set task=dpo"):
        check_task(Config(), named)
    check_task(Config(model=replace(plans.GPT, tuning=LORA), task="dpo"), named)


@pytest.mark.parametrize(("name", "value"), [("beta", 0.0), ("label_smoothing", 0.5)])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Config().with_values({f"preference.{name}": value})
