"""Runs slow work in a thread, so that it does not delay a step: drivers and file servers may take
long to answer.

A job is started at one step boundary, and its result is taken at a later one. If a job never ends,
only its own signals go stale: it runs in a daemon thread, which does not keep the program alive.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
StartThread = Callable[[Callable[[], None]], None]
"""Starts a job; it may run at once or later."""


class Worker:
    """A thread that does jobs one after the other; it is started with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __call__(self, job: Callable[[], None]) -> None:
        """Queue `job`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after its current job, without waiting for that.

        Queued jobs are dropped.
        """
        self._is_closed = True
        self._jobs.put(None)

    def finish(self) -> None:
        """End the thread, and wait until its current job is done."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            job()


class Asked(Generic[T]):
    """Calls a slow function in the background, again and again.

    Args:
      question: the slow function; may raise.
      start: runs it.
    """

    def __init__(self, question: Callable[[], T], start: StartThread) -> None:
        self._question, self._start = question, start
        self._answers: SimpleQueue[T | Exception] = SimpleQueue()
        self._is_open = False

    def take(self) -> T | None:
        """Take the answer, or return None if there is none yet. The next call asks again.

        Raises what the question has raised.
        """
        if not self._is_open:
            self._is_open = True
            self._start(self._ask)
        if self._answers.empty():
            return None
        answer, self._is_open = self._answers.get(), False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self) -> None:
        try:
            self._answers.put(self._question())
        except Exception as error:
            self._answers.put(error)
