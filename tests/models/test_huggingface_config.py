"""The config.json that we write makes the same model in transformers, and here when it is read."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_models import ENCODERS, MODELS, libraries, model_of

from optimus_jax.config import Features, ModelConfig, RopeScaling, Tuning
from optimus_jax.config.presets import PRESETS, model_preset
from optimus_jax.config.request import make_config
from optimus_jax.errors import ConfigError
from optimus_jax.models.families import FAMILIES
from optimus_jax.models.huggingface import config_from_huggingface
from optimus_jax.models.huggingface_config import config_to_huggingface

NANO = model_preset("llama-nano")
SCALED = RopeScaling(kind="linear", factor=4.0)
SMALL = dataclasses.replace(NANO, num_layers=4, embed_dim=48, num_heads=4, head_dim=16, mlp_dim=20)
VARIANTS = {
    "llama": {"features": Features(biases=("query", "key", "value", "out"))},
    "gpt_neo": {
        "num_kv_heads": 4,
        "head_dim": 12,
        "features": Features(window=5, layer_types=("window", "window", "full", "full")),
    },
    "mistral": {"num_heads": 10, "features": Features(window=7)},
    "qwen2": {"features": Features(window=6, layer_types=("full", "full", "window", "window"))},
    "qwen3": {"rope_scaling": SCALED, "features": Features(window=6, layer_types=("window",))},
    "olmo2": {"rope_scaling": RopeScaling(factor=8.0, original_length=32)},
    "phi3": {"features": Features(rope_dims=10, window=9)},
    "opt": {
        "num_kv_heads": 4,
        "head_dim": 12,
        "features": Features(biases=(), final_norm=False, activation="gelu"),
    },
    "gptj": {"num_kv_heads": 4, "head_dim": 12, "tied": False, "features": Features(rope_dims=6)},
    "gemma2": {"features": Features(attention_scale=0.1, window=5, attention_softcap=7.0)},
    "gemma3_text": {
        "rope_scaling": SCALED,
        "features": Features(window=5, layer_types=("window", "full"), window_rope_theta=77.0),
    },
}
"""Values by family that differ from what its class has by default."""


def written(config: ModelConfig) -> dict:
    """What a reader of the file finds."""
    return json.loads(json.dumps(config_to_huggingface(config)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_round_trip(name: str):
    config = dataclasses.replace(model_preset(name), generator=None)
    again = config_from_huggingface(written(dataclasses.replace(config, dropout=0.1)))
    assert again == dataclasses.replace(config, name="custom")
    assert written(again) == written(config)


@pytest.mark.parametrize("family", VARIANTS)
def test_the_config_makes_the_same_model_in_transformers(family: str):
    """All keys that we read are read by transformers, and with the same meaning: its own config,
    made from ours, says what ours says.
    """
    _, transformers = libraries()
    config = dataclasses.replace(SMALL, family=family, **VARIANTS[family])
    theirs = transformers.AutoConfig.for_model(**written(config)).to_dict()
    assert theirs["model_type"] == family
    assert written(config_from_huggingface(theirs)) == written(config)


OF_4 = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Keys of rotary positions that transformers 4 reads; 5 reads `rope_parameters`."""


@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("unread", [OF_4, ("rope_parameters",)], ids=["5", "4"])
def test_rotary_positions_are_there_for_transformers_4_and_5(family: str, unread: tuple[str, ...]):
    change = {"rope_theta": 5000.0} if FAMILIES[family].norm != "layer" else {}
    config = dataclasses.replace(SMALL, family=family, **(VARIANTS[family] | change))
    keys = {name: value for name, value in written(config).items() if name not in unread}
    assert written(config_from_huggingface(keys)) == written(config)


@pytest.mark.parametrize("family", MODELS)
def test_logits_in_transformers_are_equal(family: str):
    torch, transformers = libraries()
    theirs = model_of(family)
    config = config_from_huggingface(theirs.config.to_dict())
    auto = "AutoModelForMaskedLM" if family in ENCODERS else "AutoModelForCausalLM"
    ours = getattr(transformers, auto).from_config(
        transformers.AutoConfig.for_model(**written(config))
    )
    assert type(ours).__name__ == config_to_huggingface(config)["architectures"][0]
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.arange(12).reshape(2, 6) * 3
    with torch.no_grad():
        found, expected = (model.eval()(tokens).logits for model in (ours, theirs))
    assert torch.equal(found, expected)


