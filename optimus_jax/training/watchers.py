"""Interfaces of what the training loop tells of its steps: watchers, the controller, the profiler
and displays.

run/display.py has the displays.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from optimus_jax.data.batch import HostBatch
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
from optimus_jax.training.callbacks import eval_record_of
from optimus_jax.training.numbers import short
from optimus_jax.training.step import Program


class StepWatcher(Protocol):
    """Receives every step and evaluation."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...


class ControllerHooks(StepWatcher, Protocol):
    """The interface of the controller (control/controller.py) that the loop needs: it measures the
    run and may request another plan.
    """

    def dispatched(self, *, dispatch_s: float, batch: HostBatch) -> None:
        """A step was dispatched to the devices."""
        ...

    def pauses_for(self, step: int) -> Literal["probe", "compile"] | None:
        """What to wait for the devices for after `step`, and then call `pause`; None: nothing."""
        ...

    def pause(self, step: int) -> None:
        """The devices have finished `step` and are idle."""
        ...

    @property
    def is_on_trial(self) -> bool:
        """Whether the plan is on trial and will be rolled back if it does not train; equal in all
        processes.
        """
        ...

    def leaves(self, step: int) -> bool:
        """Whether to switch to another plan after `step`; equal in all processes."""
        ...


class ProfilerHooks(Protocol):
    """The interface of the profiler (run/step_profiler.py) that the loop needs. Every process calls
    it alike.
    """

    @property
    def is_tracing(self) -> bool:
        """Whether a trace is under way."""
        ...

    def begins_after(self, step: int) -> bool:
        """Whether `start` is due after `step`."""
        ...

    def ends_after(self, step: int) -> bool:
        """Whether `stop` is due after `step`."""
        ...

    def start(self, step: int) -> None:
        """Trace from the step after `step` on; the devices are idle."""
        ...

    def stop(self, step: int, program: Program, train_step: Any) -> None:
        """End after `step` what was started, if anything."""
        ...

    def abandon(self) -> None:
        """End it without a result, after an error; does nothing if nothing was started."""
        ...


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
        """Show an evaluation on held-out data."""
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
