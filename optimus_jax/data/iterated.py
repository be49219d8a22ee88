"""Data that a program gives in turn, with a state: documents once each, in their own order.

It is an iterator or an iterable, such as grain's, PyTorch's StatefulDataLoader or an
IterableDataset of `datasets`. Its documents form one endless stream of tokens, and example n begins
with token n * seq_len. So a batch still depends on its step alone. To get to an earlier token, the
iterator is put back to a state before it, and documents are drawn again. A checkpoint has a
*position*: such a state, how many tokens to leave out after it, and their digest.

All processes draw the same documents for a step, whatever rows they need.
"""

import base64
import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

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
CHECKED_TOKENS = 4096
"""Tokens at the beginning that tell this iterator from others, and are drawn twice."""
MAX_EMPTY = 100_000
"""Items in a row without a token, from which on the iterator holds no text."""
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""Names of what reads and writes the state: of grain's iterators, and of PyTorch's loaders."""
_PUT_BACK: MutableMapping[Any, tuple[Any, Any]] = WeakKeyDictionary()
"""Iterables that were put back -> the state that they still say they have, as an IterableDataset of
`datasets` does until it gives an item, and the one that they begin from."""
MAKE_NEW = "if it was read before, make a new one"
"""Advice for an iterator that does not begin where it did."""
Position = dict[str, Any]
"""JSON values: `state`, `token` (number of the first token after the state), `skip` (tokens to
leave out) and `skipped` (their digest)."""


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
    """An iterator's documents, as a source of examples (data/sampler.py). Threads may share it.

    Raises:
      DataError: the iterator holds no text, its state cannot be kept in a checkpoint, or does not
        bring back the same documents.
    """

    name: str
    """Where it comes from, for messages."""
    items: Iterable[Any]
    """The iterator, or what makes one. It is moved, and nobody else may use it until
    `put_back`."""
    tokens_of: Callable[[Any, int], np.ndarray]
    """(item, its number) -> ids of the document, its end included, uint16 or uint32 [N]. Empty: the
    item is left out."""
    eos: int
    vocab_size: int
    """Token ids are below this."""
    digest: str = field(init=False)
    """Of the first CHECKED_TOKENS, in hex digits."""
    _states: list[tuple[int, Any]] = field(default_factory=list)
    """(number of the token that comes after the state, state as JSON), in order; the first one is
    that of the beginning."""
    _tokens: np.ndarray = field(default_factory=lambda: np.array([], np.uint16))
    """Tokens from `_first` on, as far as they are joined."""
    _parts: list[np.ndarray] = field(default_factory=list)
    """Documents after them."""
    _first: int = 0
    _end: int = 0
    """Number of the token that is drawn next."""
    _num_items: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        methods = _methods_of(self.items)
        assert methods is not None
        self._read_state, self._write_state = methods
        self._states.append((0, self._first_state()))
        self._iterator = self._begun()
        drawn = []
        for _ in range(2):
            while self._end < CHECKED_TOKENS and self._draw(may_end=True):
                pass
            drawn.append(_digest(self._joined()[:CHECKED_TOKENS]))
            has_text = self._end > 0
            self._seek(0)
        if not has_text:
            raise DataError(
                explain(f"{self.name} holds no text", given="no item", do="give some documents")
            )
        if drawn[0] != drawn[1]:
            raise self._inexact("at its beginning")
        self.digest = drawn[0]

    def __len__(self) -> int:
        """Number of tokens: without an end."""
        return ENDLESS

    def count_examples(self, seq_len: int) -> int:
        """Examples per epoch: without an end."""
        return ENDLESS

    def example_order(self, seq_len: int, seed: int) -> ExampleOrder:
        """The iterator's own order."""
        return range(ENDLESS)

    def draw_through(self, examples: range, seq_len: int) -> None:
        """Draw the documents of some examples, so that all processes draw the same ones.

        Raises DataError if the iterator ends before.
        """
        with self._lock:
            self._reach(examples.start * seq_len, examples.stop * seq_len + 1)

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """As the function of that name.

        Raises DataError if the iterator ends before, or gives what is no document.
        """
        first = int(examples.min()) * seq_len if len(examples) else 0
        past = (int(examples.max()) + 1) * seq_len + 1 if len(examples) else 0
        with self._lock:
            self._reach(first, past)
            tokens = self._joined()[first - self._first : past - self._first]
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
            self._reach(after, token)
            skipped = self._joined()[after - self._first : token - self._first]
        return {"state": state, "token": after, "skip": token - after, "skipped": _digest(skipped)}

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go to a position of a checkpoint: earlier tokens are those of the beginning.

        Raises DataError if the state does not bring back the tokens that came after it.
        """
        after, token = int(position["token"]), int(position["token"]) + int(position["skip"])
        with self._lock:
            self._states[1:] = [(after, position["state"])] if after else []
            self._seek(token)
            self._reach(after, token)
            if _digest(self._joined()[: token - after]) != position["skipped"]:
                raise self._inexact("where a checkpoint left it")

    def put_back(self) -> None:
        """Put the iterator back to where it was when it was given, so that another run can begin
        with it. This source gives nothing any more.
        """
        with self._lock, suppress(Exception):  # one that cannot be put back has to be made again
            first = self._states[0][1]
            del self._states[1:]
            self._seek(0)
            self._iterator = iter(())  # batches may still be made ahead
            if (seen := self._state()) != first:
                _PUT_BACK[self.items] = seen, first

    def _first_state(self) -> Any:
        """The state from which its documents begin."""
        state, put_back = self._state(), None
        with suppress(TypeError):  # it cannot be a key
            put_back = _PUT_BACK.get(self.items)
        return put_back[1] if put_back is not None and put_back[0] == state else state

    def _reach(self, first: int, past: int) -> None:
        """Have tokens `first` to `past` - 1. Of those before them, only what comes after the last
        state is kept; what lies between two states is not drawn again to get there."""
        after, _ = self._state_before(first)
        if first < self._first or after > self._end:
            self._seek(first)
        while self._end < past:
            self._draw()
        kept, _ = self._state_before(first)
        if kept > self._first:
            self._tokens, self._first = self._joined()[kept - self._first :], kept

    def _joined(self) -> np.ndarray:
        """The tokens from `_first` on."""
        if self._parts:
            self._tokens, self._parts = np.concatenate([self._tokens, *self._parts]), []
        return self._tokens

    def _seek(self, token: int) -> None:
        """Put the iterator back to the last state before a token."""
        after, state = self._state_before(token)
        try:
            self._write_state(_decoded(state))
            self._iterator = self._begun()
        except Exception as error:
            raise DataError(
                explain(
                    f"{self.name} does not take back its state",
                    given=f"{type(self.items).__name__}: {type(error).__name__}: {error}",
                    do="give the same kind of iterator, whose state can be set",
                )
            ) from error
        self._tokens, self._parts = self._tokens[:0], []
        self._first = self._end = after

    def _begun(self) -> Iterator[Any]:
        """What gives the items; an iterator is used as it is."""
        return self.items if isinstance(self.items, Iterator) else iter(self.items)

    def _state_before(self, token: int) -> tuple[int, Any]:
        return self._states[bisect_right(self._states, token, key=lambda each: each[0]) - 1]

    def _draw(self, *, may_end: bool = False) -> bool:
        """Draw a document; False: there is none, which is an error unless it `may_end`."""
        last, _ = self._states[-1]
        if self._end >= last + STRIDE_TOKENS:
            self._states.append((self._end, self._state()))
            if len(self._states) > MAX_STATES:
                del self._states[1 : MAX_STATES // 2 : 2]
        for _ in range(MAX_EMPTY):
            try:
                item = next(self._iterator)
            except StopIteration:
                if may_end:
                    return False
                raise self._ended() from None
            self._num_items += 1
            if len(tokens := self.tokens_of(item, self._num_items)):
                self._parts.append(tokens)
                self._end += len(tokens)
                return True
        raise DataError(
            explain(
                f"{self.name} holds no text",
                given=f"{MAX_EMPTY:,} items in a row without any",
                do="give documents, or name the field that has them: data.text_field",
            )
        )

    def _ended(self) -> DataError:
        ended = DataError(
            explain(
                f"{self.name} has ended",
                given=f"{self._end:,} tokens since it began",
                do="give an iterator that goes on, such as one that repeats its items, or train for"
                " fewer steps",
            )
        )
        ended.raised_by_all_processes = True  # they draw the same documents for each step
        return ended

    def _inexact(self, where: str) -> DataError:
        return DataError(
            explain(
                f"the state of {self.name} does not bring back the same documents",
                given=f"other ones {where}, from a {type(self.items).__name__}",
                do="give an iterator whose state holds all that its order depends on; of a shuffle"
                f" buffer it does not: shuffle before; {MAKE_NEW}",
            )
        )

    def _state(self) -> Any:
        """The iterator's state, as JSON values."""
        try:
            state = _encoded(self._read_state())
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                explain(
                    f"the state of {self.name} cannot be kept in a checkpoint",
                    given=f"{type(self.items).__name__}: {error}",
                    do="give an iterator whose state is numbers, texts, bytes, arrays, lists and"
                    " dicts",
                )
            ) from error
        return state


