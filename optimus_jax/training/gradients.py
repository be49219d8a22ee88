"""The loss and gradients of a step over its microbatches: in a loop, or through pipeline stages.

Gradients are this device's sum over its microbatches; `LeafLayout.reduced` sums them over devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.zero import vary
from optimus_jax.models.shapes import Params
from optimus_jax.pipeline.executor import Pipeline, StageFunctions
from optimus_jax.pipeline.gpipe import forward_only
from optimus_jax.training.objective import Objective
from optimus_jax.training.task import Batch


def loss_and_gradients(
    objective: Objective, layouts: Params, params: Params, batch: Batch, batch_axes: tuple[str, ...]
) -> tuple[Array, Params]:
    """Sum of the loss over this device's rows, float32, and its gradient with respect to every
    parameter.

    Args:
      layouts: a LeafLayout for every leaf of `params`.
      batch: this device's rows of the step's batch.
      batch_axes: mesh axes that split the batch.
    """
    if objective.plan.pipeline is not None:
        return _pipelined(objective, layouts, params, batch)
    return _by_microbatch(objective, layouts, params, batch, batch_axes)


def loss_alone(objective: Objective, params: Params, batch: Batch) -> Array:
    """Sum of the loss over this device's rows, float32."""
    if objective.plan.pipeline is None:
        return objective.batch_loss(objective.whole(params), batch)
    return _pipeline(objective, objective.whole(params), None, batch, evaluate=True).loss()


def _by_microbatch(
    objective: Objective, layouts: Params, params: Params, batch: Batch, batch_axes: tuple[str, ...]
) -> tuple[Array, Params]:
    differentiated = jax.tree.map(lambda layout, p: layout.differentiated(p), layouts, params)

    def microbatch(rows: Batch) -> tuple[Array, Params]:
        def loss(differentiated: Params) -> Array:
            leaves = jax.tree.map(
                lambda layout, d, p: layout.in_loss(d, p), layouts, differentiated, params
            )
            return objective.batch_loss(objective.whole(leaves), rows)

        return jax.value_and_grad(loss)(differentiated)

    if objective.plan.microbatches == 1:
        return microbatch(batch)
    start = (
        vary(jnp.zeros((), jnp.float32), batch_axes),
        jax.tree.map(jnp.zeros_like, differentiated),
    )
    add = lambda total, rows: (jax.tree.map(jnp.add, total, microbatch(rows)), None)  # noqa: E731
    return lax.scan(add, start, _microbatches(objective, batch))[0]


def _pipelined(
    objective: Objective, layouts: Params, params: Params, batch: Batch
) -> tuple[Array, Params]:
    """The loss and gradients through pipeline stages.

    Matrices outside the layers are gathered before the first tick, and their gradients are
    scattered after the last, so that ticks do not repeat this communication.
    """
    outer_layouts = {name: part for name, part in layouts.items() if name != LAYERS}
    whole = objective.whole(jax.tree.map(lambda layout, p: layout.used(p), layouts, params))
    loss, d_outer, d_layers = _pipeline(
        objective, whole, layouts[LAYERS], batch, evaluate=False
    ).loss_and_gradients()
    gradients = jax.tree.map(lambda layout, g: layout.scatter_gradient(g), outer_layouts, d_outer)
    return loss, {
        **gradients,
        LAYERS: jax.tree.map(lambda d: d.reshape(-1, *d.shape[2:]), d_layers),
    }


def _pipeline(
    objective: Objective, whole: Params, layouts: Params | None, batch: Batch, *, evaluate: bool
) -> Pipeline:
    plan = objective.plan
    assert plan.pipeline is not None
    repeats = plan.pipeline.repeats
    schedule = plan.schedule()
    if evaluate:
        schedule = forward_only(
            schedule.num_stages,
            schedule.num_microbatches,
            num_repeats=repeats,
            latency=schedule.latency,
        )
    outer, stack = {name: part for name, part in whole.items() if name != LAYERS}, whole[LAYERS]
    slots = np.array(objective.shapes.slots).reshape(plan.axes.pipe, repeats, -1)
    by_repeat = lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:])  # noqa: E731

    def layers(differentiated: Params, constants: dict, x_BLD: Array, rows: Batch) -> Array:
        leaves = (
            differentiated
            if layouts is None
            else jax.tree.map(
                lambda layout, d, p: layout.in_loss(d, p),
                layouts,
                differentiated,
                constants["params"],
            )
        )
        return objective.layers({**outer, LAYERS: leaves}, x_BLD, rows, constants["slots"])

    differentiated = (
        stack
        if layouts is None
        else jax.tree.map(lambda layout, p: layout.differentiated(p), layouts, stack)
    )
    return Pipeline(
        functions=StageFunctions(
            embed=lambda outer, rows: objective.embed({**outer, LAYERS: stack}, rows),
            layers=layers,
            loss=lambda outer, x_BLD, rows: objective.loss({**outer, LAYERS: stack}, x_BLD, rows),
        ),
        schedule=schedule,
        outer=outer,
        params=jax.tree.map(by_repeat, differentiated),
        constants={
            "params": None if layouts is None else jax.tree.map(by_repeat, stack),
            "slots": jnp.asarray(slots)[lax.axis_index(PIPE)],
        },
        microbatches=_microbatches(objective, batch),
        keep_residuals=plan.pipeline.keep_residuals,
    )


def _microbatches(objective: Objective, batch: Batch) -> Batch:
    """[B, ...] -> [microbatches, B / microbatches, ...]."""
    return jax.tree.map(
        lambda rows: rows.reshape(objective.plan.microbatches, -1, *rows.shape[1:]), batch
    )
