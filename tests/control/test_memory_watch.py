"""Memory used by something else than the run is noticed in time, and not confused with inaccurate
estimates.
"""

import numpy as np
import pytest
from fleet import PRICING, plan_on

from optimus_jax.control import constants
from optimus_jax.control.deciding.candidates import has_room
from optimus_jax.control.deciding.memory_watch import MemoryWatch
from optimus_jax.control.signals import Observation, Quality, SignalSummary


def observed(
    watch: MemoryWatch,
    used: float | None,
    *,
    needed: float | None = 0.6,
    time_s: float = 0.0,
    quality: Quality = "good",
    spread: float = 0.0,
):
    readings = (
        {}
        if used is None
        else {
            "memory_peak_share": SignalSummary(
                value=used, spread=spread, count=5, time_s=time_s, quality=quality
            )
        }
    )
    return watch.observe(
        Observation(
            step=1,
            time_s=time_s,
            step_times_s=(),
            readings=readings,
            global_batch=8,
            seq_len=8,
            lost_devices=frozenset(),
        ),
        needed,
    )


@pytest.mark.parametrize("used", [0.5, 0.6, 0.9, 0.97])
def test_a_plan_that_needs_more_than_estimated_is_not_pressure(used):
    """Nothing else uses memory: the first reading gives the error of the estimate."""
    watch = MemoryWatch()
    assert [
        observed(watch, used, needed=used / 1.1, time_s=10.0 * number) for number in range(20)
    ] == [None] * 20
    assert watch.taken == 0.0


def growing(
    watch: MemoryWatch, start: float, *, needed: float, time_s: float
) -> tuple[float, float]:
    """Report that 0.1% more of the memory is taken each second until the plan is under pressure;
    returns the share in use then, and the time.
    """
    for used in np.arange(start, 1.0, 0.01).tolist():
        if observed(watch, used, needed=needed, time_s=time_s):
            return used, time_s
        time_s += 10.0
    pytest.fail("memory ran out")


@pytest.mark.parametrize("used", [0.8, 0.94, 0.99])
def test_memory_that_was_taken_at_once_is_no_reason_to_leave(used):
    """The plan has outlasted it. It is kept from other plans."""
    watch = MemoryWatch()
    observed(watch, 0.6)
    assert [observed(watch, used, time_s=10.0 * number) for number in range(1, 60)] == [None] * 59
    assert watch.taken == pytest.approx(used - 0.6 + constants.MEMORY_RESERVE_SHARE)


def test_growth_after_a_jump_is_pressure():
    """Of the jump itself nothing is extrapolated: 140 s before memory is full, and not at once."""
    watch = MemoryWatch()
    for number in range(10):
        observed(watch, 0.5 if number < 5 else 0.7, needed=0.5, time_s=10.0 * number)
    used, _ = growing(watch, 0.7, needed=0.5, time_s=100.0)
    assert used == pytest.approx(0.87, abs=0.03)


def test_what_grew_is_expected_to_grow_on_while_nothing_is_read():
    """0.1% each second, for the two minutes in which processes restart."""
    watch = MemoryWatch()
    observed(watch, 0.6)
    _, time_s = growing(watch, 0.6, needed=0.6, time_s=10.0)
    left = watch.left
    watch.restart()
    observed(watch, None, time_s=time_s + 120.0)
    assert watch.left == pytest.approx(left - 0.12, abs=0.03)
    # What is left is the same for steps in a row, so that a search in the background is found.
    steps = []
    for number in range(100):
        observed(watch, None, time_s=time_s + 120.0 + number / 10)
        steps.append(watch.left)
    assert len(set(steps)) <= 3
    settled = MemoryWatch()
    for number in range(60):
        observed(settled, 0.6 if number < 5 else 0.8, time_s=10.0 * number)
    left = settled.left
    observed(settled, None, time_s=900.0)
    assert settled.left == left, "it was taken at once"


