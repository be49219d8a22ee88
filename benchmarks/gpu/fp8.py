"""An experiment: matrix products in 8-bit floating point (fp8), compared with bf16, at the shapes
of layers.

    python benchmarks/gpu/fp8.py                   errors and speed; needs a GPU with fp8
    python benchmarks/gpu/fp8.py --numerics        only errors; runs anywhere

GPUs with fp8 are Hopper, Ada and Blackwell. Each operand is scaled by its current largest value
("current scaling"), so that this value fills the format. Products are summed in float32 and rounded
to bf16. Forward has both operands in e4m3; backward has the gradient in e5m2, as in Micikevicius et
al. 2022 (arXiv:2209.05433). XLA turns the pattern "8-bit operands, upcast, times scales, dot" into
cuBLASLt's fp8 kernels; the script checks this in the compiled program. No training run uses this.
"""

import argparse
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
from card import gpu_is_here
from jax import Array
from timing import seconds

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
SHAPES = {
    "gpt2-xl, up": (16384, 1600, 6400),
    "llama3.2-1b, up": (16384, 2048, 8192),
    "llama3-8b, up": (8192, 4096, 14336),
    "llama3-8b, down": (8192, 14336, 4096),
}
"""(tokens, input width, output width) of each product."""
PRODUCTS = 3
"""Products of forward and backward: the output and both gradients."""


def quantised(x: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """`x` scaled and rounded to 8 bits, and the float32 factor that scales it back."""
    scale = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), 1e-12) / float(
        jnp.finfo(dtype).max
    )
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def product(a: Array, b: Array, a_dtype: jnp.dtype, b_dtype: jnp.dtype) -> Array:
    """a [M, K] times b [K, N] -> bf16 [M, N]."""
    (a8, a_scale), (b8, b_scale) = quantised(a, a_dtype), quantised(b, b_dtype)
    upcast_a, upcast_b = (
        a8.astype(jnp.bfloat16) * a_scale.astype(jnp.bfloat16),
        b8.astype(jnp.bfloat16) * b_scale.astype(jnp.bfloat16),
    )
    return jnp.dot(upcast_a, upcast_b, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


@jax.custom_vjp
def fp8_matmul(x: Array, w: Array) -> Array:
    """x [tokens, in] times w [in, out] -> bf16 [tokens, out], computed in 8 bits."""
    return product(x, w, FORWARD, FORWARD)


fp8_matmul.defvjp(
    lambda x, w: (fp8_matmul(x, w), (x, w)),
    lambda residuals, d: (
        product(d, residuals[1].T, BACKWARD, FORWARD),
        product(residuals[0].T, d, FORWARD, BACKWARD),
    ),
)


def bf16_matmul(x: Array, w: Array) -> Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def forward_and_backward(matmul):
    def run(x: Array, w: Array, d: Array) -> tuple[Array, ...]:
        y, back = jax.vjp(matmul, x, w)
        return (y, *back(d))

    # By default XLA may compile the pattern with Triton, which upcasts the operands and multiplies
    # in bf16.
    return jax.jit(
        run,
        compiler_options=(
            {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None
        ),
    )


def inputs(tokens: int, width: int, out: int) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, d = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((tokens, width), (width, out), (tokens, out)), strict=True)
    )
    return x, w * width**-0.5, d


def error(found: tuple[Array, ...], exact: tuple[Array, ...]) -> list[float]:
    """Relative error of the output and both gradients: norm of the difference over the norm."""
    return [
        float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for a, b in zip(found, exact, strict=True)
    ]


def exact_results(x: Array, w: Array, d: Array) -> tuple[Array, ...]:
    x, w, d = (each.astype(jnp.float32) for each in (x, w, d))
    with jax.default_matmul_precision("highest"):
        return x @ w, d @ w.T, x.T @ d


def fp8_kernels(text: str) -> int:
    """Number of cuBLASLt's 8-bit products in the text of a compiled program."""
    return len(re.findall(r"__cublas\$lt\$matmul\$f8", text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numerics", action="store_true", help="only errors, with small matrices")
    args = parser.parse_args()
    if not args.numerics and not gpu_is_here():
        print(
            "error: measuring the speed of fp8 needs a GPU, and there is none; --numerics needs no"
            " GPU",
            file=sys.stderr,
        )
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print(
        "| product | format | error: forward, gradient of input, of weight | forward and backward |"
        " TFLOP/s | fp8 kernels |\n|---|---|---|---|---|---|"
    )
    missing = 0
    for name, (tokens, width, out) in SHAPES.items():
        sizes = (tokens // 16, width // 4, out // 4) if args.numerics else (tokens, width, out)
        given, exact = inputs(*sizes), exact_results(*inputs(*sizes))
        for words, matmul in (("bf16", bf16_matmul), ("fp8", fp8_matmul)):
            run = forward_and_backward(matmul).lower(*given).compile()
            errors = ", ".join(f"{each:.1e}" for each in error(run(*given), exact))
            took, speed, kernels = "-", "-", "-"
            if not args.numerics:
                time_s = seconds(partial(run, *given))
                took, speed = (
                    f"{1e3 * time_s:.2f} ms",
                    f"{6 * tokens * width * out / time_s / 1e12:.0f}",
                )
                count = fp8_kernels(run.as_text() or "")
                kernels, missing = str(count), missing + (words == "fp8" and count < PRODUCTS)
            print(
                f"| {name}: {'x'.join(map(str, sizes))} | {words} | {errors} | {took} | {speed} |"
                f" {kernels} |",
                flush=True,
            )
    if missing:
        print(
            f"in {missing} of {len(SHAPES)} shapes some products were not computed in fp8",
            file=sys.stderr,
        )
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
