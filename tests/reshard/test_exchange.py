"""An exchange, simulated in NumPy, gives every device the shard of indexing; and no device sends or
receives more than needed.
"""

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.mesh.slots import EMPTY
from optimus_jax.reshard.edge_colouring import route_rounds
from optimus_jax.reshard.exchange import BlockLayout, make_exchange


def whole_of(block_layout, num_rows, rest):
    """A whole array whose elements are all different and not zero; rows by number, zeros in rows
    that are empty.
    """
    numbered = np.arange(1, num_rows * math.prod(rest) + 1).reshape(num_rows, *rest)
    rows = np.array(block_layout.rows)
    return np.where((rows == EMPTY).reshape(-1, *[1] * len(rest)), 0, numbered[np.maximum(rows, 0)])


def shards_of(block_layout, whole):
    """What each device holds; zeros where it has nothing."""
    return [
        np.zeros(block_layout.local, int)
        if block is None
        else whole[
            tuple(
                slice(place * size, (place + 1) * size)
                for place, size in zip(block, block_layout.local, strict=True)
            )
        ]
        for block in block_layout.blocks
    ]


def indices(place, shape):
    """NumPy indices of a piece in a shard."""
    rows = np.concatenate([np.arange(first, first + count) for first, count in place.rows])
    assert len(rows) == shape[0]
    return (
        rows,
        *(slice(start, start + size) for start, size in zip(place.starts, shape[1:], strict=True)),
    )


def exchanged_in_numpy(exchange, shards):
    new = [np.zeros(exchange.new, int) for _ in shards]
    for part in exchange.rounds:
        routes = part.routes or [
            (device, device) for device, place in enumerate(part.put) if place is not None
        ]
        assert len({start for start, _ in routes}) == len({end for _, end in routes}) == len(routes)
        assert {end for _, end in routes} == {
            device for device, place in enumerate(part.put) if place is not None
        }
        for start, end in routes:
            target_piece = new[end][indices(part.put[end], part.shape)]
            assert target_piece.shape == part.shape
            assert not target_piece.any(), "nothing is written twice"
            new[end][indices(part.put[end], part.shape)] = shards[start][
                indices(part.take[start], part.shape)
            ]
    return new


@st.composite
def block_layouts(draw, num_devices, sizes):
    """Layouts on any grid over any of the devices, with replicas or without; rows in any slots,
    some of them empty.
    """
    rows, rest = sizes
    ways = [
        draw(st.sampled_from([n for n in range(1, num_devices + 1) if size % n == 0]))
        for size in rest
    ]
    ways = [
        way if math.prod(ways[: place + 1]) <= num_devices else 1 for place, way in enumerate(ways)
    ]
    if math.prod(ways) > num_devices:
        ways = [1] * len(ways)
    first = draw(st.integers(1, num_devices // math.prod(ways)))
    room = -(-(rows + draw(st.integers(0, 3))) // first) * first
    order = draw(
        st.permutations([*range(rows), *[EMPTY] * (room - rows)])
        | st.just([*range(rows), *[EMPTY] * (room - rows)])
    )
    grid = list(itertools.product(range(first), *map(range, ways)))
    replicas = draw(st.integers(1, num_devices // len(grid)))
    blocks = draw(
        st.permutations([*grid * replicas, *[None] * (num_devices - replicas * len(grid))])
    )
    return BlockLayout(
        local=(room // first, *(size // way for size, way in zip(rest, ways, strict=True))),
        blocks=tuple(blocks),
        rows=tuple(order),
    )


@given(st.data())
def test_exchange_gives_every_device_what_indexing_gives(data):
    num_devices = data.draw(st.integers(1, 8))
    sizes = (
        data.draw(st.integers(1, 6)),
        data.draw(st.lists(st.sampled_from([1, 2, 4, 6, 12]), max_size=2)),
    )
    source, target = (data.draw(block_layouts(num_devices, sizes)) for _ in range(2))
    exchange = make_exchange(
        source, target, processes=(0,) * num_devices, most=data.draw(st.sampled_from([1, 5, 10**6]))
    )
    new = exchanged_in_numpy(exchange, shards_of(source, whole_of(source, *sizes)))
    for device, expected in enumerate(shards_of(target, whole_of(target, *sizes))):
        if target.blocks[device] is not None:
            np.testing.assert_array_equal(new[device], expected)
    if exchange.is_identity:
        assert source.local == target.local


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60))
def test_rounds_are_as_few_as_the_busiest_device_has_routes(routes):
    parts = route_rounds(routes)
    assert sorted(route for part in parts for route in part) == list(range(len(routes)))
    for part in parts:
        for side in (0, 1):
            assert len({routes[route][side] for route in part}) == len(part)
    counts = [
        count
        for side in (0, 1)
        for count in collections.Counter(route[side] for route in routes).values()
    ]
    degree = max(counts, default=0)
    assert len(parts) == degree


def over(num_devices, ways, replicas=1):
    """Rows of an array [8, 6] split over `ways` devices, each block on `replicas` neighbours."""
    blocks = tuple((device // replicas % ways, 0) for device in range(num_devices))
    return BlockLayout(local=(8 // ways, 6), blocks=blocks, rows=tuple(range(8)))


def received(exchange):
    """Elements that each device gets from others."""
    got = collections.Counter()
    for part in exchange.rounds:
        for start, end in part.routes:
            got[end] += math.prod(part.shape) if start != end else 0
    return got


@pytest.mark.parametrize(
    ("source", "target", "rounds", "elements"),
    [
        (over(8, 8), over(8, 1), 7, 42),
        (over(8, 1), over(8, 8), 0, 0),
        (over(8, 8), over(8, 8), 0, 0),
        (over(8, 2, 4), over(8, 2), 1, 24),
        (over(8, 4, 2), over(8, 4), 1, 12),
        (over(8, 8), over(8, 4, 2), 1, 6),
    ],
)
def test_devices_receive_only_what_they_lack(source, target, rounds, elements):
    exchange = make_exchange(source, target, processes=(0,) * 8, most=10**6)
    assert sum(bool(part.routes) for part in exchange.rounds) == rounds
    assert max(received(exchange).values(), default=0) == elements
    assert exchange.is_identity == (source == target)


def test_pieces_come_from_near_replicas_that_have_sent_least():
    exchange = make_exchange(over(8, 2), over(8, 1), processes=(0, 0, 0, 0, 1, 1, 1, 1), most=10**6)
    routes = [route for part in exchange.rounds for route in part.routes]
    assert len(exchange.rounds) == 2, "one piece stays, and one swap gives the other"
    assert all(start // 4 == end // 4 for start, end in routes)
    assert sorted(start for start, _ in routes) == list(range(8))


def test_a_device_to_avoid_sends_only_what_no_other_has():
    source, target = over(8, 2), over(8, 1)
    exchange = make_exchange(source, target, processes=(0,) * 8, most=10**6, avoid=frozenset({3}))
    assert all(3 not in {start for start, _ in part.routes} for part in exchange.rounds)
    alone = make_exchange(over(8, 8), target, processes=(0,) * 8, most=10**6, avoid=frozenset({3}))
    assert any(3 in {start for start, _ in part.routes} for part in alone.rounds)
