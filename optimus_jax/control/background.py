"""Work that must not hold up a step: drivers and file servers answer when they like.

A step boundary hands a job over and takes the result at a later one. A job that never ends costs
its own signals, which go stale, and nothing else: the thread does not keep the program from ending.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
Start = Callable[[Callable[[], None]], None]
"""Has a job done, at once or later."""


class Worker:
    """A thread that does jobs one after the other; it is made for the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __call__(self, job: Callable[[], None]) -> None:
        """Have `job` done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after its present job; does not wait for that.

        Jobs that it has not begun are not done.
        """
        self._is_closed = True
        self._jobs.put(None)

    def finish(self) -> None:
        """End the thread, and wait until its present job is done."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            job()


class Asked(Generic[T]):
    """A question that is asked again once the last answer was taken.

    Args:
      question: what takes its time; may raise.
      start: who runs it.
    """

    def __init__(self, question: Callable[[], T], start: Start) -> None:
        self._question, self._start = question, start
        self._answers: SimpleQueue[T | Exception] = SimpleQueue()
        self._is_open = False

    def take(self) -> T | None:
        """The answer, if there is one, and ask again; None while there is none.

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
