"""The config of a resumed run: it keeps the values derived at the start until the user changes
them.

An unset setting stays unset in config.json, so that a new run from the same settings derives its
own value. `derived` in config.json holds this run's values: warm-up and decay from its initial
number of steps, peak learning rate from the model's size, the evaluation set, and the precision
from its initial devices. A resume reads them.

If an older run directory lacks a derived value, it is derived from the config again.
"""

import dataclasses
import functools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_jax.config import Config, Precision
from optimus_jax.config.settings import compared_settings, value_of
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
"""Settings whose derived value belongs to the run -> the value that means "unset"."""


def derived_values(config: Config, *, num_params: int, precision: Precision) -> dict[str, Any]:
    """Values of the settings in UNSET for a run with this config, given or derived, by name."""
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
    """The config of a resumed run, before and after the resume."""

    requested: Config
    """The requested config, in which unset settings are unset; it is written to config.json."""
    config: Config
    """The requested config with the run's derived values."""
    before: Config
    """The config before the resume, with derived values."""

    @classmethod
    def of(
        cls, text: str, requested: Config, overridden: Collection[str], precision: Precision | None
    ) -> "ResumedConfig":
        """Combine the run's config.json with the config requested on resume.

        Args:
          text: content of config.json.
          overridden: dotted names of the settings that the user gives now. One that is given as
            unset (`none`, `auto`) is derived again.
          precision: precision of the run's plan, used if config.json lacks it.
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
            values["optimizer.decay_steps"] = None  # the requested warm-up is longer than the decay
        return cls(
            requested=requested,
            config=requested.with_values(values),
            before=old.with_values(in_use),
        )

    def from_step(self, step: int) -> "ResumedConfig":
        """The config for resuming after `step`.

        The end of the learning rate's decay moves to the new last step only if no finished step
        belongs to the decay, under the old or the new schedule, so that the rate does not jump.
        Otherwise the decay ends where it did before.
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

    def changes(self, config: Config) -> dict[str, list[Any]]:
        """The settings of `config`, with which the run goes on, that are not as before: name ->
        the value before and now, as config.json has them.
        """
        before, now = (dataclasses.asdict(each.stored) for each in (self.before, config))
        values = {
            name: [_in_tree(before, name), _in_tree(now, name)]
            for name in compared_settings(Config)
        }
        return {name: [old, new] for name, (old, new) in values.items() if old != new}

    def as_requested(self, config: Config) -> Config:
        """`config` with the settings of UNSET as requested, that is possibly unset."""
        return config.with_values({name: value_of(self.requested, name) for name in UNSET})


def _in_tree(tree: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name."""
    return functools.reduce(operator.getitem, name.split("."), tree)


def config_with_derived(text: str) -> Config:
    """The config in the text of a config.json, with the run's derived values."""
    old = Config.from_json(text)
    return old.with_values(_values_in_use(old, Config.derived_in(text), None))


def _values_in_use(
    old: Config, derived: Mapping[str, Any], precision: Precision | None
) -> dict[str, Any]:
    """Values of the settings in UNSET before the resume, given or derived.

    Raises:
      ConfigError: a derived value is invalid.
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
    # A run that was shorter than its warm-up finished the warm-up within its steps.
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
    """The requested value if the user changed the setting, otherwise the run's value."""
    wanted, unset = value_of(requested, name), UNSET[name]
    is_changed = name in overridden if wanted == unset else wanted != value_of(old, name)
    return wanted if is_changed else in_use[name]
