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
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from optimus_jax.mesh.branches import share_taken
from optimus_jax.models.fused_attention import FusedCall, fused_call

PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181)
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
COLLECTIVES: dict[str, CollectiveKind] = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}
"""Kinds by the names of JAX's primitives."""
NOT_PRICED = ("ragged_all_to_all", "ppermute", "pmin", "pgather")
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
    """A matrix product of [rows, inner] and [inner, columns], `count` times at once."""

    rows: Amount
    inner: Amount
    columns: Amount
    count: Amount
    runs: float = 1.0
    """How often it runs; a share if only some of the layers do."""

    @property
    def is_batched(self) -> bool:
        """Whether there is one for every sequence, not one for all."""
        return bool(self.count.factors)

    @property
    def amounts(self) -> tuple[Amount, Amount, Amount, Amount]:
        """Its sizes and count."""
        return self.rows, self.inner, self.columns, self.count

    def of(self, sizes: Sequence[float]) -> tuple[float, float, float, float]:
        """Values of its sizes and count."""
        rows, inner, columns, count = self.amounts
        return rows.of(sizes), inner.of(sizes), columns.of(sizes), count.of(sizes)

    def flops(self, sizes: Sequence[float]) -> float:
        """FLOPs of all runs; a multiplication and an addition are two."""
        return 2.0 * self.runs * math.prod(self.of(sizes))


class FusedAttention(NamedTuple):
    """A fused kernel that computes the whole core of attention, forward or backward."""

    matrices: Amount
    """Sequences times heads."""
    head_dim: Amount
    num_products: int
    """Matrix products that it computes."""
    num_pairs: float
    """Pairs of query and key for which it does, in one sequence."""
    runs: float = 1.0
    """How often it runs; a share if only some of the layers do."""

    def flops(self, sizes: Sequence[float]) -> float:
        """FLOPs of all runs."""
        per_pair = self.num_products * self.matrices.of(sizes) * self.head_dim.of(sizes)
        return 2.0 * self.runs * per_pair * self.num_pairs


class TracedCollective(NamedTuple):
    """A collective."""

    kind: CollectiveKind
    over: tuple[str, ...]
    """Mesh axes that it spans."""
    num_bytes: Amount
    """The whole result (all-reduce, all-gather) or argument (reduce-scatter)."""
    runs: float = 1.0
    """How often it runs; a share if only some of the layers do."""


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

    def times(self, share: float) -> "ProgramPart":
        """The same, run as often as `share` says."""
        return ProgramPart(
            tuple(each._replace(runs=each.runs * share) for each in self.products),
            tuple(each._replace(runs=each.runs * share) for each in self.fused),
            tuple(each._replace(runs=each.runs * share) for each in self.collectives),
        )

    def __add__(self, other: "ProgramPart") -> "ProgramPart":
        return ProgramPart(
            self.products + other.products,
            self.fused + other.fused,
            self.collectives + other.collectives,
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
      share: how often conditions hold, of the times that they are tested; None: both sides of a
        condition count.
      code_bytes: bytes that an element of int8 stands for.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]] = (),
        share: float | None = None,
        code_bytes: float = 1.0,
    ):
        self._sizes, self._share, self._code_bytes = sizes, share, code_bytes

    def amount(self, number: int) -> Amount:
        """A traced number as a product of sizes."""
        constant, factors = Fraction(number), []
        for position, (prime, value) in enumerate(self._sizes):
            while constant.numerator % prime == 0:
                constant /= value
                factors.append(position)
        return Amount(float(constant), tuple(factors))

    def part(self, jaxpr: Any) -> ProgramPart:
        """The products and collectives of a traced program.

        Raises NotImplementedError for a collective without a kind, or one that seldom runs.
        """
        products, fused, collectives = [], [], []
        for equation, times, runs in _equations(jaxpr, self._share):
            name = equation.primitive.name
            if name == "dot_general":
                products += [self._product(equation, runs)] * times
            elif name in COLLECTIVES:
                if runs != 1:
                    raise NotImplementedError(
                        f"the planner cannot price {name} inside a condition; move it outside"
                    )
                collectives += [
                    TracedCollective(kind, axes, self._bytes(message))
                    for kind, axes, message in _messages(equation)
                ] * times
            elif name in NOT_PRICED:
                raise NotImplementedError(
                    f"the planner cannot price {name}; use one of {', '.join(COLLECTIVES)}, or add"
                    " its kind to models/program_reader.py"
                )
            elif call := _fused_call(equation):
                batch, length, heads, head_dim = equation.invars[0].aval.shape
                num_keys = equation.invars[1].aval.shape[1]
                fused += [
                    FusedAttention(
                        self.amount(batch * heads),
                        self.amount(head_dim),
                        call.num_products,
                        call.num_pairs(length, num_keys),
                        runs,
                    )
                ] * times
        return ProgramPart(tuple(products), tuple(fused), tuple(collectives))

    def _bytes(self, message: Any) -> Amount:
        """Bytes of an array."""
        amount = self.amount(message.size * message.dtype.itemsize)
        if message.dtype != jnp.int8:
            return amount
        return amount._replace(constant=amount.constant * self._code_bytes)

    def _product(self, equation: Any, runs: float) -> Product:
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
            runs=runs,
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
    """(bytes, times) of every collective in a traced program, by kind and mesh axes. Both sides of
    a condition count, but for branches of `mesh.branches.run_when`.
    """
    found: dict[tuple[CollectiveKind, tuple[str, ...]], list[tuple[int, int]]] = {}
    for equation, times, _ in _equations(jaxpr):
        if equation.primitive.name in COLLECTIVES:
            for kind, axes, message in _messages(equation):
                num_bytes = message.size * message.dtype.itemsize
                found.setdefault((kind, axes), []).append((num_bytes, times))
    return found


def _equations(
    jaxpr: Any, share: float | None = None, times: int = 1, runs: float = 1.0
) -> Iterator[tuple[Any, int, float]]:
    """All equations, also those of inner programs, with the number of times that they are reached,
    and the share of these in which they run.
    """
    for equation in jaxpr.eqns:
        yield equation, times, runs
        if _fused_call(equation):
            continue
        name = equation.primitive.name
        inside = times * equation.params["length"] if name == "scan" else times
        taken = share_taken(str(equation.source_info.name_stack)) if name == "cond" else None
        if taken is not None:
            inside = int(times * taken)
        shares = (1.0, 1.0) if share is None else (1 - share, share)
        for value in equation.params.values():
            for place, inner in enumerate(value if isinstance(value, tuple | list) else (value,)):
                program = getattr(inner, "jaxpr", inner)
                if hasattr(program, "eqns"):
                    own = runs * shares[place] if name == "cond" and taken is None else runs
                    yield from _equations(program, share, inside, own)


def _fused_call(equation: Any) -> FusedCall | None:
    return fused_call(equation.params.get("name"))


def _messages(equation: Any) -> Iterator[tuple[CollectiveKind, tuple[str, ...], Any]]:
    """Kind, mesh axes, and shape and dtype of the messages of one collective."""
    kind = COLLECTIVES[equation.primitive.name]
    axes = equation.params.get("axes") or equation.params.get("axis_name")
    axes = axes if isinstance(axes, tuple) else (axes,)
    for message in equation.outvars if kind == "all-gather" else equation.invars:
        yield kind, axes, message.aval