def test_a_gap_in_the_readings_is_not_growth():
    watch = MemoryWatch()
    observed(watch, 0.45, needed=0.45)
    reported = [
        observed(watch, 0.94, needed=0.45, time_s=600.0 + 10.0 * number) for number in range(20)
    ]
    assert reported == [None] * 20


@pytest.mark.parametrize(("factor", "largest"), [(1.15, 0.84), (1.0, 0.9), (0.9, 0.9)])
def test_estimates_that_are_too_low_leave_less_for_plans(factor, largest):
    """A plan may be estimated to need `largest` of the memory: 0.84 x 1.15 = 0.97. Estimates that
    are too high do not lower the planner's own margin.
    """
    watch = MemoryWatch()
    observed(watch, 0.6 * factor, needed=0.6)
    assert 0.9 * watch.left == pytest.approx(largest, abs=0.02)
    watch.restart()
    observed(watch, 0.3 * factor, needed=0.3, time_s=100.0)
    observed(watch, 0.3 * factor, needed=0.3, time_s=200.0)
    assert 0.9 * watch.left == pytest.approx(largest, abs=0.02)


def test_the_error_of_estimates_is_known_under_the_next_plan():
    """So what is taken when a run restarts is not taken for an error of the new plan's estimate."""
    watch = MemoryWatch()
    observed(watch, 1.15 * 0.6, needed=0.6)
    watch.restart()
    for time_s in (500.0, 530.0):
        observed(watch, 1.15 * 0.3 + 0.5, needed=0.3, time_s=time_s)
    assert watch.taken == pytest.approx(0.5 + constants.MEMORY_RESERVE_SHARE, abs=0.01)


def test_memory_in_use_between_steps_says_nothing_about_estimates():
    """It lacks what a step needs for a while. JAX reports no new peak under a smaller plan."""
    watch = MemoryWatch()
    observed(watch, 0.92, needed=0.8)
    left = watch.left
    assert left < 1.0
    watch.restart()
    for time_s in np.arange(100.0, 200.0, 10.0).tolist():
        reading = SignalSummary(value=0.5, spread=0.0, count=5, time_s=time_s, quality="good")
        observed_now = Observation(
            step=1,
            time_s=time_s,
            step_times_s=(),
            readings={"memory_share": reading},
            global_batch=8,
            seq_len=8,
            lost_devices=frozenset(),
        )
        assert watch.observe(observed_now, 0.5) is None
    assert watch.left == left
    assert watch.taken == 0.0


def test_without_taken_memory_there_is_nothing_to_settle_for():
    assert not MemoryWatch().settle_for_less()


def test_growing_memory_use_is_noticed_with_time_to_switch():
    watch, reported, used = MemoryWatch(), [], 0.6
    for number in range(40):  # 0.1% of the memory each second
        used = 0.6 + 0.001 * max(0, 10 * number - 100)
        reported.append(observed(watch, used, time_s=10.0 * number))
        if reported[-1]:
            break
    assert reported[-1] == "pressed"
    assert 0.7 < used < 0.9
    # Memory is reserved for as much further growth as was seen: otherwise the next plan would be
    # under pressure at once.
    assert used - 0.6 > 0.001 * constants.MEMORY_LEAD_S
    assert watch.taken == pytest.approx(2 * (used - 0.6), abs=0.03)
    less = watch.applied(PRICING).cluster.accelerator.memory_bytes
    assert less == pytest.approx(
        PRICING.cluster.accelerator.memory_bytes * (1 - watch.taken), rel=1e-6
    )


