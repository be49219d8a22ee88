"""Pictures of which device holds which shard of which tensor under a plan.

Devices that hold the same shard of a tensor are *replicas* of each other. Shards are read from the
real `NamedSharding` (`devices_indices_map`), not from the rules that produced it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import BATCH, LAYERS
from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.mesh.sharding import batch_spec, layouts_of
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.plan import Plan
from optimus_jax.training.state import planned_shapes
from optimus_jax.viz.canvas import HUES, INK, ink_on, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TensorKind = Literal["parameters", "moments"]
"""The model's weights, or one of the optimizer's moments."""
ShardIndex = tuple[tuple[int, int], ...]
"""(start, stop) of a shard along each dimension."""


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A tensor and its sharding."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dims: tuple[str, ...]
    """Logical axis of each dimension; for a batch the names of its own dimensions."""
    itemsize: int
    """Bytes per element."""
    mesh: Mesh
    spec: PartitionSpec
    """Mesh axes that split each dimension."""
    layers: tuple[int, ...] = ()
    """Layer in each slot of the dimension `layers`; EMPTY for an empty slot."""

    @cached_property
    def shards(self) -> dict[int, ShardIndex]:
        """Index of a device in the flattened mesh -> its shard."""
        slices = NamedSharding(self.mesh, self.spec).devices_indices_map(self.shape)
        return {
            index: tuple(
                along_dim.indices(size)[:2]
                for along_dim, size in zip(slices[device], self.shape, strict=True)
            )
            for index, device in enumerate(self.mesh.devices.flat)
        }

    def num_bytes(self, shard: ShardIndex) -> int:
        """Bytes of a shard."""
        return math.prod(stop - start for start, stop in shard) * self.itemsize

    @cached_property
    def split_dims(self) -> list[int]:
        """Dimensions that are split across devices."""
        return [
            dim
            for dim, size in enumerate(self.shape)
            if any(shard[dim] != (0, size) for shard in self.shards.values())
        ]

    def describe(self, shard: ShardIndex, dim: int) -> str:
        """A shard along one dimension, as text: the numbers of its layers, otherwise start:stop."""
        start, stop = shard[dim]
        if self.dims[dim] == LAYERS:
            held = [layer for layer in self.layers[start:stop] if layer != EMPTY]
            return f"{LAYERS} {_ranges(held)}" + (" + an empty slot" * (stop - start - len(held)))
        return f"{self.dims[dim]} {start}:{stop}"


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges: 0, 1, 2, 5 is `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def model_tensors(
    model: ModelConfig, plan: Plan, mesh: Mesh, kind: TensorKind = "parameters"
) -> list[ShardedTensor]:
    """All parameters of a model, or one optimizer moment of each; largest first."""
    shapes = planned_shapes(model, plan)
    layouts: list[LeafLayout] = jax.tree.leaves(
        layouts_of(shapes.leaves, plan.active_rules(model), plan.zero)
    )
    leaves = jax.tree_util.tree_leaves_with_path(shapes.params)
    tensors = [
        ShardedTensor(
            name=leaf_path(path),
            shape=leaf.shape,
            dims=layout.leaf.dims,
            itemsize=leaf.dtype.itemsize if kind == "parameters" else plan.moment_bytes,
            layers=shapes.slots,
            mesh=mesh,
            spec=layout.param_spec,
        )
        for (path, leaf), layout in zip(leaves, layouts, strict=True)
    ]
    return sorted(tensors, key=lambda tensor: -math.prod(tensor.shape))


def batch_tensor(
    model: ModelConfig, plan: Plan, mesh: Mesh, *, global_batch: int, seq_len: int
) -> ShardedTensor:
    """The tokens of one step's global batch."""
    return ShardedTensor(
        name="tokens of a batch",
        shape=(global_batch, seq_len),
        dims=(BATCH, "length"),
        itemsize=jnp.dtype(jnp.int32).itemsize,
        mesh=mesh,
        spec=batch_spec(plan.active_rules(model)),
    )


def device_table(tensors: Sequence[ShardedTensor], device: int) -> str:
    """The shards of one device as a Markdown table.

    Args:
      device: index in the flattened mesh.
    """
    lines = [
        f"| tensor | whole | device {device} holds | bytes | also held by |",
        "|---|---|---|---:|---|",
    ]
    total = 0
    for tensor in tensors:
        shards = tensor.shards
        shard, split = shards[device], tensor.split_dims
        replicas = [str(other) for other in shards if other != device and shards[other] == shard]
        total += tensor.num_bytes(shard)
        lines.append(
            f"| {tensor.name} | {_shape(tensor)} |"
            f" {'; '.join(tensor.describe(shard, dim) for dim in split) or 'all of it'} |"
            f" {tensor.num_bytes(shard):,} | {_ranges(list(map(int, replicas))) or 'nobody'} |"
        )
    return "\n".join([*lines, f"| **all** | | | **{total:,}** | |"]) + "\n"


