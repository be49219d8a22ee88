"""The section of a run's report about its settings: those that differ from the defaults."""

from itertools import pairwise
from typing import Any

from optimus_jax.config import Config
from optimus_jax.config.presets import PRESETS, model_preset
from optimus_jax.config.settings import compared_settings, value_of
from optimus_jax.errors import OptimusError, first_line
from optimus_jax.report.components import AT, plan_name, time_cell
from optimus_jax.report.formatting import UNKNOWN, format_value
from optimus_jax.report.page import Html, concatenated, note, table
from optimus_jax.report.run_events import LoggedEvent, mapping, number, step_of, text
from optimus_jax.report.run_history import RunHistory

_NOT_SHOWN = ("model.name", "data.sources", "log.")
"""What other parts of the page say, or what changes no number of a run."""


def settings_section(history: RunHistory) -> Html | None:
    """Settings that are not the defaults, and derived ones; None: there is no config."""
    if not history.config:
        return None
    derived = mapping(history.config, "derived")
    return concatenated(
        _given(history),
        *(
            [
                table(
                    "Chosen by the run",
                    ("setting", "value"),
                    [[str(name), _shown(value)] for name, value in derived.items()],
                )
            ]
            if derived
            else []
        ),
    )


def _given(history: RunHistory) -> Html:
    """The settings that are not the defaults, as `--set` takes them."""
    try:
        config = Config.from_value(dict(history.config))
    except OptimusError as error:
        return note(f"The settings cannot be read by this version: {first_line(error)}")
    default, hidden = Config(), _NOT_SHOWN
    if config.model.name in PRESETS:
        default = Config(model=model_preset(config.model.name))
    else:
        hidden = (*hidden, "model.")  # the sizes of a model are no settings that differ
    rows = [
        [name, _shown(value_of(config, name)), _shown(value_of(default, name))]
        for name in compared_settings(Config)
        if value_of(config, name) != value_of(default, name)
        and (not name.startswith(hidden) or name.startswith("model.tuning."))
    ]
    head = ("setting", "value", "default")
    return (
        table("Settings that differ from the defaults", head, rows)
        if rows
        else note("All settings are the defaults.")
    )


def resumes(history: RunHistory) -> Html | None:
    """When the run was resumed, on what, and how its learning rate went on; None: it never was."""
    found = history.events_named("resume", "plan")
    rows = [
        [
            f"{step_of(event):,}",
            time_cell(number(event, "time_s")),
            text(event, "devices") or UNKNOWN,
            plan_name(history, text(following, "digest")),
            _learning_rate(event),
        ]
        for event, following in pairwise([*found, {}])
        if event.get("event") == "resume"
    ]
    head = ("after step", AT, "devices", "plan", "learning rate, held-out losses")
    return table("Resumed", head, rows) if rows else None


def _learning_rate(event: LoggedEvent) -> str:
    before, now = number(event, "lr_before"), number(event, "lr_now")
    parts = [
        *([f"{before:.3g}, then {now:.3g}"] if before and now else []),
        *([found] if (found := text(event, "evaluation")) else []),
    ]
    return "; ".join(parts) or "as before"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return format_value(value)
