"""Reads matrix products and collectives off a traced program.

The program is that of one device. Primes stand for the sizes of its arrays: the factors of a number
in it then say which sizes it is a product of, so its value for other sizes follows without tracing
again.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from optimus_jax.models.kernels import FUSED_PRODUCTS

PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181)
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter"]
COLLECTIVES: dict[str, CollectiveKind] = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
"""Kinds by the names of JAX's primitives."""
NOT_PRICED = ("all_to_all", "ragged_all_to_all", "ppermute", "pmin", "pgather")
"""Primitives that communicate, and that no layer here uses."""


class Amount(NamedTuple):
    """A number that is a product of sizes."""

    constant: float
    """What is left without the sizes below."""
    factors: tuple[int, ...]
    """Positions of the sizes that it is a product of; one may be there several times."""

    def of(self, sizes: Sequence[float]) -> float:
        """Its value for these sizes."""
        value = self.constant
        for factor in self.factors:
            value *= sizes[factor]
        return value


class Product(NamedTuple):
    """A matrix product of [rows, inner] and [inner, columns], `count` times."""

    rows: Amount
    inner: Amount
    columns: Amount
    count: Amount

    @property
    def is_batched(self) -> bool:
        """Whether there is one for every sequence, not one for all."""
        return bool(self.count.factors)

    def of(self, sizes: Sequence[float]) -> tuple[float, float, float, float]:
        """Its sizes and count."""
        rows, inner, columns, count = self
        return rows.of(sizes), inner.of(sizes), columns.of(sizes), count.of(sizes)

    def flops(self, sizes: Sequence[float]) -> float:
        """FLOPs; a multiplication and an addition are two."""
        return 2.0 * math.prod(self.of(sizes))


class FusedAttention(NamedTuple):
    """A fused kernel that computes the whole core of attention, forward or backward."""

    matrices: Amount
    """Sequences times heads."""
    head_dim: Amount
    num_products: int
    """Matrix products that it computes."""


class TracedCollective(NamedTuple):
    """A collective."""

    kind: CollectiveKind
    over: tuple[str, ...]
    """Mesh axes that it spans."""
    num_bytes: Amount
    """The whole result (all-reduce, all-gather) or argument (reduce-scatter)."""


@dataclass(frozen=True)
class ProgramPart:
    """What a program consists of, each as often as it runs."""

    products: tuple[Product, ...] = ()
    fused: tuple[FusedAttention, ...] = ()
    collectives: tuple[TracedCollective, ...] = ()

    def without(self, part: "ProgramPart") -> "ProgramPart":
        """What this has beyond `part`, which it contains."""
        return ProgramPart(
            _rest(self.products, part.products),
            _rest(self.fused, part.fused),
            _rest(self.collectives, part.collectives),
        )


def _rest(whole: tuple, part: tuple) -> tuple:
    left = list(whole)
    for each in part:
        left.remove(each)
    return tuple(left)


