"""The two matrix products that a layer uses, and their gradients in f16.

The gradients are products too: the gradient of the matrix sums over tokens, that of the rows over
columns. If a mesh axis or microbatches split the summed dimension, each product is only one part of
the sum. In f16 both gradients are returned as float32 (mesh/formats.py). Autodiff of an f16 product
cannot do that, since a gradient has the format of its argument. So in f16 the arguments come in as
float32 and are rounded here.

Shapes: B batch, L length, D embed, N rows (tokens), C contracted, F columns.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.mesh.zero import vary, varying_axes

F16_SAFE = 2.0**15
"""Half the range of f16: values up to this stay finite when they are rounded."""


def project(
    x_BLD: Array, weight: Array, dtype: jnp.dtype, *, result: jnp.dtype | None = None
) -> Array:
    """[B, L, D], [D, ...] -> [B, L, ...], as one product of two matrices.

    Column-parallel over `tensor`: the weight's columns (heads, mlp) are sharded, so each device
    computes its own part of the result without communication.

    Equal to an einsum. Its gradient is also a product of two matrices, whereas the gradient of an
    einsum with several free dimensions is transposed and copied first (a fifth of a step's time on
    a CPU).

    Args:
      dtype: format of the operands.
      result: format of the result; None: `dtype`. When training in f16, pass another format than
        f16 if the result's gradient may be one part of a sum.
    """
    rows = x_BLD.reshape(-1, x_BLD.shape[-1])
    product = _product(rows, weight.reshape(len(weight), -1), 0, dtype, result)
    return product.reshape(*x_BLD.shape[:-1], *weight.shape[1:])


def project_back(
    x: Array, weight: Array, dtype: jnp.dtype, *, result: jnp.dtype | None = None
) -> Array:
    """[B, L, ...], [D, ...] -> [B, L, D], as one product of two matrices.

    Row-parallel over `tensor`: the contracted dimensions (heads, mlp) are sharded, so the result is
    one part of a sum over `tensor`, which the caller reduces.

    Arguments are as in `project`. Weights that lead back to the residual's width D also have D as
    their first dimension, so that fsdp's shards are contiguous in memory (mesh/zero.py).
    """
    columns = weight.reshape(len(weight), -1)
    rows = x.reshape(-1, columns.shape[1])
    product = _product(rows, columns, 1, dtype, result)
    return product.reshape(*x.shape[: x.ndim - weight.ndim + 1], len(weight))


def _product(
    rows: Array, matrix: Array, contracted: int, dtype: jnp.dtype, result: jnp.dtype | None
) -> Array:
    """[N, C] times a matrix whose dimension `contracted` is C -> [N, F]."""
    if dtype != jnp.float16:
        return rows @ matrix if contracted == 0 else _dot(rows, matrix, 1, 1)
    axes = sorted(varying_axes(rows) | varying_axes(matrix))
    how = contracted, jnp.dtype(dtype if result is None else result), rows.dtype, matrix.dtype
    return _f16_product(how, vary(rows, axes), vary(matrix, axes))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _f16_product(how: tuple, rows: Array, matrix: Array) -> Array:
    return _forward(how, rows, matrix)[0]


def _forward(how: tuple, rows: Array, matrix: Array) -> tuple[Array, tuple[Array, Array]]:
    contracted, result, *_ = how
    operands = rows.astype(jnp.float16), matrix.astype(jnp.float16)
    return _dot(*operands, 1, contracted, result), operands


def _backward(how: tuple, operands: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    """Gradients in the format of the arguments: float32 if they are parts of a sum."""
    contracted, _, rows_dtype, matrix_dtype = how
    rows, matrix = operands
    d_f16, factor = _in_range(d_out)
    d_rows = _dot(d_f16, matrix, 1, 1 - contracted, rows_dtype)
    left, right = (rows, d_f16) if contracted == 0 else (d_f16, rows)
    d_matrix = _dot(left, right, 0, 0, matrix_dtype)
    if factor is not None:
        d_rows, d_matrix = (
            d_rows * factor.astype(rows_dtype),
            d_matrix * factor.astype(matrix_dtype),
        )
    return d_rows, d_matrix


_f16_product.defvjp(_forward, _backward)


def _in_range(d_out: Array) -> tuple[Array, Array | None]:
    """`d_out` in f16 after division by a factor, and that factor (None if `d_out` is f16 already).

    The factor is at least 1, and large enough that a float32 part of a sum does not overflow in
    f16. Then the parts of the same sum under another sharding do not overflow either. NaNs and
    infinities in `d_out` stay as they are.
    """
    if d_out.dtype == jnp.float16:
        return d_out, None
    largest = jnp.abs(d_out).max()
    factor = jnp.where(largest > F16_SAFE, jnp.exp2(jnp.ceil(jnp.log2(largest / F16_SAFE))), 1)
    return (d_out / factor).astype(jnp.float16), factor


def _dot(
    left: Array, right: Array, left_dim: int, right_dim: int, dtype: jnp.dtype | None = None
) -> Array:
    return lax.dot_general(
        left, right, (((left_dim,), (right_dim,)), ((), ())), preferred_element_type=dtype
    )
