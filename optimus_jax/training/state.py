"""All that a run carries from step to step, as one pytree."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from optimus_jax.config import PrecisionConfig
from optimus_jax.mesh.sharding import layouts_of, named
from optimus_jax.models.shapes import ModelShapes, Params
from optimus_jax.plan import Plan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling for f16; constant 1 in other precisions."""

    scale: Array
    """float32 factor on the loss."""
    clean_steps: Array
    """int32 steps since the last change."""
    overflows: Array
    """int32 overflows in a row."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer and counters. Layouts differ between plans, contents and names do not."""

    step: Array
    """int32 steps done."""
    params: Params
    """float32."""
    opt_state: optax.OptState
    """Moments, float32, and their count."""
    loss_scale: LossScale


def initial_state(shapes: ModelShapes, optimizer: optax.GradientTransformation, precision: PrecisionConfig, seed: Array) -> TrainState:
    """The state before step 1; a function to be jitted with `state_shardings` so that it is born sharded."""
    params = shapes.initial(seed)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params),
                      loss_scale=initial_loss_scale(precision))


def initial_loss_scale(precision: PrecisionConfig) -> LossScale:
    """The loss scale of a run that begins in `precision`, or changes to it."""
    zero = jnp.zeros((), jnp.int32)
    return LossScale(scale=jnp.float32(precision.loss_scale if precision.compute == "f16" else 1.0), clean_steps=zero, overflows=zero)


def state_specs(shapes: ModelShapes, optimizer: optax.GradientTransformation, plan: Plan) -> TrainState:
    """A PartitionSpec for every leaf of the state under `plan`."""
    layouts = layouts_of(shapes.names, plan, shapes.config)
    moment_specs = jax.tree.map(lambda layout: layout.moment_spec, layouts)
    opt_state = jax.eval_shape(optimizer.init, shapes.params)
    whole: Any = PartitionSpec()
    return TrainState(
        step=whole,
        params=jax.tree.map(lambda layout: layout.param_spec, layouts),
        opt_state=optax.tree_map_params(optimizer, lambda _, spec: spec, opt_state, moment_specs,
                                        transform_non_params=lambda _: whole),
        loss_scale=LossScale(whole, whole, whole))


def abstract_state(shapes: ModelShapes, optimizer: optax.GradientTransformation, precision: PrecisionConfig,
                   plan: Plan, mesh: Mesh) -> TrainState:
    """Shape, dtype and sharding of every leaf: what a checkpoint is restored onto."""
    leaves = jax.eval_shape(lambda: initial_state(shapes, optimizer, precision, jnp.int32(0)))
    shardings = named(mesh, state_specs(shapes, optimizer, plan))
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), leaves, shardings)


