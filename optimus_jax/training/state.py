"""The training state: everything a run carries from step to step, as one pytree, and its form on
disk.

Checkpoints store layers in order, padded with zero rows so that `pipe` divides their number. Every
plan can therefore read the checkpoint of any other.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import ModelConfig, PrecisionConfig
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.leaf import trained_of
from optimus_jax.mesh.sharding import layouts_of, map_trained, named
from optimus_jax.mesh.slots import canonical_slots
from optimus_jax.models.base_formats import stored_alike
from optimus_jax.models.merging import merged, same_adapters, without_adapters
from optimus_jax.models.shapes import ModelShapes, Params, model_shapes
from optimus_jax.plan import Plan
from optimus_jax.reshard.memory_kinds import HOST_MEMORY, lies_on_host
from optimus_jax.reshard.restack import restack, with_empty_slots_zero

T = TypeVar("T")


def planned_shapes(config: ModelConfig, plan: Plan) -> ModelShapes:
    """Shapes of the model under a plan, which sets the vocabulary's padding and the order of
    layers.
    """
    return model_shapes(config, plan.padded_vocab(config), plan.slots(config))


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
    """Parameters, optimizer state and counters. Plans change only the layout, not names or
    contents."""

    step: Array
    """int32 steps done."""
    params: Params
    """float32; frozen matrices may be bfloat16 (model.tuning.base_precision)."""
    opt_state: optax.OptState
    """Moments of trained parameters, float32 or bfloat16 (precision.moments), and their count. The
    plan may place moments in host memory."""
    loss_scale: LossScale


def initial_state(
    shapes: ModelShapes,
    optimizer: optax.GradientTransformation,
    precision: PrecisionConfig,
    plan: Plan,
    seed: Array,
) -> TrainState:
    """The state before step 1. Jit it with `state_shardings`, so that it is created sharded.

    Empty slots are zero and stay zero, because their gradient is zero.
    """
    params = shapes.initial(seed)
    params = {**params, LAYERS: with_empty_slots_zero(params[LAYERS], shapes.slots)}
    return state_with(params, shapes, optimizer, precision, plan)


def retuned_params(params: Params, source: ModelShapes, target: ModelShapes, seed: Array) -> Params:
    """The parameters of `target` that compute the same as these of `source`, to be jitted.

    Equal adapters stay. Others are merged, and new ones begin as nothing: LoRA's product is zero,
    and IA3's factors are one. Matrices that are stored alike stay as they are. Leaves that are
    missing begin anew: those of a head of labels (run/new_head.py).

    Args:
      source, target: the same model, but for `tuning`.
      seed: of new adapters, and of what is missing.
    """
    keeps_adapters = same_adapters(source.config, target.config)
    if keeps_adapters or not source.config.tuning.has_adapters:
        base = without_adapters(params)
    else:
        base = merged(params, source)
    base = dict(jax.tree.leaves_with_path(stored_alike(base, target)))
    own = dict(jax.tree.leaves_with_path(params)) if keeps_adapters else {}
    wanted = {path for path, _ in jax.tree.leaves_with_path(target.params)}
    if wanted - base.keys() - own.keys():
        params = target.initial(seed)
        params = {**params, LAYERS: with_empty_slots_zero(params[LAYERS], target.slots)}
        own = dict(jax.tree.leaves_with_path(params)) | own
    return jax.tree.map_with_path(
        lambda path, like: base[path] if path in base else own[path].astype(like.dtype),
        target.params,
    )


def state_with(
    params: Params,
    shapes: ModelShapes,
    optimizer: optax.GradientTransformation,
    precision: PrecisionConfig,
    plan: Plan,
) -> TrainState:
    """The state before step 1 with these parameters."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(trained_of(shapes.leaves, params)),
        loss_scale=initial_loss_scale(precision, plan),
    )


def initial_loss_scale(precision: PrecisionConfig, plan: Plan) -> LossScale:
    """The initial loss scale for the precision of `plan`."""
    zero = jnp.zeros((), jnp.int32)
    return LossScale(
        scale=jnp.float32(precision.loss_scale if plan.precision == "f16" else 1.0),
        clean_steps=zero,
        overflows=zero,
    )


