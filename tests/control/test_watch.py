"""Readings are accepted if step times confirm them and rejected if step times contradict them, and
no change is missed.
"""

import math

import numpy as np
import pytest

from optimus_jax.control import constants
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.watch import Watch
from optimus_jax.control.signals import Observation, SignalSummary

LINK_SHARE = 0.5
"""Share of the fake plan's normal step that goes over the link between hosts."""


def log_time_of(conditions: Conditions) -> float:
    return math.log(
        (1 - LINK_SHARE) * conditions.compute * conditions.skew + LINK_SHARE * conditions.inter_host
    )


class Run:
    """Steps of a fake plan with noise of 1%, and the readings reported about them."""

    def __init__(self, log_time=log_time_of) -> None:
        self.watch, self.log_time, self.step, self.time_s = Watch(), log_time, 0, 0.0
        self.otherwise_of = log_time
        self.random, self.news = np.random.default_rng(0), list[str]()

    def go(
        self,
        count: int,
        true: Conditions | None = None,
        reported: dict[str, float] | None = None,
        quality="good",
        measured_s: float | None = None,
    ) -> "Run":
        true = true or Conditions()
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
                for name, value in (reported or {}).items()
            }
            observation = Observation(
                step=self.step,
                time_s=self.time_s,
                step_times_s=(step_time_s,),
                readings={},
                global_batch=8,
                seq_len=8,
                lost_devices=frozenset(),
            )
            trigger = self.watch.observe(
                observation, claims, self.log_time, self.log_time, self.otherwise_of
            )
            if trigger:
                self.news.append(trigger)
        return self


NORMAL = {"inter_host": 1.0, "intra_host": 1.0, "compute": 1.0, "process_time/3": 1.0}
SLOW = Conditions(inter_host=4.0)


def test_steady_conditions_give_no_news():
    run = Run().go(300, reported=NORMAL)
    assert run.news == []
    assert run.watch.conditions == Conditions()
    assert not run.watch.wants_probe


def test_conditions_that_change_while_steps_are_hidden_have_a_duration():
    """On a CPU step times are not observed while a plan is compiled."""
    run = Run(lambda conditions: 0.0).go(30, reported=NORMAL)
    claims = {
        name: SignalSummary(value=value, spread=0.0, count=5, time_s=run.time_s, quality="good")
        for name, value in (NORMAL | {"inter_host": 2.0}).items()
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


def test_one_far_slower_step_asks_for_a_probe_at_once():
    run = Run().go(30, reported=NORMAL)
    before_s = run.time_s
    run.go(1, SLOW, NORMAL)
    assert run.watch.wants_probe
    assert run.watch.changed_s == pytest.approx(before_s)
    assert run.watch.probe_worth_s == pytest.approx(
        constants.PROBE_SHARE_OF_LOSS * (math.exp(log_time_of(SLOW)) - 1), rel=0.1
    )
    run.go(1, reported=NORMAL)
    assert not run.watch.wants_probe, "it was an accident"
    assert (run.news, run.watch.conditions) == ([], Conditions())


def test_after_a_smaller_change_the_worth_of_a_probe_covers_all_slow_steps():
    slower = Conditions(inter_host=2.5)
    run = Run().go(60, reported=NORMAL).go(10, slower, NORMAL)
    assert run.watch.regime == 1
    assert run.watch.probe_worth_s > 2 * constants.PROBE_SHARE_OF_LOSS * (
        math.exp(log_time_of(slower)) - 1
    )
    assert Run().go(60, slower, NORMAL).go(10, reported=NORMAL).watch.probe_worth_s == 0, (
        "nothing was lost"
    )


def test_with_a_requested_reading_three_slow_steps_are_enough():
    run = (
        Run()
        .go(60, reported=NORMAL)
        .go(1, SLOW, NORMAL)
        .go(2, SLOW, {**NORMAL, "inter_host": 4.1}, quality="few")
    )
    assert run.watch.conditions.inter_host == pytest.approx(4.1, rel=0.06)
    assert run.watch.regime == 0


def test_a_reading_that_step_times_confirm_is_accepted():
    run = (
        Run()
        .go(60, reported=NORMAL)
        .go(constants.MIN_SHIFTED_STEPS + 1, SLOW, {**NORMAL, "inter_host": 4.1})
    )
    assert run.watch.conditions.inter_host == pytest.approx(4.1, rel=0.06)
    assert run.watch.regime == 0
    assert run.watch.is_disturbed
    assert any("between hosts" in each for each in run.news)
    # The longer step times from now on are no separate change.
    run.go(60, SLOW, {**NORMAL, "inter_host": 4.1})
    assert run.watch.regime == 0
    assert len(run.news) <= 2


def test_a_late_reading_explains_an_unexplained_change():
    run = Run().go(60, reported=NORMAL).go(10, SLOW, NORMAL)
    assert run.watch.regime == 1
    assert run.watch.wants_probe
    run.go(3, SLOW, {**NORMAL, "inter_host": 4.0})
    assert run.watch.regime == 0
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.06)
    assert not run.watch.wants_probe


