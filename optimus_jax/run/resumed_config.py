"""The config of a run that goes on: what it derived when it began is kept until it is changed.

A setting that was left open stays open in config.json, so that another run can be begun from the
same settings and derives its own values. Beside it, `derived` has the value that this run got:
warm-up and decay by the steps that it began with, the peak rate by the size of its model, the
evaluation set, the precision by the devices that it began on. A resume reads it from there.

A run directory from before a value was written there derives it from its config, as it did then.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_jax.config import Config, Precision
from optimus_jax.config.settings import value_of
from optimus_jax.training.optimizer import decay_begins, effective_warmup, peak_learning_rate

UNSET = {
    "data.seq_len": None,
    "optimizer.lr": None,
    "optimizer.warmup_steps": None,
    "optimizer.decay_steps": None,
    "evaluation.examples": None,
    "evaluation.seq_len": None,
    "precision.compute": "auto",
}
"""Settings whose derived value belongs to the run, with what they hold while they are left open."""


def derived_values(config: Config, *, num_params: int, precision: Precision) -> dict[str, Any]:
    """What a run makes of the settings that were left open and belong to it, by their names."""
    return {
        "data.seq_len": config.seq_len,
        "optimizer.lr": peak_learning_rate(config.optimizer, num_params),
        "optimizer.warmup_steps": effective_warmup(config),
        "optimizer.decay_steps": config.decay_steps,
        "evaluation.examples": config.eval_examples,
        "evaluation.seq_len": config.eval_seq_len,
        "precision.compute": precision,
    }


@dataclass(frozen=True, kw_only=True)
class ResumedConfig:
    """A run that goes on."""

    requested: Config
    """As it was asked for, left open what was left open: what config.json is to say."""
    config: Config
    """The same with the run's own values."""
    before: Config
    """That of the run until now."""

    @classmethod
    def of(
        cls, text: str, requested: Config, overridden: Collection[str], precision: Precision | None
    ) -> "ResumedConfig":
        """From the run's config.json and what it is resumed with.

        Args:
          named: settings that the user has named now, by their dotted names. One that is named as
            open (`none`, `auto`) is derived anew.
          precision: of the run's plan, for a config.json that does not say it.
        """
        old = Config.from_json(text)
        in_use = _values_in_use(old, Config.derived_in(text), precision)
        values = {name: _value_to_use(name, requested, old, in_use, overridden) for name in UNSET}
        wanted_warmup = requested.with_values(
            {"optimizer.warmup_steps": values["optimizer.warmup_steps"]}
        )
        if (
            requested.optimizer.decay_steps is None
            and wanted_warmup.warmup_steps > in_use["optimizer.decay_steps"]
        ):
            values["optimizer.decay_steps"] = None  # a longer warm-up was asked for now
        return cls(
            requested=requested,
            config=requested.with_values(values),
            before=old.with_values(in_use),
        )

    def from_step(self, step: int) -> "ResumedConfig":
        """The same, for a run that goes on after `step`.

        The decay of the learning rate is moved to another end of the run only if no step has been
        part of the decay, neither as it was nor as it would have been: the rate has no jump then.
        Otherwise it ends where it would have ended.
        """
        steps, before = self.config.steps, self.before
        is_other_schedule = self.config.optimizer.schedule != before.optimizer.schedule
        if self.requested.optimizer.decay_steps is not None or not (
            is_other_schedule or steps != before.steps
        ):
            return self
        end = max(steps, self.config.warmup_steps)
        moved = self.config.with_values({"optimizer.decay_steps": end})
        is_smooth = end == steps and step <= min(decay_begins(before), decay_begins(moved))
        if not is_smooth and not is_other_schedule:
            return self
        return ResumedConfig(requested=self.requested, config=moved, before=before)

    def as_requested(self, config: Config) -> Config:
        """A config of this run, whose layout may have been changed, with what was left open left
        open.
        """
        return config.with_values({name: value_of(self.requested, name) for name in UNSET})


def config_with_derived(text: str) -> Config:
    """The config of a run, with what it has derived, from its JSON."""
    old = Config.from_json(text)
    return old.with_values(_values_in_use(old, Config.derived_in(text), None))


def _values_in_use(
    old: Config, derived: Mapping[str, Any], precision: Precision | None
) -> dict[str, Any]:
    """What the run has had until now, also where its user has fixed it.

    Raises:
      ConfigError: a derived value cannot be one.
    """
    written = old.with_values({name: derived[name] for name in UNSET if name in derived})
    in_use = {
        name: value_of(old if value_of(old, name) != unset else written, name)
        for name, unset in UNSET.items()
    }
    in_use |= {
        "data.seq_len": in_use["data.seq_len"] or old.seq_len,
        "optimizer.decay_steps": in_use["optimizer.decay_steps"] or old.decay_steps,
        "evaluation.examples": in_use["evaluation.examples"] or old.eval_examples,
        "evaluation.seq_len": in_use["evaluation.seq_len"] or in_use["data.seq_len"] or old.seq_len,
    }
    if in_use["precision.compute"] == "auto" and precision is not None:
        in_use["precision.compute"] = precision
    # A run that was shorter than its warm-up has warmed up within its steps.
    warmup = in_use["optimizer.warmup_steps"]
    in_use["optimizer.warmup_steps"] = min(
        old.warmup_steps if warmup is None else warmup,
        written.warmup_steps,
        in_use["optimizer.decay_steps"],
    )
    return in_use


def _value_to_use(
    name: str,
    requested: Config,
    old: Config,
    in_use: Mapping[str, Any],
    overridden: Collection[str],
) -> Any:
    """The run's own value of a setting, unless it was changed."""
    wanted, unset = value_of(requested, name), UNSET[name]
    is_changed = name in overridden if wanted == unset else wanted != value_of(old, name)
    return wanted if is_changed else in_use[name]
