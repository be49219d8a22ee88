"""AdamW and its learning rate, as optax transformations on the part of each leaf that a device
updates.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from optimus_jax.config import Config, MomentPrecision, OptimizerConfig
from optimus_jax.mesh.axes import EMBED
from optimus_jax.mesh.sharding import map_names

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
    """The configured peak rate, or the default for a model of this size."""
    if config.lr is not None:
        return config.lr
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


def adamw(
    config: OptimizerConfig, names: Any, *, moments: MomentPrecision = "f32"
) -> optax.GradientTransformation:
    """AdamW without its learning rate: the caller scales the result by the step's rate.

    Args:
      names: logical axes of every parameter. Matrices, which have an `embed` dimension, decay;
        norms and biases do not.
      moments: format in which the moments are stored; they are computed in float32.
    """
    decays = map_names(lambda leaf: EMBED in leaf, names)
    chain = optax.chain(
        _stored_as(moments, optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )

    def update(
        updates: Any, state: optax.OptState, params: Any = None
    ) -> tuple[Any, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to its int32 count
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)


def _stored_as(
    moments: MomentPrecision, adam: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Adam with both moments rounded to a storage format after each step (optax's `mu_dtype` rounds
    only the first).
    """
    if moments == "f32":
        return adam

    def cast(state: Any, dtype: Any) -> Any:
        return state._replace(
            **{
                name: jax.tree.map(lambda moment: moment.astype(dtype), getattr(state, name))
                for name in ("mu", "nu")
            }
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = adam.update(updates, cast(state, jnp.float32), params)
        return updates, cast(new, jnp.bfloat16)

    return optax.GradientTransformation(
        lambda params: cast(adam.init(params), jnp.bfloat16), update
    )
