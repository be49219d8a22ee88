"""The report of a run as one HTML page: its plans, decisions and their reasons, and predictions
beside measurements.

The run may be under way: the page shows what its logs hold so far. Long tables are cut to their
newest rows, with a note.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from optimus_jax.errors import counted
from optimus_jax.report.components import (
    AT,
    MAX_ROWS,
    chart_or_note,
    newest_rows,
    plan_badge,
    plan_name,
    time_cell,
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
    Html,
    collapsible,
    concatenated,
    definition_list,
    element,
    note,
    page,
    table,
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
from optimus_jax.report.svg import page_settings
from optimus_jax.training.numbers import short

MAX_TIMELINES = 12
"""Maximum number of switches with a timeline."""
KINDS = {"remesh": "re-mesh", "rollback": "rollback"}


def run_report(path: str | Path) -> str:
    """The report of the run in `path` as an HTML document.

    Raises:
      ConfigError: `path` holds no run, or matplotlib is not installed.
      RunDirectoryError: a log cannot be read.
    """
    history = RunHistory.read(path)
    with page_settings():
        sections = [
            (heading, name, found)
            for heading, name, part in SECTIONS
            if (found := part(history)) is not None
        ]
    contents = element(
        "nav",
        element(
            "ul",
            *(
                element("li", element("a", heading, href=f"#{name}"))
                for heading, name, _ in sections
            ),
        ),
        aria_label="Contents",
    )
    body = [
        element("section", element("h2", heading), part, id=name)
        for heading, name, part in sections
    ]
    main = element(
        "main",
        element("h1", f"Run {history.name}"),
        note(_introduction()),
        *map(_warning, _warnings(history)),
        contents,
        *body,
    )
    return page(f"Run {history.name}", main)


def _introduction() -> str:
    return (
        f"State at {format_time(time.time())} UTC. Times of steps and phases are measured;"
        f" predictions are labelled as such. “{UNKNOWN}” means that the run did not record a value."
    )


def _warnings(history: RunHistory) -> list[str]:
    """What limits the page: unreadable lines, and steps that it does not show."""
    warnings = [*history.read_errors]
    if (abandoned := history.path / "metrics.abandoned.jsonl").exists():
        warnings.append(
            "The run went back to a checkpoint and repeated the steps after it. Their first"
            f" attempts are in {abandoned.name} and not on this page."
        )
    return warnings


def _warning(message: str) -> Html:
    return element("p", message, class_="warning")


def _overview(history: RunHistory) -> Html:
    started = next(
        (event for event in reversed(history.events) if event.get("event") in ("start", "resume")),
        {},
    )
    model, data = mapping(history.config, "model"), mapping(history.config, "data")
    last = history.steps[-1] if history.steps else None
    recent = history.steps_around(last.step)[0] if last else []
    in_use = plan_name(history, history.current.digest if history.current else None)
    length = number(data, "seq_len") or number(mapping(history.config, "derived"), "data.seq_len")
    return definition_list(
        [
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
            ("switches", format_count(len(history.switches))),
            (
                "last loss",
                (
                    f"{short(last.loss, 4)} (step {last.step:,})"
                    if last and is_finite_number(last.loss)
                    else UNKNOWN
                ),
            ),
            (
                f"step time, median of the last {counted(len(recent), 'step')} on this plan",
                format_duration(median_time(recent)),
            ),
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
    )


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


def _loss(history: RunHistory) -> Html:
    return chart_or_note(
        draw_loss(history), "loss", "No step is recorded yet, so the loss is unknown."
    )


def _quantities(history: RunHistory) -> Html | None:
    chart = draw_quantities(history)
    return None if chart is None else chart_or_note(chart, "quantities", "")


def _step_times(history: RunHistory) -> Html:
    chart = chart_or_note(draw_step_times(history), "times", "No step's time is known.")
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
    return concatenated(
        chart,
        *([table("Steps by plan", head, rows, numbers=head[2:]), cut] if rows else []),
    )


def _plans(history: RunHistory) -> Html | None:
    if not history.plans:
        return None
    num_steps: dict[str, int] = {}
    for span in history.spans:
        num_steps[span.plan] = num_steps.get(span.plan, 0) + span.num_steps
    rows = [
        [
            plan_badge(index),
            history.layouts.get(digest, UNKNOWN),
            digest,
            format_count(num_steps.get(digest, 0)),
        ]
        for index, digest in enumerate(history.plans[:MAX_ROWS])
    ]
    return table(
        "Plans and their letters on this page",
        ("plan", "layout", "digest", "steps run"),
        rows,
        numbers=("steps run",),
    )


def _predictions(history: RunHistory) -> Html | None:
    shown, cut = newest_rows(history.comparisons, MAX_ROWS, "comparisons")
    if not shown:
        return None
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
    return concatenated(
        chart_or_note(
            draw_predictions(history), "predictions", "None of these plans has been measured yet."
        ),
        table("Step time: predictions and measurements", head, rows, numbers=head[2:5]),
        cut,
    )


def _memory(history: RunHistory) -> Html:
    return chart_or_note(
        draw_memory(history),
        "memory",
        "Unknown: neither the backend nor the compiler reported memory use.",
    )


def _switches(history: RunHistory) -> Html:
    if not history.switches:
        return note(_never_switched(history))
    head = ("after step", AT, "kind", "from", "to", "method", "moved", "delay", "before", "after")
    shown, cut = newest_rows(history.switches, MAX_ROWS, "switches")
    rows = [
        [
            f"{one.step:,}",
            time_cell(one.time_s),
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
    return concatenated(
        table(caption, head, rows, numbers=head[6:]),
        cut,
        *(_timeline(history, one, f"switch{index}") for index, one in enumerate(drawn)),
        left_out,
    )


def _never_switched(history: RunHistory) -> str:
    ran = len({span.plan for span in history.spans})
    if ran > 1 and history.events_named("resume"):
        return f"No plan was left while the run was going; it was resumed under {ran} plans."
    return "The run never switched plans."


def _timeline(history: RunHistory, switch: Switch, name: str) -> Html:
    paused = [seconds for phase, seconds in switch.phases_s if phase not in WHILE_TRAINING]
    pause = (
        f", training paused for {format_duration(sum(seconds or 0 for seconds in paused))}"
        if paused and None not in paused
        else ""
    )
    return concatenated(
        element("h3", f"After step {switch.step:,}: {KINDS[switch.kind]}{pause}"),
        *([element("p", switch.why)] if switch.why else []),
        chart_or_note(draw_switch(switch), name, "The times of its phases are unknown."),
    )


def _evaluations(history: RunHistory) -> Html | None:
    metrics = dict.fromkeys(
        str(name) for event in history.events_named("eval") for name in mapping(event, "metrics")
    )
    return _events(
        history,
        "eval",
        "On held-out text (measured)",
        ("loss", "perplexity", "bits_per_byte", "tokens", *metrics),
        lambda event, field: format_value(event.get(field, mapping(event, "metrics").get(field))),
    )


def _checkpoints(history: RunHistory) -> Html | None:
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
) -> Html | None:
    shown, cut = newest_rows(history.events_named(name), MAX_ROWS, "rows")
    if not shown:
        return None
    heads = [field.replace("_s", "").replace("_", " ") for field in fields]
    rows = [
        [
            f"{step_of(event):,}",
            time_cell(number(event, "time_s")),
            *(cell(event, field) for field in fields),
        ]
        for event in shown
    ]
    return concatenated(table(caption, ("after step", AT, *heads), rows, numbers=heads), cut)


def _faults(history: RunHistory) -> Html:
    skipped = [one.step for one in history.steps if one.skipped]
    shown, cut = newest_rows(history.events_named("fault"), MAX_ROWS, "faults")
    rows = [
        [f"{step_of(event):,}", time_cell(number(event, "time_s")), _fields(event)]
        for event in shown
    ]
    parts = (
        [table("Faults", ("after step", AT, "what"), rows), cut]
        if rows
        else [note("No fault is recorded.")]
    )
    if skipped:
        steps = ", ".join(map(str, skipped[:20])) + (" ..." if skipped[20:] else "")
        parts.append(
            note(
                f"{counted(len(skipped), 'step')} skipped the update because the loss or the"
                f" gradient was not finite: {steps}."
            )
        )
    return concatenated(*parts)


def _log(history: RunHistory) -> Html:
    shown, cut = newest_rows(history.events, MAX_ROWS, "events")
    rows = [
        [
            f"{step_of(event):,}",
            time_cell(number(event, "time_s")),
            str(event.get("event", UNKNOWN)),
            _fields(event),
        ]
        for event in shown
    ]
    return collapsible(
        counted(len(history.events), "event"),
        table("Events as logged", ("after step", AT, "event", "fields"), rows),
        cut,
        class_="log",
    )


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


SECTIONS: tuple[tuple[str, str, Callable[[RunHistory], Html | None]], ...] = (
    ("Loss", "loss", _loss),
    ("Overview", "overview", _overview),
    ("Last decision", "last-decision", last_decision),
    ("Step time", "step-time", _step_times),
    ("Rates and norms", "quantities", _quantities),
    ("Where the time goes", "profiles", profiles),
    ("Plans", "plans", _plans),
    ("Decisions", "decisions", all_decisions),
    ("Predicted against measured", "predictions", _predictions),
    ("Switches", "switches", _switches),
    ("Memory", "memory", _memory),
    ("Evaluations", "evaluations", _evaluations),
    ("Checkpoints", "checkpoints", _checkpoints),
    ("Resumes", "resumes", resumes),
    ("Settings", "settings", settings_section),
    ("Faults", "faults", _faults),
    ("All events", "events", _log),
)
"""(heading, id, function that makes the section; None: it is not shown)"""
