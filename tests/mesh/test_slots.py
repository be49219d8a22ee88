"""Slots hold every layer once, in the order in which a microbatch meets them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.mesh.slots import EMPTY, canonical_slots, layer_slots


@st.composite
def stages(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Layers of every virtual stage, stages, and visits to each."""
    num_stages, repeats = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    layers = st.lists(
        st.integers(1, 5), min_size=num_stages * repeats, max_size=num_stages * repeats
    )
    return tuple(draw(layers)), num_stages, repeats


def pieces_of(slots, num_stages, repeats):
    """The pieces of slots by virtual stage."""
    room = len(slots) // (num_stages * repeats)
    assert len(slots) == room * num_stages * repeats, (
        "every device has as many slots, for as many pieces"
    )
    pieces = [slots[start : start + room] for start in range(0, len(slots), room)]
    return [
        pieces[stage * repeats + repeat] for repeat in range(repeats) for stage in range(num_stages)
    ]


@given(stages())
def test_every_layer_has_one_slot_on_the_stage_that_runs_it(stages):
    layers_per_stage, num_stages, repeats = stages
    slots = layer_slots(layers_per_stage, num_stages)
    pieces = pieces_of(slots, num_stages, repeats)
    full = [[layer for layer in piece if layer != EMPTY] for piece in pieces]
    assert [*itertools.chain(*full)] == list(range(sum(layers_per_stage))), (
        "in the order of virtual stages, each once"
    )
    assert tuple(map(len, full)) == layers_per_stage
    assert all(
        list(piece[: len(layers)]) == layers for piece, layers in zip(pieces, full, strict=True)
    ), "empty slots only at the end of a piece"
    assert EMPTY not in max(pieces, key=lambda piece: len(piece) - piece.count(EMPTY)), (
        "no more room than the longest needs"
    )


@given(st.integers(1, 40), st.integers(1, 9))
def test_canonical_slots_are_the_layers_in_order(num_layers, num_stages):
    slots = canonical_slots(num_layers, num_stages)
    assert slots[:num_layers] == tuple(range(num_layers))
    assert set(slots[num_layers:]) <= {EMPTY}
    assert len(slots) % num_stages == 0
    assert len(slots) - num_layers < num_stages


@given(st.integers(1, 5), st.integers(1, 9))
def test_stages_of_equal_length_are_canonical(num_layers, num_stages):
    assert layer_slots([num_layers] * num_stages, num_stages) == canonical_slots(
        num_layers * num_stages, num_stages
    )


@pytest.mark.parametrize(
    ("layers_per_stage", "num_stages", "slots"),
    [
        ((1, 2), 2, (0, -1, 1, 2)),
        ((1, 1, 1, 1), 2, (0, 2, 1, 3)),
        ((1, 2, 2, 1), 2, (0, -1, 3, 4, 1, 2, 5, -1)),
    ],
)
def test_layer_slots_by_example(layers_per_stage, num_stages, slots):
    assert layer_slots(layers_per_stage, num_stages) == slots
