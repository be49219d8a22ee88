"""The section of a run's report about its settings: those that differ from the defaults."""

from typing import Any

from optimus_jax.config import Config
from optimus_jax.config.presets import PRESETS, model_preset
from optimus_jax.config.settings import compared_settings, value_of
from optimus_jax.errors import OptimusError
from optimus_jax.report.components import AT, time_cell
from optimus_jax.report.formatting import format_value
from optimus_jax.report.page import Html, concatenated, note, table
from optimus_jax.report.run_events import LoggedEvent, mapping, number, step_of, text
from optimus_jax.report.run_history import RunHistory

_NOT_SHOWN = ("model.name", "data.sources", "log.")
"""What other parts of the page say, or what changes no number of a run."""


def settings_section(history: RunHistory) -> Html | None:
    """Settings that are not the defaults, and derived ones; None: the config is not known."""
    try:
        config = Config.from_value(dict(history.config))
    except OptimusError:
        return None
    if not history.config:
        return None
    default = _default(config)
    rows = [
        [name, _shown(value_of(config, name)), _shown(value_of(default, name))]
        for name in compared_settings(Config)
        if value_of(config, name) != value_of(default, name) and not name.startswith(_NOT_SHOWN)
    ]
    derived = mapping(history.config, "derived")
    return concatenated(
        table("Settings that differ from the defaults", ("setting", "value", "default"), rows)
        if rows
        else note("All settings are the defaults."),
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


def resumes(history: RunHistory) -> Html | None:
    """When the run was resumed, and what was new; None: it never was."""
    found = history.events_named("resume")
    if not found:
        return None
    rows = [
        [
            f"{step_of(event):,}",
            time_cell(number(event, "time_s")),
            text(event, "devices") or "",
            _new(event),
        ]
        for event in found
    ]
    return table("Resumed", ("after step", AT, "devices", "new"), rows)


def _default(config: Config) -> Config:
    """The defaults of a run of the same model."""
    name = config.model.name
    return Config(model=model_preset(name)) if name in PRESETS else Config()


def _new(event: LoggedEvent) -> str:
    before, now = number(event, "lr_before"), number(event, "lr_now")
    parts = [
        *([f"learning rate {before:.3g}, then {now:.3g}"] if before and now else []),
        *([found] if (found := text(event, "evaluation")) else []),
    ]
    return "; ".join(parts) or "nothing"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else format_value(value)