def _shape(tensor: ShardedTensor) -> str:
    return " x ".join(
        f"{name} {size}" for name, size in zip(tensor.dims, tensor.shape, strict=True)
    )


def draw_mesh(mesh: Mesh) -> "Figure":
    """The devices as a grid: the first half of the mesh axes vertical, the second half
    horizontal."""
    sizes = dict(mesh.shape)
    names = list(sizes)
    down, across = names[: len(names) // 2], names[len(names) // 2 :]
    rows, columns = (math.prod(sizes[name] for name in group) for group in (down, across))
    figure, (axes,) = new_figure(2 + 1.6 * columns, 1 + 0.9 * rows)
    for device, coordinates in enumerate(
        itertools.product(*(range(sizes[name]) for name in names))
    ):
        row, column = divmod(device, columns)
        where = "\n".join(
            f"{name} {index}"
            for name, index in zip(names, coordinates, strict=True)
            if sizes[name] > 1
        )
        _cell(axes, column, row, f"device {device}\n{where}", HUES[device % len(HUES)])
    _frame(
        axes,
        rows,
        columns,
        f"{mesh.size} devices: "
        + ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1),
    )
    axes.set_xlabel(" x ".join(name for name in across if sizes[name] > 1))
    axes.set_ylabel(" x ".join(name for name in down if sizes[name] > 1))
    return figure


def draw_tensors(tensors: Sequence[ShardedTensor]) -> "Figure":
    """The shards of each tensor, one cell per shard with the devices that hold it; not to scale.

    Dimensions that are not split are not drawn. The last split dimension is horizontal, the others
    are vertical.
    """
    columns = 2
    rows = math.ceil(len(tensors) / columns)
    heights = [math.prod(_counts(tensor)[:-1]) for tensor in tensors]
    figure, panels = new_figure(
        5.5 * columns, rows * (1.1 + 0.55 * max(heights)), rows=rows, columns=columns
    )
    for axes, tensor in zip(panels, tensors, strict=False):
        _draw_tensor(axes, tensor)
    for axes in panels[len(tensors) :]:
        axes.set_axis_off()
    return figure


def _counts(tensor: ShardedTensor) -> list[int]:
    """Number of shards along each split dimension; [1] if none is split."""
    shards = tensor.shards.values()
    return [len({shard[dim] for shard in shards}) for dim in tensor.split_dims] or [1]


def _draw_tensor(axes: "Axes", tensor: ShardedTensor) -> None:
    split, shards = tensor.split_dims, tensor.shards
    distinct = sorted(set(shards.values()))
    columns = _counts(tensor)[-1]
    for number, shard in enumerate(distinct):
        holders = [device for device, other in shards.items() if other == shard]
        _cell(
            axes,
            number % columns,
            number // columns,
            f"{'devices' if len(holders) > 1 else 'device'} {_ranges(holders)}",
            HUES[holders[0] % len(HUES)],
        )
    rows = len(distinct) // columns
    spec = ", ".join(
        "+".join(entry) if isinstance(entry, tuple) else entry or "-" for entry in tensor.spec
    )
    _frame(
        axes,
        rows,
        columns,
        f"{tensor.name}: {tensor.num_bytes(distinct[0]) / 2**10:,.4g} KiB on a"
        f" device\n{_shape(tensor)}",
    )
    axes.set_xlabel(
        f"split over mesh axes ({spec})" if split else "whole on every device", fontsize=8
    )
    if split:
        axes.set_xticks(
            [column + 0.5 for column in range(columns)],
            [
                tensor.describe(distinct[column], split[-1]).replace(" ", "\n", 1)
                for column in range(columns)
            ],
            fontsize=8,
        )
        axes.set_yticks(
            [row + 0.5 for row in range(rows)],
            [
                "\n".join(tensor.describe(distinct[row * columns], dim) for dim in split[:-1])
                for row in range(rows)
            ],
            fontsize=8,
        )


def _cell(axes: "Axes", column: int, row: int, text: str, colour: str) -> None:
    axes.fill_between(
        [column + 0.03, column + 0.97], row + 0.05, row + 0.95, color=colour, linewidth=0
    )
    axes.text(
        column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, color=ink_on(colour)
    )


def _frame(axes: "Axes", rows: int, columns: int, title: str) -> None:
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[])
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
