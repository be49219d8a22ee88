"""A checkpoint can be used only under a config that computes the same as the config it was saved
under.
"""

import dataclasses
import json

import pytest

from optimus_jax.config import Config
from optimus_jax.config.presets import model_preset
from optimus_jax.config.settings import setting_names
from optimus_jax.errors import CheckpointError
from optimus_jax.run.stored_config import (
    check_stored_config,
    describe_changes,
    differing_models,
    saved_config,
)

SAVED = Config(model=model_preset("llama3.2-1b"))
METADATA = {"config": SAVED.to_json(derived={"optimizer.lr": 3e-4, "precision.compute": "bf16"})}
OTHER = {
    "model.norm_epsilon": 0.5,
    "model.rope_theta": 1e4,
    "model.tied": False,
    "model.init_std": 0.5,
    "model.dropout": 0.1,
    "model.family": "gpt2",
    "model.rope_scaling.factor": 4.0,
    "model.rope_scaling": None,
    "model.num_layers": 3,
    "model.features.window": 128,
    "model.labels": ("a", "b"),
    "model.labelled": "token",
    "model.tuning.rank": 4,
    "data.global_batch": 8,
    "data.respect_documents": False,
    "data.eval_fraction": 0.5,
    "data.phases": "100:32",
    "seed": 5,
}


@pytest.mark.parametrize("name", OTHER)
def test_changes_of_model_data_or_seed_are_refused(name):
    parts = 3 if name.startswith(("model.features.", "model.tuning.")) else 2
    section = ".".join(name.split(".")[:parts])
    with pytest.raises(CheckpointError, match=f"saved with {section}="):
        check_stored_config(METADATA, SAVED.with_values({name: OTHER[name]}))


def test_every_model_field_except_the_name_is_compared():
    fields = {field.name for field in dataclasses.fields(SAVED.model)}
    assert fields - {name.split(".")[1] for name in OTHER if name.startswith("model.")} == {
        "name",
        "vocab_size",
        "embed_dim",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "mlp_dim",
        "max_length",
        "image_size",
        "encoder_layers",
        "frames",
        "mel_bins",
        "patch_size",
        "num_channels",
        "pixel_mean",
        "pixel_std",
        "resize",
        "keep_aspect",
        "resample",
        "generator",
    }, "sizes, and these for images, are compared as num_layers is"


def test_weights_do_not_depend_on_how_images_are_scaled():
    saved = model_preset("vit-nano")
    scaling = {"resize": saved.image_size + 4, "keep_aspect": True, "resample": "bicubic"}
    assert not differing_models(saved, dataclasses.replace(saved, **scaling))
    other = dataclasses.replace(saved, pixel_mean=(0.25,) * saved.num_channels)
    assert [*differing_models(saved, other)] == ["model.pixel_mean"]


def test_another_generator_is_refused():
    saved = Config(model=model_preset("electra-nano"))
    other = saved.with_values({"model.generator.num_layers": 3})
    with pytest.raises(CheckpointError, match=r"saved with model\.generator="):
        check_stored_config({"config": saved.to_json()}, other)


def test_names_and_paths_may_differ():
    check_stored_config(
        METADATA,
        SAVED.with_values(
            {
                "model.name": "mine",
                "data.sources": "/moved/a.txt",
                "data.tokenizer": "/moved/tokenizer.json",
                "steps": 7,
                "log.every": 3,
            }
        ),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer.beta2", 0.9), ("optimizer.lr", 0.1), ("precision.compute", "f16")],
)
def test_allowed_changes_are_described(name, value):
    check_stored_config(METADATA, now := SAVED.with_values({name: value}))
    description = describe_changes(saved_config(METADATA), now)
    assert description is not None
    assert f"{name} from" in description
    assert describe_changes(saved_config(METADATA), SAVED) is None


@pytest.mark.parametrize("section", ["optimizer", "precision", "evaluation"])
def test_every_field_that_may_change_is_described(section):
    other = {"schedule": "wsd", "compute": "f16", "moments": "bf16"}
    fractions = {"beta1", "beta2", "min_lr_ratio", "decay_fraction", "layer_lr_decay"}
    for name in setting_names(Config):
        # These are fixed for a run, or known by their content.
        if not name.startswith(f"{section}.") or name in ("optimizer.name", "evaluation.data"):
            continue
        leaf = name.rpartition(".")[2]
        value = other.get(leaf, 0.5 if leaf in fractions else 7)
        description = describe_changes(saved_config(METADATA), SAVED.with_values({name: value}))
        assert f"{name} from" in (description or ""), name


def test_the_precision_of_a_checkpoint_is_that_of_its_plan():
    """As in a run resumed in f32 by an older version, although config.json had been edited
    to bf16.
    """
    metadata = METADATA | {"plan": json.dumps({"precision": "f32"})}
    assert saved_config(metadata).precision.compute == "f32"


def test_data_may_differ_if_allow_change_is_set():
    descriptions = []
    for change in ({"data.eval_fraction": 0.5}, {"data.global_batch": 8}):
        check_stored_config(
            METADATA, now := SAVED.with_values(change | {"data.allow_change": True})
        )
        descriptions.append(describe_changes(saved_config(METADATA), now) or "")
    assert "data.eval_fraction" in descriptions[0]
    assert descriptions[0].endswith("cannot be compared")
    assert "data.global_batch" in descriptions[1]
    assert "compared" not in descriptions[1]
    with pytest.raises(CheckpointError):
        check_stored_config(METADATA, SAVED.with_values({"seed": 5, "data.allow_change": True}))


def test_settings_missing_in_an_old_checkpoint_have_their_defaults():
    values = json.loads(METADATA["config"])
    del (
        values["model"]["dropout"],
        values["optimizer"]["max_skipped_steps"],
        values["data"]["phases"],
        values["controller"],
    )
    check_stored_config({"config": json.dumps(values)}, SAVED)
    check_stored_config({"config": json.dumps(values | {"of another version": {}})}, SAVED)


def test_generation_compares_only_the_model():
    check_stored_config(
        METADATA, SAVED.with_values({"seed": 5, "data.global_batch": 8}), sections=("model.",)
    )
    with pytest.raises(CheckpointError, match="another model"):
        check_stored_config(
            METADATA, SAVED.with_values({"model.norm_epsilon": 0.5}), sections=("model.",)
        )
