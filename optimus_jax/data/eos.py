"""Chooses the token that ends a document (eos), and keeps texts from containing it.

The tokenizers library has a switch for special tokens spelled out in a text
(`encode_special_tokens`), but it does not suffice: a vocabulary may also hold such a token as an
ordinary piece, as those of SentencePiece do, merges may form it, a normalizer may produce it, and
an added token need not be marked special. So this module checks the ids that come out.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from optimus_jax.config.settings import shown
from optimus_jax.errors import DataError, explain

EOS_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<|eot_id|>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
"""Names of eos in common model families.

If nothing else names eos, it is the first of these that the vocabulary has.
"""
CONFIG = "tokenizer_config.json"
_TOKENIZER_CONFIGS = (CONFIG, "special_tokens_map.json")
"""Files beside a tokenizer.json that name its special tokens."""
_LONGEST_SURFACE = 64
"""Longest text of a reserved token, in characters, for which ordinary spellings are searched."""


@dataclass(kw_only=True)
class RespellingCounts:
    """Counts of what was done with reserved tokens found in texts."""

    documents: int = 0
    """Texts that contained reserved tokens."""
    respelled: int = 0
    """Reserved tokens replaced by ordinary ones."""
    changed: int = 0
    """Of those, tokens whose exact text the vocabulary cannot write, so that the text differs."""
    dropped: int = 0
    """Tokens left out because the vocabulary has no other way to write them."""

    def notes(self) -> list[str]:
        """What a user should know about these counts, in at most one sentence."""
        if not self.documents:
            return []
        changed = (
            f" ({self.changed:,} of them with other text than the document has, "
            "because the vocabulary cannot write it)"
            if self.changed
            else ""
        )
        dropped = (
            f", {self.dropped:,} left out because the vocabulary cannot write them otherwise"
            if self.dropped
            else ""
        )
        return [
            f"{self.documents:,} document(s) contain the text of a special token, "
            "such as the end of a document: "
            f"{self.respelled:,} such token(s) were written by ordinary ones{changed}{dropped}"
        ]


def choose_eos(
    path: Path, vocabulary: Mapping[str, int], asked: str | None, *, by_list: bool = False
) -> tuple[str, str]:
    """The token that ends a document, and the reason for the choice.

    Args:
      path: path of the tokenizer.json.
      asked: name of the token, if the user gave one (data.eos).
      by_list: whether to ignore the files beside tokenizer.json, as older versions did; for runs
        that were begun with them.
    Raises:
      DataError: no such token is found, or the named one is not in the vocabulary.
    """
    if asked is not None:
        if asked not in vocabulary:
            raise DataError(
                explain(
                    f"{path} has no token {asked!r}",
                    given=f"data.eos={asked}",
                    do="name a token of its vocabulary" + _some_of(vocabulary),
                )
            )
        return asked, "data.eos"
    for file in () if by_list else (path.with_name(name) for name in _TOKENIZER_CONFIGS):
        if (token := _named_in(file)) is not None:
            if token not in vocabulary:
                raise DataError(
                    explain(
                        f"{file} names an end of documents that {path.name} does not have",
                        given=repr(token),
                        do="give the file that belongs to it, or name a token: --set data.eos=TOKEN"
                        + _some_of(vocabulary),
                    )
                )
            return token, file.name
    eos = next((token for token in EOS_TOKENS if token in vocabulary), None)
    if eos is None:
        raise DataError(
            explain(
                f"{path} has no token that ends a document",
                given=f"{len(vocabulary)} tokens",
                do="add one of "
                + ", ".join(EOS_TOKENS)
                + " to its added_tokens, or name a token: --set data.eos=TOKEN",
            )
        )
    return eos, "the usual name"


def _named_in(file: Path) -> str | None:
    """The eos_token that a file names; None if the file is missing or names none."""
    try:
        value = json.loads(file.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"it is not a JSON object, but a {type(value).__name__}")
        named = value.get("eos_token")
        token = named.get("content") if isinstance(named, dict) else named
        if not isinstance(token, str) and named is not None:
            raise ValueError(f"eos_token={named!r} is neither a text nor an object with content")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            explain(
                f"cannot read {file}, which may name the end of documents",
                given=shown(str(error)),
                do="fix or remove it, or name the token: --set data.eos=TOKEN",
            )
        ) from error
    return token


def _spaceless(text: str) -> str:
    return "".join(text.split())


def _some_of(vocabulary: Mapping[str, int]) -> str:
    found = [
        token for token in vocabulary if token[:1] in "<[" and token[-1:] in ">]" and len(token) > 2
    ]
    return f", such as {', '.join(sorted(found, key=vocabulary.__getitem__)[:8])}" if found else ""


class Respelling:
    """Replaces reserved tokens in the ids of a text by ordinary tokens.

    Args:
      tokenizer: a tokenizer of the tokenizers library, with encode_special_tokens on.
      reserved: bool [vocab_size], True for ids that no text should contain.
      dropped: reserved id that is left out if ordinary tokens cannot replace it; other reserved
        ids then stay.
      unknown: id for text that the vocabulary cannot write; None if there is no such id.
    """

    def __init__(
        self, tokenizer: Any, reserved: np.ndarray, *, dropped: int, unknown: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._reserved, self._dropped, self._unknown = reserved, dropped, unknown
        self._known: dict[tuple[int, str], tuple[list[int], bool] | None] = {}
        self.found = RespellingCounts()

    def __call__(self, text: str, ids: np.ndarray) -> np.ndarray:
        """`ids` of `text`, with reserved tokens replaced by ordinary ones with the same text."""
        if not self._reserved[ids].any():
            return ids
        self.found.documents += 1
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        written: list[int] = []
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            written += self._spelled(token, text[start:stop]) if self._reserved[token] else [token]
        return np.array(written, ids.dtype)

    def within_template(
        self, text: str, encoding: Any, from_data: Collection[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a rendered chat template.

        Reserved tokens stay where the template wrote them. Those that cover a character of a
        message, or came about in another way, are replaced as in a text.

        Args:
          encoding: of `text`, by a tokenizer that takes special tokens in it for what they are.
          from_data: places of characters that come from messages.
        Returns:
          The ids, int64 [N], and the characters that each stands for, the first and the one after
          the last, int64 [N, 2].
        """
        ids = np.array(encoding.ids, np.int64)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        others = {
            place: self._spelled(int(ids[place]), text[slice(*spans[place])])
            for place in np.flatnonzero(self._reserved[ids]).tolist()
            if not self._is_whole(int(ids[place]), text, spans[place].tolist(), from_data)
        }
        if not others:
            return ids, spans
        self.found.documents += 1
        repeats = np.ones(len(ids), int)
        repeats[list(others)] = list(map(len, others.values()))
        written = [others.get(place, [token]) for place, token in enumerate(ids.tolist())]
        return np.array([token for part in written for token in part]), np.repeat(
            spans, repeats, axis=0
        )

    def _is_whole(
        self, token: int, text: str, span: Sequence[int], from_data: Collection[int]
    ) -> bool:
        """Whether a reserved token is its own text, blanks beside it aside, none from a message."""
        start, stop = span
        name = self._tokenizer.id_to_token(token)
        begin = text.find(name, start, stop) if name else -1
        return (
            begin >= 0
            and not text[start:begin].strip()
            and not text[begin + len(name) : stop].strip()
            and not any(place in from_data for place in range(begin, begin + len(name)))
        )

    def _spelled(self, token: int, surface: str) -> list[int]:
        """The ids to write for a reserved token in a text."""
        if (token, surface) not in self._known:
            self._known[token, surface] = self._others(token, surface)
        others = self._known[token, surface]
        if others is not None:
            other_ids, is_same = others
            self.found.respelled += 1
            self.found.changed += not is_same
            return other_ids
        if token == self._dropped:
            self.found.dropped += 1
            return []
        return [token]

    def _others(self, token: int, surface: str) -> tuple[list[int], bool] | None:
        """The best ordinary ids for a reserved token, and whether they decode to the same text.

        The same text is `surface` or its normalized form; spaces are ignored. None: no ordinary ids
        can replace the token.
        """
        if token == self._unknown:  # it has no text of its own, and may stand for millions of texts
            return None
        normalizer = self._tokenizer.normalizer
        normal = surface if normalizer is None else normalizer.normalize_str(surface)
        wanted = (surface.strip(), normal.strip())
        best, least = None, None
        for ids in self._ways(self._tokenizer.id_to_token(token) or "", surface):
            if not ids or self._reserved[ids].any():
                continue
            said = self._tokenizer.decode(ids, skip_special_tokens=False)
            is_same = said.strip() in wanted
            cost = (
                ids.count(self._unknown) if self._unknown is not None else 0,
                0 if is_same else 1 - SequenceMatcher(None, said, surface).ratio(),
                said.strip() != wanted[0],
                said != surface,
                len(ids),
            )
            if least is None or cost < least:
                best, least = (ids, _spaceless(said) in map(_spaceless, wanted)), cost
        return best

    def _ways(self, name: str, surface: str) -> Iterator[list[int]]:
        """Yield ids that may decode to the same text: of its two parts, or of each character."""

        def by_model(text: str) -> list[int]:
            return [token.id for token in self._tokenizer.model.tokenize(text)]

        def by_all(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False).ids

        # The model alone comes first: it adds no spaces; a normalizer may add one to each part.
        ways: list[tuple[Callable[[str], list[int]], str]] = [
            (by_model, name),
            (by_model, surface),
            (by_all, surface),
        ]
        for encode, text in ways:
            if not text or len(text) > _LONGEST_SURFACE:
                continue
            for parts in (*((text[:cut], text[cut:]) for cut in range(1, len(text))), tuple(text)):
                try:
                    yield [token for part in parts for token in encode(part)]
                except Exception:  # a model without an unknown token raises for unknown text
                    continue
