"""The objective of a step, in three parts: embed, layers, loss.

Without a pipeline they are called in sequence; a pipeline stage calls the parts that it holds for
its current microbatch.
"""

from dataclasses import dataclass, replace

import jax
from jax import Array

from optimus_jax.config import Config
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.shapes import ModelShapes, Params
from optimus_jax.models.transformer import ForwardContext
from optimus_jax.plan import Plan
from optimus_jax.training.task import Batch, Task, task_named


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of some rows of a batch, inside the step's `shard_map`.

    Parameters are given as `ModelShapes.whole_outside_layers` leaves them.
    """

    config: Config
    shapes: ModelShapes
    plan: Plan
    comm: Collectives
    step_key: Array | None = None
    """Key of the step's dropout; None: no dropout."""
    weight: Array | float = 1.0
    """Weight of every token that counts in the loss."""

    def at(self, *, step_key: Array | None, weight: Array) -> "Objective":
        """This objective with the dropout key and the token weight of one step."""
        return replace(self, step_key=step_key, weight=weight)

    def whole(self, params: Params) -> Params:
        """Parameters with the matrices outside the layers gathered over fsdp and cast, once for all
        rows."""
        return self.shapes.whole_outside_layers(params, self.comm)

    def batch_loss(self, whole: Params, rows: Batch) -> Array:
        """Weighted sum of the loss over this device's tokens, a float32 scalar."""
        model, run = self.shapes.merged(whole), self._pass(rows)
        x_BLD = model.embed(rows["tokens"], rows["positions"], run)
        x_BLD, _ = model.run_layers(x_BLD, rows["positions"], run)
        return self.loss(whole, x_BLD, rows)

    def embed(self, whole: Params, rows: Batch) -> Array:
        """[B, L, D], the residual stream before the first layer."""
        return self.shapes.merged(whole).embed(rows["tokens"], rows["positions"], self._pass(rows))

    def layers(self, whole: Params, x_BLD: Array, rows: Batch, slots: Array) -> Array:
        """The residual stream after the layers in `slots` (`Decoder.run_some_layers`)."""
        return self.shapes.merged(whole).run_some_layers(
            x_BLD,
            rows["positions"],
            self._pass(rows),
            slots,
            all_full=EMPTY not in self.shapes.slots,
        )

    def loss(self, whole: Params, x_BLD: Array, rows: Batch) -> Array:
        """The task's loss: the weighted sum over these rows' terms, a float32 scalar."""
        return self.task.loss(
            self.shapes.merged(whole),
            x_BLD,
            rows,
            comm=self.comm,
            weight=self.weight,
            chunk_tokens=self.plan.loss_chunk_tokens,
        )

    @property
    def task(self) -> Task:
        """What is learnt."""
        return task_named(self.config.task)

    def _pass(self, rows: Batch) -> ForwardContext:
        key = self.step_key
        return ForwardContext(
            comm=self.comm,
            kernel=self.plan.attention,
            remat=self.plan.remat,
            offload=self.plan.offloads_activations,
            visibility=Visibility(rows["segments"] if self.config.data.respect_documents else None),
            keys_B=None
            if key is None
            else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows["examples"]),
        )
