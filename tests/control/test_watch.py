"""Readings are accepted where step times confirm them, rejected where they do not, and never
missed.
"""

import math

import numpy as np
import pytest

from optimus_jax.control.deciding.changes import VOTES
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.watch import PATIENCE, WORTH, Watch
from optimus_jax.control.signals import Observation, SignalSummary

LINK_SHARE = 0.5
"""Of the fake plan's step, in normal conditions, that goes over the link between hosts."""


def log_time_of(conditions: Conditions) -> float:
    return math.log(
        (1 - LINK_SHARE) * conditions.compute * conditions.skew + LINK_SHARE * conditions.between
    )


class Run:
    """Steps of a fake plan, with noise of 1%, and what is said of them."""

    def __init__(self, log_time=log_time_of) -> None:
        self.watch, self.log_time, self.step, self.time_s = Watch(), log_time, 0, 0.0
        self.random, self.news = np.random.default_rng(0), list[str]()

    def go(
        self,
        count: int,
        true: Conditions | None = None,
        said: dict[str, float] | None = None,
        quality="good",
        straggler: float | None = None,
        measured_s: float | None = None,
    ) -> "Run":
        true = true or Conditions()
        readings = (
            {}
            if straggler is None
            else {
                "straggler": SignalSummary(
                    value=straggler, spread=0.0, count=5, time_s=0.0, quality="good"
                )
            }
        )
        for _ in range(count):
            step_time_s = math.exp(self.log_time(true) + 0.01 * self.random.standard_normal())
            self.step, self.time_s = self.step + 1, self.time_s + step_time_s
            claims = {
                name: SignalSummary(
                    value=value,
                    spread=0.0,
                    count=5,
                    time_s=self.time_s if measured_s is None else measured_s,
                    quality=quality,
                )
                for name, value in (said or {}).items()
            }
            observation = Observation(
                step=self.step,
                time_s=self.time_s,
                step_times_s=(step_time_s,),
                readings=readings,
                global_batch=8,
                seq_len=8,
                lost_devices=frozenset(),
            )
            if said_now := self.watch.observe(observation, claims, self.log_time):
                self.news.append(said_now)
        return self


NORMAL = {"between": 1.0, "inside": 1.0, "compute": 1.0, "skew": 1.0}
SLOW = Conditions(between=4.0)


def test_nothing_happens_while_nothing_happens():
    run = Run().go(300, said=NORMAL)
    assert run.news == []
    assert run.watch.conditions == Conditions()
    assert not run.watch.wants_probe


def test_conditions_that_turn_while_no_steps_are_shown_have_a_duration():
    """On a CPU steps are not shown while a plan is compiled."""
    run = Run(lambda conditions: 0.0).go(30, said=NORMAL)
    claims = {
        name: SignalSummary(value=value, spread=0.0, count=5, time_s=run.time_s, quality="good")
        for name, value in (NORMAL | {"between": 2.0}).items()
    }
    nothing = Observation(
        step=run.step,
        time_s=run.time_s,
        step_times_s=(),
        readings={},
        global_batch=8,
        seq_len=8,
        lost_devices=frozenset(),
    )
    assert "between hosts" in run.watch.observe(nothing, claims, run.log_time)
    assert run.watch.is_disturbed
    assert 0 < run.watch.regime_at(run.time_s).expected_s(1000.0) < 1000.0


def test_a_step_that_takes_far_longer_is_asked_about_at_once():
    run = Run().go(30, said=NORMAL)
    before_s = run.time_s
    run.go(1, SLOW, NORMAL)
    assert run.watch.wants_probe
    assert run.watch.changed_s == pytest.approx(before_s)
    assert run.watch.probe_worth_s == pytest.approx(
        WORTH * (math.exp(log_time_of(SLOW)) - 1), rel=0.1
    )
    run.go(1, said=NORMAL)
    assert not run.watch.wants_probe, "it was an accident"
    assert (run.news, run.watch.conditions) == ([], Conditions())


