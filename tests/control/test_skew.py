"""Processes that wait for one another: what each needs for itself is found from what it can measure
alone.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.control.skew import skew_of


@given(
    st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.5, 3.0)), min_size=2, max_size=9),
    st.floats(0.1, 10.0),
)
def test_own_times_go_in_and_come_out(processes, shared_s):
    """A step lasts as long as its slowest process: from that, waits for data and speeds, everyone's
    own time follows.
    """
    waits_s, factors = zip(*processes, strict=True)
    typical = sorted(factors)[(len(factors) - 1) // 2]
    own_s = [wait + factor / typical * shared_s for wait, factor in processes]
    skew = skew_of(max(own_s), waits_s, [0.01 * factor for factor in factors])
    assert skew.own_s == pytest.approx(own_s)
    assert own_s[skew.slowest] == pytest.approx(max(own_s))


def test_one_of_two_that_computes_half_as_fast_is_twice_as_slow():
    skew = skew_of(1.0, [0.0, 0.0], [0.01, 0.02])
    assert (skew.slowest, skew.ratio, skew.own_s) == (1, 2.0, (0.5, 1.0))


def test_one_that_waits_for_data_holds_up_the_others():
    skew = skew_of(1.5, [0.5, 0.0, 0.0], [0.01, 0.01, 0.01])
    assert (skew.slowest, skew.ratio) == (0, 1.5)


def test_alike_is_one():
    assert skew_of(1.0, [0.1] * 4, [0.02] * 4).ratio == 1.0


def test_one_that_does_nothing_but_wait_for_data_is_beyond_all_measure():
    assert skew_of(1.0, [1.2, 0.0], [0.01, 0.01]).ratio == math.inf
