"""What `jax.vjp` saves from forward to backward, as arrays that loops and buffers can hold.

`jax.vjp` returns a closure, which is a pytree. Its leaves are taken apart after forward, and put
together again for backward. Leaves that backward has anyway, such as parameters, are not saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class ClosureParts:
    """Where every leaf of a closure comes from; the same in each trace of one function."""

    structure: Any
    leaves: tuple["_GivenLeaf | _SavedLeaf", ...]

    @classmethod
    def of(cls, pull: Callable, given: Sequence[Array]) -> tuple["ClosureParts", list[Array]]:
        """The parts of a closure, and the arrays to save. Random keys are saved as integers.

        Args:
          given: arrays that backward has; leaves that are the same objects are not saved.
        """
        leaves, structure = jax.tree.flatten(pull)
        places = {id(array): place for place, array in enumerate(given)}
        saved: dict[int, Array] = {}
        parts: list[_GivenLeaf | _SavedLeaf] = []
        for leaf in leaves:
            if id(leaf) in places:
                parts.append(_GivenLeaf(places[id(leaf)]))
                continue
            saved.setdefault(id(leaf), leaf)
            impl = jax.random.key_impl(leaf) if _is_key(leaf) else None
            parts.append(_SavedLeaf(list(saved).index(id(leaf)), impl))
        return cls(structure, tuple(parts)), [
            jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in saved.values()
        ]

    def closure(self, given: Sequence[Array], saved: Sequence[Array]) -> Callable:
        """The closure again."""
        leaves = [
            given[part.place]
            if isinstance(part, _GivenLeaf)
            else saved[part.place]
            if part.key_impl is None
            else jax.random.wrap_key_data(saved[part.place], impl=part.key_impl)
            for part in self.leaves
        ]
        return jax.tree.unflatten(self.structure, leaves)


@dataclass(frozen=True)
class _GivenLeaf:
    """A leaf that backward has."""

    place: int


@dataclass(frozen=True)
class _SavedLeaf:
    """A leaf that is saved."""

    place: int
    key_impl: Any


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
