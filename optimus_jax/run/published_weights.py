"""The parameters of a new run from a published model, read slice by slice into their shards.

Each process reads what its devices need, once, whichever of them need it. A parameter is filled on
its devices in boxes of at most BOX_BYTES, several of which are read at the same time, so that
memory of the host beyond the shards is a few boxes, however large a tensor is.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from optimus_jax.cluster.distributed import all_or_none, is_writer
from optimus_jax.config import Tuning
from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.boxes import Box, sizes, split
from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.mesh.sharding import zeros_on
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.models.base_formats import encoded_on_mesh
from optimus_jax.models.finite_values import finite_block
from optimus_jax.models.huggingface_tensors import LeafSource, TensorLike, leaf_sources
from optimus_jax.models.shapes import ModelShapes, Params
from optimus_jax.run.byte_progress import byte_progress
from optimus_jax.run.new_head import OF_LABELS, check_new_head, needs_new_head, without_head
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program
from optimus_jax.weights.directory import open_model
from optimus_jax.weights.published import PublishedSource

BOX_BYTES = 32 << 20
"""Most bytes that are read into one array."""
NUM_READERS = 4
"""Boxes that are read at the same time."""


@dataclass(frozen=True)
class PublishedWeights:
    """The parameters of a published model, as `InitialWeights` (run/initial_weights.py)."""

    source: PublishedSource

    def initial_state(
        self, program: Program, say: Callable[[str], object]
    ) -> tuple[TrainState, str]:
        """As `InitialWeights`.

        Raises:
          OptimusError: the files cannot be had, are damaged, or are not those of the model.
        """
        with all_or_none():
            directory = self.source.fetched()
            model = open_model(directory, needs_head=program.config.model.predicts_tokens)
            if is_writer():
                model.check_tied_head()
        name = self.source.exact(directory)
        say(f"reading parameters from {name}")
        shapes = program.shapes.base
        stored = replace(shapes, config=model.config)  # perhaps with fewer tokens
        target, tensors = _base_target(program), model.tensors
        if needs_new_head(model.config, shapes.config) or not (
            shapes.config.predicts_tokens or model.config.labels
        ):
            if shapes.config.labels:
                check_new_head(program.config.model)
            vocab_size, tensors = model.config.vocab_size, {**tensors, **model.others}
            stored = replace(shapes, config=replace(shapes.config, vocab_size=vocab_size))
            sources = leaf_sources(stored)
            found = {path for path in sources if {*sources[path].tensor_names} <= tensors.keys()}
            if model.config.labels:
                found -= OF_LABELS
            missing = sorted(target.keys() - without_head(target).keys() - found)
            target = {part: leaves for part, leaves in target.items() if part not in missing}
            if missing:
                say(f"parts of the head that {name} does not have begin anew: {', '.join(missing)}")
        with all_or_none():
            params = read_params(tensors, stored, target)
        if (added := shapes.config.vocab_size - model.config.vocab_size) > 0:
            say(
                f"{added:,} tokens that {name} does not have begin as the mean of those it has"
                + _where_it_stays(program.shapes)
            )
            params = with_added_tokens(params, stored, shapes.config.vocab_size)
        return program.state_with(params, _base_tuning(program)), name


def _base_tuning(program: Program) -> Tuning:
    return program.config.model.tuning.without_adapters


def _base_target(program: Program) -> Params:
    """A program's model without adapters: shape, dtype and sharding of every parameter."""
    return program.abstract_params(_base_tuning(program))


def _where_it_stays(shapes: ModelShapes) -> str:
    """What to say of rows of added tokens that are not trained; nothing if all are."""
    leaves = jax.tree.leaves(shapes.leaves)
    frozen = sorted({leaf.group for leaf in leaves if leaf.dims[0] == VOCAB and not leaf.trained})
    if not frozen:
        return ""
    tables = {*frozen, "head"} if shapes.config.tied else {*frozen}
    others = ",".join(group for group in shapes.config.tuning.frozen if group not in tables)
    return (
        f", and stay so, being frozen ({', '.join(frozen)}); to train them:"
        f" --set model.tuning.freeze={others}"
    )