def test_a_reading_older_than_the_change_does_not_explain_it():
    run = (
        Run()
        .go(3, reported=NORMAL)
        .go(40, reported={**NORMAL, "process_time/3": 2.2}, quality="few", measured_s=3.0)
    )
    assert run.watch.conditions.skew == 1
    before_s = run.time_s
    run.go(20, SLOW, {**NORMAL, "process_time/3": 2.2}, quality="few", measured_s=3.0)
    assert run.watch.regime == 1
    assert run.watch.conditions.skew == 1
    assert before_s - 1 < run.watch.changed_s < before_s + 3
    run.go(1, SLOW, {**NORMAL, "process_time/3": 2.2}, quality="few")
    assert run.watch.conditions.skew == pytest.approx(2.2, rel=0.06), (
        "had it been measured after, it would be believed"
    )


def test_a_reading_of_a_small_slowdown_does_not_explain_a_large_one():
    run = (
        Run()
        .go(60, reported=NORMAL)
        .go(20, Conditions(inter_host=16.0), {**NORMAL, "compute": 1.5})
    )
    assert run.watch.conditions == Conditions()
    assert run.watch.regime == 1
    run.go(3, Conditions(inter_host=16.0), {**NORMAL, "inter_host": 15.0})
    assert run.watch.regime == 0


def test_an_uncertain_reading_with_a_large_effect_asks_for_a_probe():
    run = Run().go(3, reported=NORMAL).go(3, reported={**NORMAL, "inter_host": 4.0}, quality="few")
    assert run.watch.wants_probe
    assert run.watch.conditions == Conditions()
    assert not run.go(3, reported=NORMAL).watch.wants_probe


def test_a_rejected_signal_is_reconsidered_when_its_reading_changes():
    run = Run().go(60, reported=NORMAL).go(30, reported={**NORMAL, "inter_host": 4.0})
    assert "inter_host" in run.watch.rejected_signals
    run.go(20, Conditions(inter_host=16.0), {**NORMAL, "inter_host": 16.0})
    assert run.watch.rejected_signals == {}
    assert run.watch.conditions.inter_host == pytest.approx(16, rel=0.06)


def test_a_contradicted_reading_is_rejected_with_related_signals():
    run = (
        Run()
        .go(60, reported=NORMAL)
        .go(
            constants.MAX_UNCONFIRMED_STEPS + 2,
            reported={**NORMAL, "inter_host": 4.0, "intra_host": 4.0},
        )
    )
    assert run.watch.conditions == Conditions()
    assert set(run.watch.rejected_signals) == {"inter_host", "intra_host"}
    assert len([each for each in run.news if "contradict the readings" in each]) == 1


