"""Opens the directory of a published model: its config.json, and where its tensors are.

Everything is checked before a tensor is read: that files hold what indices say, and that the
tensors are those of the config. `LeafSource.block` (models/huggingface_tensors.py) then reads any
slice of any leaf. Reading keeps no state, so that threads can read at the same time.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.models.families import check_family
from optimus_jax.models.huggingface import config_from_huggingface
from optimus_jax.models.huggingface_checks import (
    EMBEDDING,
    check_tied_head,
    listed,
    model_tensors,
    other_tensors,
)
from optimus_jax.models.huggingface_formats import format_of
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.weights.file_bytes import MAX_CONFIG_BYTES, damaged, read_whole
from optimus_jax.weights.image_processor import PREPROCESSOR, with_image_processor
from optimus_jax.weights.safetensors_file import read_safetensors
from optimus_jax.weights.stored_tensor import StoredTensor
from optimus_jax.weights.torch_file import read_torch_file

CONFIG = "config.json"
CONFIG_FILES = (CONFIG, PREPROCESSOR)
"""What `read_config` reads, of which the second may be missing."""
SAFETENSORS, INDEX_SUFFIX = "model.safetensors", ".index.json"
WEIGHTS: dict[str, Callable[[Path], dict[str, StoredTensor]]] = {
    SAFETENSORS: read_safetensors,
    "pytorch_model.bin": read_torch_file,
}
"""Files with a model's weights, the preferred one first. With INDEX_SUFFIX: the index of several
files of the same kind."""


@dataclass(frozen=True)
class PublishedModel:
    """A model's directory, whose files agree with each other."""

    config: ModelConfig
    tensors: dict[str, StoredTensor]
    """By name without the family's prefix, as `LeafSource.block` wants them."""
    others: dict[str, StoredTensor]
    """What the files hold besides, by such names."""

    @property
    def dtype(self) -> np.dtype:
        """The format of its embedding, and usually of all its tensors."""
        return self.tensors[format_of(self.config).tensors[EMBEDDING]].dtype

    def check_tied_head(self) -> None:
        """Read the embedding and a tied head, if one is stored, and compare them.

        Raises CheckpointError if they differ.
        """
        check_tied_head(self.tensors, self.config)


def open_model(directory: Path, *, needs_head: bool = True) -> PublishedModel:
    """A published model, of which no tensor has been read.

    Args:
      needs_head: whether the parts of a head over the vocabulary must be there.
    Raises:
      ConfigError: the config.json is missing, malformed, or of a model that is not supported.
      CheckpointError: the weights are missing or damaged, or not those of the config.json.
    """
    config, stored = read_config(directory), read_tensors(directory)
    tensors = model_tensors(stored, config, needs_head=needs_head)
    return PublishedModel(config, tensors, other_tensors(stored, config))


def read_config(directory: Path) -> ModelConfig:
    """The ModelConfig for the config.json of a directory, and of images for its
    preprocessor_config.json. Raises ConfigError."""
    path = directory / CONFIG
    try:
        hf_config = parse_json(read_whole(path, MAX_CONFIG_BYTES))
    except (JSONInputError, CheckpointError) as error:
        given = str(error) if isinstance(error, JSONInputError) else _given(error)
        raise ConfigError(
            explain(
                f"{path} cannot be read",
                given=given,
                do="give the directory of a model, with the config.json that it came with",
            )
        ) from error
    if not isinstance(hf_config, dict):
        raise ConfigError(
            explain(
                f"{path} is not the config of a model",
                given=f"a {type(hf_config).__name__}",
                do="use the config.json that came with the weights",
            )
        )
    config = config_from_huggingface(hf_config)
    check_family(config)
    return with_image_processor(config, directory)


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor in the files of a directory, by the name that it has there.

    Raises:
      CheckpointError: there are no weights, a file is damaged, or an index does not say what the
        files hold.
    """
    for name, read_file in WEIGHTS.items():
        path = directory / name
        if os.path.exists(path):
            return read_file(path)
        index = directory / (name + INDEX_SUFFIX)
        if os.path.exists(index):
            return _read_shards(index, read_file)
    raise CheckpointError(
        explain(
            f"{directory} holds no weights that can be read",
            given=f"none of {', '.join(f'{name}, {name}{INDEX_SUFFIX}' for name in WEIGHTS)}",
            do="download the model's weights as safetensors or as a PyTorch file",
        )
    )


def has_weights(directory: Path, name: str) -> bool:
    """Whether a directory has the weights of a kind (`WEIGHTS`), in one file or several."""
    return any(os.path.exists(directory / each) for each in (name, name + INDEX_SUFFIX))


def patterns_of(name: str) -> tuple[str, ...]:
    """Names of the files that weights of a kind (`WEIGHTS`) may consist of, as glob patterns."""
    stem, dot, suffix = name.rpartition(".")
    return name, name + INDEX_SUFFIX, f"{stem}-*-of-*{dot}{suffix}"


def _read_shards(
    index: Path, read_file: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """The tensors of all files of an index, each in the file that the index says."""
    try:
        content = parse_json(read_whole(index))
    except JSONInputError as error:
        raise damaged(index, f"it is not JSON: {error}") from error
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not all(
        isinstance(shard, str) for shard in shard_of.values()
    ):
        raise damaged(index, "weight_map is not an object of file names")
    shards = sorted(set(shard_of.values()))
    # A model's directory is all that is read, whatever names an index holds.
    if paths := [
        shard for shard in shards if shard in ("", ".", "..") or set("/\\\0") & set(shard)
    ]:
        raise damaged(index, f"it names files outside its directory: {listed(paths)}")
    if absent := [shard for shard in shards if not os.path.exists(index.parent / shard)]:
        raise CheckpointError(
            explain(
                f"{index} names files that are missing",
                given=f"{len(absent)} of {len(shards)}: {listed(absent)}",
                do="download them into the same directory",
            )
        )
    tensors, elsewhere = {}, []
    for shard in shards:
        found = read_file(index.parent / shard)
        elsewhere += [f"{name} in {shard}" for name in found if shard_of.get(name) != shard]
        tensors |= found
    absent = sorted(shard_of.keys() - tensors.keys())
    if elsewhere or absent:
        raise damaged(
            index,
            f"not in any of its files: {listed(absent)};"
            f" in files where it does not say so: {listed(elsewhere)}",
        )
    return tensors


def _given(error: CheckpointError) -> str:
    """What was given, of an error that `explain` worded."""
    return str(error).partition("  given: ")[2].partition("\n")[0]