def test_of_a_smaller_change_all_steps_that_told_it_say_what_a_probe_is_worth():
    slower = Conditions(between=2.5)
    run = Run().go(60, said=NORMAL).go(10, slower, NORMAL)
    assert run.watch.regime == 1
    assert run.watch.probe_worth_s > 2 * WORTH * (math.exp(log_time_of(slower)) - 1)
    assert Run().go(60, slower, NORMAL).go(10, said=NORMAL).watch.probe_worth_s == 0, (
        "nothing was lost"
    )


def test_with_a_reading_that_was_asked_for_three_such_steps_are_enough():
    run = (
        Run()
        .go(60, said=NORMAL)
        .go(1, SLOW, NORMAL)
        .go(2, SLOW, {**NORMAL, "between": 4.1}, quality="few")
    )
    assert run.watch.conditions.between == pytest.approx(4.1, rel=0.06)
    assert run.watch.regime == 0


def test_a_reading_that_step_times_bear_out_is_believed():
    run = Run().go(60, said=NORMAL).go(VOTES + 1, SLOW, {**NORMAL, "between": 4.1})
    assert run.watch.conditions.between == pytest.approx(4.1, rel=0.06)
    assert run.watch.regime == 0
    assert run.watch.is_disturbed
    assert any("between hosts" in each for each in run.news)
    # That steps take longer from now on is no news of its own.
    run.go(60, SLOW, {**NORMAL, "between": 4.1})
    assert run.watch.regime == 0
    assert len(run.news) <= 2


def test_a_reading_that_comes_late_explains_what_was_not_explained():
    run = Run().go(60, said=NORMAL).go(10, SLOW, NORMAL)
    assert run.watch.regime == 1
    assert run.watch.wants_probe
    run.go(3, SLOW, {**NORMAL, "between": 4.0})
    assert run.watch.regime == 0
    assert run.watch.conditions.between == pytest.approx(4.0, rel=0.06)
    assert not run.watch.wants_probe


def test_a_reading_from_before_steps_changed_is_not_why_they_have():
    run = (
        Run().go(3, said=NORMAL).go(40, said={**NORMAL, "skew": 2.2}, quality="few", measured_s=3.0)
    )
    assert run.watch.conditions.skew == 1
    before_s = run.time_s
    run.go(20, SLOW, {**NORMAL, "skew": 2.2}, quality="few", measured_s=3.0)
    assert run.watch.regime == 1
    assert run.watch.conditions.skew == 1
    assert before_s - 1 < run.watch.changed_s < before_s + 3
    run.go(1, SLOW, {**NORMAL, "skew": 2.2}, quality="few")
    assert run.watch.conditions.skew == pytest.approx(2.2, rel=0.06), (
        "had it been measured after, it would be believed"
    )


def test_what_would_make_steps_a_little_slower_is_not_why_they_are_much_slower():
    run = Run().go(60, said=NORMAL).go(20, Conditions(between=16.0), {**NORMAL, "compute": 1.5})
    assert run.watch.conditions == Conditions()
    assert run.watch.regime == 1
    run.go(3, Conditions(between=16.0), {**NORMAL, "between": 15.0})
    assert run.watch.regime == 0


def test_a_rumour_that_would_be_felt_asks_for_a_probe():
    run = Run().go(3, said=NORMAL).go(3, said={**NORMAL, "between": 4.0}, quality="few")
    assert run.watch.wants_probe
    assert run.watch.conditions == Conditions()
    assert not run.go(3, said=NORMAL).watch.wants_probe


def test_a_reading_that_was_doubted_is_heard_when_it_says_something_else():
    run = Run().go(60, said=NORMAL).go(30, said={**NORMAL, "between": 4.0})
    assert "between" in run.watch.rejected_signals
    run.go(20, Conditions(between=16.0), {**NORMAL, "between": 16.0})
    assert run.watch.rejected_signals == {}
    assert run.watch.conditions.between == pytest.approx(16, rel=0.06)


