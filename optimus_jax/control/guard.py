"""The interface of a source of samples, and the handling of its errors.

A *source* measures one or a few signals. It is polled at step boundaries and must not block.
Whatever it raises is caught here: its signals become unknown, and the reason is reported once.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

POLL_S = 1.0
"""Shortest time between two polls of a source, in seconds."""
ABSENT_S = 60.0
"""The same for a source that is absent: a driver may be installed later, but not soon."""


class Absent(Exception):
    """The thing to be measured does not exist here (no such driver, no other process).

    This is not a fault, and causes no warning.
    """


class Source(Protocol):
    """Measures something at step boundaries."""

    @property
    def name(self) -> str:
        """Name shown in messages."""
        ...

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of its signals; a name that ends in `/` stands for all that begin with it."""
        ...

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """New samples by signal, after `step`; None: none yet, ask again at the next boundary.

        Raises Absent, or any other exception.
        """
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class Guard:
    """Calls a source, catches whatever it raises, and remembers the reason.

    Args:
      name: name of the source.
      signals: names of the signals that it measures.
      warn: called once for each kind of error.
    """

    def __init__(self, name: str, signals: tuple[str, ...], warn: Callable[[str], object]) -> None:
        self.name, self.signals = name, signals
        self.missing: str | None = None
        """Why its signals are unknown; None: they are known, or it was not polled yet."""
        self.is_absent = False
        """Whether the reason is that the thing to be measured does not exist here."""
        self._warn = warn
        self._told: set[type[Exception]] = set()

    def samples(self, work: Callable[[], Mapping[str, float] | None]) -> Mapping[str, float] | None:
        """The samples that `work` returns; empty if it raises."""
        try:
            samples = work()
        except Exception as error:
            self.is_absent = isinstance(error, Absent)
            self.missing = str(error) if self.is_absent else f"{type(error).__name__}: {error}"
            # Messages may contain addresses or times, so errors are told apart by type.
            if not self.is_absent and type(error) not in self._told:
                self._told.add(type(error))
                self._warn(
                    f"{self.name} cannot be measured ({self.missing}); {', '.join(self.signals)}"
                    " stay unknown until it can"
                )
            return {}
        if samples is not None:
            self.missing, self.is_absent = None, False
        return samples


class Polled:
    """Polls a source from time to time, such that its errors do not reach the run.

    Args:
      source: the source to poll.
      warn: called once for each kind of error of the source.
      every_s: shortest time between two answers, in seconds.
    """

    def __init__(
        self, source: Source, warn: Callable[[str], object], every_s: float = POLL_S
    ) -> None:
        self.guard = Guard(source.name, source.signals, warn)
        self.every_s = every_s
        self._source = source
        self._due_s = -math.inf

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """Its new samples; empty: it is broken; None: there is nothing new, or no poll is due."""
        if now_s < self._due_s:
            return None
        samples = self.guard.samples(lambda: self._source.poll(step, now_s))
        if samples is not None:
            self._due_s = now_s + (ABSENT_S if self.guard.is_absent else self.every_s)
        return samples

    def close(self) -> None:
        """Release what the source holds."""
        self.guard.samples(lambda: self._source.close())
