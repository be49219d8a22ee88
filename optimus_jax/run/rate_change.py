"""What other settings do to the learning rate of a run that goes on: before, now and at the end."""

from dataclasses import dataclass

import jax.numpy as jnp

from optimus_jax.config import Config
from optimus_jax.training.optimizer import (
    decay_begins,
    effective_warmup,
    learning_rate,
    peak_learning_rate,
)

_RATE_SETTINGS = ("schedule", "min_lr_ratio", "decay_fraction")
_JUMP_RATIO = 1e-3
"""Relative change of the next step's rate from which on it is a jump."""


@dataclass(frozen=True, kw_only=True)
class RateChange:
    """Of a run that goes on after `step`."""

    before: Config
    """The run until now, nothing left open."""
    now: Config
    """The run from here on."""
    num_params: int
    step: int
    checkpoints: tuple[int, ...] = ()
    """Steps of those that are there."""

    @property
    def is_changed(self) -> bool:
        """Whether a setting of the learning rate, or the number of steps, is another one."""
        return bool(self._changes)

    @property
    def rates(self) -> dict[str, float]:
        """Of the last step done (before the first: of that), the next, and the run's last."""
        return {
            "lr_before": self._rate(self.before, max(1, self.step)),
            "lr_now": self._rate(self.now, self.step + 1),
            "lr_end": self._rate(self.now, self.now.steps),
        }

    def describe(self) -> str:
        """The rates, what has changed, and what to set for another curve."""
        rates, now = self.rates, self.now
        text = (
            f"learning rate: before {rates['lr_before']:.4g} (step {max(1, self.step)}), now"
            f" {rates['lr_now']:.4g} (step {self.step + 1}), at the end {rates['lr_end']:.4g} (step"
            f" {now.steps}); {describe_schedule(now)}; changed: "
            + ", ".join(
                f"{name} {_short(old)} -> {_short(new)}"
                for name, (old, new) in self._changes.items()
            )
        )
        unchanged = self._rate(self.before, self.step + 1)
        # The step after the last one before a decay would have had less; to stay is no jump.
        if self.step and all(
            abs(rates["lr_now"] - other) > _JUMP_RATIO * max(rates["lr_now"], other)
            for other in (unchanged, rates["lr_before"])
        ):
            back = " ".join(
                f"--set {name}={value}"
                for name, (value, _) in self._changes.items()
                if name != "steps"
            )
            text += (
                f"\n  the rate jumps: step {self.step + 1} would have had {unchanged:.4g}; for the"
                f" curve from before: {back}"
            )
        if now.decay_steps != now.steps and now.optimizer.schedule != "constant":
            text += self._describe_decay_end()
        return text

    def _describe_decay_end(self) -> str:
        """Of a run whose decay does not end where its steps do."""
        now = self.now

        def with_values(**values: object) -> str:
            other = now.with_values({f"optimizer.{name}": value for name, value in values.items()})
            return f"{self._rate(other, self.step + 1):.4g} at step {self.step + 1}"

        has_begun = self.step > decay_begins(self.before)
        is_kept = now.decay_steps == self.before.decay_steps
        text = (
            f"\n  the decay {'has begun and ' if has_begun else ''}ends at step {now.decay_steps}"
            f"{', as before: ending it elsewhere would make the rate jump' * is_kept}. "
        )
        if now.steps >= effective_warmup(now):
            text += (
                f"To end it at step {now.steps}: --set optimizer.decay_steps={now.steps}"
                f" ({with_values(decay_steps=now.steps)}). "
            )
        return (
            text + "To train on at the peak: --set optimizer.schedule=constant"
            f" ({with_values(schedule='constant')}). Without a jump a run can be extended that"
            " has optimizer.schedule=wsd (warm-up, stable, decay at the end), before its decay"
            f" begins, or constant{self._describe_undo()}"
        )

    def _describe_undo(self) -> str:
        """The checkpoint from which the run can have its decay at its new end without a jump."""
        now = self.now.with_values({"optimizer.decay_steps": None})
        if now.steps < effective_warmup(self.now):
            return ""
        begins = int(min(decay_begins(self.before), decay_begins(now)))
        if self.step <= begins:
            return ""
        if not (earlier := [step for step in self.checkpoints if 0 < step <= begins]):
            there = ", ".join(map(str, self.checkpoints)) or "none"
            return (
                "\n  to go back to before the decay is not possible any more: no checkpoint of"
                f" step {begins} or before is left (there are: {there}). checkpoint.keep_every=N"
                " keeps some for ever"
            )
        step = max(earlier)
        return (
            f"\n  to undo the decay, go back to the checkpoint of step {step}, from before it:"
            f" --resume --set checkpoint.resume_step={step} --set optimizer.decay_steps=none"
            f" ({self._rate(now, step + 1):.4g} at step {step + 1}; {describe_schedule(now)})."
            " Do it soon: later checkpoints replace it"
        )

    @property
    def _changes(self) -> dict[str, tuple[float | str, float | str]]:
        """What each changed setting was and is."""
        before, now = self._settings(self.before), self._settings(self.now)
        return {name: (before[name], value) for name, value in now.items() if value != before[name]}

    def _settings(self, config: Config) -> dict[str, float | str]:
        """What the rate depends on, by the names of the settings."""
        settings = config.optimizer
        optimizer = {f"optimizer.{name}": getattr(settings, name) for name in _RATE_SETTINGS}
        return {
            "steps": config.steps,
            "optimizer.lr": peak_learning_rate(config.optimizer, self.num_params),
            **optimizer,
            "optimizer.warmup_steps": effective_warmup(config),
            "optimizer.decay_steps": config.decay_steps,
        }

    def _rate(self, config: Config, step: int) -> float:
        return float(learning_rate(config, self.num_params)(jnp.int32(step)))


def describe_schedule(config: Config) -> str:
    """The learning rate's schedule in words."""
    schedule, warmup = config.optimizer.schedule, effective_warmup(config)
    text = f"{schedule}, warm-up to step {warmup}"
    begins = decay_begins(config)
    return (
        text
        if schedule == "constant"
        else f"{text}, decay from step {begins} to {config.decay_steps}"
    )


def _short(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
