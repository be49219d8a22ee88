"""Tolerances, each with its reason, and comparisons that name what differs.

Do not widen a tolerance to make a test pass: either the reason below no longer holds, or there is a
bug.
"""

import socket
from typing import Any

import jax
import numpy as np

from optimus_jax.reshard.checksum import named_leaves

F32_RELATIVE = 1e-5
"""Loss, gradients and two optimizer steps under any plan against one device: sums of float32 in
another order.

Measured over all plans and both models: at most 2e-6.
"""

BF16_RELATIVE = 2.5e-2
"""Gradients in bf16 under a plan against one device's in bf16.

A rounding is 2^-9, and which of a fusion's values are rounded at all is XLA's choice, another one
for other shapes. Measured: 1.8e-2 for the worst element of the worst leaf, as much as between one
device's own bf16 and float32 (1.4e-2). Sums over tokens in bf16 gave 3.9e-2.
"""
BF16_LOSS_RELATIVE = 5e-4
"""The loss averages the rounding of 335 tokens: 2^-9 / sqrt(335) is 1e-4, and this four times as
much. Measured: 1.5e-4."""

F16_RELATIVE = 4e-3
"""A step in f16 against float32: eight roundings of 2^-11, for activations and their gradients.
Measured: 2.3e-3, in a gradient."""

MATMUL_RELATIVE = {"bfloat16": 2**-6, "float16": 2**-9}
"""A gradient of 16-bit operands against float32: four roundings of 2^-8 or 2^-11. Measured: 7e-3
and 5e-4."""

ADAM_EPSILON = 1e-3
"""Epsilon of the optimizer whose steps are compared.

An update is m / (sqrt(v) + epsilon), so an error d in a gradient becomes up to d / epsilon in the
update, whatever is right about the gradient: with 1e-8, elements whose gradient is zero but for
rounding (biases of keys: softmax does not see them) move by a whole step in a random direction.
Measured, worst leaf after one step: 1e-8 gives 3e-3, 1e-5 gives 7e-6, 1e-3 gives 1e-6, while the
moments agree to 1e-6 with each.
"""


def host_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Every leaf, whole, by its path."""
    return {path: np.asarray(leaf) for path, leaf in named_leaves(jax.device_get(tree)).items()}


def fitted(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`array` cropped or padded with zeros to `shape`: the vocabulary's padding differs between
    plans.
    """
    kept = array[tuple(slice(0, size) for size in shape)]
    result = np.zeros(shape, array.dtype)
    result[tuple(slice(0, size) for size in kept.shape)] = kept
    return result


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """max |actual - expected| / max |expected|, over the part that both shapes have."""
    shape = tuple(map(min, actual.shape, expected.shape))
    actual, expected = (
        fitted(actual, shape).astype(np.float64),
        fitted(expected, shape).astype(np.float64),
    )
    largest = np.abs(expected).max()
    return (
        float(np.abs(actual - expected).max() / largest) if largest else float(np.abs(actual).max())
    )


def errors(actual: Any, expected: Any) -> dict[str, float]:
    """Relative error of every leaf, by its path."""
    actual, expected = host_leaves(actual), host_leaves(expected)
    assert actual.keys() == expected.keys()
    return {path: relative_error(actual[path], expected[path]) for path in actual}


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Assert that every leaf's relative error is within `tolerance`; NaN is not."""
    wrong = {
        path: error for path, error in errors(actual, expected).items() if not error <= tolerance
    }
    assert not wrong, f"relative error above {tolerance}: {wrong}"


MEMORY_ESTIMATE = 0.25
"""Tolerance of estimated over allocated bytes of a step: 0.81 to 1.19 over thirty plans in f32,
with and without stages. What XLA keeps at the same time on a CPU is not in a formula derived for
GPUs.
"""

GOLDEN = 2e-6
"""Relative difference between CPU models: XLA vectorises for the CPU it runs on, so sums are added
in another order. On one machine results are equal.
"""


def free_port() -> int:
    """A free TCP port of this machine, for the processes of a test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
