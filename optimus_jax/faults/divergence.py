"""Detects that a run no longer learns: steps without an update, non-finite losses, and losses far
above earlier ones.

It sees every step and evaluation in order. All processes of a run read the same metrics, so that
they reach the same answer without communication. Its state is saved in every checkpoint.

A step is *without an update* if its loss or gradient was not finite, or if every gradient was zero.
In f16, overflows are how the loss scale adapts: they do not count while the scale can still fall.

The state after step k is *known to be good* when a later step has made an update from it: a finite
loss, and finite gradients. The state after the last update before a series of steps without one is
not: every step of the series has failed from it.
"""

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optimus_jax.config import Config
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.errors import LearningError, explain
from optimus_jax.run_directory.step_record import StepRecord

WINDOW_STEPS = 10
"""Window of the median loss; a spike shorter than half of it does not move the median."""
PATIENCE_STEPS = 20
"""How long the median must stay too high before a warning."""
MIN_RISE = 0.5
"""Least rise of the loss that counts, in nats."""
MIN_LOSS_SCALE = 1.0
"""Lower bound of the f16 loss scale (training/step.py)."""
SKIPPED_AT_END = 2
"""Number of steps without an update, at the end of a run, from which it counts as no longer
learning."""

Trouble = Literal["no update", "weights", "evaluation"]