def state_specs(
    shapes: ModelShapes, optimizer: optax.GradientTransformation, plan: Plan
) -> TrainState:
    """A PartitionSpec for every leaf of the state under `plan`.

    Raises ConfigError if a moment has another shape than its parameter.
    """

    def spec_of(moment: Any, spec: PartitionSpec, param: Any) -> PartitionSpec:
        if moment.shape != param.shape:
            raise ConfigError(
                explain(
                    "a moment of an optimizer has another shape than its parameter",
                    given=f"{moment.shape} for a parameter of {param.shape}",
                    do="use an optimizer that treats elements independently",
                )
            )
        return spec

    layouts = layouts_of(shapes.leaves, plan.active_rules(shapes.config), plan.zero)
    moment_specs = map_trained(lambda layout: layout.param_spec, layouts)
    opt_state = jax.eval_shape(optimizer.init, trained_of(shapes.leaves, shapes.params))
    whole: Any = PartitionSpec()
    return TrainState(
        step=whole,
        params=jax.tree.map(lambda layout: layout.param_spec, layouts),
        opt_state=optax.tree_map_params(
            optimizer,
            spec_of,
            opt_state,
            moment_specs,
            trained_of(shapes.leaves, shapes.params),
            transform_non_params=lambda _: whole,
        ),
        loss_scale=LossScale(whole, whole, whole),
    )


def abstract_params(shapes: ModelShapes, plan: Plan, mesh: Mesh, *, stored: bool = False) -> Params:
    """Shape, dtype and sharding of every parameter under `plan`.

    Args:
      stored: with layers in the order of checkpoints.
    """
    layouts = layouts_of(shapes.leaves, plan.active_rules(shapes.config), plan.zero)
    shardings = named(mesh, jax.tree.map(lambda layout: layout.param_spec, layouts))
    shapes = _stored_shapes(shapes, plan) if stored else shapes
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes.params,
        shardings,
    )


def state_shardings(
    shapes: ModelShapes, optimizer: optax.GradientTransformation, plan: Plan, mesh: Mesh
) -> TrainState:
    """A NamedSharding for every leaf of the state under `plan`, including its memory kind (device
    or host).
    """
    specs = state_specs(shapes, optimizer, plan)
    shardings = named(mesh, specs)
    if not plan.offloads_moments:
        return shardings
    moved = optax.tree_map_params(
        optimizer, lambda sharding: sharding.with_memory_kind(HOST_MEMORY), shardings.opt_state
    )
    return dataclasses.replace(shardings, opt_state=moved)


def abstract_state(
    shapes: ModelShapes,
    optimizer: optax.GradientTransformation,
    precision: PrecisionConfig,
    plan: Plan,
    mesh: Mesh,
) -> TrainState:
    """Shape, dtype and sharding of every leaf, as the target for restoring a checkpoint."""
    leaves = jax.eval_shape(lambda: initial_state(shapes, optimizer, precision, plan, jnp.int32(0)))
    shardings = state_shardings(shapes, optimizer, plan, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        leaves,
        shardings,
    )


def bytes_on_device(abstract: TrainState) -> int:
    """Bytes of a state in the memory of each device; leaves in host memory do not count."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract)
        if not lies_on_host(leaf.sharding)
    )


def layer_elements(shapes: ModelShapes, plan: Plan, mesh: Mesh) -> int:
    """Elements of one layer's matrices on each device, whole along fsdp."""
    layouts = layouts_of(shapes.leaves[LAYERS], plan.active_rules(shapes.config), zero=0)
    return sum(
        math.prod(NamedSharding(mesh, layout.spec(split=False)).shard_shape(array.shape)[1:])
        for layout, array in zip(
            jax.tree.leaves(layouts), jax.tree.leaves(shapes.params[LAYERS]), strict=True
        )
        if layout.leaf.is_matrix
    )


def abstract_stored_state(
    shapes: ModelShapes,
    optimizer: optax.GradientTransformation,
    precision: PrecisionConfig,
    plan: Plan,
    mesh: Mesh,
) -> TrainState:
    """`abstract_state` with layers in the order of checkpoints."""
    return abstract_state(_stored_shapes(shapes, plan), optimizer, precision, plan, mesh)


def _stored_shapes(shapes: ModelShapes, plan: Plan) -> ModelShapes:
    slots = _stored_slots(shapes, plan)
    return (
        shapes if slots == shapes.slots else model_shapes(shapes.config, shapes.vocab_rows, slots)
    )


def to_stored(
    state: TrainState, shapes: ModelShapes, plan: Plan, shardings: TrainState
) -> TrainState:
    """The state with layers in the order of checkpoints.

    Layers are copied if the order differs; `state` is unchanged.
    """
    return restack(state, shardings, source=shapes.slots, target=_stored_slots(shapes, plan))


def from_stored(stored: T, shapes: ModelShapes, plan: Plan, shardings: T) -> T:
    """The inverse of `to_stored`, for a state or its parameters. Leaves of `stored` that move are
    deleted."""
    return restack(
        stored, shardings, source=_stored_slots(shapes, plan), target=shapes.slots, keep=False
    )


def _stored_slots(shapes: ModelShapes, plan: Plan) -> tuple[int, ...]:
    return canonical_slots(shapes.config.num_layers, plan.axes.pipe)
