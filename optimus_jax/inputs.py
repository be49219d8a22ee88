"""What a run reads: its data, and the batches of a phase as this process's devices want them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optimus_jax.config import Config
from optimus_jax.data.dataset import Data, load_data
from optimus_jax.data.loader import BatchLoader, eval_batches
from optimus_jax.data.sampler import Batch
from optimus_jax.mesh.sharding import local_rows, put_batch
from optimus_jax.phases import Phase, in_phase, phase_after, phases_of
from optimus_jax.run_data import held_out_in_run, tokenizer_of_run
from optimus_jax.training.run_directory import RunDirectory
from optimus_jax.training.step import Program


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Of one run, in one process."""

    config: Config
    """Of the whole run."""
    data: Data

    @classmethod
    def of(cls, config: Config, run: RunDirectory | None = None) -> "Inputs":
        """Read the data, and make sure that there is enough for every phase; nothing here waits for another process.

        Args:
          run: that goes on, with what it keeps of its data; None: a new one.
        Raises:
          DataError: they cannot be used, or are too short.
        """
        model = config.model
        tokenizer, by = (None, None) if run is None else (tokenizer_of_run(run, config.data), held_out_in_run(run))
        inputs = cls(config=config, data=load_data(
            config.data, seq_len=config.seq_len, vocab_size=model.vocab_size, model_name=model.name, tokenizer=tokenizer, by=by))
        for phase in phases_of(config):
            inputs._dealt(phase, np.array([], np.int32))  # too short a text is found now, not after hours
        return inputs

    def dealt(self, program: Program, step: int) -> "Dealt":
        """The batches of the phase that the step after `step` is in, the rows that this process's devices hold under a program of that phase."""
        phase = phase_after(self.config, step)
        return self._dealt(phase, local_rows(program.batch_sharding, phase.global_batch))

    def probe(self, program: Program) -> Any:
        """A batch, always the same, of the kind that a program is for and on its devices."""
        config = program.config
        rows = local_rows(program.batch_sharding, config.data.global_batch)
        first = replace(phase_after(self.config, 0), global_batch=config.data.global_batch, seq_len=config.seq_len)
        return put_batch(self._dealt(first, rows).loader.batch(1), program.batch_sharding, config.data.global_batch)

    def _dealt(self, phase: Phase, rows: np.ndarray) -> "Dealt":
        config = in_phase(self.config, phase)
        cut = {"seq_len": phase.seq_len, "global_batch": phase.global_batch, "rows": rows, "respect_documents": config.data.respect_documents}
        loader = BatchLoader(self.data.train, seed=config.seed, steps_before=phase.steps_before, examples_before=phase.examples_before, **cut)
        held_out = self.data.held_out if config.eval_every else None
        if held_out is None:
            return Dealt(loader=loader, eval_batches=None)
        eval_batches(held_out, num_batches=1, **cut)
        return Dealt(loader=loader, eval_batches=lambda: eval_batches(held_out, num_batches=config.eval_batches, **cut))


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Batches of one phase, this process's rows of them."""

    loader: BatchLoader
    eval_batches: Callable[[], Iterator[Batch]] | None
    """A fresh pass over the held-out ones; None: there are none."""