def test_a_reading_that_step_times_cannot_check_needs_good_quality():
    """The plan has no exchanges inside hosts."""
    assert Run().go(60, reported=NORMAL).go(
        5, reported={**NORMAL, "intra_host": 4.0}
    ).watch.conditions.intra_host == pytest.approx(4.0, rel=0.06)
    assert (
        Run()
        .go(60, reported=NORMAL)
        .go(50, reported={**NORMAL, "intra_host": 4.0}, quality="few")
        .watch.conditions.intra_host
        == 1.0
    )
    # A reading better than ever needs confirmation.
    assert (
        Run()
        .go(60, reported=NORMAL)
        .go(50, reported={**NORMAL, "intra_host": 0.4})
        .watch.conditions.intra_host
        == 1.0
    )


def test_without_readings_a_change_is_unexplained_until_it_ends():
    run = Run().go(60).go(30, SLOW)
    assert run.watch.regime == 1
    assert run.watch.conditions == Conditions()
    assert run.watch.unexplained > 0.3, "steps are slow, whatever the reason"
    run.go(30)
    assert run.watch.regime == run.watch.unexplained == 0
    assert "back to what they were" in run.news[-1]
    run.go(30, SLOW)
    assert run.watch.regime == 2  # another regime: its effect on plans may differ


def test_conditions_at_the_start_count_as_normal():
    run = Run().go(10, SLOW).go(40, SLOW, {**NORMAL, "inter_host": 4.0})
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.06)
    assert not run.watch.is_disturbed
    assert run.watch.regime_at(run.time_s).durations is None


def test_a_first_reading_that_explains_a_change_was_not_so_from_the_start():
    run = Run().go(20).go(10, SLOW, {**NORMAL, "inter_host": 4.0})
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.06)
    assert run.watch.is_disturbed
    assert run.watch.normal == Conditions()
    assert run.watch.detector.level == pytest.approx(log_time_of(SLOW), abs=0.02)


def test_returning_normal_conditions_are_normal_despite_noisy_readings():
    """Otherwise measurements under normal conditions would not apply to the present."""
    run = Run().go(30, reported=NORMAL).go(30, SLOW, {**NORMAL, "inter_host": 4.0})
    assert run.watch.is_disturbed
    run.go(30, reported={**NORMAL, "inter_host": 1.15})
    assert run.watch.conditions == run.watch.normal == Conditions()


def test_compute_slow_from_the_start_is_normal_and_slower_compute_is_not():
    run = Run().go(60, reported={**NORMAL, "compute": 1.3})
    assert run.watch.conditions == Conditions()
    run.go(20, Conditions(compute=2.0), {**NORMAL, "compute": 2.6})
    assert run.watch.conditions.compute == pytest.approx(2.0, rel=0.06)


def test_a_reading_present_from_the_start_is_checked_like_others_later():
    run = (
        Run()
        .go(10, SLOW, {**NORMAL, "inter_host": 4.0})
        .go(60, SLOW, {**NORMAL, "inter_host": 4.0})
    )
    slower = Conditions(inter_host=16.0)
    run.go(80, slower, {**NORMAL, "inter_host": 16.0})
    assert run.watch.conditions.inter_host == pytest.approx(16.0, rel=0.06)
    assert run.watch.regime == 0


def test_a_link_faster_than_profiled_from_the_start_is_accepted():
    assert Run().go(
        30, reported={**NORMAL, "intra_host": 0.1}
    ).watch.conditions.intra_host == pytest.approx(0.1, rel=0.06)


def test_a_wrong_reading_from_the_start_is_not_accepted():
    run = Run().go(60, reported={**NORMAL, "inter_host": 10.0})
    assert run.watch.conditions == Conditions()


def test_a_slow_process_is_not_slow_compute_everywhere():
    """A compute probe on the slow process measures the same slowdown."""
    slow = Conditions(slow=((3, 1.5),))
    run = (
        Run()
        .go(60, reported=NORMAL)
        .go(15, slow, {**NORMAL, "process_time/3": 1.5, "compute": 1.5})
    )
    assert run.watch.conditions.compute == 1.0
    ((process, factor),) = run.watch.conditions.slow
    assert (process, factor) == (3, pytest.approx(1.5, rel=0.06))