def read_params(tensors: Mapping[str, TensorLike], shapes: ModelShapes, target: Params) -> Params:
    """Parameters on their devices, from tensors that `model_tensors` has checked.

    A matrix that is to be quantised is first put on its devices in the format of its tensors, one
    leaf at a time.

    Args:
      shapes: the model under the plan, without adapters: its slots say where the layers go.
      target: shape, dtype and sharding of every parameter, or of its codes.
    Raises:
      CheckpointError: a file cannot be read, or a value is not finite.
    """
    sources = leaf_sources(shapes)

    def filled(path: Any, like: Any) -> _Filled:
        source = sources[leaf_path(path)]
        if not isinstance(like, dict):
            return _Filled(source.cast(like.dtype), like.sharding)
        dtypes = [tensors[name].dtype for name in source.tensor_names]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        # Codes are laid out like the matrix.
        return _Filled(
            source.cast(min(widest, np.dtype(np.float32), key=lambda dtype: dtype.itemsize)),
            like["codes"].sharding,
            like,
        )

    leaves = jax.tree.map_with_path(
        filled, target, is_leaf=lambda node: isinstance(node, dict) and "codes" in node
    )
    flat, treedef = jax.tree.flatten(leaves, is_leaf=lambda leaf: isinstance(leaf, _Filled))
    todo = [(leaf, box) for leaf in flat for box in leaf.boxes()]
    done: dict[_Filled, Any] = {}
    with (
        byte_progress(show=is_writer()) as bar,
        ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as pool,
    ):
        task = bar.add_task("parameters", total=sum(leaf.bytes_of(box) for leaf, box in todo))
        for leaf, of_leaf in itertools.groupby(
            _read_ahead(pool, tensors, todo), key=lambda each: each[0]
        ):
            for _, box, values in of_leaf:
                leaf.fill(box, values)
                bar.advance(task, values.nbytes)
            done[leaf] = leaf.finished()
    return jax.tree.unflatten(treedef, [done[leaf] for leaf in flat])


