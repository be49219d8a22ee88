"""Sums over tokens, of which each device has a share.

Whether the shares of two devices are added is known from the type of the sum: along a mesh axis
over which it varies, they are; along the others all devices have computed the same. So a sum of the
residual stream is right whether or not its tokens are split. After a value was fanned out, its type
varies although all devices have it whole: a sum of it must be of the device's own heads, hidden
units or tokens.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax import Array, lax

from optimus_jax.mesh.zero import varying_axes

Sums = dict[str, Array]
"""Float32 arrays by name, most of them scalars."""


def added_shares(sums: Any, *, apart: Collection[str]) -> Any:
    """A tree of sums, each with the shares of all devices added, but not along the axes `apart`.

    Differentiable: each device gets the gradient of its share.
    """

    def added(share: Array) -> Array:
        axes = tuple(sorted(varying_axes(share) - set(apart)))
        return lax.psum(share, axes) if axes else share

    return jax.tree.map(added, sums)
