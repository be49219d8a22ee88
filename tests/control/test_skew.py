"""Processes that wait for one another: each one's own step time is computed from what it can
measure alone.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.control.skew import own_time_ratios


@given(
    st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.5, 3.0)), min_size=2, max_size=9),
    st.floats(0.1, 10.0),
)
def test_own_step_times_are_recovered_from_waits_and_speeds(processes, shared_s):
    """A step lasts as long as its slowest process: from that, the waits for data and the speeds,
    each process's own time follows.
    """
    waits_s, factors = zip(*processes, strict=True)
    typical = sorted(factors)[(len(factors) - 1) // 2]
    own_s = [wait + factor / typical * shared_s for wait, factor in processes]
    ratios = own_time_ratios(max(own_s), waits_s, [0.01 * factor for factor in factors])
    median_s = sorted(own_s)[(len(own_s) - 1) // 2]
    assert ratios == pytest.approx([each / median_s for each in own_s])


def test_a_process_of_two_at_half_speed_has_a_ratio_of_two():
    assert own_time_ratios(1.0, [0.0, 0.0], [0.01, 0.02]) == (1.0, 2.0)


def test_a_process_that_waits_for_data_is_the_slowest():
    assert own_time_ratios(1.5, [0.5, 0.0, 0.0], [0.01, 0.01, 0.01]) == (1.5, 1.0, 1.0)


def test_equal_processes_have_a_ratio_of_one():
    assert own_time_ratios(1.0, [0.1] * 4, [0.02] * 4) == (1.0,) * 4


def test_a_process_that_only_waits_for_data_has_an_infinite_ratio():
    assert own_time_ratios(1.0, [1.2, 0.0], [0.01, 0.01]) == (math.inf, 1.0)
