"""Vision transformers equal Hugging Face's, on one device, on a mesh and in stages."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from published_models import libraries
from test_huggingface import (
    GLOBAL_BATCH,
    GRADIENT_RTOL,
    LOGITS_ATOL,
    ONE_DEVICE,
    SHARDED,
    STAGES,
    differences,
    logits,
    program_for,
    run,
    state_of,
)

from optimus_jax.config import ModelConfig
from optimus_jax.config.model import CLASS_TOKEN, HIDDEN_PATCH, PATCH_TOKEN
from optimus_jax.data.images import patches_of
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface, to_huggingface
from optimus_jax.models.huggingface_config import config_to_huggingface
from optimus_jax.training.tasks import TASKS

CLASSIFIER, RESTORER = "ViTForImageClassification", "ViTForMaskedImageModeling"
LABELS = {0: "cat", 1: "dog", 2: "fish"}
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 8,
    "patch_size": 4,
}
CASES = {
    "three channels": SMALL,
    "one channel, small patches": SMALL | {"patch_size": 2, "num_channels": 1},
    "wide": SMALL | {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 12},
}
NORMALISED = {
    "three channels": {
        "pixel_mean": (0.485, 0.456, 0.406),
        "pixel_std": (0.229, 0.224, 0.225),
    }
}
"""Fields of the model, for cases in which pixels do not go from -1 to 1."""


def model_of(case: str, config: dict) -> ModelConfig:
    return replace(config_from_huggingface(config), **NORMALISED.get(case, {}))


@cache
def reference(case: str, name: str = CLASSIFIER) -> SimpleNamespace:
    """The model in PyTorch: weights, and of `rows_for` the logits, or the values of patches, the
    loss and its gradients.
    """
    torch, transformers = libraries()
    torch.manual_seed(0)
    sizes = CASES[case]
    config = transformers.ViTConfig(
        **sizes,
        encoder_stride=sizes["patch_size"],
        attn_implementation="eager",
        **({"id2label": LABELS} if name == CLASSIFIER else {}),
    )
    model = getattr(transformers, name)(config).eval()
    config.architectures = [name]
    for weight in model.parameters():
        weight.data = 0.2 * torch.randn_like(weight) + (weight.data if weight.ndim == 1 else 0)
    pixels, labels = images_for(case)
    mean_C, std_C = map(np.array, model_of(case, config.to_dict()).normalisation)
    normalised = (pixels / 255 - mean_C[:, None, None]) / std_C[:, None, None]
    scaled = torch.tensor(normalised.astype(np.float32))
    if name == CLASSIFIER:
        logits = model(scaled).logits
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels, dtype=torch.long))
    else:
        found = model(scaled, bool_masked_pos=torch.tensor(hidden_for(case)))
        loss, logits = found.loss, found.reconstruction
    loss.backward()
    names = file_names(model)
    return SimpleNamespace(
        config=config.to_dict(),
        state_dict={names[key]: tensor.numpy() for key, tensor in model.state_dict().items()},
        logits=logits.detach().numpy(),
        loss=loss.item(),
        gradients={names[key]: weight.grad.numpy() for key, weight in model.named_parameters()},
    )


def file_names(model) -> dict[str, str]:
    """Names in memory -> those in files, which differ since transformers 5."""
    import tempfile
    from pathlib import Path

    from safetensors.numpy import load_file

    own = model.state_dict()
    marks = {key: tensor.clone() for key, tensor in own.items()}
    for number, tensor in enumerate(own.values()):
        tensor.fill_(float(number))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    keys = list(own)
    for key, tensor in own.items():
        tensor.copy_(marks[key])
    return {keys[int(tensor.flat[0])]: name for name, tensor in stored.items()}


def images_for(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of images, [B, C, H, W], and their labels."""
    rng, sizes = np.random.default_rng(0), CASES[case]
    shape = (GLOBAL_BATCH, sizes.get("num_channels", 3), sizes["image_size"], sizes["image_size"])
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    return pixels, rng.integers(0, len(LABELS), GLOBAL_BATCH, dtype=np.int32)


