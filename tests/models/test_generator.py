"""ELECTRA's joint objective equals that of Hugging Face's two models that share an embedding, on
one device, on a mesh, with split tokens and in stages.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_models import libraries
from test_huggingface import (
    GLOBAL_BATCH,
    GRADIENT_RTOL,
    ONE_DEVICE,
    SEQ_LEN,
    SHARDED,
    STAGES,
    batch,
    differences,
    program_for,
    run,
    state_of,
)

from optimus_jax.config import Config, DataConfig, Generator, ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.models.families import check_family, generator_of
from optimus_jax.models.generator import GENERATOR, of_generator, own_part
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface, to_huggingface
from optimus_jax.models.huggingface_config import config_to_huggingface
from optimus_jax.models.keys import make_key
from optimus_jax.planning.cost.cost import term_times
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.training.masking import with_tokens_to_draw
from optimus_jax.training.step import CORRUPTION
from optimus_jax.training.tasks import REPLACED, kept_model, task_name

TABLE, MODEL, OF_GENERATOR = "embedding_size", "hidden_size", "generator"
SIZES = {
    "as wide as its table": {TABLE: 48, MODEL: 48, OF_GENERATOR: (16, 2)},
    "narrow table, generator as wide": {TABLE: 32, MODEL: 48, OF_GENERATOR: (32, 4)},
    "a head that cannot be split": {TABLE: 24, MODEL: 48, OF_GENERATOR: (16, 1)},
}
"""Widths of the table, of the model, and of its generator with the generator's heads."""
VOCAB, LAYERS, GENERATOR_LAYERS = 97, 5, 2


@cache
def reference(name: str) -> SimpleNamespace:
    """Both models in PyTorch: weights, losses and gradients of the joint objective, in step 1."""
    torch, transformers = libraries()
    torch.manual_seed(0)
    sizes = SIZES[name]
    width, heads = sizes[OF_GENERATOR]

    def made(auto: str, hidden: int, num_heads: int, num_layers: int):
        config = transformers.ElectraConfig(
            vocab_size=VOCAB,
            embedding_size=sizes[TABLE],
            hidden_size=hidden,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            intermediate_size=2 * hidden,
            max_position_embeddings=SEQ_LEN,
            pad_token_id=None,
            attn_implementation="eager",
        )
        model = getattr(transformers, auto)(config).eval()
        for weight in model.parameters():
            weight.data = 0.2 * torch.randn_like(weight) + (weight.data if weight.ndim == 1 else 0)
        model.config.architectures = [auto]
        return model

    generator = made("ElectraForMaskedLM", width, heads, GENERATOR_LAYERS)
    model = made("ElectraForPreTraining", sizes[MODEL], 4, LAYERS)
    model.electra.embeddings = generator.electra.embeddings
    masked = masked_rows(name, model.config.to_dict())
    hidden = torch.tensor(masked["loss_mask"])
    tokens, original = (
        torch.tensor(masked[key], dtype=torch.long) for key in ("tokens", "targets")
    )
    logits = generator(tokens).logits
    of_generator = torch.nn.functional.cross_entropy(logits[hidden], original[hidden])
    sums = logits.softmax(-1).cumsum(-1)
    drawn = (sums <= torch.tensor(masked["draws"])[..., None] * sums[..., -1:]).sum(-1)
    seen = torch.where(hidden, drawn, original)
    counts = torch.tensor(rows()["loss_mask"])
    odds = model(seen).logits[counts]
    is_replaced = (seen != original)[counts].float()
    of_model = torch.nn.functional.binary_cross_entropy_with_logits(odds, is_replaced)
    loss = of_generator + 50 * of_model
    loss.backward()
    parts = []
    for each in (model, generator):
        weights = dict(each.named_parameters())
        parts.append(
            SimpleNamespace(
                config=each.config.to_dict(),
                state_dict={key: tensor.numpy() for key, tensor in each.state_dict().items()},
                gradients={
                    key: np.zeros(weight.shape, np.float32)
                    if weight.grad is None
                    else weight.grad.numpy()
                    for key, weight in weights.items()
                },
            )
        )
    return SimpleNamespace(
        model=parts[0],
        generator=parts[1],
        loss=loss.item(),
        generator_loss=of_generator.item(),
        accuracy=((odds > 0) == (is_replaced > 0)).float().mean().item(),
        num_replaced=int(is_replaced.sum()),
    )


