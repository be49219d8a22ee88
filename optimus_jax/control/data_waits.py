"""Takes waits for data out of step times: they say nothing about a plan.

The loop waits for the next batch while devices still work. So a wait of w seconds in a step of T
seconds has delayed the devices by anything from 0 to w: by itself the step needs between T - w and
T. If both the step and its wait are longer than usual, the wait is taken to be the reason, as far
as it can be. A step that is no slower than usual is left as it was measured.
"""

import statistics
from collections import deque
from collections.abc import Sequence

from optimus_jax.control import constants
from optimus_jax.control.signals import DATA_WAIT_S, STEP_TIME_S, Observation


class DataWaits:
    """How long a run's steps usually wait for data."""

    def __init__(self) -> None:
        self._waits_s: deque[float] = deque(maxlen=constants.NUM_USUAL_WAITS)

    def own_times_s(
        self, times_s: Sequence[float], waits_s: Sequence[float], usual_s: float | None
    ) -> tuple[float, ...]:
        """Step times without unusual waits.

        Args:
          times_s: times of steps, in seconds.
          waits_s: for how long of each the loop waited for a batch.
          usual_s: usual or expected time of a step; None: unknown, and then nothing is taken out.
        """
        if usual_s is None or not self._waits_s:
            return tuple(times_s)
        usual_wait_s = statistics.median(self._waits_s)
        return tuple(
            [
                max(min(time_s, usual_s), time_s - max(0.0, wait_s - usual_wait_s))
                for time_s, wait_s in zip(times_s, waits_s, strict=True)
            ]
        )

    def learn(
        self, times_s: Sequence[float], waits_s: Sequence[float], own_s: Sequence[float]
    ) -> None:
        """Learn from waits of steps that they have not slowed: all those that are as measured."""
        for time_s, wait_s, each_s in zip(times_s, waits_s, own_s, strict=False):
            if each_s == time_s:
                self._waits_s.append(wait_s)


def is_data_bound(observation: Observation) -> bool:
    """Whether steps take as long as their data: under another plan they would take as long."""
    wait, step = observation.reading(DATA_WAIT_S), observation.reading(STEP_TIME_S)
    if wait.value is None or step.value is None or {wait.quality, step.quality} != {"good"}:
        return False
    return wait.value >= constants.DATA_BOUND_SHARE * step.value
