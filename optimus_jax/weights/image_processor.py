"""How a published model of images reads them: its preprocessor_config.json, as transformers'
`ViTImageProcessor`, `DeiTImageProcessor` and `BitImageProcessor` understand it.

The size of what is read is the model's. Where the file says that an image is scaled to more, and
its middle is cropped, the same share of it is cropped here (data/images.py).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from optimus_jax.config import ModelConfig
from optimus_jax.config.model import Resample
from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.weights.file_bytes import MAX_CONFIG_BYTES, read_whole

PREPROCESSOR = "preprocessor_config.json"
MAX_BYTE = 255
"""Largest value of a pixel."""


def with_image_processor(config: ModelConfig, directory: Path) -> ModelConfig:
    """A model of images with what its directory says of how images are scaled, cropped and
    normalised, if it says so; any other model as it is.

    Raises ConfigError if the file is damaged, or names a number that cannot be used.
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
            mean, std = (), ()
        scaling = scaling_of(settings, config.image_size)
        return replace(config, pixel_mean=mean, pixel_std=std, **scaling)
    except (CheckpointError, ConfigError, JSONInputError, ValueError) as error:
        raise ConfigError(
            explain(
                f"{path} does not say how images are read",
                given=str(error),
                do="use the file that came with the weights",
            )
        ) from error


def scaling_of(settings: Mapping[str, Any], image_size: int) -> dict[str, Any]:
    """`ModelConfig.resize`, `keep_aspect` and `resample`. Raises ValueError if a size is no number,
    or the filter has none of Pillow's.
    """
    found, filters = dict[str, Any](), get_args(Resample)
    how = settings.get("resample")
    if how is not None:
        if type(how) is not int or not 0 <= how < len(filters):
            raise ValueError(f"resample={how!r}, where 0 to {len(filters) - 1} were expected")
        found["resample"] = filters[how]
    if not settings.get("do_resize", True):
        return found
    size, keep_aspect = _side(settings, "size", image_size)
    crop, _ = _side(settings, "crop_size", image_size)
    resize = image_size
    if settings.get("do_center_crop"):
        resize = max(image_size, round(image_size * size / crop))
    if keep_aspect or resize > image_size:
        found |= {"resize": resize, "keep_aspect": keep_aspect}
    return found


def _side(settings: Mapping[str, Any], name: str, default: int) -> tuple[int, bool]:
    """Pixels of a side that a size names, and whether it is the shorter side. One number is both
    sides.
    """
    given = settings.get(name)
    if given is None:
        return default, False
    sides = given if isinstance(given, dict) else {"height": given, "width": given}
    is_shorter = "shortest_edge" in sides
    side = sides["shortest_edge"] if is_shorter else sides.get("height")
    is_square = is_shorter or side == sides.get("width")
    if type(side) is not int or side < 1 or not is_square:
        raise ValueError(f"{name}={given!r}, where the sides of a square were expected")
    return side, is_shorter


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
