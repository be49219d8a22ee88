"""The token that ends a document: which one it is, and how texts are kept from containing it.

The tokenizers library has a switch for special tokens that a text spells out
(`encode_special_tokens`), but a vocabulary may hold such a token as an ordinary piece too, as those
of SentencePiece do, merges may form it, a normalizer may write it, and an added token need not be
called special. So what counts here are the ids that came out.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

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
"""Names that families of models give to the end of a document.

Where nothing says which, the first that exists is taken.
"""
CONFIG = "tokenizer_config.json"
_TOKENIZER_CONFIGS = (CONFIG, "special_tokens_map.json")
"""Files beside a tokenizer.json that name its special tokens."""
_LONGEST_SURFACE = 64
"""Characters of a reserved token's text that other ways to write it are looked for."""


@dataclass(kw_only=True)
class RespellingCounts:
    """What was done with reserved tokens that came out of texts."""

    documents: int = 0
    """Texts that had some."""
    respelled: int = 0
    """Tokens written by others with the same text."""
    changed: int = 0
    """Of those, tokens for whose text the vocabulary has only other text."""
    dropped: int = 0
    """Tokens left out, as the vocabulary has no other way to write them."""

    def notes(self) -> list[str]:
        """What a user should know of it."""
        if not self.documents:
            return []
        changed = (
            f" ({self.changed:,} of them with other text than the document has, "
            "as the vocabulary cannot write it)"
            if self.changed
            else ""
        )
        dropped = (
            f", {self.dropped:,} left out, as the vocabulary cannot write them otherwise"
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
    """The token that ends a document, and why that one.

    Args:
      path: of the tokenizer.json.
      asked: its name, if a user has said (data.eos).
      by_list: whether files beside it are not asked, as in runs begun before they were.
    Raises:
      DataError: there is none, or the one that is named is not in the vocabulary.
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
    """The eos_token of a file, None if it is not there or names none."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            explain(
                f"{file} cannot be read, which may name the end of documents",
                given=error,
                do="mend or remove it, or name the token: --set data.eos=TOKEN",
            )
        ) from error
    token = value.get("eos_token") if isinstance(value, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _spaceless(text: str) -> str:
    return "".join(text.split())


def _some_of(vocabulary: Mapping[str, int]) -> str:
    found = [
        token for token in vocabulary if token[:1] in "<[" and token[-1:] in ">]" and len(token) > 2
    ]
    return f", such as {', '.join(sorted(found, key=vocabulary.__getitem__)[:8])}" if found else ""


class Respelling:
    """Writes reserved tokens of a text by ordinary ones.

    Args:
      tokenizer: of the tokenizers library, with encode_special_tokens on.
      reserved: bool [vocab_size], ids that no text may contain.
      dropped: id that must not stay even where nothing else says the same; others then do.
      unknown: id for what the vocabulary cannot write, None if it has none.
    """

    def __init__(
        self, tokenizer: Any, reserved: np.ndarray, *, dropped: int, unknown: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._reserved, self._dropped, self._unknown = reserved, dropped, unknown
        self._known: dict[tuple[int, str], tuple[list[int], bool] | None] = {}
        self.found = RespellingCounts()

    def __call__(self, text: str, ids: np.ndarray) -> np.ndarray:
        """`ids` of `text`, or other ids with the same text that hold no reserved one."""
        if not self._reserved[ids].any():
            return ids
        self.found.documents += 1
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        written: list[int] = []
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if not self._reserved[token]:
                written.append(token)
                continue
            surface = text[start:stop]
            if (token, surface) not in self._known:
                self._known[token, surface] = self._others(token, surface)
            others = self._known[token, surface]
            if others is not None:
                other_ids, is_same = others
                self.found.respelled += 1
                self.found.changed += not is_same
                written += other_ids
            elif token == self._dropped:
                self.found.dropped += 1
            else:
                written.append(token)
        return np.array(written, ids.dtype)

    def _others(self, token: int, surface: str) -> tuple[list[int], bool] | None:
        """The best ordinary tokens for a reserved one, None if there are none.

        With them, whether they say the same but for spaces: the text, or what the normalizer makes
        of it.
        """
        if token == self._unknown:  # it says nothing, and there may be millions of texts for it
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
        """Ids that may say the same: of two parts of the text, or of each of its characters."""

        def by_model(text: str) -> list[int]:
            return [token.id for token in self._tokenizer.model.tokenize(text)]

        def by_all(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False).ids

        # The model alone first: it adds no spaces, as a normalizer would to each part.
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
                except Exception:  # a model without an unknown token refuses what it cannot write
                    continue