def test_another_familys_class_is_used_if_it_has_the_features():
    llama = dataclasses.replace(SMALL, name="custom")
    normed = dataclasses.replace(llama, features=Features(qk_norm="head"))
    assert written(normed)["model_type"] == "qwen3"
    assert written(dataclasses.replace(llama, num_heads=10))["model_type"] == "mistral"
    assert written(llama)["model_type"] == "llama"


def test_berts_of_the_recipe_of_megatron_are_those_of_transformers():
    config = make_config("bert-nano", {"recipe": "megatron-bert", "seq_len": 64})
    assert config_to_huggingface(config.model)["architectures"] == ["MegatronBertForMaskedLM"]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"features": Features(norm="layer")}, "features.norm is layer, and rms in its"),
        ("llama", {"features": Features(activation="relu", qk_norm="head")}, "activation is relu"),
        ("gpt2", {"features": Features(positions="rotary")}, "features.positions is rotary"),
        ("gpt2", {"num_kv_heads": 2}, "num_kv_heads is 2, and 4"),
        ("gptj", {"rope_theta": 5.0, "tied": False}, r"rope_theta is 5.0, and 10000.0"),
        ("opt", {"norm_epsilon": 1e-6}, r"norm_epsilon is 1e-06, and 1e-05"),
        ("gemma2", {"features": Features(attention_scale=0.3)}, r"attention_scale is 0.3, and"),
        ("phi3", {"rope_scaling": SCALED, "features": Features(rope_dims=8)}, "rope_scaling is"),
        ("gemma2", {"embed_dim": 50}, "embed_dim=50, no multiple of num_heads=4"),
        ("gemma2", {"features": Features(biases=("up", "down"))}, "features.biases is"),
    ],
)
def test_a_model_that_transformers_has_not_is_an_error(family: str, change: dict, message: str):
    own = {"num_kv_heads": 4, "head_dim": 12} if FAMILIES[family].norm == "layer" else {}
    config = dataclasses.replace(SMALL, family=family, **(own | change))
    with pytest.raises(ConfigError, match=f"(?s)no class of transformers.*{message}"):
        config_to_huggingface(config)


def test_a_family_of_ones_own_is_compared_with_the_nearest(monkeypatch: pytest.MonkeyPatch):
    made_up = dataclasses.replace(FAMILIES["llama"], window=3)
    monkeypatch.setitem(FAMILIES, "made_up", made_up)
    config = dataclasses.replace(SMALL, family="made_up")
    assert written(config)["model_type"] == "mistral"
    monkeypatch.setitem(FAMILIES, "made_up", dataclasses.replace(made_up, gated=False))
    with pytest.raises(
        ConfigError, match=r"features.gated is False, and True in its class for mis"
    ):
        config_to_huggingface(dataclasses.replace(config, mlp_dim=21))


@given(
    st.sampled_from(["llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "olmo2"]),
    st.integers(1, 200),
    st.data(),
)
def test_rotated_dims_and_scales_survive(family: str, half: int, data: st.DataObject):
    """Numbers that are written as a root or a share of others."""
    features = Features()
    if family == "phi3":
        features = Features(rope_dims=2 * data.draw(st.integers(1, half)))
    if family.startswith("gemma"):
        features = Features(attention_scale=data.draw(st.integers(1, 10_000)) ** -0.5)
    config = dataclasses.replace(SMALL, family=family, head_dim=2 * half, features=features)
    again = config_from_huggingface(written(config))
    assert (again.features.rope_dims or 2 * half) == (features.rope_dims or 2 * half)
    if family.startswith("gemma"):
        assert again.features.attention_scale == features.attention_scale


def test_adapters_are_no_part_of_it():
    """They are merged in an export, which export.every checks at the beginning of a run."""
    tuned = dataclasses.replace(NANO, tuning=Tuning(method="lora", base_precision="bf16"))
    assert written(tuned) == written(NANO)


def test_a_quantised_model_is_refused_with_what_to_begin_with():
    codes = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ConfigError, match=r"(?s)is quantised.*load_in_4bit.*base_precision=nf4"):
        config_from_huggingface({"model_type": "llama", "quantization_config": codes})
