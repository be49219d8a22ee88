"""The interface of what is told of everything that a run records."""

from collections.abc import Mapping
from typing import Any, Protocol

from optimus_jax.run_directory.step_record import StepRecord


class RunListener(Protocol):
    """Is told what a run records, in every process, by the thread that records it."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Something has happened: an event as in events.jsonl."""
        ...