def test_a_reading_that_step_times_deny_is_distrusted_and_so_are_its_relatives():
    run = Run().go(60, said=NORMAL).go(PATIENCE + 2, said={**NORMAL, "between": 4.0, "inside": 4.0})
    assert run.watch.conditions == Conditions()
    assert set(run.watch.rejected_signals) == {"between", "inside"}
    assert len([each for each in run.news if "contradict the readings" in each]) == 1
    # Once it has lied, a factor that step times cannot check is not taken on its word.
    run.go(100, said=NORMAL).go(30, said={**NORMAL, "inside": 4.0})
    assert run.watch.conditions == Conditions()


def test_a_reading_that_they_cannot_check_is_believed_if_it_is_good():
    """The plan sends nothing inside hosts."""
    assert Run().go(60, said=NORMAL).go(
        5, said={**NORMAL, "inside": 4.0}
    ).watch.conditions.inside == pytest.approx(4.0, rel=0.06)
    assert (
        Run()
        .go(60, said=NORMAL)
        .go(50, said={**NORMAL, "inside": 4.0}, quality="few")
        .watch.conditions.inside
        == 1.0
    )
    # Better than it ever was takes more than a word.
    assert (
        Run().go(60, said=NORMAL).go(50, said={**NORMAL, "inside": 0.4}).watch.conditions.inside
        == 1.0
    )


def test_without_readings_a_change_is_unexplained_and_its_end_is_noticed():
    run = Run().go(60).go(30, SLOW)
    assert run.watch.regime == 1
    assert run.watch.conditions == Conditions()
    run.go(30)
    assert run.watch.regime == 0
    assert "back to what they were" in run.news[-1]
    run.go(30, SLOW)
    assert run.watch.regime == 2  # another one: what it does to plans need not be the same


def test_what_is_so_from_the_start_is_normal():
    run = Run().go(10, SLOW).go(40, SLOW, {**NORMAL, "between": 4.0})
    assert run.watch.conditions.between == pytest.approx(4.0, rel=0.06)
    assert not run.watch.is_disturbed
    assert run.watch.regime_at(run.time_s).durations is None


def test_normal_conditions_that_come_back_are_normal_though_readings_scatter():
    """Else nothing that was measured in them would be about what holds now."""
    run = Run().go(30, said=NORMAL).go(30, SLOW, {**NORMAL, "between": 4.0})
    assert run.watch.is_disturbed
    run.go(30, said={**NORMAL, "between": 1.15})
    assert run.watch.conditions == run.watch.normal == Conditions()


def test_computing_that_was_always_slower_is_normal_and_what_becomes_slower_is_not():
    run = Run().go(60, said={**NORMAL, "compute": 1.3})
    assert run.watch.conditions == Conditions()
    run.go(20, Conditions(compute=2.0), {**NORMAL, "compute": 2.6})
    assert run.watch.conditions.compute == pytest.approx(2.0, rel=0.06)


def test_a_claim_that_was_there_early_is_an_ordinary_one_later():
    run = Run().go(10, SLOW, {**NORMAL, "between": 4.0}).go(60, SLOW, {**NORMAL, "between": 4.0})
    slower = Conditions(between=16.0)
    run.go(80, slower, {**NORMAL, "between": 16.0})
    assert run.watch.conditions.between == pytest.approx(16.0, rel=0.06)
    assert run.watch.regime == 0


def test_a_link_that_was_always_faster_than_profiled_is_believed_though_the_plan_avoids_it():
    assert Run().go(30, said={**NORMAL, "inside": 0.1}).watch.conditions.inside == pytest.approx(
        0.1, rel=0.06
    )


def test_a_lie_from_the_start_is_not_believed():
    run = Run().go(60, said={**NORMAL, "between": 10.0})
    assert run.watch.conditions == Conditions()


def test_a_straggler_is_known_by_its_number():
    slow = Conditions(skew=1.5)
    run = (
        Run()
        .go(60, said=NORMAL)
        .go(15, slow, {**NORMAL, "skew": 1.5, "compute": 1.5}, straggler=3.0)
    )
    assert run.watch.straggler == 3
    # a probe on the slow process says the same thing again
    assert run.watch.conditions.compute == 1.0
    assert run.watch.conditions.skew == pytest.approx(1.5, rel=0.06)
    run.watch.leave_out(run.time_s)
    assert (run.watch.straggler, run.watch.conditions) == (None, Conditions())


