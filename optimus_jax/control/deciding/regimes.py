"""How long the present regime has lasted, and how long regimes of its kind have lasted before."""

from optimus_jax.control import constants
from optimus_jax.control.deciding.changes import Durations
from optimus_jax.control.deciding.value import Regime
from optimus_jax.control.learnt_file import finite_numbers


class Regimes:
    """The regimes of one run: normal ones and disturbances follow each other."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._durations: dict[bool, Durations] = {}
        """By whether they were disturbances; empty: none has ended."""
        self._earlier_s: list[float] = []
        """Durations of disturbances in earlier runs, in seconds."""

    @property
    def is_first(self) -> bool:
        """Whether no regime has ended yet."""
        return not self._durations

    def start(self, time_s: float) -> None:
        """Record when the first regime began; later calls change nothing."""
        if self._since_s is None:
            self._since_s = time_s

    def turn(self, begun_s: float, step_time_s: float, *, was_disturbed: bool) -> None:
        """End the present regime.

        Args:
          begun_s: when the next one has begun, on the run's clock.
          step_time_s: time of a step, the unit of the prior duration.
          was_disturbed: whether the one that ends was a disturbance.
        """
        assert self._since_s is not None, "observations have come"
        if not self._durations:
            self._durations = {
                kind: Durations(constants.PRIOR_REGIME_STEPS * step_time_s)
                for kind in (False, True)
            }
            for duration_s in self._earlier_s:
                self._durations[True].ended(duration_s)
        self._durations[was_disturbed].ended(begun_s - self._since_s)
        self._since_s = begun_s

    def at(self, time_s: float, *, is_disturbed: bool) -> Regime:
        """The present regime. Normal conditions are taken to last forever until they have ended
        once.
        """
        elapsed_s = 0.0 if self._since_s is None else max(0.0, time_s - self._since_s)
        return Regime(elapsed_s=elapsed_s, durations=self._durations.get(is_disturbed))

    def learnt(self) -> list[float]:
        """Durations of the newest disturbances, in seconds.

        Normal conditions of other runs say nothing: they began with the run.
        """
        return list(self._durations[True].past_s) if self._durations else self._earlier_s

    def recall(self, value: object) -> None:
        """Take over the durations of disturbances in earlier runs.

        Raises ValueError or TypeError if it is no list of numbers.
        """
        self._earlier_s = [each for each in finite_numbers(value) if each >= 0]
