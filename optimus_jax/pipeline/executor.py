"""Runs the table of any schedule inside the step's `shard_map`; all stages execute the same
operations in every tick.

Consecutive ticks with the same kinds of work are one `lax.scan` over the rows of the tables. In a
tick, a stage receives what its neighbours sent, runs its forward task, the head together with all
other stages, and its backward task, and its results are sent in the next tick. An idle stage
computes on the spare slot of a buffer, and the result is never read. So stages never differ in what
they execute, and no collective can wait for a device that took another branch.

Words: a *buffer* is an array whose leading dimension is the slots that pipeline/buffers.py assigned
and the spare slot; *outer* parameters are those outside the stack of layers, which all stages
share.

Shapes: M microbatches, B examples of a microbatch on this device, L length, D embed, R repeats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.zero import vary, varying_axes
from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.residuals import Microbatch, Residuals, Tree, last_written_if_idle
from optimus_jax.pipeline.schedule import Occurrence, Phase, Schedule


@dataclass(frozen=True, kw_only=True)
class StageFunctions:
    """The functions that a pipeline runs. Every stage calls each at the same time, inside
    `shard_map`."""

    embed: Callable[[Tree, Microbatch], Array]
    """(outer, microbatch) -> [B, L, D], the same on all stages: each adds its part of the
    vocabulary."""
    layers: Callable[[Tree, Tree, Array, Microbatch], Array]
    """(one repeat's parameters, one repeat's constants, [B, L, D], microbatch) -> [B, L, D], on
    this stage's layers."""
    loss: Callable[[Tree, Array, Microbatch], Array]
    """(outer, final [B, L, D], microbatch) -> this device's weighted sum of losses, the same on all
    stages."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline as one device runs it; every array is the device's part.

    Args:
      outer: parameters of `embed` and `loss`, as they are used: whole along fsdp, in the compute
        format.
      params: parameters of the layers, leaves [R, ...]; differentiated.
      constants: other inputs of the layers, leaves [R, ...]; not differentiated.
      microbatches: leaves [M, B, ...].
      keep_residuals: whether backward reads residuals that forward stored; otherwise it recomputes
        the stage.
    """

    functions: StageFunctions
    schedule: Schedule
    outer: Tree
    params: Tree
    constants: Tree
    microbatches: Tree
    keep_residuals: bool

    def loss(self) -> Array:
        """The loss summed over microbatches, float32."""
        return self._run(_Run(self, differentiate=False))["loss"]

    def loss_and_gradients(self) -> tuple[Array, Tree, Tree]:
        """The loss and its float32 gradients with respect to `outer` and `params`, summed over
        microbatches but not over devices.
        """
        carry = self._run(_Run(self, differentiate=True))
        return carry["loss"], carry["d_outer"], carry["d_params"]

    def _run(self, run: "_Run") -> dict[str, Any]:
        carry = run.start()
        for phase in self.schedule.phases():
            rows = {
                name: jnp.asarray(table[phase.start : phase.stop])
                for name, table in run.tables.items()
            }
            carry, _ = lax.scan(partial(run.tick, phase), carry, rows)
        return carry


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
        if self.keeps:
            self.tables["backward_residual"] = last_written_if_idle(
                self.buffers.forward_residual,
                self.buffers.backward_residual,
                self.buffers.num_residuals,
            )
        self.stage = lax.axis_index(PIPE)
        self.num_stages = schedule.num_stages
        self.residuals: Residuals | None = None

    # The values carried from tick to tick

    def start(self) -> dict[str, Any]:
        embedded = jax.make_jaxpr(self.p.functions.embed)(
            self.p.outer, self._microbatch(jnp.int32(0))
        ).out_avals[0]
        axes = sorted({PIPE, *embedded.mat.varying})
        hidden = vary(jnp.zeros(embedded.shape, embedded.dtype), axes)
        loss = jax.make_jaxpr(self.p.functions.loss)(
            self.p.outer, hidden, self._microbatch(jnp.int32(0))
        ).out_avals[0]
        loss_axes = sorted(set(loss.mat.varying) - {PIPE})
        carry: dict[str, Any] = {
            "loss": vary(jnp.zeros((), jnp.float32), loss_axes),
            "sent_forward": hidden,
            "inputs": _buffer(self.buffers.num_inputs, hidden),
        }
        if not self.differentiate:
            return carry
        carry |= {
            "sent_backward": hidden,
            "cotangents": _buffer(self.buffers.num_cotangents, hidden),
            "d_outer": _float32_zeros(self.p.outer),
            "d_params": _float32_zeros(self.p.params),
        }
        if self.keeps:
            self.residuals = Residuals(
                self.p.functions.layers,
                self._repeat(jnp.int32(0)),
                hidden,
                self._microbatch(vary(jnp.int32(0), [PIPE])),
            )
            # A residual may be the same on all stages when forward computes it (cuDNN's document
            # mask), but in a buffer it belongs to a different microbatch on each stage.
            carry["residuals"] = [
                _buffer(self.buffers.num_residuals, vary(like, [PIPE]))
                for like in self.residuals.like
            ]
        return carry

    # One tick

    def tick(
        self, phase: Phase, carry: dict[str, Any], row: dict[str, Array]
    ) -> tuple[dict[str, Any], None]:
        carry = dict(carry)
        arrived = self._receive(phase, carry)
        if self.p.schedule.latency == 1:
            self._store(carry, arrived, row)
        if phase.forward:
            self._run_forward(phase, carry, row)
        if phase.head is not Occurrence.NONE:
            self._run_head(phase, carry, row)
        if phase.backward:
            self._run_backward(phase, carry, row)
        if self.p.schedule.latency > 1:
            self._store(carry, arrived, row)
        return carry, None

    def _receive(self, phase: Phase, carry: dict[str, Any]) -> dict[str, Array]:
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
        self, carry: dict[str, Any], arrived: dict[str, Array], row: dict[str, Array]
    ) -> None:
        for name, value in arrived.items():
            carry[f"{name}s"] = _put(carry[f"{name}s"], self._mine(row[f"arrival_{name}"]), value)

    def _run_forward(self, phase: Phase, carry: dict[str, Any], row: dict[str, Array]) -> None:
        task = jnp.maximum(self._mine(row["forward"]), 0)
        slot = self._mine(row["forward_input"])
        x = lax.dynamic_index_in_dim(carry["inputs"], slot, keepdims=False)
        if phase.embed is not Occurrence.NONE:
            # Also in ticks that need no embedding: a lookup costs less than a branch, for which a
            # GPU waits.
            first = row["forward"][0]
            embedded = self.p.functions.embed(
                self.p.outer, self._microbatch(self._microbatch_of(first))
            )
            x = jnp.where((self.stage == 0) & self._begins(first), embedded, x)
            if self.differentiate and not self.keeps:
                carry["inputs"] = _put(carry["inputs"], slot, x)
        repeat, microbatch = (
            self._repeat(task % self.p.schedule.num_repeats),
            self._microbatch(self._microbatch_of(task)),
        )
        if self.residuals is None:
            carry["sent_forward"] = self._forward(*repeat, x, microbatch)
            return
        carry["sent_forward"], saved = self.residuals.forward(repeat, x, microbatch)
        slot = self._mine(row["forward_residual"])
        carry["residuals"] = [
            _put(buffer, slot, value)
            for buffer, value in zip(carry["residuals"], saved, strict=True)
        ]

    def _run_head(self, phase: Phase, carry: dict[str, Any], row: dict[str, Array]) -> None:
        """Compute the loss of the microbatch that the last stage has just finished, on all stages:
        each has a part of the vocabulary.
        """
        hidden = lax.psum(
            jnp.where(self.stage == self.num_stages - 1, carry["sent_forward"], 0), PIPE
        )
        wanted = row["head"] >= 0

        def loss(outer: Tree, hidden: Array) -> Array:
            return self.p.functions.loss(
                outer, hidden, self._microbatch(jnp.maximum(row["head"], 0))
            )

        if not self.differentiate:
            carry["loss"] += _where_shared(
                phase.head,
                wanted,
                lambda: loss(self.p.outer, hidden),
                jnp.zeros_like(carry["loss"]),
            )
            return

        def add_gradients(total: Array, d_outer: Tree) -> tuple[Array, Tree, Array]:
            value, (d_here, d_hidden) = jax.value_and_grad(loss, argnums=(0, 1))(
                self.p.outer, hidden
            )
            return total + value, _added(d_outer, d_here), d_hidden

        carry["loss"], carry["d_outer"], d_hidden = _where_shared(
            phase.head,
            wanted,
            lambda: add_gradients(carry["loss"], carry["d_outer"]),
            (carry["loss"], carry["d_outer"], jnp.zeros_like(hidden)),
        )
        carry["cotangents"] = _put(
            carry["cotangents"], self._mine(row["head_cotangent"]), vary(d_hidden, [PIPE])
        )

    def _run_backward(self, phase: Phase, carry: dict[str, Any], row: dict[str, Array]) -> None:
        task = self._mine(row["backward"])
        cotangent = lax.dynamic_index_in_dim(
            carry["cotangents"], self._mine(row["backward_cotangent"]), keepdims=False
        )
        cotangent = jnp.where(task >= 0, cotangent, 0)
        index = jnp.maximum(task, 0) % self.p.schedule.num_repeats
        params, constants = self._repeat(index)
        if self.residuals is not None:
            slot = self._mine(row["backward_residual"])
            saved = [
                lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
                for buffer in carry["residuals"]
            ]
            d_params, d_x = self.residuals.backward((params, constants), saved, cotangent)
        else:
            x = lax.dynamic_index_in_dim(
                carry["inputs"], self._mine(row["backward_input"]), keepdims=False
            )
            microbatch = self._microbatch(self._microbatch_of(jnp.maximum(task, 0)))
            d_params, d_x = jax.vjp(
                lambda params, x: self._forward(params, constants, x, microbatch), params, x
            )[1](cotangent)
        carry["d_params"] = self._added_to_repeat(carry["d_params"], d_params, index)
        carry["sent_backward"] = d_x
        if phase.embed_backward is not Occurrence.NONE:
            self._run_embed_backward(phase, carry, row["backward"][0], d_x)

    def _run_embed_backward(
        self, phase: Phase, carry: dict[str, Any], first: Array, d_x: Array
    ) -> None:
        """Backpropagate the first stage's input gradient through the embedding, on all stages: each
        has a part of the vocabulary."""
        d_embedded = lax.psum(jnp.where((self.stage == 0) & self._begins(first), d_x, 0), PIPE)

        def add_gradient() -> Tree:
            microbatch = self._microbatch(self._microbatch_of(first))
            pull = jax.vjp(lambda outer: self.p.functions.embed(outer, microbatch), self.p.outer)[1]
            return _added(carry["d_outer"], pull(d_embedded)[0])

        carry["d_outer"] = _where_shared(
            phase.embed_backward, self._begins(first), add_gradient, carry["d_outer"]
        )

    # Helpers

    def _forward(self, params: Tree, constants: Tree, x: Array, microbatch: Microbatch) -> Array:
        return self.p.functions.layers(params, constants, x, microbatch)

    def _mine(self, row: Array) -> Array:
        """This stage's entry of a row of a table."""
        return lax.dynamic_index_in_dim(row, self.stage, keepdims=False)

    def _microbatch_of(self, task: Array) -> Array:
        return jnp.maximum(task, 0) // self.p.schedule.num_repeats

    def _begins(self, task: Array) -> Array:
        """Whether a task of the first stage is of repeat 0, whose input is the embedding."""
        return (task >= 0) & (task % self.p.schedule.num_repeats == 0)

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


def _buffer(num_slots: int, like: Array) -> Array:
    """A buffer of zeros: `num_slots` slots and the spare slot, each with the shape of `like`."""
    return vary(jnp.zeros((num_slots + 1, *like.shape), like.dtype), sorted(varying_axes(like)))


def _put(buffer: Array, slot: Array, value: Array) -> Array:
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), slot, 0)


def _float32_zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), tree)


def _added(total: Tree, part: Tree) -> Tree:
    return jax.tree.map(lambda t, d: t + d.astype(t.dtype), total, part)


def _where_shared(
    share: Occurrence, wanted: Array, compute: Callable[[], Tree], otherwise: Tree
) -> Tree:
    """`compute()` in ticks where `wanted` is true; `otherwise` in the others.

    `wanted` is read from the table alone, so all devices take the same branch.
    """
    return compute() if share is Occurrence.ALL else lax.cond(wanted, compute, lambda: otherwise)
