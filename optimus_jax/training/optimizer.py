"""Optimizers and their learning rate: optax transformations of the part of a leaf that a device
updates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from optimus_jax.config import Config, MomentPrecision, OptimizerConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.in_python import IN_PYTHON, not_given
from optimus_jax.errors import ConfigError, PlanError, explain, nearest

LEARNING_RATES = (
    (2e8, 6e-4),
    (5e8, 3e-4),
    (1e9, 2.5e-4),
    (2e9, 2e-4),
    (4e9, 1.6e-4),
    (1e10, 1.2e-4),
    (float("inf"), 1e-4),
)
"""(parameters up to, peak learning rate), after GPT-3's models (arXiv:2005.14165, table 2.1)."""
TINY_MODEL = (1e7, 2e-3)
"""(parameters up to, peak learning rate) below GPT-3's smallest model: models of a few million
parameters train faster with a higher rate."""


def peak_learning_rate(config: OptimizerConfig, num_params: int) -> float:
    """The configured peak rate, or the default for a model of this size. Raises ConfigError if
    there is neither.
    """
    if config.lr is not None:
        return config.lr
    if (usual := usual_learning_rate(config, num_params)) is not None:
        return usual
    raise ConfigError(
        explain(
            f"{config.name} has no default learning rate",
            given=f"optimizer.name={config.name}, and no learning rate",
            do="give one with --lr",
        )
    )


def usual_learning_rate(config: OptimizerConfig, num_params: int) -> float | None:
    """The default peak rate for a model of this size; None: the optimizer has none."""
    if not optimizer_named(config.name).has_default_rate:
        return None
    return next(rate for limit, rate in (TINY_MODEL, *LEARNING_RATES) if num_params <= limit)


def learning_rate(config: Config, num_params: int) -> Callable[[Array], Array]:
    """The function from a step (int32, counted from 1) to its learning rate (float32)."""
    optimizer, end, warmup = config.optimizer, config.decay_steps, effective_warmup(config)
    peak = peak_learning_rate(optimizer, num_params)
    last = peak * optimizer.min_lr_ratio
    rest = max(1, end - warmup)
    match optimizer.schedule:
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rest, optimizer.min_lr_ratio)
        case "linear":
            after = optax.linear_schedule(peak, last, rest)
        case "wsd":
            decay = _wsd_decay(config)
            after = optax.linear_schedule(peak, last, decay, transition_begin=max(0, rest - decay))
        case "constant":
            after = optax.constant_schedule(peak)
    # Warm-up reaches the peak at step `warmup`; the rate of the first step is not zero.
    schedule = (
        optax.join_schedules((optax.linear_schedule(0.0, peak, warmup), after), (warmup,))
        if warmup
        else after
    )
    return lambda step: jnp.asarray(schedule(step.astype(jnp.float32)), jnp.float32)


def effective_warmup(config: Config) -> int:
    """Warm-up steps, limited to the steps of the learning-rate schedule."""
    return min(config.warmup_steps, config.decay_steps)


def decay_begins(config: Config) -> float:
    """The last step before the decay begins; infinity: there is no decay."""
    warmup, end = effective_warmup(config), config.decay_steps
    match config.optimizer.schedule:
        case "constant":
            return math.inf
        case "wsd":
            return max(warmup, end - _wsd_decay(config))
        case _:
            return warmup


def _wsd_decay(config: Config) -> int:
    """Number of decay steps of the wsd schedule."""
    return max(1, round(config.decay_steps * config.optimizer.decay_fraction))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer: a row of OPTIMIZERS.

    Its state may hold any number of arrays for each parameter, all of the parameter's shape
    (*moments*), and counters. Their number and layout are read from the state that it makes.
    """

    direction: Callable[[OptimizerConfig], optax.GradientTransformation]
    """The transformation from gradients to directions: without learning rate and weight decay,
    which all optimizers have alike. Each device applies it to the part of every parameter that it
    updates: elements, or whole matrices. Those of a pipeline stage's layers are stacked."""
    needs_whole_matrices: bool = False
    """Whether a direction depends on other elements of the same matrix. Plans that split a
    parameter are then refused."""
    has_default_rate: bool = True
    """Whether the default learning rates, which are Adam's, suit it."""


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(
        direction=lambda config: optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    ),
    "sgd": Optimizer(
        direction=lambda config: optax.trace(decay=config.beta1), has_default_rate=False
    ),
}
"""By the value of the setting `optimizer.name`."""


def optimizer_named(name: str) -> Optimizer:
    """A row of OPTIMIZERS. Raises ConfigError, with the nearest name, if there is none."""
    if name == IN_PYTHON and name not in OPTIMIZERS:
        raise not_given("optimizer.name", "optimizer")
    if name not in OPTIMIZERS:
        raise ConfigError(
            explain(
                f"unknown optimizer {name!r}",
                given=f"optimizer.name={name}",
                do=nearest(name, [each for each in OPTIMIZERS if each != IN_PYTHON]),
            )
        )
    return OPTIMIZERS[name]


def check_whole(config: OptimizerConfig, axes: AxisSizes, zero: int) -> None:
    """Raise PlanError if devices would update parts of a matrix, and the optimizer needs it
    whole.
    """
    if not optimizer_named(config.name).needs_whole_matrices:
        return
    if axes.tensor > 1 or (axes.fsdp > 1 and zero > 0):
        raise PlanError(
            explain(
                f"{config.name} needs whole matrices, and devices would update parts of them",
                given=f"mesh {axes}, zero {zero}",
                do="use data and pipe alone",
            )
        )


def moments_per_parameter(name: str) -> int:
    """Arrays of a parameter's shape in the state of an optimizer, for each parameter."""
    return _moments_of(optimizer_named(name))


@lru_cache
def _moments_of(optimizer: Optimizer) -> int:
    transformation = optimizer.direction(OptimizerConfig())
    like = jax.ShapeDtypeStruct((), jnp.float32)
    found: list[Any] = []
    optax.tree_map_params(transformation, found.append, jax.eval_shape(transformation.init, like))
    return len(found)


def make_optimizer(
    config: OptimizerConfig, leaves: Any, *, moments: MomentPrecision = "f32"
) -> optax.GradientTransformation:
    """The configured optimizer without its learning rate: the caller scales the result by the
    step's rate.

    Args:
      leaves: the Leaf of every parameter that is updated. Matrices and tables decay; scales and
        biases do not.
      moments: format in which the moments are stored; they are computed in float32.
    """
    decays = jax.tree.map(lambda leaf: leaf.is_matrix, leaves)
    chain = optax.chain(
        _stored_as(moments, optimizer_named(config.name).direction(config)),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )

    def update(
        updates: Any, state: optax.OptState, params: Any = None
    ) -> tuple[Any, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to its int32 count
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)


def _stored_as(
    moments: MomentPrecision, direction: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The transformation with all moments rounded to a storage format after each step (optax's
    `mu_dtype` rounds only Adam's first).
    """
    if moments == "f32":
        return direction

    def cast(state: Any, dtype: Any) -> Any:
        return optax.tree_map_params(direction, lambda moment: moment.astype(dtype), state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = direction.update(updates, cast(state, jnp.float32), params)
        return updates, cast(new, jnp.bfloat16)

    return optax.GradientTransformation(
        lambda params: cast(direction.init(params), jnp.bfloat16), update
    )