def rows() -> dict[str, np.ndarray]:
    """A batch; some tokens do not count, and every token is a word."""
    found = dict(batch(VOCAB))
    return found | {"begins_word": np.ones_like(found["loss_mask"])}


def masked_rows(name: str, theirs: dict) -> dict[str, np.ndarray]:
    """What the generator sees in step 1."""
    key = jax.random.fold_in(jax.random.fold_in(make_key(Config().seed), CORRUPTION), 1)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(GLOBAL_BATCH))
    config = Config(model=joint(name, config_from_huggingface(theirs)), data=DataConfig())
    given = {key: jnp.asarray(value) for key, value in rows().items()}
    return jax.tree.map(np.array, with_tokens_to_draw(config, given, keys))


def joint(name: str, model: ModelConfig) -> ModelConfig:
    """The model with its generator."""
    width, heads = SIZES[name][OF_GENERATOR]
    sizes = {"num_layers": GENERATOR_LAYERS, "num_heads": heads, "mlp_dim": 2 * width}
    return replace(model, generator=Generator(embed_dim=width, **sizes))


PLANS = {
    "one device": (ONE_DEVICE, {}),
    "a mesh": (SHARDED, {"zero": 3}),
    "two microbatches": (AxisSizes(fsdp=2, tensor=2), {"zero": 3, "microbatches": 2}),
    "split tokens": (SHARDED, {"zero": 1, "splits_tokens": True}),
    "zero 2": (SHARDED, {"zero": 2}),
    "stages": (STAGES, {"microbatches": 2}),
    "four stages, split tokens": (
        AxisSizes(pipe=4, tensor=2),
        {"microbatches": 2, "splits_tokens": True},
    ),
}


DAILY = {
    "as wide as its table": "four stages, split tokens",
    "narrow table, generator as wide": "two microbatches",
    "a head that cannot be split": "split tokens",
}
"""The plan of each on which `make test` compares it besides; `make nightly` compares all."""


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(
            name,
            plan,
            id=f"{name} on {plan}",
            marks=() if DAILY[name] == plan or plan == "one device" else pytest.mark.nightly,
        )
        for name in SIZES
        for plan in PLANS
    ],
)
def test_joint_loss_and_gradients_equal_huggingface(name: str, plan: str):
    theirs = reference(name)
    model = joint(name, config_from_huggingface(theirs.model.config))
    assert task_name(Config(model=model)) == REPLACED
    assert 5 < theirs.num_replaced < 40
    axes, settings = PLANS[plan]
    program = program_for(model, axes, **settings)
    rows_up = program.shapes.vocab_rows

    own = generator_of(model)
    assert own is not None

    def ours(values: str) -> dict:
        of_model, of_own = (
            from_huggingface(getattr(part, values), config, rows_up)
            for part, config in (
                (theirs.model, replace(model, generator=None)),
                (theirs.generator, own),
            )
        )
        return of_model | {GENERATOR: own_part(of_own)}

    state = state_of(program, stacked(ours("state_dict"), program))
    given = put_batch(rows(), program.batch_sharding, GLOBAL_BATCH)
    state, metrics = run(program.train_step, state, given)
    off = differences(state.opt_state[0].mu, stacked(ours("gradients"), program))
    assert float(metrics["loss"]) == pytest.approx(theirs.loss, rel=1e-5)
    assert float(metrics["generator_loss"]) == pytest.approx(theirs.generator_loss, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(theirs.accuracy)
    assert {leaf: value for leaf, value in off.items() if not value < GRADIENT_RTOL} == {}


def stacked(params: dict, program) -> dict:
    """Parameters with the layers of the model in its plan's slots."""
    slots = np.array(program.shapes.slots)
    layers = jax.tree.map(
        lambda leaf: np.where(
            (slots >= 0).reshape(-1, *[1] * (leaf.ndim - 1)), leaf[np.maximum(slots, 0)], 0
        ),
        params["layers"],
    )
    return params | {"layers": layers}


def test_both_parts_are_exported_as_their_classes_have_them():
    theirs = reference("narrow table, generator as wide")
    model = joint("narrow table, generator as wide", config_from_huggingface(theirs.model.config))
    alone = replace(model, generator=None)
    own = generator_of(model)
    assert own is not None
    for part, config in ((theirs.model, alone), (theirs.generator, own)):
        written = config_to_huggingface(config)
        assert written["architectures"] == part.config["architectures"]
        params = from_huggingface(part.state_dict, config, VOCAB + 7)
        assert to_huggingface(params, config).keys() == part.gradients.keys()
    shapes = program_for(model, ONE_DEVICE).shapes
    assert shapes.generator is not None
    found = {path: leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes.generator.params)}
    both = {
        path: leaf.shape for path, leaf in jax.tree.leaves_with_path(of_generator(shapes.params))
    }
    assert found == both