def test_a_lagging_median_does_not_hide_growth():
    """Windows of 21 samples, a sample every 10 s, whose newest is 0.1 above the median."""
    samples, watch = 0.6 + 0.001 * np.maximum(0, np.arange(0, 1000, 10) - 300), MemoryWatch()
    for number in range(1, len(samples)):
        window = samples[max(0, number - 21) : number]
        used, middle = float(window[-1]), float(np.median(window))
        spread = 1.4826 * float(np.median(np.abs(window - middle)))
        if observed(watch, middle, spread=spread, time_s=10.0 * number):
            break
    assert 0.7 < used < 0.93
    assert middle < used - 0.05


def test_pressure_is_reported_once_and_again_when_more_is_taken():
    watch = MemoryWatch()
    used, time_s = growing(watch, 0.6, needed=0.6, time_s=0.0)
    assert observed(watch, used, time_s=time_s + 10.0) is None
    watch.restart()  # a plan that needs 0.3
    assert observed(watch, used - 0.3, needed=0.3, time_s=500.0) is None
    assert observed(watch, used - 0.3, needed=0.3, time_s=900.0) != "pressed"
    again, _ = growing(watch, used - 0.3, needed=0.3, time_s=1000.0)
    assert again > used - 0.1


def test_memory_counts_as_free_after_a_delay_that_grows_each_time():
    watch, waits, time_s = MemoryWatch(), [], 0.0
    observed(watch, 0.6)
    for _ in range(3):
        _, begun_s = growing(watch, 0.6, needed=0.6, time_s=time_s)
        time_s = begun_s
        while observed(watch, 0.6, time_s=time_s) is None:
            time_s += 10.0
        assert watch.taken == 0.0
        waits.append(time_s - begun_s)
        time_s += 100.0
    assert waits == sorted(waits)
    assert waits[2] > 1.5 * waits[1] > 2 * waits[0] > 200.0


def test_samples_of_two_plans_are_not_pressure():
    watch = MemoryWatch()
    observed(watch, 0.6)
    used = [0.7, 0.8, 0.9]
    for spread, reported in ((0.3, [None] * 3), (0.01, [None, None, "pressed"])):
        assert [
            observed(watch, each, spread=spread, time_s=(100.0 if spread > 0.1 else 200.0) + 50 * n)
            for n, each in enumerate(used)
        ] == reported


def test_taken_memory_that_stopped_growing_needs_no_reserve():
    watch, time_s = MemoryWatch(), 0.0
    observed(watch, 0.6)
    while observed(watch, min(0.95, 0.6 + 0.003 * time_s), time_s=time_s) is None:
        time_s += 5.0
    before = watch.taken
    assert before > 0.35
    time_s += 5.0
    while watch.taken > 0.8 - 0.6 + 2 * constants.MEMORY_RESERVE_SHARE:
        observed(watch, 0.8, time_s=time_s)
        time_s += 10.0
        assert time_s < 2000.0


def test_readings_right_after_a_switch_are_ignored():
    """They describe the plan before, which used other memory."""
    watch = MemoryWatch()
    observed(watch, 0.6)
    watch.restart()
    assert [observed(watch, 0.9, needed=0.3, time_s=10.0 * number) for number in range(2)] == [
        None
    ] * 2
    assert [
        observed(watch, 0.3, needed=0.3, time_s=30.0 + 10.0 * number) for number in range(20)
    ] == [None] * 20


def test_taken_memory_still_counts_under_the_next_plan():
    """So the remaining difference is the error of the new plan's estimate."""
    watch = MemoryWatch()
    observed(watch, 0.6)
    used, time_s = growing(watch, 0.6, needed=0.6, time_s=0.0)
    taken = used - 0.6
    watch.restart()
    # 0.03 more than is estimated.
    assert "pressed" not in [
        observed(watch, taken + 0.33, needed=0.3, time_s=time_s + 10.0 * number)
        for number in range(1, 60)
    ]
    assert watch.taken == pytest.approx(taken, abs=0.1)
    used, _ = growing(watch, taken + 0.33, needed=0.3, time_s=1600.0)
    assert used > 0.8
    assert watch.taken >= taken + 0.2


