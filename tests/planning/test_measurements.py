"""Fits recover the latencies and rates that made the times."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.planning.profiles.measurements import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    WIRE_SHARE,
    CollectiveTime,
    MemoryTime,
    OverlapTime,
    fit_collectives,
)

MESSAGES = (2**12, 2**16, 2**20, 2**27)
EXACT = 1e-9
"""Two unknowns from four equations that agree, in float64, scaled by their own size."""


def collective(kind=ALL_REDUCE, axis_size=8, stride=1, num_bytes=2**20, time_s=1e-3):
    return CollectiveTime(
        kind=kind, axis_size=axis_size, stride=stride, num_bytes=num_bytes, time_s=time_s
    )


@given(
    st.sampled_from(sorted(WIRE_SHARE)),
    st.integers(2, 64),
    st.floats(1e-7, 1e-3),
    st.floats(1e8, 1e12),
)
def test_a_fit_of_exact_times_is_exact(kind, axis_size, latency_s, bytes_per_s):
    times = [
        collective(
            kind,
            axis_size,
            num_bytes=size,
            time_s=latency_s + WIRE_SHARE[kind](axis_size) * size / bytes_per_s,
        )
        for size in MESSAGES
    ]
    (fit,) = fit_collectives(times)
    for time in times:
        assert fit.time_s(time.num_bytes) == pytest.approx(time.time_s, rel=EXACT)
    # The time of the largest message hides the latency most: its rounding error is what the
    # latency may be off by.
    assert fit.latency_s == pytest.approx(latency_s, rel=EXACT * (1 + times[-1].time_s / latency_s))


@given(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4))
def test_a_fit_of_noise_stays_physical(seconds):
    (fit,) = fit_collectives(
        collective(num_bytes=size, time_s=time_s)
        for size, time_s in zip(MESSAGES, seconds, strict=True)
    )
    assert fit.latency_s >= 0
    assert fit.bytes_per_s is None or 0 < fit.bytes_per_s < math.inf
    assert all(0 < fit.time_s(size) < math.inf for size in MESSAGES)


def test_each_kind_and_axis_has_its_own_fit_and_one_message_has_none():
    times = [
        collective(kind, axis_size, stride, size, 1e-3 * (1 + size / 2**20))
        for kind in (ALL_REDUCE, ALL_GATHER)
        for axis_size, stride in ((2, 1), (2, 4), (8, 1))
        for size in MESSAGES
    ]
    fits = fit_collectives([*times[::-1], collective(PERMUTE)])
    assert sorted((fit.kind, fit.axis_size, fit.stride) for fit in fits) == sorted(
        {(time.kind, time.axis_size, time.stride) for time in times}
    )


def test_wire_bytes_of_each_collective_by_hand():
    """Of 8 MB among four devices: three quarters, twice that for an all-reduce; a permute sends all
    of it.
    """
    sent = {kind: collective(kind, 4, num_bytes=8_000_000).wire_bytes for kind in WIRE_SHARE}
    assert sent == {
        "all-reduce": 12e6,
        "all-gather": 6e6,
        "reduce-scatter": 6e6,
        "all-to-all": 6e6,
        "collective-permute": 8e6,
    }


def test_memory_rate_is_bytes_over_time():
    assert MemoryTime(num_bytes=100, time_s=0.5).bytes_per_s == 200


def test_overlap_slowdown_is_at_least_one():
    time = OverlapTime(matmul_s=1.0, collective_s=0.9, together_s=1.3)
    assert time.slowdown == 1.3
    assert dataclasses.replace(time, together_s=1.9).slowdown == 1.9
    assert dataclasses.replace(time, together_s=0.99).slowdown == 1, "faster than alone is noise"


def test_a_time_that_does_not_grow_is_all_latency():
    """The constant with the least squares of relative errors: sum(1/t) / sum(1/t^2)."""
    (fit,) = fit_collectives(
        collective(num_bytes=size, time_s=time_s)
        for size, time_s in zip(MESSAGES, (1.0, 1.0, 1.0, 0.1), strict=True)
    )
    assert (fit.latency_s, fit.bytes_per_s) == (pytest.approx(13 / 103), None)
