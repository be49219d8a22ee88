"""A stack of layers as two loops, forward and backward, whose exchanges run beside compute.

Backward of `lax.scan` follows forward's order: a layer's matrices are gathered where they are used,
and its gradient is scattered where it appears. What uses the one and makes the other waits. Here an
iteration gathers the matrices of the next layer, and backward's exchanges the gradient of the layer
before: neither is needed, nor made, by the compute of the same iteration.

    forward of layer i:   compute layer i        | gather layer i + 1
    backward of layer i:  backpropagate layer i  | gather layer i - 1, scatter the gradient of layer
                                                 | i + 1, sum that of layer i + 2 over replicas

A loop gathers one layer more than it has. At most two layers are whole at a time.

Streams: the rows of a microbatch, or two halves of them. Halves need nothing of each other, so that
an exchange in a layer of one (over tensor) runs beside the compute of the other. Source: Wang et
al. 2024, arXiv:2409.15241.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from optimus_jax.mesh.closures import ClosureParts
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sums import Sums
from optimus_jax.mesh.zero import Tracked, vary, varying_axes

Layer = Callable[[nnx.State, Array, Array], tuple[Array, Sums]]
"""(parameters of one layer with whole matrices, slot, stream) -> (stream of the same type,
auxiliary sums)."""


class Segment(NamedTuple):
    """Layers that one loop runs."""

    first: int
    """Positions in the stack, [first, last)."""
    last: int
    layers: tuple[Layer, ...]
    """What runs a layer, for each stream."""


def run_stack(
    segments: Sequence[Segment],
    stacked: nnx.State,
    streams: tuple[Array, ...],
    slots: Array,
    comm: Collectives,
    *,
    hands_over: bool,
) -> tuple[tuple[Array, ...], Sums]:
    """The streams after all segments, and the sums over layers of auxiliary sums.

    A leaf's gradient is summed over the mesh axes along which the leaf itself does not vary.

    Args:
      segments: one after the other without a gap, to the end of the stack.
      stacked: parameters, leaves [positions, ...], as `LeafLayout.in_loss` gives them.
      slots: int32 [positions], by which a layer knows which it is.
      comm: collectives of the stack; `segments` have those of ZeRO stage 0.
      hands_over: whether backward begins with the matrices with which forward ended, instead of
        gathering them again; not if much is computed in between.
    """
    loops = _Loops(segments, stacked, streams, slots, comm, hands_over=hands_over)

    @jax.custom_vjp
    def run(*arrays: Any) -> _Result:
        return loops.forward(_Arrays(*arrays), save=False)[0]

    run.defvjp(
        lambda *arrays: loops.forward(_Arrays(*arrays), save=True),
        loops.backward,
    )
    return run(*loops.arrays)


_Value = Array | Tracked
_Waiting = list[Array | None]
"""What waits for each of a gradient's exchanges."""
_Result = tuple[tuple[Array, ...], Sums]


class _Arrays(NamedTuple):
    """What the loops compute with."""

    values: list[_Value]
    """Of every parameter, [positions, ...]."""
    streams: tuple[Array, ...]
    slots: Array
    constants: list[list[list[Array]]]
    """Of every segment and stream: other arrays that its layers use."""


class _LoopResiduals(NamedTuple):
    """What forward leaves for backward."""

    arrays: _Arrays
    by_layer: list[list[list[Array]]]
    """Of every segment and stream: arrays [layers, ...] that its layers save."""
    once: list[list[list[Array]]]
    """The same for arrays that are alike in all layers, such as masks."""
    ahead: list[Array] | None
    """The gathered matrices of the last layer, if they are handed over."""


