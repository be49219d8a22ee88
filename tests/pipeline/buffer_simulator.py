"""Simulates a pipeline's buffers with names in place of values: every read finds the right one."""

from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.schedule import IDLE, Schedule, Table


def check_buffers(schedule: Schedule, buffers: Buffers, *, keep_residuals: bool = False) -> None:
    """Run the ticks with names in place of values; AssertionError at the first read of a wrong one.

    It follows the order within a tick and does not know how slots were assigned, so
    a slot overwritten too early shows as a wrong name.
    """
    _BufferSimulation(
        schedule, buffers, keeps=keep_residuals and not schedule.is_forward_only
    ).run()


Name = tuple[int, int] | None
"""(microbatch, virtual stage) whose input, residual or cotangent it is; None: garbage."""


class _BufferSimulation:
    def __init__(self, schedule: Schedule, buffers: Buffers, *, keeps: bool):
        self.schedule, self.tables, self.keeps = schedule, buffers.tables, keeps
        self.num_slots = {
            "input": buffers.num_inputs,
            "residual": buffers.num_residuals,
            "cotangent": buffers.num_cotangents,
        }
        self.buffers: dict[str, list[dict[int, Name]]] = {
            kind: [{} for _ in range(schedule.num_stages)] for kind in self.num_slots
        }

    def run(self) -> None:
        """Simulate all ticks."""
        stages = range(self.schedule.num_stages)
        sent_forward: list[Name] = [None for _ in stages]
        sent_backward: list[Name] = [None for _ in stages]
        for tick in range(self.schedule.num_ticks):
            arrived = sent_forward[-1:] + sent_forward[:-1], sent_backward[1:] + sent_backward[:1]
            if self.schedule.latency == 1:
                self._store(tick, *arrived)
            sent_forward = [self._forward(tick, stage) for stage in stages]
            self._head(tick)
            sent_backward = [self._backward(tick, stage) for stage in stages]
            if self.schedule.latency == 2:
                self._store(tick, *arrived)

    def _store(self, tick: int, inputs: list[Name], cotangents: list[Name]) -> None:
        for stage in range(self.schedule.num_stages):
            self._write("arrival", "input", tick, stage, inputs[stage])
            self._write("arrival", "cotangent", tick, stage, cotangents[stage])

    def _forward(self, tick: int, stage: int) -> Name:
        task = self._task(self.schedule.forward, tick, stage)
        if task is None:
            self._write("forward", "residual", tick, stage, None)
            return None
        microbatch, virtual = task
        if virtual == 0:
            self._write("forward", "input", tick, stage, task)
        self._read("forward", "input", tick, stage, task)
        if self.keeps:
            self._write("forward", "residual", tick, stage, task)
        is_last = virtual == self.schedule.num_virtual_stages - 1
        return None if is_last else (microbatch, virtual + 1)

    def _head(self, tick: int) -> None:
        microbatch, last = int(self.schedule.head[tick]), self.schedule.num_stages - 1
        for stage in range(self.schedule.num_stages):
            is_due = stage == last and microbatch != IDLE
            self._write(
                "head",
                "cotangent",
                tick,
                stage,
                (microbatch, self.schedule.num_virtual_stages - 1) if is_due else None,
            )

    def _backward(self, tick: int, stage: int) -> Name:
        task = self._task(self.schedule.backward, tick, stage)
        if task is None:
            return None
        self._read("backward", "residual" if self.keeps else "input", tick, stage, task)
        self._read("backward", "cotangent", tick, stage, task)
        microbatch, virtual = task
        return (microbatch, virtual - 1) if virtual else None

    def _task(self, table: Table, tick: int, stage: int) -> Name:
        if table[tick, stage] == IDLE:
            return None
        microbatch, repeat = divmod(int(table[tick, stage]), self.schedule.num_repeats)
        return microbatch, repeat * self.schedule.num_stages + stage

    def _slot(self, step: str, kind: str, tick: int, stage: int) -> int:
        slot = int(self.tables[f"{step}_{kind}"][tick, stage])
        assert 0 <= slot <= self.num_slots[kind], (
            f"tick {tick}, stage {stage}: {step} uses {kind} slot {slot} of {self.num_slots[kind]}"
        )
        return slot

    def _write(self, step: str, kind: str, tick: int, stage: int, name: Name) -> None:
        slot = self._slot(step, kind, tick, stage)
        # The spare slot takes what nobody reads.
        self.buffers[kind][stage][slot] = None if slot == self.num_slots[kind] else name

    def _read(self, step: str, kind: str, tick: int, stage: int, name: Name) -> None:
        slot = self._slot(step, kind, tick, stage)
        found = self.buffers[kind][stage].get(slot)
        assert found == name, (
            f"tick {tick}, stage {stage}: {step} of (microbatch, virtual stage) {name} reads {kind}"
            f" slot {slot}, which holds {found}"
        )
