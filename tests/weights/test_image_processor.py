"""Pixels are normalised as the image processor of a published model does it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from published_models import libraries

from optimus_jax.config.presets import model_preset
from optimus_jax.data.images import StoredImage, decoded, patches_of
from optimus_jax.errors import ConfigError
from optimus_jax.run.model_card import preprocessor_config
from optimus_jax.training.task import scaled
from optimus_jax.weights.image_processor import PREPROCESSOR, with_image_processor

MODEL = replace(model_preset("vit-nano"), num_channels=3)
IMAGE_NET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)


def read(settings, directory):
    (directory / PREPROCESSOR).write_text(json.dumps(settings))
    return with_image_processor(MODEL, directory)


def normalised(model):
    patches = patches_of(PIXELS, model.patch_size)[None]
    return np.asarray(scaled(np.asarray(patches), model))[0]


def theirs(settings):
    _, transformers = libraries()
    processor = transformers.ViTImageProcessor(**{"do_resize": False, **settings})
    seen = processor(PIXELS, return_tensors="np", input_data_format="channels_first")
    return patches_of(seen["pixel_values"][0], MODEL.patch_size)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        IMAGE_NET,
        {**IMAGE_NET, "do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
        {"do_rescale": False, "image_mean": [120.0, 110.0, 100.0], "image_std": [60.0] * 3},
    ],
    ids=lambda settings: ", ".join(settings) or "defaults",
)
def test_values_are_those_of_the_image_processor(settings, tmp_path):
    model = read(settings, tmp_path)
    np.testing.assert_allclose(normalised(model), theirs(settings), atol=2e-5)
    exported = json.loads(preprocessor_config(model))
    assert read(exported, tmp_path) == model
    np.testing.assert_allclose(theirs(exported | {"do_resize": False}), theirs(settings), atol=2e-5)


def test_values_go_from_minus_one_to_one_by_default(tmp_path):
    for model in (with_image_processor(MODEL, tmp_path), read({"image_mean": 0.5}, tmp_path)):
        assert model == MODEL
    expected = patches_of(PIXELS, MODEL.patch_size).astype(np.float32) / np.float32(127.5) - 1
    np.testing.assert_array_equal(normalised(MODEL), expected)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        {"image_mean": [0.5]},
        {"image_std": [0.5, 0.5, "0.5"]},
        {"image_std": 0},
        {"rescale_factor": 0},
        {"resample": 9},
        {"size": {"longest_edge": 9}},
        {"crop_size": "9"},
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(settings, tmp_path):
    with pytest.raises(ConfigError, match="does not say how images are read"):
        read(settings, tmp_path)


def test_a_config_has_a_number_for_each_channel():
    for values in ({"pixel_mean": (0.5,)}, {"pixel_std": (0.5, 0.5, 0.0)}):
        with pytest.raises(ConfigError, match="a number for each channel"):
            replace(MODEL, **values)
    with pytest.raises(ConfigError, match="reads no images"):
        replace(model_preset("gpt2-nano"), pixel_mean=(0.5,) * 3)


CROPPED = {"do_center_crop": True, "crop_size": {"height": 8, "width": 8}}
BICUBIC, NEAREST = 3, 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViT", {"size": {"height": 8, "width": 8}, "resample": BICUBIC}),
        ("ViT", {"size": 8, "resample": NEAREST}),
        ("DeiT", CROPPED | {"size": {"height": 11, "width": 11}, "resample": BICUBIC}),
        ("Bit", CROPPED | {"size": {"shortest_edge": 10}, "resample": BICUBIC}),
        ("Bit", CROPPED | {"size": {"shortest_edge": 8}, "resample": 2}),
    ],
)
@pytest.mark.parametrize("shape", [(30, 23), (17, 40)])
def test_images_are_scaled_and_cropped_as_the_image_processor_does_it(
    kind, settings, shape, tmp_path
):
    _, transformers = libraries()
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    pillow.fromarray(pixels).save(tmp_path / "a.png")
    model = read(settings, tmp_path)
    found = decoded(StoredImage("a.png", tmp_path / "a.png", None), model)
    plain = {"do_rescale": False, "do_normalize": False}

    def theirs(kind, settings):
        name = f"{kind}ImageProcessor"
        kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
        return kind(**settings | plain)(pixels, return_tensors="np")["pixel_values"][0]

    # Pillow keeps the edges of what is cropped in 32 bits, so a value may be rounded otherwise.
    np.testing.assert_allclose(found, theirs(kind, settings), rtol=0, atol=1)
    exported = json.loads(preprocessor_config(model))
    assert read(exported, tmp_path) == model
    written = exported.pop("image_processor_type").removesuffix("ImageProcessor")
    np.testing.assert_array_equal(theirs(written, exported), theirs(kind, settings))
    other = decoded(StoredImage("a.png", tmp_path / "a.png", None), MODEL)
    assert np.abs(other.astype(int) - found).max() > 1


def test_the_share_that_is_cropped_is_that_of_the_file(tmp_path):
    file = {"do_center_crop": True, "size": 256, "crop_size": 224}
    assert read(file, tmp_path).resize == round(8 * 256 / 224)
    assert read(file | {"do_center_crop": False}, tmp_path) == MODEL
    assert read(file | {"crop_size": 512}, tmp_path) == MODEL
    with pytest.raises(ConfigError, match="at least the pixels"):
        replace(MODEL, resize=7)