class _Loops:
    """The loops over one stack. A list of leaves has an entry for every parameter of a layer, a
    list of matrices for those that are gathered.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        stacked: nnx.State,
        streams: tuple[Array, ...],
        slots: Array,
        comm: Collectives,
        *,
        hands_over: bool,
    ):
        self.segments, self.comm, self.hands_over = segments, comm, hands_over
        self.first, self.last = segments[0].first, segments[-1].last
        self.variables, self.structure = jax.tree.flatten(stacked, is_leaf=_is_variable)
        self.layouts = [comm.layout_in_layer(variable) for variable in self.variables]
        self.trained = [layout.leaf.trained for layout in self.layouts]
        values = [variable.get_raw_value() for variable in self.variables]
        example = self._whole(values, self.first, self._ahead(values, self.first))
        self.parts = [
            [
                _Part.of(partial(self._on_leaves, layer), self.trained, example, slots[0], stream)
                for layer, stream in zip(segment.layers, streams, strict=True)
            ]
            for segment in segments
        ]
        constants = [[part.constants for part in of_segment] for of_segment in self.parts]
        self.arrays = _Arrays(values, streams, slots, constants)

    # Forward

    def forward(self, arrays: _Arrays, *, save: bool) -> tuple[_Result, _LoopResiduals]:
        """The result, and what backward needs if it is saved."""
        values, streams = arrays.values, arrays.streams
        by_layer, once, auxiliary = [], [], {}
        ahead = self._ahead(values, self.first)
        for parts, constants, segment in zip(
            self.parts, arrays.constants, self.segments, strict=True
        ):
            rows = list(zip(parts, constants, strict=True))

            def layer(carry: tuple, position: Array, rows: list = rows) -> tuple:
                streams, now = carry
                ahead = self._ahead(values, jnp.minimum(position + 1, self.last - 1))
                leaves, slot = self._whole(values, position, now), arrays.slots[position]
                results, saved = [], []
                for (part, own), stream in zip(rows, streams, strict=True):
                    if save:
                        result, arrays_of_layer = part.saving(own, leaves, slot, stream)
                        saved.append(part.split(arrays_of_layer)[0])
                    else:
                        result = part.run(own, leaves, slot, stream)
                    results.append(result)
                after, sums = zip(*results, strict=True)
                return (after, ahead), (_added(sums), saved)

            if save:
                leaves, slot = self._whole(values, self.first, ahead), arrays.slots[self.first]
                once.append(
                    [
                        part.saved_once(own, leaves, slot, stream)
                        for (part, own), stream in zip(rows, streams, strict=True)
                    ]
                )
            positions = jnp.arange(segment.first, segment.last)
            (streams, ahead), (sums, saved) = lax.scan(layer, (streams, ahead), positions)
            by_layer.append(saved)
            auxiliary = _added([auxiliary, {name: part.sum(0) for name, part in sums.items()}])
        saved = _LoopResiduals(arrays, by_layer, once, ahead if self.hands_over else None)
        return (streams, auxiliary), saved

    # Backward

    def backward(
        self, saved: _LoopResiduals, cotangents: _Result
    ) -> tuple[list[Any], tuple[Array, ...], None, None]:
        """The gradients of the fields of `_Arrays`; None for what has none."""
        arrays, values = saved.arrays, saved.arrays.values
        d_streams, d_auxiliary = cotangents
        likes = [
            value.tracker if isinstance(value, Tracked) else value
            for value in self._of_trained(values)
        ]
        layouts = self._of_trained(self.layouts)

        def pulled(
            number: int, position: Array | int, leaves: list[Array], d_streams: tuple[Array, ...]
        ) -> tuple[list[Array], tuple[Array, ...]]:
            """The gradients of a layer's trained leaves, as it uses them, and of the streams."""
            at = position - self.segments[number].first
            d_leaves: list[Array] = []
            before = []
            for part, constants, by_layer, once, d_stream in zip(
                self.parts[number],
                arrays.constants[number],
                saved.by_layer[number],
                saved.once[number],
                d_streams,
                strict=True,
            ):
                pull = part.pull(constants, leaves, _at(by_layer, at), once)
                d_own, d_before = pull((d_stream, d_auxiliary))
                d_leaves = list(map(_sum, d_leaves, d_own)) if d_leaves else d_own
                before.append(d_before)
            return d_leaves, tuple(before)

        last = self.last - 1
        now = self._ahead(values, last) if saved.ahead is None else saved.ahead
        ahead = self._ahead(values, max(last - 1, self.first))
        d_leaves, d_streams = pulled(
            len(self.segments) - 1, last, self._whole(values, last, now), d_streams
        )
        exchanges = [
            _Exchanges(layout.exchanges(d, varying_axes(like)), like)
            for layout, d, like in zip(layouts, d_leaves, likes, strict=True)
        ]

        def advance(
            d_stack: list[Array],
            waiting: list[_Waiting],
            d_leaves: Sequence[Array | None],
            position: Array | int,
        ) -> tuple[list[Array], list[_Waiting]]:
            moved = [
                each.advance(total, queue, d, position)
                for each, total, queue, d in zip(exchanges, d_stack, waiting, d_leaves, strict=True)
            ]
            return [total for total, _ in moved], [queue for _, queue in moved]

        begun = [each.begin(d, last) for each, d in zip(exchanges, d_leaves, strict=True)]
        d_stack, waiting = [total for total, _ in begun], [queue for _, queue in begun]
        carry = d_streams, ahead, waiting, d_stack
        for number, segment in reversed(list(enumerate(self.segments))):

            def layer(carry: tuple, position: Array, number: int = number) -> tuple:
                d_streams, now, waiting, d_stack = carry
                ahead = self._ahead(values, jnp.maximum(position - 1, self.first))
                leaves = self._whole(values, position, now)
                d_leaves, d_streams = pulled(number, position, leaves, d_streams)
                d_stack, waiting = advance(d_stack, waiting, d_leaves, position)
                return (d_streams, ahead, waiting, d_stack), None

            positions = jnp.arange(segment.first, min(segment.last, last))
            carry, _ = lax.scan(layer, carry, positions, reverse=True)
        d_streams, _, waiting, d_stack = carry
        for more in range(1, 1 + max((len(each.stages) for each in exchanges), default=0)):
            d_stack, waiting = advance(d_stack, waiting, [None] * len(likes), self.first - more)
        d_trained = iter(d_stack)
        d_values = [
            None
            if not trained
            else Tracked(cast(Any, None), next(d_trained))
            if isinstance(value, Tracked)
            else next(d_trained)
            for value, trained in zip(values, self.trained, strict=True)
        ]
        return d_values, d_streams, None, None

    # The leaves of a layer

    def _ahead(self, values: list[_Value], position: Array | int) -> list[Array]:
        """The matrices of a layer that are gathered before it is reached."""
        return [
            self.comm.ready(_at(value, position), layout)
            for value, layout in zip(values, self.layouts, strict=True)
            if layout.is_gathered_by_layer
        ]

    def _whole(
        self, values: list[_Value], position: Array | int, gathered: list[Array]
    ) -> list[Array]:
        """The leaves of a layer as it uses them."""
        rest = iter(gathered)
        return [
            next(rest)
            if layout.is_gathered_by_layer
            else self.comm.ready(_at(value, position), layout)
            for value, layout in zip(values, self.layouts, strict=True)
        ]

    def _of_trained(self, leaves: list[Any]) -> list[Any]:
        return [leaf for leaf, trained in zip(leaves, self.trained, strict=True) if trained]

    def _on_leaves(
        self, layer: Layer, leaves: list[Array], slot: Array, stream: Array
    ) -> tuple[Array, Sums]:
        state = jax.tree.unflatten(
            self.structure,
            [variable.replace(leaf) for variable, leaf in zip(self.variables, leaves, strict=True)],
        )
        return layer(state, slot, stream)


