"""Follows the conditions and the level of step times of a run, and how long both last.

Readings are compared with step times in deciding/believed_conditions.py. Step times that change
without a reading that explains the change begin an unexplained regime (deciding/step_levels.py).
"""

from collections.abc import Collection, Mapping

from optimus_jax.control import constants
from optimus_jax.control.deciding.believed_conditions import BelievedConditions, LogTimeOf
from optimus_jax.control.deciding.changes import ChangeDetector
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.last_seen import LastSeen
from optimus_jax.control.deciding.regimes import Regimes
from optimus_jax.control.deciding.step_levels import StepLevels, sane
from optimus_jax.control.deciding.value import Regime
from optimus_jax.control.signals import Observation, SignalSummary


class Watch:
    """What one run observes of its conditions."""

    def __init__(self) -> None:
        self._steps = StepLevels()
        self._believed = BelievedConditions(self._steps)
        self.regimes = Regimes()
        """The regimes so far."""
        self._last_seen, self._now_s = LastSeen(), 0.0
        self._unseen: set[str] = set()
        """Factors that are not normal and were not seen of late."""
        self._left_in = self.believed
        """What was believed of conditions when the run left a plan or batch."""

    @property
    def believed(self) -> Conditions:
        """The present conditions of all processes, as estimated."""
        return self._believed.present

    @property
    def normal(self) -> Conditions:
        """The conditions of the run's first steps."""
        return self._believed.normal

    @property
    def conditions(self) -> Conditions:
        """The present conditions of the processes in use, as estimated."""
        in_use = self._believed.in_use
        return self.believed if in_use is None else self.believed.among(in_use)

    @property
    def was_so(self) -> Mapping[str, float]:
        """Factors that the last observation revealed and that may have held from the start."""
        return self._believed.was_so

    @property
    def since_switch(self) -> bool:
        """Whether conditions that the last observation revealed have been there since the run
        switched to the plan.
        """
        return self._believed.since_switch

    @property
    def rejected_signals(self) -> Mapping[str, float]:
        """Factors whose readings are rejected, with the values that they claim."""
        return self._believed.rejected_signals

    @property
    def regime(self) -> int:
        """Number of the unexplained regime; 0: none."""
        return self._steps.regime

    @property
    def unexplained(self) -> float:
        """Level of step times over that before the unexplained regime; 0: there is none."""
        return self._steps.unexplained

    @property
    def detector(self) -> ChangeDetector:
        """The step times under the present plan in present conditions."""
        return self._steps.detector

    @property
    def is_contradicted(self) -> bool:
        """Whether step times are far from those in the conditions that are believed."""
        return self._steps.is_contradicted

    @property
    def is_suspicious(self) -> bool:
        """Whether the newest steps are unlike those in the conditions that are believed."""
        return self.detector.suspects >= constants.MIN_SUSPECT_STEPS or self.is_contradicted

    @property
    def changed_s(self) -> float | None:
        """When step times last changed, or seemed to, without a reading that explained it, on the
        run's clock; None: never.
        """
        return self._steps.changed_s

    @property
    def is_disturbed(self) -> bool:
        """Whether conditions are not those of the first steps."""
        return self.regime != 0 or self.believed != self.normal

    def regime_at(self, time_s: float) -> Regime:
        """The present regime: how long it has lasted, and how long such regimes last."""
        return self.regimes.at(time_s, is_disturbed=self.is_disturbed)

    @property
    def wants_probe(self) -> bool:
        """Whether step times and readings do not agree, so that more readings would help."""
        return (
            self.regime != 0
            or self._believed.wants_reading
            or self._steps.is_alarmed
            or self._steps.is_contradicted
        )

    @property
    def probe_worth_s(self) -> float:
        """Time that probes for the cause of a change of step times may take."""
        return constants.PROBE_SHARE_OF_LOSS * max(0.0, self._steps.lost_s)

    @property
    def steps_alike(self) -> int:
        """Number of newest steps in present conditions; while a change is suspected, of those that
        indicate it.
        """
        return self.detector.suspects or self.detector.count

    @property
    def recovered(self) -> dict[str, float]:
        """Factors that are not normal, and that neither readings nor step times have shown of late,
        with the probability that each is normal again.
        """
        return self._last_seen.over(
            self.believed.differing(self.normal), self.regime_at(self._now_s), self._now_s
        )

    def confirm(self, time_s: float) -> None:
        """Record that a trial has shown the disturbance not to be over."""
        self._last_seen.felt(self.believed.differing(self.normal), time_s)

    def restart(
        self,
        in_use: Collection[int] | None = None,
        *,
        on_trial: bool = False,
        expected: float | None = None,
    ) -> None:
        """Begin anew for another plan or batch, whose step times have another level.

        Args:
          in_use: the processes that the plan uses; None: all.
          on_trial: whether the plan is on trial, after which the run may go back.
          expected: logarithm of the step time that is expected of it now; None: unknown.
        """
        self._left_in = self.believed
        self._steps.restart(on_trial=on_trial, expected=expected)
        self._believed.restart(in_use)

    def go_back(self, in_use: Collection[int]) -> None:
        """Go back to the plan before the one that was on trial, whose step times are known if
        nothing else is believed of conditions since.
        """
        if self.believed == self._left_in:
            self._steps.go_back()
        else:
            self._steps.restart()
        self._believed.restart(in_use)

    def observe(
        self,
        observation: Observation,
        claims: Mapping[str, SignalSummary],
        log_time_of: LogTimeOf,
        expected_of: LogTimeOf | None = None,
        otherwise_of: LogTimeOf | None = None,
    ) -> str:
        """Process an observation. Returns what has changed, in words; empty: nothing.

        Args:
          observation: new step times and readings.
          claims: usable readings of factors, by name.
          log_time_of: logarithm of the present plan's step time in given conditions, by the cost
            model.
          expected_of: the same by all that was learnt; None: as the cost model.
          otherwise_of: the same without what was learnt of this plan in the conditions that are
            believed; None: as the cost model.
        """
        self._now_s = observation.time_s
        self.regimes.start(observation.time_s - sum(sane(observation.step_times_s)))
        was_disturbed, believed, regime = self.is_disturbed, self.believed, self.regime
        change = self._steps.add(observation)
        news = [self._steps.turn(change)] if change else []
        news.append(
            self._believed.update(
                claims,
                self.recovered,
                log_time_of,
                expected_of or log_time_of,
                otherwise_of or log_time_of,
            )
        )
        self._note_seen(observation, claims, log_time_of)
        unseen = self.recovered.keys()
        if lost := sorted(unseen - self._unseen):
            news.append(" and ".join(f"{name} is not measured any more" for name in lost))
        self._unseen = set(unseen)
        # A regime that a reading now explains has not changed by that.
        is_explained = regime != 0 and self.regime == 0 and self.is_disturbed
        is_other = (self.believed, self.regime) != (believed, regime)
        if is_other and not self.was_so and not is_explained:
            num_steps = change.num_steps if change else constants.NUM_RECENT_STEPS
            begun_s = observation.time_s - self._steps.newest_s * num_steps
            self._turn(was_disturbed, believed, begun_s)
        return "; ".join(filter(None, news))

    def _note_seen(
        self,
        observation: Observation,
        claims: Mapping[str, SignalSummary],
        log_time_of: LogTimeOf,
    ) -> None:
        """Note which factors were read, and which step times agree with."""
        self._last_seen.read(claims, observation.time_s)
        if self.regime == 0 and self._steps.recent is not None:
            disturbed = self.believed.differing(self.normal)
            self._last_seen.felt(self._believed.felt(disturbed, log_time_of), observation.time_s)

    def _turn(self, was_disturbed: bool, before: Conditions, begun_s: float) -> None:
        """Begin another regime if conditions have changed by enough."""
        if not self._steps.newest_s:  # no step has been seen in any conditions
            return
        if (
            was_disturbed == self.is_disturbed
            and before.distance(self.believed) < constants.MIN_REGIME_CHANGE
        ):
            return
        if not self.is_disturbed and self.regimes.is_first:  # conditions turned out normal
            return
        self.regimes.turn(begun_s, self._steps.newest_s, was_disturbed=was_disturbed)