def test_several_slow_processes_each_have_a_factor():
    run = Run().go(60, reported=NORMAL | {"process_time/5": 1.0})
    run.go(20, Conditions(slow=((3, 1.5),)), NORMAL | {"process_time/3": 1.5})
    both = NORMAL | {"process_time/3": 1.5, "process_time/5": 2.1}
    run.go(20, Conditions(slow=((3, 1.5), (5, 2.1))), both)
    factors = dict(run.watch.conditions.slow)
    assert factors == {3: pytest.approx(1.5, rel=0.06), 5: pytest.approx(2.1, rel=0.06)}
    run.go(20, Conditions(slow=((3, 1.5),)), NORMAL | {"process_time/3": 1.5, "process_time/5": 1})
    assert [process for process, _ in run.watch.conditions.slow] == [3]


def left_out(reported: dict[str, float]) -> Run:
    """A run that has left process 3 out, whose slowness had lasted 20 steps."""
    run = Run().go(60, reported=NORMAL)
    run.go(20, Conditions(slow=((3, 2.1),)), NORMAL | {"process_time/3": 2.1})
    run.watch.restart({0, 1, 2})
    run.log_time = lambda conditions: log_time_of(conditions.among({0, 1, 2}))
    return run.go(20, reported=reported)


def test_a_process_that_is_out_is_slow_until_its_readings_say_otherwise():
    run = left_out(NORMAL | {"process_time/3": 2.1})
    assert run.watch.conditions == Conditions(), "the processes in use are well"
    assert run.watch.believed.skew == pytest.approx(2.1, rel=0.06)
    assert run.watch.is_disturbed
    assert run.watch.recovered == {}
    news = len(run.news)
    run.go(3, reported=NORMAL)
    assert run.watch.believed == Conditions()
    assert len(run.news) == news + 1
    assert not run.watch.is_disturbed


def test_the_recovery_of_a_process_that_is_out_is_guessed_where_nothing_is_read():
    unread = {name: 1.0 for name in NORMAL if name != "process_time/3"}
    run = left_out(unread)
    early = run.watch.recovered["process_time/3"]
    run.go(200, reported=unread)
    assert 0 < early < run.watch.recovered["process_time/3"] < 1
    run.go(1, reported=NORMAL | {"process_time/3": 2.1})
    assert run.watch.recovered == {}


SKEW = Conditions(slow=((3, 1.5),))
SKEWED = NORMAL | {"process_time/3": 1.5}


def test_a_disturbance_that_step_times_say_is_over_is_over_whatever_its_readings_claim():
    """The reading stays as it was: the sensor is frozen."""
    run = Run().go(60, reported=NORMAL).go(20, SKEW, SKEWED)
    assert run.watch.is_disturbed
    run.go(constants.MAX_UNCONFIRMED_STEPS + constants.MIN_SHIFTED_STEPS, reported=SKEWED)
    assert (run.watch.conditions, run.watch.regime) == (Conditions(), 0)
    assert "step times contradict the readings of process_time/3" in run.news[-1]
    assert run.watch.rejected_signals.keys() == {"process_time/3"}
    news = len(run.news)
    run.go(60, reported=SKEWED)
    assert len(run.news) == news


def test_a_disturbance_whose_readings_are_missing_ends_by_its_step_times():
    known = {name: 1.0 for name in NORMAL if name != "process_time/3"}
    run = Run().go(60, reported=NORMAL).go(20, SKEW, SKEWED)
    run.go(constants.MAX_UNCONFIRMED_STEPS + constants.MIN_SHIFTED_STEPS, reported=known)
    assert (run.watch.conditions, run.watch.regime) == (Conditions(), 0)
    assert run.watch.rejected_signals == {}


