"""Parameters in arrays of Hugging Face's shapes, as those that a run begins with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from optimus_jax.models.huggingface_checks import check_tied_head, model_tensors
from optimus_jax.run.published_weights import read_params
from optimus_jax.training.state import TrainState
from optimus_jax.training.step import Program


@dataclass(frozen=True, eq=False)
class TensorWeights:
    """The parameters in arrays, as `InitialWeights`."""

    tensors: Mapping[str, np.ndarray]
    """Every tensor of the model, by name."""
    source: str
    """Where they are from."""

    def initial_state(
        self, program: Program, say: Callable[[str], object]
    ) -> tuple[TrainState, str]:
        """As `InitialWeights`. Raises CheckpointError if the tensors are not those of the model."""
        shapes, tuning = program.shapes.base, program.config.model.tuning.without_adapters
        tensors = model_tensors(self.tensors, shapes.config)
        check_tied_head(tensors, shapes.config)
        params = read_params(tensors, shapes, program.abstract_params(tuning))
        return program.state_with(params, tuning), self.source
