"""Runs with labels: from masked tokens to a classifier that transformers loads."""

import json
import shutil

import jax
import numpy as np
import pytest
from published_models import MODELS, libraries
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.config import Config
from optimus_jax.errors import CheckpointError, ConfigError

SIZES = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "model.max_length": 32,
}
TINY = {
    "global_batch": 8,
    "seq_len": 32,
    "lr": 1e-2,
    "eval_every": 0,
    "progress": "none",
    "control": "off",
    "data.eval_fraction": 0.0,
}
LABELS = ("first", "other")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts and labels: whether the text begins with an a."""
    folder = tmp_path_factory.mktemp("labels")
    rng = np.random.default_rng(0)
    with (folder / "texts.jsonl").open("w") as file:
        for _ in range(300):
            text = "".join(rng.choice(list("abcd"), 8))
            label = "first" if text[0] == "a" else "other"
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    return folder


@pytest.fixture(scope="module")
def masked(folder):
    """A run that has learnt masked bytes."""
    return optimus_jax.train(
        "bert-nano",
        data=str(folder / "texts.jsonl"),
        mesh="data=8",
        steps=2,
        run_dir=folder / "masked",
        **SIZES,
        **TINY,
    )


def classifier(folder, name, *args, **more):
    options = {"data": str(folder / "texts.jsonl"), "mesh": "data=8", "task": "classification"}
    return optimus_jax.train(*args, **{**options, **TINY, "run_dir": folder / name, **more})


def params_of(result):
    return result.state.params


def test_a_classifier_begins_with_the_body_of_a_masked_model(folder, masked, capsys):
    begin = {"init_from": str(folder / "masked"), "steps": 1, "lr": 1e-12, "progress": "plain"}
    run = classifier(folder, "begun", **begin)
    shown = "".join(capsys.readouterr())
    assert "the head, which it does not have, begins anew" in shown
    assert "classification: 2 labels of a sequence: first, other" in shown
    config = Config.from_json((folder / "begun" / "config.json").read_text())
    assert (config.model.labels, config.model.labelled) == (LABELS, "sequence")
    ours, theirs = params_of(run), params_of(masked)
    for part in ("embedding", "positions", "token_types", "embedding_norm"):
        np.testing.assert_allclose(
            np.asarray(jax.tree.leaves(ours[part])[0]),
            np.asarray(jax.tree.leaves(theirs[part])[0]),
            atol=1e-9,
        )
    assert "label_table" in ours
    assert "transform_norm" not in ours


def test_a_resumed_classifier_equals_an_uninterrupted_one_on_another_mesh(folder):
    whole = classifier(folder, "whole", "bert-nano", steps=6, checkpoint_every=3, **SIZES)
    run_dir = shutil.copytree(whole.run_dir, folder / "parts")
    shutil.rmtree(run_dir / "checkpoints" / "6")  # as if killed before it was saved
    parts = classifier(folder, "parts", resume=True, mesh="data=2,fsdp=2,tensor=2")
    is_resumed = [record.plan == parts.plan.digest for record in parts.history]
    assert is_resumed == [False, False, False, True, True, True]
    losses = [[record.loss for record in run.history] for run in (whole, parts)]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)


def test_repeating_the_first_command_resumes(folder):
    for steps in (2, 3):
        classifier(folder, "auto", "bert-nano", steps=steps, resume="auto", **SIZES)


def test_a_classifier_is_exported_and_read_by_transformers(folder):
    torch, transformers = libraries()
    run = classifier(folder, "learnt", "bert-nano", steps=60, **SIZES)
    assert run.history[-1].metrics["accuracy"] > 0.9
    optimus_jax.export(folder / "learnt", folder / "exported")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "exported")
    assert model.config.id2label == dict(enumerate(LABELS))
    for text, label in (("abcd", 0), ("bacd", 1)):
        ids = torch.tensor([[256, *text.encode(), *b"cbda", 256]])
        assert int(model.eval()(ids).logits.argmax()) == label
    card = (folder / "exported" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "with the id 256 before and after each text" in card
    assert "| labels seen |" in card
    assert not (folder / "exported" / "generation_config.json").exists()
    again = classifier(
        folder, "again", init_from=str(folder / "exported"), steps=1, lr=1e-12, tokenizer="bytes"
    )
    assert again.history[0].metrics["accuracy"] > 0.9


def test_other_labels_than_those_of_the_model_are_refused(folder, masked):
    with pytest.raises((CheckpointError, ConfigError), match="label"):
        classifier(folder, "no", "gpt2-nano", task="next_token", **{"model.labels": "a,b"}, **SIZES)


@pytest.mark.parametrize(
    ("auto", "family", "anew"),
    [
        ("AutoModelForPreTraining", "bert", "head_bias, label_table"),
        ("AutoModel", "bert", "head_bias, label_table"),
        ("AutoModelForPreTraining", "electra", "head_bias, label_table, table_out, transform_bias"),
        ("AutoModelForCausalLM", "gpt2", "label_table"),
    ],
)
def test_a_classifier_begins_with_a_published_body(folder, tmp_path, capsys, auto, family, anew):
    torch, transformers = libraries()
    sizes = MODELS[family] | {"vocab_size": 258}
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    published = getattr(transformers, auto).from_config(config)
    for weight in published.parameters():
        weight.data = torch.randn_like(weight)
    published.save_pretrained(tmp_path / "published")
    run = classifier(
        folder,
        tmp_path / "run",
        init_from=str(tmp_path / "published"),
        tokenizer="bytes",
        steps=1,
        **{**TINY, "lr": 1e-12, "seq_len": 16, "progress": "plain"},
    )
    assert f"does not have begin anew: {anew}\n" in "".join(capsys.readouterr())
    state, params = published.state_dict(), params_of(run)
    if family == "bert":
        pooler = next(
            value for name, value in state.items() if name.endswith("pooler.dense.weight")
        )
        np.testing.assert_allclose(np.asarray(params["table_out"]).T, pooler.numpy(), atol=1e-6)
    table = next(
        value for name, value in state.items() if "word_embeddings" in name or "wte" in name
    )
    found = np.asarray(params["embedding"]["table"])[: len(table)]
    np.testing.assert_allclose(found, table.numpy(), atol=1e-6)