def test_of_two_disturbances_the_one_that_explains_the_change_is_over():
    both = Conditions(slow=((3, 1.5),), inter_host=4.0)
    told = SKEWED | {"inter_host": 4.0}
    run = Run().go(60, reported=NORMAL).go(20, SKEW, SKEWED).go(20, both, told)
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.06)
    run.go(constants.MAX_UNCONFIRMED_STEPS + constants.MIN_SHIFTED_STEPS, SKEW, told)
    assert run.watch.conditions.inter_host == 1.0
    assert run.watch.conditions.skew == pytest.approx(1.5, rel=0.06)


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_run_that_goes_back_to_a_plan_knows_its_step_times(goes_back):
    """Conditions changed while the next plan was on trial."""
    watch = Watch()

    def steps(count, time_s, first):
        return [
            watch.observe(
                Observation(
                    step=number,
                    time_s=float(number),
                    step_times_s=(time_s,),
                    readings={},
                    global_batch=8,
                    seq_len=64,
                    lost_devices=frozenset(),
                ),
                {},
                lambda conditions: 0.0,
            )
            for number in range(first, first + count)
        ]

    steps(20, 1.0, 1)
    watch.restart(on_trial=True)
    steps(3, 0.5, 21)
    if goes_back:
        watch.go_back([0])
    else:
        watch.restart()
    assert any(steps(8, 4.0, 24)) == goes_back


@pytest.mark.parametrize("lag", [0, 7])
@pytest.mark.parametrize("slow_steps", range(6))
def test_a_link_that_is_whole_once_a_run_is_back_is_believed(slow_steps, lag):
    """`slow_steps`: those after the link was read to be slow, before the next plan was tried.
    `lag`: those before.
    """
    cut, cut_read = Conditions(inter_host=40.0), {**NORMAL, "inter_host": 40.0}

    def cut_link() -> Run:
        run = Run().go(40, reported=NORMAL).go(lag, cut, NORMAL)
        while run.watch.conditions == Conditions():
            run.go(1, cut, cut_read)
        return run.go(slow_steps, cut, cut_read)

    run = cut_link()
    watch = run.go(5, reported=cut_read).watch
    assert watch.is_suspicious or watch.regime, "which holds up a switch"
    run = cut_link()
    run.watch.restart([0], on_trial=True)
    run.go(4, reported=cut_read)
    run.watch.go_back([0])
    run.go(20, reported=NORMAL)
    assert run.watch.conditions == Conditions()
    assert not run.watch.rejected_signals


def test_the_step_in_which_a_link_was_cut_is_no_level_of_the_cut_link():
    cut, cut_read = Conditions(inter_host=40.0), {**NORMAL, "inter_host": 40.0}
    run = Run().go(40, reported=NORMAL).go(1, Conditions(inter_host=10.0), cut_read)
    while run.watch.conditions == Conditions():
        run.go(1, cut, cut_read)
    assert not run.go(6, cut, cut_read).watch.is_suspicious
    run.go(30, cut, {**NORMAL, "inter_host": 120.0})
    assert run.watch.conditions.inter_host == pytest.approx(40.0, rel=0.06), "a wrong reading"


@pytest.mark.parametrize("lag", [0, 5, 10])
def test_a_disturbance_that_nobody_saw_end_is_over_once_readings_say_so(lag):
    """The link was cut while the next plan was on trial, and whole once the run was back. Readings
    are `lag` steps late.
    """
    cut, cut_read = Conditions(inter_host=40.0), {**NORMAL, "inter_host": 40.0}
    run = Run().go(40, reported=NORMAL)
    run.watch.restart([0], on_trial=True)
    run.go(3, cut, NORMAL)
    while run.watch.conditions == Conditions():
        run.go(1, cut, cut_read)
    run.watch.go_back([0])
    run.go(lag, reported=cut_read).go(20, reported=NORMAL)
    assert run.watch.conditions == Conditions()
    assert not run.watch.rejected_signals


def test_a_first_reading_while_a_plan_is_on_trial_is_not_so_from_the_start():
    run = Run().go(40)  # nothing is read
    run.watch.restart([0], on_trial=True)
    cut = Conditions(inter_host=40.0)
    run.go(20, cut, {**NORMAL, "inter_host": 40.0})
    assert run.watch.conditions.inter_host == pytest.approx(40.0, rel=0.06)
    assert run.watch.normal == Conditions()


