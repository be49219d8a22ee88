"""Rules: which mesh axis splits which logical axis.

The step is written with every mesh axis manual (docs/decisions/0001), so a rule is legal only where
the model's arithmetic has the matching collective: `tensor` may split the four dimensions that a
matmul contracts or a reduction runs over, `fsdp` splits the storage of matrices along `embed` and
gathers them at use, the batch is split over `data` and `fsdp`, and `pipe` splits the layers and,
since all stages compute the head together, the vocabulary.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from optimus_jax.config import Generator, ModelConfig
from optimus_jax.config.axes import DATA, FSDP, MESH_AXES, PIPE, TENSOR, AxisSizes
from optimus_jax.errors import PlanError, explain, nearest
from optimus_jax.mesh.axes import (
    BATCH,
    EMBED,
    GENERATOR_HEADS,
    GENERATOR_KV_HEADS,
    GENERATOR_MLP,
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTH,
    LOGICAL_AXES,
    MLP,
    VOCAB,
)
from optimus_jax.mesh.quantised import num_blocks

Rules = tuple[tuple[str, tuple[str, ...]], ...]
"""(logical axis, mesh axes that split it), only for logical axes that are split."""

DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    BATCH: (DATA, FSDP),
    LENGTH: (TENSOR,),
    LAYERS: (PIPE,),
    EMBED: (FSDP,),
    VOCAB: (PIPE, TENSOR),
    HEADS: (TENSOR,),
    KV_HEADS: (TENSOR,),
    MLP: (TENSOR,),
}
"""No logical axis may be split over other mesh axes: a user's rule can only remove some of
these, or add one of ON_REQUEST."""
ON_REQUEST = (LENGTH,)
"""Logical axes that are split only if a rule says so."""

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this: GPU matmuls run better, and most sizes of `tensor`
then need no more padding."""
SMALL_VOCAB = 4096
"""Below it (bytes, tests) padding to 128 would be a sizeable share; 8 is used."""


def make_rules(model: ModelConfig, overrides: Sequence[str] = ()) -> Rules:
    """The default rules with the user's changes.

    Args:
      overrides: `logical=mesh_axis` or `logical=none`, such as `mlp=none`.
    Raises:
      PlanError: an unknown axis, an axis used twice, or a split that the step has no collective
        for.
    """
    rules = {**DEFAULT_RULES, **dict.fromkeys(ON_REQUEST, ())}
    seen: set[str] = set()
    for override in overrides:
        logical, _, mesh_axis = (piece.strip() for piece in override.partition("="))
        if logical not in LOGICAL_AXES:
            raise PlanError(
                explain(
                    f"unknown logical axis {logical!r} in a rule",
                    given=override,
                    do=nearest(logical, DEFAULT_RULES),
                )
            )
        if logical not in DEFAULT_RULES:
            raise PlanError(
                explain(
                    f"no rule is for logical axis {logical!r}",
                    given=override,
                    do="name one of: " + ", ".join(DEFAULT_RULES),
                )
            )
        if mesh_axis != "none" and mesh_axis not in MESH_AXES:
            raise PlanError(
                explain(
                    f"unknown mesh axis {mesh_axis!r} in a rule",
                    given=override,
                    do=nearest(mesh_axis, (*MESH_AXES, "none")),
                )
            )
        if logical in seen:
            raise PlanError(
                explain(
                    f"two rules for logical axis {logical!r}",
                    given=",".join(overrides),
                    do="give one",
                )
            )
        seen.add(logical)
        allowed = DEFAULT_RULES.get(logical, ())
        if mesh_axis != "none" and mesh_axis not in allowed:
            raise PlanError(
                explain(
                    f"logical axis {logical!r} cannot be split over {mesh_axis!r}",
                    given=override,
                    do=f"choose {logical}=" + " or ".join([*allowed, "none"]),
                )
            )
        rules[logical] = () if mesh_axis == "none" else (mesh_axis,)
    if not rules[HEADS]:
        rules[KV_HEADS] = ()
    return tuple((logical, axes) for logical, axes in rules.items() if axes)


