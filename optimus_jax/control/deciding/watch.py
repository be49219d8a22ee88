"""Estimates the present conditions by comparing signal readings with step times.

A reading that indicates other conditions is accepted if step times have changed as the cost model
predicts, or if its quality is good and the present plan would not be affected. It is rejected if
step times should have changed and did not; readings of the same family are rejected with it. Step
times that change without a reading that explains the change begin an unexplained regime, which may
affect every plan.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from optimus_jax.control.deciding.changes import MIN_STEPS, SHIFT, Change, ChangeDetector
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.factors import (
    MIN_LOG_CHANGE_OF_PROCESS,
    family_of,
    in_words,
    min_log_change,
    on_grid,
    process_of,
)
from optimus_jax.control.deciding.last_seen import LastSeen
from optimus_jax.control.deciding.regimes import Regimes
from optimus_jax.control.deciding.value import Regime
from optimus_jax.control.signals import Observation, SignalSummary

MIN_EFFECT = 0.05
"""Least predicted change of log step time that step times can confirm or contradict."""
MIN_AGREEMENT = 0.35
"""Least ratio of observed to predicted change, and of predicted to observed change, at which a
reading counts as confirmed."""
ALARM_LOG_RATIO = math.log(2.0)
"""Log ratio to the usual step time from which a single slow step triggers a probe at once."""
PROBE_SHARE_OF_LOSS = 0.25
"""Share of the time lost to slower steps that probes for the cause may take."""
NUM_RECENT_STEPS = 5
"""Number of newest step times that a reading is first compared with."""
MAX_UNCONFIRMED_STEPS = 12
"""Steps after which a reading that step times do not confirm is rejected."""
EXTRA_TOLERANCE = 0.15
"""Extra tolerance while the usual step time of a plan is not yet known."""
NUM_FIRST_STEPS = 2
"""First steps under a plan, which are not representative."""
MIN_DISTURBANCE = 0.2
"""Least log distance from normal conditions that counts as a disturbance."""
MIN_REGIME_CHANGE = math.log(1.5)
"""Least log change of conditions that ends one disturbance and begins another."""

LogTimeOf = Callable[[Conditions], float]
"""Logarithm of the present plan's step time in given conditions."""