def hidden_for(case: str) -> np.ndarray:
    """Which patches are hidden, bool [B, patches]."""
    patches = (CASES[case]["image_size"] // CASES[case]["patch_size"]) ** 2
    return np.random.default_rng(1).random((GLOBAL_BATCH, patches)) < 0.6


def rows_for(case: str) -> dict[str, np.ndarray]:
    pixels, labels = images_for(case)
    patches = np.stack([patches_of(image, CASES[case]["patch_size"]) for image in pixels])
    shape = (GLOBAL_BATCH, patches.shape[1] + 1)
    is_class = np.broadcast_to(np.arange(shape[1]) == 0, shape)
    return {
        "tokens": np.where(is_class, CLASS_TOKEN, PATCH_TOKEN).astype(np.int32),
        "targets": np.where(is_class, labels[:, None], -1).astype(np.int32),
        "positions": np.tile(np.arange(shape[1], dtype=np.int32), (GLOBAL_BATCH, 1)),
        "segments": np.zeros(shape, np.int32),
        "loss_mask": is_class.copy(),
        "examples": np.arange(GLOBAL_BATCH, dtype=np.int32),
        "patches": np.pad(patches, ((0, 0), (1, 0), (0, 0))),
    }


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        pytest.param(
            case,
            axes,
            id=f"{case} on {axes}",
            marks=() if axes is ONE_DEVICE or case == "three channels" else pytest.mark.nightly,
        )
        for case in CASES
        for axes in (ONE_DEVICE, SHARDED, STAGES)
    ],
)
def test_logits_loss_and_gradients_equal_huggingface(case, axes):
    theirs = reference(case)
    model = model_of(case, theirs.config)
    assert model.labels == tuple(LABELS.values())
    program = program_for(model, axes, seq_len=model.max_length)
    vocab_rows = program.shapes.vocab_rows
    state = state_of(program, from_huggingface(theirs.state_dict, model, vocab_rows))
    rows = put_batch(rows_for(case), program.batch_sharding, GLOBAL_BATCH)
    if axes is ONE_DEVICE:
        found = np.asarray(run(jax.jit(partial(logits, program)), state.params, rows))
        assert np.abs(found[:, 0] - theirs.logits).max() < LOGITS_ATOL
    state, metrics = run(program.train_step, state, rows)
    off = differences(state.opt_state[0].mu, from_huggingface(theirs.gradients, model, vocab_rows))
    assert float(metrics["loss"]) == pytest.approx(theirs.loss, rel=1e-5)
    assert {leaf: value for leaf, value in off.items() if not value < GRADIENT_RTOL} == {}


@pytest.mark.parametrize("axes", [ONE_DEVICE, SHARDED, STAGES], ids=str)
def test_restored_patches_equal_huggingface(axes, monkeypatch):
    monkeypatch.setitem(TASKS, "mim", replace(TASKS["mim"], corrupt=None))
    case = "three channels"
    theirs, hidden = reference(case, RESTORER), np.pad(hidden_for(case), ((0, 0), (1, 0)))
    model = model_of(case, theirs.config)
    assert not model.labels
    program = program_for(model, axes, seq_len=model.max_length, task="mim")
    vocab_rows = program.shapes.vocab_rows
    state = state_of(program, from_huggingface(theirs.state_dict, model, vocab_rows))
    rows = rows_for(case)
    rows |= {"tokens": np.where(hidden, HIDDEN_PATCH, rows["tokens"]), "loss_mask": hidden}
    rows = put_batch(rows, program.batch_sharding, GLOBAL_BATCH)
    if axes is ONE_DEVICE:
        found = np.asarray(run(jax.jit(partial(logits, program)), state.params, rows))
        expected = np.stack([patches_of(image, model.patch_size) for image in theirs.logits])
        assert np.abs(found[:, 1:] - expected).max() < LOGITS_ATOL
    state, metrics = run(program.train_step, state, rows)
    off = differences(state.opt_state[0].mu, from_huggingface(theirs.gradients, model, vocab_rows))
    assert float(metrics["loss"]) == pytest.approx(theirs.loss, rel=1e-5)
    assert {leaf: value for leaf, value in off.items() if not value < GRADIENT_RTOL} == {}


@pytest.mark.parametrize("name", [CLASSIFIER, RESTORER])
@pytest.mark.parametrize("case", CASES)
def test_exported_weights_and_config_are_theirs(case, name):
    theirs = reference(case, name)
    model = config_from_huggingface(theirs.config)
    assert config_from_huggingface(config_to_huggingface(model)) == model
    ours = to_huggingface(from_huggingface(theirs.state_dict, model, model.vocab_size + 3), model)
    assert ours.keys() == theirs.gradients.keys()
    for key, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs.state_dict[key])
