"""How a published model of images reads pixels: its preprocessor_config.json, as transformers'
`ViTImageProcessor` understands it.

Values are read; the size of an image is the model's, to which data/images.py scales all of it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimus_jax.config import ModelConfig
from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.weights.file_bytes import MAX_CONFIG_BYTES, read_whole

PREPROCESSOR = "preprocessor_config.json"
MAX_BYTE = 255
"""Largest value of a pixel."""


def with_normalisation(config: ModelConfig, directory: Path) -> ModelConfig:
    """A model of images with the mean and standard deviation in its directory, if it has them; any
    other model as it is.

    Raises ConfigError if the file is damaged, or has no number above 0 to divide by.
    """
    path = directory / PREPROCESSOR
    if config.reads != "images" or not path.exists():
        return config
    try:
        settings = parse_json(read_whole(path, MAX_CONFIG_BYTES))
        if not isinstance(settings, dict):
            raise ValueError(f"a {type(settings).__name__}")
        mean, std = normalisation_of(settings, config.num_channels)
        if {*mean, *std} == {0.5}:  # as ModelConfig has it: other files may leave it out
            return config
        return replace(config, pixel_mean=mean, pixel_std=std)
    except (CheckpointError, ConfigError, JSONInputError, ValueError) as error:
        raise ConfigError(
            explain(
                f"{path} does not say how pixels are normalised",
                given=str(error),
                do="use the file that came with the weights",
            )
        ) from error


def normalisation_of(
    settings: Mapping[str, Any], num_channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, whose values are from 0 to 1, so that (value -
    mean) / deviation is what an image processor gives. Raises ValueError if they are no numbers.
    """
    factor = 1.0
    if settings.get("do_rescale", True):
        [factor] = _numbers(settings, "rescale_factor", 1 / MAX_BYTE, 1)
    mean, std = (0.0,) * num_channels, (1.0,) * num_channels
    if settings.get("do_normalize", True):
        mean = _numbers(settings, "image_mean", 0.5, num_channels)
        std = _numbers(settings, "image_std", 0.5, num_channels)
    # The processor computes (byte * factor - mean) / std.
    scale = MAX_BYTE * factor
    if not scale > 0 or not min(std) > 0:
        raise ValueError(f"rescale_factor={factor}, image_std={list(std)}, which must be above 0")
    if math.isclose(scale, 1):
        return mean, std
    return tuple(each / scale for each in mean), tuple(each / scale for each in std)


def _numbers(
    settings: Mapping[str, Any], name: str, default: float, count: int
) -> tuple[float, ...]:
    """As many numbers as there are channels; one number is for all of them."""
    found = settings.get(name)
    if found is None:
        found = default
    listed = found if isinstance(found, list) else [found] * count
    are_numbers = all(isinstance(each, int | float) and each is not True for each in listed)
    if len(listed) != count or not are_numbers:
        raise ValueError(f"{name}={found!r}, where {count} numbers were expected")
    return tuple(map(float, listed))
