"""The generator of a model that finds replaced tokens, in a step of both.

Clark et al. 2020 (arXiv:2003.10555), section 3: the generator restores masked tokens; what it draws
for them takes their place; the model learns which tokens are not the original ones. Nothing is
learnt through the draws. The loss is the generator's, and `masking.discriminator_weight` times the
model's.

The generator runs before the model, over the same microbatches, and without pipeline stages: each
stage runs all of it, and its share of the vocabulary. It shares the embedding with the model, whose
gradient is the sum of both.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import Array

from optimus_jax.config import Config
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.mesh.scopes import GENERATOR as GENERATOR_PASS
from optimus_jax.mesh.sharding import layouts_of, map_trained
from optimus_jax.models.generator import GENERATOR, SHARED, of_generator, own_part
from optimus_jax.models.shapes import ModelShapes, Params
from optimus_jax.plan import Plan
from optimus_jax.training.gradients import sums_alone, sums_and_gradients
from optimus_jax.training.masking import with_drawn_tokens
from optimus_jax.training.objective import Objective
from optimus_jax.training.task import Batch, TaskSums
from optimus_jax.training.tasks import MLM, task_named


@dataclass(frozen=True)
class GeneratorSums:
    """What the generator's pass over some rows gives."""

    loss: Array
    """This device's weighted sum of its losses, float32."""
    rows: Batch
    """The rows that the model learns from, or is evaluated on."""
    layouts: Params
    """A LeafLayout for every parameter of the generator."""
    gradients: Params | None = None
    """Their gradients, which `LeafLayout.reduced` has not summed yet; None in an evaluation."""

    def with_gradients(self, of_model: Params, reduced: Callable[..., Array]) -> Params:
        """The gradients of all parameters, summed over devices.

        Args:
          of_model: of the model's own parameters, summed.
          reduced: (layout, gradient) -> the sum over devices.
        """
        found = map_trained(reduced, self.layouts, self.gradients)
        shared = {
            name: jax.tree.map(jnp.add, of_model[name], found[name])
            for name in SHARED
            if name in of_model
        }
        return of_model | shared | {GENERATOR: own_part(found)}


@dataclass(frozen=True)
class GeneratorPass:
    """The generator of a model under a plan, inside the step's `shard_map`."""

    config: Config
    """Of the run."""
    shapes: ModelShapes
    """Of the model."""
    plan: Plan
    """Of the model."""

    @cached_property
    def objective(self) -> Objective:
        """Restoring masked tokens."""
        generator, sizes = self.shapes.generator, self.config.model.generator
        assert generator is not None
        assert sizes is not None
        plan = self.plan.of_generator(sizes)
        return Objective(
            config=replace(self.config, model=generator.config, task=MLM),
            task=task_named(MLM),
            shapes=generator,
            plan=plan,
            comm=Collectives(
                jnp.dtype(COMPUTE_DTYPES[plan.precision]),
                plan.active_rules(generator.config),
                plan.zero,
                plan.scatter,
            ),
        )

    @cached_property
    def layouts(self) -> Params:
        """A LeafLayout for every parameter of the generator."""
        comm = self.objective.comm
        return layouts_of(self.objective.shapes.leaves, comm.rules, comm.zero, comm.scatter)

    @jax.named_scope(GENERATOR_PASS)
    def train(
        self,
        params: Params,
        rows: Batch,
        masked: Batch,
        batch_axes: tuple[str, ...],
        *,
        step_key: Array | None,
        weight: Array,
    ) -> GeneratorSums:
        """The pass of a training step over this device's rows.

        Args:
          rows, masked: before and after tokens were hidden.
          weight: of every hidden token.
        """
        key = None if step_key is None else jax.random.fold_in(step_key, _STREAM)
        sums, gradients = sums_and_gradients(
            self.objective.at(step_key=key, weight=weight),
            self.layouts,
            of_generator(params),
            masked,
            batch_axes,
        )
        return self._sums(rows, masked, sums, gradients)

    def evaluate(self, params: Params, rows: Batch, masked: Batch) -> GeneratorSums:
        """The pass of an evaluation. Every hidden token has a weight of 1."""
        sums = sums_alone(
            self.objective,
            self.layouts,
            of_generator(params),
            masked,
            by_microbatch=self.plan.pipeline is not None,
        )
        return self._sums(rows, masked, sums)

    def _sums(
        self, rows: Batch, masked: Batch, sums: TaskSums, gradients: Params | None = None
    ) -> GeneratorSums:
        assert sums.drawn is not None
        rows = with_drawn_tokens(rows, masked, sums.drawn)
        return GeneratorSums(sums.loss, rows, self.layouts, gradients)


_STREAM = 0x67656E
"""What the generator's dropout draws with has nothing in common with the model's."""
