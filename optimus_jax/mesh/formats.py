"""The number format of partial sums.

A sum that a layout takes in parts (tokens over devices and microbatches, columns over `tensor`)
must not overflow in a part where the whole does not, or whether a step is left out would depend on
the layout. The largest finite f16 is 65504, so in f16 parts are float32, and a value is rounded to
f16 when its sum is complete. bf16 has float32's range, and its parts stay bf16: half the bytes on
the wire (docs/decisions/0013-f16-overflows-alike-under-every-plan.md).
"""

import jax.numpy as jnp


def sum_format(dtype: jnp.dtype) -> jnp.dtype:
    """The format of parts of a sum, where activations and matmuls' operands are `dtype`."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)
