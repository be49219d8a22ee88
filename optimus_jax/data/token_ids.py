"""Token ids of texts and conversations, and the dtype of token ids."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optimus_jax.data.rendered_chat import RenderedChat


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The dtype that stores ids below `vocab_size`."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class SpannedTokens(NamedTuple):
    """A text as tokens."""

    ids: np.ndarray
    """Token ids, uint16 or uint32 [N]."""
    spans: np.ndarray
    """The characters that each stands for, the first and the one after the last: int64 [N, 2]."""


class TextFrame(NamedTuple):
    """The special tokens in which a tokenizer puts a text, or two."""

    before: tuple[int, ...]
    """Ids before a text that is alone."""
    after: tuple[int, ...]
    """Ids after a text that is alone."""
    first: tuple[int, ...]
    """Ids before the first of two texts."""
    middle: tuple[int, ...]
    """Ids between two texts."""
    last: tuple[int, ...]
    """Ids after the second text."""
    second_type: int = 1
    """Type of the tokens of a second text and of those after it; others have type 0."""

    def around(self, texts: Sequence[np.ndarray], most: int) -> tuple[np.ndarray, np.ndarray]:
        """One or two texts in the frame: their ids, and types, uint8 [N].

        Args:
          texts: token ids of each.
          most: number of tokens of the result, at most. Texts are cut at their ends to fit, the
            longer of two first.
        """
        is_pair, sizes = len(texts) == 2, self.fitting(texts, most)
        parts: list[Sequence[int] | np.ndarray] = [self.beginning(len(texts))]
        for text, size, ids in zip(texts, sizes, self.ends(len(texts)), strict=True):
            parts += [text[:size], ids]
        ids = np.concatenate([np.asarray(part, texts[0].dtype) for part in parts])
        types = np.zeros(len(ids), np.uint8)
        if is_pair:
            types[len(ids) - sizes[1] - len(self.last) :] = self.second_type
        return ids, types

    def fitting(self, texts: Sequence[np.ndarray], most: int) -> list[int]:
        """How many tokens of each text `around` keeps."""
        return [int(size) for size in self.fitting_sizes([len(text) for text in texts], most)]

    def fitting_sizes(self, sizes: Sequence[Any], most: int) -> list[Any]:
        """How many tokens remain of one or two texts with these sizes, ints or int [C] each."""
        room = max(0, most - self.num_tokens(len(sizes)))
        if len(sizes) == 1:
            return [np.minimum(sizes[0], room)]
        first = np.minimum(sizes[0], np.maximum(room // 2, room - sizes[1]))
        return [first, np.minimum(sizes[1], room - first)]

    def num_tokens(self, num_texts: int) -> int:
        """Number of special tokens around one text, or two."""
        return len(self.beginning(num_texts)) + sum(map(len, self.ends(num_texts)))

    def beginning(self, num_texts: int) -> tuple[int, ...]:
        """The ids before one text, or the first of two."""
        return self.before if num_texts == 1 else self.first

    def led_by(self, token: int) -> "TextFrame":
        """The frame with this token before texts that no token would precede."""
        return self._replace(before=self.before or (token,), first=self.first or (token,))

    def ends(self, num_texts: int) -> tuple[tuple[int, ...], ...]:
        """The ids after each of one or two texts."""
        return (self.middle, self.last) if num_texts == 2 else (self.after,)


def frame_of_ends(eos: int) -> TextFrame:
    """The frame of a tokenizer that has no special tokens for it: each text ends with eos."""
    return TextFrame(before=(), after=(eos,), first=(), middle=(eos,), last=(eos,))


class ChatTokens(NamedTuple):
    """A conversation as tokens."""

    ids: np.ndarray
    """Token ids, uint16 or uint32 [N]."""
    counts: np.ndarray
    """Whether each token counts in the loss when it is the target: bool [N]."""


def chat_tokens(chat: RenderedChat, ids: np.ndarray, spans: np.ndarray, eos: int) -> ChatTokens:
    """A conversation's ids [N], which stand for the characters `spans` [N, 2], with what counts."""
    counts = np.zeros(len(ids), bool)
    for start, stop in chat.counted:
        counts |= (spans[:, 1] > start) & (spans[:, 0] < stop)
    if chat.ends:
        ids = np.append(ids, ids.dtype.type(eos))
        counts = np.append(counts, chat.end_counts)
    return ChatTokens(ids, counts)
