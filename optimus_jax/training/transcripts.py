"""Held-out recordings that evaluations transcribe, and their word error rate.

Decoding is greedy and under the run's plan (training/next_token.py), so parameters stay where they
are.

Shapes: R rows of a batch over all processes, L length.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from optimus_jax.data.batch import HostBatch
from optimus_jax.data.recordings import Recordings, before_eos
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.data.word_errors import word_errors
from optimus_jax.mesh.sharding import local_rows, put_batch
from optimus_jax.models.shapes import Params
from optimus_jax.training.step import Program

LENGTH_FACTOR = 2
"""A text has at most this many times the tokens of the longest reference: a model that has learnt
little never ends it."""


@dataclass(frozen=True, kw_only=True)
class Transcripts:
    """Held-out recordings that an evaluation transcribes."""

    recordings: Recordings
    tokenizer: Tokenizer
    number: int
    """How many: the first ones."""
    seq_len: int
    """Length of the rows."""

    def batches(self, program: Program, num_rows: int) -> Iterator[HostBatch]:
        """This process's rows of all batches, with the tokens that ask for a text. The last
        recording takes the place of those that do not exist.
        """
        rows = local_rows(program.batch_sharding, num_rows)
        for first in range(0, self.number, num_rows):
            examples = np.minimum(first + rows, self.number - 1)
            batch = self.recordings.cut_examples(
                examples, seq_len=self.seq_len, respect_documents=True
            )
            batch["tokens"][:, self._start :] = 0
            yield batch | {"examples": rows.astype(np.int32)}

    def word_error_rate(
        self,
        program: Program,
        params: Params,
        batches: Iterable[HostBatch],
        num_rows: int,
        *,
        stops: Callable[[], bool],
    ) -> float | None:
        """That of all recordings; None if `stops` answered True before a token.

        Args:
          batches, num_rows: as of `batches`.
        """
        texts: list[str] = []
        for batch in batches:
            found = self.tokens_of(program, params, batch, num_rows, stops=stops)
            if found is None:
                return None
            texts += [self.tokenizer.decode(tokens).strip() for tokens in found]
        return word_errors(self.recordings.texts(range(self.number)), texts[: self.number])

    def tokens_of(
        self,
        program: Program,
        params: Params,
        batch: HostBatch,
        num_rows: int,
        *,
        stops: Callable[[], bool] = lambda: False,
    ) -> list[np.ndarray] | None:
        """Tokens of the text of each row of a batch, in all processes, without those that ask for
        it and eos.
        """
        rows, eos = local_rows(program.batch_sharding, num_rows), self.tokenizer.eos
        tokens, asked = batch["tokens"], batch["loss_mask"]
        on_devices = program.put_batch(batch, num_rows)
        written = np.full((num_rows, self._room), eos, np.int32)
        is_over = np.zeros(num_rows, bool)
        for number in range(self._room):
            if stops():
                return None
            place = self._start - 1 + number
            asked[:], asked[:, place] = False, True
            changed = {"tokens": tokens, "loss_mask": asked}
            on_devices |= put_batch(changed, program.batch_sharding, num_rows)
            found = np.asarray(jax.device_get(program.next_tokens(params, on_devices)))
            written[:, number] = np.where(is_over, eos, found)
            is_over |= found == eos
            if is_over.all():
                break
            if place + 1 < self.seq_len:
                tokens[:, place + 1] = found[rows]
        return [before_eos(row, eos) for row in written]

    @property
    def _start(self) -> int:
        """Position of the first token of a text."""
        return self.recordings.model.frames + self.recordings.num_prompt_tokens

    @property
    def _room(self) -> int:
        """Most tokens of a text."""
        prompt = self.recordings.num_prompt_tokens
        longest = max(len(each.tokens) for each in self.recordings.items[: self.number]) - prompt
        return min(LENGTH_FACTOR * longest, self.seq_len - self._start + 1)
