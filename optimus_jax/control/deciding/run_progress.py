"""How far a run has come, and how long all of it will take."""

from typing import Literal

from optimus_jax.control.policy import Regime
from optimus_jax.control.signals import Observation


class RunProgress:
    """Of one run.

    Args:
      num_steps: of all of it.
    """

    def __init__(self, num_steps: int) -> None:
        self.step = 0
        """Steps done."""
        self.time_s = 0.0
        """On the run's clock, when they were done."""
        self._num_steps = num_steps
        self._began_s: float | None = None
        """On the run's clock, when the steps began that were observed."""
        self._earlier_steps = 0
        """Done before."""

    def observe(self, observation: Observation) -> Literal["begins", "goes on", "goes back"]:
        """What the run does: it goes back where it was started again from a checkpoint."""
        is_first, goes_back = self._began_s is None, observation.step < self.step
        if self._began_s is None:
            self._began_s, self._earlier_steps = (
                observation.time_s - sum(observation.step_times_s),
                observation.step - len(observation.step_times_s),
            )
        self.step, self.time_s = observation.step, observation.time_s
        return "begins" if is_first else "goes back" if goes_back else "goes on"

    def whole_s(self, regime: Regime, step_time_s: float, usual_s: float) -> float:
        """Expected time of the whole run under the plan that it is under: steps take `step_time_s`
        as long as the regime lasts, and `usual_s` from then on.
        """
        steps_left = max(0, self._num_steps - self.step)
        disturbed_s = regime.expected_s(steps_left * step_time_s)
        earlier_s = self._earlier_steps * usual_s + self.time_s - (self._began_s or 0.0)
        return earlier_s + disturbed_s + max(0.0, steps_left - disturbed_s / step_time_s) * usual_s