@dataclass(frozen=True)
class _Exchanges:
    """The exchanges of one leaf's gradient. Each runs beside the compute of another layer: what a
    layer makes enters the first one in the next iteration, and its result the second one in the
    iteration after that.
    """

    stages: tuple[Callable[[Array], Array], ...]
    like: Array
    """The leaf that is differentiated, [positions, ...]."""

    def begin(self, gradient: Array, position: int) -> tuple[Array, _Waiting]:
        """The gradient of the stack, and what waits, after the last layer's."""
        d_stack = vary(jnp.zeros(self.like.shape, jnp.float32), sorted(varying_axes(self.like)))
        if not self.stages:
            return self.advance(d_stack, [], gradient, position)
        waiting: _Waiting = [gradient]
        for stage in self.stages[:-1]:
            gradient = stage(gradient)
            waiting.append(jnp.zeros_like(gradient))
        return d_stack, waiting

    def advance(
        self,
        d_stack: Array,
        waiting: _Waiting,
        gradient: Array | None,
        position: Array | int,
    ) -> tuple[Array, _Waiting]:
        """The gradient of the stack with a further layer's, and what waits after a layer.

        Args:
          gradient: of the layer at `position`; None: there is no further layer.
        """
        queue: _Waiting = [gradient]
        for stage, each in zip(self.stages, waiting, strict=True):
            queue.append(None if each is None else stage(each))
        *waits, done = queue
        if done is None:
            return d_stack, waits
        # The zeros that waited at first land where the last layer's gradient follows.
        done_position = position + len(self.stages)
        d_stack = lax.dynamic_update_index_in_dim(
            d_stack, done.astype(jnp.float32), done_position, 0
        )
        return d_stack, waits


