"""What the lines of a run directory tell: which plan ran when, what was decided, and how
predictions came out.

Everything is what the run wrote itself, and can be read while it goes on. What its lines do not say
is None. A *span* is a row of steps under one plan; a *switch* is a re-mesh or a rollback.
Predictions and measurements are never mixed: a comparison holds one of each.
"""

import bisect
import contextlib
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
    Event,
    decision_of,
    is_finite_number,
    mapping,
    number,
    printable,
    step_of,
    text,
)
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.system.json_input import parse_json

T = TypeVar("T")

NEAR_STEPS = 50
"""Most steps before and after a switch whose times are compared."""
PHASES = ("prepare", "quiesce", "move", "verify", "commit", "canary")
"""Of a switch, in order."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Steps one after the other that ran under one plan."""

    plan: str
    """Digest."""
    first: int
    last: int
    num_steps: int
    """Recorded ones."""
    step_time_s: float | None
    """Median."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A re-mesh or a rollback."""

    kind: Literal["remesh", "rollback"]
    step: int
    time_s: float | None
    plan: str | None
    """Digest of the plan that the run went on with."""
    from_plan: str | None
    layout: str | None
    rung: str | None
    why: str | None
    phases_s: tuple[tuple[str, float | None], ...]
    """In the order in which they come."""
    bytes_moved: float | None
    step_delay_s: float | None
    before_s: float | None
    """Median step time of the last steps before it."""
    after_s: float | None
    """And of the first steps after it."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A prediction beside what was measured."""

    step: int
    """At which it was predicted."""
    plan: str | None
    layout: str | None
    predicted_s: float
    measured_s: float | None
    is_trial: bool
    """Whether it was measured in a trial before the first step."""
    how: str
    """What was measured."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """All that a run directory holds, as it was when it was read."""

    path: Path
    config: Event
    """config.json; empty if there is none that can be read."""
    steps: Sequence[StepRecord]
    events: Sequence[Event]
    current: Plan | None
    """plan.json."""
    written_s: float | None
    """When a log last grew, seconds since 1970."""
    read_errors: tuple[str, ...]
    """What could not be read."""

    @classmethod
    def read(cls, path: str | Path) -> "RunHistory":
        """Read a run, under way or ended; nothing is locked or written.

        Raises:
          ConfigError: there is no run in `path`.
        """
        read_errors: list[str] = []
        run = RunDirectory(
            path, writer=False, warn=lambda warning: read_errors.append(str(warning))
        )
        logs = [run.path / name for name in ("metrics.jsonl", "events.jsonl")]
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
            _readable(run.metrics, read_errors),
            [printable(event) for event in _readable(run.events, read_errors)],
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
            written_s=_newest(logs),
            read_errors=tuple(map(printable, read_errors)),
        )

    @property
    def name(self) -> str:
        """Of the directory."""
        return printable(self.path.name)

    def named(self, *names: str) -> list[Event]:
        """Events with one of these names, in order."""
        return [event for event in self.events if event.get("event") in names]

    @cached_property
    def spans(self) -> list[Span]:
        """The plans in the order in which they ran."""
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
        """Digests of all plans that ran or were named, in order; the place in it is what tells them
        apart on a page.
        """
        named = [
            digest
            for event in self.events
            for name in ("from_plan", "plan", "digest")
            if (digest := text(event, name))
        ]
        # A plan that was only tried comes after those that ran.
        return list(
            dict.fromkeys(
                [
                    *(span.plan for span in self.spans),
                    *([self.current.digest] if self.current else []),
                    *named,
                ]
            )
        )

    @cached_property
    def layouts(self) -> dict[str, str]:
        """What is known of plans in words, by digest."""
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
        """Every decision, in order."""
        return [decision_of(event) for event in self.named("decision")]

    @cached_property
    def switches(self) -> list[Switch]:
        """Every re-mesh and rollback, in order."""
        return [self._switch(event) for event in self.named("remesh", "rollback")]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Predictions of plans that were tried or that the run then went on with."""
        return [
            comparison
            for decision in self.decisions
            if (comparison := self._comparison(decision)) is not None
        ]

    @property
    def status(self) -> str:
        """Whether it goes on, as far as its lines say."""
        last = next(
            (
                event
                for event in reversed(self.events)
                if event.get("event") in ("start", "resume", "end")
            ),
            None,
        )
        if last is not None and last.get("event") == "end":
            return {
                "done": "done",
                "interrupt": "stopped by a person",
                "terminate": "stopped on request",
                "fault": "stopped for a fault",
                "not learning": (
                    "ended, as it no longer learnt:"
                    f" {text(last, 'why') or 'the reason is unknown'}; "
                    + (
                        "no good checkpoint is from before"
                        if number(last, "back_to") is None
                        else (
                            "the last good checkpoint is that of step"
                            f" {number(last, 'back_to'):.0f}"
                        )
                    )
                ),
            }.get(reason := text(last, "reason") or "", f"ended: {reason or 'reason unknown'}")
        return (
            "no end is recorded: under way, or killed"
            if self.steps or last is not None
            else "before its first step"
        )

    @property
    def why_current(self) -> str | None:
        """Why the plan in use is in use: what chose it, or moved the run to it or back to it."""
        why, decided = None, None
        for event in self.named("plan", "decision", "remesh", "rollback", "phase"):
            if event.get("event") == "decision":
                decided = text(event, "why") if event.get("action") == "switch" else decided
            else:
                why = text(event, "why") or (decided if event.get("event") == "remesh" else None)
        return why

    def within(self, span: Span) -> Sequence[StepRecord]:
        """The steps of a span."""
        first, last = (
            bisect.bisect_left(self.steps, step, key=lambda one: one.step)
            for step in (span.first, span.last + 1)
        )
        return self.steps[first:last]

    def near(self, step: int) -> tuple[list[StepRecord], list[StepRecord]]:
        """The steps up to `step` and those after it, as far as they ran under one plan, at most
        NEAR_STEPS each.
        """
        middle = bisect.bisect_right(self.steps, step, key=lambda one: one.step)
        before, after = (
            self.steps[max(0, middle - NEAR_STEPS) : middle],
            self.steps[middle : middle + NEAR_STEPS],
        )
        return _alike(before[::-1])[::-1], _alike(after)

    def _switch(self, event: Event) -> Switch:
        step = step_of(event)
        before, after = self.near(step)
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
            rung=text(event, "rung"),
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
        measured, how = decision.measured_step_time_s, "trial before the first step"
        if not (is_trial := decision.action == "tried"):
            steps = self._first_under(decision)
            measured = median_time(steps)
            how = (
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
            how=how,
        )

    def _first_under(self, decision: DecisionRecord) -> list[StepRecord]:
        """The first steps of the plan that was decided for, unless another decision came before it
        could run.
        """
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
            else self.near(span.first - 1)[1]
        )


def median_time(steps: Iterable[StepRecord]) -> float | None:
    """Median time of steps; None: no step's time is known."""
    times = [step.step_time_s for step in steps if is_finite_number(step.step_time_s)]
    return statistics.median(times) if times else None


def _alike(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The first steps that ran under one plan."""
    end = next(
        (place for place, step in enumerate(steps) if step.plan != steps[0].plan), len(steps)
    )
    return list(steps[:end])


def _newest(logs: Iterable[Path]) -> float | None:
    times = []
    for log in logs:
        with contextlib.suppress(OSError):
            times.append(log.stat().st_mtime)
    return max(times, default=None)


def _readable(read: Callable[[], list[T]], read_errors: list[str]) -> list[T]:
    """The lines of a log; none, and what is wrong, if it cannot be read: the page is made of the
    rest.
    """
    try:
        return read()
    except RunDirectoryError as error:
        read_errors.append(str(error))
        return []
