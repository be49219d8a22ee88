"""Runs the table of any schedule inside the step's `shard_map`.

Consecutive ticks with the same kinds of work are one `lax.scan` over the rows of the tables. In a
tick, a stage receives what its neighbours sent, runs its forward task, the head together with all
other stages, and its backward task, and its results are sent in the next tick. A task is a branch
of its stage (mesh/branches.py): an idle stage computes nothing, gathers nothing, and writes zeros
to the spare slot of a buffer. All devices of a stage take the same branch, and a collective inside
it spans these alone. What spans several stages (sends, embedding and head) stands in no stage's
branch.

Collectives of the same devices begin in one order on all of them: each reads what the one before it
has computed, or both stand outside of branches. So sums over stages are not in the branches of head
and embedding, though not every tick needs them (docs/decisions/0034-idle-stages-run-nothing.md).

Between stages, and in buffers, a stage value is divided among the devices along tensor that hold
the same (pipeline/stage_parts.py).

Words: a *buffer* is an array whose leading dimension is the slots that pipeline/buffers.py assigned
and the spare slot; *outer* parameters are those outside the stack of layers, which all stages
share; a *stage value* is what travels from stage to stage (pipeline/stage_values.py).

Shapes: M microbatches, B examples of a microbatch on this device, R repeats.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.branches import ordered_after, run_when
from optimus_jax.mesh.scopes import BACKWARD_TASK, FORWARD_TASK
from optimus_jax.mesh.sums import Sums
from optimus_jax.mesh.zero import vary, varying_axes
from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.residuals import Layers, Microbatch, Residuals, vjp_of_layers
from optimus_jax.pipeline.schedule import IDLE, Phase, Schedule, Table
from optimus_jax.pipeline.stage_parts import StageParts
from optimus_jax.pipeline.stage_values import (
    Tree,
    buffers_of,
    check_dtypes,
    check_unchanged,
    floating,
    result_types,
    slot_of,
    where,
    with_floating,
    with_slot,
    zeros,
)


@dataclass(frozen=True, kw_only=True)
class StageFunctions:
    """The functions that a pipeline runs. Every stage calls each at the same time, inside
    `shard_map`.

    Sums are float32. They vary over the mesh axes that split the batch and no others,
    except that auxiliary sums are those of a stage.
    """

    embed: Callable[[Tree, Microbatch], Tree]
    """(outer, microbatch) -> stage value, the same on all stages: each adds its part of the
    vocabulary."""
    layers: Layers
    """(one repeat's parameters, one repeat's constants, stage value, microbatch) -> (stage value of
    the same type, auxiliary sums by name), on this stage's layers."""
    loss: Callable[[Tree, Tree, Microbatch], tuple[Array, Sums]]
    """(outer, final stage value, microbatch) -> (this device's weighted sum of losses, metrics by
    name), the same on all stages. Metrics are not differentiated."""


