"""The inputs of a run: its data, and this process's rows of each phase's batches."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from optimus_jax.config import Config
from optimus_jax.config.phases import TrainingPhase, phase_after, phases_of
from optimus_jax.config.presets import PUBLISHED
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.dataset import Data, load_data, mixed
from optimus_jax.data.given import RandomAccess
from optimus_jax.data.iterated import IteratedExamples
from optimus_jax.data.loader import BatchLoader, WordMarker, check_held_out, eval_batches
from optimus_jax.data.recordings import Recordings
from optimus_jax.data.sampler import count_examples
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.data.word_errors import check_jiwer, has_words
from optimus_jax.errors import ConfigError, DataError, explain
from optimus_jax.mesh.sharding import local_rows
from optimus_jax.models.families import features_of
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import (
    NOT_COMPARABLE,
    check_same_share,
    held_out_in_run,
    tokenizer_of_run,
)
from optimus_jax.system.hub_model import HUB
from optimus_jax.training.evaluation import HeldOut, eval_rows
from optimus_jax.training.step import Program
from optimus_jax.training.tasks import model_of, task_of
from optimus_jax.training.transcripts import Transcripts

NO_FRACTION = " (data.eval_fraction=0)"
ROWS_AT_ONCE = 32
"""Rows of a batch of which only the tokens are read."""
POSITION = "position"
"""Of the data's iterator, in the metadata of a checkpoint."""


