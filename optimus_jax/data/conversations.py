"""Conversations as tokens, and the examples that are packed of them.

A conversation is never split across examples. One of n tokens takes up n - 1 places of an example:
its last token is a target only. Conversations of more than seq_len + 1 tokens are truncated or
dropped. The two of a preference pair share an example, one after the other. Each conversation has
its own positions and segment; padding at the end of an example is a segment of its own whose
targets do not count. Which conversations share an example depends on the data and seq_len alone
(packing.py), and examples are shuffled as those of a stream are.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from optimus_jax.config.data import EVERY_ROLE, TooLong
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.digests import WholeDigest
from optimus_jax.data.packing import Packing, pack
from optimus_jax.data.record_names import ASSISTANT
from optimus_jax.data.rendered_chat import SELDOM_LEARNT, RenderedChat
from optimus_jax.data.sampler import ExampleOrder, example_order
from optimus_jax.data.token_ids import ChatTokens, token_dtype
from optimus_jax.data.tokenizers import Tokenizer, groups
from optimus_jax.data.tokens import chosen_documents
from optimus_jax.errors import DataError, explain


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversations:
    """Conversations, one after another."""

    name: str
    """Where they come from, for messages."""
    tokens: np.ndarray
    """Token ids, uint16 or uint32 [N]."""
    counts: np.ndarray
    """Whether each token counts in the loss when it is the target: bool [N]."""
    starts: np.ndarray
    """Where each conversation begins, and the end: int64 [C + 1]."""
    vocab_size: int
    """Token ids are below this."""
    too_long: TooLong
    """What is done with those that are longer than an example."""
    group_size: int = 1
    """Number of conversations in a row that share an example: 2 for preference pairs."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_conversations(self) -> int:
        return len(self.starts) - 1

    @property
    def num_pieces(self) -> int:
        """Number of conversations, or of groups that share an example."""
        return self.num_conversations // self.group_size

    @property
    def sizes(self) -> np.ndarray:
        """Places that each takes up in an example, if it is not truncated: int64 [C]."""
        return np.diff(self.starts) - 1

    def sizes_in(self, seq_len: int) -> np.ndarray:
        """Places that each takes up in an example of this length: int64 [C]. Of a group that is
        longer, each is truncated to its share.
        """
        is_long = np.repeat(self._by_piece(self.sizes) > seq_len, self.group_size)
        return np.where(is_long, np.minimum(self.sizes, seq_len // self.group_size), self.sizes)

    def _by_piece(self, of_each: np.ndarray) -> np.ndarray:
        """Sums over the conversations of each piece."""
        return of_each.reshape(-1, self.group_size).sum(1)

    @property
    def unit(self) -> str:
        """What a piece is, for messages."""
        return _unit(self.group_size)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that differ if the borders or what counts differ."""
        whole = WholeDigest()
        whole.update(self.starts.astype("<i8"))
        whole.update(np.packbits(self.counts))
        return whole.hexdigest()

    @functools.cached_property
    def _packings(self) -> dict[int, tuple[np.ndarray, Packing]]:
        return {}

    def packing(self, seq_len: int) -> tuple[np.ndarray, Packing]:
        """The numbers of the pieces that are used, int64 [P], and how these are packed."""
        if seq_len not in self._packings:
            used = self._used(seq_len)
            sizes = self._by_piece(self.sizes_in(seq_len))[used]
            self._packings[seq_len] = used, pack(sizes, seq_len)
        return self._packings[seq_len]

    def _used(self, seq_len: int) -> np.ndarray:
        if self.too_long == "drop":
            return np.flatnonzero(self._by_piece(self.sizes) <= seq_len)
        # A part without a token that counts teaches nothing.
        counted = self._counted_until(self.sizes_in(seq_len))
        return np.flatnonzero(counted.reshape(-1, self.group_size).all(1))

    def _counted_until(self, sizes: np.ndarray) -> np.ndarray:
        """Number of targets that count among the first `sizes` of each conversation."""
        sums = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        begins = self.starts[:-1] + 1
        return sums[begins + sizes] - sums[begins]

    def count_examples(self, seq_len: int) -> int:
        """Number of examples of `seq_len` tokens."""
        return self.packing(seq_len)[1].num_examples

    def description(self, seq_len: int) -> str:
        """The examples, and how full they are, in a line."""
        used, packing = self.packing(seq_len)
        sizes = self._by_piece(self.sizes_in(seq_len))
        share = int(sizes[used].sum()) / max(1, packing.num_examples * seq_len)
        return (
            f"{packing.num_examples:,} examples of {seq_len:,} tokens to train on, {share:.1%}"
            f" full, in which {self.count_targets(seq_len):,} tokens count"
        )

    def count_targets(self, seq_len: int) -> int:
        """Number of targets that count in all examples."""
        used, _ = self.packing(seq_len)
        counted = self._counted_until(self.sizes_in(seq_len))
        return int(self._by_piece(counted)[used].sum())

    def example_order(self, seq_len: int, seed: int) -> ExampleOrder:
        """An endless sequence of example numbers, a function of (seq_len, seed) alone."""
        return example_order(self.count_examples(seq_len), seed)

    def too_long_notes(self, seq_len: int) -> list[str]:
        """What a user should know about conversations that do not fit into an example."""
        sizes = self._by_piece(self.sizes)
        num_long = int((sizes > seq_len).sum())
        if not num_long:
            return []
        num_used = int((sizes[self.packing(seq_len)[0]] > seq_len).sum())
        done = [f"{num_used:,} truncated"] if num_used else []
        if num_long > num_used:
            why = "" if self.too_long == "drop" else ", since nothing that counts would remain"
            done.append(f"{num_long - num_used:,} dropped{why}")
        return [
            f"{num_long:,} {self.unit}(s) of {self.name} are longer than seq_len={seq_len:,}"
            f" (data.too_long={self.too_long}): {'; '.join(done)}"
        ]

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """The examples numbered `examples` [R].

        Returns:
          The per-token arrays of a batch, [R, seq_len] (data/batch.py).
        """
        assert respect_documents, "checked when the data was loaded"
        shape = (len(examples), seq_len)
        tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        loss_mask = np.zeros(shape, bool)
        used, packing = self.packing(seq_len)
        sizes = self.sizes_in(seq_len)
        for row, example in enumerate(examples):
            place = segment = 0
            pieces = used[packing[int(example)]]
            parts = pieces[:, None] * self.group_size + np.arange(self.group_size)
            for conversation in parts.reshape(-1).tolist():
                start, size = int(self.starts[conversation]), int(sizes[conversation])
                here = row, slice(place, place + size)
                tokens[here] = self.tokens[start : start + size]
                targets[here] = self.tokens[start + 1 : start + size + 1]
                loss_mask[here] = self.counts[start + 1 : start + size + 1]
                positions[here], segments[here] = np.arange(size), segment
                place, segment = place + size, segment + 1
            positions[row, place:], segments[row, place:] = np.arange(seq_len - place), segment
        return {
            "tokens": tokens,
            "targets": targets,
            "positions": positions,
            "segments": segments,
            "loss_mask": loss_mask,
        }

    def take(self, which: np.ndarray, name: str | None = None) -> "Conversations":
        """The pieces where `which`, bool [pieces], is True, in order."""
        which = np.repeat(which, self.group_size)
        is_taken = np.repeat(which, np.diff(self.starts))
        return dataclasses.replace(
            self,
            name=name or self.name,
            tokens=self.tokens[is_taken],
            counts=self.counts[is_taken],
            starts=np.concatenate([[0], np.cumsum(np.diff(self.starts)[which])]),
        )


def split_conversations(
    whole: Conversations, eval_fraction: float
) -> tuple[Conversations, Conversations | None]:
    """Split conversations into those to train on and those held out, by their hash.

    Copies of a conversation go to the same side unless all are alike.

    Raises:
      DataError: there are fewer than two.
    """
    if eval_fraction == 0:
        return whole, None
    if whole.num_pieces < 2:
        raise DataError(
            explain(
                f"{whole.name} has too few conversations to hold some out",
                given=f"{whole.num_pieces}; data.eval_fraction={eval_fraction}",
                do="give more, or --set data.eval_fraction=0",
            )
        )
    ends = whole.starts[whole.group_size :: whole.group_size]
    is_held_out = chosen_documents(whole.tokens, ends, eval_fraction)
    return whole.take(~is_held_out), whole.take(is_held_out, f"{whole.name} (held out)")


def encode_conversations(
    tokenizer: Tokenizer,
    chats: Iterable[tuple[RenderedChat, ...]],
    name: str,
    too_long: TooLong,
    group_size: int = 1,
    loss_on: Collection[str] = (),
) -> tuple[Conversations, list[str]]:
    """All conversations as tokens, and notes about those that were left out.

    Shows progress while stderr is a terminal.

    Args:
      chats: each with the others that share its example, `group_size` in all.
      loss_on: roles that were asked for (data.loss_on), for notes.
    Raises:
      DataError: no token of any conversation counts.
    """
    found: list[ChatTokens] = []
    num_without, stops, roles = 0, False, set[str]()
    for group in groups(chats, lambda piece: sum(len(chat.text) for chat in piece)):
        tokens = iter(tokenizer.encode_chats([chat for piece in group for chat in piece]))
        for piece in group:
            encoded = [next(tokens) for _ in piece]
            roles = roles.union(*(chat.roles for chat in piece))
            if all(chat.counts[1:].any() for chat in encoded):
                found += encoded
                stops |= all(chat.stops for chat in piece)
            else:
                num_without += 1
    if not found:
        raise DataError(
            explain(
                f"no token of {name} counts in the loss",
                given=f"{num_without:,} {_unit(group_size)}(s)"
                + (f" with the roles {', '.join(sorted(roles))}" if roles else "")
                + f"; data.loss_on={','.join(loss_on)}",
                do=_what_may_count(roles, loss_on),
            )
        )
    notes = []
    if roles and (absent := sorted({*loss_on} - {EVERY_ROLE} - roles)):
        notes.append(
            f"no message of {name} has the role {' or '.join(map(repr, absent))} (data.loss_on);"
            f" there are {', '.join(sorted(roles))}"
        )
    if num_without:
        notes.append(
            f"{num_without:,} {_unit(group_size)}(s) of {name} left out, because no token of them"
            " counts (data.loss_on)"
        )
    if not stops:
        notes.append(
            f"what counts of {name} never ends with a special token, so the model will not learn"
            " to end its turn: let the chat template write one after it, such as {{ eos_token }}"
            " (within {% generation %}, if it has that)"
        )
    conversations = Conversations(
        name=name,
        tokens=np.concatenate(
            [chat.ids for chat in found], dtype=token_dtype(tokenizer.vocab_size)
        ),
        counts=np.concatenate([chat.counts for chat in found]),
        starts=np.concatenate([[0], np.cumsum([len(chat.ids) for chat in found])]),
        vocab_size=tokenizer.vocab_size,
        too_long=too_long,
        group_size=group_size,
    )
    return conversations, notes


def _what_may_count(roles: Collection[str], loss_on: Collection[str]) -> str:
    """Advice on data.loss_on where nothing counts, by the roles that there are."""
    if roles and not {*roles} & {*loss_on}:
        usual = sorted({*roles} - SELDOM_LEARNT) or sorted(roles)
        chosen = ASSISTANT if ASSISTANT in usual else ",".join(usual)
        return f"name roles that are there, such as: --set data.loss_on={chosen}"
    return (
        "give conversations whose messages are not empty, a chat template that writes them"
        " (--set data.chat_template=FILE), or count every token: --set data.loss_on=all"
    )


def _unit(group_size: int) -> str:
    return "conversation" if group_size == 1 else "pair"