def with_adapters(
    params: Params, adapters: Params, shapes: ModelShapes, shardings: Params
) -> Params:
    """Parameters with adapters, which replace those that they have.

    Args:
      adapters: leaves of `layers/...` on the host, with the layers in order.
      shapes: the model under the plan, with adapters: their slots say where the layers go.
      shardings: a NamedSharding for every leaf, also those of adapters.
    """
    slots = np.array(shapes.slots)

    def placed(leaf: np.ndarray, like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Array:
        stacked = leaf[slots].astype(like.dtype)  # EMPTY takes the last layer
        stacked[slots == EMPTY] = 0
        return jax.make_array_from_callback(stacked.shape, sharding, lambda box: stacked[box])

    def joined(own: Any, new: Any, like: Any, sharding: Any) -> Any:
        if not isinstance(new, dict):
            return placed(new, like, sharding)
        changed = {
            name: joined((own or {}).get(name), part, like[name], sharding[name])
            for name, part in new.items()
        }
        return {**(own or {}), **changed}

    return joined(params, adapters, shapes.params, shardings)


def with_added_tokens(params: Params, stored: ModelShapes, vocab_size: int) -> Params:
    """Parameters, donated, of a larger vocabulary: the rows of added tokens, which are zero, become
    the mean of the others.

    A token whose row is the mean is drawn as often as the others on average; with a row of zeros it
    would be drawn most often of all where logits are negative.

    Args:
      stored: the model with the vocabulary that it had.
    """
    old = stored.config.vocab_size

    @partial(jax.jit, donate_argnums=0)
    def filled(table: Array) -> Array:
        rows = jnp.arange(len(table)).reshape(-1, *(1,) * (table.ndim - 1))
        mean = jnp.where(rows < old, table, 0).sum(0, keepdims=True) / old
        return jnp.where((rows >= old) & (rows < vocab_size), mean, table)

    return jax.tree.map(
        lambda leaf, array: filled(array) if leaf.dims[0] == VOCAB else array, stored.leaves, params
    )


def _read_ahead(
    pool: ThreadPoolExecutor,
    tensors: Mapping[str, TensorLike],
    todo: "list[tuple[_Filled, Box]]",
) -> "Iterator[tuple[_Filled, Box, np.ndarray]]":
    """The values of boxes in their order, while the next ones are being read."""
    waiting: deque[tuple[_Filled, Box, Future[np.ndarray]]] = deque()
    try:
        for leaf, box in todo:
            waiting.append((leaf, box, pool.submit(finite_block, leaf.source, tensors, box)))
            if len(waiting) > NUM_READERS:
                done_leaf, done_box, future = waiting.popleft()
                yield done_leaf, done_box, future.result()
        while waiting:
            done_leaf, done_box, future = waiting.popleft()
            yield done_leaf, done_box, future.result()
    finally:
        for *_, future in waiting:
            future.cancel()


@dataclass(frozen=True, eq=False)
class _Filled:
    """A parameter that is being filled on this process's devices."""

    source: LeafSource
    sharding: NamedSharding
    codes: Any = None
    """Shape, dtype and sharding of the codes that it becomes when it is full; None: it stays."""
    shards: dict[Any, Array] = field(default_factory=dict)
    """What each device has so far."""

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        return self.source.array

    def boxes(self) -> Iterator[Box]:
        """Parts that together hold what this process's devices need."""
        own = list(self._bounds.values())
        around = tuple(
            slice(min(each.start for each in ranges), max(each.stop for each in ranges))
            for ranges in zip(*own, strict=True)
        )
        most = BOX_BYTES // self.like.dtype.itemsize
        for box in split(around, self.source.file_order, most):
            if any(_common(box, bounds) for bounds in own):
                yield box

    def bytes_of(self, box: Box) -> int:
        """Bytes of a box."""
        return prod(sizes(box)) * self.like.dtype.itemsize

    def fill(self, box: Box, values: np.ndarray) -> None:
        """Put the values of a box into the shards that have a part in it."""
        for device, bounds in self._bounds.items():
            if (common := _common(box, bounds)) is None:
                continue
            part = jax.device_put(np.ascontiguousarray(values[_within(common, box)]), device)
            if common == bounds:
                self.shards[device] = part
                continue
            shard = self.shards.get(device)
            if shard is None:
                shard = zeros_on(device, sizes(bounds), self.like.dtype)
            start = [np.int32(each.start) for each in _within(common, bounds)]
            self.shards[device] = _updated(shard, part, start)
        # Boxes that wait to be copied would pile up in memory.
        jax.block_until_ready(list(self.shards.values()))

    def finished(self) -> Any:
        """The parameter, or its codes, when all boxes are filled; called once."""
        array = jax.make_array_from_single_device_arrays(
            self.like.shape,
            self.sharding,
            [self.shards.pop(device) for device in self._bounds],
            dtype=self.like.dtype,
        )
        if self.codes is None:
            return array
        return encoded_on_mesh(array, self.source.leaf, self.codes)

    @property
    def _bounds(self) -> dict[Any, Box]:
        """The part of each of this process's devices."""
        return {
            device: tuple(
                slice(*each.indices(size)[:2])
                for each, size in zip(index, self.like.shape, strict=True)
            )
            for device, index in self.sharding.addressable_devices_indices_map(
                self.like.shape
            ).items()
            if index is not None  # JAX's type allows it
        }


@partial(jax.jit, donate_argnums=0)
def _updated(shard: Array, part: Array, start: list[Array]) -> Array:
    return lax.dynamic_update_slice(shard, part, start)


def _common(box: Box, other: Box) -> Box | None:
    """What two boxes have in common; None: nothing."""
    common = tuple(
        slice(max(one.start, two.start), min(one.stop, two.stop))
        for one, two in zip(box, other, strict=True)
    )
    return common if all(each.start < each.stop for each in common) else None


def _within(box: Box, outer: Box) -> Box:
    """A box, counted from the corner of another one."""
    return tuple(
        slice(each.start - side.start, each.stop - side.start)
        for each, side in zip(box, outer, strict=True)
    )
