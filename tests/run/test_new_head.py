"""A head of labels that begins anew, on a model that has other labels."""

import jax
import numpy as np
import pytest
from published_models import libraries

import optimus_jax
from optimus_jax.errors import ConfigError, DataError

pillow = pytest.importorskip("PIL.Image")
TINY = {
    "mesh": "fsdp=8",
    "global_batch": 8,
    "steps": 1,
    "lr": 1e-12,
    "eval_every": 0,
    "progress": "none",
    "control": "off",
    "data.eval_fraction": 0.0,
}
ANEW = {"model.labels": ""}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Folders with images of three labels, and of two others."""
    top, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, labels in {"three": "abc", "two": "xy"}.items():
        for label in labels:
            (top / name / label).mkdir(parents=True)
            for number in range(6):
                pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                pillow.fromarray(pixels).save(top / name / label / f"{number}.png")
    return top


@pytest.fixture(scope="module")
def run_of_three(pictures):
    return optimus_jax.train(
        "vit-nano", data=str(pictures / "three"), run_dir=pictures / "runs" / "three", **TINY
    )


def test_a_run_with_other_labels_lends_its_body(pictures, run_of_three):
    begin = {"init_from": str(run_of_three.run_dir), "data": str(pictures / "two"), **TINY}
    with pytest.raises(DataError, match="model does not know") as error:
        optimus_jax.train(run_dir=pictures / "runs" / "no", **begin)
    assert "model.labels=" in str(error.value)
    with pytest.raises(ConfigError, match=r"(?s)that the model has learnt.*model\.labels="):
        optimus_jax.evaluate(run_of_three.run_dir, data=begin["data"], **{"model.labels": ""})
    found = optimus_jax.train(run_dir=pictures / "runs" / "two", **begin, **ANEW).state.params
    before = run_of_three.state.params
    assert found["label_table"].shape == (2, before["label_table"].shape[1])
    for name in ("patches", "layers"):
        for new, old in zip(*(leaves(params[name]) for params in (found, before)), strict=True):
            np.testing.assert_allclose(new, old, atol=1e-6)


def test_a_head_that_begins_anew_is_trained(pictures, run_of_three):
    frozen = {"model.tuning.method": "lora", **ANEW}
    with pytest.raises(ConfigError, match="begins anew, and is frozen") as error:
        optimus_jax.train(
            init_from=str(run_of_three.run_dir),
            data=str(pictures / "two"),
            run_dir=pictures / "runs" / "frozen",
            **TINY,
            **frozen,
        )
    assert "model.tuning.freeze=embedding,attention,mlp,norm" in str(error.value)


def test_a_published_classifier_with_other_labels_lends_its_body(pictures):
    torch, transformers = libraries()
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
        image_size=8,
        patch_size=2,
        num_channels=1,
        id2label={0: "crane", 1: "heron", 2: "crane"},
    )
    theirs = transformers.ViTForImageClassification(config)
    theirs.save_pretrained(pictures / "published")
    found = optimus_jax.train(
        str(pictures / "published"),
        data=str(pictures / "two"),
        run_dir=pictures / "runs" / "from-published",
        **TINY,
        **ANEW,
    ).state.params
    assert found["label_table"].shape == (2, 16)
    bias = theirs.vit.embeddings.patch_embeddings.projection.bias.detach().numpy()
    np.testing.assert_allclose(np.asarray(found["patch_bias"]), bias, atol=1e-6)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
