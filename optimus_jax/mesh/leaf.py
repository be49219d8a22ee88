"""The leaf table: what each parameter of a model is.

A module says it where it makes the parameter (models/layers.py), and nothing else does: which
dimension fsdp splits, over which devices a gradient is summed, what decays and what may be padded
follow from the row (mesh/zero.py, training/optimizer.py), as does the orientation in which Hugging
Face stores a matrix (models/huggingface_tensors.py). Whether a leaf is trained follows from its
group and the settings of the run. A *frozen* leaf has no gradient and no moments.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from flax import nnx

from optimus_jax.config.tuning import ParameterGroup
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.axes import EMBED, LAYERS, VOCAB

Role = Literal["matrix", "matrix_back", "table", "scale", "bias"]
"""What a parameter does: multiplies rows of the residual stream (`project`), or leads back to it
(`project_back`), which stores the width of the result first; is looked up by rows; scales; is
added."""
MATRICES: tuple[Role, ...] = ("matrix", "matrix_back", "table")
"""Roles of parameters that weight decay concerns, and whose storage fsdp may split."""
PADDED = (VOCAB, LAYERS)
"""Logical axes whose size depends on the plan: they may end in zeros that are no parameters."""


def leaf_path(path: tuple[Any, ...]) -> str:
    """The name of a leaf of a tree, by the path that `jax.tree_util` has for it, such as
    `params/layers/attention/query`.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclass(frozen=True)
class Leaf:
    """One parameter: a row of the leaf table (`ModelShapes.leaves`)."""

    dims: tuple[str, ...]
    """Logical axis of every dimension."""
    role: Role
    group: ParameterGroup
    """The part of the model to which it belongs."""
    used_over: tuple[str, ...] = ()
    """Logical axes over whose devices it is used on different values, besides batch and length:
    each such device has one part of its gradient, unless the axis splits the leaf itself."""
    trained: bool = True
    """Whether it is trained (`Tuning.trains`); of a stack, whether any layer is."""
    values: int = 1
    """Values of the model that an element stands for: 2 in codes of 4 bits, 0 in scales of codes
    (mesh/quantised.py)."""

    @classmethod
    def of(cls, variable: nnx.Variable) -> "Leaf":
        """The row of a module's parameter. Raises ConfigError if it was not made as others are."""
        metadata = variable.get_metadata()
        if "role" not in metadata:
            raise ConfigError(
                explain(
                    "a parameter does not say what it is and which logical axes it has",
                    given=f"{type(variable).__name__} of shape {tuple(variable.shape)}",
                    do="make it with normal or constant of optimus_jax.models.layers",
                )
            )
        return cls(
            tuple(metadata["out_sharding"]),
            metadata["role"],
            metadata["group"],
            metadata["used_over"],
            metadata["trained"],
            metadata["values"],
        )

    def variable(self, value: jax.Array) -> nnx.Param:
        """A module's parameter with this row."""
        return nnx.Param(
            value,
            out_sharding=self.dims,
            role=self.role,
            group=self.group,
            used_over=self.used_over,
            trained=self.trained,
            values=self.values,
        )

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix or a table."""
        return self.role in MATRICES

    @property
    def is_in_layers(self) -> bool:
        """Whether it is a stack with one part for each layer."""
        return self.dims[0] == LAYERS

    @property
    def stored_dim(self) -> int | None:
        """The dimension whose storage fsdp may split: the outermost one of a matrix, or the rows of
        a table over the vocabulary, which are padded to any number of shards. None: fsdp does not
        split it, such as a matrix without the width of the residual stream.
        """
        if not self.is_matrix:
            return None
        stored = VOCAB if VOCAB in self.dims else EMBED
        return self.dims.index(stored) if stored in self.dims else None

    @property
    def may_be_padded(self) -> bool:
        """Whether it may end in zeros, whose number depends on the plan."""
        return any(dim in PADDED for dim in self.dims)

    def last(self, ndim: int) -> "Leaf":
        """Its last `ndim` dimensions: those of one layer of a stack."""
        return replace(self, dims=self.dims[len(self.dims) - ndim :])


def trained_of(leaves: Any, tree: Any) -> Any:
    """The trained leaves of a tree, with None in the place of frozen ones.

    Args:
      leaves: the Leaf of every leaf of `tree`.
    """
    return jax.tree.map(lambda leaf, value: value if leaf.trained else None, leaves, tree)


def with_trained(trained: Any, tree: Any) -> Any:
    """`tree` with other values of its trained leaves, given as `trained_of` returns them."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, trained, tree, is_leaf=lambda new: new is None
    )
