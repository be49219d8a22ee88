"""The life of a switch as a state machine.

`reduce` is a pure function: (state, event, rules) -> (state, commands). TABLE says what handles an
event in which stage (control/transitions.py), and which stages may follow. It is the documentation
(docs/control.md), and tests hold it to what `reduce` does. Only process 0 has a state; its commands
reach all processes (control/commands.py).
"""

import math
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from optimus_jax.control import transitions
from optimus_jax.control.switch_state import (
    BatchChanged,
    CompileDone,
    Decided,
    Event,
    Interrupted,
    MoveBegun,
    MoveDone,
    News,
    Stage,
    StepsDone,
    SwitchFailed,
    SwitchRules,
    SwitchState,
    TrialOver,
)
from optimus_jax.control.transitions import NO_COMMANDS, Reduced


def reduce(state: SwitchState, event: Event, rules: SwitchRules) -> Reduced:
    """The state after the event, and what is to be done."""
    row = TABLE.get((state.stage, type(event)))
    return (state, NO_COMMANDS) if row is None else row.handle(state, event, rules)


def resumed(
    state: SwitchState, step: int, rules: SwitchRules, *, by_choice: bool, is_made: bool = True
) -> SwitchState:
    """The state of a resumed run that knows of a switch that was made, or tried, after `step`.

    Args:
      state: the state before that switch.
      step: the number of steps done then.
      rules: the settings.
      by_choice: whether the run could have stayed.
      is_made: whether the run was under the new plan.
    """
    state = transitions.cooling(replace(state, step=step), rules, by_choice=by_choice)
    return replace(
        state,
        step=0,
        stage=Stage.COOLDOWN,
        review_step=math.inf,
        entered_step=step if is_made else state.entered_step,
        num_switches=state.num_switches + (by_choice and is_made),
    )


@dataclass(frozen=True)
class Transition:
    """What happens at an event in a stage."""

    handle: Callable[[SwitchState, typing.Any, SwitchRules], Reduced]
    """The function; the first line of its docstring says what it does."""
    then: tuple[Stage, ...]
    """The stages that may follow."""


_AT_REST = (Stage.IDLE, Stage.COOLDOWN)
_EVERY = tuple(Stage)


def _rows() -> Iterator[tuple[Stage, type, Transition]]:
    at_steps = {
        Stage.IDLE: Transition(transitions.steps_done, (Stage.IDLE,)),
        Stage.PREPARING: Transition(transitions.compiling_steps_done, (Stage.PREPARING,)),
        Stage.READY: Transition(transitions.only_counted, (Stage.READY,)),
        Stage.CANARY: Transition(transitions.canary_steps_done, (Stage.CANARY,)),
        Stage.COOLDOWN: Transition(transitions.cooled_steps_done, _AT_REST),
    }
    for stage, row in at_steps.items():
        yield stage, StepsDone, row
    decides = {
        Stage.IDLE: (Stage.PREPARING, *_AT_REST),
        Stage.PREPARING: (Stage.PREPARING, *_AT_REST),
        Stage.READY: (Stage.READY, Stage.PREPARING, *_AT_REST),
        Stage.CANARY: (Stage.CANARY,),
        Stage.COOLDOWN: (Stage.PREPARING, *_AT_REST),
    }
    for stage, then in decides.items():
        yield stage, News, Transition(transitions.news, (stage,))
        yield stage, BatchChanged, Transition(transitions.batch_changed, (stage,))
        yield stage, Decided, Transition(transitions.decided, then)
    compiled = Transition(transitions.compile_done, (Stage.READY,))
    yield Stage.PREPARING, CompileDone, compiled
    yield Stage.READY, CompileDone, compiled
    for stage in (Stage.PREPARING, Stage.READY, Stage.CANARY):
        yield stage, MoveBegun, Transition(transitions.move_begun, (Stage.MOVING,))
    for stage in _EVERY:
        # Without MoveBegun where no command was given: a phase, or a restart.
        yield stage, MoveDone, Transition(transitions.move_done, (Stage.CANARY, *_AT_REST))
        yield stage, SwitchFailed, Transition(transitions.switch_failed, _AT_REST)
        yield stage, Interrupted, Transition(transitions.interrupted, _AT_REST)
    for stage in (Stage.CANARY, Stage.MOVING):
        yield stage, TrialOver, Transition(transitions.trial_over, (Stage.PREPARING, *_AT_REST))


TABLE: Mapping[tuple[Stage, type], Transition] = {
    (stage, event): row for stage, event, row in _rows()
}
"""What happens at which event in which stage. Other pairs change nothing."""


def markdown() -> str:
    """The table as Markdown: a line for each handler, and the stages in which it is called and is
    followed by the same ones.
    """
    found: dict[tuple[str, str, str], list[Stage]] = {}
    for (stage, event), row in TABLE.items():
        told = str(row.handle.__doc__).splitlines()[0].rstrip(".")
        after = "the same" if row.then == (stage,) else ", ".join(row.then)
        found.setdefault((event.__name__, told, after), []).append(stage)
    lines = ["| event | in stage | what happens | stage afterwards |", "|---|---|---|---|"]
    for (event, told, after), stages in found.items():
        lines.append(f"| `{event}` | {', '.join(stages)} | {told} | {after} |")
    return "\n".join(lines) + "\n"
