"""What a source of samples is, and what happens when one breaks.

A *source* measures one or a few signals. It is polled at step boundaries, must not wait for
anything, and whatever it raises stays here: its signals become unknown and the reason is told once.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

POLL_S = 1.0
"""Least time between two polls of a source."""
ABSENT_S = 60.0
"""The same once there was nothing to poll: a driver may come, but not soon."""


class Absent(Exception):
    """What would be measured does not exist here (no such driver, no other process); no fault, and
    no reason to warn anyone.
    """


class Source(Protocol):
    """Measures something at step boundaries."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of what it measures; a name that ends in `/` stands for all that begin with it."""
        ...

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """New samples by signal, after `step`; None: none yet, ask again at the next boundary.

        Raises Absent, or anything.
        """
        ...

    def close(self) -> None:
        """Let go what it holds."""
        ...


class Guard:
    """Around what a source does: whatever it raises becomes a reason.

    Args:
      name: of the source.
      signals: that it measures.
      warn: told once for each kind of error.
    """

    def __init__(self, name: str, signals: tuple[str, ...], warn: Callable[[str], object]) -> None:
        self.name, self.signals = name, signals
        self.missing: str | None = None
        """Why its signals are unknown; None: they are not, or nothing is known of it yet."""
        self.is_absent = False
        """Whether that is because there is no such thing here."""
        self._warn = warn
        self._told: set[type[Exception]] = set()

    def samples(self, work: Callable[[], Mapping[str, float] | None]) -> Mapping[str, float] | None:
        """Those of `work`; empty if it raises."""
        try:
            samples = work()
        except Exception as error:
            self.is_absent = isinstance(error, Absent)
            self.missing = str(error) if self.is_absent else f"{type(error).__name__}: {error}"
            # Messages may hold addresses or times, that differ from one second to the next.
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
    """A source that is polled now and then and cannot harm a run.

    Args:
      source: what to poll.
      warn: told once for each kind of error that keeps it from being measured.
      every_s: least seconds between two answers.
    """

    def __init__(
        self, source: Source, warn: Callable[[str], object], every_s: float = POLL_S
    ) -> None:
        self.guard = Guard(source.name, source.signals, warn)
        self.every_s = every_s
        self._source = source
        self._due_s = -math.inf

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """Its new samples; empty if it is broken; None: nothing new, or it is not its turn."""
        if now_s < self._due_s:
            return None
        samples = self.guard.samples(lambda: self._source.poll(step, now_s))
        if samples is not None:
            self._due_s = now_s + (ABSENT_S if self.guard.is_absent else self.every_s)
        return samples

    def close(self) -> None:
        """Let go what the source holds."""
        self.guard.samples(lambda: self._source.close())
