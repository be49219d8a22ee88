"""The leaf table: what each parameter of a model is.

A module says it where it makes the parameter (models/layers.py), and nothing else does: which
dimension fsdp splits, over which devices a gradient is summed, what decays and what may be padded
follow from the row (mesh/zero.py, training/optimizer.py), as does the orientation in which Hugging
Face stores a matrix (models/huggingface_tensors.py).
"""

from dataclasses import dataclass, replace
from typing import Literal

from flax import nnx

from optimus_jax.mesh.axes import EMBED, LAYERS, VOCAB

Role = Literal["matrix", "matrix_back", "table", "scale", "bias"]
"""What a parameter does: multiplies rows of the residual stream (`project`), or leads back to it
(`project_back`), which stores the width of the result first; is looked up by rows; scales; is
added."""
MATRICES: tuple[Role, ...] = ("matrix", "matrix_back", "table")
"""Roles of parameters that weight decay concerns, and whose storage fsdp may split."""
PADDED = (VOCAB, LAYERS)
"""Logical axes whose size depends on the plan: they may end in zeros that are no parameters."""


@dataclass(frozen=True)
class Leaf:
    """One parameter: a row of the leaf table (`ModelShapes.leaves`)."""

    dims: tuple[str, ...]
    """Logical axis of every dimension."""
    role: Role
    used_over: tuple[str, ...] = ()
    """Logical axes over whose devices it is used on different values, besides batch and length:
    each such device has one part of its gradient, unless the axis splits the leaf itself."""

    @classmethod
    def of(cls, variable: nnx.Variable) -> "Leaf":
        """The row of a module's parameter."""
        metadata = variable.get_metadata()
        return cls(tuple(metadata["out_sharding"]), metadata["role"], metadata["used_over"])

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
        a table over the vocabulary, which are padded to any number of shards."""
        if not self.is_matrix:
            return None
        return self.dims.index(VOCAB if VOCAB in self.dims else EMBED)

    @property
    def may_be_padded(self) -> bool:
        """Whether it may end in zeros, whose number depends on the plan."""
        return any(dim in PADDED for dim in self.dims)

    def last(self, ndim: int) -> "Leaf":
        """Its last `ndim` dimensions: those of one layer of a stack."""
        return replace(self, dims=self.dims[len(self.dims) - ndim :])
