"""Parse the groups of devices that take part in a collective of a compiled program.

XLA writes them in three ways: listed, `{{0,1},{2,3}}`; as an iota, `[2,4]<=[2,2,2]T(0,2,1)`; and
since jax 0.11 by mesh axes, `mesh['data'=2,'fsdp'=4] {'fsdp'}` (openxla/xla:
xla/hlo/ir/replica_group.cc, mesh_and_axis.cc). The numbers are partition numbers: positions in the
program's mesh (mesh order, tensor fastest).
"""

import math
import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
_BY_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'?([\w.-]+)'?=(\d+)")
_AXIS_REFERENCE = re.compile(r"'?([\w.-]+)'?(?::\((\d+)\)(\d+))?")


def groups_of(attributes: str, num_partitions: int) -> Groups:
    """The groups of devices that communicate in a collective; (source, target) pairs for a
    collective-permute.

    Args:
      attributes: the text after the collective's operands.
      num_partitions: partitions of the program. All are in one group if no groups are written
        (`replica_groups={}`).

    Raises:
      ValueError: the groups are written in an unknown form. They are never assumed to be all
        devices.
    """
    if listed := _LISTED.search(attributes):
        written = re.findall(r"\{([\d,]+)\}", listed[1])
        return tuple(tuple(map(int, group.split(","))) for group in written) or (
            tuple(range(num_partitions)),
        )
    if counted := re.search("replica_groups=(" + _COUNTED + ")", attributes):
        return counted_groups(counted[1])
    if by_axes := _BY_AXES.search(attributes):
        return _groups_by_axes(*by_axes.groups())
    if "replica_groups=" in attributes:
        raise ValueError(f"groups of devices in a form that is not known: {attributes[:200]}")
    return (tuple(range(num_partitions)),)


def counted_groups(text: str) -> Groups:
    """The groups that an iota such as `[4,2]<=[2,4]T(1,0)` stands for.

    The numbers 0, 1, ... are reshaped to [2, 4], transposed by (1, 0), and cut into 4 rows of 2.
    """
    return tuple(tuple(row) for row in _counted(text).tolist())


def _counted(text: str) -> NDArray[np.int64]:
    """The device numbers of an iota, in its result shape. If that has two dimensions, each row is a
    group.
    """
    found = re.fullmatch(_COUNTED, text)
    if not found:
        raise ValueError(f"numbers of devices in a form that is not known: {text[:200]}")
    result, shape, order = (
        tuple(map(int, part.split(","))) if part else None for part in found.groups()
    )
    assert result
    assert shape
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(result)


def mesh_sizes(mesh: str) -> dict[str, int]:
    """Axis sizes of a mesh written as `'data'=2,'fsdp'=4`, slowest first."""
    return {name: int(size) for name, size in _AXIS.findall(mesh)}


def parts_of_axes(written: str, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """(axis, number of pieces before the part, size of the part) of each axis in `written`.

    `'fsdp','x':(2)4` means all of fsdp and, with x split into 2 x 4 x rest, the part of size 4.
    """
    return [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _AXIS_REFERENCE.findall(written)
    ]


def _groups_by_axes(mesh: str, device_ids: str | None, members: str) -> Groups:
    """Groups whose members differ along the axes named in `members`."""
    sizes = mesh_sizes(mesh)
    meant = parts_of_axes(members, sizes)
    pieces: list[tuple[str, int, int]] = []
    for axis, size in sizes.items():
        cuts = sorted(
            {1, size}
            | {
                cut
                for name, before, part in meant
                if name == axis
                for cut in (before, before * part)
            }
        )
        pieces += [(axis, before, after // before) for before, after in pairwise(cuts)]
    if not device_ids:
        devices = np.arange(math.prod(sizes.values()))
    elif "<=" in device_ids or "T(" in device_ids:
        devices = _counted(device_ids if "<=" in device_ids else _as_counted(device_ids))
    else:
        devices = np.array([int(number) for number in device_ids.split(",")])
    inside = [pieces.index(part) for part in meant if part[2] > 1]
    outside = [i for i in range(len(pieces)) if i not in inside]
    shaped = devices.reshape([size for _, _, size in pieces]).transpose(outside + inside)
    return tuple(
        tuple(row) for row in shaped.reshape(-1, math.prod(pieces[i][2] for i in inside)).tolist()
    )


def _as_counted(device_ids: str) -> str:
    """Rewrite `[4,16]T(1,0)`, which leaves out the result's shape, as `[64]<=[4,16]T(1,0)`."""
    shape = device_ids[1 : device_ids.index("]")]
    return f"[{math.prod(map(int, shape.split(',')))}]<={device_ids}"
