"""The number formats of activations, and of partial sums.

A layout may compute a sum in parts (tokens over devices and microbatches, columns over `tensor`).
No part may overflow if the whole sum does not, or the layout would decide whether a step is left
out. The largest finite f16 is 65504, so in f16 parts are float32, and a value is rounded to f16
when its sum is complete. bf16 has float32's range, and its parts stay bf16: half the bytes on the
wire (docs/decisions/0013-f16-overflows-alike-under-every-plan.md).
"""

from typing import Any

import jax.numpy as jnp

from optimus_jax.config import Precision

COMPUTE_DTYPES: dict[Precision, Any] = {
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
}
"""Format of activations, and of weights in matmuls, by precision."""


def sum_format(dtype: jnp.dtype) -> jnp.dtype:
    """The format of parts of a sum, if activations and matmul operands are `dtype`."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)
