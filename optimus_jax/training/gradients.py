"""The sums and gradients of a step over its microbatches: in a loop, or through pipeline stages.

Both are this device's, added over its microbatches: training/step.py adds sums over devices,
`LeafLayout.reduced` gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.leaf import with_trained
from optimus_jax.mesh.sharding import map_trained
from optimus_jax.mesh.sums import Sums
from optimus_jax.mesh.zero import vary
from optimus_jax.models.shapes import Params
from optimus_jax.pipeline.executor import Pipeline, StageFunctions
from optimus_jax.pipeline.gpipe import forward_only
from optimus_jax.training.objective import Objective
from optimus_jax.training.task import Batch, TaskSums, reported


def sums_and_gradients(
    objective: Objective, layouts: Params, params: Params, batch: Batch, batch_axes: tuple[str, ...]
) -> tuple[TaskSums, Params]:
    """Loss and metrics of this device's rows, and the gradient of what is learnt from them (the
    loss and the weighted auxiliary sums) with respect to every trained parameter; None in the place
    of frozen ones, which are not differentiated.

    Args:
      layouts: a LeafLayout for every leaf of `params`.
      batch: this device's rows of the step's batch.
      batch_axes: mesh axes that split the batch.
    """
    if objective.plan.pipeline is not None:
        return _pipelined(objective, layouts, params, batch)
    return _by_microbatch(objective, layouts, params, batch, batch_axes)


def sums_alone(
    objective: Objective,
    layouts: Params,
    params: Params,
    batch: Batch,
    *,
    by_microbatch: bool = False,
) -> TaskSums:
    """Loss and metrics of this device's rows.

    Args:
      by_microbatch: whether rows run in microbatches also without a pipeline.
    """
    whole = objective.whole(_held(objective, layouts, params))
    if by_microbatch:

        def one(_: None, rows: Batch) -> tuple[None, TaskSums]:
            return None, objective.batch_loss(whole, rows)[1]

        parts = lax.scan(one, None, _microbatches(objective, batch))[1]
        return _added_up(parts.loss.sum(0), parts.metrics, parts.drawn)
    if objective.plan.pipeline is None:
        return objective.batch_loss(whole, batch)[1]
    return reported(*_pipeline(objective, whole, batch).sums())


def _held(objective: Objective, layouts: Params, params: Params) -> Params:
    return jax.tree.map(
        lambda layout, param: layout.held(param, objective.comm.dtype), layouts, params
    )


def _by_microbatch(
    objective: Objective, layouts: Params, params: Params, batch: Batch, batch_axes: tuple[str, ...]
) -> tuple[TaskSums, Params]:
    plan = objective.plan
    differentiated = map_trained(
        lambda layout, p: layout.differentiated(p, sums_by_layer=plan.sums_by_layer),
        layouts,
        params,
    )
    held = _held(objective, layouts, params)

    def microbatch(rows: Batch) -> tuple[TaskSums, Params]:
        def loss(differentiated: Params) -> tuple[Array, TaskSums]:
            leaves = jax.tree.map(
                lambda layout, d, p: layout.in_loss(d, p), layouts, differentiated, held
            )
            return objective.batch_loss(objective.whole(leaves), rows)

        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(differentiated)
        return sums, gradients

    if plan.microbatches == 1:
        return microbatch(batch)
    start = (
        vary(jnp.zeros((), jnp.float32), batch_axes),
        jax.tree.map(jnp.zeros_like, differentiated),
    )

    def add(
        total: tuple[Array, Params], rows: Batch
    ) -> tuple[tuple[Array, Params], tuple[Sums, Array | None]]:
        sums, gradients = microbatch(rows)
        added = jax.tree.map(jnp.add, total, (sums.loss, gradients))
        return added, (sums.metrics, sums.drawn)

    (loss, gradients), (parts, drawn) = lax.scan(add, start, _microbatches(objective, batch))
    return _added_up(loss, parts, drawn), gradients


def _added_up(loss: Array, metrics: Sums, drawn: Array | None) -> TaskSums:
    """The sums of all microbatches, given the loss of all, and the others of each."""
    return TaskSums(
        loss,
        {name: of_each.sum(0) for name, of_each in metrics.items()},
        None if drawn is None else drawn.reshape(-1, *drawn.shape[2:]),
    )


def _pipelined(
    objective: Objective, layouts: Params, params: Params, batch: Batch
) -> tuple[TaskSums, Params]:
    """The sums and gradients through pipeline stages.

    Matrices outside the layers are gathered before the first tick, and their gradients are
    scattered after the last, so that ticks do not repeat this communication.
    """
    outer_layouts = {name: part for name, part in layouts.items() if name != LAYERS}
    held = _held(objective, layouts, params)
    whole = objective.whole(jax.tree.map(lambda layout, p: layout.used(p), layouts, held))
    layers = map_trained(
        lambda layout, p: layout.differentiated(p), layouts[LAYERS], params[LAYERS]
    )
    training = _Differentiated(layouts, layers)
    sums, d_outer, d_layers = _pipeline(objective, whole, batch, training).sums_and_gradients()
    gradients = map_trained(lambda layout, g: layout.scatter_gradient(g), outer_layouts, d_outer)
    return reported(*sums), {
        **gradients,
        LAYERS: jax.tree.map(lambda d: d.reshape(-1, *d.shape[2:]), d_layers),
    }


class _Differentiated(NamedTuple):
    """What a pipeline is differentiated with respect to."""

    layouts: Params
    """A LeafLayout for every parameter."""
    layers: Params
    """The layers' parameters, as `LeafLayout.differentiated` gives them."""


