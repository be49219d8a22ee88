"""`show_mesh`: a layout as text or HTML, without training and without its devices.

It shows the grid of devices, the devices and hosts that each mesh axis connects, and how every
parameter of the model is sharded.
"""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.config.request import dotted, make_config
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.mesh.sharding import layouts_of
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.api import config_for
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.system.paths import UserPath
from optimus_jax.training.state import planned_shapes
from optimus_jax.weights.published import checked_model
from optimus_jax.weights.published_adapters import model_with_adapters


@dataclass(frozen=True, kw_only=True)
class MeshView:
    """A layout to look at: `print` it, or make it the last line of a notebook's cell."""

    title: str
    grid: tuple[tuple[str, ...], ...]
    """A header, then a row of devices for each place along the outer axes."""
    axes: tuple[tuple[str, ...], ...]
    """A header, then a row for each mesh axis."""
    parameters: tuple[tuple[str, ...], ...]
    """A header, then a row for each parameter, the largest first."""

    def __str__(self) -> str:
        return "\n\n".join([self.title, *map(_text_table, self._tables)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """HTML for notebooks (IPython calls it)."""
        tables = "\n".join(map(_html_table, self._tables))
        return f"<p><b>{html.escape(self.title)}</b></p>\n{tables}"

    @property
    def _tables(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        return self.grid, self.axes, self.parameters


def show_mesh(
    mesh: str | AxisSizes | Mapping[str, int],
    *,
    model: UserPath | ModelConfig,
    cluster: str | None = None,
    **overrides: Any,
) -> MeshView:
    """How a mesh lays a model out: devices, axes and the sharding of every parameter.

    Nothing is trained or allocated, and the devices need not exist.

    Args:
      mesh: sizes of the axes, such as `data=2,fsdp=4`; or as a dict or AxisSizes.
      model: name of a preset, the directory of a published model, or ORG/NAME on the hub; or a
        ModelConfig.
      cluster: `h100:8x8` (hosts x devices); None: the devices of this process if there are as many
        as the mesh has, else as many on one host.
      overrides: settings as for `train`, such as `zero=1`.
    Raises:
      OptimusError: a name is unknown, or the model cannot be laid out like this.
    """
    settings, named = dotted({"mesh": mesh, **overrides}), checked_model(model)
    described = None if cluster is None else Cluster.parse(cluster)
    config = (
        make_config(model_with_adapters(named), settings)
        if described is None
        else config_for(named, described, settings)
    )
    axes = config.parallel.axes
    if axes is None:
        raise ConfigError(
            explain(
                "show_mesh shows a mesh that you choose",
                given=f"mesh={mesh!r}",
                do="give sizes, such as data=2,fsdp=4; optimus_jax.find_plans chooses",
            )
        )
    topology = _topology_of(axes) if described is None else described.topology()
    plan = plan_for(config, axes, topology)
    plan.validate(
        config.model, global_batch=config.data.global_batch, lengths=config.compiled_lengths
    )
    if topology.num_devices != axes.num_devices:
        raise ConfigError(
            explain(
                f"the mesh has {axes.num_devices} devices, and the cluster {topology.num_devices}",
                given=f"mesh={mesh}, cluster={cluster}",
                do="change one of them",
            )
        )
    return MeshView(
        title=f"{config.model.name} on {topology}: {plan.describe()}",
        grid=_grid(axes, topology),
        axes=_axes(axes, topology),
        parameters=_parameters(config.model, plan),
    )


def _topology_of(axes: AxisSizes) -> Topology:
    """The devices of this run, or as many of their kind as the mesh has, on one host."""
    found = discover()
    if found.num_devices == axes.num_devices:
        return found
    return dataclasses.replace(
        found,
        num_devices=axes.num_devices,
        num_processes=1,
        num_hosts=1,
        process_of=None,
        host_of=None,
    )


def _used(axes: AxisSizes) -> list[str]:
    """Axes with more than one device; of a mesh of one device the last."""
    return [name for name in MESH_AXES if axes[name] > 1] or [MESH_AXES[-1]]


def _grid(axes: AxisSizes, topology: Topology) -> tuple[tuple[str, ...], ...]:
    *outer, inner = _used(axes)
    hosts = topology.host_of or tuple(
        place * (topology.num_hosts or 1) // axes.num_devices for place in range(axes.num_devices)
    )
    rows = [("", *(f"{inner} {index}" for index in range(axes[inner])))]
    for start in range(0, axes.num_devices, axes[inner]):
        places, left = [], start // axes[inner]
        for name in reversed(outer):
            left, index = divmod(left, axes[name])
            places.append(f"{name} {index}")
        devices = range(start, start + axes[inner])
        rows.append(
            (
                ", ".join(reversed(places)),
                *(
                    f"device {device}" + (f" @ host {hosts[device]}" if len(set(hosts)) > 1 else "")
                    for device in devices
                ),
            )
        )
    return tuple(rows)


def _axes(axes: AxisSizes, topology: Topology) -> tuple[tuple[str, ...], ...]:
    crossed, rows, stride = topology.crossed(axes), [], axes.num_devices
    for name in MESH_AXES:
        stride //= axes[name]
        if name in _used(axes):
            group = ", ".join(str(index * stride) for index in range(axes[name]))
            where = f"crosses {crossed[name]}" if name in crossed else "inside a process"
            rows.append((name, str(axes[name]), group, where))
    return (("axis", "size", "devices of the first group", "links"), *rows)


def _parameters(model: ModelConfig, plan: Plan) -> tuple[tuple[str, ...], ...]:
    shapes = planned_shapes(model, plan)
    layouts = jax.tree.leaves(layouts_of(shapes.leaves, plan.active_rules(model), plan.zero))
    leaves = jax.tree_util.tree_leaves_with_path(shapes.params)
    rows = []
    for (path, leaf), layout in sorted(
        zip(leaves, layouts, strict=True), key=lambda each: -each[0][1].size
    ):
        split = layout.axes(split=layout.is_stored_split)
        parts = math.prod(plan.axes[name] for names in split for name in names)
        rows.append(
            (
                leaf_path(path),
                " x ".join(
                    f"{name} {size}"
                    for name, size in zip(layout.leaf.dims, leaf.shape, strict=True)
                ),
                ", ".join(
                    f"{dim} over {'+'.join(used)}"
                    for dim, names in zip(layout.leaf.dims, split, strict=True)
                    if (used := [name for name in names if plan.axes[name] > 1])
                )
                or "whole on every device",
                f"{leaf.size * leaf.dtype.itemsize / parts / 2**20:,.2f} MiB",
            )
        )
    return (("parameter", "shape", "sharding", "on a device"), *rows)


def _text_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    def line(row: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>"

    header, *body = rows
    return "\n".join(
        ["<table>", line(header, "th"), *(line(row, "td") for row in body), "</table>"]
    )