@dataclass(kw_only=True)
class LearningHealth:
    """Whether a run still learns. Checkpoints hold all fields but `recent` (`to_json`)."""

    skipped: int = 0
    """Steps without an update since the last update."""
    first_skipped: int | None = None
    """First step of the current series, including steps that do not count; None: there is none."""
    good: int = -1
    """Newest step whose state is known to be good; -1: none, not even the initial one."""
    evaluated: int | None = None
    """Newest step with a finite held-out loss."""
    bad_evaluations: int = 0
    """Evaluations in a row whose loss was not finite."""
    broken: str | None = None
    """A leaf of the state that is not finite; None: none was found."""
    best: float | None = None
    """Lowest median of the loss over WINDOW_STEPS."""
    above_since: int | None = None
    """Step since which the median is far above `best`; None: it is not."""
    is_told: bool = False
    """Whether the warning about it was given."""
    recent: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """Newest finite losses."""

    def step(self, record: StepRecord) -> None:
        """A step was finished."""
        if not record.tokens:  # a batch without tokens is no fault
            return
        if makes_update(record):
            self.skipped, self.first_skipped, self.good = 0, None, record.step - 1
        else:
            self.first_skipped = self.first_skipped or record.step
            self.skipped += not _searches_scale(record)
        if math.isfinite(record.loss):
            self.recent.append(record.loss)

    def rises(self, step: int, share: float) -> bool:
        """Whether to warn after `step` that the loss has been far above its lowest for
        PATIENCE_STEPS; once per rise.

        Args:
          share: relative rise of the median above the lowest that is allowed; 0: any.
        """
        if not self.recent or not share:
            return False
        median = statistics.median(self.recent)
        self.best = median if self.best is None else min(self.best, median)
        if median <= self.best + max(share * abs(self.best), MIN_RISE):
            self.above_since, self.is_told = None, False
            return False
        self.above_since = self.above_since or step
        is_long = step - self.above_since + 1 >= PATIENCE_STEPS
        is_new = is_long and not self.is_told
        self.is_told = self.is_told or is_long
        return is_new

    def evaluation(self, step: int, loss: float) -> None:
        """A held-out loss was measured."""
        if math.isfinite(loss):
            self.evaluated, self.bad_evaluations = step, 0
        else:
            self.bad_evaluations += 1

    def reset_skipped(self) -> None:
        """Reset the count of steps without an update, as the run changes to another plan."""
        self.skipped, self.first_skipped = 0, None

    def trouble(self, max_skipped: int, *, is_at_end: bool) -> Trouble | None:
        """Why the run should end as no longer learning; None: it should continue.

        Args:
          max_skipped: consecutive steps without an update that end the run; 0: the check is off.
          is_at_end: whether this is the last step, so that no later step can decide.
        """
        if self.broken is not None:  # such a state cannot be saved
            return "weights"
        if not max_skipped:
            return None
        has_never = self.good < 0
        if self.skipped >= (
            min(max_skipped, 1 if has_never else SKIPPED_AT_END) if is_at_end else max_skipped
        ):
            return "no update"
        return "evaluation" if self.bad_evaluations >= (1 if is_at_end else 2) else None

    @property
    def limits(self) -> tuple[int, ...]:
        """For each of these steps, the newest checkpoint at or before it must be kept for a
        rollback.
        """
        before_row = () if self.first_skipped is None else (self.first_skipped - 1,)
        return (self.good_limit, *before_row)

    @property
    def good_limit(self) -> int:
        """The newest step that the run could go back to; -1: none."""
        limits = [self.good]
        if self.bad_evaluations and self.evaluated is not None:
            limits.append(self.evaluated)
        if self.above_since is not None:
            limits.append(self.above_since - WINDOW_STEPS)
        return max(-1, min(limits))

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads."""
        values = dataclasses.asdict(self)
        del values["recent"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> "LearningHealth":
        """The inverse of `to_json`, without recent losses; None: an older checkpoint without this
        state.
        """
        known = {field.name for field in dataclasses.fields(cls)} - {"recent"}
        return cls(**{name: value for name, value in (values or {}).items() if name in known})


def makes_update(record: StepRecord) -> bool:
    """Whether a step updated the weights: finite loss, and a finite gradient that is not zero."""
    return (
        not record.skipped
        and math.isfinite(record.loss)
        and math.isfinite(record.grad_norm)
        and record.grad_norm > 0
    )


def _searches_scale(record: StepRecord) -> bool:
    """Whether a skipped step only lowers the f16 loss scale."""
    return record.skipped and record.loss_scale is not None and record.loss_scale > MIN_LOSS_SCALE


def describe_trouble(learning: LearningHealth, trouble: Trouble) -> str:
    """The trouble, in one sentence."""
    match trouble:
        case "weights":
            return f"the weights are not finite any more: {learning.broken}"
        case "evaluation":
            return (
                f"the held-out loss is not finite ({learning.bad_evaluations} evaluation(s) in a"
                " row)"
            )
        case "no update":
            since = f", since step {learning.first_skipped}" if learning.first_skipped else ""
            return (
                f"no update in {learning.skipped} step(s) in a row{since}: loss or gradient was not"
                " finite, or the gradient zero"
            )


def rollback_advice(learning: LearningHealth, steps: Iterable[int]) -> str:
    """Advice on how to continue from the newest good checkpoint.

    Args:
      steps: steps of all existing checkpoints.
    """
    if (good := newest(steps, learning.good_limit)) is not None:
        return (
            f"go back to the checkpoint of step {good}, from before, by --resume --set"
            f" checkpoint.resume_step={good}"
        )
    if (
        learning.first_skipped is not None
        and (before := newest(steps, learning.first_skipped - 1)) is not None
    ):
        return (
            f"begin a new run: the newest checkpoint from before is that of step {before}, whose"
            " weights have failed in every step since (to try them anyway: --resume --set"
            f" checkpoint.resume_step={before})"
        )
    return "begin a new run: there is no checkpoint from before"


def newest(steps: Iterable[int], limit: int) -> int | None:
    """The largest step that is not above the limit; None: there is none."""
    return max((step for step in steps if step <= limit), default=None)


def learning_error(
    learning: LearningHealth,
    trouble: Trouble,
    config: Config,
    steps: Iterable[int],
    *,
    step: int,
    last: StepRecord | None,
    lr: float,
    usual_lr: float | None,
) -> LearningError:
    """The error that ends a run after `step`.

    Args:
      steps: steps of all existing checkpoints.
      last: the record of the last step; None: no step was run since the start.
      lr: peak learning rate of the run.
      usual_lr: default peak learning rate for a model of this size; None: the optimizer has none.
    """
    numbers = (
        ""
        if last is None
        else f"; loss {last.loss:g}, gradient norm {last.grad_norm:g}, learning rate {last.lr:g}"
    )
    lower = min(lr / 3, lr if usual_lr is None else usual_lr)
    changes = [
        "a lower learning rate of the optimizer that the program gives"
        if config.optimizer.name == IN_PYTHON
        else f"a lower peak learning rate, such as --lr {lower:.2g} (it is {lr:.2g})"
    ]
    if not config.optimizer.clip_norm:
        changes.append("clipping, --set optimizer.clip_norm=1 (it is 0, which does not clip)")
    if last is not None and last.loss_scale is not None:
        changes.append("--precision bf16 or f32 (it is f16)")
    elif config.precision.compute == "bf16":
        changes.append("--precision f32 (it is bf16)")
    if config.optimizer.name != IN_PYTHON:
        changes.append("a longer optimizer.warmup_steps")
    if learning.good < 0:
        changes.append("a smaller model.init_std, if the first loss was not finite")
    return LearningError(
        explain(
            f"the run no longer learns: {describe_trouble(learning, trouble)}",
            given=(
                f"step {step}{numbers};"
                f" optimizer.max_skipped_steps={config.optimizer.max_skipped_steps}"
            ),
            do=(
                f"{rollback_advice(learning, steps)}; and change something, or the same will"
                f" happen again: {'; '.join(changes)}"
            ),
        )
    )
