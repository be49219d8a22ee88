"""The mesh axes and their sizes: the value of `--mesh`.

A *mesh axis* is a dimension of the device grid. `mesh/rules.py` says which array dimensions are
split over it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from optimus_jax.config.aliases import AXIS_OF
from optimus_jax.config.settings import shown
from optimus_jax.errors import ConfigError, PlanError, explain, nearest

PIPE, DATA, FSDP, TENSOR = "pipe", "data", "fsdp", "tensor"
"""The axes that the package's rules and programs name."""
MOST_DIGITS = 9
"""Most digits of an axis size. A longer one is a typo, and Python refuses to convert thousands of
digits."""


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Devices along each mesh axis.

    The fields are the table of mesh axes, ordered from slow to fast links: neighbours along
    `tensor` communicate most and belong on one host. A new axis is a field here, and a rule in
    `mesh/rules.py` for what it may split.
    """

    pipe: int = 1
    """Pipeline stages: each holds a part of the layers."""
    data: int = 1
    """Replicas of the state: each has a part of the batch."""
    fsdp: int = 1
    """Shards of the state: each also has a part of the batch."""
    tensor: int = 1
    """Parts of every layer: heads, hidden width and vocabulary."""

    def __post_init__(self) -> None:
        for name in MESH_AXES:
            if (size := self[name]) < 1:
                raise PlanError(
                    explain(
                        f"mesh axis {name!r} needs at least one device",
                        given=f"{name}={size}",
                        do=f"set {name}=1 or more",
                    )
                )

    @property
    def num_devices(self) -> int:
        """Product of all sizes."""
        return math.prod(self[name] for name in MESH_AXES)

    def __getitem__(self, axis: str) -> int:
        return getattr(self, axis)

    def __str__(self) -> str:
        return ",".join(f"{name}={self[name]}" for name in MESH_AXES if self[name] > 1) or "data=1"

    @classmethod
    def parse(cls, text: str) -> "AxisSizes":
        """From `data=2,tensor=4`; axes left out have size 1. Raises PlanError."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (piece.strip() for piece in part.partition("="))
            if name not in MESH_AXES:
                raise PlanError(
                    explain(
                        f"unknown mesh axis {name!r}",
                        given=f"--mesh {text}",
                        do=f"write {AXIS_OF[name.lower()]}={size or 'N'}"
                        if name.lower() in AXIS_OF
                        else nearest(name, MESH_AXES),
                    )
                )
            if name in sizes or not size.isdecimal() or len(size) > MOST_DIGITS:
                raise PlanError(
                    explain(
                        f"mesh axis {name!r} needs one whole number",
                        given=f"--mesh {text}",
                        do=f"write each axis once, such as {name}=2",
                    )
                )
            sizes[name] = int(size)
        return cls(**sizes)


MESH_AXES = tuple(field.name for field in fields(AxisSizes))
"""Names of all mesh axes, in their order."""


def mesh_text(mesh: object) -> str:
    """A mesh as `--mesh` takes it: that text, AxisSizes, or a dict of sizes by axis.

    Raises ConfigError for anything else, such as a Mesh of JAX.
    """
    if isinstance(mesh, str):
        return mesh
    if isinstance(mesh, AxisSizes):
        return str(mesh)
    if isinstance(mesh, Mapping) and mesh:
        return ",".join(f"{name}={size}" for name, size in mesh.items())
    is_of_jax = hasattr(mesh, "axis_names")
    raise ConfigError(
        explain(
            "a mesh is given by the sizes of its axes"
            + (": a run makes the Mesh of JAX itself" if is_of_jax else ""),
            given=f"mesh={shown(mesh, quoted=True)} ({type(mesh).__name__})",
            do='give "auto", "data=2,fsdp=4", {"data": 2, "fsdp": 4}, or'
            f" AxisSizes(data=2, fsdp=4); axes: {', '.join(MESH_AXES)}",
        )
    )


def check_devices(axes: AxisSizes, num_devices: int) -> None:
    """Raise PlanError unless the mesh uses exactly the available devices."""
    if axes.num_devices != num_devices:
        raise PlanError(
            explain(
                f"the mesh needs {axes.num_devices} devices; this run has {num_devices}",
                given=f"--mesh {axes}",
                do=f"choose axis sizes whose product is {num_devices}",
            )
        )