def test_a_generator_needs_a_model_that_finds_what_it_replaces():
    for change, message in (
        ({"model.labels": "a,b"}, "finds replaced tokens"),
        ({"model.family": "bert"}, "has the embedding of its model"),
        ({"model.tuning.freeze_layers": 1}, "all its layers are trained"),
    ):
        config = Config(model=model_preset("electra-nano")).with_values(change)
        with pytest.raises(ConfigError, match=message):
            check_family(config.model)
    with pytest.raises(ConfigError, match="no whole width"):
        Generator(embed_dim=64, num_heads=3)


@pytest.mark.parametrize(
    ("changes", "labels", "task"),
    [
        ({}, ("replaced",), REPLACED),
        ({"task": "mlm"}, (), "mlm"),
        ({"task": "classification"}, (), "classification"),
        ({"task": "classification", "model.labels": "no,yes"}, ("no", "yes"), "classification"),
        ({"model.labels": "no,yes"}, ("no", "yes"), "classification"),
        ({"model.labels": "", "model.generator": "none"}, (), "mlm"),
    ],
)
def test_another_task_leaves_out_the_generator_and_its_head(changes, labels, task):
    config = Config(model=model_preset("electra-nano")).with_values(changes)
    model = kept_model(config)
    assert (model.labels, task_name(replace(config, model=model))) == (labels, task)
    assert (model.generator is None) == (task != REPLACED)
    check_family(model)


def test_a_generator_takes_as_long_in_each_of_two_stages_as_in_one():
    model, cluster = model_preset("electra-base-discriminator"), Cluster.parse("h100:8")
    rates = Rates.of(cluster.accelerator)

    def generator_s(mesh: str) -> float:
        config = Config(model=model).with_values(
            {"data.global_batch": 64, "data.seq_len": 512, "precision.compute": "bf16"}
        )
        plan = plan_for(config, AxisSizes.parse(mesh), cluster.topology())
        return term_times(Workload.of(config), plan, cluster, rates)["generator"]

    assert generator_s("pipe=2,data=4") > 1.5 * generator_s("data=8")


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param("kv_heads=none", marks=pytest.mark.nightly),
        "heads=none",
        pytest.param("mlp=none", marks=pytest.mark.nightly),
    ],
)
def test_a_rule_that_keeps_parts_whole_changes_nothing(rules):
    """One head of two is split over tensor unless a rule says otherwise."""
    model = replace(
        model_preset("electra-nano"),
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        mlp_dim=48,
        max_length=SEQ_LEN,
        generator=Generator(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32),
    )
    found = []
    for own in ((), (rules,)):
        program = program_for(model, AxisSizes(data=2, tensor=2), rules=own)
        state = state_of(program, jax.device_get(program.shapes.initial(jnp.int32(3))))
        given = put_batch(rows(), program.batch_sharding, GLOBAL_BATCH)
        found.append(jax.device_get(run(program.train_step, state, given)[0].opt_state[0].mu))
    off = differences(*found)
    assert {leaf: value for leaf, value in off.items() if not value < GRADIENT_RTOL} == {}


def test_a_width_of_the_generator_that_fsdp_does_not_divide_is_refused():
    model = joint(
        "as wide as its table",
        config_from_huggingface(reference("as wide as its table").model.config),
    )
    model = replace(model, generator=Generator(embed_dim=18, num_heads=1))
    with pytest.raises(PlanError, match=r"model\.generator\.embed_dim=18 over fsdp=4"):
        program_for(model, AxisSizes(fsdp=4))
