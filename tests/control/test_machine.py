"""The state machine of a switch: its table, the invariants of its states, and its limits."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from fleet import PLANS
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import ControlConfig
from optimus_jax.control import constants
from optimus_jax.control.commands import Command
from optimus_jax.control.machine import TABLE, markdown, reduce, resumed
from optimus_jax.control.policy import Decision
from optimus_jax.control.switch_state import (
    BatchChanged,
    CompileDone,
    Decided,
    Interrupted,
    MoveBegun,
    MoveDone,
    News,
    Question,
    Stage,
    StepsDone,
    SwitchFailed,
    SwitchRules,
    SwitchState,
    TrialOver,
)
from optimus_jax.control.transitions import Announce, Charge, quarantined

OLD, NEW, THIRD = PLANS[:3]
RULES = SwitchRules(
    settings=ControlConfig(cooldown_steps=30, window_steps=20, canary_steps=5, max_switches=2),
    num_steps=1000,
)
MAY, MUST = Question(trigger="news"), Question(trigger="devices are lost", mandatory=True)
LATER = Question(trigger="a phase", at_step=500)


def to(plan, **fields):
    return Decided(decision=Decision(step=0, action="switch", plan=plan, why="a test", **fields))


STAY = Decided(decision=Decision(step=0, action="stay", why="a test"))


def after(*events, state=None, rules=RULES):
    """The state after these events, and all commands."""
    state, all_commands = state or SwitchState(), []
    for event in events:
        state, commands = reduce(state, event, rules)
        all_commands += commands
    return state, all_commands


def steps(first, count, time_s=1.0, loss=1.0):
    return [
        StepsDone(step=step, time_s=float(step), times_s=(time_s,), losses=(loss,))
        for step in range(first, first + count)
    ]


def kinds(commands):
    return [
        command.kind if isinstance(command, Command) else type(command).__name__
        for command in commands
    ]


MOVED = MoveDone(plan=NEW, costs_s={"move_s": 2.0})
ON_TRIAL = (
    *steps(1, 20),
    News(question=MAY),
    to(NEW),
    *steps(21, 3),
    CompileDone(),
    MoveBegun(),
    MOVED,
)


def test_the_documentation_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "control.md"
    assert markdown() in page.read_text()


def test_a_switch_goes_through_all_stages():
    seen, state = [], SwitchState()
    for event in (*ON_TRIAL, *steps(24, 6), TrialOver(), *steps(30, 30)):
        state, _ = reduce(state, event, RULES)
        seen += [] if seen[-1:] == [state.stage] else [state.stage]
    assert seen == [*Stage, Stage.IDLE]
    assert state.num_switches == 1


PLAN = st.sampled_from([OLD, NEW, THIRD])
QUESTIONS = st.sampled_from([MAY, MUST, LATER])
EVENTS = st.one_of(
    st.builds(
        StepsDone,
        step=st.integers(1, 300),
        time_s=st.floats(0, 300),
        times_s=st.lists(st.sampled_from([1.0, 1.1, 3.0]), max_size=3).map(tuple),
        losses=st.lists(st.sampled_from([1.0, math.nan]), max_size=2).map(tuple),
    ),
    st.builds(News, question=QUESTIONS),
    st.just(BatchChanged()),
    st.builds(to, PLAN, at_step=st.sampled_from([None, 250]), mandatory=st.booleans()),
    st.just(STAY),
    st.builds(CompileDone, at_once=st.booleans(), is_puzzled=st.booleans()),
    st.just(MoveBegun()),
    st.builds(
        MoveDone,
        plan=PLAN,
        costs_s=st.just({"move_s": 1.0}),
        begins_phase=st.booleans(),
        steps_alike=st.sampled_from([None, 0, 4]),
    ),
    st.builds(SwitchFailed, plan=PLAN, why=st.just("a test")),
    st.just(TrialOver()),
    st.builds(Interrupted, reopens=st.booleans()),
)


@given(st.lists(EVENTS, max_size=40), st.booleans(), st.booleans())
def test_every_state_is_in_the_table(events, shares_cores, acts):
    """Whatever happens in whatever order: the stage is one that the table names, it says what is
    pending or on trial, and an event that the table lacks changes nothing.
    """
    rules, state = replace(RULES, shares_cores=shares_cores, acts=acts), SwitchState()
    for event in events:
        row, before = TABLE.get((state.stage, type(event))), state
        state, commands = reduce(state, event, rules)
        if row is None:
            assert (state, commands) == (before, ())
            continue
        assert state.stage in row.then
        assert (state.stage in (Stage.PREPARING, Stage.READY)) <= (state.pending is not None)
        assert (state.stage is Stage.CANARY) <= (state.trial is not None)
        assert (state.stage in (Stage.IDLE, Stage.COOLDOWN)) <= (
            state.trial is None and state.pending is None
        )
        assert acts or not any(kind == "prepare" for kind in kinds(commands))
        assert all(each.time_s >= 0 for each in commands if isinstance(each, Charge))


def test_a_decision_is_announced_and_prepared_once():
    state, commands = after(News(question=MAY), to(NEW), News(question=MAY), to(NEW))
    assert kinds(commands) == ["Announce", "prepare"]
    assert (state.stage, state.question) == (Stage.PREPARING, None)
    _, commands = after(to(THIRD), state=state)
    assert kinds(commands) == ["Charge", "Announce", "prepare"]


def test_advice_is_announced_and_not_prepared():
    rules = replace(RULES, acts=False)
    state, commands = after(*steps(1, 20), News(question=MAY), to(NEW), rules=rules)
    assert (kinds(commands), state.stage) == (["Announce"], Stage.IDLE)
    state, commands = after(News(question=MAY), to(NEW), state=state, rules=rules)
    assert commands == [], "the same advice is given once"
    _, commands = after(News(question=MAY), to(THIRD), state=state, rules=rules)
    assert kinds(commands) == ["Announce"]
    later, _ = after(*steps(21, 300), state=state, rules=rules)
    assert later.question == Question(trigger="it is time to look again")
    _, commands = after(to(NEW), state=later, rules=rules)
    assert kinds(commands) == ["Announce"], "or after a while"
    _, commands = after(STAY, to(NEW), state=state, rules=rules)
    assert kinds(commands) == ["Announce", "Announce"]


def test_to_stay_withdraws_what_is_pending():
    state, commands = after(*steps(1, 20), to(NEW), *steps(21, 4, time_s=1.5), STAY)
    assert kinds(commands)[2:] == ["Charge", "Announce", "withdraw"]
    assert commands[2] == Charge(time_s=2.0), "steps took longer beside the compilation"
    paused = StepsDone(step=21, time_s=25.0, times_s=(1.5,), paused_s=4.0)
    _, commands = after(*steps(1, 20), to(NEW), paused, STAY)
    assert commands[2] == Charge(time_s=4.5)
    assert (state.stage, state.pending) == (Stage.IDLE, None)


def test_a_mandatory_question_replaces_others_and_is_not_replaced():
    state, _ = after(News(question=MAY), News(question=MUST), News(question=MAY))
    assert state.questions == (MUST, MAY)
    stay = Decided(decision=replace(STAY.decision, mandatory=True))
    state, _ = after(stay, state=state)
    assert (state.questions, state.forced) == ((MAY,), MUST)


def test_a_run_that_need_not_move_any_more_is_not_forced_to():
    """Devices were lost, nothing could be done, and they are back."""
    cannot = Decided(decision=replace(STAY.decision, mandatory=True))
    state, _ = after(News(question=MUST), cannot)
    assert state.forced == MUST
    state, _ = after(News(question=MUST), STAY, state=state)
    assert state.forced is None
    state, _ = after(News(question=MUST), to(NEW, mandatory=True), News(question=MAY), STAY)
    assert (state.pending, state.forced, state.questions) == (None, None, ())


def test_news_while_a_pressing_switch_is_pending_ask_its_question_again():
    state, _ = after(News(question=MUST), to(NEW, mandatory=True), News(question=MAY))
    assert state.question == MUST
    state, _ = after(News(question=MUST), state=replace(state, questions=()))
    assert state.question == MUST


@pytest.mark.parametrize(
    "meanwhile",
    [
        [News(question=MUST), to(NEW, mandatory=True)],
        [News(question=MUST), to(NEW, mandatory=True), MoveBegun(), MOVED],
        [SwitchFailed(plan=NEW, why="it did not compile")],
        [Interrupted()],
    ],
)
@pytest.mark.parametrize("is_pending", [False, True])
def test_a_question_about_a_phase_is_not_forgotten(is_pending, meanwhile):
    """Neither while it waits for a search, nor while its plan is prepared, nor a second one."""
    answer = [to(THIRD, at_step=500)] if is_pending else []
    last = Question(trigger="another phase", at_step=700)
    state, _ = after(News(question=LATER), *answer, News(question=last), *meanwhile)
    waits = state.pending is not None
    assert (state.questions, state.question) == ((LATER, last), None if waits else LATER)


def test_a_phase_to_come_waits_for_a_switch_now():
    state, _ = after(News(question=MAY), to(NEW), News(question=LATER))
    assert (state.question, state.questions) == (None, (LATER,))
    state, _ = after(CompileDone(), MoveBegun(), MOVED, state=state)
    assert state.question == LATER


def test_a_switch_now_does_not_wait_for_a_phase_to_come():
    planned = (News(question=LATER), to(THIRD, at_step=500))
    state, _ = after(*planned, News(question=MAY))
    assert state.question == LATER, "another plan may be the better one for it now"
    state, commands = after(to(THIRD, at_step=500), state=state)
    assert (commands, state.question) == ([], MAY)
    stayed, commands = after(STAY, state=state)
    assert (kinds(commands), stayed.pending.decision.plan) == (["Announce"], THIRD)
    state, commands = after(to(NEW), state=state)
    assert kinds(commands) == ["Charge", "Announce", "prepare"]
    assert (state.pending.decision.plan, state.questions) == (NEW, (LATER,))


def test_a_phase_that_has_begun_is_not_asked_about_any_more():
    asked = (News(question=LATER), to(NEW, at_step=500))
    state, _ = after(*asked, *steps(500, 1), Interrupted())
    assert state.questions == ()


def test_other_devices_are_another_switch():
    """A second loss while the plan without the first is prepared."""
    first = to(NEW, mandatory=True, without=frozenset({3, 7}))
    second = to(NEW, mandatory=True, without=frozenset({3, 5}))
    state, commands = after(News(question=MUST), first, News(question=MUST), second)
    assert kinds(commands) == ["Announce", "prepare", "Charge", "Announce", "prepare"]
    assert commands[-1].target == second.decision.target == state.pending.decision.target
    state, commands = after(News(question=MUST), second, state=state)
    assert commands == []


def test_what_was_planned_for_this_boundary_is_not_prepared_again():
    """The new batches are seen at the boundary itself."""
    planned = (News(question=LATER), to(NEW, at_step=500), *steps(500, 1))
    state, commands = after(*planned, News(question=MUST), to(NEW, mandatory=True))
    assert kinds(commands) == ["Announce", "prepare"]
    assert state.pending.decision.at_step == 500
    _, commands = after(*planned, News(question=MUST), to(THIRD, mandatory=True))
    assert kinds(commands) == ["Announce", "prepare", "Charge", "Announce", "prepare"]


def test_a_switch_that_need_not_be_made_any_more_is_made_by_choice():
    state, _ = after(*steps(1, 20), News(question=MUST), to(NEW, mandatory=True))
    state, commands = after(News(question=MUST), to(NEW), state=state)
    assert (commands, state.forced) == ([], None)
    state, _ = after(CompileDone(), MoveBegun(), MOVED, state=state)
    assert state.num_switches == 1
    assert state.trial.before_s


@pytest.mark.parametrize(
    "meanwhile",
    [
        [MoveBegun(), MOVED],
        [MoveBegun(), replace(MOVED, begins_phase=True), Interrupted()],
        [SwitchFailed(plan=NEW, why="it did not compile")],
        [Interrupted()],
    ],
)
def test_a_mandatory_question_that_waits_for_a_search_is_not_forgotten(meanwhile):
    """Devices are lost while another plan is ready: only the answer closes the question."""
    begun = (*steps(1, 20), News(question=MAY), to(NEW), *steps(21, 3), CompileDone())
    state, _ = after(*begun, News(question=MUST), *meanwhile)
    assert state.question == MUST
    state, _ = after(News(question=MAY), state=state)
    assert state.question == MUST


def test_a_mandatory_switch_that_failed_is_asked_about_again():
    asked = (News(question=MUST), to(NEW, mandatory=True))
    for event in (SwitchFailed(plan=NEW, why="a test"), Interrupted()):
        state, _ = after(*asked, event)
        assert state.question == MUST
    state, _ = after(*asked, Interrupted(reopens=False))
    assert state.question is None
    moved = (*asked, CompileDone(), MoveBegun(), MOVED)
    for event in (Interrupted(), TrialOver()):
        state, _ = after(*moved, event)
        assert (state.questions, state.forced) == ((), None)
    state, _ = after(*moved, SwitchFailed(plan=NEW, why="its first step failed"))
    assert state.question == MUST
    entered = (*asked, replace(MOVED, plan=THIRD, begins_phase=True), Interrupted())
    state, commands = after(*entered)
    assert state.question == MUST, "another plan was entered, for a phase"
    assert "Charge" in kinds(commands)


def test_another_batch_makes_the_question_about_a_phase_one_about_now():
    later_still = replace(LATER, at_step=700)
    asked = (News(question=LATER), News(question=later_still), *steps(500, 1), BatchChanged())
    state, _ = after(*asked)
    assert state.questions == (later_still, replace(LATER, at_step=None))


def test_a_steady_run_moves_at_once():
    *_, (state, commands) = [after(*steps(1, 20), to(NEW), *steps(21, 3), CompileDone())]
    assert kinds(commands)[-1] == "switch"
    assert state.stage is Stage.READY


@pytest.mark.parametrize(
    ("is_puzzled", "waits"),
    [(False, constants.NUM_COMPARED_STEPS), (True, constants.MAX_READY_WAIT_STEPS)],
)
def test_changed_steps_are_looked_at_before_the_move(is_puzzled, waits):
    rules = replace(RULES, shares_cores=True)
    state, commands = after(
        *steps(1, 20), to(NEW), *steps(21, 3, time_s=5.0), CompileDone(), rules=rules
    )
    assert kinds(commands)[-1] == "recheck"
    for number in range(1, waits + 1):
        state, commands = after(
            *steps(23 + number, 1, time_s=5.0),
            CompileDone(is_puzzled=is_puzzled),
            state=state,
            rules=rules,
        )
        assert kinds(commands) == (["switch"] if number == waits else [])


def test_a_planned_switch_needs_no_command_to_move():
    compiled = (*steps(1, 20), to(NEW, at_step=100), *steps(21, 3), CompileDone())
    state, commands = after(*compiled)
    assert kinds(commands)[2:] == ["recheck"], "steps are timed again"
    assert after(CompileDone(), state=state) == (state, [])


def test_a_new_plan_is_kept_or_taken_back_by_its_first_steps():
    for time_s, kind in ((0.9, "keep"), (1.2, "roll_back")):
        state, commands = after(*ON_TRIAL, *steps(24, 6, time_s=time_s))
        assert (kinds(commands)[-1], state.stage) == (kind, Stage.CANARY)
        _, again = after(*steps(30, 2, time_s=time_s), state=state)
        assert again == [], "the verdict is sent once"
    _, commands = after(*ON_TRIAL, *steps(24, 6, loss=math.nan))
    assert commands[-1] == Command(kind="roll_back", why="the loss is not finite")


def test_a_trial_that_has_lost_what_going_back_costs_is_over():
    slow = after(*ON_TRIAL, *steps(24, 3, time_s=100.0))
    assert slow[1] == after(*ON_TRIAL)[1], "two steps may be slow by chance"
    _, commands = after(*steps(27, 1, time_s=100.0), state=slow[0])
    assert kinds(commands)[-1] == "roll_back"
    ending = replace(RULES, phase_ends=(0, 28))
    slower = after(*ON_TRIAL, *steps(24, 4, time_s=2.0), rules=ending)
    assert slower[1] == after(*ON_TRIAL)[1], "it would be kept, so the trial goes on"


def test_the_way_back_costs_a_pause_and_nothing_is_compiled_for_it():
    compiled = StepsDone(step=21, time_s=1021.0, times_s=(1.0,), paused_s=1000.0)
    prepared = (*steps(1, 20), News(question=MAY), to(NEW), compiled, *steps(22, 2), CompileDone())
    state, commands = after(*prepared, MoveBegun(), MOVED, *steps(24, 6, time_s=1.2))
    assert state.trial.spent_s["compile_tax_s"] == 1000.0
    assert kinds(commands)[-1] == "roll_back"


def test_a_new_plan_is_not_left_for_the_few_steps_of_a_phase():
    slower = (*ON_TRIAL, *steps(24, 6, time_s=1.2))
    assert kinds(after(*slower)[1])[-1] == "roll_back"
    ending = replace(RULES, phase_ends=(0, 35))
    assert kinds(after(*slower, rules=ending)[1])[-1] == "keep"


def test_steps_beside_a_compilation_on_the_same_cores_judge_no_plan():
    """While a plan is on trial, another one is prepared that the run has to move to."""
    forced = (News(question=MUST), to(THIRD, mandatory=True), *steps(24, 6, time_s=9.0))
    for shares_cores, verdict in ((False, "roll_back"), (True, "keep")):
        _, commands = after(*ON_TRIAL, *forced, rules=replace(RULES, shares_cores=shares_cores))
        assert verdict in kinds(commands)


def test_a_plan_that_the_run_had_to_leave_is_no_standard():
    state, _ = after(
        *steps(1, 20),
        News(question=MUST),
        to(NEW, mandatory=True),
        CompileDone(),
        MoveBegun(),
        MOVED,
    )
    assert state.trial is not None
    assert state.trial.before_s == ()
    assert state.num_switches == 0
    assert RULES.cool_until(state) == 20 + 2 * RULES.settings.canary_steps
    _, commands = after(*steps(21, 6, time_s=9.0, loss=math.nan), state=state)
    assert kinds(commands)[-1] == "keep", "it cannot go back"


def test_the_first_steps_are_compared_with_steps_beside_no_compilation():
    """Where the compiler has its own cores, which does not stop it from slowing steps a little."""
    prepared = (*steps(1, 20), to(NEW), *steps(21, 10, time_s=1.2), CompileDone())
    state, _ = after(*prepared, MoveBegun(), MOVED)
    assert state.trial.before_s == pytest.approx((1.0,) * len(state.trial.before_s))
    _, commands = after(*steps(31, 6, time_s=1.1), state=state)
    assert kinds(commands)[-1] == "roll_back"
    prepared = (*steps(1, 20), to(NEW), *steps(21, 10, time_s=3.0), CompileDone())
    state, _ = after(*prepared, MoveBegun(), MOVED)
    assert state.trial.before_s[-1] == 3.0, "more than a compilation explains"


def test_a_plan_that_cannot_be_prepared_does_not_make_the_present_one_newer():
    state, _ = after(*steps(1, 50), to(NEW), SwitchFailed(plan=NEW, why="a test"))
    assert (state.entered_step, state.switched_step) == (0, 50)
    state, _ = after(*ON_TRIAL, *steps(24, 1))
    assert state.entered_step == 23
    state, _ = after(SwitchFailed(plan=NEW, why="slower"), state=state)
    assert state.entered_step == 24


def test_no_trial_in_a_phase_or_where_there_are_none():
    state, _ = after(to(NEW), CompileDone(), MoveBegun(), replace(MOVED, begins_phase=True))
    assert state.stage is Stage.COOLDOWN
    state, _ = after(*ON_TRIAL, rules=replace(RULES, has_trials=False))
    assert state.stage is Stage.COOLDOWN


def test_a_failed_plan_is_left_alone_for_longer_each_time():
    state, until = SwitchState(), []
    for step in (100, 300):
        state = quarantined(replace(state, step=step), NEW, step, "a test", RULES)
        until.append(state.failures[NEW.digest].until_step - step)
        assert "a test" in state.why_not(NEW)
        assert not state.why_not(OLD)
    assert until == [60, 120]
    assert not replace(state, step=420).why_not(NEW)
    state, _ = after(STAY, state=replace(state, step=310))
    assert state.review_step == 420, "it may be the best one then"


def test_the_plan_is_reviewed_when_the_cool_down_is_over():
    state, _ = after(*ON_TRIAL, *steps(24, 6), TrialOver(), *steps(30, 23))
    assert (state.stage, state.question) == (Stage.COOLDOWN, None)
    state, _ = after(*steps(53, 1), state=state)
    assert (state.stage, state.question) == (
        Stage.IDLE,
        Question(trigger="it is time to look again"),
    )


def test_a_review_by_the_clock():
    state, _ = after(*steps(1, 20), replace(STAY, review_s=22.5), *steps(21, 2))
    assert state.question is None
    state, _ = after(*steps(23, 1), state=state)
    assert state.question is not None
    assert state.review_s == math.inf


def test_limits_on_switches():
    state = replace(resumed(SwitchState(), 100, RULES, by_choice=True), step=129)
    assert "until step 130" in RULES.blocked(state, MAY, 1.0)
    assert not RULES.blocked(state, MUST, 1.0)
    assert not RULES.blocked(state, LATER, 1.0), "its boundary is later"
    assert not RULES.blocked(replace(state, step=130), MAY, 1.0)
    assert not RULES.blocked(replace(state, step=120), MAY, 2.0), "slow steps last longer"
    assert [RULES.cool_until(state, slowed) for slowed in (0.5, 1.0, 2.0, 100.0)] == [
        130,
        130,
        115,
        107,
    ]
    forced = resumed(SwitchState(), 100, RULES, by_choice=False)
    assert (RULES.cool_until(forced), forced.num_switches) == (110, 0)
    state = resumed(state, 200, RULES, by_choice=True)
    assert "2 switches are the most" in RULES.blocked(replace(state, step=500), MAY, 1.0)


def test_a_run_that_goes_back_to_a_checkpoint_cools_down_from_there():
    state, _ = after(*ON_TRIAL, *steps(24, 6), TrialOver(), *steps(30, 30))
    state, _ = after(*steps(10, 1), state=state)
    assert RULES.cool_until(state) == 40
    assert state.review_step == 40


def test_announcements_carry_the_decision():
    _, commands = after(STAY)
    assert commands == [Announce(decision=STAY.decision)]
