"""How changed settings affect a resumed run's learning rate: before the resume, now and at the
end.
"""

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
"""A larger relative change of the next step's rate counts as a jump."""


@dataclass(frozen=True, kw_only=True)
class RateChange:
    """The learning rate before and after a resume at `step`."""

    before: Config
    """The config before the resume, with all derived values."""
    now: Config
    """The config after the resume."""
    num_params: int
    step: int
    """Last finished step."""
    checkpoints: tuple[int, ...] = ()
    """Steps of the available checkpoints."""

    @property
    def is_changed(self) -> bool:
        """Whether a setting of the learning rate, or the number of steps, changed."""
        return bool(self._changes)

    @property
    def rates(self) -> dict[str, float]:
        """Rates of the last finished step (at least 1), the next step, and the run's last step."""
        return {
            "lr_before": self._rate(self.before, max(1, self.step)),
            "lr_now": self._rate(self.now, self.step + 1),
            "lr_end": self._rate(self.now, self.now.steps),
        }

    def describe(self) -> str:
        """The rates, the changed settings, and the settings for a different schedule."""
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
        # Before a decay the next step would have had a lower rate; keeping the rate is no jump.
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
                f"\n  the rate jumps: step {self.step + 1} would have had {unchanged:.4g}; to keep"
                f" the previous schedule: {back}"
            )
        if now.decay_steps != now.steps and now.optimizer.schedule != "constant":
            text += self._describe_decay_end()
        return text

    def _describe_decay_end(self) -> str:
        """Explain a decay that does not end at the run's last step, and the alternatives."""
        now = self.now

        def with_values(**values: object) -> str:
            other = now.with_values({f"optimizer.{name}": value for name, value in values.items()})
            return f"{self._rate(other, self.step + 1):.4g} at step {self.step + 1}"

        has_begun = self.step > decay_begins(self.before)
        is_unchanged = now.decay_steps == self.before.decay_steps
        text = (
            f"\n  the decay {'has begun and ' if has_begun else ''}ends at step {now.decay_steps}"
            f"{', as before: another end would make the rate jump' * is_unchanged}. "
        )
        if now.steps >= effective_warmup(now):
            text += (
                f"To end it at step {now.steps}: --set optimizer.decay_steps={now.steps}"
                f" ({with_values(decay_steps=now.steps)}). "
            )
        return (
            text + "To continue at the peak rate: --set optimizer.schedule=constant"
            f" ({with_values(schedule='constant')}). A run can be extended without a jump if it"
            " has optimizer.schedule=wsd (warm-up, stable, decay at the end) and its decay has not"
            f" begun, or optimizer.schedule=constant{self._describe_undo()}"
        )

    def _describe_undo(self) -> str:
        """How to go back to a checkpoint before the decay, from which the rate does not jump."""
        now = self.now.with_values({"optimizer.decay_steps": None})
        if now.steps < effective_warmup(self.now):
            return ""
        begins = int(min(decay_begins(self.before), decay_begins(now)))
        if self.step <= begins:
            return ""
        if not (earlier := [step for step in self.checkpoints if 0 < step <= begins]):
            available = ", ".join(map(str, self.checkpoints)) or "none"
            return (
                f"\n  the run cannot go back to before the decay: no checkpoint of step {begins} or"
                f" earlier is left (available: {available}). checkpoint.keep_every=N keeps the"
                " checkpoints of all steps divisible by N"
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
        """Name of each changed setting -> (before, now)."""
        before, now = self._settings(self.before), self._settings(self.now)
        return {name: (before[name], value) for name, value in now.items() if value != before[name]}

    def _settings(self, config: Config) -> dict[str, float | str]:
        """The settings that determine the rate, by name, with derived values."""
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
    """The learning rate's schedule as text."""
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
