"""The training step: pure `(state, batch) -> (state, metrics)`, one `shard_map` with every mesh
axis manual.

All communication between devices is in four places: collectives that the model names
(mesh/collectives.py), those of fsdp (mesh/zero.py), sends between pipeline stages
(pipeline/executor.py), and the scalars reduced here. Microbatches add their gradients locally
(training/gradients.py); gradients are summed over devices once per step.

Why manual and not left to the partitioner: docs/decisions/0001-every-mesh-axis-manual.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import Config, Tuning
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.mesh.axes import BATCH
from optimus_jax.mesh.build import build_mesh
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.mesh.leaf import trained_of, with_trained
from optimus_jax.mesh.scopes import GRADIENTS, OPTIMIZER
from optimus_jax.mesh.sharding import batch_spec, layouts_of, map_trained, put_batch
from optimus_jax.mesh.sums import Sums
from optimus_jax.mesh.xla_options import GPU, CompilerOption, as_compiler_dict, compiler_options
from optimus_jax.mesh.zero import LeafLayout, varying_axes
from optimus_jax.models.generator import beside_generator
from optimus_jax.models.keys import make_key
from optimus_jax.models.shapes import ModelShapes, Params
from optimus_jax.plan import Plan
from optimus_jax.training.compiler_options import options_for, usable_bytes
from optimus_jax.training.frozen_layers import zero_in_frozen_layers
from optimus_jax.training.generator import GeneratorPass
from optimus_jax.training.gradients import sums_alone, sums_and_gradients
from optimus_jax.training.label_logits import LOGITS, logits_task
from optimus_jax.training.next_token import LIKELIEST, next_token_task
from optimus_jax.training.objective import Objective
from optimus_jax.training.offload import update_through_host
from optimus_jax.training.optimizer import check_whole, learning_rate, make_optimizer
from optimus_jax.training.rate_factors import RateFactors, check_rate_factors
from optimus_jax.training.state import (
    LossScale,
    TrainState,
    abstract_params,
    abstract_state,
    bytes_on_device,
    initial_state,
    layer_elements,
    planned_shapes,
    retuned_params,
    state_shardings,
    state_specs,
    state_with,
)
from optimus_jax.training.task import GENERATOR_LOSS, Batch, Task
from optimus_jax.training.tasks import check_task, task_of

Metrics = dict[str, Array]
STEP_METRICS = ("loss", "grad_norm", "lr", "tokens", "skipped", "loss_scale")
"""Metrics of every step; others are the task's, and auxiliary sums of the layers."""


CORRUPTION = 0x6D61736B
"""What `Task.corrupt` draws with has nothing in common with dropout, whose keys are of the step."""
AUGMENTATION = 0x696D6167
"""The same of `Task.augment`."""
EVALUATION = 0
"""The step of which evaluations are: those of training begin at 1."""


class EvalSums(NamedTuple):
    """Sums over a batch's terms, on all devices; replicated scalars."""

    loss: Array
    tokens: Array
    """Number of terms."""
    metrics: Sums


