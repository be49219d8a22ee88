"""The report of a run as one HTML page: its plans, decisions and their reasons, and predictions
beside measurements.

The run may be under way: the page shows what its logs hold so far. Long tables are cut to their
newest rows, with a note.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from optimus_jax.control.data_waits import waited
from optimus_jax.errors import counted
from optimus_jax.report.components import (
    AT,
    MAX_ROWS,
    chart_or_note,
    moment,
    newest_rows,
    plan_name,
)
from optimus_jax.report.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_time,
    format_value,
)
from optimus_jax.report.page import (
    Cell,
    Facts,
    Fold,
    PageBlock,
    PageTable,
    Section,
    Text,
    note,
    page,
)
from optimus_jax.report.run_charts import (
    WHILE_TRAINING,
    draw_loss,
    draw_memory,
    draw_predictions,
    draw_quantities,
    draw_step_times,
    draw_switch,
)
from optimus_jax.report.run_decisions import all_decisions, last_decision
from optimus_jax.report.run_events import (
    LoggedEvent,
    is_finite_number,
    mapping,
    number,
    step_of,
    text,
)
from optimus_jax.report.run_history import MAX_COMPARED_STEPS, RunHistory, Switch, median_time
from optimus_jax.report.run_profiles import profiles
from optimus_jax.report.run_settings import resumes, settings_section
from optimus_jax.run_directory.contents import ABANDONED_FILE
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.training.numbers import short

MAX_TIMELINES = 12
"""Maximum number of switches with a timeline."""
KINDS = {"remesh": "re-mesh", "rollback": "rollback"}


def run_report(path: str | Path, *, refresh_s: int | None = None) -> str:
    """The report of the run in `path` as an HTML document.

    Args:
      refresh_s: seconds after which a browser reads the page again; None: it does not.
    Raises:
      ConfigError: `path` holds no run, or plotly or jinja2 is not installed.
      RunDirectoryError: a log cannot be read.
    """
    history = RunHistory.read(path)
    return page(
        f"Run {history.name}",
        [
            Section(heading=heading, name=name, blocks=blocks)
            for heading, name, part in SECTIONS
            if (blocks := part(history))
        ],
        introduction=[note(introduction()), *map(as_warning, warnings_about(history))],
        refresh_s=refresh_s,
    )


def introduction() -> str:
    """When the page was made, and how its numbers are to be read."""
    return (
        f"State at {format_time(time.time())} UTC. Times of steps and phases are measured;"
        f" predictions are labelled as such. “{UNKNOWN}” means that the run did not record a value."
    )


def warnings_about(history: RunHistory) -> list[str]:
    """What limits the page: unreadable lines, and steps that it does not show."""
    warnings = [*history.read_errors]
    if (abandoned := history.path / ABANDONED_FILE).exists():
        warnings.append(
            "The run went back to a checkpoint and repeated the steps after it. Their first"
            f" attempts are in {abandoned.name} and not on this page."
        )
    return warnings


def as_warning(message: str) -> Text:
    """A paragraph in the style of a warning."""
    return Text(cells=[message], style="warning")


def overview(history: RunHistory) -> list[tuple[str, Cell]]:
    """What a reader wants to know first about a run: names and values."""
    started = next(
        (event for event in reversed(history.events) if event.get("event") in ("start", "resume")),
        {},
    )
    model, data = mapping(history.config, "model"), mapping(history.config, "data")
    last = history.steps[-1] if history.steps else None
    recent = history.steps_around(last.step)[0] if last else []
    in_use = plan_name(history, history.current.digest if history.current else None)
    length = number(data, "seq_len") or number(mapping(history.config, "derived"), "data.seq_len")
    return [
        ("status", history.status),
        (
            "steps",
            f"{format_count(last.step if last else 0)} of"
            f" {format_count(number(history.config, 'steps'))}",
        ),
        ("model", _model(model)),
        ("devices", text(started, "devices") or UNKNOWN),
        ("plan in use", in_use),
        ("why this plan", history.why_current or UNKNOWN),
        ("controller", text(history.config, "control") or UNKNOWN),
        ("switches", _num_switches(history)),
        (
            "last loss",
            (
                f"{short(last.loss, 4)} (step {last.step:,})"
                if last and is_finite_number(last.loss)
                else UNKNOWN
            ),
        ),
        ("step time, median of the last steps on this plan", _recent_time(recent)),
        *_waits(recent),
        (
            "tokens per second, last step",
            format_count(
                last.tokens_per_s if last and is_finite_number(last.tokens_per_s) else None
            ),
        ),
        (
            "model FLOPs utilisation, last step",
            format_percent(last.mfu if last and is_finite_number(last.mfu) else None),
        ),
        (
            "batch",
            f"{format_count(number(data, 'global_batch'))} sequences of"
            f" {format_count(length)} tokens",
        ),
        ("data", text(started, "data") or UNKNOWN),
        ("started", _utc(number(history.events[0], "time_s") if history.events else None)),
        ("last event", _utc(number(history.events[-1], "time_s") if history.events else None)),
    ]


def _num_switches(history: RunHistory) -> str:
    """How often the plan was switched while the run was going."""
    ran = len({span.plan for span in history.spans})
    if not history.switches and ran > 1 and history.events_named("resume"):
        return f"0; resumed under {ran} plans"
    return format_count(len(history.switches))


def _recent_time(steps: Sequence[StepRecord]) -> str:
    duration = format_duration(median_time(steps))
    return f"{duration} ({counted(len(steps), 'step')})" if steps else duration


def _waits(steps: Sequence[StepRecord]) -> list[tuple[str, Cell]]:
    """The share of the steps that waited for their data; empty: unknown."""
    known = [
        (step.step_time_s, step.data_wait_s)
        for step in steps
        if is_finite_number(step.data_wait_s) and is_finite_number(step.step_time_s)
    ]
    if not known:
        return []
    share = sum(waited(*zip(*known, strict=True))) / len(known)
    return [("of these, steps that waited for data", format_percent(share))]


def _utc(time_s: float | None) -> str:
    return UNKNOWN if time_s is None else f"{format_time(time_s)} UTC"


def _model(model: LoggedEvent) -> str:
    name = text(model, "name")
    return (
        f"{name}: {format_count(number(model, 'num_layers'))} layers, width"
        f" {format_count(number(model, 'embed_dim'))}"
        if name
        else UNKNOWN
    )


def _overview(history: RunHistory) -> list[PageBlock]:
    return [Facts(pairs=overview(history))]


def _loss(history: RunHistory) -> list[PageBlock]:
    chart = draw_loss({history.name: history})
    return chart_or_note(chart, "No step is recorded yet, so the loss is unknown.")


def _quantities(history: RunHistory) -> list[PageBlock]:
    chart = draw_quantities({history.name: history})
    return [] if chart is None else [chart]


def _step_times(history: RunHistory) -> list[PageBlock]:
    chart = draw_step_times({history.name: history})
    spans, cut = newest_rows(history.spans, MAX_ROWS, "spans")
    rows = [
        [
            f"{span.first:,} to {span.last:,}",
            plan_name(history, span.plan),
            format_count(span.num_steps),
            format_duration(span.step_time_s),
        ]
        for span in spans
    ]
    head = ("steps", "plan", "steps recorded", "median step time")
    table = PageTable(caption="Steps by plan", head=head, rows=rows, numbers=head[2:])
    return [*chart_or_note(chart, "No step's time is known."), *([table, *cut] if rows else [])]


def _plans(history: RunHistory) -> list[PageBlock]:
    if not history.plans:
        return []
    num_steps: dict[str, int] = {}
    for span in history.spans:
        num_steps[span.plan] = num_steps.get(span.plan, 0) + span.num_steps
    rows = [
        [
            plan_name(history, digest, whole=True),
            digest,
            format_count(num_steps.get(digest, 0)),
        ]
        for digest in history.plans[:MAX_ROWS]
    ]
    return [
        PageTable(
            caption="Plans and their letters on this page",
            head=("plan", "digest", "steps run"),
            rows=rows,
            numbers=("steps run",),
        )
    ]


def _predictions(history: RunHistory) -> list[PageBlock]:
    shown, cut = newest_rows(history.comparisons, MAX_ROWS, "comparisons")
    if not shown:
        return []
    head = (
        "after step",
        "plan",
        "predicted",
        "measured",
        "measured / predicted",
        "what was measured",
    )
    rows = [
        [
            f"{pair.step:,}",
            plan_name(history, pair.plan, pair.layout),
            format_duration(pair.predicted_s),
            format_duration(pair.measured_s),
            UNKNOWN if pair.measured_s is None else f"{pair.measured_s / pair.predicted_s:.2f}",
            pair.source,
        ]
        for pair in shown
    ]
    caption = "Step time: predictions and measurements"
    return [
        *chart_or_note(draw_predictions(history), "None of these plans has been measured yet."),
        PageTable(caption=caption, head=head, rows=rows, numbers=head[2:5]),
        *cut,
    ]


def _memory(history: RunHistory) -> list[PageBlock]:
    chart = draw_memory(history)
    return [] if chart is None else [chart]


def _switches(history: RunHistory) -> list[PageBlock]:
    if not history.switches:
        return []
    head = ("after step", AT, "kind", "from", "to", "method", "moved", "delay", "before", "after")
    shown, cut = newest_rows(history.switches, MAX_ROWS, "switches")
    rows = [
        [
            f"{one.step:,}",
            moment(one.time_s),
            KINDS[one.kind],
            plan_name(history, one.from_plan),
            plan_name(history, one.plan, one.layout),
            one.method or UNKNOWN,
            format_bytes(one.bytes_moved),
            format_duration(one.step_delay_s),
            format_duration(one.before_s),
            format_duration(one.after_s),
        ]
        for one in shown
    ]
    caption = (
        "Re-meshes and rollbacks: bytes moved, delay of training, and median step times of up to"
        f" {MAX_COMPARED_STEPS} steps before and after."
    )
    drawn, left_out = newest_rows(history.switches, MAX_TIMELINES, "timelines")
    return [
        PageTable(caption=caption, head=head, rows=rows, numbers=head[6:]),
        *cut,
        *(block for index, one in enumerate(drawn) for block in _timeline(one, f"switch{index}")),
        *left_out,
    ]


def _timeline(switch: Switch, name: str) -> list[PageBlock]:
    paused = [seconds for phase, seconds in switch.phases_s if phase not in WHILE_TRAINING]
    pause = (
        f", training paused for {format_duration(sum(seconds or 0 for seconds in paused))}"
        if paused and None not in paused
        else ""
    )
    heading = f"After step {switch.step:,}: {KINDS[switch.kind]}{pause}"
    return [
        Text(cells=[heading], style="heading"),
        *([Text(cells=[switch.why])] if switch.why else []),
        *chart_or_note(draw_switch(switch, name), "The times of its phases are unknown."),
    ]


def _evaluations(history: RunHistory) -> list[PageBlock]:
    metrics = dict.fromkeys(
        str(name) for event in history.events_named("eval") for name in mapping(event, "metrics")
    )
    return _events(
        history,
        "eval",
        "On held-out data (measured)",
        ("loss", "perplexity", "bits_per_byte", "tokens", *metrics),
        lambda event, field: format_value(event.get(field, mapping(event, "metrics").get(field))),
    )


def _checkpoints(history: RunHistory) -> list[PageBlock]:
    folder = history.path / "checkpoints"

    def cell(event: LoggedEvent, field: str) -> str:
        if field == "blocked_s":
            return format_duration(number(event, "blocked_s"))
        if not folder.is_dir():  # a copy of a run in a store
            return UNKNOWN
        return "yes" if (folder / str(step_of(event))).is_dir() else "no"

    return _events(
        history,
        "checkpoint",
        "Checkpoints. Training was blocked while the state was copied to the host.",
        ("blocked_s", "still there"),
        cell,
    )


def _events(
    history: RunHistory,
    name: str,
    caption: str,
    fields: Sequence[str],
    cell: Callable[[LoggedEvent, str], str],
) -> list[PageBlock]:
    shown, cut = newest_rows(history.events_named(name), MAX_ROWS, "rows")
    if not shown:
        return []
    heads = [field.replace("_s", "").replace("_", " ") for field in fields]
    rows = [
        [
            f"{step_of(event):,}",
            moment(number(event, "time_s")),
            *(cell(event, field) for field in fields),
        ]
        for event in shown
    ]
    head = ("after step", AT, *heads)
    return [PageTable(caption=caption, head=head, rows=rows, numbers=heads), *cut]


def _faults(history: RunHistory) -> list[PageBlock]:
    skipped = [one.step for one in history.steps if one.skipped]
    shown, cut = newest_rows(history.events_named("fault"), MAX_ROWS, "faults")
    rows = [
        [f"{step_of(event):,}", moment(number(event, "time_s")), _fields(event)] for event in shown
    ]
    parts: list[PageBlock] = []
    if rows:
        parts += [PageTable(caption="Faults", head=("after step", AT, "what"), rows=rows), *cut]
    if skipped:
        steps = ", ".join(map(str, skipped[:20])) + (" ..." if skipped[20:] else "")
        parts.append(
            note(
                f"{counted(len(skipped), 'step')} skipped the update because the loss or the"
                f" gradient was not finite: {steps}."
            )
        )
    return parts


def _log(history: RunHistory) -> list[PageBlock]:
    shown, cut = newest_rows(history.events, MAX_ROWS, "events")
    if not shown:
        return []
    rows = [
        [
            f"{step_of(event):,}",
            moment(number(event, "time_s")),
            str(event.get("event", UNKNOWN)),
            _fields(event),
        ]
        for event in shown
    ]
    head = ("after step", AT, "event", "fields")
    table = PageTable(caption="Events as logged", head=head, rows=rows)
    return [Fold(summary=[counted(len(history.events), "event")], blocks=[table, *cut])]


def _fields(event: LoggedEvent) -> str:
    """The fields of an event other than its name, step and time."""
    return (
        "; ".join(
            f"{name}: {format_value(value)}"
            for name, value in event.items()
            if name not in ("event", "step", "time_s")
        )
        or "none"
    )


SECTIONS: tuple[tuple[str, str, Callable[[RunHistory], Sequence[PageBlock]]], ...] = (
    ("Loss", "loss", _loss),
    ("Overview", "overview", _overview),
    ("Last decision", "last-decision", last_decision),
    ("Step time", "step-time", _step_times),
    ("Rates and norms", "rates", _quantities),
    ("Where the time goes", "profiles", profiles),
    ("Plans", "plans", _plans),
    ("Decisions", "decisions", all_decisions),
    ("Predicted against measured", "predicted", _predictions),
    ("Switches", "switches", _switches),
    ("Memory", "memory", _memory),
    ("Evaluations", "evaluations", _evaluations),
    ("Checkpoints", "checkpoints", _checkpoints),
    ("Resumes", "resumes", resumes),
    ("Settings", "settings", settings_section),
    ("Faults", "faults", _faults),
    ("All events", "events", _log),
)
"""(heading, id, function that makes the blocks of the section; without blocks it is not shown)"""