class _Part:
    """A layer of one segment, as a program of arrays for one stream."""

    def __init__(self, program: ClosedJaxpr, structure: Any, trained: Sequence[bool]):
        self._program, self._structure, self._trained = program.jaxpr, structure, trained
        self.constants: list[Array] = program.consts
        """Arrays that the layer uses besides its arguments."""
        self._closure: ClosureParts | None = None
        self._is_by_layer: list[bool] = []

    @classmethod
    def of(
        cls,
        layer: Callable[[list[Array], Array, Array], tuple[Array, Sums]],
        trained: Sequence[bool],
        leaves: list[Array],
        slot: Array,
        stream: Array,
    ) -> "_Part":
        """That of a layer of leaves, slot and stream like these."""
        program, shapes = jax.make_jaxpr(layer, return_shape=True)(leaves, slot, stream)
        return cls(program, jax.tree.structure(shapes), trained)

    def run(
        self, constants: list[Array], leaves: list[Array], slot: Array, stream: Array
    ) -> tuple[Array, Sums]:
        """The stream after the layer, and its auxiliary sums."""
        results = jaxpr_as_fun(ClosedJaxpr(self._program, constants))(*leaves, slot, stream)
        return jax.tree.unflatten(self._structure, results)

    def saving(
        self, constants: list[Array], leaves: list[Array], slot: Array, stream: Array
    ) -> tuple[tuple[Array, Sums], list[Array]]:
        """`run`, and the arrays that backward needs."""

        def run(trained: list[Array], stream: Array) -> tuple[Array, Sums]:
            rest = iter(trained)
            both = [
                next(rest) if is_trained else leaf
                for leaf, is_trained in zip(leaves, self._trained, strict=True)
            ]
            return self.run(constants, both, slot, stream)

        trained = [
            leaf for leaf, is_trained in zip(leaves, self._trained, strict=True) if is_trained
        ]
        result, pull = jax.vjp(run, trained, stream)
        self._closure, saved = ClosureParts.of(pull, [*leaves, *constants])
        return result, saved

    def saved_once(
        self, constants: list[Array], leaves: list[Array], slot: Array, stream: Array
    ) -> list[Array]:
        """Of the arrays that backward needs, those that do not depend on the layer and its input.
        The rest is computed by nobody.
        """
        program = jax.make_jaxpr(lambda *args: self.saving(constants, *args)[1])(
            leaves, slot, stream
        )
        self._is_by_layer = _depends_on_arguments(program.jaxpr)
        return self.split(jaxpr_as_fun(program)(*leaves, slot, stream))[1]

    def split(self, saved: list[Array]) -> tuple[list[Array], list[Array]]:
        """Saved arrays that differ from layer to layer, and those that do not."""
        pairs = list(zip(saved, self._is_by_layer, strict=True))
        return [array for array, differs in pairs if differs], [
            array for array, differs in pairs if not differs
        ]

    def pull(
        self,
        constants: list[Array],
        leaves: list[Array],
        by_layer: list[Array],
        once: list[Array],
    ) -> Callable[[tuple[Array, Sums]], tuple[list[Array], Array]]:
        """The gradients with respect to trained leaves and stream, given those with respect to the
        results of `run`.
        """
        assert self._closure is not None, "forward comes first"
        of_layer, of_all = iter(by_layer), iter(once)
        saved = [next(of_layer) if differs else next(of_all) for differs in self._is_by_layer]
        return self._closure.closure([*leaves, *constants], saved)


def _depends_on_arguments(program: Jaxpr) -> list[bool]:
    """Of every result, whether it is computed from arguments, not from constants alone."""
    computed = set(program.invars)
    for equation in program.eqns:
        if not computed.isdisjoint(v for v in equation.invars if isinstance(v, Var)):
            computed.update(equation.outvars)
    return [isinstance(v, Var) and v in computed for v in program.outvars]


def _at(values: Any, position: Array | int) -> Any:
    """The part at a position of arrays [positions, ...]."""
    return jax.tree.map(
        lambda value: lax.dynamic_index_in_dim(value, position, keepdims=False), values
    )


def _sum(one: Array, other: Array) -> Array:
    """The sum of two gradients, rounded once."""
    return (one.astype(jnp.float32) + other.astype(jnp.float32)).astype(one.dtype)


def _added(sums: Sequence[Sums]) -> Sums:
    """The sums of sums by name; a name may be missing in some."""
    total: Sums = {}
    for each in sums:
        for name, part in each.items():
            total[name] = total[name] + part if name in total else part
    return total


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
