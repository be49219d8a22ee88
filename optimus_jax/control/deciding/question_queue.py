"""The queue of questions for the controller: the open question, the waiting one, and the time of
the next review.

Only one question is open at a time, because the search for its answer may take many steps.
"""

import math
from dataclasses import dataclass, replace

from optimus_jax.control.deciding.options import PlanInUse
from optimus_jax.data.batch import BatchShape


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to decide."""

    trigger: str
    """What caused the question, in words."""
    batch: BatchShape
    """The batch shape that the question is about."""
    mandatory: bool = False
    """The present plan cannot be kept."""
    at_step: int | None = None
    """Step boundary at which the switch would be made; None: as soon as possible."""
    only: PlanInUse | None = None
    """The only plan to consider; None: all plans."""

    @property
    def is_pressing(self) -> bool:
        """Whether the question is mandatory or tied to a step boundary."""
        return self.mandatory or self.at_step is not None


class QuestionQueue:
    """The open and the waiting question of one run. Empty at first."""

    def __init__(self) -> None:
        self.question: Question | None = None
        """The open question; None: there is none."""
        self.forced: Question | None = None
        """The mandatory question whose switch is not done yet."""
        self._later: Question | None = None
        """The waiting question, which arrived while another was open."""
        self._review_step, self._review_s = math.inf, math.inf

    def put(self, asked: Question) -> None:
        """Open this question. If the open one is pressing and this one is not mandatory, this one
        waits.
        """
        if self.question is not None and self.question.is_pressing and not asked.mandatory:
            self._later = asked
        else:
            self.question = asked

    def answer(self, *, is_switch: bool) -> None:
        """Close the open question and open the waiting one. A switch answers both."""
        self.question, self._later = None if is_switch else self._later, None

    def enter(self, batch: BatchShape) -> None:
        """Begin another batch: the open question is now about it, the waiting one is dropped."""
        if self.question is not None:
            self.question = replace(self.question, batch=batch, at_step=None)
        self._later = None

    def reopen(self) -> None:
        """After a decided switch turned out impossible, ask the mandatory question behind it again
        and drop all others.
        """
        self.question, self._later = self.forced, None

    def clear(self, review_step: float) -> None:
        """Drop all questions and set the next review to this step."""
        self.question = self._later = None
        self._review_step, self._review_s = review_step, math.inf

    def postpone(self, review_step: float) -> None:
        """Move the next review by step to this step. A review by the clock stays due."""
        self._review_step = review_step

    def look_again(self, *, step: float = math.inf, time_s: float = math.inf) -> None:
        """Schedule a review at this step or time at the latest."""
        self._review_step, self._review_s = (
            min(self._review_step, step),
            min(self._review_s, time_s),
        )

    def is_review_due(self, step: int, time_s: float) -> bool:
        """Whether a review is due. Returns True once per scheduled review."""
        if step < self._review_step and time_s < self._review_s:
            return False
        self._review_step = self._review_s = math.inf
        return True
