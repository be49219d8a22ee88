"""An optimizer that a program gives: an optax transformation of its own.

Devices apply it to the parts of parameters that they update, in any layout, so what it does to an
element must not depend on others. Arrays are padded with zeros, which have to stay zeros: other
layouts have other padding. Both are tried before it is used.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.errors import ConfigError, explain
from optimus_jax.training.optimizer import OPTIMIZERS, Optimizer

SETTINGS: dict[str, Any] = {
    "optimizer.name": IN_PYTHON,
    "optimizer.lr": 1.0,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.0,
}
"""Of a run with such an optimizer: what it gives is added to the parameters as it is."""
UNUSED = frozenset(
    f"optimizer.{name}"
    for name in ("decay_steps", "min_lr_ratio", "decay_fraction", "beta1", "beta2", "epsilon")
)
"""Settings that have no effect on such a run."""
_SIZE = 256
"""Rows and columns of the matrix that it is tried on: optax factors second moments from 128 on."""
_RELATIVE = 1e-5
"""Relative difference of updates that is rounding: an array of another shape is computed in another
order."""
_SCALES = (1.0, 1e6)
"""Sizes of the gradients of the two steps that are tried. The second exceeds any norm to which
gradients are clipped."""


def check_transformation(given: object) -> optax.GradientTransformation:
    """What is given, an optax transformation. Raises ConfigError if it is none."""
    if isinstance(given, optax.GradientTransformation):
        return given
    raise ConfigError(
        explain(
            "an optimizer is a name, or a transformation of optax",
            given=repr(given),
            do="give its name, such as adamw, or for example optax.lion(1e-4)",
        )
    )


def use_own_optimizer(given: optax.GradientTransformation | None) -> None:
    """Make a transformation, with its learning rate, the optimizer named IN_PYTHON.

    Args:
      given: None: there is none any more, so that no run goes on with that of another.
    """
    OPTIMIZERS.pop(IN_PYTHON, None)
    if given is not None:
        # Training subtracts the direction times the learning rate, which is 1.
        direction = optax.chain(given, optax.scale(-1.0))
        OPTIMIZERS[IN_PYTHON] = Optimizer(
            direction=lambda config: direction, has_default_rate=False
        )


def check_elementwise(given: optax.GradientTransformation) -> None:
    """Raise ConfigError unless what a transformation does to an element depends on that element
    alone, and zeros without gradient stay zeros. Runs it on the default device.
    """
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1 + len(_SCALES), _SIZE, _SIZE)).astype(np.float32)
    values[1:] *= np.array(_SCALES, np.float32)[:, None, None]
    try:
        whole = _updates(given, values)
        of_parts = [
            np.concatenate([_updates(given, part) for part in np.split(values, 2, axis)], axis)
            for axis in (1, 2)
        ]
        keeps_zeros = _keeps_zeros(given)
    except Exception as error:
        raise ConfigError(
            explain(
                "the optimizer cannot update an array",
                given=f"{type(error).__name__}: {error}",
                do="give a transformation that needs gradients and parameters alone, and treats"
                " all parameters alike",
            )
        ) from error
    if not all(np.allclose(parts, whole, rtol=_RELATIVE, atol=0) for parts in of_parts):
        raise ConfigError(
            explain(
                "the optimizer mixes elements of a parameter, such as by a norm, and devices update"
                " parts of parameters",
                given="other updates of a matrix than of its halves",
                do="leave clipping to optimizer.clip_norm, and give what treats every element by"
                " itself, such as optax.lion(1e-4)",
            )
        )
    if not keeps_zeros:
        raise ConfigError(
            explain(
                "the optimizer's state of an element without gradient is not zero, and arrays are"
                " padded with zeros that every layout must have",
                given="a state or an update of zeros that is not zero",
                do="give one whose state begins with zeros and keeps them, such as"
                " optax.adam(1e-3)",
            )
        )


def _keeps_zeros(given: optax.GradientTransformation) -> bool:
    """Whether parameters and gradients of zeros have updates and a state of zeros."""
    zeros = jnp.zeros((2, 2), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        before = given.init(zeros)
        update, after = given.update(zeros, before, zeros)
    found: list[Any] = [update]
    for state in (before, after):
        optax.tree_map_params(given, found.append, state)
    return not any(np.asarray(each).any() for each in found)


def _updates(given: optax.GradientTransformation, values: np.ndarray) -> np.ndarray:
    """What the steps with the gradients values[1:] add to the parameters values[0]."""
    params, *gradients = map(jnp.asarray, values)
    found = []
    with jax.numpy_dtype_promotion("standard"):
        state = given.init(params)
        for gradient in gradients:
            update, state = given.update(gradient, state, params)
            found.append(np.asarray(update))
    return np.stack(found)
