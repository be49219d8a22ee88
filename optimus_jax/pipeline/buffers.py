"""Assigns the memory in which a pipeline keeps values between ticks.

A *buffer* is memory for one kind of value on every stage, divided into *slots* of equal size. There
are buffers for inputs of virtual stages, for residuals of their forward (unless backward recomputes
them), and for cotangents of their outputs. All stages run the same program, so a buffer has as many
slots as the stage that needs the most. One more slot, the *spare* slot with number num_slots, takes
what idle stages write, so that writes need no `where`.

A value holds its slot from the moment it is written to the moment it is last read. Moments are the
steps of all ticks, in the order that pipeline/schedule.py gives; a slot never holds two values at
the same moment. Intervals of time need at least as many slots as overlap at one moment, and
assigning slots in the order of writing needs no more (interval graphs are perfect).
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimus_jax.pipeline.schedule import IDLE, Schedule, Table

TickArray = NDArray[np.int64]
"""[microbatches, virtual stages]"""

STEPS = 5
"""Steps of a tick that write or read slots. Values from neighbours are stored in the first step
with latency 1, in the last with latency 2."""
ARRIVAL_FIRST, FORWARD, HEAD, BACKWARD, ARRIVAL_LAST = range(STEPS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """The buffers of a schedule, and the slot that each stage uses in each tick.

    All tables are int32 [ticks, stages]; an idle entry is the number of the spare slot.
    """

    num_inputs: int
    """Slots for inputs of virtual stages, without the spare slot."""
    num_residuals: int
    """Slots for residuals of forward; 0 unless residuals are kept."""
    num_cotangents: int
    """Slots for gradients of the loss with respect to outputs of virtual stages."""
    arrival_input: Table
    """Slot for the activation that the previous stage sent in the last tick."""
    forward_input: Table
    """Slot that forward reads. On stage 0, repeat 0, forward first writes the embedded tokens
    there."""
    backward_input: Table
    """Slot that backward reads to recompute the forward; idle if residuals are kept."""
    forward_residual: Table
    """Slot that forward writes, if residuals are kept."""
    backward_residual: Table
    """Slot that backward reads, if residuals are kept."""
    arrival_cotangent: Table
    """Slot for the cotangent that the next stage sent in the last tick."""
    head_cotangent: Table
    """Slot for the cotangent that the head computes; idle on all but the last stage."""
    backward_cotangent: Table
    """Slot of the cotangent that backward reads."""

    @classmethod
    def of(cls, schedule: Schedule, *, keep_residuals: bool = False) -> "Buffers":
        """The smallest buffers for `schedule`.

        Args:
          keep_residuals: whether backward reads residuals that forward stored, so that an input is
            needed only until its forward; otherwise backward reads the input again.
        """
        forward, backward = schedule.forward_ticks, schedule.backward_ticks
        has_backward = not schedule.is_forward_only
        keep_residuals = keep_residuals and has_backward
        recompute = has_backward and not keep_residuals

        arrived = _arrival(forward, schedule, shift=1)
        written = np.where(
            arrived == IDLE, _moment(forward, FORWARD), _moment(arrived, _arrival_step(schedule))
        )
        inputs = _Buffer(
            schedule,
            written,
            _moment(backward, BACKWARD) if recompute else _moment(forward, FORWARD),
        )

        residuals = _Buffer(
            schedule, _moment(forward, FORWARD), _moment(backward, BACKWARD), is_used=keep_residuals
        )

        returned = _arrival(backward, schedule, shift=-1)
        headed = np.full_like(forward, IDLE)
        headed[:, -1] = forward[:, -1]
        written = np.where(
            returned == IDLE, _moment(headed, HEAD), _moment(returned, _arrival_step(schedule))
        )
        cotangents = _Buffer(schedule, written, _moment(backward, BACKWARD), is_used=has_backward)

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


def _arrival(ticks: TickArray, schedule: Schedule, *, shift: int) -> TickArray:
    """Tick in which each virtual stage receives what the virtual stage `shift` places before it
    computed in `ticks`; IDLE if there is no such virtual stage.
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


def _moment(ticks: TickArray, step: int) -> TickArray:
    return ticks * STEPS + step


class _Buffer:
    """The slots of one kind of value.

    Args:
      written: moment at which each value is written.
      read: moment at which each value is last read.
      is_used: whether the schedule has such values.
    """

    def __init__(
        self, schedule: Schedule, written: TickArray, read: TickArray, *, is_used: bool = True
    ):
        self._schedule, self._is_used, self.num_slots = schedule, is_used, 0
        self._slots = np.zeros_like(written)
        for stage in range(schedule.num_stages if is_used else 0):
            mine = np.s_[:, stage :: schedule.num_stages]
            slots, num_slots = _assign_slots(written[mine].ravel(), read[mine].ravel())
            self._slots[mine] = slots.reshape(written[mine].shape)
            self.num_slots = max(self.num_slots, num_slots)

    def table(self, ticks: TickArray) -> Table:
        """[ticks, stages]: the slot of each value, entered at the value's tick in `ticks` unless
        that is IDLE; all other entries are the spare slot.
        """
        table = np.full(self._schedule.forward.shape, self.num_slots, np.int32)
        microbatch, virtual = np.nonzero((ticks != IDLE) & self._is_used)
        table[ticks[microbatch, virtual], virtual % self._schedule.num_stages] = self._slots[
            microbatch, virtual
        ]
        table.setflags(write=False)
        return table


def _assign_slots(written: TickArray, read: TickArray) -> tuple[TickArray, int]:
    """The slot of each interval [written, read], such that intervals in one slot are disjoint, and
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