def with_random_tokens(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the ids of random tokens, if its task hides tokens and none are named."""
    if not task_of(config).masks_tokens or config.masking.random_below is not None:
        return config
    return config.with_values({"masking.random_below": tokenizer.vocab_size})


def with_mask_token(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the id of the mask token, if its task hides tokens and none is named.

    Raises ConfigError if the tokenizer has none, and uses all ids of the model.
    """
    if not task_of(config).masks_tokens or config.masking.token is not None:
        return config
    token = config.mask_token if tokenizer.mask is None else tokenizer.mask
    if tokenizer.mask is None and token < tokenizer.vocab_size:
        raise ConfigError(
            explain(
                "there is no id for the mask token: the tokenizer has none, and uses all ids",
                given=f"model.vocab_size={config.model.vocab_size}, as many as the tokenizer's",
                do=f"set model.vocab_size={tokenizer.vocab_size + 1}",
            )
        )
    return config.with_values({"masking.token": token})


def unused_vocabulary(config: Config, tokenizer: Tokenizer) -> list[str]:
    """A note if the model is that of a published name, begins at random, and has far more ids than
    the tokenizer."""
    model = config.model
    source = PUBLISHED.get(model.name)
    if source is None or config.init_from or model.vocab_size <= 2 * tokenizer.vocab_size:
        return []
    return [
        f"the tokenizer {config.data.tokenizer} has {tokenizer.vocab_size:,} ids and {model.name}"
        f" {model.vocab_size:,}, most of which never occur; with the tokenizer of the published"
        f" model: --tokenizer {HUB}{source}"
    ]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data of a run in one process."""

    config: Config
    """Config of the whole run."""
    data: Data
    num_eval_examples: int
    """Held-out examples of every evaluation; 0 for no evaluation."""
    _probes: dict[tuple[int, int, bytes], HostBatch] = field(default_factory=dict, init=False)
    """Probes of an iterator's data, by global batch, sequence length and rows."""

    @classmethod
    def of(
        cls,
        config: Config,
        run: RunDirectory | None = None,
        given: RandomAccess | Iterable[Any] | None = None,
        given_held_out: RandomAccess | None = None,
    ) -> "Inputs":
        """Read the data and check that it suffices for every phase. Does not wait for other
        processes.

        Args:
          run: the run to resume, with its stored tokenizer and held-out split; None: a new run.
          given: the data that a program gives, by number or as an iterator with a state; None: it
            is named by paths.
          given_held_out: the held-out data that a program gives; None: it is named by paths, or a
            share of the data.
        Raises:
          DataError: the data is unusable or too short.
        """
        model, task = config.model, task_of(config)
        tokenizer, by = (
            (None, None)
            if run is None
            else (tokenizer_of_run(run, config.data), held_out_in_run(run))
        )
        if run is not None:
            check_same_share(config, run)
        data = load_data(
            config.data,
            # The text of a recording is never cut, in no example.
            seq_len=min(config.seq_len, config.eval_seq_len)
            if task.reads == "recordings"
            else config.seq_len,
            vocab_size=model.vocab_size,
            model_name=model.name,
            tokenizer=tokenizer,
            by=by,
            kind=task.reads,
            labels=model.labels,
            label_place="last" if features_of(model).causal else "first",
            values_for=None if model.reads == "text" else model,
            given=given,
            held_out=config.evaluation.data,
            given_held_out=given_held_out,
            suggests_labels=config.task is None,
        )
        if isinstance(data.train, IteratedExamples):
            _check_one_length(config)
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
        config = replace(config, model=model_of(config, data.labels))
        config = with_mask_token(config, data.tokenizer)
        if run is None:  # a run that was begun without `random_below` keeps its draws
            config = with_random_tokens(config, data.tokenizer)
            data = data.with_notes(unused_vocabulary(config, data.tokenizer))
        inputs = cls(config=config, data=data, num_eval_examples=num_eval_examples)
        inputs.check_libraries()
        for phase in phases_of(config):
            # raises now if the text is too short for the phase, not after hours
            inputs._loader(phase, np.array([], np.int32))
        return inputs

    def on_all_data(self) -> "Inputs":
        """The same data, of which evaluations read all and training nothing. For data of which
        nothing is held out. Examples with labels are mixed, so that the first ones have all labels.
        """
        config, whole = self.config, mixed(self.data.train)
        number = check_held_out(
            whole,
            seq_len=config.eval_seq_len,
            respect_documents=config.data.respect_documents,
            num_examples=config.eval_examples,
        )
        on_all = replace(self, data=replace(self.data, held_out=whole), num_eval_examples=number)
        on_all.check_libraries()
        return on_all

    def check_libraries(self) -> None:
        """Raise DataError if a library that evaluations need is missing."""
        if self.num_transcribed:
            check_jiwer("; or --set evaluation.transcribed=0")

    def whole_held_out_batches(self) -> Iterator[HostBatch]:
        """The held-out examples, the same in every process."""
        assert self.data.held_out is not None
        return eval_batches(
            self.data.held_out,
            seq_len=self.config.eval_seq_len,
            num_rows=ROWS_AT_ONCE,
            rows=np.arange(ROWS_AT_ONCE),
            respect_documents=self.config.data.respect_documents,
            num_examples=self.num_eval_examples,
        )

    @property
    def num_transcribed(self) -> int:
        """Held-out recordings that an evaluation writes down."""
        held_out = self.data.held_out
        if not isinstance(held_out, Recordings):
            return 0
        number = min(self.config.evaluation.transcribed, self.num_eval_examples)
        return number if any(map(has_words, held_out.texts(range(number)))) else 0

    @property
    def evaluation(self) -> str:
        """The evaluation set and interval, in one line."""
        config, num_examples = self.config, self.num_eval_examples
        if not num_examples:
            return (
                "none: eval_every=0"
                if not config.eval_every
                else "none: nothing is held out"
                + ("" if isinstance(self.data.train, IteratedExamples) else NO_FRACTION)
            )
        text = f"every {config.eval_every} steps and at the end: " + (
            f"the first {num_examples:,} held-out examples"
            if num_examples == config.eval_examples
            else f"all {num_examples:,} held-out examples ({config.eval_examples:,} requested)"
        )
        is_old_name = config.eval_examples == (config.eval_batches or 0) * config.data.global_batch
        text += f" x {config.eval_seq_len:,} tokens, independent of the batch size"
        if self.num_transcribed:
            text += f"; word error rate of the first {self.num_transcribed:,}"
        return text + (
            f" (eval_batches={config.eval_batches} x {config.data.global_batch}; the setting is now"
            " called evaluation.examples)"
            if is_old_name
            else ""
        )

    def evaluation_change(self, before: Config) -> str | None:
        """A note that evaluations read other tokens than before the resume; None if they read the
        same tokens or there are no evaluations.

        Args:
          before: the config before the resume, with derived values, for the same data.
        """
        held_out, now = self.data.held_out, self.config
        if held_out is None or not self.num_eval_examples or not before.eval_every:
            return None
        num_before = min(before.eval_examples, count_examples(held_out, before.eval_seq_len))
        sets = [
            f"{number:,} x {length:,} tokens"
            for number, length in (
                (num_before, before.eval_seq_len),
                (self.num_eval_examples, now.eval_seq_len),
            )
        ]
        if sets[0] == sets[1]:
            return None
        restoring = {
            "evaluation.examples": before.eval_examples,
            "evaluation.seq_len": before.eval_seq_len,
        }
        return (
            f"evaluation: {sets[0]} before, {sets[1]} from now on: {NOT_COMPARABLE}; to restore the"
            " previous set: "
            + " ".join(f"--set {name}={value}" for name, value in restoring.items())
        )

    def position_after(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` says of the data, besides its identity: where its iterator
        is, if it is one."""
        train, phase = self.data.train, phase_after(self.config, step)
        if not isinstance(train, IteratedExamples):
            return {}
        examples = phase.examples_before + (step - phase.steps_before) * phase.global_batch
        return {POSITION: train.position_before(examples * phase.seq_len)}

    def go_on(self, metadata: Mapping[str, Any]) -> None:
        """Go to where the data's iterator was at a checkpoint, if it is that iterator.

        Args:
          metadata: the checkpoint's.
        Raises:
          DataError: its state does not bring back the same documents.
        """
        train, position = self.data.train, metadata.get(POSITION)
        before = (metadata.get("data") or {}).get("content")
        if isinstance(train, IteratedExamples) and position and before == train.digest:
            train.go_to(position)

    def put_back(self) -> None:
        """After the run, put the data's iterator back to where it was given, if it is one."""
        if isinstance(self.data.train, IteratedExamples):
            self.data.train.put_back()

    def phase_batches(self, program: Program, step: int) -> "PhaseBatches":
        """This process's rows of the batches of the phase that contains the step after `step`.

        Args:
          program: a program of that phase; its batch sharding determines the rows.
        """
        phase = phase_after(self.config, step)
        loader = self._loader(phase, local_rows(program.batch_sharding, phase.global_batch))
        held_out, config = self.data.held_out, self.config
        if held_out is None or not self.num_eval_examples:
            return PhaseBatches(loader=loader, held_out=None)
        num_rows = eval_rows(program.config, program.plan)
        batches = partial(
            eval_batches,
            held_out,
            seq_len=config.eval_seq_len,
            num_rows=num_rows,
            rows=local_rows(program.batch_sharding, num_rows),
            respect_documents=config.data.respect_documents,
            num_examples=self.num_eval_examples,
            begins_word=self._begins_word,
        )
        return PhaseBatches(
            loader=loader, held_out=HeldOut(batches=batches, transcripts=self._transcripts)
        )

    @property
    def _transcripts(self) -> Transcripts | None:
        """The recordings that evaluations write down."""
        held_out = self.data.held_out
        if not self.num_transcribed:
            return None
        assert isinstance(held_out, Recordings)
        return Transcripts(
            recordings=held_out,
            tokenizer=self.data.tokenizer,
            number=self.num_transcribed,
            seq_len=self.config.eval_seq_len,
        )

    @property
    def _begins_word(self) -> WordMarker | None:
        """What marks words, if the task masks whole ones."""
        is_wanted = task_of(self.config).masks_tokens and self.config.masking.whole_words
        return self.data.tokenizer.begins_word if is_wanted else None

    def probe(self, program: Program) -> Any:
        """A fixed batch for a program, on its devices. An iterator goes to its beginning for it
        only once."""
        config = program.config
        rows = local_rows(program.batch_sharding, config.data.global_batch)
        known = (config.data.global_batch, config.seq_len, rows.tobytes())
        if known in self._probes:
            return program.put_batch(self._probes[known])
        first = replace(
            phase_after(self.config, 0),
            global_batch=config.data.global_batch,
            seq_len=config.seq_len,
        )
        batch = self._loader(first, rows).batch(1)
        if isinstance(self.data.train, IteratedExamples):
            self._probes[known] = batch
        return program.put_batch(batch)

    def _loader(self, phase: TrainingPhase, rows: np.ndarray) -> BatchLoader:
        return BatchLoader(
            self.data.train,
            seq_len=phase.seq_len,
            global_batch=phase.global_batch,
            seed=self.config.seed,
            rows=rows,
            respect_documents=self.config.data.respect_documents,
            begins_word=self._begins_word,
            steps_before=phase.steps_before,
            examples_before=phase.examples_before,
        )


def _check_one_length(config: Config) -> None:
    """Raise DataError if phases have examples of other lengths, which begin the data anew."""
    lengths = {phase.seq_len for phase in phases_of(config)}
    if len(lengths) > 1:
        raise DataError(
            explain(
                "the examples of an iterator have one length",
                given=f"phases with examples of {' and '.join(map(str, sorted(lengths)))} tokens",
                do="give data by number or by paths, or phases with other batch sizes alone",
            )
        )


@dataclass(frozen=True, kw_only=True)
class PhaseBatches:
    """This process's rows of the batches of one phase."""

    loader: BatchLoader
    held_out: HeldOut | None
    """With the same examples in every phase; None without evaluations."""
