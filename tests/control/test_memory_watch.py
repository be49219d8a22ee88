"""Memory used by something else than the run is noticed in time, and not confused with inaccurate
estimates.
"""

import numpy as np
import pytest
from fleet import PRICING, plan_on

from optimus_jax.control.deciding.candidates import has_room
from optimus_jax.control.deciding.memory_watch import AHEAD, LEAD_S, MemoryWatch
from optimus_jax.control.signals import Observation, SignalSummary


def observed(
    watch: MemoryWatch,
    used: float | None,
    *,
    needed: float | None = 0.6,
    time_s: float = 0.0,
    quality="good",
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
    assert used - 0.6 > 0.001 * LEAD_S
    assert watch.taken == pytest.approx(2 * (used - 0.6), abs=0.03)
    less = watch.applied(PRICING).cluster.accelerator.memory_bytes
    assert less == pytest.approx(
        PRICING.cluster.accelerator.memory_bytes * (1 - watch.taken), rel=1e-6
    )


def test_a_lagging_median_does_not_hide_growth():
    """Samples of the last 200 s, of which the newest is 0.1 above the median."""
    samples = np.linspace(0.74, 0.94, 21)
    spread = 1.4826 * float(np.median(np.abs(samples - np.median(samples))))
    watch = MemoryWatch()
    observed(watch, 0.6)
    assert observed(watch, float(np.median(samples)), spread=spread, time_s=200.0) == "pressed"


def test_pressure_is_reported_once_and_again_when_more_is_taken():
    watch = MemoryWatch()
    observed(watch, 0.6)
    assert observed(watch, 0.94, time_s=10.0) == "pressed"
    assert observed(watch, 0.94, time_s=20.0) is None
    watch.restart()  # a plan that needs 0.3
    assert observed(watch, 0.64, needed=0.3, time_s=30.0) is None
    assert observed(watch, 0.64, needed=0.3, time_s=200.0) is None
    assert observed(watch, 0.95, needed=0.3, time_s=210.0) == "pressed"


def test_memory_counts_as_free_after_a_delay_that_grows_each_time():
    watch, waits, time_s = MemoryWatch(), [], 0.0
    observed(watch, 0.6)
    for _ in range(3):
        assert observed(watch, 0.94, time_s=time_s + 10.0) == "pressed"
        begun_s = time_s
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
    assert observed(watch, 0.94, spread=0.3, time_s=10.0) is None
    assert observed(watch, 0.94, spread=0.01, time_s=20.0) == "pressed"


def test_taken_memory_that_stopped_growing_needs_no_reserve():
    watch, time_s = MemoryWatch(), 0.0
    observed(watch, 0.6)
    while observed(watch, min(0.95, 0.6 + 0.004 * time_s), time_s=time_s) is None:
        time_s += 5.0
    before = watch.taken
    assert before > 0.6
    while watch.taken > 0.8 - 0.6 + 2 * AHEAD:
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
    reported = [observed(watch, 0.94, time_s=100.0 * number) for number in range(1, 11)]
    assert reported[0] == "pressed"
    watch.restart()
    # 0.03 more than is estimated.
    assert [
        observed(watch, 0.34 + 0.33, needed=0.3, time_s=1000.0 + 10.0 * number)
        for number in range(20)
    ] == [None] * 20
    assert watch.taken == pytest.approx(0.34, abs=0.1)
    assert observed(watch, 0.34 + 0.33 + 0.29, needed=0.3, time_s=1200.0) == "pressed"
    assert watch.taken >= 0.34 + 0.29


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
    assert readings(watch, 0.3, 0.97, 300.0, 0.3) == "pressed"


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
    assert observed(watch, 0.94, needed=0.7, time_s=600.0) == "pressed"
    assert watch.taken >= known