@pytest.mark.parametrize("lag", [0, 8, 30])
@pytest.mark.parametrize(("before", "after"), [(SKEW, Conditions()), (Conditions(), SKEW)])
def test_a_change_that_came_with_a_switch_shows_in_what_was_expected(before, after, lag):
    """No step under the plan shows it. Readings are `lag` steps late."""
    read = {SKEW: SKEWED, Conditions(): NORMAL}
    run = Run().go(60, reported=NORMAL).go(20, SKEW, SKEWED).go(30, before, read[before])
    run.watch.restart([3], on_trial=True, expected=log_time_of(before))
    run.go(lag, after, read[before])
    believed = run.watch.believed
    while run.watch.believed == believed:
        run.go(1, after, read[after])
    assert run.watch.since_switch
    assert run.watch.conditions.skew == pytest.approx(after.skew, rel=0.06)
    assert not run.watch.rejected_signals


def test_a_plan_that_is_a_little_off_confirms_no_reading():
    run = Run().go(60, reported=NORMAL)
    run.watch.restart([3], on_trial=True, expected=log_time_of(Conditions()) + 0.1)
    run.go(60, reported=SKEWED)
    assert run.watch.believed == Conditions()


def rejected_by_mistake(otherwise_of) -> Run:
    """A run that believes process 3 to be slow, and its steps to show it; neither is so."""
    run = Run().go(60, reported=NORMAL).go(20, SKEW, SKEWED)
    run.watch.restart([3], on_trial=True)  # nothing was expected of the plan
    run.otherwise_of = otherwise_of
    return run.go(10, reported=SKEWED).go(constants.MAX_UNCONFIRMED_STEPS + 2, reported=NORMAL)


def test_a_reading_that_was_rejected_by_mistake_is_heard_again():
    run = rejected_by_mistake(log_time_of)
    assert run.watch.rejected_signals
    while run.watch.rejected_signals:
        run.go(1, reported=NORMAL)
        assert run.step < 200
    assert run.watch.believed == Conditions()
    assert run.watch.since_switch


def test_a_rejected_reading_that_step_times_contradict_stays_rejected():
    run = rejected_by_mistake(lambda conditions: log_time_of(conditions) - math.log(1.5))
    run.go(200, reported=NORMAL)
    assert run.watch.believed.skew == pytest.approx(1.5, rel=0.06)
    assert run.watch.rejected_signals


def test_a_run_that_is_back_in_other_conditions_knows_no_step_times():
    run = Run().go(40, reported=NORMAL)
    run.watch.restart([0], on_trial=True)
    slow = {**NORMAL, "inter_host": 4.0}
    while run.watch.conditions == Conditions():
        run.go(1, SLOW, slow)
    run.watch.go_back([0])
    assert run.watch.detector.count == 0


def test_a_factor_that_the_plan_does_not_feel_may_have_recovered_if_its_reading_stands_still():
    run = Run().go(60, reported=NORMAL).go(20, SKEW, SKEWED)
    assert run.watch.recovered == {}, "step times agree with it"
    run.watch.restart()
    flat = run.log_time = lambda conditions: math.log(0.5)
    frozen_s = run.time_s
    links = {name: 1.0 for name in NORMAL if name != "process_time/3"}

    def observed(count: int) -> None:
        for _ in range(count):
            run.step, run.time_s = run.step + 1, run.time_s + 0.5
            claims = {
                name: SignalSummary(value=value, spread=0.0, count=5, time_s=time_s, quality="good")
                for name, value, time_s in [
                    ("process_time/3", 1.5, frozen_s),
                    *[(name, value, run.time_s) for name, value in links.items()],
                ]
            }
            seen = Observation(
                step=run.step,
                time_s=run.time_s,
                step_times_s=(0.5,),
                readings={},
                global_batch=8,
                seq_len=8,
                lost_devices=frozenset(),
            )
            run.watch.observe(seen, claims, flat)

    observed(20)
    early = run.watch.recovered["process_time/3"]
    observed(200)
    assert 0 < early < run.watch.recovered["process_time/3"] < 1
    run.watch.confirm(run.time_s)
    observed(20)
    assert run.watch.recovered["process_time/3"] < early, "a trial showed that it was still slow"


