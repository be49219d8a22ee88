"""Which device holds which part of which tensor, as the shardings of a plan have it.

A *part* is what one device holds of a tensor; devices that hold the same part are *replicas* of
each other. What is drawn is asked of the real shardings (`devices_indices_map`), not of the rules
behind them.
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
from optimus_jax.mesh.sharding import batch_spec, layouts_of
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.plan import Plan
from optimus_jax.training.state import planned_shapes
from optimus_jax.viz.canvas import HUES, INK, ink_on, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kept = Literal["parameters", "moments"]
"""What of a model: its weights, or either of the optimizer's moments."""
Part = tuple[tuple[int, int], ...]
"""Of every dimension, where a device's part begins and where it ends."""


@dataclass(frozen=True, kw_only=True)
class PlacedTensor:
    """A tensor, and where it lies."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    dims: tuple[str, ...]
    """Logical axis of every dimension; those of a batch are its own."""
    itemsize: int
    """Bytes of an element."""
    mesh: Mesh
    spec: PartitionSpec
    """Mesh axes that split each dimension."""
    layers: tuple[int, ...] = ()
    """Layer in each slot of the dimension `layers`, EMPTY for none."""

    @cached_property
    def parts(self) -> dict[int, Part]:
        """What each device holds, by its place in the mesh."""
        indices = NamedSharding(self.mesh, self.spec).devices_indices_map(self.shape)
        return {
            place: tuple(
                piece.indices(size)[:2]
                for piece, size in zip(indices[device], self.shape, strict=True)
            )
            for place, device in enumerate(self.mesh.devices.flat)
        }

    def num_bytes(self, part: Part) -> int:
        """Bytes of a part."""
        return math.prod(stop - start for start, stop in part) * self.itemsize

    @cached_property
    def split_dims(self) -> list[int]:
        """Dimensions of which no device has all."""
        return [
            dim
            for dim, size in enumerate(self.shape)
            if any(part[dim] != (0, size) for part in self.parts.values())
        ]

    def describe(self, part: Part, dim: int) -> str:
        """A part along one dimension, as text: layers by their numbers, all else by where it begins
        and ends.
        """
        start, stop = part[dim]
        if self.dims[dim] == LAYERS:
            held = [layer for layer in self.layers[start:stop] if layer != EMPTY]
            return f"{LAYERS} {_runs(held)}" + (" + an empty slot" * (stop - start - len(held)))
        return f"{self.dims[dim]} {start}:{stop}"


def _runs(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def placed_model(
    model: ModelConfig, plan: Plan, mesh: Mesh, kept: Kept = "parameters"
) -> list[PlacedTensor]:
    """Every parameter of a model, or of a moment of the optimizer; largest first."""
    shapes = planned_shapes(model, plan)
    layouts: list[LeafLayout] = jax.tree.leaves(
        layouts_of(shapes.names, plan.active_rules(model), plan.zero)
    )
    leaves = jax.tree_util.tree_leaves_with_path(shapes.params)
    tensors = [
        PlacedTensor(
            name=jax.tree_util.keystr(path, simple=True, separator="/"),
            shape=leaf.shape,
            dims=layout.names,
            itemsize=4 if kept == "parameters" else plan.moment_bytes,
            layers=shapes.slots,
            mesh=mesh,
            spec=layout.param_spec if kept == "parameters" else layout.moment_spec,
        )
        for (path, leaf), layout in zip(leaves, layouts, strict=True)
    ]
    return sorted(tensors, key=lambda tensor: -math.prod(tensor.shape))


def placed_batch(
    model: ModelConfig, plan: Plan, mesh: Mesh, *, global_batch: int, seq_len: int
) -> PlacedTensor:
    """The tokens of a step."""
    return PlacedTensor(
        name="tokens of a batch",
        shape=(global_batch, seq_len),
        dims=(BATCH, "length"),
        itemsize=jnp.dtype(jnp.int32).itemsize,
        mesh=mesh,
        spec=batch_spec(plan.active_rules(model)),
    )


def holdings(tensors: Sequence[PlacedTensor], device: int) -> str:
    """What one device holds, by its place in the mesh, as a table in Markdown."""
    lines = [
        f"| tensor | whole | device {device} holds | bytes | also held by |",
        "|---|---|---|---:|---|",
    ]
    total = 0
    for tensor in tensors:
        parts = tensor.parts
        part, split = parts[device], tensor.split_dims
        replicas = [str(other) for other in parts if other != device and parts[other] == part]
        total += tensor.num_bytes(part)
        lines.append(
            f"| {tensor.name} | {_shape(tensor)} |"
            f" {'; '.join(tensor.describe(part, dim) for dim in split) or 'all of it'} |"
            f" {tensor.num_bytes(part):,} | {_runs(list(map(int, replicas))) or 'nobody'} |"
        )
    return "\n".join([*lines, f"| **all** | | | **{total:,}** | |"]) + "\n"


def _shape(tensor: PlacedTensor) -> str:
    return " x ".join(
        f"{name} {size}" for name, size in zip(tensor.dims, tensor.shape, strict=True)
    )


def draw_mesh(mesh: Mesh) -> "Figure":
    """The devices as a grid: axes between hosts down, axes inside a layer across."""
    sizes = dict(mesh.shape)
    names = list(sizes)
    down, across = names[: len(names) // 2], names[len(names) // 2 :]
    rows, columns = (math.prod(sizes[name] for name in part) for part in (down, across))
    figure, (axes,) = new_figure(2 + 1.6 * columns, 1 + 0.9 * rows)
    for place, coordinates in enumerate(itertools.product(*(range(sizes[name]) for name in names))):
        row, column = divmod(place, columns)
        where = "\n".join(
            f"{name} {index}"
            for name, index in zip(names, coordinates, strict=True)
            if sizes[name] > 1
        )
        _cell(axes, column, row, f"device {place}\n{where}", HUES[place % len(HUES)])
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


def draw_tensors(tensors: Sequence[PlacedTensor], *, columns: int = 2) -> "Figure":
    """The parts of each tensor, a cell for each, with the devices that hold it; sizes are not to
    scale.

    A dimension that is not split is not drawn. The last one that is goes across, the others down.
    """
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


def _counts(tensor: PlacedTensor) -> list[int]:
    """Parts along each dimension that is split, at least one number."""
    parts = tensor.parts.values()
    return [len({part[dim] for part in parts}) for dim in tensor.split_dims] or [1]


def _draw_tensor(axes: "Axes", tensor: PlacedTensor) -> None:
    split, parts = tensor.split_dims, tensor.parts
    distinct = sorted(set(parts.values()))
    columns = _counts(tensor)[-1]
    for number, part in enumerate(distinct):
        holders = [place for place, other in parts.items() if other == part]
        _cell(
            axes,
            number % columns,
            number // columns,
            f"{'devices' if len(holders) > 1 else 'device'} {_runs(holders)}",
            HUES[holders[0] % len(HUES)],
        )
    rows = len(distinct) // columns
    spec = ", ".join(
        "+".join(part) if isinstance(part, tuple) else part or "-" for part in tensor.spec
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
            [tensor.describe(distinct[c], split[-1]).replace(" ", "\n", 1) for c in range(columns)],
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
