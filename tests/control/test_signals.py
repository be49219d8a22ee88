"""A reading is the median of a window, states its quality, and is unknown without samples."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.control.signals import FEW, UNKNOWN, Observation, Window

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def window_of(samples, size=20):
    window = Window(size)
    for time_s, sample in enumerate(samples):
        window.add(sample, float(time_s))
    return window


@given(SAMPLES)
def test_a_reading_has_the_median_and_mad_of_the_newest_samples(samples):
    reading = window_of(samples, 7).reading(100.0)
    kept = samples[-7:]
    middle = statistics.median(kept)
    assert reading.value == middle
    assert reading.count == len(kept)
    assert reading.time_s == len(samples) - 1
    if len(kept) > 1:
        assert reading.spread == pytest.approx(
            1.4826 * statistics.median(abs(each - middle) for each in kept)
        )
    else:
        assert reading.spread is None


def test_an_outlier_moves_neither_value_nor_spread():
    steady = window_of([1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]).reading(10.0)
    spiked = window_of([1.0, 1.1, 0.9, 60.0, 1.1, 0.9, 1.0]).reading(10.0)
    assert spiked.value == steady.value == 1.0
    assert spiked.spread == pytest.approx(steady.spread)


def test_quality_is_few_good_or_stale():
    window = Window(20)
    assert window.reading(0.0) is UNKNOWN
    for number in range(FEW):
        assert number == 0 or window.reading(0.0).quality == "few"
        window.add(1.0, 5.0, stale_s=10.0)
    assert [window.reading(now_s).quality for now_s in (5.0, 15.0, 15.1, 5.0)] == [
        "good",
        "good",
        "stale",
        "good",
    ]
    window.add(2.0, 30.0, stale_s=10.0)
    assert window.reading(30.0).quality == "good"
    assert window.reading(30.0).count == FEW + 1
    window.clear()
    assert window.reading(30.0) is UNKNOWN


def test_one_sample_is_enough_for_a_window_of_one():
    window = window_of([3.0, 4.0], size=1)
    assert (window.reading(1.0).value, window.reading(1.0).quality, window.reading(1.0).count) == (
        4.0,
        "good",
        1,
    )


def test_a_missing_signal_is_unknown():
    observation = Observation(
        step=1,
        time_s=0.0,
        step_times_s=(),
        readings={},
        global_batch=8,
        seq_len=32,
        lost_devices=frozenset(),
    )
    assert observation.reading("no such signal") is UNKNOWN
    assert (UNKNOWN.value, UNKNOWN.quality, UNKNOWN.count) == (None, "unknown", 0)