@dataclass(frozen=True)
class Program:
    """Everything that is compiled for one model under one plan on one mesh."""

    config: Config
    shapes: ModelShapes
    plan: Plan
    mesh: Mesh
    optimizer: optax.GradientTransformation
    options: tuple[CompilerOption, ...]
    """XLA options for compiling steps and evaluations."""
    state_shardings: TrainState
    batch_sharding: NamedSharding
    init: Callable[[Array], TrainState]
    """int32 seed -> state before step 1, created sharded."""
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    """Donates the state. Metrics: STEP_METRICS, and the task's divided by the tokens; replicated
    scalars."""
    eval_step: Callable[[Params, Batch], EvalSums]
    next_tokens: Callable[[Params, Batch], Array]
    """The likeliest token after the one position of each row that counts, int32 [R]; replicated.
    `examples` are numbers of the batch's R rows (training/next_token.py)."""
    label_logits: Callable[[Params, Batch], Array]
    """Logits of the labels of each token, or of those of each image, float32 [R, L, N] or
    [R, 1, N]; replicated. `examples` as of `next_tokens` (training/label_logits.py)."""

    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every leaf of the state."""
        return abstract_state(
            self.shapes, self.optimizer, self.config.precision, self.plan, self.mesh
        )

    def abstract_params(self, tuning: Tuning, *, stored: bool = False) -> Params:
        """Shape, dtype and sharding of the parameters of the same model with other adapters, or
        without: `Tuning()`. They may be given to `state_with`.

        Args:
          stored: with layers in the order of checkpoints.
        """
        return abstract_params(self.shapes.with_tuning(tuning), self.plan, self.mesh, stored=stored)

    def state_with(self, params: Params, tuning: Tuning | None = None) -> TrainState:
        """The state before step 1 with these parameters, which are donated unless `tuning` differs.

        Args:
          params: as `abstract_params(tuning)`; empty slots are zero.
          tuning: their adapters; None: those of the run. Others are merged, and the run's begin as
            nothing.
        """
        source = self.shapes.with_tuning(self.config.model.tuning if tuning is None else tuning)
        begin = jax.jit(
            lambda params: state_with(
                retuned_params(params, source, self.shapes, jnp.int32(self.config.seed)),
                self.shapes,
                self.optimizer,
                self.config.precision,
                self.plan,
            ),
            donate_argnums=0 if source is self.shapes else (),
            out_shardings=self.state_shardings,
            compiler_options=compiler_options(self.mesh),
        )
        return begin(params)

    def put_batch(self, batch: dict[str, np.ndarray], rows: int | None = None) -> Batch:
        """A batch on the devices.

        Args:
          batch: this process's rows, in the order of `local_rows`, as the loader gives them.
          rows: rows of the global batch; None: those of a training step.
        """
        prepared = task_of(self.config).batch_of(batch, self.config.model.patch_values)
        return put_batch(prepared, self.batch_sharding, rows or self.config.data.global_batch)

    def abstract_batch(
        self, rows: int | None = None, seq_len: int | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every array of a batch.

        Args:
          rows, seq_len: sizes of the global batch; None: those of a training step.
        """
        rows = self.config.data.global_batch if rows is None else rows
        seq_len = self.config.seq_len if seq_len is None else seq_len
        return {
            name: jax.ShapeDtypeStruct(
                array.shape(rows, seq_len, self.config.model.patch_values),
                array.dtype,
                sharding=self.batch_sharding,
            )
            for name, array in task_of(self.config).arrays.items()
        }


def build_program(config: Config, plan: Plan, devices: Sequence[Any] | None = None) -> Program:
    """Jit everything that a run of `config` under `plan` needs; nothing is compiled yet.

    Args:
      devices: devices of the mesh, in this order; None: all devices.
    Raises:
      ConfigError: a JAX setting would change the results of the program.
      PlanError: the plan is for another number of devices.
    """
    check_jax_settings()
    check_task(config)
    check_rate_factors(config)
    check_whole(config.optimizer, plan.axes, plan.zero)
    mesh = build_mesh(plan.axes, None if devices is None else list(devices))
    shapes = planned_shapes(config.model, plan)
    optimizer = make_optimizer(
        config.optimizer, trained_of(shapes.leaves, shapes.leaves), moments=plan.moments
    )
    specs = state_specs(shapes, optimizer, plan)
    rows, scalar = batch_spec(plan.active_rules(config.model)), PartitionSpec()
    shardings = state_shardings(shapes, optimizer, plan, mesh)
    step = _DeviceStep(config, shapes, plan, optimizer)
    device = mesh.devices.flat[0]
    on_gpu = device.platform in GPU
    resident = (
        bytes_on_device(abstract_state(shapes, optimizer, config.precision, plan, mesh))
        if on_gpu
        else None
    )
    options = options_for(
        device.platform,
        device.device_kind,
        plan,
        resident,
        usable_bytes(mesh) if on_gpu else None,
        layer_elements(shapes, plan, mesh),
    )

    def forward_only(of_device: Callable[[Params, Batch], Any]) -> Callable[..., Any]:
        """Jit what is computed of parameters and a batch alone."""
        return jax.jit(
            jax.shard_map(of_device, mesh=mesh, in_specs=(specs.params, rows), out_specs=scalar),
            compiler_options=as_compiler_dict(options),
        )

    return Program(
        config=config,
        shapes=shapes,
        plan=plan,
        mesh=mesh,
        optimizer=optimizer,
        options=options,
        state_shardings=shardings,
        batch_sharding=NamedSharding(mesh, rows),
        init=jax.jit(
            lambda seed: initial_state(shapes, optimizer, config.precision, plan, seed),
            out_shardings=shardings,
            compiler_options=compiler_options(mesh),
        ),
        train_step=jax.jit(
            jax.shard_map(step.train, mesh=mesh, in_specs=(specs, rows), out_specs=(specs, scalar)),
            donate_argnums=0,
            out_shardings=(shardings, NamedSharding(mesh, scalar))
            if plan.offload != "none"
            else None,
            compiler_options=as_compiler_dict(options),
        ),
        eval_step=forward_only(step.evaluate),
        next_tokens=forward_only(step.next_tokens),
        label_logits=forward_only(step.label_logits),
    )