class ProgramReader:
    """Reads a program in which primes stand for sizes.

    Args:
      sizes: the prime, and the traced value of the size: a multiple of it.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]] = ()):
        self._sizes = sizes

    def amount(self, number: int) -> Amount:
        """A traced number as a product of sizes."""
        constant, factors = Fraction(number), []
        for position, (prime, value) in enumerate(self._sizes):
            while constant.numerator % prime == 0:
                constant /= value
                factors.append(position)
        return Amount(float(constant), tuple(factors))

    def part(self, jaxpr: Any) -> ProgramPart:
        """The products and collectives of a traced program. Both branches of a condition count.

        Raises NotImplementedError for a collective without a kind.
        """
        products, fused, collectives = [], [], []
        for equation, times in _equations(jaxpr):
            name = equation.primitive.name
            if name == "dot_general":
                products += [self._product(equation)] * times
            elif name in COLLECTIVES:
                collectives += [
                    TracedCollective(kind, axes, self.amount(num_bytes))
                    for kind, axes, num_bytes in _messages(equation)
                ] * times
            elif name in NOT_PRICED:
                raise NotImplementedError(
                    f"the planner cannot price {name}; use one of {', '.join(COLLECTIVES)}, or add"
                    " its kind to models/program_reader.py"
                )
            elif _is_fused(equation):
                batch, _, heads, head_dim = equation.invars[0].aval.shape
                fused += [
                    FusedAttention(
                        self.amount(batch * heads),
                        self.amount(head_dim),
                        FUSED_PRODUCTS[equation.params["name"]],
                    )
                ] * times
        return ProgramPart(tuple(products), tuple(fused), tuple(collectives))

    def _product(self, equation: Any) -> Product:
        (inner, inner_right), (batch, batch_right) = equation.params["dimension_numbers"]
        left, right = (variable.aval.shape for variable in equation.invars)

        def size(shape: Sequence[int], dims: Sequence[int]) -> Amount:
            return self.amount(math.prod(shape[dim] for dim in dims))

        def free(shape: Sequence[int], *used: Sequence[int]) -> list[int]:
            return [dim for dim in range(len(shape)) if not any(dim in dims for dims in used)]

        return Product(
            rows=size(left, free(left, inner, batch)),
            inner=size(left, inner),
            columns=size(right, free(right, inner_right, batch_right)),
            count=size(left, batch),
        )


def traced_on_device(
    function: Callable[..., Any], axes: Mapping[str, int], in_specs: Any, *arguments: Any
) -> Any:
    """The jaxpr of `function` as a device of an abstract mesh runs it.

    Every device keeps its own results: nothing is added to make them alike.

    Args:
      axes: names and sizes of the mesh's axes.
      in_specs: PartitionSpecs of the arguments, which are whole arrays or their shapes.
    """
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    sharded = jax.shard_map(
        lambda *parts: jax.tree.map(lambda leaf: leaf[None], function(*parts)),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=PartitionSpec(mesh.axis_names),
    )
    return jax.make_jaxpr(sharded)(*arguments).jaxpr


def needed(jaxpr: Any, results: int | None = None) -> Any:
    """A traced program without what its first `results` results do not need; None: all results."""
    number = len(jaxpr.outvars)
    first = number if results is None else results
    return partial_eval.dce_jaxpr(jaxpr, [place < first for place in range(number)])[0]


def collectives_of(
    jaxpr: Any,
) -> Mapping[tuple[CollectiveKind, tuple[str, ...]], list[tuple[int, int]]]:
    """(bytes, times) of every collective in a traced program, by kind and mesh axes."""
    found: dict[tuple[CollectiveKind, tuple[str, ...]], list[tuple[int, int]]] = {}
    for equation, times in _equations(jaxpr):
        if equation.primitive.name in COLLECTIVES:
            for kind, axes, num_bytes in _messages(equation):
                found.setdefault((kind, axes), []).append((num_bytes, times))
    return found


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations, also those of inner programs, with the number of times that they run."""
    for equation in jaxpr.eqns:
        yield equation, times
        if _is_fused(equation):
            continue
        inside = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                program = getattr(inner, "jaxpr", inner)
                if hasattr(program, "eqns"):
                    yield from _equations(program, inside)


def _is_fused(equation: Any) -> bool:
    return equation.params.get("name") in FUSED_PRODUCTS


def _messages(equation: Any) -> Iterator[tuple[CollectiveKind, tuple[str, ...], int]]:
    """Kind, mesh axes and bytes of the messages of one collective."""
    kind = COLLECTIVES[equation.primitive.name]
    axes = equation.params.get("axes") or equation.params.get("axis_name")
    axes = axes if isinstance(axes, tuple) else (axes,)
    for message in equation.outvars if kind == "all-gather" else equation.invars:
        yield kind, axes, message.aval.size * message.aval.dtype.itemsize
