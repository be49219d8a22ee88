"""Follows the level of step times under the present plan, and finds what changes it.

A change that no reading explains begins an *unexplained regime*, which may affect every plan. It
ends when step times are back at the level before it, also under another plan.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from optimus_jax.control import constants
from optimus_jax.control.deciding.changes import Change, ChangeDetector
from optimus_jax.control.signals import Observation


@dataclass
class _PlanLevels:
    """What step times under one plan have shown, as logarithms."""

    detector: ChangeDetector = field(default_factory=ChangeDetector)
    anchor: float | None = None
    """Level before the unexplained regime."""
    base: float | None = None
    """First level in the conditions that are believed, which a slow drift does not move; None: not
    known yet."""
    accepted: float | None = None
    """Level at which the conditions that are believed were accepted. A change that comes too soon
    after that for the detector shows by it."""
    expected: float | None = None
    """Level that was expected when the run switched to the plan, in the conditions believed then;
    None: unknown."""
    num_steps: int = 0


class StepLevels:
    """The levels of a run's step times, as logarithms of seconds."""

    def __init__(self) -> None:
        self._plan = _PlanLevels()
        self.regime = 0
        """Number of the unexplained regime; 0: none."""
        self.changed_s: float | None = None
        """When step times last changed, or seemed to, without a reading that explained it, on the
        run's clock; None: never."""
        self.is_alarmed = False
        """Whether the newest step took far longer than usual."""
        self.lost_s = 0.0
        """Extra time of the steps in the last change, or seeming change."""
        self.num_steps = 0
        """Number of steps seen."""
        self.newest_s = 0.0
        """Time of the newest of them; 0: none yet, as while a plan is compiled."""
        self._excess: float | None = None
        """Level over `anchor` when the run left a plan or batch in an unexplained regime. It is
        assumed to be the same under the next ones."""
        self._skipped = self._num_regimes = 0
        self._left: tuple[int, _PlanLevels] | None = None
        """Regime and levels under the plan before the one on trial."""

    @property
    def detector(self) -> ChangeDetector:
        """Finds changes of the level under the plan."""
        return self._plan.detector

    @property
    def unexplained(self) -> float:
        """Level over `anchor`, as a logarithm; 0: the regime is explained, or it is not known."""
        if not self.regime or self.anchor is None or self.detector.level is None:
            return 0.0
        return self.detector.level - self.anchor

    @property
    def anchor(self) -> float | None:
        """Level before the unexplained regime; None: none has begun, or the level is unknown."""
        return self._plan.anchor

    @property
    def recent(self) -> float | None:
        """Level of the newest steps; None: there are too few."""
        return self.detector.recent(constants.NUM_RECENT_STEPS)

    @property
    def before(self) -> float | None:
        """Level from which the newest change is measured; None: unknown."""
        return self.anchor if self.regime else self.detector.level

    @property
    def seen_changes(self) -> list[float]:
        """Change of the newest steps from the level before, from the first level, from which a slow
        drift is measured, and from that at which conditions were accepted; empty: a level is
        unknown.
        """
        if (level := self.recent) is None or self.before is None:
            return []
        others = () if self.regime else (self._plan.base, self._plan.accepted)
        return [level - self.before, *[level - other for other in others if other is not None]]

    @property
    def off_from_start(self) -> float | None:
        """How far steps under the plan are from what was expected when the run switched to it.
        None: unknown, or they have had more than one level since.
        """
        level, expected = self.recent, self._plan.expected
        if (
            level is None
            or expected is None
            or self.regime
            or self.detector.count < self._plan.num_steps
        ):
            return None
        return level - expected

    @property
    def is_contradicted(self) -> bool:
        """Whether the level is far from that at which the conditions that are believed were
        accepted.
        """
        return self._contradiction is not None

    @property
    def _contradiction(self) -> Change | None:
        level, accepted = self.detector.level, self._plan.accepted
        if (
            level is None
            or accepted is None
            or self.regime
            or abs(level - accepted) <= constants.MIN_REGIME_CHANGE
        ):
            return None
        return Change(before=accepted, after=level, num_steps=self.detector.count)

    @property
    def has_switched(self) -> bool:
        """Whether a switch led to the present plan, with the present batches."""
        return self._left is not None

    @property
    def is_early(self) -> bool:
        """Whether there are too few steps under this plan for a level."""
        return self._plan.num_steps < constants.MIN_LEVEL_STEPS

    def restart(self, *, on_trial: bool = False, expected: float | None = None) -> None:
        """Begin anew for another plan or batch, whose step times have another level.

        Args:
          on_trial: whether the run may go back, with `go_back`.
          expected: that level as it is expected in the conditions that are believed; None: unknown.
        """
        self._left = (self.regime, self._plan) if on_trial else None
        if self.regime and self.anchor is not None and self.detector.level is not None:
            self._excess = self.detector.level - self.anchor
        self._plan, self._skipped, self.is_alarmed = _PlanLevels(expected=expected), 0, False

    def go_back(self) -> None:
        """Go on with what was known before the plan that was on trial: step times that differ from
        that show at once that conditions have changed.
        """
        left = self._left
        self.restart()
        if left is not None and left[0] == self.regime:
            self._plan = left[1]

    def add(self, observation: Observation) -> Change | None:
        """Add step times; returns a change if one is found."""
        found = None
        for step_time_s in sane(observation.step_times_s):
            found = self._add(step_time_s, observation.time_s) or found
        if found and not self.is_alarmed:  # after an alarm the time is known already
            self.changed_s = observation.time_s - self.newest_s * found.num_steps
            self.lost_s = found.num_steps * (math.exp(found.after) - math.exp(found.before))
        return found

    def _add(self, step_time_s: float, time_s: float) -> Change | None:
        self.newest_s = step_time_s
        self.num_steps += 1
        if self._skipped < constants.NUM_SKIPPED_STEPS:
            self._skipped += 1
            return None
        self._plan.num_steps += 1
        value = math.log(step_time_s)
        before = self.detector.level if self.detector.count >= constants.MIN_LEVEL_STEPS else None
        change = self.detector.add(value) or self._drifted()
        level = self.detector.level if self.detector.count >= constants.MIN_LEVEL_STEPS else None
        if change:
            self._plan.base = self._plan.accepted = None
        elif self._plan.base is None:
            self._plan.base = level
        if self.regime and self.anchor is None and self._excess is not None and level is not None:
            self._plan.anchor = level - self._excess
        is_alarming = before is not None and value - before > constants.ALARM_LOG_RATIO
        if is_alarming and not self.is_alarmed:
            self.changed_s = time_s - step_time_s
            self.lost_s = step_time_s - math.exp(before or 0.0)
        self.is_alarmed = is_alarming
        return change

    def _drifted(self) -> Change | None:
        """A change that came so slowly, or so soon after another, that the level went with it."""
        if (found := self._contradiction) and found.num_steps >= constants.MIN_LEVEL_STEPS:
            return found
        level, base = self.detector.level, self._plan.base
        if base is None or level is None or abs(level - base) < constants.MIN_LEVEL_SHIFT:
            return None
        return Change(before=base, after=level, num_steps=constants.MIN_LEVEL_STEPS)

    def turn(self, change: Change) -> str:
        """Begin or end an unexplained regime by a change; returns which, in words."""
        if self.regime == 0:
            self._plan.anchor = change.before
        elif self.anchor is not None and abs(change.after - self.anchor) < constants.SAME_LEVEL:
            self.explain()
            return "step times are back to what they were"
        self._num_regimes += 1
        self.regime = self._num_regimes
        share = math.exp(change.after - change.before) - 1
        return f"steps take {abs(share):.0%} {'more' if share > 0 else 'less'} time than before"

    def explain(self) -> None:
        """End the unexplained regime. A level that the newest steps have left was not of it."""
        self.regime, self._excess = 0, None
        level = self.detector.level
        if level is not None and abs((self.recent or level) - level) > constants.MIN_LEVEL_SHIFT:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Forget step times: conditions that have just been accepted have another level."""
        # The step in which conditions changed is half a slow one.
        suspects = self.detector.suspects
        known = self.detector.recent(suspects) if suspects >= constants.NUM_COMPARED_STEPS else None
        self._plan.accepted = self.recent if known is None else known
        self._plan.detector, self._plan.base, self._plan.expected = ChangeDetector(), None, None


def sane(step_times_s: Iterable[float]) -> list[float]:
    """Those that are times."""
    return [time_s for time_s in step_times_s if math.isfinite(time_s) and time_s > 0]
