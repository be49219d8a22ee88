"""Passes the parameters in a checkpoint on to the files of a published model, slice by slice.

A leaf is read in boxes of whole chunks, of BOX_BYTES or one chunk, and each box is written into all
tensors that have a part in it. So memory does not depend on the size of the model or of a tensor.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from optimus_jax.checkpoint.reading import check_same_model
from optimus_jax.checkpoint.slices import StoredCheckpoint, StoredLeaf
from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.mesh.boxes import Box, sizes
from optimus_jax.mesh.slots import canonical_slots
from optimus_jax.models.generator import beside_generator
from optimus_jax.models.huggingface_formats import format_of
from optimus_jax.models.huggingface_tensors import LeafSource, leaf_sources, tensor_shapes
from optimus_jax.models.merging import Merging, is_of_adapter
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.restack import is_stacked
from optimus_jax.run.stored_matrices import StoredCodes, matrices_of
from optimus_jax.weights.safetensors_writer import create_weights

BOX_BYTES = 32 << 20
"""Most bytes that are read into one array, unless a chunk on the disk is larger."""
NUM_WORKERS = 2
"""Boxes that are passed on at the same time."""
PARAMS = "params/"
"""Where parameters are in a state."""
DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(jnp.bfloat16),
    "f16": np.dtype(np.float16),
}
"""Number formats of exported weights."""

Stored = StoredLeaf | StoredCodes


class StoppedError(Exception):
    """The caller wants no more of an export."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightsExport:
    """The parameters of a checkpoint, to be written as a published model's."""

    checkpoint: StoredCheckpoint
    config: ModelConfig
    """The model, of a family that transformers has."""
    tuning: Tuning
    """The adapters in the checkpoint, which are merged, and the formats of its leaves."""
    dtype: np.dtype
    """Of the files."""
    part: Callable[[Params], Params]
    """The model's, of the parameters in the checkpoint, with the names that they have in it."""

    @classmethod
    def of(
        cls,
        checkpoint: StoredCheckpoint,
        config: ModelConfig,
        tuning: Tuning,
        dtype: str,
        part: Callable[[Params], Params] = beside_generator,
    ) -> "WeightsExport":
        """The export of a checkpoint's parameters.

        Args:
          config, tuning, part: as above.
          dtype: a key of DTYPES.
        Raises:
          CheckpointError: the checkpoint is of another model.
        """
        shapes = model_shapes(replace(config, tuning=tuning), config.vocab_size)
        asked = named_leaves({"params": shapes.params})
        saved = {
            PARAMS + path: {"dtype": leaf.dtype.name, "shape": leaf.shape}
            for path, leaf in params_in(checkpoint, part).items()
        }
        check_same_model(checkpoint.step, saved, asked, shapes.may_be_padded)
        return cls(
            checkpoint=checkpoint,
            config=config,
            tuning=tuning,
            dtype=DTYPES[dtype],
            part=part,
        )

    @property
    def num_params(self) -> int:
        """Number of parameters, without padding."""
        return sum(map(prod, tensor_shapes(self.config).values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return self.num_params * self.dtype.itemsize

    def write(
        self,
        directory: Path,
        max_shard_bytes: int,
        advance: Callable[[int], object] = lambda num_bytes: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Write the files into a directory, which has none yet.

        Args:
          advance: called with the bytes of the checkpoint that have been passed on since the last
            call.
          is_stopping: whether to end early.
        Raises:
          DamagedError, UnreachableError: the checkpoint cannot be read, or is not what was saved.
          CheckpointError: a parameter does not fit the dtype.
          StoppedError: it was to end.
          OSError: the directory cannot be written.
        """
        hf_format = format_of(self.config)
        full = {name: hf_format.full_name(name) for name in tensor_shapes(self.config)}
        own, theirs = tensor_shapes(self.config), hf_format.file_shapes(self.config)
        shapes = {full[name]: theirs.get(name, shape) for name, shape in own.items()}
        constants = {
            hf_format.full_name(name): values
            for name, values in hf_format.constants(self.config).items()
        }
        shapes |= {name: values.shape for name, values in constants.items()}
        files = create_weights(directory, shapes, self.dtype, max_shard_bytes)
        for name, values in constants.items():
            files[name][...] = values
        tensors = {name: files[each].reshape(own[name]) for name, each in full.items()}

        merging = self._merging()

        def pass_on(path: str, source: LeafSource, leaf: Stored, box: Box) -> int:
            values = leaf.read(box)
            if merging.changes(path):
                values = values.astype(np.float32)
                values = merging.part(path, box, values)
            source.write(values, tensors, box)
            return leaf.num_bytes * values.size // prod(leaf.shape)

        with ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="export") as pool:
            todo, running = self._boxes(), set()
            try:
                while True:
                    for given in itertools.islice(todo, NUM_WORKERS - len(running)):
                        running.add(pool.submit(pass_on, *given))
                    if not running:
                        break
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in done:
                        advance(each.result())
                    if is_stopping():
                        raise StoppedError
            finally:
                for each in running:
                    each.cancel()
        for _, leaf in self._leaves():
            leaf.check()

    @property
    def num_stored_bytes(self) -> int:
        """Bytes of the parameters in the checkpoint that are passed on, before compression."""
        return sum(leaf.num_bytes for path, leaf in self._leaves() if not is_of_adapter(path))

    def _leaves(self) -> Iterable[tuple[str, Stored]]:
        """The parameters in the checkpoint, by the path that they have in a model."""
        return self._stored.items()

    @cached_property
    def _stored(self) -> dict[str, Stored]:
        own = params_in(self.checkpoint, self.part)
        return matrices_of(own, model_shapes(self.config, self.config.vocab_size))

    def _merging(self) -> Merging:
        """Merges the adapters, which are small and read whole."""
        adapters = {
            path: leaf.read(tuple(slice(0, size) for size in leaf.shape)).astype(np.float32)
            for path, leaf in self._leaves()
            if is_of_adapter(path)
        }
        return Merging(replace(self.config, tuning=self.tuning), adapters)

    def _boxes(self) -> Iterator[tuple[str, LeafSource, Stored, Box]]:
        """All boxes of all parameters but those of adapters. A checkpoint's stacks and vocabulary
        may end in padding.
        """
        rows = {path: leaf.shape[0] for path, leaf in self._leaves()}
        slots = canonical_slots(self.config.num_layers, rows[next(filter(is_stacked, rows))])
        sources = leaf_sources(model_shapes(self.config, rows["embedding/table"], slots))
        for path, leaf in self._leaves():
            if is_of_adapter(path):
                continue
            for box in leaf.boxes(sources[path].file_order, BOX_BYTES):
                assert prod(sizes(box))
                yield path, sources[path], leaf, box


def params_in(
    checkpoint: StoredCheckpoint, part: Callable[[Params], Params]
) -> dict[str, StoredLeaf]:
    """The parameters in a checkpoint that are those of a part, by their paths in it."""
    params = {
        name.removeprefix(PARAMS): leaf
        for name, leaf in checkpoint.leaves.items()
        if name.startswith(PARAMS)
    }
    found: dict[str, Any] = {**flatten_dict(part(unflatten_dict(params, sep="/")), sep="/")}
    return found


def dtype_of(checkpoint: StoredCheckpoint) -> str:
    """The format of a checkpoint's parameters; f32 if they are not of one format that can be
    exported.
    """
    leaves = checkpoint.leaves.items()
    found = {leaf.dtype for name, leaf in leaves if name.startswith(PARAMS)}
    return next((name for name, dtype in DTYPES.items() if found == {dtype}), "f32")
