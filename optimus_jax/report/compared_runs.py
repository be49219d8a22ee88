"""Several runs side by side as one HTML page: their losses, rates and step times in one chart each,
and what differs between their settings.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from optimus_jax.report.components import MAX_ROWS, chart_or_note, newest_rows, plan_name
from optimus_jax.report.formatting import UNKNOWN, format_count, format_duration, format_value
from optimus_jax.report.page import PageBlock, PageTable, Section, note, page
from optimus_jax.report.run_charts import NamedRuns, draw_loss, draw_quantities, draw_step_times
from optimus_jax.report.run_events import mapping, step_of
from optimus_jax.report.run_history import RunHistory
from optimus_jax.report.run_report import as_warning, introduction, overview, warnings_about
from optimus_jax.report.run_settings import settings_that_differ


def compared_runs(
    paths: Sequence[str | Path], *, names: Sequence[str] = (), refresh_s: int | None = None
) -> str:
    """The page about several runs as an HTML document.

    Args:
      paths: directories of the runs.
      names: what the page calls them; empty: the ends of the paths that tell them apart.
      refresh_s: seconds after which a browser reads the page again; None: it does not.
    Raises:
      ConfigError: a path holds no run, or plotly or jinja2 is not installed.
      RunDirectoryError: a log cannot be read.
    """
    histories = [RunHistory.read(path) for path in paths]
    shown = distinct_names([str(path) for path in (names or paths)])
    runs = dict(zip(shown, histories, strict=True))
    warnings = [
        as_warning(f"{name}: {message}")
        for name, run in runs.items()
        for message in warnings_about(run)
    ]
    return page(
        f"{len(runs)} runs",
        [
            Section(heading=heading, name=name, blocks=blocks)
            for heading, name, part in SECTIONS
            if (blocks := part(runs))
        ],
        introduction=[note(introduction()), *warnings],
        refresh_s=refresh_s,
    )


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that differ; a path given twice has a number the second
    time."""
    parts = [path.rstrip("/").split("/") for path in map(os.fspath, paths)]
    names = ["/".join(one[-length:]) for one, length in zip(parts, _lengths(parts), strict=True)]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name} ({seen[name]})"
    return names


def _lengths(parts: Sequence[Sequence[str]]) -> list[int]:
    """How many parts at the end of each path tell it from the others."""
    lengths = [1] * len(parts)
    for index, one in enumerate(parts):
        others = [other for other in parts if other != one]
        while lengths[index] < len(one) and any(
            list(other[-lengths[index] :]) == list(one[-lengths[index] :]) for other in others
        ):
            lengths[index] += 1
    return lengths


def _loss(runs: NamedRuns) -> list[PageBlock]:
    by_step, by_time = draw_loss(runs), draw_loss(runs, by="time")
    return [
        *chart_or_note(by_step, "No run has recorded a step yet, so the losses are unknown."),
        *([by_time] if by_time else []),
    ]


def _overview(runs: NamedRuns) -> list[PageBlock]:
    facts = {name: dict(overview(run)) for name, run in runs.items()}
    fact_names = dict.fromkeys(fact for pairs in facts.values() for fact in pairs)
    rows = [[fact, *(pairs.get(fact, UNKNOWN) for pairs in facts.values())] for fact in fact_names]
    return [PageTable(caption="The runs, side by side", head=("", *runs), rows=rows)]


def _step_times(runs: NamedRuns) -> list[PageBlock]:
    rows = [
        [
            name,
            f"{span.first:,} to {span.last:,}",
            plan_name(run, span.plan, whole=True),
            format_duration(span.step_time_s),
        ]
        for name, run in runs.items()
        for span in run.spans
    ]
    shown, cut = newest_rows(rows, MAX_ROWS, "rows")
    head = ("run", "steps", "plan", "median step time")
    table = PageTable(caption="Steps by plan", head=head, rows=shown, numbers=head[3:])
    chart = chart_or_note(draw_step_times(runs), "No step's time is known.")
    return [*chart, *([table, *cut] if rows else [])]


def _quantities(runs: NamedRuns) -> list[PageBlock]:
    chart = draw_quantities(runs)
    return [] if chart is None else [chart]


def _evaluations(runs: NamedRuns) -> list[PageBlock]:
    """The last evaluation of each run."""
    last = {name: events[-1] for name, run in runs.items() if (events := run.events_named("eval"))}
    metrics = dict.fromkeys(
        str(metric) for event in last.values() for metric in mapping(event, "metrics")
    )
    fields = ("loss", "perplexity", "bits_per_byte", *metrics)
    rows = [
        [
            name,
            format_count(step_of(event)),
            *(
                format_value(event.get(field, mapping(event, "metrics").get(field)))
                for field in fields
            ),
        ]
        for name, event in last.items()
    ]
    head = ("run", "after step", *(field.replace("_", " ") for field in fields))
    caption = "The last evaluation of each run (measured)"
    return [PageTable(caption=caption, head=head, rows=rows, numbers=head[1:])] if rows else []


def _settings(runs: NamedRuns) -> list[PageBlock]:
    return settings_that_differ({name: run.config for name, run in runs.items() if run.config})


SECTIONS: tuple[tuple[str, str, Callable[[NamedRuns], Sequence[PageBlock]]], ...] = (
    ("Loss", "loss", _loss),
    ("Overview", "overview", _overview),
    ("Settings that differ", "settings", _settings),
    ("Step time", "step-time", _step_times),
    ("Rates and norms", "rates", _quantities),
    ("Evaluations", "evaluations", _evaluations),
)
"""(heading, id, function that makes the blocks of the section; without blocks it is not shown)"""