def _digest(tokens: np.ndarray) -> str:
    return hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=8).hexdigest()


_BYTES, _TUPLE, _ITEMS, _ARRAY, _TENSOR = "<bytes>", "<tuple>", "<items>", "<array>", "<tensor>"
"""Names of what JSON does not have, as the one name of an object."""


def _encoded(value: Any) -> Any:
    """A state as JSON values."""
    match value:
        case bytes():
            return {_BYTES: base64.b64encode(value).decode("ascii")}
        case Mapping():
            names = value.keys()
            if all(isinstance(name, str) and not name.startswith("<") for name in names):
                return {name: _encoded(item) for name, item in value.items()}
            return {_ITEMS: [[_encoded(name), _encoded(item)] for name, item in value.items()]}
        case tuple():
            return {_TUPLE: [_encoded(item) for item in value]}
        case list():
            return [_encoded(item) for item in value]
        case np.ndarray():
            return {_ARRAY: [value.dtype.str, list(value.shape), _encoded(value.tobytes())]}
        case np.generic():
            return value.item()
    if type(value).__module__ == "torch":
        return {_TENSOR: _encoded(value.numpy())}
    return value


def _decoded(value: Any) -> Any:
    """The inverse of `_encoded`."""
    match value:
        case {"<bytes>": text}:
            return base64.b64decode(text)
        case {"<tuple>": items}:
            return tuple(map(_decoded, items))
        case {"<items>": items}:
            return {_decoded(name): _decoded(item) for name, item in items}
        case {"<array>": [dtype, shape, content]}:
            return np.frombuffer(_decoded(content), dtype).reshape(shape).copy()
        case {"<tensor>": array}:
            import torch  # pyright: ignore[reportMissingImports]

            return torch.from_numpy(_decoded(array))
        case dict():
            return {name: _decoded(item) for name, item in value.items()}
        case list():
            return [_decoded(item) for item in value]
    return value
