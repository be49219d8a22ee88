"""Estimates conditions by comparing signal readings with step times.

A reading that indicates other conditions is accepted if step times have changed as the cost model
predicts, or if its quality is good and the present plan would not be affected. It is rejected if
step times should have changed and did not; readings of the same family are rejected with it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from optimus_jax.control import constants
from optimus_jax.control.deciding.conditions import Conditions
from optimus_jax.control.deciding.factors import (
    family_of,
    in_words,
    min_log_change,
    on_grid,
    process_of,
)
from optimus_jax.control.deciding.step_levels import StepLevels
from optimus_jax.control.signals import SignalSummary

LogTimeOf = Callable[[Conditions], float]
"""Logarithm of the present plan's step time in given conditions."""


class BelievedConditions:
    """The conditions of a run, as estimated.

    Args:
      steps: the levels of step times, which a reading that is accepted may explain.
    """

    def __init__(self, steps: StepLevels) -> None:
        self._steps = steps
        self.present = Conditions()
        """The present conditions of all processes."""
        self.normal = Conditions()
        """The conditions of the run's first steps."""
        self.in_use: Collection[int] | None = None
        """The processes in use; None: all."""
        self.rejected_signals: dict[str, float] = {}
        """Factors whose readings are rejected, with the values that they claim."""
        self._rejected_at: dict[str, int] = {}
        """Number of steps seen when they were rejected."""
        self.was_so: dict[str, float] = {}
        """Factors that the last readings revealed and that may have held from the start."""
        self.since_switch = False
        """Whether the last readings revealed what has been so since the run switched plans."""
        self._first_compute: float | None = None
        self._confirmed: set[str] = set()
        """Factors of which a reading has been accepted."""
        self._early: set[str] = set()
        """Factors claimed before step times under this plan had a level."""
        self._claimed_at: dict[str, int] = {}
        """Number of steps seen when a good reading that is not accepted yet first claimed them."""
        self._has_few_samples = False
        """Whether readings with few samples claim a change that would affect step times."""
        self._origin: tuple[int, Conditions, float] | None = None
        """The steps seen when a reading explained the newest change, and the conditions and the
        level of step times before it; None: no reading has."""

    @property
    def wants_reading(self) -> bool:
        """Whether readings claim what is neither accepted nor rejected yet."""
        return bool(self._claimed_at) or self._has_few_samples

    def restart(self, in_use: Collection[int] | None) -> None:
        """Begin anew for another plan or batch, which uses these processes; None: all."""
        self.in_use, self._origin = in_use, None
        self._claimed_at.clear()
        self._early.clear()

    def felt(self, names: Iterable[str], log_time_of: LogTimeOf) -> list[str]:
        """Those of these factors whose return to normal would affect step times."""
        return [
            name for name in names if self._is_felt(name, self.normal.factor(name), log_time_of)
        ]

    def update(
        self,
        claims: Mapping[str, SignalSummary],
        unseen: Iterable[str],
        log_time_of: LogTimeOf,
        expected_of: LogTimeOf,
        otherwise_of: LogTimeOf,
    ) -> str:
        """Accept or reject what readings indicate. Returns which, in words; empty: neither.

        Args:
          claims: usable readings of factors, by name.
          unseen: factors that are not normal and were not seen of late.
          log_time_of: logarithm of the present plan's step time in given conditions, by the cost
            model.
          expected_of: the same by all that was learnt.
          otherwise_of: the same, but for what was learnt of this plan in the conditions that are
            believed.
        """
        self.was_so, self.since_switch = {}, False
        claimed = self._claimed(claims)
        news = self._news(claimed, claims)
        self._has_few_samples = any(
            claims[name].quality == "few" and self._is_felt(name, value, log_time_of)
            for name, value in news.items()
        )
        if doubt := self._doubt(claimed, unseen, log_time_of, expected_of):
            return doubt
        if group := self._reconsidered(claimed, claims, otherwise_of):
            told = self._accept(group, log_time_of, expected_of)
            self.since_switch = True
            return told
        for name in news:
            if self._steps.is_early:
                self._early.add(name)
            if claims[name].quality == "good":
                self._claimed_at.setdefault(name, self._steps.num_steps)
        for group in self._groups(news, log_time_of):
            if self._is_confirmed_by_steps(group, claims, log_time_of, expected_of):
                return self._accept(group, log_time_of, expected_of)
        late = [
            name
            for name in news
            if self._steps.num_steps - self._claimed_at.get(name, math.inf)
            >= constants.MAX_UNCONFIRMED_STEPS
            and self._is_felt(name, news[name], log_time_of)
        ]
        return self._reject(late, news) if late else ""

    def _news(
        self, claimed: Mapping[str, float], claims: Mapping[str, SignalSummary]
    ) -> dict[str, float]:
        """Claims of other conditions than the present ones that are not rejected yet, on the
        grid.
        """
        news = {
            name: on_grid_value
            for name, value in claimed.items()
            if abs(math.log(value / self.present.factor(name))) > min_log_change(name)
            and (on_grid_value := self._on_grid(name, value)) != self.present.factor(name)
        }
        self._confirmed |= {
            name for name in claimed if name not in news and claims[name].quality == "good"
        }
        for name in [name for name in self._claimed_at if name not in news]:
            del self._claimed_at[name]
        self._early &= news.keys()
        for name, doubted in list(self.rejected_signals.items()):
            # It agrees with the conditions again, or claims another value than the rejected one. A
            # reading that is missing does neither.
            if name in claimed and (
                name not in news
                or abs(math.log(news[name] / doubted)) > constants.MIN_REGIME_CHANGE
            ):
                del self.rejected_signals[name]
                self._claimed_at.pop(name, None)
        return {name: value for name, value in news.items() if name not in self.rejected_signals}

    def _doubt(
        self,
        claimed: Mapping[str, float],
        unseen: Iterable[str],
        log_time_of: LogTimeOf,
        expected_of: LogTimeOf,
    ) -> str:
        """End a disturbance that step times say is over, whatever its readings claim: they are
        frozen, wrong or missing.
        """
        level = self._steps.recent
        if self._steps.regime:
            reference, names = self._steps.anchor, self.present.differing(self.normal)
            is_late = self._steps.detector.count >= constants.MAX_UNCONFIRMED_STEPS
        else:  # a plan that was tried because the disturbance may be over
            names = self.felt(unseen, log_time_of)
            is_late, log_time_of = True, expected_of
            reference = log_time_of(self.present) if names and level is not None else None
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
        if not self._is_as_predicted(seen, predicted):
            return ""
        told = self._accept(group, log_time_of, expected_of)
        wrong = {name: claimed[name] for name in group if name in claimed}
        return f"{told}; {self._reject(list(group), wrong)}" if wrong else told

    def _reconsidered(
        self,
        claimed: Mapping[str, float],
        claims: Mapping[str, SignalSummary],
        otherwise_of: LogTimeOf,
    ) -> dict[str, float]:
        """Rejected readings of a family that step times confirm once what was learnt of the plan in
        the conditions that are believed is left out: it would be wrong if these are.
        """
        level, num_steps = self._steps.detector.level, self._steps.num_steps
        due = {
            name: self._on_grid(name, claimed[name])
            for name, since in self._rejected_at.items()
            if name in self.rejected_signals
            and name in claimed
            and claims[name].quality == "good"
            and num_steps - since >= constants.RECONSIDERED_STEPS
        }
        if not due or level is None or self._steps.regime:
            return {}
        if self._steps.detector.count < constants.RECONSIDERED_STEPS:
            return {}
        self._rejected_at |= dict.fromkeys(due, num_steps)
        usual = otherwise_of(self.present)
        for family in dict.fromkeys(map(family_of, due)):
            group = {name: value for name, value in due.items() if family_of(name) == family}
            predicted = otherwise_of(self.present.with_factors(group)) - usual
            if self._is_as_predicted(level - usual, predicted):
                return group
        return {}

    @staticmethod
    def _is_as_predicted(seen: float, predicted: float) -> bool:
        """Whether a large change was predicted, and what is seen is closer to it than to none."""
        return (
            abs(predicted) >= constants.MIN_RECOVERY_EFFECT
            and abs(seen - predicted) < abs(predicted) / 2
        )

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
        more = values.get("compute", 1.0) / self.present.compute
        if skew > 1 and abs(math.log(more / skew)) < constants.MIN_PROCESS_CHANGE:
            values.pop("compute", None)
        return values

    def _uses(self, name: str) -> bool:
        """Whether it is the factor of a process in use."""
        process = process_of(name)
        return process is not None and (self.in_use is None or process in self.in_use)

    def _is_felt(self, name: str, value: float, log_time_of: LogTimeOf) -> bool:
        return abs(self._predicted({name: value}, log_time_of)) >= constants.MIN_PREDICTED_EFFECT

    def _predicted(self, group: Mapping[str, float], log_time_of: LogTimeOf) -> float:
        """Predicted change of log step time by these factors."""
        return log_time_of(self.present.with_factors(group)) - log_time_of(self.present)

    def _is_confirmed_by_steps(
        self,
        group: Mapping[str, float],
        claims: Mapping[str, SignalSummary],
        log_time_of: LogTimeOf,
        expected_of: LogTimeOf,
    ) -> bool:
        """Whether to accept these factors."""
        before = log_time_of(self.present)
        after = log_time_of(self.present.with_factors(group))
        predicted = after - before
        is_good = all(claims[name].quality == "good" for name in group)
        # Step times cannot tell. Accept good readings, but not a factor that is suddenly better
        # than ever before.
        if abs(predicted) < constants.MIN_PREDICTED_EFFECT:
            return is_good and all(
                name not in self._confirmed or value >= min(1.0, self.normal.factor(name))
                for name, value in group.items()
            )
        if (level := self._steps.recent) is None:
            return False
        # The factors may have held from the start.
        if self._steps.regime == 0 and (
            not self._confirmed.issuperset(group) or self._early.intersection(group)
        ):
            return (
                is_good
                and abs(level - after) <= abs(level - before) + constants.FIRST_READING_TOLERANCE
            )
        if self._steps.regime and any(
            (claims[name].time_s or -math.inf) < (self._steps.changed_s or -math.inf)
            for name in group
        ):
            return False  # a reading from before the change cannot explain it
        seen_changes = [*self._steps.seen_changes, *self._unexpected(expected_of)]
        return (
            any(self._agrees(seen, predicted) for seen in seen_changes)
            or self._is_revised_by(group, level, log_time_of)
            or (is_good and self._came_with_switch(predicted))
        )

    def _came_with_switch(self, predicted: float) -> bool:
        """Whether steps have differed from what was expected of the plan by this much since the run
        switched to it: they were never in the conditions that are believed, so that no change
        shows.
        """
        seen = self._steps.off_from_start
        return seen is not None and self._is_as_predicted(seen, predicted)

    def _unexpected(self, expected_of: LogTimeOf) -> list[float]:
        """Change of the newest steps from what is expected of them, if it is larger than any plan
        explains: nobody has seen steps before it. Else empty.
        """
        if (level := self._steps.recent) is None:
            return []
        change = level - expected_of(self.present)
        return [change] if abs(change) > constants.MAX_PLAN_DEVIATION else []

    def _agrees(self, seen: float, predicted: float) -> bool:
        return (
            constants.MIN_AGREEMENT_RATIO <= seen / predicted <= 1 / constants.MIN_AGREEMENT_RATIO
            and abs(seen) > self._steps.detector.noise
        )

    @property
    def _may_be_revised(self) -> bool:
        """Whether a reading has explained a change not long ago."""
        return (
            self._origin is not None
            and self._steps.num_steps - self._origin[0] <= constants.MAX_REVISION_STEPS
        )

    def _is_revised_by(
        self, group: Mapping[str, float], level: float, log_time_of: LogTimeOf
    ) -> bool:
        """Whether these factors explain the newest change better than those that were accepted for
        it.
        """
        if self._origin is None or not self._may_be_revised or self._steps.before is None:
            return False
        _, conditions, reference = self._origin
        usual, seen = log_time_of(conditions), level - reference
        predicted = log_time_of(self.present.with_factors(group)) - usual
        believed = log_time_of(self.present) - usual
        return (
            predicted != 0
            and self._agrees(seen, predicted)
            and abs(seen - predicted) < abs(seen - believed)
        )

    def _accept(
        self, group: Mapping[str, float], log_time_of: LogTimeOf, expected_of: LogTimeOf
    ) -> str:
        predicted = self._predicted(group, log_time_of)
        felt = abs(predicted) >= constants.MIN_PREDICTED_EFFECT
        firsts = group.keys() - self._confirmed
        unseen = self._unexpected(expected_of) if self._steps.has_switched else []
        is_change = bool(felt and firsts) and any(
            self._agrees(seen, predicted) and abs(seen) >= constants.MIN_LEVEL_SHIFT
            for seen in (*self._steps.seen_changes, *unseen)
        )
        self.since_switch = self._came_with_switch(predicted) and not any(
            self._agrees(seen, predicted) for seen in self._steps.seen_changes
        )
        if felt and self._steps.before is not None and not self._may_be_revised:
            self._origin = self._steps.num_steps, self.present, self._steps.before
        # A factor that was accepted before has changed since. One that is accepted for the first
        # time may have held from the start, unless step times show the change.
        is_old = self._steps.regime == 0 and not is_change
        self.was_so = {name: group[name] for name in group if name in firsts and is_old}
        self.present = self.present.with_factors(group)
        self._confirmed |= set(group)
        if self.was_so:
            self.normal = self.normal.with_factors(self.was_so)
        elif felt and self._steps.regime:
            self._steps.explain()
        elif is_change or (felt and not self._early.intersection(group)):
            self._steps.begin_anew()
        self._early -= group.keys()
        for name in group:
            self.rejected_signals.pop(name, None)
            self._claimed_at.pop(name, None)
        return " and ".join(in_words(name, value) for name, value in group.items())

    def _reject(self, names: list[str], news: Mapping[str, float]) -> str:
        families = {family_of(name) for name in names}
        doubted = [name for name in news if family_of(name) in families]
        self.rejected_signals.update({name: news[name] for name in doubted})
        self._rejected_at |= dict.fromkeys(doubted, self._steps.num_steps)
        return "step times contradict the readings of " + " and ".join(doubted)