def test_the_peak_from_before_a_switch_is_ignored():
    """JAX reports the peak of the process, and never resets it."""

    def readings(watch, now, peak, time_s, needed):
        values = {
            name: SignalSummary(value=value, spread=0.0, count=5, time_s=time_s, quality="good")
            for name, value in (("memory_share", now), ("memory_peak_share", peak))
        }
        return watch.observe(
            Observation(
                step=1,
                time_s=time_s,
                step_times_s=(),
                readings=values,
                global_batch=8,
                seq_len=8,
                lost_devices=frozenset(),
            ),
            needed,
        )

    watch = MemoryWatch()
    readings(watch, 0.5, 0.94, 0.0, 0.94)
    watch.restart()
    assert [readings(watch, 0.3, 0.94, 10.0 * number, 0.3) for number in range(1, 20)] == [
        None
    ] * 19
    assert watch.taken == 0.0
    readings(watch, 0.3, 0.97, 300.0, 0.3)
    assert watch.taken == pytest.approx(0.97 - 0.3 + constants.MEMORY_RESERVE_SHARE)


def test_repeated_jumps_count_as_growth():
    """Every 75 s another 0.0875 of the memory is taken, under a plan that needs 0.6: it has to be
    replaced before the fifth jump.
    """
    watch, time_s, reported = MemoryWatch(), 0.0, None
    for _ in range(30):
        observed(watch, 0.6, time_s=time_s)
        time_s += 10.0
    began_s = time_s
    while reported is None:
        reported = observed(watch, 0.6 + 0.0875 * (1 + (time_s - began_s) // 75), time_s=time_s)
        time_s += 10.0
    assert reported == "pressed"
    assert time_s - began_s < 4 * 75 - 60


def test_if_no_plan_fits_less_memory_is_reserved():
    watch = MemoryWatch()
    for number in range(31):
        observed(watch, 0.6 + max(0.0, 0.002 * (10 * number - 120)), time_s=10.0 * number)
        if watch.taken:
            break
    assert watch.settle_for_less()
    assert watch.taken == pytest.approx(0.002 * (10 * number - 120))
    assert not watch.settle_for_less()


@pytest.mark.parametrize(
    ("used", "quality", "needed"),
    [
        (1.3, "good", 0.6),
        (0.97, "stale", 0.6),
        (0.97, "few", 0.6),
        (None, "good", 0.6),
        (0.97, "good", None),
        (0.0, "good", 0.6),
    ],
)
def test_missing_stale_or_impossible_readings_are_not_pressure(used, quality, needed):
    watch = MemoryWatch()
    observed(watch, 0.6)
    assert observed(watch, used, time_s=10.0, quality=quality, needed=needed) is None


def test_plans_have_to_fit_into_the_remaining_memory():
    watch, plan = MemoryWatch(), plan_on("fsdp=64")
    assert watch.applied(PRICING) == PRICING
    assert has_room(plan, watch.applied(PRICING))
    watch.taken = 0.85
    assert not has_room(plan, watch.applied(PRICING))


def test_memory_taken_while_the_plan_has_room_is_kept_from_other_plans():
    """The present plan stays, and a plan that would run out is not a candidate."""
    watch = MemoryWatch()
    for number in range(60):
        used = 0.3 + 0.005 * min(40, number)
        assert observed(watch, used, needed=0.3, time_s=10.0 * number) is None
    assert watch.taken >= 0.2


def test_a_known_share_does_not_hide_a_shortage():
    """What was taken while there was room is not yet answered by a plan that does without."""
    watch = MemoryWatch()
    for number in range(60):
        used = 0.7 + 0.005 * min(24, number)
        assert observed(watch, used, needed=0.7, time_s=10.0 * number) is None
    known = watch.taken
    assert known >= 0.12
    used, _ = growing(watch, 0.82, needed=0.7, time_s=600.0)
    assert used < 0.95
    assert watch.taken >= known