@pytest.mark.parametrize("is_over", [True, False])
def test_the_first_steps_of_another_plan_show_whether_an_unseen_disturbance_is_over(is_over):
    run = Run().go(60, reported=NORMAL).go(20, SKEW, SKEWED)
    run.watch.restart({0, 1, 2})  # the slow process is left out, and not read any more
    links = {name: 1.0 for name in NORMAL if name != "process_time/3"}
    run.log_time = lambda conditions: log_time_of(conditions.among({0, 1, 2}))
    run.go(100, reported=links)
    run.watch.restart()
    run.log_time = log_time_of
    run.go(20, Conditions() if is_over else SKEW, links)
    assert run.watch.regime == 0
    assert run.watch.conditions.skew == (1.0 if is_over else pytest.approx(1.5, rel=0.06))
    assert run.watch.recovered == {}


def test_conditions_that_are_a_little_worse_are_not_taken_for_permanent():
    run = Run().go(100, reported=NORMAL)
    slow = {"process_time/1": 1.2}
    run.go(40, Conditions().with_factors(slow), NORMAL | slow)
    assert run.watch.believed.skew > 1
    assert run.watch.is_disturbed
    assert run.watch.regime_at(run.time_s).durations is not None


def test_steps_from_before_are_no_level_of_conditions_that_a_reading_reveals():
    """Steps become faster for an unknown reason, and then a link slow."""
    run = Run().go(60, reported=NORMAL).go(20, Conditions(compute=0.7), NORMAL)
    assert run.watch.regime
    run.go(6, SLOW, {**NORMAL, "inter_host": 4.0})
    assert run.watch.regime == 0
    assert run.watch.believed.inter_host > 3
    run.go(8, SLOW, {**NORMAL, "inter_host": 4.0})
    assert run.watch.detector.level == pytest.approx(log_time_of(SLOW), abs=0.02)


def test_durations_are_learnt_from_ended_regimes():
    run = Run().go(100, reported=NORMAL)
    # counts as permanent until it has ended once
    assert run.watch.regime_at(run.time_s).durations is None
    began_s = run.time_s
    run.go(40, SLOW, {**NORMAL, "inter_host": 4.0})
    disturbed = run.watch.regime_at(run.time_s)
    assert disturbed.durations is not None
    assert len(disturbed.durations.past_s) == 0
    assert disturbed.elapsed_s == pytest.approx(run.time_s - began_s, rel=0.1)
    run.go(20, reported=NORMAL)
    normal = run.watch.regime_at(run.time_s)
    assert normal.durations is not None
    assert len(normal.durations.past_s) == 1
    run.go(20, SLOW, {**NORMAL, "inter_host": 4.0})
    again = run.watch.regime_at(run.time_s)
    assert again.durations is not None
    assert len(again.durations.past_s) == 1
    assert again.durations.expected_s(0.0, 1e6) == pytest.approx(2 * 40 * 2.5, rel=0.3)


def test_a_new_plan_has_its_own_typical_step_time():
    run = Run().go(60, reported=NORMAL)
    run.watch.restart()
    run.log_time = lambda conditions: log_time_of(conditions) + 1.0
    run.go(60, reported=NORMAL)
    assert run.news == []
    assert run.watch.detector.level == pytest.approx(1.0, abs=0.02)


def test_invalid_step_times_are_ignored():
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


def test_the_first_reading_of_a_signal_corrects_earlier_conditions():
    """One link recovers when another one is first probed: the other one's value is taken to have
    held all the time.
    """
    known = {"inter_host": 1.0, "compute": 1.0, "process_time/3": 1.0}
    run = Run(lambda conditions: log_time_of(conditions) + 0.3 * math.log(conditions.intra_host))
    run.go(60, reported=known).go(30, SLOW, {**known, "inter_host": 4.0})
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.06)
    run.watch.restart()  # another plan, which crosses both links
    corrected: set[str] = set()
    for _ in range(12):
        run.go(1, Conditions(intra_host=0.7), {**known, "intra_host": 0.7})
        corrected |= run.watch.was_so.keys()
    assert run.watch.conditions.inter_host == 1.0
    assert run.watch.conditions.intra_host == pytest.approx(0.7, rel=0.06)
    assert corrected == {"intra_host"}


