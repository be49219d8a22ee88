"""A workload: what a step computes, whatever its plan."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from optimus_jax.config import Config, ModelConfig
from optimus_jax.models.families import generator_of
from optimus_jax.models.flops import layer_shares, step_flops
from optimus_jax.training.optimizer import moments_per_parameter
from optimus_jax.training.task import Task
from optimus_jax.training.tasks import MLM, NEXT_TOKEN, TASKS, model_of, task_of

ADAM_MOMENTS = 2
"""Moments of Adam."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its batch, its task and its optimizer."""

    model: ModelConfig
    seq_len: int
    """Tokens per example."""
    global_batch: int
    """Examples per step."""
    task: Task = TASKS[NEXT_TOKEN]
    """Its loss is traced."""
    num_moments: int = ADAM_MOMENTS
    """Arrays of the optimizer for each parameter."""

    @classmethod
    def of(cls, config: Config) -> "Workload":
        """The workload of a run."""
        return cls(
            model=model_of(config),
            seq_len=config.seq_len,
            global_batch=config.data.global_batch,
            task=task_of(config),
            num_moments=moments_per_parameter(config.optimizer.name),
        )

    @cached_property
    def num_references(self) -> int:
        """`Task.num_references`."""
        return self.task.num_references

    @cached_property
    def example_bytes(self) -> int:
        """Bytes of an example in the arrays of a batch."""
        return sum(
            math.prod(array.shape(1, self.seq_len, self.model.patch_values))
            * np.dtype(array.dtype).itemsize
            for array in self.task.arrays.values()
        )

    @cached_property
    def generator(self) -> "Workload | None":
        """What the model's generator computes; None: there is none."""
        generator = generator_of(self.model)
        return None if generator is None else replace(self, model=generator, task=TASKS[MLM])

    @cached_property
    def layer_shares(self) -> tuple[float, ...]:
        """Compute time of each layer, in that of the mean layer (models/flops.py)."""
        return layer_shares(self.model, self.seq_len)

    @property
    def step_flops(self) -> float:
        """FLOPs of a step that count for MFU (models/flops.py)."""
        return step_flops(
            self.model,
            num_sequences=self.global_batch,
            seq_len=self.seq_len,
            num_references=self.num_references,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Computed once, because workloads are cache keys."""
        return self._hash
