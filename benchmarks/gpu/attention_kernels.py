"""Compare the attention kernels on a GPU: error against float32, and time.

    python benchmarks/gpu/attention_kernels.py

Prints a table. Exit code 1: cuDNN's error in bf16 exceeds XLA's by more than rounding explains; 2:
there is no GPU.

Queries, keys and values are random. Packed rows hold documents of 16 tokens on average in the first
row and longer ones in each further row; the last row is one document. Forward and backward are
computed together, as in training. The error is the largest difference from the same attention in
float32, divided by the largest value.
"""

import argparse
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from card import gpu_is_here
from timing import seconds

from optimus_jax.config import AttentionKernel
from optimus_jax.models.kernels import Visibility, attend

KERNELS: tuple[AttentionKernel, ...] = ("xla", "cudnn")
SHAPES = ((8, 1024, 25, 25, 64), (2, 4096, 32, 8, 64), (2, 4096, 32, 8, 128))
"""(batch, length, query heads, key/value heads, head_dim) of gpt2-xl, llama3.2-1b and llama3-8b."""
WORSE = 1.5
"""Largest allowed ratio of cuDNN's error to XLA's in bf16. cuDNN sums in another order."""


def inputs(shape: tuple[int, ...], *, packed: bool) -> tuple:
    """q, k, v and the output's gradient in float32, and the documents (None: not packed)."""
    batch, length, heads, groups, head_dim = shape
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.random.normal(key, (batch, length, count, head_dim))
        for key, count in zip(keys, (heads, groups, groups, heads), strict=True)
    )
    return q, k, v, d_out, jnp.asarray(documents(batch, length)) if packed else None


def documents(batch: int, length: int) -> np.ndarray:
    """int32 [batch, length]: the number of each token's document within its row."""
    begins = (
        np.random.default_rng(0).random((batch, length))
        < 1 / np.geomspace(16, length, batch)[:, None]
    )
    begins[-1] = False
    return np.cumsum(begins, axis=1, dtype=np.int32)


@partial(jax.jit, static_argnames="kernel")
def forward_and_backward(q, k, v, d_out, segments, *, kernel: AttentionKernel):
    """The output and the gradients of q, k and v, in the dtype of the inputs."""
    out, back = jax.vjp(
        lambda q, k, v: attend(q, k, v, Visibility(segments), kernel=kernel), q, k, v
    )
    return out, *back(d_out)


def in_bf16(q, k, v, d_out, segments) -> tuple:
    """The arrays of `inputs` rounded to bf16."""
    return *(x.astype("bfloat16") for x in (q, k, v, d_out)), segments


def error(found, exact) -> float:
    """The largest error of the output and the gradients; NaN if one of them has a NaN."""
    return float(
        np.max(
            [
                jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b))
                for a, b in zip(found, exact, strict=True)
            ]
        )
    )


def is_wrong(of_cudnn: float, of_xla: float) -> bool:
    """Whether cuDNN's error exceeds what rounding explains, or is NaN."""
    return not of_cudnn <= WORSE * of_xla + 2**-8


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if not gpu_is_here():
        print("error: comparing attention kernels needs a GPU, and there is none", file=sys.stderr)
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print(
        "| shape | documents | kernel | error against f32 | forward and backward"
        " |\n|---|---|---|---|---|"
    )
    wrong = 0
    for shape in SHAPES:
        for packed in (False, True):
            given = inputs(shape, packed=packed)
            with jax.default_matmul_precision("highest"):
                exact = forward_and_backward(*given, kernel="xla")
            rounded, errors = in_bf16(*given), {}
            for kernel in KERNELS:
                run = partial(forward_and_backward, *rounded, kernel=kernel)
                errors[kernel] = error(run(), exact)
                print(
                    f"| {'x'.join(map(str, shape))} | {'packed' if packed else 'one a row'} |"
                    f" {kernel} | {errors[kernel]:.1e} | {1e3 * seconds(run):.2f} ms |",
                    flush=True,
                )
            wrong += is_wrong(errors["cudnn"], errors["xla"])
    print(
        f"\n{wrong} of {2 * len(SHAPES)} have a larger error than bf16 explains"
        if wrong
        else "\nno error is larger than bf16 explains"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