def test_steps_before_a_change_are_not_compared_with_those_after():
    """Three steps show the change. Only those after them may be compared with steps of a new
    plan.
    """
    run = Run().go(60, reported=NORMAL).go(3, SLOW, {**NORMAL, "inter_host": 4.0})
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.06)
    assert run.watch.steps_alike == 0
    assert run.go(4, SLOW, {**NORMAL, "inter_host": 4.0}).watch.steps_alike == 4
    assert run.watch.detector.level == pytest.approx(log_time_of(SLOW), abs=0.03)


@pytest.mark.parametrize("log_time_after", [0.0, 0.4, -0.4])
def test_an_unexplained_regime_can_end_under_another_plan(log_time_after):
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
    run.go(5, SLOW, NORMAL | {"inter_host": 4.0}).go(10, SLOW, NORMAL | {"inter_host": 4.0})
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.06), (
        "and what is told of links then is believed"
    )


def test_a_slow_drift_is_a_change_that_a_reading_may_explain():
    """The detector's level goes with a drift, so it is compared with where it began."""
    run = Run().go(60, reported=NORMAL)
    for step in range(400):
        factor = 1.0 + step / 1000
        run.go(
            1, Conditions(compute=factor), NORMAL if step < 300 else NORMAL | {"compute": factor}
        )
    assert "time than before" in run.news[0]
    assert run.watch.conditions.compute == pytest.approx(1.35, rel=0.1)
    assert run.watch.regime == 0


def test_noise_and_a_small_drift_are_no_change():
    run = Run().go(60, reported=NORMAL)
    for step in range(300):
        run.go(1, Conditions(compute=1.0 + step / 8000), NORMAL)
    assert run.news == []


@pytest.mark.parametrize("value", [4.0, 0.25])
def test_a_reading_with_samples_from_before_the_change_is_revised(value):
    """A median of three samples passes through values between both conditions."""
    between = 1.0 + 0.45 * (value - 1.0)
    run = Run().go(60, reported=NORMAL)
    run.go(8, Conditions(inter_host=value), NORMAL | {"inter_host": between})
    assert run.watch.conditions.inter_host == pytest.approx(between, rel=0.1)
    run.go(20, Conditions(inter_host=value), NORMAL | {"inter_host": value})
    assert run.watch.conditions.inter_host == pytest.approx(value, rel=0.1)
    assert run.watch.rejected_signals == {}


def test_an_explained_change_is_not_revised_by_a_wrong_reading():
    run = Run().go(60, reported=NORMAL).go(10, SLOW, NORMAL | {"inter_host": 4.0})
    run.go(30, SLOW, NORMAL | {"inter_host": 12.0})
    assert run.watch.conditions.inter_host == pytest.approx(4.0, rel=0.1)
    assert "inter_host" in run.watch.rejected_signals


def test_sensors_that_all_stand_still_are_noticed():
    """A plan that does not feel the slow process: only its reading shows it."""
    run = Run(lambda conditions: 0.0).go(30, reported=NORMAL)
    run.go(30, reported=NORMAL | {"process_time/3": 2.0})
    assert run.watch.recovered == {}
    frozen_s = run.time_s
    run.go(2, reported=NORMAL | {"process_time/3": 2.0}, measured_s=frozen_s)
    assert run.watch.recovered == {}
    run.go(60, reported=NORMAL | {"process_time/3": 2.0}, measured_s=frozen_s)
    assert 0 < run.watch.recovered["process_time/3"] < 1
    assert run.news[-1] == "process_time/3 is not measured any more"
    run.go(1, reported=NORMAL | {"process_time/3": 2.0})
    assert run.watch.recovered == {}