def active_rules(
    rules: Rules, sizes: AxisSizes, model: ModelConfig
) -> Mapping[str, tuple[str, ...]]:
    """The rules that split something on a mesh of these sizes.

    Axes of size 1 are dropped. Key and value heads that are fewer than the devices which share
    the query heads stay whole, and each device takes the one it needs
    (`Collectives.kv_heads_needed`).
    """
    return _active_rules(rules, sizes, model.num_kv_heads, model.generator)


@lru_cache(maxsize=1 << 12)
def _active_rules(
    rules: Rules, sizes: AxisSizes, num_kv_heads: int, generator: Generator | None
) -> Mapping[str, tuple[str, ...]]:
    """`active_rules`, cached because the planner asks for the same ones thousands of times."""
    active = {logical: tuple(axis for axis in axes if sizes[axis] > 1) for logical, axes in rules}
    if num_kv_heads % _ways(active.get(KV_HEADS, ()), sizes):
        active[KV_HEADS] = ()
    if generator is not None:
        own = dict(rules_of_generator(tuple(active.items()), sizes, generator))
        active |= {name: own.get(like, ()) for name, like in _OF_GENERATOR.items()}
    return MappingProxyType({logical: axes for logical, axes in active.items() if axes})


_OF_GENERATOR = {GENERATOR_HEADS: HEADS, GENERATOR_KV_HEADS: KV_HEADS, GENERATOR_MLP: MLP}
"""What a generator's axes are called in a model of its own."""


def rules_of_generator(rules: Rules, sizes: AxisSizes, generator: Generator) -> Rules:
    """The rules of a generator, given those of its model: every pipeline stage runs all of it, and
    heads, or the feed-forward, that cannot be split evenly are whole.
    """
    split, dropped = dict(rules), {LAYERS}
    if generator.num_heads % _ways(split.get(HEADS, ()), sizes):
        dropped |= {HEADS, KV_HEADS, LENGTH}
    if generator.mlp_dim % _ways(split.get(MLP, ()), sizes):
        dropped |= {MLP, LENGTH}
    return tuple((logical, axes) for logical, axes in rules if logical not in dropped)


def check_rules(rules: Rules, sizes: AxisSizes, model: ModelConfig) -> None:
    """Raise PlanError for a mesh axis that splits no work, and for the first dimension that its
    mesh axes do not divide.
    """
    active = active_rules(rules, sizes, model)
    for axis, work in (
        (PIPE, (VOCAB,)),
        (PIPE, (LAYERS,)),
        (DATA, (BATCH,)),
        (FSDP, (BATCH,)),
        (TENSOR, (HEADS, MLP, VOCAB)),
    ):
        if sizes[axis] > 1 and not any(axis in active.get(logical, ()) for logical in work):
            raise PlanError(
                explain(
                    f"the {sizes[axis]} devices along mesh axis {axis!r} would all do the same"
                    " work",
                    given=(
                        f"{axis}={sizes[axis]}, and rules that keep {', '.join(map(repr, work))}"
                        " whole over it"
                    ),
                    do=f"use {axis}=1, or no rule for " + " or ".join(map(repr, work)),
                )
            )
    widths = [(EMBED, model.embed_dim, "embed_dim")]
    if model.generator is not None:
        widths.append((EMBED, model.generator.embed_dim, "generator.embed_dim"))
    for logical, size, setting in (
        (HEADS, model.num_heads, "num_heads"),
        (MLP, model.mlp_dim, "mlp_dim"),
        *widths,
    ):
        axes = active.get(logical, ())
        ways = _ways(axes, sizes)
        if size % ways:
            raise PlanError(
                explain(
                    f"dimension {logical!r} of {model.name} cannot be split evenly",
                    given=f"model.{setting}={size} over {'*'.join(axes)}={ways}",
                    do=(
                        f"choose {'*'.join(axes)} so that it divides {size}, or a rule that keeps"
                        f" {logical!r} whole"
                    ),
                )
            )
    over_mlp = active.get(MLP, ())
    if over_mlp and model.tuning.stored_format("mlp") == "nf4":
        blocks, ways, named = num_blocks(model.mlp_dim), _ways(over_mlp, sizes), "*".join(over_mlp)
        if blocks % ways:
            raise PlanError(
                explain(
                    "the blocks of matrices in nf4 cannot be split evenly",
                    given=f"model.mlp_dim={model.mlp_dim}, so {blocks} blocks, over {named}={ways}",
                    do=f"choose {named} so that it divides {blocks}, or set"
                    " model.tuning.base_precision=int8 or bf16",
                )
            )
    over_length = set(active.get(LENGTH, ()))
    for block in (HEADS, MLP, VOCAB):
        if not over_length <= set(active.get(block, ())):
            raise PlanError(
                explain(
                    "the residual stream can be split only over devices that share every block",
                    given=f"a rule {LENGTH}={TENSOR}, and one that keeps {block!r} whole",
                    do=f"use --set parallel.sequence_parallel=false, or no rule for {block!r}",
                )
            )
    heads_ways = _ways(active.get(HEADS, ()), sizes)
    if model.num_kv_heads % heads_ways and heads_ways % model.num_kv_heads:
        raise PlanError(
            explain(
                f"dimension {KV_HEADS!r} of {model.name} can be neither split nor shared evenly",
                given=f"model.num_kv_heads={model.num_kv_heads} over {TENSOR}={heads_ways}",
                do=(
                    f"choose {TENSOR} so that it divides {model.num_kv_heads} or is a multiple"
                    " of it"
                ),
            )
        )


