"""Where a pipeline keeps values between ticks.

A *ring* is memory for one kind of value on every stage, cut into *slots* of equal size: inputs of
virtual stages, residuals of their forward (if backward does not compute them again), and
cotangents of their outputs. Since all stages run one program, a ring has as many slots as the
stage that needs most of them. One slot more, the *spare* one, number num_slots, takes what idle
stages write, so that nothing has to be selected.

A value holds a slot from the moment it is written to the moment it is last read. Moments are the
steps of a tick in the order that pipeline/schedule.py gives; one slot has no two values at one
moment. Intervals on a line need as many slots as overlap at most, and dealing slots out by the
time of writing reaches that number (interval graphs are perfect).
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimus_jax.pipeline.schedule import IDLE, Schedule, Table

Ticks = NDArray[np.int64]
"""[microbatches, virtual stages]"""

STEPS = 5
"""Steps of a tick that write or read slots; arrival is the first with latency 1, the last with
latency 2."""
ARRIVAL_FIRST, FORWARD, HEAD, BACKWARD, ARRIVAL_LAST = range(STEPS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """Rings of a schedule, and the slot that each stage uses in each tick.

    All tables are int32 [ticks, stages]; an idle entry is the number of the spare slot.
    """

    num_inputs: int
    """Slots for inputs of virtual stages, without the spare one."""
    num_residuals: int
    """Slots for what forward keeps; 0 unless residuals are kept."""
    num_cotangents: int
    """Slots for gradients of the loss by outputs of virtual stages."""
    arrival_input: Table
    """Takes the activation that the stage before sent in the last tick."""
    forward_input: Table
    """Read by forward. On stage 0, repeat 0, forward writes the embedded tokens there first."""
    backward_input: Table
    """Read by backward, which computes the forward again; idle if residuals are kept."""
    forward_residual: Table
    """Written by forward, if residuals are kept."""
    backward_residual: Table
    """Read by backward, if residuals are kept."""
    arrival_cotangent: Table
    """Takes the cotangent that the stage behind sent in the last tick."""
    head_cotangent: Table
    """Takes the head's result; idle on all but the last stage."""
    backward_cotangent: Table
    """Read by backward."""

    @classmethod
    def of(cls, schedule: Schedule, *, keep_residuals: bool = False) -> "Buffers":
        """The smallest rings for `schedule`.

        Args:
          keep_residuals: backward reads what forward has kept in a slot, and an input is needed for
            its forward only; otherwise backward reads the input again.
        """
        forward, backward = schedule.forward_ticks, schedule.backward_ticks
        has_backward = not schedule.is_forward_only
        keep_residuals = keep_residuals and has_backward
        recompute = has_backward and not keep_residuals

        arrived = _arrival(forward, schedule, shift=1)
        written = np.where(
            arrived == IDLE, _moment(forward, FORWARD), _moment(arrived, _arrival_step(schedule))
        )
        inputs = _Ring(
            schedule,
            written,
            _moment(backward, BACKWARD) if recompute else _moment(forward, FORWARD),
        )

        residuals = _Ring(
            schedule, _moment(forward, FORWARD), _moment(backward, BACKWARD), is_used=keep_residuals
        )

        returned = _arrival(backward, schedule, shift=-1)
        headed = np.full_like(forward, IDLE)
        headed[:, -1] = forward[:, -1]
        written = np.where(
            returned == IDLE, _moment(headed, HEAD), _moment(returned, _arrival_step(schedule))
        )
        cotangents = _Ring(schedule, written, _moment(backward, BACKWARD), is_used=has_backward)

        return cls(
            num_inputs=inputs.num_slots,
            num_residuals=residuals.num_slots,
            num_cotangents=cotangents.num_slots,
            arrival_input=inputs.table(arrived),
            forward_input=inputs.table(forward),
            backward_input=inputs.table(backward if recompute else np.full_like(backward, IDLE)),
            forward_residual=residuals.table(forward),
            backward_residual=residuals.table(backward),
            arrival_cotangent=cotangents.table(returned),
            head_cotangent=cotangents.table(headed),
            backward_cotangent=cotangents.table(backward),
        )

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def _arrival(ticks: Ticks, schedule: Schedule, *, shift: int) -> Ticks:
    """Tick in which each virtual stage receives what the one `shift` before it computed in `ticks`;
    IDLE at the end of the line.
    """
    arrived = np.full_like(ticks, IDLE)
    if schedule.is_forward_only and shift < 0:
        return arrived
    if shift > 0:
        arrived[:, 1:] = ticks[:, :-1] + 1
    else:
        arrived[:, :-1] = ticks[:, 1:] + 1
    return arrived


def _arrival_step(schedule: Schedule) -> int:
    return ARRIVAL_FIRST if schedule.latency == 1 else ARRIVAL_LAST


def _moment(ticks: Ticks, step: int) -> Ticks:
    return ticks * STEPS + step


class _Ring:
    """The slots of one kind of value.

    Args:
      written: moment of each value's writing.
      read: moment of its last reading.
      is_used: whether there are such values at all.
    """

    def __init__(self, schedule: Schedule, written: Ticks, read: Ticks, *, is_used: bool = True):
        self._schedule, self._is_used, self.num_slots = schedule, is_used, 0
        self._slots = np.zeros_like(written)
        for stage in range(schedule.num_stages if is_used else 0):
            mine = np.s_[:, stage :: schedule.num_stages]
            slots, num_slots = _colour(written[mine].ravel(), read[mine].ravel())
            self._slots[mine] = slots.reshape(written[mine].shape)
            self.num_slots = max(self.num_slots, num_slots)

    def table(self, ticks: Ticks) -> Table:
        """Slot of each value in the tick given for it, [ticks, stages]; no entry where that is
        IDLE.
        """
        table = np.full(self._schedule.forward.shape, self.num_slots, np.int32)
        microbatch, virtual = np.nonzero((ticks != IDLE) & self._is_used)
        table[ticks[microbatch, virtual], virtual % self._schedule.num_stages] = self._slots[
            microbatch, virtual
        ]
        table.setflags(write=False)
        return table


def _colour(written: Ticks, read: Ticks) -> tuple[Ticks, int]:
    """A slot for each interval [written, read] such that intervals in one slot are disjoint, and
    the number of slots.
    """
    slots = np.zeros(len(written), np.int64)
    free: list[int] = []
    held: list[tuple[int, int]] = []
    num_slots = 0
    for value in np.argsort(written, kind="stable"):
        while held and held[0][0] < written[value]:
            heapq.heappush(free, heapq.heappop(held)[1])
        if not free:
            heapq.heappush(free, num_slots)
            num_slots += 1
        slots[value] = heapq.heappop(free)
        heapq.heappush(held, (int(read[value]), int(slots[value])))
    return slots, num_slots