class Watch:
    """Follows conditions and the level of step times."""

    def __init__(self) -> None:
        self.believed = Conditions()
        """The present conditions of all processes, as estimated."""
        self.normal = Conditions()
        """The conditions of the run's first steps."""
        self.regime = 0
        """Number of the unexplained regime; 0: none."""
        self.detector = ChangeDetector()
        self.rejected_signals: dict[str, float] = {}
        """Factors whose readings are rejected, with the values that they claim."""
        self._in_use: Collection[int] | None = None
        """The processes in use; None: all."""
        self._last_seen, self._now_s = LastSeen(), 0.0
        self._unseen: set[str] = set()
        """Factors that are not normal and were not seen of late."""
        self._broken: set[str] = set()
        """Families of sensors that were wrong, until step times confirm a reading of theirs."""
        self._first_compute: float | None = None
        self._confirmed: set[str] = set()
        """Factors of which a reading has been accepted."""
        self._early: set[str] = set()
        """Factors claimed before step times under this plan had a level."""
        self.was_so: dict[str, float] = {}
        """Factors that the last observation revealed and that may have held from the start."""
        self._base: float | None = None
        """First level of step times under this plan in the conditions that are believed, which a
        slow drift does not move; None: not known yet."""
        self._claimed_at: dict[str, int] = {}
        self._has_unconfirmed_claims = False
        """Whether readings with few samples claim a change that would affect step times."""
        self.changed_s: float | None = None
        """When step times last changed, or seemed to, without a reading that explained it, on the
        run's clock; None: never."""
        self._is_alarmed = False
        """Whether the newest step took far longer than usual."""
        self._lost_s = 0.0
        """Extra time of the steps in the last change, or seeming change."""
        self._anchor: float | None = None
        """Level before the unexplained regime; None: none has begun, or the level is unknown."""
        self._excess: float | None = None
        """Level over `_anchor` when the run left a plan or batch in an unexplained regime. It is
        assumed to be the same under the next ones."""
        self._skipped = self._plan_steps = 0
        self._num_regimes = 0
        self._seen_steps = 0
        self._newest_s = 0.0
        """Time of the newest observed step; 0: none yet, as while a plan is compiled."""
        self.regimes = Regimes()
        """The regimes so far."""

    @property
    def conditions(self) -> Conditions:
        """The present conditions of the processes in use, as estimated."""
        return self.believed if self._in_use is None else self.believed.among(self._in_use)

    @property
    def is_disturbed(self) -> bool:
        """Whether conditions are not those of the first steps."""
        return self.regime != 0 or self.believed.distance(self.normal) > MIN_DISTURBANCE

    def regime_at(self, time_s: float) -> Regime:
        """The present regime: how long it has lasted, and how long such regimes last."""
        return self.regimes.at(time_s, is_disturbed=self.is_disturbed)

    @property
    def wants_probe(self) -> bool:
        """Whether step times and readings do not agree, so that more readings would help."""
        return (
            self.regime != 0
            or bool(self._claimed_at)
            or self._has_unconfirmed_claims
            or self._is_alarmed
        )

    @property
    def probe_worth_s(self) -> float:
        """Time that probes for the cause of a change of step times may take."""
        return PROBE_SHARE_OF_LOSS * max(0.0, self._lost_s)

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

    def restart(self, in_use: Collection[int] | None = None) -> None:
        """Begin anew for another plan or batch, whose step times have another level.

        `in_use`: the processes that the plan uses; None: all.
        """
        self._in_use = in_use
        if self.regime and self._anchor is not None and self.detector.level is not None:
            self._excess = self.detector.level - self._anchor
        self.detector, self._skipped, self._plan_steps, self._anchor = ChangeDetector(), 0, 0, None
        self._base = None
        self._claimed_at.clear()
        self._early.clear()
        self._is_alarmed = False

    def observe(
        self,
        observation: Observation,
        claims: Mapping[str, SignalSummary],
        log_time_of: LogTimeOf,
        expected_of: LogTimeOf | None = None,
    ) -> str:
        """Process an observation. Returns what has changed, in words; empty: nothing.

        Args:
          observation: new step times and readings.
          claims: usable readings of factors, by name.
          log_time_of: logarithm of the present plan's step time in given conditions, by the cost
            model.
          expected_of: the same by all that was learnt; None: as the cost model.
        """
        self._now_s = observation.time_s
        self.regimes.start(observation.time_s - sum(_sane(observation.step_times_s)))
        was_disturbed, before, self.was_so = self.is_disturbed, (self.believed, self.regime), {}
        change = self._add_steps(observation)
        if change and not self._is_alarmed:  # after an alarm the time is known already
            self.changed_s = observation.time_s - self._newest_s * change.num_steps
            self._lost_s = change.num_steps * (math.exp(change.after) - math.exp(change.before))
        news = [self._level_changed(change)] if change else []
        news.append(self._update_from_readings(claims, log_time_of, expected_of or log_time_of))
        self._note_seen(observation, claims, log_time_of)
        unseen = self.recovered.keys()
        if lost := sorted(unseen - self._unseen):
            news.append(" and ".join(f"{name} is not measured any more" for name in lost))
        self._unseen = set(unseen)
        # A regime that a reading now explains has not changed by that.
        is_explained = before[1] != 0 and self.regime == 0 and self.is_disturbed
        if (self.believed, self.regime) != before and not self.was_so and not is_explained:
            begun_s = observation.time_s - self._newest_s * (
                change.num_steps if change else NUM_RECENT_STEPS
            )
            self._turn(was_disturbed, before[0], begun_s)
        return "; ".join(filter(None, news))

    def _note_seen(
        self,
        observation: Observation,
        claims: Mapping[str, SignalSummary],
        log_time_of: LogTimeOf,
    ) -> None:
        """Note which factors were read, and which step times agree with."""
        trusted = [name for name in claims if family_of(name) not in self._broken]
        self._last_seen.read(claims, trusted, observation.time_s)
        if self.regime == 0 and self.detector.recent(NUM_RECENT_STEPS) is not None:
            disturbed = self.believed.differing(self.normal)
            self._last_seen.felt(self._felt(disturbed, log_time_of), observation.time_s)

    def _add_steps(self, observation: Observation) -> Change | None:
        """Add step times to the detector. Returns a change if one is found."""
        found = None
        for step_time_s in _sane(observation.step_times_s):
            self._newest_s = step_time_s
            self._seen_steps += 1
            if self._skipped < NUM_FIRST_STEPS:
                self._skipped += 1
                continue
            self._plan_steps += 1
            value, level = (
                math.log(step_time_s),
                self.detector.level if self.detector.count >= MIN_STEPS else None,
            )
            change = self.detector.add(value) or self._drifted()
            if change:
                found, self._base = change, None
            elif self._base is None and self.detector.count >= MIN_STEPS:
                self._base = self.detector.level
            if (
                self.regime
                and self._anchor is None
                and self._excess is not None
                and self.detector.level is not None
                and self.detector.count >= MIN_STEPS
            ):
                self._anchor = self.detector.level - self._excess
            is_alarming = level is not None and value - level > ALARM_LOG_RATIO
            if is_alarming and not self._is_alarmed:
                self.changed_s, self._lost_s = (
                    observation.time_s - step_time_s,
                    step_time_s - math.exp(level or 0.0),
                )
            self._is_alarmed = is_alarming
        return found

    def _drifted(self) -> Change | None:
        """A change that came so slowly that the detector's level went with it."""
        level = self.detector.level
        if self._base is None or level is None or abs(level - self._base) < SHIFT:
            return None
        return Change(before=self._base, after=level, num_steps=MIN_STEPS)

    def _level_changed(self, change: Change) -> str:
        if self.regime == 0:
            self._anchor = change.before
        elif self._anchor is not None and abs(change.after - self._anchor) < SHIFT / 2:
            self.regime, self._excess = 0, None
            return "step times are back to what they were"
        self._num_regimes += 1
        self.regime = self._num_regimes
        return f"steps take {math.exp(change.after - change.before) - 1:+.0%} of their time"

    def _update_from_readings(
        self,
        claims: Mapping[str, SignalSummary],
        log_time_of: LogTimeOf,
        expected_of: LogTimeOf,
    ) -> str:
        """Accept or reject the conditions that readings indicate."""
        claimed = self._claimed(claims)
        news = {
            name: on_grid_value
            for name, value in claimed.items()
            if abs(math.log(value / self.believed.factor(name))) > min_log_change(name)
            and (on_grid_value := self._on_grid(name, value)) != self.believed.factor(name)
        }
        self._confirmed |= {
            name for name in claimed if name not in news and claims[name].quality == "good"
        }
        for name in [name for name in self._claimed_at if name not in news]:
            del self._claimed_at[name]
        self._early &= news.keys()
        for name, doubted in list(self.rejected_signals.items()):
            # It agrees with the conditions again, or claims another value than the rejected one.
            if name not in news or abs(math.log(news[name] / doubted)) > MIN_REGIME_CHANGE:
                del self.rejected_signals[name]
                self._claimed_at.pop(name, None)
        news = {name: value for name, value in news.items() if name not in self.rejected_signals}
        self._has_unconfirmed_claims = any(
            claims[name].quality == "few" and self._is_felt(name, value, log_time_of)
            for name, value in news.items()
        )
        if doubt := self._doubt(claimed, log_time_of, expected_of):
            return doubt
        if not news:
            return ""
        for name in news:
            if self._plan_steps < MIN_STEPS:
                self._early.add(name)
            if claims[name].quality == "good":
                self._claimed_at.setdefault(name, self._seen_steps)
        for group in self._groups(news, log_time_of):
            if self._is_confirmed_by_steps(group, claims, log_time_of):
                return self._believe(group, log_time_of)
        late = [
            name
            for name in news
            if self._seen_steps - self._claimed_at.get(name, math.inf) >= MAX_UNCONFIRMED_STEPS
            and self._is_felt(name, news[name], log_time_of)
        ]
        return self._reject(late, news) if late else ""

    def _doubt(
        self, claimed: Mapping[str, float], log_time_of: LogTimeOf, expected_of: LogTimeOf
    ) -> str:
        """End a disturbance that step times say is over, whatever its readings claim: they are
        frozen, wrong or missing.
        """
        level = self.detector.recent(NUM_RECENT_STEPS)
        if self.regime:
            reference, names = self._anchor, self.believed.differing(self.normal)
            is_late = self.detector.count >= MAX_UNCONFIRMED_STEPS
        else:  # a plan that was tried because the disturbance may be over
            names = self._felt(self.recovered, log_time_of)
            is_late, log_time_of = True, expected_of
            reference = log_time_of(self.believed) if names and level is not None else None
        if level is None or reference is None or not is_late:
            return ""
        seen = level - reference
        groups = [
            {name: self.normal.factor(name) for name in names if family_of(name) == family}
            for family in dict.fromkeys(map(family_of, names))
        ]
        group = min(
            groups, key=lambda each: abs(seen - self._predicted(each, log_time_of)), default={}
        )
        predicted = self._predicted(group, log_time_of)
        if abs(predicted) < EXTRA_TOLERANCE or abs(seen - predicted) >= abs(predicted) / 2:
            return ""
        told = self._believe(group, log_time_of)
        wrong = {name: claimed[name] for name in group if name in claimed}
        return f"{told}; {self._reject(list(group), wrong)}" if wrong else told

    def _on_grid(self, name: str, value: float) -> float:
        """The value on the grid, or the normal value if the two are within the scatter of readings:
        then measurements in normal conditions apply again.
        """
        on_grid_value, normal = on_grid(value), self.normal.factor(name)
        return (
            normal
            if abs(math.log(on_grid_value / normal)) < min_log_change(name)
            else on_grid_value
        )

    def _groups(self, news: Mapping[str, float], log_time_of: LogTimeOf) -> list[dict[str, float]]:
        """Groups of claims to compare with step times: each family, each claim alone, and all.

        A claim that would not affect step times is not compared alone while another one of its
        family would: if that one is wrong, this one may be too.
        """
        families = [
            {name: value for name, value in news.items() if family_of(name) == family}
            for family in dict.fromkeys(map(family_of, news))
        ]
        felt = {
            family_of(name)
            for name, value in news.items()
            if self._is_felt(name, value, log_time_of)
        }
        alone = [
            {name: value}
            for name, value in news.items()
            if family_of(name) not in felt or self._is_felt(name, value, log_time_of)
        ]
        return [*families, *alone, dict(news)]

    def _claimed(self, claims: Mapping[str, SignalSummary]) -> dict[str, float]:
        values = {
            name: reading.value for name, reading in claims.items() if reading.value is not None
        }
        if "compute" in values:
            # A slowdown from the start affects all plans alike, and is learnt from step times.
            if claims["compute"].quality == "good" and self._first_compute is None:
                self._first_compute = values["compute"]
            values["compute"] /= self._first_compute or values["compute"]
        for name in values:
            if process_of(name) is not None:
                values[name] = max(1.0, values[name])
        # A compute probe on the slow process measures the same slowdown once more.
        skew = max([values[name] for name in values if self._uses(name)], default=1.0)
        more = values.get("compute", 1.0) / self.believed.compute
        if skew > 1 and abs(math.log(more / skew)) < MIN_LOG_CHANGE_OF_PROCESS:
            values.pop("compute", None)
        return values

    def _uses(self, name: str) -> bool:
        """Whether it is the factor of a process in use."""
        process = process_of(name)
        return process is not None and (self._in_use is None or process in self._in_use)

    def _is_felt(self, name: str, value: float, log_time_of: LogTimeOf) -> bool:
        return abs(self._predicted({name: value}, log_time_of)) >= MIN_EFFECT

    def _felt(self, names: Iterable[str], log_time_of: LogTimeOf) -> list[str]:
        """Those of these factors whose return to normal would affect step times."""
        return [
            name for name in names if self._is_felt(name, self.normal.factor(name), log_time_of)
        ]

    def _predicted(self, group: Mapping[str, float], log_time_of: LogTimeOf) -> float:
        """Predicted change of log step time by these factors."""
        return log_time_of(self.believed.with_factors(group)) - log_time_of(self.believed)

    def _is_confirmed_by_steps(
        self,
        group: Mapping[str, float],
        claims: Mapping[str, SignalSummary],
        log_time_of: LogTimeOf,
    ) -> bool:
        """Whether to accept these factors."""
        before = log_time_of(self.believed)
        after = log_time_of(self.believed.with_factors(group))
        predicted = after - before
        is_good = all(
            claims[name].quality == "good" and family_of(name) not in self._broken for name in group
        )
        # Step times cannot tell. Accept good readings, but not a factor that is suddenly better
        # than ever before.
        if abs(predicted) < MIN_EFFECT:
            return is_good and all(
                name not in self._confirmed or value >= min(1.0, self.normal.factor(name))
                for name, value in group.items()
            )
        if (level := self.detector.recent(NUM_RECENT_STEPS)) is None:
            return False
        # The factors may have held from the start.
        if self.regime == 0 and (
            not self._confirmed.issuperset(group) or self._early.intersection(group)
        ):
            return is_good and abs(level - after) <= abs(level - before) + EXTRA_TOLERANCE
        if (reference := self._anchor if self.regime else self.detector.level) is None:
            return False
        if self.regime and any(
            (claims[name].time_s or -math.inf) < (self.changed_s or -math.inf) for name in group
        ):
            return False  # a reading from before the change cannot explain it
        references = [reference] if self.regime or self._base is None else [reference, self._base]
        return any(self._agrees(level - each, predicted) for each in references)

    def _agrees(self, seen: float, predicted: float) -> bool:
        return (
            MIN_AGREEMENT <= seen / predicted <= 1 / MIN_AGREEMENT
            and abs(seen) > self.detector.noise
        )

    def _believe(self, group: Mapping[str, float], log_time_of: LogTimeOf) -> str:
        felt = abs(self._predicted(group, log_time_of)) >= MIN_EFFECT
        # A factor that was accepted before has changed since. Only a factor that is accepted for
        # the first time may have held from the start.
        self.was_so = (
            {name: value for name, value in group.items() if name not in self._confirmed}
            if self.regime == 0
            else {}
        )
        self.believed = self.believed.with_factors(group)
        self._confirmed |= set(group)
        if self.was_so:
            self.normal = self.normal.with_factors(self.was_so)
        elif felt and self.regime:
            self.regime, self._excess = 0, None
        elif felt and not self._early.intersection(group):
            self.detector.begin_with(self._num_new())
            self._base = None
        if felt and not self.was_so:
            self._broken -= set(map(family_of, group))
        self._early -= group.keys()
        for name in group:
            self._claimed_at.pop(name, None)
        return " and ".join(in_words(name, value) for name, value in group.items())

    def _num_new(self) -> int:
        """Number of newest samples that belong to the conditions that have just been accepted. The
        others do not measure them.
        """
        before, after = self.detector.level, self.detector.recent(NUM_RECENT_STEPS)
        return 0 if before is None or after is None else self.detector.in_a_row(before, after)

    def _reject(self, names: list[str], news: Mapping[str, float]) -> str:
        families = {family_of(name) for name in names}
        self._broken |= families
        doubted = [name for name in news if family_of(name) in families]
        self.rejected_signals.update({name: news[name] for name in doubted})
        return "step times contradict the readings of " + " and ".join(doubted)

    def _turn(self, was_disturbed: bool, before: Conditions, begun_s: float) -> None:
        """Begin another regime if conditions have changed by enough."""
        if not self._newest_s:  # no step has been seen in any conditions
            return
        if (
            was_disturbed == self.is_disturbed
            and before.distance(self.believed) < MIN_REGIME_CHANGE
        ):
            return
        if not self.is_disturbed and self.regimes.is_first:  # conditions turned out normal
            return
        self.regimes.turn(begun_s, self._newest_s, was_disturbed=was_disturbed)


def _sane(step_times_s: tuple[float, ...]) -> list[float]:
    return [time_s for time_s in step_times_s if math.isfinite(time_s) and time_s > 0]