class PipelineSums(NamedTuple):
    """Sums over microbatches and stages; not over devices that split the batch."""

    loss: Array
    """Of the head, without auxiliary sums; float32."""
    metrics: Sums
    auxiliary: Sums


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline as one device runs it; every array is the device's part.

    Args:
      outer: parameters of `embed` and `loss` that are differentiated, as they are used: whole
        along fsdp, in the compute format.
      params: parameters of the layers, leaves [R, ...]; differentiated.
      constants: other inputs of the layers, leaves [R, ...]; not differentiated.
      microbatches: leaves [M, B, ...].
      keep_residuals: whether backward reads residuals that forward stored; otherwise it recomputes
        the stage.
      auxiliary_weights: factor with which an auxiliary sum counts in what is differentiated; 0 for
        others.
      trains_embed: whether `embed` uses any of `outer`.
    """

    functions: StageFunctions
    schedule: Schedule
    outer: Tree
    params: Tree
    constants: Tree
    microbatches: Tree
    keep_residuals: bool
    auxiliary_weights: Mapping[str, Array | float] = field(default_factory=dict)
    trains_embed: bool = True

    def sums(self) -> PipelineSums:
        """Loss, metrics and auxiliary sums."""
        return self._run(_Run(self, differentiate=False))[0]

    def sums_and_gradients(self) -> tuple[PipelineSums, Tree, Tree]:
        """Those sums, and the float32 gradients of the loss and the weighted auxiliary sums with
        respect to `outer` and `params`, summed over microbatches but not over devices.
        """
        sums, carry = self._run(_Run(self, differentiate=True))
        return sums, carry["d_outer"], carry["d_params"]

    def _run(self, run: "_Run") -> tuple[PipelineSums, dict[str, Any]]:
        carry = run.start()
        metrics: Sums = {}
        auxiliary: Sums = {}
        for phase in self.schedule.phases():
            rows = {
                name: jnp.asarray(table[phase.start : phase.stop])
                for name, table in run.tables.items()
            }
            carry, (of_head, of_layers) = lax.scan(partial(run.tick, phase), carry, rows)
            _add_ticks(metrics, of_head)
            _add_ticks(auxiliary, of_layers)
        auxiliary = {name: lax.psum(part, PIPE) for name, part in auxiliary.items()}
        return PipelineSums(carry["loss"], metrics, auxiliary), carry


class _Run:
    """The ticks of one pipeline.

    The carry of the scans is a dict with only the entries that this run needs.
    """

    def __init__(self, pipeline: Pipeline, *, differentiate: bool):
        self.p, self.differentiate = pipeline, differentiate
        self.keeps = pipeline.keep_residuals and differentiate
        schedule = pipeline.schedule
        self.buffers = Buffers.of(schedule, keep_residuals=self.keeps)
        self.tables = {
            "forward": schedule.forward,
            "backward": schedule.backward,
            "head": schedule.head,
            **self.buffers.tables,
        }
        self.stage = lax.axis_index(PIPE)
        self.num_stages = schedule.num_stages
        self.residuals: Residuals | None = None

    # The values carried from tick to tick

    def start(self) -> dict[str, Any]:
        first = self._microbatch(jnp.int32(0))
        embedded = result_types(self.p.functions.embed, self.p.outer, first)
        check_dtypes(embedded)
        value = jax.tree.map(lambda leaf: zeros(leaf, PIPE), embedded)
        self.parts = StageParts.of(value)
        """Of a stage value."""
        self.cotangent_parts = StageParts.of(floating(value))
        """Of the cotangents of its floating leaves."""
        part, cotangent = self.parts.mine(value), self.cotangent_parts.mine(floating(value))
        head = result_types(
            lambda outer, rows: self.p.functions.loss(
                outer, self.p.functions.embed(outer, rows), rows
            ),
            self.p.outer,
            first,
        )
        loss, self.zero_metrics = jax.tree.map(zeros, head)
        self.sum_axes = sorted({PIPE, *varying_axes(loss)})
        carry: dict[str, Any] = {
            "loss": loss,
            "sent_forward": part,
            "inputs": buffers_of(self.buffers.num_inputs, part),
        }
        if not self.differentiate:
            return carry
        carry |= {
            "sent_backward": cotangent,
            "cotangents": buffers_of(self.buffers.num_cotangents, cotangent),
            "d_outer": _float32_zeros(self.p.outer),
            "d_params": _float32_zeros(self.p.params),
        }
        if self.keeps:
            self.residuals = Residuals(
                self._layers,
                self._repeat(jnp.int32(0)),
                value,
                self._microbatch(vary(jnp.int32(0), [PIPE])),
            )
            # A residual may be the same on all stages when forward computes it (cuDNN's document
            # mask), but in a buffer it belongs to a different microbatch on each stage.
            carry["residuals"] = buffers_of(
                self.buffers.num_residuals, [vary(like, [PIPE]) for like in self.residuals.like]
            )
        return carry

    # One tick

    def tick(
        self, phase: Phase, carry: dict[str, Any], row: dict[str, Array]
    ) -> tuple[dict[str, Any], tuple[Sums, Sums]]:
        """The carry after a tick, and its metrics and auxiliary sums."""
        carry, metrics, auxiliary = dict(carry), {}, {}
        arrived = self._receive(phase, carry)
        if self.p.schedule.latency == 1:
            self._store(carry, arrived, row)
        if phase.forward:
            auxiliary = self._run_forward(phase, carry, row)
        if phase.head:
            metrics = self._run_head(phase, carry, row, arrived)
        if phase.backward:
            self._run_backward(phase, carry, row)
        if self.p.schedule.latency > 1:
            self._store(carry, arrived, row)
        return carry, (metrics, auxiliary)

    def _receive(self, phase: Phase, carry: dict[str, Any]) -> dict[str, Tree]:
        """The values that the neighbours sent in the previous tick. They do not depend on anything
        that this tick computes.
        """
        ticks, stages = slice(phase.start, phase.stop), range(self.num_stages)
        arrived = {}
        for name, sent, step in (("input", "sent_forward", 1), ("cotangent", "sent_backward", -1)):
            spare = {"input": self.buffers.num_inputs, "cotangent": self.buffers.num_cotangents}[
                name
            ]
            if (self.tables[f"arrival_{name}"][ticks] != spare).any():
                arrived[name] = lax.ppermute(
                    carry[sent], PIPE, [(s, (s + step) % self.num_stages) for s in stages]
                )
        return arrived

    def _store(
        self, carry: dict[str, Any], arrived: dict[str, Tree], row: dict[str, Array]
    ) -> None:
        for name, value in arrived.items():
            carry[f"{name}s"] = with_slot(
                carry[f"{name}s"], self._mine(row[f"arrival_{name}"]), value
            )

    def _run_forward(self, phase: Phase, carry: dict[str, Any], row: dict[str, Array]) -> Sums:
        """Run this stage's forward task; returns its auxiliary sums, 0 if it is idle."""
        task = self._mine(row["forward"])
        slot = self._mine(row["forward_input"])
        part = slot_of(carry["inputs"], slot)
        if phase.embed:
            part = self._embedded(row["forward"][0], part)
            if self.differentiate and not self.keeps:
                carry["inputs"] = with_slot(carry["inputs"], slot, part)

        @jax.named_scope(FORWARD_TASK)
        def run() -> tuple[Tree, Sums, list[Array]]:
            repeat = self._repeat(task % self.p.schedule.num_repeats)
            value, microbatch = self.parts.whole(part), self._microbatch(self._microbatch_of(task))
            if self.residuals is None:
                after, auxiliary = self._layers(*repeat, value, microbatch)
                return self.parts.mine(after), auxiliary, []
            (after, auxiliary), saved = self.residuals.forward(repeat, value, microbatch)
            return self.parts.mine(after), auxiliary, saved

        carry["sent_forward"], auxiliary, saved = run_when(
            task != IDLE, run, iterations=self._rows(phase, "forward") != IDLE
        )
        if saved:
            slot = self._mine(row["forward_residual"])
            carry["residuals"] = with_slot(carry["residuals"], slot, saved)
        return auxiliary

    def _embedded(self, first: Array, part: Tree) -> Tree:
        """The input of the first stage's task `first` if that begins a microbatch; elsewhere
        `part`.

        All stages embed together, since each has a part of the vocabulary, also in ticks that need
        no embedding.
        """
        begins = self._begins(first)
        microbatch = self._microbatch(jnp.maximum(self._microbatch_of(first), 0))
        embedded = self.parts.mine(self.p.functions.embed(self.p.outer, microbatch))
        return where((self.stage == 0) & begins, embedded, part)

    def _run_head(
        self,
        phase: Phase,
        carry: dict[str, Any],
        row: dict[str, Array],
        arrived: dict[str, Tree],
    ) -> Sums:
        """Compute the loss of the microbatch that the last stage has just finished, on all stages:
        each has a part of the vocabulary. Returns its metrics.
        """
        is_last = self.stage == self.num_stages - 1
        ticks, wanted = self._rows(phase, "head") != IDLE, row["head"] != IDLE
        sent = carry["sent_forward"]
        if not ticks.all() and self.p.schedule.latency == 1 and "cotangent" in arrived:
            # What arrived is not needed before backward, but a send may span the same devices as
            # the collectives in the head's branch.
            sent = ordered_after(sent, arrived["cotangent"])
        last = lax.psum(where(is_last, sent, 0), PIPE)

        def loss(value: Tree, outer: Tree, leaves: list[Array]) -> tuple[Array, Sums]:
            return self.p.functions.loss(
                outer, with_floating(value, leaves), self._microbatch(row["head"])
            )

        if not self.differentiate:

            def compute() -> tuple[Array, Sums]:
                value = self.parts.whole(last)
                return loss(value, self.p.outer, floating(value))

            here, metrics = run_when(wanted, compute, iterations=ticks)
            carry["loss"] += here
            return metrics

        def add_gradients() -> tuple[Array, Tree, list[Array], Sums]:
            value = self.parts.whole(last)
            (here, metrics), (d_here, d_value) = jax.value_and_grad(
                partial(loss, value), argnums=(0, 1), has_aux=True
            )(self.p.outer, floating(value))
            return (
                carry["loss"] + here,
                _added(carry["d_outer"], d_here),
                self.cotangent_parts.mine(d_value),
                metrics,
            )

        carry["loss"], carry["d_outer"], cotangent, metrics = run_when(
            wanted,
            add_gradients,
            (carry["loss"], carry["d_outer"], None, None),
            iterations=ticks,
        )
        carry["cotangents"] = with_slot(
            carry["cotangents"],
            self._mine(row["head_cotangent"]),
            [vary(leaf, [PIPE]) for leaf in cotangent],
        )
        return metrics

    def _run_backward(self, phase: Phase, carry: dict[str, Any], row: dict[str, Array]) -> None:
        task = self._mine(row["backward"])
        index = task % self.p.schedule.num_repeats
        part = slot_of(carry["cotangents"], self._mine(row["backward_cotangent"]))
        if phase.forward:
            # Both tasks have collectives of the same devices, which all must begin in one order.
            part = ordered_after(part, carry["sent_forward"])

        @jax.named_scope(BACKWARD_TASK)
        def run() -> tuple[Tree, list[Array]]:
            cotangent = self.cotangent_parts.whole(part)
            repeat = self._repeat(index)
            if self.residuals is not None:
                saved = slot_of(carry["residuals"], self._mine(row["backward_residual"]))
                d_params, d_value = self.residuals.backward(
                    repeat, saved, (cotangent, self._weights(self.residuals.auxiliary_names))
                )
            else:
                value = self.parts.whole(
                    slot_of(carry["inputs"], self._mine(row["backward_input"]))
                )
                microbatch = self._microbatch(self._microbatch_of(task))
                (_, auxiliary), pull = vjp_of_layers(self._layers, repeat, value, microbatch)
                d_params, d_value = pull((cotangent, self._weights(auxiliary)))
            return d_params, self.cotangent_parts.mine(d_value)

        # Added outside the branch: one that handed on the sum of gradients would copy it.
        d_params, carry["sent_backward"] = run_when(
            task != IDLE, run, iterations=self._rows(phase, "backward") != IDLE
        )
        carry["d_params"] = self._added_to_repeat(carry["d_params"], d_params, index)
        if phase.embed_backward and self.p.trains_embed:
            self._run_embed_backward(phase, carry, row["backward"][0])

    def _run_embed_backward(self, phase: Phase, carry: dict[str, Any], first: Array) -> None:
        """Backpropagate the first stage's input gradient through the embedding, on all stages: each
        has a part of the vocabulary."""

        d_part = lax.psum(where(self.stage == 0, carry["sent_backward"], 0), PIPE)

        def add_gradient() -> tuple[Tree]:
            d_embedded = self.cotangent_parts.whole(d_part)
            microbatch = self._microbatch(self._microbatch_of(first))
            pull = jax.vjp(
                lambda outer: floating(self.p.functions.embed(outer, microbatch)), self.p.outer
            )[1]
            return (_added(carry["d_outer"], pull(d_embedded)[0]),)

        (carry["d_outer"],) = run_when(
            self._begins(first),
            add_gradient,
            (carry["d_outer"],),
            iterations=self._begins(self._rows(phase, "backward")[:, 0]),
        )

    # Helpers

    def _layers(
        self, params: Tree, constants: Tree, value: Tree, microbatch: Microbatch
    ) -> tuple[Tree, Sums]:
        after, auxiliary = self.p.functions.layers(params, constants, value, microbatch)
        check_unchanged(value, after)
        return after, {name: vary(part, self.sum_axes) for name, part in auxiliary.items()}

    def _weights(self, names: Iterable[str]) -> Sums:
        """Cotangents of a backward task's auxiliary sums."""
        weights = self.p.auxiliary_weights
        return {name: vary(jnp.float32(weights.get(name, 0)), self.sum_axes) for name in names}

    def _rows(self, phase: Phase, name: str) -> Table:
        """A table's rows in a phase."""
        return self.tables[name][phase.start : phase.stop]

    def _mine(self, row: Array) -> Array:
        """This stage's entry of a row of a table."""
        return lax.dynamic_index_in_dim(row, self.stage, keepdims=False)

    def _microbatch_of(self, task: Array) -> Array:
        return task // self.p.schedule.num_repeats

    def _begins(self, task: Any) -> Any:
        """Whether a task of the first stage is of repeat 0, whose input is the embedding; of each
        in an array.
        """
        return (task != IDLE) & (task % self.p.schedule.num_repeats == 0)

    def _microbatch(self, index: Array) -> Microbatch:
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), self.p.microbatches
        )

    def _repeat(self, index: Array) -> tuple[Tree, Tree]:
        if self.p.schedule.num_repeats == 1:
            return jax.tree.map(lambda leaf: leaf[0], (self.p.params, self.p.constants))
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False),
            (self.p.params, self.p.constants),
        )

    def _added_to_repeat(self, total: Tree, part: Tree, index: Array) -> Tree:
        if self.p.schedule.num_repeats == 1:
            return jax.tree.map(lambda t, d: t + d[None].astype(t.dtype), total, part)
        return jax.tree.map(lambda t, d: t.at[index].add(d.astype(t.dtype)), total, part)


def _add_ticks(total: Sums, ticks: Sums) -> None:
    """Add sums [ticks] of a phase to the totals."""
    for name, parts in ticks.items():
        total[name] = parts.sum(0) + total[name] if name in total else parts.sum(0)


def _float32_zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), tree)


def _added(total: Tree, part: Tree) -> Tree:
    return jax.tree.map(lambda t, d: t + d.astype(t.dtype), total, part)
