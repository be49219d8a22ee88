"""What a run reads: its data, and the batches of a phase as this process's devices want them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from optimus_jax.config import Config
from optimus_jax.config.phases import TrainingPhase, phase_after, phases_of
from optimus_jax.data.batch import Batch
from optimus_jax.data.dataset import Data, load_data
from optimus_jax.data.loader import BatchLoader, check_held_out, eval_batches
from optimus_jax.data.sampler import count_examples
from optimus_jax.mesh.sharding import local_rows, put_batch
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import NOT_COMPARABLE, held_out_in_run, tokenizer_of_run
from optimus_jax.training.evaluation import eval_rows
from optimus_jax.training.step import Program


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Of one run, in one process."""

    config: Config
    """Of the whole run."""
    data: Data
    num_eval_examples: int
    """Held-out examples of every evaluation; 0: there is none."""

    @classmethod
    def of(cls, config: Config, run: RunDirectory | None = None) -> "Inputs":
        """Read the data, and make sure that there is enough for every phase; nothing here waits for
        another process.

        Args:
          run: that goes on, with what it keeps of its data; None: a new one.
        Raises:
          DataError: they cannot be used, or are too short.
        """
        model = config.model
        tokenizer, by = (
            (None, None)
            if run is None
            else (tokenizer_of_run(run, config.data), held_out_in_run(run))
        )
        data = load_data(
            config.data,
            seq_len=config.seq_len,
            vocab_size=model.vocab_size,
            model_name=model.name,
            tokenizer=tokenizer,
            by=by,
        )
        num_eval_examples = (
            0
            if data.held_out is None or not config.eval_every
            else check_held_out(
                data.held_out,
                seq_len=config.eval_seq_len,
                respect_documents=config.data.respect_documents,
                num_examples=config.eval_examples,
            )
        )
        inputs = cls(config=config, data=data, num_eval_examples=num_eval_examples)
        for phase in phases_of(config):
            # too short a text is found now, not after hours
            inputs._loader(phase, np.array([], np.int32))
        return inputs

    @property
    def evaluation(self) -> str:
        """What evaluations read, in one line."""
        config, found = self.config, self.num_eval_examples
        if not found:
            return (
                "none: eval_every=0"
                if not config.eval_every
                else "none: nothing is held out (data.eval_fraction=0)"
            )
        text = f"every {config.eval_every} steps, and at the end: " + (
            f"the first {found:,} held-out examples"
            if found == config.eval_examples
            else f"all {found:,} held-out examples ({config.eval_examples:,} were asked for)"
        )
        is_old = config.eval_examples == (config.eval_batches or 0) * config.data.global_batch
        return f"{text} x {config.eval_seq_len:,} tokens, whatever the batch" + (
            f" (eval_batches={config.eval_batches} x {config.data.global_batch}; its name is now"
            " evaluation.examples)"
            if is_old
            else ""
        )

    def other_evaluation(self, before: Config) -> str | None:
        """That evaluations read other tokens than those of the run until now; None: they read the
        same, or there are none.

        Args:
          before: the run until now, on the same data, nothing left open.
        """
        held_out, now = self.data.held_out, self.config
        if held_out is None or not self.num_eval_examples or not before.eval_every:
            return None
        there = min(before.eval_examples, count_examples(held_out, before.eval_seq_len))
        sets = [
            f"{number:,} x {length:,} tokens"
            for number, length in (
                (there, before.eval_seq_len),
                (self.num_eval_examples, now.eval_seq_len),
            )
        ]
        if sets[0] == sets[1]:
            return None
        back = {
            "evaluation.examples": before.eval_examples,
            "evaluation.seq_len": before.eval_seq_len,
        }
        return (
            f"evaluation: {sets[0]} before, {sets[1]} from here on: {NOT_COMPARABLE}; for those"
            " from before: " + " ".join(f"--set {name}={value}" for name, value in back.items())
        )

    def dealt(self, program: Program, step: int) -> "Dealt":
        """The batches of the phase that the step after `step` is in, the rows that this process's
        devices hold under a program of that phase.
        """
        phase = phase_after(self.config, step)
        loader = self._loader(phase, local_rows(program.batch_sharding, phase.global_batch))
        held_out, config = self.data.held_out, self.config
        if held_out is None or not self.num_eval_examples:
            return Dealt(loader=loader, eval_batches=None)
        num_rows = eval_rows(program.config, program.plan)
        return Dealt(
            loader=loader,
            eval_batches=partial(
                eval_batches,
                held_out,
                seq_len=config.eval_seq_len,
                num_rows=num_rows,
                rows=local_rows(program.batch_sharding, num_rows),
                respect_documents=config.data.respect_documents,
                num_examples=self.num_eval_examples,
            ),
        )

    def probe(self, program: Program) -> Any:
        """A batch, always the same, of the kind that a program is for and on its devices."""
        config = program.config
        rows = local_rows(program.batch_sharding, config.data.global_batch)
        first = replace(
            phase_after(self.config, 0),
            global_batch=config.data.global_batch,
            seq_len=config.seq_len,
        )
        return put_batch(
            self._loader(first, rows).batch(1), program.batch_sharding, config.data.global_batch
        )

    def _loader(self, phase: TrainingPhase, rows: np.ndarray) -> BatchLoader:
        return BatchLoader(
            self.data.train,
            seq_len=phase.seq_len,
            global_batch=phase.global_batch,
            seed=self.config.seed,
            rows=rows,
            respect_documents=self.config.data.respect_documents,
            steps_before=phase.steps_before,
            examples_before=phase.examples_before,
        )


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Batches of one phase, this process's rows of them."""

    loader: BatchLoader
    eval_batches: Callable[[], Iterator[Batch]] | None
    """A fresh pass over the held-out ones, the same examples in every phase; None: there are
    none."""
