"""What an event does to the state of a switch, and which commands follow: the functions of the
table in control/machine.py. All are pure.
"""

import math
import statistics
from dataclasses import dataclass, replace

from optimus_jax.control import constants
from optimus_jax.control.canary import has_lost, judge
from optimus_jax.control.commands import Command
from optimus_jax.control.policy import Decision
from optimus_jax.control.switch_state import (
    BatchChanged,
    CompileDone,
    Decided,
    Failure,
    Interrupted,
    MoveBegun,
    MoveDone,
    News,
    PendingSwitch,
    Question,
    Stage,
    StepsDone,
    SwitchFailed,
    SwitchRules,
    SwitchState,
    Trial,
    TrialOver,
)
from optimus_jax.plan import Plan

# What process 0 does for itself; commands to all processes are in control/commands.py.


@dataclass(frozen=True, kw_only=True)
class Announce:
    """Record and show a decision."""

    decision: Decision


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Charge the account with time that switching took."""

    time_s: float


Commands = tuple[Command | Announce | Charge, ...]
Reduced = tuple[SwitchState, Commands]
NO_COMMANDS: Commands = ()


# Steps.


def _counted(state: SwitchState, event: StepsDone, rules: SwitchRules) -> SwitchState:
    """The state after these steps."""
    goes_back = event.step < state.step
    state = replace(
        state,
        step=event.step,
        time_s=event.time_s,
        recent_s=(state.recent_s + event.own_s)[-rules.settings.window_steps :],
        # A run that resumes from a checkpoint repeats steps. A cool-down that came later begins.
        switched_step=min(state.switched_step, event.step),
        entered_step=min(state.entered_step, event.step),
    )
    return replace(state, review_step=rules.cool_until(state)) if goes_back else state


def steps_done(state: SwitchState, event: StepsDone, rules: SwitchRules) -> Reduced:
    """Ask again if a review is due."""
    return _reviewed(_counted(state, event, rules)), NO_COMMANDS


def cooled_steps_done(state: SwitchState, event: StepsDone, rules: SwitchRules) -> Reduced:
    """End the cool-down once it is over."""
    state = _counted(state, event, rules)
    is_over = state.step >= rules.cool_until(state)
    return _reviewed(replace(state, stage=Stage.IDLE) if is_over else state), NO_COMMANDS


def canary_steps_done(state: SwitchState, event: StepsDone, rules: SwitchRules) -> Reduced:
    """Judge the new plan after its first steps, or once it has lost what going back costs."""
    state, trial = _counted(state, event, rules), state.trial
    assert trial is not None, "the stage has a trial"
    trial = replace(
        trial,
        times_s=trial.times_s + event.times_s,
        waited=trial.waited + event.flags,
        losses=trial.losses + event.losses,
        # Beside a compilation on the same cores these steps are no measure of the plan.
        before_s=() if state.pending is not None and rules.shares_cores else trial.before_s,
    )
    state = replace(state, trial=trial)
    if trial.verdict is not None:
        return state, NO_COMMANDS
    back_s, at_end = sum(trial.costs_s.values()), len(trial.times_s) > rules.settings.canary_steps
    if not at_end and not has_lost(trial.own_s, before_s=trial.before_s, back_s=back_s):
        return state, NO_COMMANDS
    verdict = judge(
        trial.own_s,
        num_waited=trial.waited[1:].count(True),
        losses=trial.losses,
        before_s=trial.before_s,
        predicted_s=trial.predicted_s,
        steps_left=rules.steps_left(state.step),
        back_s=back_s,
        mandatory=trial.mandatory,
    )
    if verdict.keep and not at_end:
        return state, NO_COMMANDS
    return replace(state, trial=replace(trial, verdict=verdict)), (
        Charge(time_s=trial.first_steps_s),
        Command(kind="keep" if verdict.keep else "roll_back", why=verdict.why),
    )


def compiling_steps_done(state: SwitchState, event: StepsDone, rules: SwitchRules) -> Reduced:
    """Add up how much longer steps take beside the compilation, and pauses for it."""
    pending = state.pending
    assert pending is not None, "the stage has a pending switch"
    usual_s = pending.usual_s
    tax_s = 0.0 if usual_s is None else sum(event.own_s) - len(event.own_s) * usual_s
    beside_s = (pending.beside_s + event.own_s)[-rules.settings.window_steps :]
    tax_s += pending.tax_s + event.paused_s
    pending = replace(pending, tax_s=tax_s, beside_s=beside_s)
    return replace(_counted(state, event, rules), pending=pending), NO_COMMANDS


def only_counted(state: SwitchState, event: StepsDone, rules: SwitchRules) -> Reduced:
    """Count them."""
    return _counted(state, event, rules), NO_COMMANDS


# Questions and answers.


def news(state: SwitchState, event: News, rules: SwitchRules) -> Reduced:
    """Open the question."""
    asked, answered = event.question, state.pending and state.pending.question
    # A switch that is mandatory or planned for a boundary is not withdrawn for something else, but
    # another plan may be the better answer to its question now.
    if answered is not None and answered.is_pressing and not asked.is_pressing:
        state = _opened(state, answered)
        if answered.at_step is None:
            return state, NO_COMMANDS
    return _opened(state, asked), NO_COMMANDS


def batch_changed(state: SwitchState, event: BatchChanged, rules: SwitchRules) -> Reduced:
    """Ask the question about them now, if it is open."""
    due = [each for each in state.questions if (each.at_step or math.inf) <= state.step]
    others = tuple([each for each in state.questions if each not in due])
    now = replace(due[-1], batch=None, at_step=None) if due else None
    return _opened(replace(state, questions=others), now), NO_COMMANDS


def decided(state: SwitchState, event: Decided, rules: SwitchRules) -> Reduced:
    """Prepare the switch, or withdraw the one that is pending."""
    decision, asked, pending = event.decision, state.question, state.pending
    state = replace(state, questions=tuple([each for each in state.questions if each is not asked]))
    if asked is not None and asked.mandatory:
        # What forced the run to move may be over by now.
        asked = replace(asked, mandatory=decision.mandatory)
        state = replace(state, forced=asked if decision.mandatory else None)
    if pending is not None and pending.question is not None and asked is not None:
        # What is pending may answer another question, which is open again if it is dropped.
        is_same = pending.question.urgency == asked.urgency
        pending = replace(pending, question=None) if is_same else pending
    is_now = asked is None or asked.at_step is None
    if decision.action == "stay":
        pending_now = pending is None or pending.decision.at_step is None
        if pending is not None and asked is not None and pending_now != is_now:
            state = _to_review(state, event) if is_now else state
            return state, (Announce(decision=decision),)  # what is pending is not about that time
        return _stayed(replace(state, pending=pending), event, rules)
    state = _pressing(state) if is_now else state
    if pending is not None and pending.decision.target == decision.target:
        pending = replace(pending, decision=decision, question=asked)
        return replace(state, pending=pending), NO_COMMANDS
    if pending is not None and _is_due(pending.decision, decision, state.step):
        return replace(state, pending=pending), NO_COMMANDS
    if not rules.acts:
        return _advised(state, decision, rules)
    state, commands = _dropped(replace(state, pending=pending), rules)
    alike_s = _newest(state, event.steps_alike)
    pending = PendingSwitch(
        decision=decision,
        question=asked,
        decided_s=state.time_s,
        before_s=alike_s[-constants.NUM_COMPARED_STEPS :],
        usual_s=statistics.median(alike_s) if alike_s else None,
        was_compiled=event.is_compiled,
    )
    prepare = Command(
        kind="prepare",
        plan=decision.plan,
        without=decision.without,
        at_step=decision.at_step,
        why=decision.why,
    )
    return _settled(replace(state, pending=pending), rules), (
        *commands,
        Announce(decision=decision),
        prepare,
    )


def _is_due(planned: Decision, decision: Decision, step: int) -> bool:
    """Whether what was planned for this boundary is what is decided to be done now."""
    return planned.at_step == step and replace(planned, at_step=None).target == decision.target


def _advised(state: SwitchState, decision: Decision, rules: SwitchRules) -> Reduced:
    if decision.target == state.advised and state.step < state.advised_until:
        return state, NO_COMMANDS
    again = state.step + constants.ADVICE_REPEAT_COOLDOWNS * _cool_steps(rules)
    state = replace(state, advised=decision.target, advised_until=again, review_step=again)
    return state, (Announce(decision=decision),)


def _stayed(state: SwitchState, event: Decided, rules: SwitchRules) -> Reduced:
    had_pending = state.pending is not None
    state, commands = _dropped(state, rules)
    withdraw = (Command(kind="withdraw", why=event.decision.why),) if had_pending else ()
    return _settled(_to_review(state, event), rules), (
        *commands,
        Announce(decision=event.decision),
        *withdraw,
    )


def _to_review(state: SwitchState, event: Decided) -> SwitchState:
    """The state in which the decision to stay is reviewed in time."""
    # When its quarantine ends, a plan that has failed may be the best one.
    ends = [each.until_step for each in state.failures.values() if each.until_step > state.step]
    return replace(
        state,
        advised=None,
        review_step=min(state.review_step, event.review_step, *ends),
        review_s=min(state.review_s, event.review_s),
    )


# The switch.


def compile_done(state: SwitchState, event: CompileDone, rules: SwitchRules) -> Reduced:
    """Go, if steps are as at the decision; else watch them for a while first."""
    pending = state.pending
    assert pending is not None, "the stages have a pending switch"
    if state.stage is Stage.PREPARING and not rules.shares_cores:
        state = _without_tax(state, pending)
    state = replace(state, stage=Stage.READY)
    # On CPU devices nobody has seen steps during the compilation.
    recheck = (
        replace(state, pending=replace(pending, checked_since=state.step)),
        (Command(kind="recheck", plan=pending.decision.plan),),
    )
    if pending.decision.at_step is not None:  # all processes know when
        return recheck if pending.checked_since is None else (state, NO_COMMANDS)
    go = (Command(kind="switch", plan=pending.decision.plan),)
    if event.at_once or pending.decision.mandatory or _is_steady(state, event):
        return state, go
    if pending.checked_since is None:
        return recheck
    waited = state.step - pending.checked_since
    unseen = constants.NUM_COMPARED_STEPS if rules.shares_cores else 0
    is_as_it_was = waited >= constants.MAX_READY_WAIT_STEPS or (
        waited >= unseen and not event.is_puzzled
    )
    return state, go if is_as_it_was else NO_COMMANDS


def _is_steady(state: SwitchState, event: CompileDone) -> bool:
    """Whether the newest steps took about as long as those before the compilation."""
    assert state.pending is not None
    newest_s, before_s = state.recent_s[-constants.NUM_COMPARED_STEPS :], state.pending.before_s
    if len(newest_s) < constants.NUM_COMPARED_STEPS or not before_s or event.is_puzzled:
        return False
    usual_s = statistics.median(before_s)
    return (
        usual_s / constants.STEADY_FACTOR <= min(newest_s)
        and max(newest_s) <= constants.STEADY_FACTOR * usual_s
    )


def move_begun(state: SwitchState, event: MoveBegun, rules: SwitchRules) -> Reduced:
    """Wait until it is done: no step is made meanwhile."""
    return replace(state, stage=Stage.MOVING), NO_COMMANDS


def move_done(state: SwitchState, event: MoveDone, rules: SwitchRules) -> Reduced:
    """Put the new plan on trial."""
    pending, commands = state.pending, NO_COMMANDS
    if pending is not None and pending.decision.plan != event.plan:
        state, commands = _dropped(state, rules)
        pending = None
    by_choice = pending is not None and not pending.decision.mandatory
    trial = None
    if rules.has_trials and not event.begins_phase:
        trial = Trial(
            costs_s=event.costs_s,
            compile_tax_s=max(0.0, pending.tax_s) if pending is not None else 0.0,
            # A plan that the run had to leave is no standard: fewer devices may be slower.
            before_s=_comparable(state, event, rules) if by_choice else (),
            predicted_s=math.nan if pending is None else pending.predicted_s,
            mandatory=pending is not None and pending.decision.mandatory,
        )
    state = replace(
        state,
        pending=None,
        trial=trial,
        recent_s=(),
        forced=state.forced if pending is None or (trial and trial.mandatory) else None,
        num_switches=state.num_switches + by_choice,
        entered_step=state.step,
    )
    return _settled(cooling(state, rules, by_choice=by_choice), rules), commands


def _comparable(state: SwitchState, event: MoveDone, rules: SwitchRules) -> tuple[float, ...]:
    """The times of the old plan's last steps that the new plan's first steps are compared with."""
    # While the plan was compiled on the cores of CPU devices, nobody checked whether steps stayed
    # alike.
    newest = (
        constants.NUM_COMPARED_STEPS
        if rules.shares_cores
        else constants.NUM_COMPARED_TRIALS * rules.settings.canary_steps
    )
    return _newest(state, event.steps_alike)[-newest:]


def switch_failed(state: SwitchState, event: SwitchFailed, rules: SwitchRules) -> Reduced:
    """Do not try the plan again for a while, longer each time, and cool down."""
    if state.trial is not None:
        state = replace(state, trial=None, entered_step=state.step)
    state, commands = _dropped(state, rules)
    state = quarantined(state, event.plan, state.step, event.why, rules)
    state = _opened(cooling(state, rules, by_choice=True), state.forced)
    return _settled(state, rules), (*commands, Charge(time_s=event.costs_s))


def trial_over(state: SwitchState, event: TrialOver, rules: SwitchRules) -> Reduced:
    """Keep the plan."""
    charges = (Charge(time_s=event.costs_s),) if event.costs_s else NO_COMMANDS
    return _settled(_with_plan_kept(state), rules), charges


def interrupted(state: SwitchState, event: Interrupted, rules: SwitchRules) -> Reduced:
    """Drop what is pending, and keep what is on trial; a mandatory question is open again."""
    state = _with_plan_kept(state)
    forced = state.forced if event.reopens else None
    state, commands = _dropped(replace(state, recent_s=(), forced=forced), rules)
    return _settled(_opened(_pressing(state), forced), rules), commands


# Parts of the above.


def _newest(state: SwitchState, count: int | None) -> tuple[float, ...]:
    """Times of the newest steps, at least of one; None: of all that are kept."""
    return state.recent_s if count is None else state.recent_s[-max(1, count) :]


def _opened(state: SwitchState, asked: Question | None) -> SwitchState:
    """The state with an open question, which replaces one of its kind."""
    if asked is None:
        return state
    others = [each for each in state.questions if each.urgency != asked.urgency]
    questions = sorted([*others, asked], key=lambda each: each.urgency)
    return replace(state, questions=tuple(questions))


def _with_plan_kept(state: SwitchState) -> SwitchState:
    """The state with the plan on trial kept: if the run had to move, it has."""
    trial, pending = state.trial, state.pending
    has_moved = trial is not None and trial.mandatory
    has_to_move = pending is not None and pending.decision.mandatory
    return replace(
        state, trial=None, forced=None if has_moved and not has_to_move else state.forced
    )


def _pressing(state: SwitchState) -> SwitchState:
    """The state without questions that a switch, or another batch, makes pointless."""
    questions = tuple([each for each in state.questions if each.is_pressing])
    return replace(state, questions=questions)


def _without_tax(state: SwitchState, pending: PendingSwitch) -> SwitchState:
    """The state with step times as they would have been without the compilation that is done."""
    if pending.tax is None or pending.tax > constants.MAX_COMPILE_SLOWDOWN:
        return state
    num_steps = len(pending.beside_s)
    beside_s = tuple([time_s / pending.tax for time_s in state.recent_s[-num_steps:]])
    return replace(state, recent_s=state.recent_s[:-num_steps] + beside_s)


def _settled(state: SwitchState, rules: SwitchRules) -> SwitchState:
    """The state in the stage that follows from what is on trial, pending, or cooling down."""
    if state.trial is not None:
        stage = Stage.CANARY
    elif state.pending is not None:
        stage = Stage.PREPARING
    else:
        is_cooling = state.step < rules.cool_until(state)
        stage = Stage.COOLDOWN if is_cooling else Stage.IDLE
    return replace(state, stage=stage)


def _reviewed(state: SwitchState) -> SwitchState:
    """The state with a question, if a review is due. Each review is due once."""
    if state.step < state.review_step and state.time_s < state.review_s:
        return state
    if not state.questions:
        state = _opened(state, state.forced or Question(trigger="it is time to look again"))
    return replace(state, review_step=math.inf, review_s=math.inf)


def _dropped(state: SwitchState, rules: SwitchRules) -> Reduced:
    """Withdraw the pending switch, and charge for the delay that preparing it has caused. If it was
    planned for a boundary to come, its question is open again.
    """
    pending = state.pending
    if pending is None:
        return state, NO_COMMANDS
    state, asked = replace(state, pending=None), pending.question
    if asked is not None and asked.at_step is not None and asked.at_step > state.step:
        state = _opened(state, asked)
    return state, (Charge(time_s=max(0.0, pending.tax_s)),)


def _cool_steps(rules: SwitchRules) -> int:
    return max(rules.settings.cooldown_steps, rules.settings.window_steps)


def cooling(state: SwitchState, rules: SwitchRules, *, by_choice: bool) -> SwitchState:
    """The state in the cool-down after a switch that was made or failed now.

    After a mandatory switch, the next one may come as soon as step times are known.
    """
    state = replace(
        state,
        switched_step=state.step,
        cool_steps=_cool_steps(rules)
        if by_choice
        else constants.FORCED_COOLDOWN_TRIALS * rules.settings.canary_steps,
    )
    return replace(_pressing(state), review_step=rules.cool_until(state), review_s=math.inf)


def quarantined(
    state: SwitchState, plan: Plan, step: int, why: str, rules: SwitchRules
) -> SwitchState:
    """The state in which a plan that failed at `step` is not tried for a while.

    Each failure of a plan doubles the time.
    """
    before = state.failures.get(plan.digest)
    count = 1 if before is None else before.count + 1
    steps = max(1, rules.settings.cooldown_steps) * 2 ** min(
        count, constants.MAX_QUARANTINE_DOUBLINGS
    )
    failure = Failure(count=count, until_step=step + steps, why=why)
    return replace(state, failures={**state.failures, plan.digest: failure})
