"""Who is shown a run while it trains: what a display is to the training loop and to the controller.

run/display.py has those that show.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.training.numbers import short


class StepWatcher(Protocol):
    """Is shown every step and evaluation."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(
        self, step: int, loss: float, perplexity: float, bits_per_byte: float | None
    ) -> None: ...


class Display:
    """Shows nothing. The base of the displays that do, which are entered around training."""

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

    def here(self, text: str) -> None:
        """Show a line that only this process can know of."""
        self.message(text)

    def decision(self, text: str) -> None:
        """Show what the controller has decided, and why."""
        self.message(f"controller: {text}")

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Show rows with aligned columns; as `message`, also outside of the `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass
