"""Plans on eight devices that a running job switches between, and a state in which every bit is
checked.
"""

import contextlib
import functools
import itertools
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import LLAMA, VOCAB_SIZE, build, case

from optimus_jax.mesh.slots import EMPTY
from optimus_jax.reshard import piece_programs, shard_sums
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.reshard import Layout
from optimus_jax.reshard.restack import is_stacked
from optimus_jax.training.state import abstract_state

MODEL = replace(LLAMA, num_layers=10)
"""Number of layers for two to eight stages: only two stages divide it."""

PLANS = {
    "data": case("data=8"),
    "fsdp, zero 3": case("fsdp=8", zero=3),
    "tensor": case("tensor=8"),
    "data x fsdp, zero 1": case("data=4,fsdp=2", zero=1),
    "data x fsdp, zero 2": case("data=2,fsdp=4", zero=2),
    "data x tensor, vocabulary whole": case("data=4,tensor=2", rules=("vocab=none",)),
    "attention over tensor, feed-forward not": case("data=2,tensor=4", rules=("mlp=none",)),
    "feed-forward over tensor, attention not, zero 3": case(
        "fsdp=2,tensor=4", zero=3, rules=("heads=none",)
    ),
    "data x fsdp x tensor, zero 3": case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2),
    "fsdp x tensor, moments on the host": case("fsdp=4,tensor=2", zero=1, offload="optimizer"),
    "1f1b": case("pipe=2,data=2,tensor=2", microbatches=4),
    "gpipe, uneven": case(
        "pipe=4,data=2", schedule="gpipe", microbatches=4, layers_per_stage=(2, 3, 3, 2)
    ),
    "eight stages, uneven": case("pipe=8", microbatches=8),
    "interleaved, zero 1": case(
        "pipe=2,fsdp=2,tensor=2", schedule="interleaved", microbatches=4, zero=1
    ),
    "interleaved, uneven, zero 3": case(
        "pipe=4,fsdp=2", schedule="interleaved", microbatches=4, zero=3
    ),
}
PAIRS = list(itertools.permutations(PLANS, 2))


@functools.cache
def built(name):
    """The program of a plan."""
    return build(MODEL, PLANS[name])


def layout_of(program):
    return Layout(
        leaves=abstract_state(
            program.shapes, program.optimizer, program.config.precision, program.plan, program.mesh
        ),
        slots=program.shapes.slots,
    )


def in_plan(path, leaf, slots):
    """The bits of a leaf of the state under a plan: random, infinities and NaNs among them, and the
    same for every plan.
    """
    rows = VOCAB_SIZE if path.endswith("/table") else MODEL.num_layers if is_stacked(path) else None
    shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
    bits = np.random.Generator(np.random.PCG64(zlib.crc32(path.encode()))).integers(
        0, 2**32, shape, np.uint32
    )
    if rows is None:
        return bits
    numbers = (
        np.array(slots)
        if is_stacked(path)
        else np.where(np.arange(leaf.shape[0]) < rows, np.arange(leaf.shape[0]), EMPTY)
    )
    return np.where(
        (numbers == EMPTY).reshape(-1, *[1] * (bits.ndim - 1)),
        np.uint32(0),
        bits[np.maximum(numbers, 0)],
    )


def bits_of(layout):
    """Every leaf of the state, whole, as uint32, by path."""
    return {path: in_plan(path, leaf, layout.slots) for path, leaf in layout.named.items()}


def a_state(layout):
    """The state with those bits, placed by the layout."""
    leaves = [
        jax.device_put(bits.view(leaf.dtype), leaf.sharding)
        for leaf, bits in zip(layout.named.values(), bits_of(layout).values(), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(layout.leaves), leaves)


def assert_is_the_state(state, layout):
    """Assert that every copy of every shard on every device has the right bits and sharding."""
    expected = bits_of(layout)
    for path, leaf in named_leaves(state).items():
        asked = layout.named[path]
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (
            asked.shape,
            asked.dtype,
            asked.sharding,
        ), path
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data).view(np.uint32),
                expected[path][shard.index],
                err_msg=f"{path} on {shard.device}",
            )


def copied(state):
    """A copy of the state."""
    return jax.tree.map(jnp.copy, state)


def next_of(name, places):
    """The plans at these distances after this one in the list, which is cyclic."""
    names = list(PLANS)
    return [names[(names.index(name) + place) % len(names)] for place in places]


# JAX 0.11 has no such option
QUICK = {"xla_backend_optimization_level": 0} | (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
)
"""Compiler options for programs that are run once: they compile in less than half of the time, and
have the same collectives and layouts.
"""


@contextlib.contextmanager
def compiled_quickly():
    """Compile without optimisation inside this context; caches of programs for moves are cleared
    before and after.
    """
    whole = jax.stages.Lowered.compile

    def quick(lowered, compiler_options=None):
        return whole(lowered, QUICK | (compiler_options or {}))

    kept = piece_programs.piece_program, shard_sums._program
    for programs in kept:
        programs.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", quick)
        yield
    for programs in kept:
        programs.cache_clear()
