"""The report of a run: one page that tells what ran, what was decided and why, and whether it came
out as predicted.

A page holds what the run's lines say when it is made, so it can be made while the run goes on. Long
tables are cut to their newest rows, and say so.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from optimus_jax.report.components import (
    AT,
    MOST_ROWS,
    badge,
    moment,
    newest,
    picture_of,
    plan_name,
)
from optimus_jax.report.formatting import (
    UNKNOWN,
    anything,
    count,
    counted,
    duration,
    memory,
    share,
    when,
)
from optimus_jax.report.page import Html, element, facts, folded, note, page, table, together
from optimus_jax.report.run_charts import (
    WHILE_TRAINING,
    draw_loss,
    draw_memory,
    draw_predictions,
    draw_step_times,
    draw_switch,
)
from optimus_jax.report.run_decisions import all_decisions, last_decision
from optimus_jax.report.run_events import Event, known, mapping, number, step_of, text
from optimus_jax.report.run_history import NEAR_STEPS, RunStory, Switch, median_time
from optimus_jax.report.svg import page_settings
from optimus_jax.training.numbers import short

MOST_TIMELINES = 12
"""Switches that are drawn."""
KINDS = {"remesh": "re-mesh", "rollback": "rollback"}


def run_report(path: str | Path) -> str:
    """The report of the run in `path` as an HTML document.

    Raises:
      ConfigError: there is no run, or matplotlib is not installed.
      RunDirectoryError: a log cannot be read.
    """
    story = RunStory.read(path)
    with page_settings():
        sections = [(heading, name, part(story)) for heading, name, part in SECTIONS]
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
        element("h1", f"Run {story.name}"),
        note(_made()),
        *map(_trouble, _troubles(story)),
        contents,
        *body,
    )
    return page(f"Run {story.name}", main)


def _made() -> str:
    return (
        f"As it was at {when(time.time())} UTC. Times of steps and phases were measured; what is a"
        f" prediction is called one. What the run did not record is “{UNKNOWN}”."
    )


def _troubles(story: RunStory) -> list[str]:
    """What a reader should know before believing the page."""
    notes = [*story.troubles]
    if (again := story.path / "metrics.abandoned.jsonl").exists():
        notes.append(
            f"The run went back to a checkpoint; steps that were run again are in {again.name}, not"
            " here."
        )
    return notes


def _trouble(words: str) -> Html:
    return element("p", words, class_="trouble")


def _overview(story: RunStory) -> Html:
    started = next(
        (event for event in reversed(story.events) if event.get("event") in ("start", "resume")), {}
    )
    model, data = mapping(story.config, "model"), mapping(story.config, "data")
    last = story.steps[-1] if story.steps else None
    recent = story.near(last.step)[0] if last else []
    in_use = plan_name(story, story.current.digest if story.current else None)
    length = number(data, "seq_len") or number(mapping(story.config, "derived"), "data.seq_len")
    return facts(
        [
            ("status", story.status),
            (
                "steps",
                f"{count(last.step) if last else '0'} of {count(number(story.config, 'steps'))}",
            ),
            ("model", _model(model)),
            ("devices", text(started, "devices") or UNKNOWN),
            ("plan in use", in_use),
            ("why this plan", story.why_current or UNKNOWN),
            ("controller", text(story.config, "control") or UNKNOWN),
            ("switches", count(len(story.switches))),
            (
                "last loss",
                (
                    f"{short(last.loss, 4)} (step {last.step:,})"
                    if last and known(last.loss)
                    else UNKNOWN
                ),
            ),
            (
                f"step time, median of the last {counted(len(recent), 'step')} under it",
                duration(median_time(recent)),
            ),
            (
                "tokens per second, last step",
                count(last.tokens_per_s if last and known(last.tokens_per_s) else None),
            ),
            (
                "model FLOPs utilisation, last step",
                share(last.mfu if last and known(last.mfu) else None),
            ),
            ("batch", f"{count(number(data, 'global_batch'))} sequences of {count(length)} tokens"),
            ("data", text(started, "data") or UNKNOWN),
            ("begun", _utc(number(story.events[0], "time_s") if story.events else None)),
            ("last line written", _utc(story.written_s)),
        ]
    )


def _utc(time_s: float | None) -> str:
    return UNKNOWN if time_s is None else f"{when(time_s)} UTC"


def _model(model: Event) -> str:
    name = text(model, "name")
    return (
        f"{name}: {count(number(model, 'num_layers'))} layers, width"
        f" {count(number(model, 'embed_dim'))}"
        if name
        else UNKNOWN
    )


def _loss(story: RunStory) -> Html:
    return picture_of(
        draw_loss(story), "loss", "No step has been recorded yet, so the loss is unknown."
    )


def _step_times(story: RunStory) -> Html:
    picture = picture_of(draw_step_times(story), "times", "No step's time is known.")
    spans, cut = newest(story.spans, MOST_ROWS, "spans")
    rows = [
        [
            f"{span.first:,} to {span.last:,}",
            plan_name(story, span.plan),
            count(span.num_steps),
            duration(span.step_time_s),
        ]
        for span in spans
    ]
    head = ("steps", "plan", "recorded", "median step time")
    return together(
        picture,
        *([table("Which plan ran which steps", head, rows, numbers=head[2:]), cut] if rows else []),
    )


def _plans(story: RunStory) -> Html:
    if not story.plans:
        return note("None is recorded.")
    ran: dict[str, int] = {}
    for span in story.spans:
        ran[span.plan] = ran.get(span.plan, 0) + span.num_steps
    rows = [
        [badge(place), story.layouts.get(digest, UNKNOWN), digest, count(ran.get(digest, 0))]
        for place, digest in enumerate(story.plans[:MOST_ROWS])
    ]
    return table(
        "Letters on this page stand for these plans",
        ("plan", "layout", "digest", "steps run"),
        rows,
        numbers=("steps run",),
    )


def _predictions(story: RunStory) -> Html:
    shown, cut = newest(story.comparisons, MOST_ROWS, "comparisons")
    if not shown:
        return note("No plan with a recorded prediction has been tried or switched to.")
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
            plan_name(story, pair.plan, pair.layout),
            duration(pair.predicted_s),
            duration(pair.measured_s),
            UNKNOWN if pair.measured_s is None else f"{pair.measured_s / pair.predicted_s:.2f}",
            pair.how,
        ]
        for pair in shown
    ]
    return together(
        picture_of(
            draw_predictions(story), "predictions", "None of these plans has been measured yet."
        ),
        table("Time of a step: predictions and measurements", head, rows, numbers=head[2:5]),
        cut,
    )


def _memory(story: RunStory) -> Html:
    return picture_of(
        draw_memory(story), "memory", "Unknown: neither the backend nor the compiler said."
    )


def _switches(story: RunStory) -> Html:
    if not story.switches:
        return note("The run was never moved to another plan.")
    head = ("after step", AT, "kind", "from", "to", "rung", "moved", "delay", "before", "after")
    shown, cut = newest(story.switches, MOST_ROWS, "switches")
    rows = [
        [
            f"{one.step:,}",
            moment(one.time_s),
            KINDS[one.kind],
            plan_name(story, one.from_plan),
            plan_name(story, one.plan, one.layout),
            one.rung or UNKNOWN,
            memory(one.bytes_moved),
            duration(one.step_delay_s),
            duration(one.before_s),
            duration(one.after_s),
        ]
        for one in shown
    ]
    caption = (
        "Re-meshes and rollbacks: bytes that were moved, what the step was delayed by, and medians"
        f" of the times of at most {NEAR_STEPS} steps before and after."
    )
    drawn, left_out = newest(story.switches, MOST_TIMELINES, "timelines")
    return together(
        table(caption, head, rows, numbers=head[6:]),
        cut,
        *(_timeline(story, one, f"switch{place}") for place, one in enumerate(drawn)),
        left_out,
    )


def _timeline(story: RunStory, switch: Switch, name: str) -> Html:
    waited = [seconds for phase, seconds in switch.phases_s if phase not in WHILE_TRAINING]
    waits = (
        f", training waited {duration(sum(seconds or 0 for seconds in waited))}"
        if waited and None not in waited
        else ""
    )
    return together(
        element("h3", f"After step {switch.step:,}: {KINDS[switch.kind]}{waits}"),
        *([element("p", switch.why)] if switch.why else []),
        picture_of(draw_switch(switch), name, "The times of its phases are unknown."),
    )


def _evaluations(story: RunStory) -> Html:
    return _events(
        story,
        "eval",
        "On held-out text (measured)",
        ("loss", "perplexity", "bits_per_byte", "tokens"),
        lambda _, value: anything(value),
    )


def _checkpoints(story: RunStory) -> Html:
    return _events(
        story,
        "checkpoint",
        "States saved. Training was blocked while the state was copied to the host.",
        ("blocked_s",),
        lambda event, _: duration(number(event, "blocked_s")),
    )


def _events(
    story: RunStory,
    name: str,
    caption: str,
    fields: Sequence[str],
    cell: Callable[[Event, object], str],
) -> Html:
    shown, cut = newest(story.named(name), MOST_ROWS, "rows")
    if not shown:
        return note("None is recorded.")
    heads = [field.replace("_s", "").replace("_", " ") for field in fields]
    rows = [
        [
            f"{step_of(event):,}",
            moment(number(event, "time_s")),
            *(cell(event, event.get(field)) for field in fields),
        ]
        for event in shown
    ]
    return together(table(caption, ("after step", AT, *heads), rows, numbers=heads), cut)


def _faults(story: RunStory) -> Html:
    skipped = [one.step for one in story.steps if one.skipped]
    shown, cut = newest(story.named("fault"), MOST_ROWS, "faults")
    rows = [
        [f"{step_of(event):,}", moment(number(event, "time_s")), _fields(event)] for event in shown
    ]
    parts = (
        [table("Faults", ("after step", AT, "what"), rows), cut]
        if rows
        else [note("No fault is recorded.")]
    )
    if skipped:
        parts.append(
            note(
                f"{counted(len(skipped), 'step')} made no update, as loss or gradient was not"
                f" finite: {', '.join(map(str, skipped[:20]))}{' ...' if skipped[20:] else ''}."
            )
        )
    return together(*parts)


def _log(story: RunStory) -> Html:
    shown, cut = newest(story.events, MOST_ROWS, "events")
    rows = [
        [
            f"{step_of(event):,}",
            moment(number(event, "time_s")),
            str(event.get("event", UNKNOWN)),
            _fields(event),
        ]
        for event in shown
    ]
    return folded(
        counted(len(story.events), "event"),
        table("As the run wrote them", ("after step", AT, "event", "fields"), rows),
        cut,
        class_="log",
    )


def _fields(event: Event) -> str:
    """What an event says beside its name, step and time."""
    return (
        "; ".join(
            f"{name}: {anything(value)}"
            for name, value in event.items()
            if name not in ("event", "step", "time_s")
        )
        or "nothing more"
    )


SECTIONS: tuple[tuple[str, str, Callable[[RunStory], Html]], ...] = (
    ("Overview", "overview", _overview),
    ("Last decision", "last-decision", last_decision),
    ("Loss", "loss", _loss),
    ("Step time", "step-time", _step_times),
    ("Plans", "plans", _plans),
    ("Decisions", "decisions", all_decisions),
    ("Predicted against measured", "predictions", _predictions),
    ("Switches", "switches", _switches),
    ("Memory", "memory", _memory),
    ("Evaluations", "evaluations", _evaluations),
    ("Checkpoints", "checkpoints", _checkpoints),
    ("Faults", "faults", _faults),
    ("Everything that was recorded", "events", _log),
)
"""Heading, what links call it, and what stands there."""
