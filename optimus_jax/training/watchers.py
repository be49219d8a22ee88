"""Interfaces of step watchers and displays, as the training loop and the controller use them.

run/display.py has the displays.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
from optimus_jax.training.callbacks import eval_record_of
from optimus_jax.training.numbers import short


class StepWatcher(Protocol):
    """Receives every step and evaluation."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...


class Display:
    """A display that shows nothing; base class of the others. Displays are context managers around
    training, and listen to what the run records (run_directory/listeners.py)."""

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Show evaluations."""
        if event["event"] == "eval" and event["loss"] is not None:
            self.evaluation(eval_record_of(event))

    def evaluation(self, record: EvalRecord) -> None:
        """Show an evaluation on held-out text."""
        bits, perplexity = record.bits_per_byte, record.perplexity
        self.message(
            "  ".join(
                [
                    f"step {record.step}",
                    f"held-out loss {short(record.loss, 4)}",
                    *([] if perplexity is None else [f"perplexity {short(perplexity, 2)}"]),
                    *([] if bits is None else [f"{short(bits, 4)} bits/byte"]),
                    *metrics_text(record.metrics),
                ]
            )
        )

    def message(self, text: str) -> None:
        """Show a line of text."""

    def process_message(self, text: str) -> None:
        """Show a line about this process only."""
        self.message(text)

    def decision(self, text: str) -> None:
        """Show a decision of the controller, with its reason."""
        self.message(f"controller: {text}")

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Show rows with aligned columns; like `message`, it works outside the `with` block too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def metrics_text(metrics: Mapping[str, float]) -> list[str]:
    """A text for every metric of a task: `accuracy 0.4213`."""
    return [f"{name} {short(value, 4)}" for name, value in metrics.items()]
