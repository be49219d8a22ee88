"""The output head: from hidden states to logits."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Head(NamedTuple):
    """The output head of a model, or a device's part of it."""

    matrix_VE: Array
    bias_V: Array | None = None
    softcap: float = 0.0
    """Logits l become c tanh(l / c); 0: no cap."""

    def finished(self, products: Array) -> Array:
        """Logits, [..., V], of hidden states' products with the matrix."""
        logits = products
        if self.bias_V is not None:
            logits = products + self.bias_V[(None,) * (products.ndim - 1)]
        return jnp.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
