"""Adapters compute what PEFT's compute, are merged exactly, and go to PEFT's format and back.

PEFT's models are made in memory from a config, with random weights; nothing is downloaded.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, relative_error
from plans import FAMILY_MODELS, GPT, LLAMA

from optimus_jax.config import Features, ModelConfig, Tuning
from optimus_jax.config.axes import FSDP
from optimus_jax.errors import CheckpointError, ConfigError, OptimusError
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.leaf import trained_of
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface
from optimus_jax.models.layer_program import layer_programs
from optimus_jax.models.merging import merged, same_adapters
from optimus_jax.models.peft_format import to_peft
from optimus_jax.models.peft_reading import from_peft
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.weights.peft_directory import read_peft, write_peft

TOKENS = np.random.Generator(np.random.PCG64(3)).integers(0, 97, (2, 12), dtype=np.int32)
RUN = ForwardContext(comm=Collectives(jnp.dtype(jnp.float32)))
GRADIENT_RTOL = 1e-4
"""Of the largest entry of a leaf, as for the gradients of Hugging Face's models."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
THEIRS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "phi3": SIZES | {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {
        "vocab_size": 97,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}
TUNINGS = {
    "lora": Tuning(method="lora", rank=3, alpha=5.0),
    "rslora of some": Tuning(
        method="lora", rank=2, rank_scaling="sqrt_rank", targets=("value", "mlp")
    ),
    "ia3": Tuning(method="ia3"),
}


def loss_of(model: ModelConfig, params: Params) -> jax.Array:
    """Mean cross-entropy of the next tokens."""
    decoder = model_shapes(model, model.vocab_size).module(params, RUN.comm)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    logits = decoder.logits(decoder.hidden(jnp.asarray(TOKENS), positions, RUN), RUN)
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(TOKENS)[:, 1:, None], -1
    )
    return -chosen.mean()


def random_params(model: ModelConfig) -> Params:
    """Parameters in which no product of adapters is zero."""
    shapes = model_shapes(model, model.vocab_size)
    keys = iter(jax.random.split(jax.random.key(5), 99))
    return jax.tree.map(
        lambda like, leaf: (
            like.astype(jnp.float32) + 0.2 * jax.random.normal(next(keys), like.shape)
        ).astype(leaf.dtype),
        shapes.initial(jnp.int32(1)),
        shapes.params,
    )


