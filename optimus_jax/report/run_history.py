"""The history of a run, read from its directory: steps, plans, decisions, switches, and predictions
beside measurements.

A run can be read while it is under way. A value that the logs do not hold is None. A *span* is a
sequence of consecutive steps under one plan; a *switch* is a re-mesh or a rollback.
"""

import bisect
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from optimus_jax.errors import ConfigError, OptimusError, RunDirectoryError, explain
from optimus_jax.plan import Plan
from optimus_jax.report.run_events import (
    DecisionRecord,
    LoggedEvent,
    is_finite_number,
    mapping,
    number,
    parse_decision,
    printable,
    step_of,
    switch_method_of,
    text,
)
from optimus_jax.run_directory.contents import EVENTS_FILE, METRICS_FILE
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.system.json_input import parse_json

T = TypeVar("T")

MAX_COMPARED_STEPS = 50
"""Maximum number of steps before and after a switch whose times are compared."""
PHASES = ("prepare", "wait", "agree", "probe", "move", "verify", "commit", "settle", "back")
"""Phases of a switch, in order."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive steps under one plan."""

    plan: str
    """Digest."""
    first: int
    last: int
    num_steps: int
    """Number of steps in metrics.jsonl, at most `last - first + 1`."""
    step_time_s: float | None
    """Median step time."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A re-mesh or a rollback."""

    kind: Literal["remesh", "rollback"]
    step: int
    time_s: float | None
    plan: str | None
    """Digest of the plan after the switch."""
    from_plan: str | None
    """Digest of the plan before the switch."""
    layout: str | None
    method: str | None
    """How the state got to the plan."""
    why: str | None
    phases_s: tuple[tuple[str, float | None], ...]
    """Seconds of each phase, in order."""
    bytes_moved: float | None
    step_delay_s: float | None
    before_s: float | None
    """Median step time before the switch."""
    after_s: float | None
    """Median step time after the switch."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A predicted step time and the measured one."""

    step: int
    """Step of the prediction."""
    plan: str | None
    layout: str | None
    predicted_s: float
    measured_s: float | None
    is_trial: bool
    """Whether the measurement is of a trial before the first step."""
    source: str
    """What was measured, in words."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The contents of a run directory at the time of reading."""

    path: Path
    config: LoggedEvent
    """config.json; empty if it is missing or unreadable."""
    steps: Sequence[StepRecord]
    events: Sequence[LoggedEvent]
    current: Plan | None
    """plan.json: the plan in use."""
    read_errors: tuple[str, ...]
    """A message for each file or line that could not be read."""
    has_writer: bool | None = None
    """Whether a process wrote the run at that time; None: unknown."""

    @classmethod
    def read(cls, path: str | Path) -> "RunHistory":
        """Read a run, under way or ended, without locking or writing anything.

        Raises:
          ConfigError: `path` holds no run.
        """
        read_errors: list[str] = []
        run = RunDirectory(
            path, writer=False, warn=lambda warning: read_errors.append(str(warning))
        )
        logs = [run.path / name for name in (METRICS_FILE, EVENTS_FILE)]
        if not run.is_begun and not any(log.exists() for log in logs):
            raise ConfigError(
                explain(
                    "there is no run to report on",
                    given=f"{path}, which holds neither config.json nor logs",
                    do="name the directory of a run, such as one under runs/",
                )
            )
        config: object = None
        try:
            config = parse_json(run.config_text(), finite=False)
        except (OSError, OptimusError, ValueError) as error:
            read_errors.append(f"config.json: {error}")
        current = None
        try:
            current = Plan.from_json(plan) if (plan := run.plan_text()) is not None else None
        except (OSError, OptimusError, ValueError) as error:
            read_errors.append(f"plan.json: {error}")
        metrics, events = (
            _read_or_report(run.metrics, read_errors),
            [printable(event) for event in _read_or_report(run.events, read_errors)],
        )
        steps = [
            replace(step, plan=str(printable(step.plan)))
            for step in sorted(metrics, key=lambda step: step.step)
        ]
        return cls(
            path=run.path,
            config=printable(config) if isinstance(config, Mapping) else {},
            steps=steps,
            events=events,
            current=current,
            read_errors=tuple(map(printable, read_errors)),
            has_writer=run.has_writer,
        )

    @property
    def name(self) -> str:
        """Name of the directory."""
        return printable(self.path.name)

    def events_named(self, *names: str) -> list[LoggedEvent]:
        """The events with one of these names, in order."""
        return [event for event in self.events if event.get("event") in names]

    @cached_property
    def spans(self) -> list[Span]:
        """The spans in order."""
        groups: list[list[StepRecord]] = []
        for step in self.steps:
            if not groups or groups[-1][-1].plan != step.plan:
                groups.append([])
            groups[-1].append(step)
        return [
            Span(
                plan=group[0].plan,
                first=group[0].step,
                last=group[-1].step,
                num_steps=len(group),
                step_time_s=median_time(group),
            )
            for group in groups
        ]

    @cached_property
    def plans(self) -> list[str]:
        """Digests of all plans that ran or are mentioned. A plan's index determines its letter and
        colour on the page.
        """
        mentioned = [
            digest
            for event in self.events
            for name in ("from_plan", "plan", "digest")
            if (digest := text(event, name))
        ]
        # Plans that never ran come last.
        return list(
            dict.fromkeys(
                [
                    *(span.plan for span in self.spans),
                    *([self.current.digest] if self.current else []),
                    *mentioned,
                ]
            )
        )

    @cached_property
    def layouts(self) -> dict[str, str]:
        """Digest of a plan -> description of its layout, for all plans with a known layout."""
        layouts = {
            digest: layout
            for event in self.events
            if (digest := text(event, "plan") or text(event, "digest"))
            and (layout := text(event, "layout"))
        }
        for decision in self.decisions:
            for digest, layout in ((other.plan, other.layout) for other in decision.alternatives):
                if digest and layout:
                    layouts.setdefault(digest, layout)
        return layouts | ({self.current.digest: self.current.describe()} if self.current else {})

    @cached_property
    def decisions(self) -> list[DecisionRecord]:
        """All decisions, in order."""
        return [parse_decision(event) for event in self.events_named("decision")]

    @cached_property
    def switches(self) -> list[Switch]:
        """All re-meshes and rollbacks, in order."""
        return [self._switch(event) for event in self.events_named("remesh", "rollback")]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Predictions for plans that were tried or switched to, with measurements."""
        return [
            comparison
            for decision in self.decisions
            if (comparison := self._comparison(decision)) is not None
        ]

    @property
    def _last_boundary(self) -> LoggedEvent | None:
        """The last event that begins or ends the run."""
        boundaries = self.events_named("start", "resume", "end")
        return boundaries[-1] if boundaries else None

    @property
    def has_ended(self) -> bool:
        """Whether the end of the run is recorded, and no resume after it; or its process is gone
        without that."""
        last = self._last_boundary
        return self.has_writer is False or (last is not None and last.get("event") == "end")

    @property
    def status(self) -> str:
        """Whether the run is under way or how it ended, as far as its logs say."""
        last = self._last_boundary
        if last is not None and last.get("event") == "end":
            return {
                "done": "done",
                "interrupt": "interrupted by the user",
                "terminate": "stopped on request",
                "fault": "stopped by a fault",
                "error": f"ended by an error: {text(last, 'why') or 'which is unknown'}",
                "not learning": (
                    "stopped because it no longer learned:"
                    f" {text(last, 'why') or 'the reason is unknown'}; "
                    + (
                        "no good checkpoint precedes that"
                        if number(last, "back_to") is None
                        else f"the last good checkpoint is of step {number(last, 'back_to'):.0f}"
                    )
                ),
            }.get(reason := text(last, "reason") or "", f"ended: {reason or 'reason unknown'}")
        if not self.steps and last is None:
            return "no step finished yet"
        return {
            True: "under way",
            False: "its process is gone without recording an end: killed, or failed at the start",
            None: "no end is recorded: under way, or killed",
        }[self.has_writer]

    @property
    def why_current(self) -> str | None:
        """The reason for the plan in use: of its choice, or of the switch or rollback to it."""
        why, decided = None, None
        for event in self.events_named("plan", "decision", "remesh", "rollback", "phase"):
            if event.get("event") == "decision":
                decided = text(event, "why") if event.get("action") == "switch" else decided
            else:
                why = text(event, "why") or (decided if event.get("event") == "remesh" else None)
        return why

    def steps_in(self, span: Span) -> Sequence[StepRecord]:
        """The recorded steps of a span."""
        first, last = (
            bisect.bisect_left(self.steps, step, key=lambda one: one.step)
            for step in (span.first, span.last + 1)
        )
        return self.steps[first:last]

    def steps_around(self, step: int) -> tuple[list[StepRecord], list[StepRecord]]:
        """The last steps up to `step` and the first steps after it, each under one plan and at most
        MAX_COMPARED_STEPS.
        """
        middle = bisect.bisect_right(self.steps, step, key=lambda one: one.step)
        before, after = (
            self.steps[max(0, middle - MAX_COMPARED_STEPS) : middle],
            self.steps[middle : middle + MAX_COMPARED_STEPS],
        )
        return _leading_steps_of_one_plan(before[::-1])[::-1], _leading_steps_of_one_plan(after)

    def _switch(self, event: LoggedEvent) -> Switch:
        step = step_of(event)
        before, after = self.steps_around(step)
        phases = mapping(event, "phases_s")
        names = [
            *(name for name in PHASES if name in phases),
            *(name for name in phases if name not in PHASES),
        ]
        return Switch(
            kind="remesh" if event.get("event") == "remesh" else "rollback",
            step=step,
            time_s=number(event, "time_s"),
            plan=text(event, "plan"),
            from_plan=text(event, "from_plan"),
            layout=text(event, "layout"),
            method=switch_method_of(event),
            why=text(event, "why"),
            phases_s=tuple((str(name), number(phases, name)) for name in names),
            bytes_moved=number(event, "bytes_moved"),
            step_delay_s=number(event, "step_delay_s"),
            before_s=median_time(before),
            after_s=median_time(after),
        )

    def _comparison(self, decision: DecisionRecord) -> Comparison | None:
        predicted = decision.predicted_step_time_s
        if predicted is None or predicted <= 0 or decision.action == "stay":
            return None
        measured, source = decision.measured_step_time_s, "trial before the first step"
        if not (is_trial := decision.action == "tried"):
            steps = self._first_steps_under(decision)
            measured = median_time(steps)
            source = (
                f"median of steps {steps[0].step:,} to {steps[-1].step:,}"
                if steps
                else "not run under this plan"
            )
        return Comparison(
            step=decision.step,
            plan=decision.plan,
            layout=decision.layout,
            predicted_s=predicted,
            measured_s=measured,
            is_trial=is_trial,
            source=source,
        )

    def _first_steps_under(self, decision: DecisionRecord) -> list[StepRecord]:
        """The first steps under the chosen plan; none if a later decision came before they ran."""
        after = [
            other.step
            for other in self.decisions
            if other.action == "switch" and other.step > decision.step
        ]
        span = next(
            (
                span
                for span in self.spans
                if span.plan == decision.plan and span.first > decision.step
            ),
            None,
        )
        return (
            []
            if span is None or (after and span.first > after[0])
            else self.steps_around(span.first - 1)[1]
        )


def median_time(steps: Iterable[StepRecord]) -> float | None:
    """Median step time in seconds; None if no step's time is known."""
    times = [step.step_time_s for step in steps if is_finite_number(step.step_time_s)]
    return statistics.median(times) if times else None


def _leading_steps_of_one_plan(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The first steps that ran under one plan."""
    end = next(
        (index for index, step in enumerate(steps) if step.plan != steps[0].plan), len(steps)
    )
    return list(steps[:end])


def _read_or_report(read: Callable[[], list[T]], read_errors: list[str]) -> list[T]:
    """The lines of a log. If it cannot be read: no lines, and the error in `read_errors`."""
    try:
        return read()
    except RunDirectoryError as error:
        read_errors.append(str(error))
        return []
