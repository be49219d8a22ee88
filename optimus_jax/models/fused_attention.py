"""The core of attention by cuDNN's fused kernel, and a stand-in that is traced without cuDNN.

The stand-in computes nothing and saves what cuDNN's kernel saves. Its two directions are named
calls in a traced program, and `fused_call` says what a call of that name computes.

Shapes: B batch, L length, H query heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

MASKED = -1e30
"""Score of a key that a query may not see: exp() of it is zero in every format, without NaN."""


class FusedCall(NamedTuple):
    """One direction of a fused kernel."""

    num_products: int
    """Matrix products that it computes."""
    causal: bool
    """Whether keys after a query are hidden from it, and skipped."""
    window: int | None
    """Keys that a query sees, its own included; None: all that are not hidden. The others are
    skipped."""

    def num_pairs(self, length: int, num_keys: int) -> float:
        """Pairs of query and key for which it computes the products, in one sequence."""
        return causal_pairs(length, self.window) if self.causal else length * num_keys


def causal_pairs(length: int, window: int | None = None) -> float:
    """Pairs of a query and a key that is not after it, in one sequence.

    Args:
      window: count the nearest so many keys of each query, its own included; None: all.
    """
    hidden = 0 if window is None else max(0, length - window)
    return length**2 / 2 - hidden**2 / 2


def cudnn_attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    mask: Array | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    is_traced_only: bool,
) -> Array:
    """Attention, [B, L, H, K]; all arrays have one 16-bit format.

    Args:
      mask: bool [B or 1, 1, L, L], which keys each query sees; None: all, or those not after it.
      causal: whether keys after a query are hidden from it.
      window: keys that a query sees, its own included; None: all. Not together with a mask: cuDNN
        before 9.10.2 refuses both.
      is_traced_only: whether to use the stand-in.
    """
    assert mask is None or window is None, "a mask contains the window"
    if is_traced_only:
        bias = None if mask is None else jnp.where(mask, 0, MASKED).astype(q_BLHK.dtype)
        return _traced(_Hidden(causal, window), q_BLHK, k_BLGK, v_BLGK, bias)
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BLGK,
        v_BLGK,
        mask=mask,
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


class _Hidden(NamedTuple):
    """Which keys are hidden from a query, as in `FusedCall`."""

    causal: bool
    window: int | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced(
    hidden: _Hidden, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, bias: Array | None
) -> Array:
    return _forward(hidden, q_BLHK, k_BLGK, v_BLGK, bias)[0]


def _forward(
    hidden: _Hidden, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, bias: Array | None
) -> tuple[Array, tuple]:
    """cuDNN saves a float32 for every query and head, from which backward computes the weights
    again (arXiv:2205.14135).
    """
    out_BLHK, statistics_BHL = _call(_forward_arrays, FORWARD_PRODUCTS, hidden)(
        q_BLHK, k_BLGK, v_BLGK
    )
    return out_BLHK, (q_BLHK, k_BLGK, v_BLGK, bias, statistics_BHL, out_BLHK)


def _backward(hidden: _Hidden, saved: tuple, d_out_BLHK: Array) -> tuple:
    q_BLHK, k_BLGK, v_BLGK, bias, statistics_BHL, out_BLHK = saved
    gradients = _call(_backward_arrays, BACKWARD_PRODUCTS, hidden)(
        q_BLHK, k_BLGK, v_BLGK, statistics_BHL, out_BLHK, d_out_BLHK
    )
    return *gradients, None if bias is None else jnp.zeros_like(bias)


_traced.defvjp(_forward, _backward)


def _forward_arrays(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array) -> tuple[Array, Array]:
    # Both directions use all that the kernel does, so that no part of it is taken for unused.
    out_BLHK = q_BLHK + k_BLGK.sum() + v_BLGK.sum()
    return out_BLHK, out_BLHK[..., 0].transpose(0, 2, 1).astype(jnp.float32)


def _backward_arrays(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    statistics_BHL: Array,
    out_BLHK: Array,
    d_out_BLHK: Array,
) -> tuple[Array, Array, Array]:
    used = statistics_BHL.sum().astype(q_BLHK.dtype) + out_BLHK.sum()
    return (q_BLHK + used) * d_out_BLHK, k_BLGK + k_BLGK, v_BLGK + v_BLGK


FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products of the kernel: queries with keys, and weights with values. Backward computes
queries with keys again, since no attention weights are saved (arXiv:2205.14135, algorithm 4)."""
_calls: dict[str, FusedCall] = {}


def fused_call(name: str | None) -> FusedCall | None:
    """The direction of the fused kernel that a call of this name stands for; None: it is none."""
    return _calls.get(name or "")


@lru_cache
def _call(arrays: Callable, num_products: int, hidden: _Hidden) -> Callable:
    """`arrays` as a call that a traced program names."""
    name = f"fused_attention{arrays.__name__}" + ("" if hidden.causal else "_of_all")
    name += "" if hidden.window is None else f"_window_{hidden.window}"
    _calls[name] = FusedCall(num_products, *hidden)

    def called(*inputs: Array) -> tuple[Array, ...]:
        return arrays(*inputs)

    called.__name__ = name
    return jax.jit(called)
