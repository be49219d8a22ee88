"""Text of generated tokens, in pieces, as far as it is certain."""

from collections.abc import Sequence

import numpy as np

from optimus_jax.data.tokenizers import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoded text ends with this while bytes of its last character are missing."""


class Detokenizer:
    """Turns tokens, one at a time, into pieces of text which, joined, are the text of all tokens.

    A piece is what a token adds to the text of a window of tokens, because a token's text may
    depend on the token before. Characters of which bytes are missing are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._window = [int(token) for token in prompt]
        self._num_shown = len(self._window)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty if its last character is incomplete."""
        self._window.append(token)
        piece = self.rest()
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return piece

    def rest(self) -> str:
        """The text that was held back, complete or not."""
        shown = self._tokenizer.decode(self._window[: self._num_shown])
        return self._tokenizer.decode(self._window)[len(shown) :]


class StreamedText:
    """The text of a sample, in pieces, up to the first of some texts that end it.

    What may be the beginning of such a text is held back.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""
        self.is_over = False

    def push(self, token: int) -> str:
        """The text that is certain after a token."""
        if self.is_over:
            return ""
        self._held += self._detokenizer.push(token)
        if (end := self._end()) is not None:
            self.is_over = True
            return self._held[:end]
        keep = max(map(self._overlap, self._stop), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain

    def rest(self) -> str:
        """The text that was held back."""
        if self.is_over:
            return ""
        self._held += self._detokenizer.rest()
        return self._held[: self._end()]

    def _end(self) -> int | None:
        """Where the first text of `stop` begins; None: there is none."""
        places = [place for each in self._stop if (place := self._held.find(each)) >= 0]
        return min(places, default=None)

    def _overlap(self, text: str) -> int:
        """Characters at the end that may begin a text."""
        return next(
            size for size in range(len(text) - 1, -1, -1) if self._held.endswith(text[:size])
        )
