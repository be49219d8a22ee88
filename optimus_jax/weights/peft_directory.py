"""Reads and writes a directory of adapters in PEFT's format (models/peft_format.py)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.weights.file_bytes import MAX_CONFIG_BYTES, read_whole
from optimus_jax.weights.safetensors_file import DTYPES, LENGTH_BYTES, METADATA, read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
"""What PEFT writes in the place of WEIGHTS if it is asked to, which is not read."""
BASE, REVISION = "base_model_name_or_path", "revision"
"""Keys of CONFIG that name the model without adapters."""


def read_peft(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and all tensors, by name, of a directory of adapters.

    Raises:
      ConfigError: as `read_peft_config`.
      CheckpointError: the tensors are missing, damaged, or not in safetensors.
    """
    config = read_peft_config(directory)
    if not (directory / WEIGHTS).exists() and (directory / PICKLE).exists():
        raise CheckpointError(
            explain(
                "adapters are read from safetensors alone",
                given=f"{directory}, which has {PICKLE} and no {WEIGHTS}",
                do="load them with PEFT, and save them with"
                " save_pretrained(DIR, safe_serialization=True)",
            )
        )
    tensors = read_safetensors(directory / WEIGHTS)
    return config, {name: np.asarray(tensor) for name, tensor in tensors.items()}


def read_peft_config(directory: Path) -> dict[str, Any]:
    """The config of a directory of adapters.

    Raises ConfigError if there is no adapter_config.json, or it is not JSON.
    """
    path = directory / CONFIG
    wrong = "which is no file"
    if path.is_file():
        try:
            config = parse_json(read_whole(path, MAX_CONFIG_BYTES))
            wrong = None if isinstance(config, dict) else "which is not a JSON object"
        except JSONInputError as error:
            wrong = f"which is not JSON: {error}"
    if wrong is not None:
        raise ConfigError(
            explain(
                "there are no adapters to be read",
                given=f"{path}, {wrong}",
                do=f"give a directory with {CONFIG} and {WEIGHTS}, as PEFT saves it",
            )
        )
    return config


def write_peft(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Write a directory of adapters for PEFT and `read_peft`. Existing files are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    place = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        place += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with (directory / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