def _pipeline(
    objective: Objective, whole: Params, batch: Batch, training: _Differentiated | None = None
) -> Pipeline:
    """The pipeline of these rows; for evaluation without `training`."""
    plan = objective.plan
    assert plan.pipeline is not None
    repeats = plan.pipeline.repeats
    schedule = plan.schedule()
    if training is None:
        schedule = forward_only(
            schedule.num_stages,
            schedule.num_microbatches,
            num_repeats=repeats,
            latency=schedule.latency,
        )
    outer, stack = {name: part for name, part in whole.items() if name != LAYERS}, whole[LAYERS]
    trained, differentiated = outer, stack
    if training is not None:
        outer_layouts = {name: part for name, part in training.layouts.items() if name != LAYERS}
        trained = map_trained(lambda _, p: p, outer_layouts, outer)
        differentiated = training.layers
    slots = np.array(objective.shapes.slots).reshape(plan.axes.pipe, repeats, -1)
    by_repeat = lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:])  # noqa: E731

    def layers(
        differentiated: Params, constants: dict, value: Array, rows: Batch
    ) -> tuple[Array, Sums]:
        leaves = (
            differentiated
            if training is None
            else jax.tree.map(
                lambda layout, d, p: layout.in_loss(d, p),
                training.layouts[LAYERS],
                differentiated,
                constants["params"],
            )
        )
        return objective.layers({**outer, LAYERS: leaves}, value, rows, constants["slots"])

    def with_stack(trained: Params) -> Params:
        return {**with_trained(trained, outer), LAYERS: stack}

    return Pipeline(
        functions=StageFunctions(
            embed=lambda trained, rows: objective.embed(with_stack(trained), rows),
            layers=layers,
            loss=lambda trained, value, rows: objective.loss(with_stack(trained), value, rows),
        ),
        schedule=schedule,
        outer=trained,
        params=jax.tree.map(by_repeat, differentiated),
        constants={
            "params": None if training is None else jax.tree.map(by_repeat, stack),
            "slots": jnp.asarray(slots)[lax.axis_index(PIPE)],
        },
        microbatches=_microbatches(objective, batch),
        keep_residuals=plan.pipeline.keep_residuals,
        auxiliary_weights=objective.auxiliary_weights,
        trains_embed=objective.config.model.tuning.trains("embedding"),
    )


def _microbatches(objective: Objective, batch: Batch) -> Batch:
    """[B, ...] -> [microbatches, B / microbatches, ...]."""
    return jax.tree.map(
        lambda rows: rows.reshape(objective.plan.microbatches, -1, *rows.shape[1:]), batch
    )
