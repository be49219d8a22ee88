"""Stopping when asked: signals become a request that the trainer reads between two steps.

`jax.distributed.initialize` starts a preemption service that puts its own SIGTERM handler underneath Python's, which
then never runs although `signal.getsignal` still shows it. So whoever calls it does this first, on every process:

    jax.config.update("jax_enable_preemption_service", False)

Orbax takes that to mean "no preemption". A request is known only to the process that got the signal; processes that
train together have to agree on the step that they stop after.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Literal, Self

EXIT_RESTART = 75
"""Exit code (EX_TEMPFAIL) of a run that was stopped and is worth starting again with --resume."""


class StopRequest:
    """While entered, remembers the first SIGINT (Ctrl-C) or SIGTERM instead of dying of it.

    Ctrl-C while a stop is already asked for raises KeyboardInterrupt at once. Python hands signals to its main thread
    alone: entered from another one, this changes nothing and never has a reason.
    """

    def __init__(self) -> None:
        self.reason: Literal["interrupt", "terminate"] | None = None
        self._previous = {}

    @property
    def exit_code(self) -> int:
        """What the program should end with: a person who stops a run is done, a cluster that ends it wants it back."""
        return EXIT_RESTART if self.reason == "terminate" else 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = "interrupt" if number == signal.SIGINT else "terminate"
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