def check_lengths(
    rules: Rules, sizes: AxisSizes, lengths: Iterable[int], model: ModelConfig
) -> None:
    """Raise PlanError if the tokens of sequences of these lengths cannot be split as the rules
    say. The frames of a recording, the first tokens, are split by themselves.
    """
    ways, frames = _ways(dict(rules).get(LENGTH, ()), sizes), model.frames
    lengths = list(lengths)
    for length in lengths:
        if length % ways or frames % ways:
            of_sound = f", {frames} of them frames of sound," if frames else ","
            raise PlanError(
                explain(
                    "the tokens of a sequence cannot be split evenly",
                    given=f"sequences of {length} tokens{of_sound} split over {TENSOR}={ways}",
                    do=_other_split(ways, lengths, model),
                )
            )


def _other_split(ways: int, lengths: Sequence[int], model: ModelConfig) -> str:
    """What to change where tokens cannot be split `ways` ways. An image has as many tokens as the
    model has positions, and a recording as many frames as the model reads.
    """
    shared = math.gcd(ways, model.frames, *lengths)
    if model.reads != "images" and model.frames % ways == 0:
        other = f"choose a length that {ways} divides, or "
    elif shared > 1:
        other = f"choose {TENSOR}={shared}, or "
    else:
        other = ""
    return f"{other}keep the stream whole: --set parallel.sequence_parallel=false"


def padded_vocab(vocab_size: int, rules: Rules, sizes: AxisSizes) -> int:
    """Rows of the embedding: vocab_size, rounded up so that all shards have equally many rows."""
    splits = dict(rules)
    # fsdp splits the storage of whatever has an `embed` dimension, and that of tables by rows
    # (mesh/zero.py).
    ways = _ways((*splits.get(VOCAB, ()), *splits.get(EMBED, ())), sizes)
    multiple = VOCAB_MULTIPLE if vocab_size >= SMALL_VOCAB else 8
    while multiple % ways:
        multiple += VOCAB_MULTIPLE if vocab_size >= SMALL_VOCAB else 8
    return -(-vocab_size // multiple) * multiple


def _ways(axes: Iterable[str], sizes: AxisSizes) -> int:
    ways = 1
    for axis in axes:
        ways *= sizes[axis]
    return ways
