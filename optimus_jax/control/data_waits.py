"""Steps that waited for their data: their times are the loader's, and say nothing about a plan.

Batches are loaded beside the devices' work. Where a step waits for its batch, the loader is slower
than the plan, and under any faster plan steps take as long. What the plan itself needs is then
unknown, but for that it is no more. So these steps count neither for the level of step times, nor
in a trial; and while most steps are of this kind, no switch is decided on by choice.
"""

from collections import deque
from collections.abc import Sequence

from optimus_jax.control import constants


def waited(times_s: Sequence[float], data_waits_s: Sequence[float]) -> tuple[bool, ...]:
    """Which steps waited for their data.

    Args:
      times_s: their times, in seconds.
      data_waits_s: for how long of each the devices may have had nothing to do for lack of a batch
        (`StepRecord.data_wait_s`); empty: unknown, and then none did.
    """
    if not data_waits_s:
        return (False,) * len(times_s)
    return tuple(
        [
            wait_s >= max(constants.DATA_WAIT_SHARE * time_s, constants.LEAST_DATA_WAIT_S)
            for time_s, wait_s in zip(times_s, data_waits_s, strict=True)
        ]
    )


class DataWaits:
    """Whether the loader sets the pace of a run."""

    def __init__(self) -> None:
        self._newest: deque[bool] = deque(maxlen=constants.NUM_PACE_STEPS)
        self.is_late = False
        """Whether most of the newest steps waited for their data."""

    def add(self, flags: Sequence[bool]) -> None:
        """Add steps: whether each waited."""
        for flag in flags:
            self._newest.append(flag)
            late = sum(self._newest)
            if late >= constants.NUM_PACE_STEPS - constants.NUM_PACE_OTHERS:
                self.is_late = True
            elif late <= constants.NUM_PACE_OTHERS:
                self.is_late = False