class _DeviceStep:
    """The arithmetic of one device, inside `shard_map`."""

    def __init__(
        self,
        config: Config,
        shapes: ModelShapes,
        plan: Plan,
        optimizer: optax.GradientTransformation,
    ):
        self.config, self.plan, self.optimizer = config, plan, optimizer
        self.shapes = shapes
        self.rules = plan.active_rules(config.model)
        self.layouts = layouts_of(
            shapes.leaves, plan.active_rules(config.model), plan.zero, plan.scatter
        )
        dtype = jnp.dtype(COMPUTE_DTYPES[plan.precision])
        comm = Collectives(dtype, self.rules, plan.zero, plan.scatter)
        self.objective = Objective(
            config=config, task=task_of(config), shapes=shapes, plan=plan, comm=comm
        )
        self.of_leaf = [
            make_optimizer(config.optimizer, leaf, moments=plan.moments)
            for leaf in jax.tree.leaves(shapes.leaves)
            if leaf.trained
        ]
        self.learning_rate = learning_rate(config, shapes.num_params)
        self.rate_factors = RateFactors(config.optimizer, shapes, comm)
        has_generator = shapes.generator is not None
        self.generator = GeneratorPass(config, shapes, plan) if has_generator else None
        self.task_weight = config.masking.discriminator_weight if has_generator else 1.0
        """Weight of the model's own loss."""

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        step = state.step + 1
        key = (
            jax.random.fold_in(make_key(self.config.seed), step)
            if self.config.model.draws_dropout
            else None
        )
        scale = state.loss_scale.scale if self.plan.precision == "f16" else jnp.float32(1)
        unscaled = (lambda x: x / scale) if self.plan.precision == "f16" else (lambda x: x)

        @jax.named_scope(GRADIENTS)
        def reduced(layout: LeafLayout, gradient: Array) -> Array:
            return self._of_trained_layers(layout, unscaled(layout.reduced(gradient)))

        rows = self._changed(self.objective.task.augment, AUGMENTATION, batch, step)
        batch = self._corrupted(rows, step)
        generated = self.generator and self.generator.train(
            state.params,
            rows,
            batch,
            self._batch_axes,
            step_key=key,
            weight=scale / self._num_terms(batch),
        )
        batch = generated.rows if generated else batch
        tokens = self._over_batch(self.objective.task.count(batch))
        sums, gradients = sums_and_gradients(
            self.objective.at(step_key=key, weight=self.task_weight * scale / at_least_one(tokens)),
            beside_generator(self.layouts),
            beside_generator(state.params),
            batch,
            self._batch_axes,
        )
        loss = unscaled(self._over_batch(sums.loss))
        gradients = map_trained(reduced, beside_generator(self.layouts), gradients)
        metrics = {
            name: self._over_batch(part) / at_least_one(tokens)
            for name, part in sums.metrics.items()
        }
        if generated:
            gradients = generated.with_gradients(gradients, reduced)
            metrics[GENERATOR_LOSS] = unscaled(self._over_batch(generated.loss))
            loss = loss + metrics[GENERATOR_LOSS]
        norm = global_norm(gradients)
        lr = self.learning_rate(step)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)

        def if_finite(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        params, opt_state = self._updated(state, gradients, norm, lr, if_finite)
        new = TrainState(
            step=step,
            params=with_trained(params, state.params),
            opt_state=opt_state,
            loss_scale=self._rescaled(state.loss_scale, finite),
        )
        return new, {
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": tokens,
            "skipped": ~finite,
            "loss_scale": scale,
            **metrics,
        }

    def evaluate(self, params: Params, batch: Batch) -> EvalSums:
        masked = self._corrupted(batch, jnp.int32(EVALUATION))
        generated = self.generator and self.generator.evaluate(params, batch, masked)
        batch = generated.rows if generated else masked
        tokens = self._over_batch(self.objective.task.count(batch))
        layouts, params = beside_generator(self.layouts), beside_generator(params)
        sums = sums_alone(self.objective, layouts, params, batch)
        loss = self._over_batch(sums.loss)
        metrics = {name: self._over_batch(part) for name, part in sums.metrics.items()}
        if generated:
            # A mean over hidden tokens, as a sum over all that count.
            mean = self._over_batch(generated.loss) / self._num_terms(masked)
            metrics[GENERATOR_LOSS] = mean * tokens.astype(jnp.float32)
            loss = self.task_weight * loss + metrics[GENERATOR_LOSS]
        return EvalSums(loss=loss, tokens=tokens, metrics=metrics)

    def next_tokens(self, params: Params, batch: Batch) -> Array:
        return self._of_rows(next_token_task, LIKELIEST, params, batch).astype(jnp.int32)

    def label_logits(self, params: Params, batch: Batch) -> Array:
        return self._of_rows(logits_task, LOGITS, params, batch)

    def _of_rows(
        self, task_on: Callable[[Task, int], Task], metric: str, params: Params, batch: Batch
    ) -> Array:
        """A metric of a task on the rows of the batch over all devices, given their number."""
        num_rows = self.objective.comm.size(len(batch["tokens"]), BATCH)
        task = task_on(self.objective.task, num_rows)
        layouts, params = beside_generator(self.layouts), beside_generator(params)
        sums = sums_alone(replace(self.objective, task=task), layouts, params, batch)
        return self._over_batch(sums.metrics[metric])

    def _num_terms(self, batch: Batch) -> Array:
        """Terms of the loss on all devices, float32, 1 if there are none."""
        return at_least_one(self._over_batch(self.objective.task.count(batch)))

    def _corrupted(self, batch: Batch, step: Array) -> Batch:
        """The rows that the model learns from, or is evaluated on, in this step."""
        return self._changed(self.objective.task.corrupt, CORRUPTION, batch, step)

    def _changed(
        self,
        change: Callable[[Config, Batch, Array], Batch] | None,
        stream: int,
        batch: Batch,
        step: Array,
    ) -> Batch:
        """Rows after a change that draws with a key for the seed, a stream of keys, the step and
        the example.
        """
        if change is None:
            return batch
        key = jax.random.fold_in(jax.random.fold_in(make_key(self.config.seed), stream), step)
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return change(self.config, batch, fold(key, batch["examples"]))

    @jax.named_scope(OPTIMIZER)
    def _updated(
        self,
        state: TrainState,
        gradients: Params,
        norm: Array,
        lr: Array,
        if_finite: Callable[[Any, Any], Any],
    ) -> tuple[Params, optax.OptState]:
        """Clip the gradients and run the optimizer: the trained parameters, as they are stored, and
        its state; `if_finite`(new, old) selects both.
        """
        limit = self.config.optimizer.clip_norm
        factor = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)) if limit else jnp.float32(1)
        gradients = jax.tree.map(lambda g: g * factor, gradients)
        trained = map_trained(lambda _, p: p, self.layouts, state.params)
        if self.plan.offloads_moments:
            updates, opt_state = update_through_host(
                self.optimizer,
                self.of_leaf,
                if_finite,
                gradients,
                state.opt_state,
                trained,
                after=norm,
            )
        else:
            updates, opt_state = self.optimizer.update(gradients, state.opt_state, trained)
            opt_state = if_finite(opt_state, state.opt_state)
        updates = map_trained(self._of_trained_layers, self.layouts, updates)
        params = map_trained(
            lambda layout, p, u: p - self.rate_factors.rate(lr, layout.leaf, u) * u,
            self.layouts,
            trained,
            updates,
        )
        return if_finite(params, trained), opt_state

    def _of_trained_layers(self, layout: LeafLayout, value: Array) -> Array:
        """A gradient or update with zeros in layers that are not trained."""
        return zero_in_frozen_layers(layout.leaf, value, self.shapes, self.objective.comm)

    def _rescaled(self, scale: LossScale, finite: Array) -> LossScale:
        """f16: halve after overflows in a row, double after clean steps."""
        if self.plan.precision != "f16":
            return scale
        precision = self.config.precision
        overflows = jnp.where(finite, 0, scale.overflows + 1)
        clean = jnp.where(finite, scale.clean_steps + 1, 0)
        halve, double = (
            overflows >= precision.loss_scale_hysteresis,
            clean >= precision.loss_scale_growth_steps,
        )
        factor = jnp.where(halve, 0.5, jnp.where(double, 2.0, 1.0)).astype(jnp.float32)
        return LossScale(
            scale=jnp.maximum(scale.scale * factor, 1.0),
            clean_steps=jnp.where(double, 0, clean),
            overflows=jnp.where(halve, 0, overflows),
        )

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        return self.rules.get(BATCH, ())

    def _over_batch(self, x: Array) -> Array:
        """The sum over all devices that hold different rows."""
        return lax.psum(x, self._batch_axes) if self._batch_axes else x


def at_least_one(number: Array) -> Array:
    """A number that sums are divided by, float32."""
    return jnp.maximum(number, 1).astype(jnp.float32)


@jax.named_scope(GRADIENTS)
def global_norm(tree: Any) -> Array:
    """Euclidean norm over all leaves and all devices; float32.

    A leaf is summed over exactly those mesh axes that split it, which its type knows; leaves
    that are split alike share one reduction.
    """
    squares: dict[frozenset[str], Array] = {}
    for leaf in jax.tree.leaves(tree):
        axes = varying_axes(leaf)
        squares[axes] = squares.get(axes, jnp.zeros((), jnp.float32)) + jnp.sum(leaf * leaf)
    return jnp.sqrt(
        sum(
            lax.psum(square, tuple(sorted(axes))) if axes else square
            for axes, square in squares.items()
        )
    )
