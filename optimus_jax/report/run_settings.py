"""The section of a report about settings: those that differ from the defaults, or between runs."""

from collections.abc import Mapping
from itertools import pairwise

from optimus_jax.config import Config
from optimus_jax.config.presets import PRESETS, model_preset
from optimus_jax.config.settings import compared_settings, value_of
from optimus_jax.errors import OptimusError, first_line
from optimus_jax.report.components import AT, moment, plan_name
from optimus_jax.report.formatting import UNKNOWN, shown_setting
from optimus_jax.report.page import PageBlock, PageTable, note
from optimus_jax.report.run_events import (
    LoggedEvent,
    changed_settings,
    mapping,
    number,
    step_of,
    text,
)
from optimus_jax.report.run_history import RunHistory

_NOT_SHOWN = ("model.name", "data.sources", "log.")
"""What other parts of the page say, or what changes no number of a run."""


def settings_section(history: RunHistory) -> list[PageBlock]:
    """Settings that are not the defaults, and derived ones."""
    if not history.config:
        return []
    derived = mapping(history.config, "derived")
    rows = [[str(name), shown_setting(value)] for name, value in derived.items()]
    chosen = PageTable(caption="Chosen by the run", head=("setting", "value"), rows=rows)
    return [_given(history), *([chosen] if rows else [])]


def _given(history: RunHistory) -> PageBlock:
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
        [name, shown_setting(value_of(config, name)), shown_setting(value_of(default, name))]
        for name in compared_settings(Config)
        if value_of(config, name) != value_of(default, name)
        and (not name.startswith(hidden) or name.startswith("model.tuning."))
    ]
    head = ("setting", "value", "default")
    if not rows:
        return note("All settings are the defaults.")
    return PageTable(caption="Settings that differ from the defaults", head=head, rows=rows)


def settings_that_differ(configs: Mapping[str, LoggedEvent]) -> list[PageBlock]:
    """A table of the settings that are not the same in all runs.

    Args:
      configs: name of each run -> its config.json.
    """
    read: dict[str, Config] = {}
    notes: list[PageBlock] = []
    for name, value in configs.items():
        try:
            read[name] = Config.from_value(dict(value))
        except OptimusError as error:
            told = first_line(error)
            notes.append(note(f"{name}: the settings cannot be read by this version: {told}"))
    rows = []
    for setting in compared_settings(Config):
        values = [value_of(config, setting) for config in read.values()]
        if any(value != values[0] for value in values) and not setting.startswith("log."):
            rows.append([setting, *map(shown_setting, values)])
    if rows:
        caption = "Settings that are not the same in all runs"
        return [PageTable(caption=caption, head=("setting", *read), rows=rows), *notes]
    return [note("All settings are the same."), *notes] if len(read) > 1 else notes


def resumes(history: RunHistory) -> list[PageBlock]:
    """When the run was resumed, on what, and how its learning rate went on."""
    found = history.events_named("resume", "plan")
    rows = [
        [
            f"{step_of(event):,}",
            moment(number(event, "time_s")),
            text(event, "devices") or UNKNOWN,
            plan_name(history, text(following, "digest")),
            "; ".join(changed_settings(event)) or ("as before" if "settings" in event else UNKNOWN),
            _learning_rate(event),
        ]
        for event, following in pairwise([*found, {}])
        if event.get("event") == "resume"
    ]
    head = ("after step", AT, "devices", "plan", "settings", "learning rate, held-out losses")
    return [PageTable(caption="Resumed", head=head, rows=rows)] if rows else []


def _learning_rate(event: LoggedEvent) -> str:
    before, now = number(event, "lr_before"), number(event, "lr_now")
    parts = [
        *([f"{before:.3g}, then {now:.3g}"] if before and now else []),
        *([found] if (found := text(event, "evaluation")) else []),
    ]
    return "; ".join(parts) or "as before"