@cache
def reference(family: str) -> tuple[Any, ModelConfig, Params]:
    """Hugging Face's model, its config here, and its parameters."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft", reason="the reference: pip install optimus-jax[huggingface]")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **THEIRS[family])
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model = config_from_huggingface(config.to_dict())
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    return theirs, model, from_huggingface(state, model, model.vocab_size)


@pytest.mark.parametrize("method", TUNINGS)
@pytest.mark.parametrize("family", THEIRS)
def test_gradients_and_files_are_those_of_peft(family, method, tmp_path):
    """PEFT loads our files and computes the same loss and gradients, and we read its files."""
    import copy

    import peft
    import torch

    theirs, model, base = reference(family)
    model = replace(model, tuning=TUNINGS[method])
    shapes = model_shapes(model, model.vocab_size)
    ours = with_adapters(base, random_params(model), shapes)
    config, tensors = to_peft(jax.tree.map(np.asarray, ours), model)
    write_peft(tmp_path / "ours", config, tensors)

    tuned = peft.PeftModel.from_pretrained(
        copy.deepcopy(theirs), str(tmp_path / "ours"), is_trainable=True
    )
    tokens = torch.tensor(TOKENS).long()
    loss = tuned(input_ids=tokens, labels=tokens).loss
    loss.backward()
    trained = trained_of(shapes.leaves, ours)
    value, gradients = jax.value_and_grad(lambda each: loss_of(model, {**ours, **each}))(
        {LAYERS: ours[LAYERS]}
    )
    assert loss.item() == pytest.approx(float(value), rel=1e-5)
    assert float(value) != pytest.approx(float(loss_of(model.base, base)), rel=1e-4)
    expected = {
        name.replace(".default", ""): each.grad.numpy()
        for name, each in tuned.named_parameters()
        if each.grad is not None
    }
    # A gradient is no adapter, but has the same shape. That of a matrix B with blocks has further
    # elements, which PEFT would train.
    _, found = to_peft(
        jax.tree.map(np.asarray, trained_of(shapes.leaves, {**ours, **gradients})), model
    )
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        theirs_at = np.where(tensors[name] != 0, expected[name], 0)
        if method == "ia3":
            theirs_at = np.where(gradient == 1, 1, expected[name])  # of queries, in a fused matrix
        assert relative_error(gradient, theirs_at) < GRADIENT_RTOL, name
    assert len(jax.tree.leaves(trained)) == len(
        jax.tree.leaves(from_theirs(tuned, model, tmp_path))
    )

    merged_theirs = tuned.merge_and_unload()
    with torch.no_grad():
        plain = merged_theirs(input_ids=tokens, labels=tokens).loss
    whole = merged(ours, shapes)
    assert float(plain) == pytest.approx(float(loss_of(model.base, whole)), rel=1e-5)


def from_theirs(tuned: Any, model: ModelConfig, tmp_path) -> Params:
    """What we read of the files that PEFT writes; checked to be what it was given."""
    tuned.save_pretrained(str(tmp_path / "theirs"))
    tuning, params = from_peft(*read_peft(tmp_path / "theirs"), model.base)
    assert same_adapters(replace(model, tuning=tuning), model)
    given = from_peft(*read_peft(tmp_path / "ours"), model.base)[1]
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(one, other)
    return params


def with_adapters(base: Params, tuned: Params, shapes: Any) -> Params:
    """`base` with the adapters among other parameters."""
    found = dict(jax.tree.leaves_with_path(base))
    return jax.tree.map_with_path(
        lambda path, leaf, new: jnp.asarray(new if leaf.group == "adapter" else found[path]),
        shapes.leaves,
        tuned,
    )


@pytest.mark.parametrize(
    ("name", "method"),
    [("gpt", "ia3"), ("llama", "ia3"), ("llama", "rslora of some"), ("gptj", "lora")],
)
def test_merged_adapters_compute_the_same(name, method):
    model = {"gpt": GPT, "llama": LLAMA, **FAMILY_MODELS}[name]
    if name == "llama":
        model = replace(model, features=Features(biases=("query", "key", "value", "up")))
    model = replace(model, dropout=0.0, num_layers=2, tuning=TUNINGS[method])
    params = random_params(model)
    whole = merged(params, model_shapes(model, model.vocab_size))
    shapes = model_shapes(model.base, model.vocab_size).params
    assert jax.tree.map(lambda leaf: leaf.shape, whole) == jax.tree.map(
        lambda leaf: leaf.shape, shapes
    )
    found, expected = float(loss_of(model.base, whole)), float(loss_of(model, params))
    assert found == pytest.approx(expected, rel=F32_RELATIVE)
    ignored = {**params, LAYERS: {name: {**part} for name, part in params[LAYERS].items()}}
    for block in ("attention", "mlp"):
        ignored[LAYERS][block] = {
            name: leaf
            for name, leaf in ignored[LAYERS][block].items()
            if not name.endswith("_adapter")
        }
    assert float(loss_of(model.base, ignored)) != pytest.approx(expected, rel=1e-4)


def test_new_adapters_change_nothing():
    for method in ("lora", "ia3"):
        model = replace(LLAMA, dropout=0.0, num_layers=1, tuning=TUNINGS[method])
        tuned = model_shapes(model, model.vocab_size).initial(jnp.int32(3))
        base = model_shapes(model.base, model.vocab_size).initial(jnp.int32(3))
        assert float(loss_of(model, tuned)) == float(loss_of(model.base, base))


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_adapters_have_no_collective_of_their_own_over_tensor(method):
    """Gradients of leaves that devices use on different values are summed once for a step."""

    def over_tensor(model: ModelConfig) -> list[tuple]:
        programs = layer_programs(
            model, seq_len=16, precision="f32", kernel="xla", splits_alike=False
        )
        program = programs.under("none")
        found = (*program.forward.collectives, *program.backward.collectives)
        return sorted((each.kind, each.over) for each in found if each.over != (FSDP,))

    model = replace(LLAMA, dropout=0.0)
    expected = over_tensor(model)
    assert expected
    assert over_tensor(replace(model, tuning=TUNINGS[method])) == expected


GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type"),
        (GOOD | {"use_dora": True}, "use_dora"),
        (GOOD | {"bias": "all"}, "bias"),
        (GOOD | {"init_lora_weights": "pissa"}, "init_lora_weights"),
        (GOOD | {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (GOOD | {"r": None}, "r=None"),
        (GOOD | {"lora_alpha": None}, "lora_alpha=None"),
        (GOOD | {"lora_dropout": None}, "lora_dropout=None"),
        (GOOD | {"use_rslora": "false"}, "use_rslora='false'"),
        (GOOD | {"rank_pattern": {"q_proj": 2.5}}, "rank_pattern"),
        (GOOD | {"rank_pattern": {".*_proj": 4}}, "rank_pattern"),
        (GOOD | {"target_modules": [1]}, "target_modules"),
        (GOOD | {"target_modules": ["q_proj", "lm_head"]}, r"(?s)the head.*lm_head.*merge"),
        (GOOD | {"target_modules": ["model.embed_tokens"]}, r"(?s)the embedding.*embed_tokens"),
    ],
)
def test_what_cannot_be_read_is_named(config, wrong):
    with pytest.raises(ConfigError, match=wrong):
        from_peft(config, {}, LLAMA)


def test_tensors_of_another_model_are_refused():
    model = replace(FAMILY_MODELS["qwen2"], tuning=Tuning(method="lora", rank=2))
    params = jax.tree.map(np.asarray, random_params(model))
    config, tensors = to_peft(params, model)
    tuning, _ = from_peft(config, tensors, model.base)
    assert same_adapters(replace(model, tuning=tuning), model)
    name = next(iter(tensors))
    with pytest.raises(CheckpointError, match="other tensors"):
        from_peft(config, {**tensors, "base_model.model.other.lora_A.weight": tensors[name]}, model)
    with pytest.raises(CheckpointError, match="does not fit"):
        from_peft(config, {**tensors, name: tensors[name][:, 1:]}, model)
    with pytest.raises(CheckpointError, match="does not fit"):
        from_peft(config, {key: each for key, each in tensors.items() if key != name}, model)
    with pytest.raises(ConfigError, match="no adapters"):
        to_peft(params, model.base)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"r": 4}, "(?s)another rank.*q_proj have rank 2.*says 4"),
        ({"rank_pattern": {"layers.1.mlp.up_proj": 4}}, r"(?s)layers\.1\.mlp\.up_proj.*says 4"),
        ({"alpha_pattern": {"q_proj": 3}}, "one factor for all modules"),
        ({"target_modules": ["self_attn.q_proj"]}, r"(?s)with tensors, and not named.*up_proj"),
        (
            {"target_modules": ["q_proj", "up_proj", "o_proj"]},
            r"(?s)without tensors: .*layers\.0\.self_attn\.o_proj",
        ),
        ({"exclude_modules": ["up_proj"]}, r"(?s)with tensors, and not named.*up_proj"),
        ({"target_modules": "all-linear"}, "(?s)without tensors: .*o_proj and 5 more"),
    ],
    ids=str,
)
def test_a_config_that_contradicts_its_tensors_is_refused(changes, wrong):
    tuning = Tuning(method="lora", rank=2, targets=("query", "up"))
    model = replace(FAMILY_MODELS["qwen2"], tuning=tuning)
    config, tensors = to_peft(jax.tree.map(np.asarray, random_params(model)), model)
    with pytest.raises(OptimusError, match=wrong):
        from_peft(config | changes, tensors, model.base)
    # The same in other words, or in words that are not evaluated.
    named = ["q_proj", "up_proj"]
    for alike in (
        {"target_modules": named},
        {"target_modules": r".*\.(q|up)_proj"},
        {"target_modules": None},
        {"target_modules": [*named, "down_proj"], "exclude_modules": ["mlp.down_proj"]},
        {"r": 4, "rank_pattern": dict.fromkeys(named, 2)},
        {"lora_alpha": 1, "alpha_pattern": dict.fromkeys(named, tuning.alpha)},
    ):
        found, _ = from_peft(config | alike, tensors, model.base)
        assert same_adapters(replace(model, tuning=found), model), alike


@pytest.mark.parametrize(
    "name", ["lm_head.lora_A.weight", "model.embed_tokens.lora_embedding_A", "lm_head.weight"]
)
def test_adapters_and_values_of_the_embedding_and_the_head_are_refused(name):
    model = replace(FAMILY_MODELS["qwen2"], tuning=Tuning(method="lora", rank=2))
    config, tensors = to_peft(jax.tree.map(np.asarray, random_params(model)), model)
    tensors[f"base_model.model.{name}"] = np.zeros((2, 2), np.float32)
    with pytest.raises(ConfigError, match=r"(?s)not the embedding or the head.*in the file.*merge"):
        from_peft(config, tensors, model.base)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_adapters_that_are_not_finite_are_refused(value):
    model = replace(LLAMA, tuning=Tuning(method="lora", rank=2))
    config, tensors = to_peft(jax.tree.map(np.asarray, random_params(model)), model)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 1] = value
    with pytest.raises(CheckpointError, match=rf"(?s)not finite.*{name[:-7]}"):
        from_peft(config, tensors, model.base)


def test_factors_of_results_are_not_read_as_factors_of_inputs():
    """Of a square matrix, only the shape [out, 1] or [1, in] tells them apart."""
    model = replace(LLAMA, mlp_dim=LLAMA.embed_dim, tuning=TUNINGS["ia3"])
    config, tensors = to_peft(jax.tree.map(np.asarray, random_params(model)), model)
    from_peft(config, tensors, model.base)
    turned = {name: each.T if "down" in name else each for name, each in tensors.items()}
    with pytest.raises(CheckpointError, match="does not fit"):
        from_peft(config, turned, model.base)
