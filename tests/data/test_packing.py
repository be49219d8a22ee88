import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.data import packing
from optimus_jax.data.packing import pack


@given(st.lists(st.integers(1, 20), max_size=60))
def test_each_piece_is_in_one_example_that_has_room(sizes):
    sizes = np.array(sizes, int)
    found = pack(sizes, 20)
    assert sorted(found.pieces.tolist()) == list(range(len(sizes)))
    rooms = [sizes[found[example]].sum() for example in range(found.num_examples)]
    assert all(0 < room <= 20 for room in rooms)
    assert sum(rooms) == sizes.sum()
    # First fit: no two examples could have been one.
    assert sum(room <= 10 for room in rooms) <= 1
    firsts = [found[example][0] for example in range(found.num_examples)]
    assert firsts == sorted(firsts)


def test_only_some_examples_are_open(monkeypatch):
    monkeypatch.setattr(packing, "OPEN_EXAMPLES", 2)
    found = pack(np.array([6, 7, 8, 4, 3, 2]), 10)
    # The third closes the second, which has less room than the first; the fifth closes the first.
    assert [found[example].tolist() for example in range(4)] == [[0, 3], [1], [2], [4, 5]]
    assert found.num_examples == 4
