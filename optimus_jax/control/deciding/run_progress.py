"""Progress of a run, and the expected time of the whole run."""

from optimus_jax.control.deciding.value import Regime
from optimus_jax.control.signals import Observation


class RunProgress:
    """Steps done, time spent and expected total time of one run."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done."""
        self.time_s = 0.0
        """When the last of them was done, on the run's clock."""
        self._began_s: float | None = None
        """When the first observed step began, on the run's clock."""
        self._earlier_steps = 0
        """Steps done before the first observed step."""

    def observe(self, observation: Observation) -> None:
        """Record an observation."""
        if self._began_s is None:
            self._began_s, self._earlier_steps = (
                observation.time_s - sum(observation.step_times_s),
                observation.step - len(observation.step_times_s),
            )
        self.step, self.time_s = observation.step, observation.time_s

    def whole_s(
        self, regime: Regime, step_time_s: float, usual_s: float, steps_left: float
    ) -> float:
        """Expected time of the whole run: steps take `step_time_s` as long as the regime lasts, and
        `usual_s` afterwards.

        Args:
          steps_left: steps that are left, each counted by its size: two that are half as large as
            those that take `step_time_s` are one.
        """
        disturbed_s = regime.expected_s(steps_left * step_time_s)
        earlier_s = self._earlier_steps * usual_s + self.time_s - (self._began_s or 0.0)
        return earlier_s + disturbed_s + max(0.0, steps_left - disturbed_s / step_time_s) * usual_s
