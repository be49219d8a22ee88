"""A run that learns digits from images in folders."""

import json
import shutil

import numpy as np
import pytest
from published_models import libraries
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.errors import ConfigError

pillow = pytest.importorskip("PIL.Image")
TINY = {"global_batch": 32, "progress": "none", "control": "off", "lr": 3e-3}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """scikit-learn's digits, 8 x 8 pixels each, in a folder for each digit."""
    datasets = pytest.importorskip("sklearn.datasets")
    folder, (images, labels) = (
        tmp_path_factory.mktemp("digits"),
        datasets.load_digits(return_X_y=True),
    )
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        pixels = np.minimum(image.reshape(8, 8) * 16, 255).astype(np.uint8)
        pillow.fromarray(pixels).save(folder / str(label) / f"{number:04}.png")
    return folder


def test_digits_are_learnt_on_a_mesh(digits, tmp_path):
    optimus_jax.train(
        "vit-nano",
        data=str(digits),
        mesh="data=2,fsdp=2,tensor=2",
        steps=100,
        eval_every=100,
        run_dir=tmp_path / "run",
        **{"data.eval_fraction": 0.1, "evaluation.examples": 500},
        **TINY,
    )
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    [found] = [event for event in events if event["event"] == "eval"]
    assert found["metrics"]["accuracy"] > 0.3, "of ten digits"
    assert found["perplexity"] is None


def test_a_resumed_run_sees_the_same_images(digits, tmp_path):
    options = {"data": str(digits), "eval_every": 0, **TINY, "data.eval_fraction": 0.0}
    options |= {"augmentation.flip": True, "augmentation.shift": 1, "checkpoint_every": 2}
    whole = optimus_jax.train(
        "vit-nano", mesh="data=8", steps=4, run_dir=tmp_path / "whole", **options
    )
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "parts")
    shutil.rmtree(run_dir / "checkpoints" / "4")  # as if killed before it was saved
    parts = optimus_jax.train(run_dir=run_dir, resume=True, mesh="pipe=2,fsdp=2,tensor=2")
    is_resumed = [record.plan == parts.plan.digest for record in parts.history]
    assert is_resumed == [False, False, True, True]
    losses = [[record.loss for record in run.history] for run in (whole, parts)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)


def test_a_published_model_is_read_and_written(digits, tmp_path):
    torch, transformers = libraries()
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        image_size=8,
        patch_size=2,
        num_channels=1,
        id2label=dict(enumerate("0123456789")),
    )
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.25], image_std=[0.2]
    ).save_pretrained(tmp_path / "theirs")
    optimus_jax.train(
        str(tmp_path / "theirs"),
        data=str(digits),
        mesh="data=2,fsdp=2,tensor=2",
        steps=1,
        eval_every=0,
        run_dir=tmp_path / "run",
        **TINY | {"lr": 1e-12},
    )
    begun_with = json.loads((tmp_path / "run" / "config.json").read_text())["model"]
    assert (begun_with["pixel_mean"], begun_with["pixel_std"]) == ([0.25], [0.2])
    optimus_jax.export(tmp_path / "run", tmp_path / "ours")
    ours = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert ours.config.id2label == config.id2label
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "ours")
    image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    seen = processor(image, return_tensors="np", input_data_format="channels_last")
    np.testing.assert_allclose(
        seen["pixel_values"][0, 0], (image[..., 0] / 255 - 0.25) / 0.2, atol=1e-6
    )
    pixels = torch.rand(4, 1, 8, 8) * 2 - 1
    with torch.no_grad():
        found, expected = (model(pixels).logits.numpy() for model in (ours, theirs))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert "pipeline_tag: image-classification" in (tmp_path / "ours" / "README.md").read_text()


def test_a_model_that_restores_patches_lends_its_body_to_a_classifier(digits, tmp_path, capsys):
    libraries()
    options = {"data": str(digits), "mesh": "data=2,fsdp=2,tensor=2", "eval_every": 0, **TINY}
    found = optimus_jax.train(
        "vit-nano",
        task="mim",
        steps=30,
        run_dir=tmp_path / "restored",
        **options | {"eval_every": 30},
    )
    losses = [record.loss for record in found.history]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:2])
    optimus_jax.export(tmp_path / "restored", tmp_path / "exported")
    _, transformers = libraries()
    transformers.AutoModelForMaskedImageModeling.from_pretrained(tmp_path / "exported")
    for source in ("restored", "exported"):
        begun = optimus_jax.train(
            init_from=str(tmp_path / source),
            steps=1,
            run_dir=tmp_path / f"from-{source}",
            **options | {"lr": 1e-12, "progress": "plain"},
            task="image_classification",
        )
        assert "anew" in "".join(capsys.readouterr())
        ours, theirs = begun.state.params, found.state.params
        assert "hidden_patch" not in ours
        np.testing.assert_allclose(
            np.asarray(ours["patches"]), np.asarray(theirs["patches"]), atol=1e-9
        )


def test_what_a_model_of_images_cannot_do_is_said(digits, tmp_path):
    options = {"data": str(digits), "mesh": "data=8", "steps": 1, "run_dir": tmp_path / "run"}
    with pytest.raises(ConfigError, match="as many tokens as the model has positions"):
        optimus_jax.train("vit-nano", seq_len=16, **options, **TINY)
    with pytest.raises(ConfigError, match="needs a model that reads text"):
        optimus_jax.train("vit-nano", task="classification", **options, **TINY)
    with pytest.raises(ConfigError, match="needs a model that reads images"):
        optimus_jax.train("bert-nano", task="image_classification", **options, **TINY)
