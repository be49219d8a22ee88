"""Data that a program gives in turn, with a state: documents once each, in their own order.

It is an iterator or an iterable, such as grain's, PyTorch's StatefulDataLoader or an
IterableDataset of `datasets`. Its documents form one endless stream of tokens, and example n begins
with token n * seq_len. So a batch still depends on its step alone. To get to an earlier token, the
iterator is put back to a state before it, and documents are drawn again. A checkpoint has a
*position*: such a state, and how many tokens to leave out after it.
"""

import base64
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optimus_jax.data.batch import HostBatch
from optimus_jax.data.sampler import ExampleOrder, cut_examples
from optimus_jax.data.tokens import TokenStream
from optimus_jax.errors import DataError, explain

ENDLESS = 2**40
"""Examples of an iterator, whose end is not known."""
STRIDE_TOKENS = 2**16
"""Tokens between two states that are kept."""
MAX_STATES = 4096
"""States that are kept; of more, every second of the older half is forgotten."""
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""Names of what reads and writes the state: of grain's iterators, and of PyTorch's loaders."""
_BYTES = "base64"
Position = dict[str, Any]
"""JSON values: `state`, `token` (number of the first token after the state), and `skip` (tokens to
leave out)."""


def has_state(data: object) -> bool:
    """Whether data gives its items in turn, and has a state that can be read and written."""
    return isinstance(data, Iterable) and _methods_of(data) is not None


def _methods_of(data: object) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    for read, write in _METHODS:
        if callable(getattr(data, read, None)) and callable(getattr(data, write, None)):
            return getattr(data, read), getattr(data, write)
    return None


@dataclass(eq=False)
class IteratedExamples:
    """An iterator's documents, as a source of examples (data/sampler.py). Threads may share it."""

    name: str
    """Where it comes from, for messages."""
    items: Iterable[Any]
    """The iterator, or what makes one. It is moved; nobody else may use it."""
    tokens_of: Callable[[Any, int], np.ndarray]
    """(item, its number) -> ids of the document, its end included, uint16 or uint32 [N]. Empty: the
    item is left out."""
    eos: int
    vocab_size: int
    """Token ids are below this."""
    _states: list[tuple[int, Any]] = field(default_factory=list)
    """(number of the token that comes after the state, state as JSON), in order; the first one is
    that of the beginning."""
    _parts: list[np.ndarray] = field(default_factory=list)
    """Tokens from `_first` on."""
    _first: int = 0
    _end: int = 0
    """Number of the token that is drawn next."""
    _num_items: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        methods = _methods_of(self.items)
        assert methods is not None
        self._read_state, self._write_state = methods
        self._states.append((0, self._state()))
        self._iterator = iter(self.items)

    def __len__(self) -> int:
        """Number of tokens: without an end."""
        return ENDLESS

    def count_examples(self, seq_len: int) -> int:
        """Examples per epoch: without an end."""
        return ENDLESS

    def example_order(self, seq_len: int, seed: int) -> ExampleOrder:
        """The iterator's own order."""
        return range(ENDLESS)

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """As the function of that name.

        Raises DataError if the iterator ends before, or gives what is no document.
        """
        first = int(examples.min()) * seq_len if len(examples) else 0
        past = (int(examples.max()) + 1) * seq_len + 1 if len(examples) else 0
        with self._lock:
            tokens = self._tokens(first, past)
        stream = TokenStream(
            name=self.name, tokens=tokens, eos=self.eos, vocab_size=self.vocab_size
        )
        return cut_examples(
            stream,
            examples - first // seq_len,
            seq_len=seq_len,
            respect_documents=respect_documents,
        )

    def position_before(self, token: int) -> Position:
        """How to get to a token that was drawn, or is the next one to be."""
        with self._lock:
            after, state = self._state_before(token)
        return {"state": state, "token": after, "skip": token - after}

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Begin at a position of a checkpoint: earlier tokens are those of the beginning."""
        with self._lock:
            self._states[1:] = [(int(position["token"]), position["state"])]
            self._seek(int(position["token"]) + int(position["skip"]))

    def _tokens(self, first: int, past: int) -> np.ndarray:
        """Tokens `first` to `past` - 1. Those before them are forgotten."""
        if first < self._first or first > self._end:
            self._seek(first)
        while self._end < past:
            self._draw()
        joined = np.concatenate(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts, self._first = [joined[first - self._first :]], first
        return self._parts[0][: past - first]

    def _seek(self, token: int) -> None:
        """Put the iterator back to the last state before a token."""
        after, state = self._state_before(token)
        self._write_state(_decoded(state))
        self._iterator = iter(self.items)
        self._parts, self._first, self._end = [], after, after

    def _state_before(self, token: int) -> tuple[int, Any]:
        return self._states[bisect_right(self._states, token, key=lambda each: each[0]) - 1]

    def _draw(self) -> None:
        """Draw a document."""
        last, _ = self._states[-1]
        if self._end >= last + STRIDE_TOKENS:
            self._states.append((self._end, self._state()))
            if len(self._states) > MAX_STATES:
                del self._states[1 : MAX_STATES // 2 : 2]
        try:
            item = next(self._iterator)
        except StopIteration:
            raise DataError(
                explain(
                    f"{self.name} has ended",
                    given=f"{self._end:,} tokens since it began",
                    do="give an iterator that goes on, such as one that repeats its items, or train"
                    " for fewer steps",
                )
            ) from None
        self._num_items += 1
        if len(tokens := self.tokens_of(item, self._num_items)):
            self._parts.append(tokens)
            self._end += len(tokens)

    def _state(self) -> Any:
        """The iterator's state, as JSON values."""
        state = _encoded(self._read_state())
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                explain(
                    f"the state of {self.name} cannot be kept in a checkpoint",
                    given=f"{type(self.items).__name__}: {error}",
                    do="give an iterator whose state is numbers, texts, bytes, lists and dicts",
                )
            ) from error
        return state


def _encoded(value: Any) -> Any:
    """A state in which bytes are texts."""
    match value:
        case bytes():
            return {_BYTES: base64.b64encode(value).decode("ascii")}
        case Mapping():
            return {name: _encoded(item) for name, item in value.items()}
        case list() | tuple():
            return [_encoded(item) for item in value]
        case np.integer():
            return int(value)
    return value


def _decoded(value: Any) -> Any:
    """The inverse of `_encoded`; tuples are lists."""
    match value:
        case dict() if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        case dict():
            return {name: _decoded(item) for name, item in value.items()}
        case list():
            return [_decoded(item) for item in value]
    return value
