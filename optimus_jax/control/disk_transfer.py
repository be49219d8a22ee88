"""Moves a training state between layouts through the disk, if device memory does not suffice.

It writes the state once as a checkpoint, which stays, and reads it once. The checkpoint is complete
before any device memory is freed, and its checksums are verified when it is read
(checkpoint/checkpoints.py). Every plan can read it.
"""

from collections.abc import Callable
from typing import Any

import jax

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.control.executables import Executable
from optimus_jax.training.state import (
    TrainState,
    abstract_stored_state,
    from_stored,
    to_stored,
)
from optimus_jax.training.step import Program


class DiskTransfer:
    """Moves the state of one run. Every process calls the same methods in the same order.

    Args:
      checkpoints: the run's checkpoints.
      described: returns the checkpoint metadata of a state under a program, after a step.
    """

    def __init__(
        self, checkpoints: Checkpoints, described: Callable[[Program, int], dict[str, Any]]
    ) -> None:
        self._checkpoints, self._described = checkpoints, described

    def put(self, state: TrainState, source: Executable, step: int) -> None:
        """Write the state, laid out for `source`, and free its memory.

        Raises CheckpointError if it cannot be written; the state is then unchanged.
        """
        program = source.program
        self._checkpoints.save(
            step,
            to_stored(state, program.shapes, program.plan, program.state_shardings),
            self._described(program, step),
        )
        self._checkpoints.wait()
        for leaf in jax.tree.leaves(state):
            leaf.delete()

    def fetch(self, target: Executable, step: int) -> TrainState:
        """Read the state in the layout of `target`.

        Raises CheckpointError if it cannot be read, or is not what was written.
        """
        program = target.program
        wanted = abstract_stored_state(
            program.shapes, program.optimizer, program.config.precision, program.plan, program.mesh
        )
        stored = self._checkpoints.restore(
            wanted, step, paddable=program.shapes.may_be_padded
        ).state
        return from_stored(stored, program.shapes, program.plan, program.state_shardings)
