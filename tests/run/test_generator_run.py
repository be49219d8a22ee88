"""A run with a generator: exported in two parts, a beginning for a classifier, and resumed."""

import json
import shutil

import numpy as np
import pytest
from helpers import F32_RELATIVE
from published_models import libraries

import optimus_jax
from optimus_jax.checkpoint.slices import StoredCheckpoint
from optimus_jax.errors import CheckpointError
from optimus_jax.run.export import export

SIZES = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "model.max_length": 32,
    "model.generator.num_layers": 1,
    "model.generator.embed_dim": 16,
    "model.generator.num_heads": 2,
    "model.generator.mlp_dim": 32,
}
TINY = {
    "global_batch": 8,
    "seq_len": 32,
    "steps": 2,
    "eval_every": 0,
    "progress": "none",
    "control": "off",
    "data.eval_fraction": 0.0,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A file of texts with labels."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(300):
            text = "".join(rng.choice(list("abcd"), 8))
            file.write(json.dumps({"text": text, "label": str(text < "b")}) + "\n")
    return path


@pytest.fixture(scope="module")
def joint(texts):
    """A run of two steps, in stages."""
    return optimus_jax.train(
        "electra-nano",
        data=str(texts),
        mesh="pipe=2,data=2,tensor=2",
        run_dir=texts.parent / "joint",
        **SIZES,
        **TINY,
    ).run_dir


def test_both_parts_are_exported_and_read_by_transformers(joint, tmp_path):
    _, transformers = libraries()
    stored = StoredCheckpoint.at(joint / "checkpoints" / "2").leaves
    for to, generator, auto in (
        ("model", False, transformers.ElectraForPreTraining),
        ("generator", True, transformers.ElectraForMaskedLM),
    ):
        export(joint, tmp_path / to, generator=generator)
        model, told = auto.from_pretrained(tmp_path / to, output_loading_info=True)
        assert {*told["missing_keys"], *told["unexpected_keys"]} == set()
        ours = stored["params/generator/stack/mlp/up" if generator else "params/layers/mlp/up"]
        theirs = model.electra.encoder.layer[0].intermediate.dense.weight.detach().numpy()
        found = ours.read(tuple(slice(0, size) for size in ours.shape))[0]
        np.testing.assert_array_equal(found.reshape(theirs.T.shape), theirs.T)


def test_a_classifier_begins_with_a_run_that_has_a_generator(joint, texts, tmp_path):
    outcome = optimus_jax.train(
        init_from=joint,
        task="classification",
        data=str(texts),
        mesh="data=8",
        run_dir=tmp_path / "classifier",
        **TINY,
    )
    assert outcome.reason == "done"
    config = json.loads((tmp_path / "classifier" / "config.json").read_text())["model"]
    assert (config["generator"], config["labels"]) == (None, ["False", "True"])


def test_a_run_of_both_does_not_begin_without_a_generator(joint, texts, tmp_path):
    with pytest.raises(CheckpointError, match="have no generator, or another one"):
        optimus_jax.train(
            "electra-nano", init_from=joint, data=str(texts), run_dir=tmp_path / "other", **TINY
        )


@pytest.mark.parametrize(
    "name", ["electra-nano", pytest.param("bert-nano", marks=pytest.mark.nightly)]
)
def test_a_resumed_run_on_another_mesh_masks_the_same_tokens(name, texts, tmp_path):
    sizes = {key: size for key, size in SIZES.items() if "generator" not in key or "elec" in name}
    options = TINY | sizes | {"data": str(texts), "model.dropout": 0.1, "checkpoint_every": 2}
    options |= {"steps": 4}
    whole = optimus_jax.train(name, mesh="data=8", run_dir=tmp_path / "whole", **options)
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "parts")
    shutil.rmtree(run_dir / "checkpoints" / "4")  # as if killed before it was saved
    parts = optimus_jax.train(run_dir=run_dir, resume=True, mesh="pipe=2,fsdp=2,tensor=2")
    is_resumed = [record.plan == parts.plan.digest for record in parts.history]
    assert is_resumed == [False, False, True, True]
    losses = [record.loss for record in whole.history]
    assert [record.loss for record in parts.history] == pytest.approx(losses, rel=F32_RELATIVE)
