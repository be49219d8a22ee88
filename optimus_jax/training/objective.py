"""The objective of a step, in three parts: embed, layers, loss.

Without a pipeline they are called in sequence; a pipeline stage calls the parts that it holds for
its current microbatch.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config import Config
from optimus_jax.mesh.axes import BATCH, LAYERS
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.scopes import HEAD
from optimus_jax.mesh.scopes import REFERENCE as REFERENCE_PASS
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.mesh.sums import Sums, added_shares
from optimus_jax.mesh.zero import vary
from optimus_jax.models.block import ForwardContext, LayersOutput
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.merging import without_adapters
from optimus_jax.models.shapes import ModelShapes, Params
from optimus_jax.models.transformer import Decoder
from optimus_jax.plan import Plan
from optimus_jax.training.task import (
    POLICY,
    REFERENCE,
    Batch,
    LossInputs,
    Task,
    TaskSums,
    embedded,
    reported,
)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of some rows of a batch, inside the step's `shard_map`.

    Parameters are given as `ModelShapes.whole_outside_layers` leaves them.
    """

    config: Config
    task: Task
    """What is learnt."""
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

    def batch_loss(self, whole: Params, rows: Batch) -> tuple[Array, TaskSums]:
        """What is differentiated, the loss and the weighted auxiliary sums of this device's rows;
        and what is reported of them.
        """
        model, run = self.shapes.merged(whole), self._pass(rows)
        value = embedded(model, rows, run)
        out = model.run_layers(value, rows["positions"], run)
        auxiliary = self._added_shares(out.auxiliary, LAYERS)
        value = out.x_BLD
        if self.task.has_reference:
            with jax.named_scope(REFERENCE_PASS):
                reference, run = self._reference(whole), replace(run, keys_B=None)
                before = embedded(reference, rows, run)
                after = reference.run_layers(before, rows["positions"], run).x_BLD
            value = {POLICY: value, REFERENCE: after}
        sums = self._sums(whole, value, rows)
        weights = self.auxiliary_weights
        weighted = [weights[name] * each for name, each in auxiliary.items() if name in weights]
        found = reported(sums.loss, sums.metrics, auxiliary, sums.drawn)
        return sum(weighted, sums.loss), found

    def embed(self, whole: Params, rows: Batch) -> Any:
        """The stage value before the first layer: the residual stream [B, L, D], or if the task has
        a reference one for each of POLICY and REFERENCE.
        """
        run = self._pass(rows)
        value = embedded(self.shapes.merged(whole), rows, run)
        if not self.task.has_reference:
            return value
        with jax.named_scope(REFERENCE_PASS):
            before = embedded(self._reference(whole), rows, replace(run, keys_B=None))
        return {POLICY: value, REFERENCE: before}

    def layers(self, whole: Params, value: Any, rows: Batch, slots: Array) -> tuple[Any, Sums]:
        """The stage value after the layers in `slots` (`Decoder.run_some_layers`), and their
        auxiliary sums.
        """
        run, all_full = self._pass(rows), EMPTY not in self.shapes.slots

        def after(model: Decoder, x_BLD: Array, run: ForwardContext) -> LayersOutput:
            return model.run_some_layers(x_BLD, rows["positions"], run, slots, all_full=all_full)

        model = self.shapes.merged(whole)
        if not self.task.has_reference:
            out = after(model, value, run)
            return out.x_BLD, self._added_shares(out.auxiliary, LAYERS)
        out = after(model, value[POLICY], run)
        with jax.named_scope(REFERENCE_PASS):
            reference = after(self._reference(whole), value[REFERENCE], replace(run, keys_B=None))
        both = {POLICY: out.x_BLD, REFERENCE: lax.stop_gradient(reference.x_BLD)}
        return both, self._added_shares(out.auxiliary, LAYERS)

    def loss(self, whole: Params, value: Any, rows: Batch) -> tuple[Array, Sums]:
        """The task's loss and metrics: sums over these rows' terms, of the loss weighted."""
        sums = self._sums(whole, value, rows)
        return sums.loss, sums.metrics

    @jax.named_scope(HEAD)
    def _sums(self, whole: Params, value: Any, rows: Batch) -> TaskSums:
        """What the task says of these rows, added over the devices that have a part of each."""
        sums = self.task.loss(
            LossInputs(
                model=self.shapes.merged(whole),
                value=value,
                rows=rows,
                comm=self.comm,
                weight=self.weight,
                preference=self.config.preference,
                chunk_tokens=self.plan.loss_chunk_tokens,
            )
        )
        loss, metrics = self._added_shares((sums.loss, sums.metrics))
        return TaskSums(loss, metrics, sums.drawn)

    @property
    def auxiliary_weights(self) -> dict[str, Array | float]:
        """Factor of every auxiliary sum that the task adds to its loss."""
        return {name: each * self.weight for name, each in self.task.auxiliary_weights.items()}

    def _reference(self, whole: Params) -> Decoder:
        """The model without its adapters, and without gradients."""
        frozen = jax.tree.map(lax.stop_gradient, without_adapters(whole))
        return self.shapes.without_adapters.merged(frozen)

    def _pass(self, rows: Batch) -> ForwardContext:
        key = self.step_key
        return ForwardContext(
            comm=self.comm,
            kernel=self.plan.attention,
            remat=self.plan.remat,
            kept_layers=self.plan.kept_layers,
            overlap=self.plan.overlap,
            hands_over=self.plan.pipeline is None,
            offload=self.plan.offloads_activations,
            visibility=Visibility(rows["segments"] if self.config.separates_documents else None),
            keys_B=None
            if key is None
            else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows["examples"]),
        )

    def _added_shares(self, sums: Any, *apart: str) -> Any:
        """A tree of sums, float32, added over all devices but those that differ along the batch or
        the logical axes `apart`.
        """
        rules = self.comm.rules
        rows = rules.get(BATCH, ())
        left = {axis for name in (BATCH, *apart) for axis in rules.get(name, ())}
        sums = jax.tree.map(lambda share: share.astype(jnp.float32), sums)
        return jax.tree.map(lambda share: vary(share, rows), added_shares(sums, apart=left))
