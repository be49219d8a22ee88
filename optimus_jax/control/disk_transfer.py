"""The way of a state over the disk, where devices have no room for it to move from one layout to
another in memory.

It costs two passes over the disk, and leaves a checkpoint. The state is there, whole, before
anything is deleted, and what comes back is checked against its checksums
(checkpoint/checkpoints.py); every plan can read it.
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
    may_be_padded,
    to_stored,
)
from optimus_jax.training.step import Program


class DiskTransfer:
    """Of one run. Every process calls the same methods in the same order.

    Args:
      checkpoints: of the run.
      described: what they say of a state under a program, after a step.
    """

    def __init__(
        self, checkpoints: Checkpoints, described: Callable[[Program, int], dict[str, Any]]
    ) -> None:
        self._checkpoints, self._described = checkpoints, described

    def put(self, state: TrainState, source: Executable, step: int) -> None:
        """Write the state, which lies as `source` says, and free its memory.

        Raises CheckpointError, with the state as it was, if it cannot be written.
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
        """The state as `target` wants it.

        Raises CheckpointError if it cannot be read, or is not what was written.
        """
        program = target.program
        wanted = abstract_stored_state(
            program.shapes, program.optimizer, program.config.precision, program.plan, program.mesh
        )
        stored = self._checkpoints.restore(wanted, step, paddable=may_be_padded).state
        return from_stored(stored, program.shapes, program.plan, program.state_shardings)