def test_durations_are_learnt_from_what_has_ended():
    run = Run().go(100, said=NORMAL)
    assert run.watch.regime_at(run.time_s).durations is None  # here to stay until it has ended once
    began_s = run.time_s
    run.go(40, SLOW, {**NORMAL, "between": 4.0})
    disturbed = run.watch.regime_at(run.time_s)
    assert disturbed.durations is not None
    assert len(disturbed.durations.past_s) == 0
    assert disturbed.elapsed_s == pytest.approx(run.time_s - began_s, rel=0.1)
    run.go(20, said=NORMAL)
    normal = run.watch.regime_at(run.time_s)
    assert normal.durations is not None
    assert len(normal.durations.past_s) == 1
    run.go(20, SLOW, {**NORMAL, "between": 4.0})
    again = run.watch.regime_at(run.time_s)
    assert again.durations is not None
    assert len(again.durations.past_s) == 1
    assert again.durations.expected_s(0.0, 1e6) == pytest.approx(2 * 40 * 2.5, rel=0.3)


def test_another_plan_has_another_level():
    run = Run().go(60, said=NORMAL)
    run.watch.restart()
    run.log_time = lambda conditions: log_time_of(conditions) + 1.0
    run.go(60, said=NORMAL)
    assert run.news == []
    assert run.watch.detector.level == pytest.approx(1.0, abs=0.02)


def test_step_times_that_are_none_are_left_out():
    run = Run().go(20)
    for wrong in (math.nan, math.inf, 0.0, -1.0):
        run.watch.observe(
            Observation(
                step=21,
                time_s=run.time_s,
                step_times_s=(wrong,),
                readings={},
                global_batch=8,
                seq_len=8,
                lost_devices=frozenset(),
            ),
            {},
            log_time_of,
        )
    assert run.watch.detector.count == 18


def test_what_was_heard_before_was_otherwise_when_something_else_is_heard_for_the_first_time():
    """A link that recovers as another one is first probed: the first was slow all the time that it
    was said to be.
    """
    known = {"between": 1.0, "compute": 1.0, "skew": 1.0}
    run = Run(lambda conditions: log_time_of(conditions) + 0.3 * math.log(conditions.inside))
    run.go(60, said=known).go(30, SLOW, {**known, "between": 4.0})
    assert run.watch.conditions.between == pytest.approx(4.0, rel=0.06)
    run.watch.restart()  # another plan, which crosses both links
    known_anew: set[str] = set()
    for _ in range(12):
        run.go(1, Conditions(inside=0.7), {**known, "inside": 0.7})
        known_anew |= run.watch.was_so.keys()
    assert run.watch.conditions.between == 1.0
    assert run.watch.conditions.inside == pytest.approx(0.7, rel=0.06)
    assert known_anew == {"inside"}


def test_steps_from_before_a_change_are_no_measure_of_what_came_after():
    """Three steps tell of it: they, and none before, are those that a new plan may be compared
    with.
    """
    run = Run().go(60, said=NORMAL).go(3, SLOW, {**NORMAL, "between": 4.0})
    assert run.watch.conditions.between == pytest.approx(4.0, rel=0.06)
    assert run.watch.steps_alike == 3
    assert run.watch.detector.level == pytest.approx(log_time_of(SLOW), abs=0.03)


@pytest.mark.parametrize("log_time_after", [0.0, 0.4, -0.4])
def test_what_nobody_could_explain_ends_though_the_plan_was_left_in_it(log_time_after):
    run = Run().go(60).go(30, SLOW)
    assert run.watch.regime
    run.watch.restart()
    run.log_time = lambda conditions: log_time_of(conditions) + log_time_after
    run.go(30, SLOW)
    assert run.watch.is_disturbed
    assert run.watch.wants_probe
    run.go(60)
    assert run.watch.regime == 0
    assert not run.watch.wants_probe
    run.go(5, SLOW, NORMAL | {"between": 4.0}).go(10, SLOW, NORMAL | {"between": 4.0})
    assert run.watch.conditions.between == pytest.approx(4.0, rel=0.06), (
        "and what is told of links then is believed"
    )
