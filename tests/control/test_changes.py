"""Change detection: changes are detected soon after they can be told from noise, with few false
alarms.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.control import constants
from optimus_jax.control.deciding.changes import ChangeDetector, Durations


def steps(seed: int, count: int, noise: float, spikes: float = 0.0) -> np.ndarray:
    """[count]: logarithms of step times about 0, some of them four times as long."""
    random = np.random.default_rng(seed)
    return noise * random.standard_normal(count) + math.log(4) * (random.random(count) < spikes)


def changes(values: np.ndarray) -> list[int]:
    """Indices at which the detector reports a change."""
    detector = ChangeDetector()
    return [index for index, value in enumerate(values) if detector.add(float(value)) is not None]


@pytest.mark.parametrize(
    ("noise", "spikes"), [(0.005, 0.0), (0.02, 0.01), (0.05, 0.02), (0.1, 0.0)]
)
def test_false_alarms_are_rare_on_stationary_noise(noise, spikes):
    """In 60,000 steps of each kind. Noise of 0.1 is as large as the change to detect."""
    alarms = sum(len(changes(steps(seed, 2000, noise, spikes))) for seed in range(30))
    assert alarms <= (1 if noise < 0.1 else 6)


@pytest.mark.parametrize(("noise", "most_steps"), [(0.005, 6), (0.02, 6), (0.05, 14), (0.1, 50)])
@pytest.mark.parametrize("shift", [1.1, 1 / 1.1, 1.5, 0.5])
def test_a_sustained_change_is_detected_within_a_few_steps(noise, most_steps, shift):
    """A change by a tenth needs CHANGE_LOG_ODDS / (shift^2 / 2 noise^2) steps to be
    distinguishable, and at least MIN_SHIFTED_STEPS, some of which noise may have shifted before.
    """
    delays = []
    for seed in range(40):
        values = steps(seed, 200, noise)
        values[100:] += math.log(shift)
        found = [index for index in changes(values) if index >= 100]
        delays.append(found[0] - 99 if found else 1000)
    assert constants.MIN_SHIFTED_STEPS <= np.median(delays) <= most_steps
    assert np.mean(np.array(delays) < 1000) >= (0.95 if noise < 0.1 else 0.85)


def test_a_detected_change_has_the_right_levels():
    detector, found = ChangeDetector(), []
    for value in [*steps(0, 50, 0.01), *(steps(1, 8, 0.01) + 0.3)]:
        found.append(detector.add(float(value)))
    change = next(each for each in found if each is not None)
    assert change.before == pytest.approx(0.0, abs=0.01)
    assert change.after == pytest.approx(0.3, abs=0.02)
    assert change.num_steps == constants.MIN_SHIFTED_STEPS
    assert detector.level == pytest.approx(0.3, abs=0.02)


def test_fewer_spikes_in_a_row_than_votes_are_no_change():
    values = steps(0, 300, 0.02)
    for begin in range(20, 280, 30):
        values[begin : begin + constants.MIN_SHIFTED_STEPS - 1] += math.log(8)
    assert changes(values) == []
    values[150 : 150 + constants.MIN_SHIFTED_STEPS] += math.log(8)
    assert len(changes(values)) >= 1


def test_a_slow_drift_moves_the_level_without_a_large_change():
    """A drift of 0.01% per step: no reported change is much larger than the smallest change to
    detect.
    """
    detector, found = ChangeDetector(), []
    for index, value in enumerate(steps(0, 3000, 0.01)):
        found.append(detector.add(float(value) + 1e-4 * index))
    assert all(
        abs(change.after - change.before) < 1.5 * constants.MIN_LEVEL_SHIFT
        for change in found
        if change
    )
    assert detector.level == pytest.approx(0.3, abs=1e-4 * constants.MAX_LEVEL_STEPS)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_any_floats_are_accepted(values):
    detector = ChangeDetector()
    for value in values:
        detector.add(value)
    assert detector.level is None or math.isfinite(detector.level)
    assert detector.count <= len(values)


def test_without_ended_regimes_one_lasts_three_times_as_long_again_with_even_odds():
    assert Durations(prior_s=1.0).survival(99.0, 300.0) == pytest.approx(0.5)


def test_past_regimes_say_how_long_the_next_one_lasts():
    flapping, lasting = Durations(prior_s=1.0), Durations(prior_s=1.0)
    for _ in range(5):
        flapping.ended(60.0)
        lasting.ended(3600.0)
    unknown = Durations(prior_s=1.0)
    assert flapping.survival(30.0, 100.0) < unknown.survival(30.0, 100.0)
    assert unknown.survival(30.0, 100.0) < lasting.survival(30.0, 100.0)
    # The mean of durations that may be an eleventh longer or shorter than was seen: T / (n - 1/2).
    assert flapping.expected_s(0.0, 1e5) == pytest.approx(60.0 * 5 / 4.5, rel=0.05)
    assert lasting.expected_s(0.0, 1e6) == pytest.approx(3600.0 * 5 / 4.5, rel=0.05)


@given(
    elapsed=st.floats(0, 1e6),
    more=st.floats(0, 1e5),
    horizon=st.floats(0, 1e6),
    past=st.lists(st.floats(0, 1e5), max_size=10),
)
def test_duration_estimates_are_consistent(elapsed, more, horizon, past):
    durations = Durations(prior_s=10.0)
    for each in past:
        durations.ended(each)
    assert 0 <= durations.expected_s(elapsed, horizon) <= horizon * (1 + 1e-9)
    assert durations.survival(elapsed, more) <= durations.survival(elapsed, more / 2) <= 1
    # A regime that has lasted longer is expected to last longer still.
    assert durations.survival(elapsed + more, 100.0) >= durations.survival(elapsed, 100.0)
    assert durations.survival(elapsed, durations.over_s(elapsed, 0.9)) == pytest.approx(
        0.1, abs=1e-6
    )


def test_expected_duration_is_the_integral_of_survival():
    durations = Durations(prior_s=10.0)
    for past in (20.0, 50.0):
        times = np.linspace(0, 300, 20001)
        survival = [durations.survival(5.0, float(time)) for time in times]
        assert durations.expected_s(5.0, 300.0) == pytest.approx(
            np.trapezoid(survival, times), rel=1e-4
        )
        durations.ended(past)
