"""Errors that a user can act on.

An OptimusError is an error that the user can fix. It ends a command with exit code 2
(faults/stopping.py lists the other exit codes), and its message says what happened, what was given
and what to do. Bugs of this package surface as `assert` or as Python's own exceptions.
"""

import difflib
import re
from collections.abc import Iterable


class OptimusError(Exception):
    """An error that the user can fix."""

    raised_by_all_processes = False
    """Whether every process of a run raises it at the same step. If not, an orderly shutdown of
    this process would wait for the others, which may never arrive."""


class ConfigError(OptimusError):
    """A setting is unknown, has the wrong type or contradicts another one."""


class PlanError(OptimusError):
    """A layout that is illegal for this model, batch or set of devices."""


class DataError(OptimusError):
    """The training text or its tokens cannot be used."""


class CheckpointError(OptimusError):
    """A checkpoint cannot be written, found, read or trusted."""


class RunDirectoryError(OptimusError):
    """A run directory cannot be created, read or written, or another process holds it."""


class StoreError(OptimusError):
    """An object store cannot be reached, read or written, or does not hold what was requested."""


class LearningError(OptimusError):
    """Training has diverged: the loss, gradients or weights are not finite.

    All processes raise it at the same step (exit code 76).
    """

    raised_by_all_processes = True


class OutputError(OptimusError):
    """A script's output cannot be written to standard output."""


class FaultError(Exception):
    """A machine, the network or another process has failed. This process cannot recover; the run
    should be restarted (exit code 75).
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty if it has none."""
    return (str(error).splitlines() or [""])[0]


def explain(what: str, *, given: object, do: str) -> str:
    """The three lines of every error: what happened, what was given, what to do."""
    return f"{what}\n  given: {given}\n  do:    {do}"


def argument(name: str, value: str = "") -> str:
    """How a message names what a user may give: `--top-k N (in Python top_k=)`."""
    flag = f"--{name.replace('_', '-')} {value}".rstrip()
    return f"{flag} (in Python {name}=)"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or lists all known words if none is close."""
    known = list(known)
    close = closest(name, known)
    return f"did you mean {close!r}?" if close is not None else "choose one of: " + ", ".join(known)


MIN_SIMILARITY, SHORT_NAME_LENGTH = 0.68, 4
"""Lowest similarity at which one spelling is suggested for another. For words of up to
SHORT_NAME_LENGTH letters the ratio means little, so a single typing mistake is accepted instead."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known word that `name` is probably a misspelling of; None: nothing is similar.

    Tried in order: the same parts in another order, case or punctuation, or without the section; a
    prefix of exactly one known word; the most similar spelling.
    """
    known = list(known)
    parts = _parts(name)
    # too long for a typo, and the comparison is quadratic in the length
    if not parts or len(name) > 200:
        return None
    leaf, plain = parts[-len(_parts(name.rpartition(".")[2])) :] or parts, "_".join(parts)
    tests = (
        lambda other, own: other == parts,
        lambda other, own: sorted(other) == sorted(parts),
        lambda other, own: sorted(own) == sorted(parts),
        lambda other, own: own == leaf,
    )
    for is_meant in tests:
        if found := [
            word for word in known if is_meant(_parts(word), _parts(word.rpartition(".")[2]))
        ]:
            return found[0]
    if (
        len(plain) >= SHORT_NAME_LENGTH
        and len(
            found := [
                word
                for word in known
                if any(
                    "_".join(_parts(each)).startswith(plain)
                    for each in (word, word.rpartition(".")[2])
                )
            ]
        )
        == 1
    ):
        return found[0]
    best = max(known, key=lambda word: similarity(name, word), default=None)
    if best is None:
        return None
    slipped = next(
        (
            word
            for word in known
            if len(leaf_of(name)) <= SHORT_NAME_LENGTH
            and is_one_typo(leaf_of(name).lower(), leaf_of(word).lower())
        ),
        None,
    )
    return best if similarity(name, best) >= MIN_SIMILARITY else slipped


_LOOKS_LIKE = str.maketrans("oil", "011")


def is_one_typo(typed: str, word: str) -> bool:
    """Whether one letter is wrong, missing or extra, or two adjacent letters are swapped.

    Letters that look like digits count as equal: `h1oo` matches h100.
    """
    if typed != word and typed.translate(_LOOKS_LIKE) == word.translate(_LOOKS_LIKE):
        return True
    start = next(
        (
            place
            for place, (one, other) in enumerate(zip(typed, word, strict=False))
            if one != other
        ),
        min(len(typed), len(word)),
    )
    typed, word = typed[start:], word[start:]
    return typed != word and (
        typed[1:] in (word, word[1:])
        or typed == word[1:]
        or (typed[:2] == word[1::-1] and typed[2:] == word[2:])
    )


def similarity(name: str, word: str) -> float:
    """Similarity of two spellings, from 0 to 1. `name` may omit the section in front of `word`, or
    the last part of it; a section that both have is ignored.
    """
    section = name.rpartition(".")[0]
    pairs = (
        [(leaf_of(name), leaf_of(word))]
        if word.startswith(f"{section}.") or not section
        else [(name, word)]
    )
    return max(
        difflib.SequenceMatcher(None, "_".join(_parts(one)), "_".join(_parts(other))).ratio()
        for one, other in [*pairs, *([] if section else [(name, word)])]
    )


def leaf_of(name: str) -> str:
    """A dotted name without its section, a flag without its dashes."""
    return name.rpartition(".")[2].lstrip("-")


def _parts(name: str) -> list[str]:
    """The parts of a name, in lower case: `--seq-len` and `SEQ_LEN` give the same parts."""
    return [part for part in re.split(r"[^0-9a-z]+", name.lower()) if part]
