"""Interfaces of step watchers and displays, as the training loop and the controller use them.

run/display.py has the displays.
"""

from collections.abc import Sequence
from typing import Protocol, Self

from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.training.numbers import short


class StepWatcher(Protocol):
    """Receives every step and evaluation."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(
        self, step: int, loss: float, perplexity: float, bits_per_byte: float | None
    ) -> None: ...


class Display:
    """A display that shows nothing; base class of the others. Displays are context managers around
    training."""

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""

    def evaluation(
        self, step: int, loss: float, perplexity: float, bits_per_byte: float | None
    ) -> None:
        """Show an evaluation on held-out text."""
        text = f"step {step}  held-out loss {short(loss, 4)}  perplexity {short(perplexity, 2)}"
        self.message(
            text if bits_per_byte is None else f"{text}  {short(bits_per_byte, 4)} bits/byte"
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
