"""Errors that a user can act on.

Every OptimusError is the user's to mend (exit code 2 at the command line; faults/stopping.py has
the others), so its text says what happened, what was given and what to do. A mistake of ours is an
`assert` or whatever Python raises.
"""

import difflib
import re
from collections.abc import Iterable


class OptimusError(Exception):
    """Something that the user can mend."""

    raised_by_all_processes = False
    """Whether all processes of a run have it together. Otherwise an orderly end of this one would
    wait for the others, who may never come."""


class ConfigError(OptimusError):
    """A setting is unknown, has the wrong type or contradicts another one."""


class PlanError(OptimusError):
    """A layout that this model, batch or set of devices cannot have."""


class DataError(OptimusError):
    """The training text or its tokens cannot be used."""


class CheckpointError(OptimusError):
    """A checkpoint cannot be written, found, read or trusted."""


class RunDirectoryError(OptimusError):
    """A run's directory cannot be made, read or written, or is another process's."""


class StoreError(OptimusError):
    """An object store cannot be reached, read or written, or does not hold what was asked for."""


class LearningError(OptimusError):
    """A run no longer learns: its loss, gradients or weights are not finite.

    All its processes have this together (exit code 76).
    """

    raised_by_all_processes = True


class OutputError(OptimusError):
    """What a script prints cannot be written."""


class FaultError(Exception):
    """A machine, the network or another process has failed, and nobody can mend it here: the run is
    worth starting again (exit code 75).
    """


def explain(what: str, *, given: object, do: str) -> str:
    """The three lines of every error: what happened, what was given, what to do."""
    return f"{what}\n  given: {given}\n  do:    {do}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the known word that is closest to `name`, else all of them."""
    known = list(known)
    close = closest(name, known)
    return f"did you mean {close!r}?" if close is not None else "choose one of: " + ", ".join(known)


MIN_LIKENESS, SHORT_NAME_LENGTH = 0.68, 4
"""Least likeness of two spellings; that of a word of up to SHORT letters says little, and a single
slip is what counts."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known word that `name` was probably meant to be; None: none is like it.

    First the same words in another order or writing, or without their section; then the beginning
    of one alone; then likeness.
    """
    known = list(known)
    parts = _parts(name)
    if not parts or len(name) > 200:  # no slip of a finger; likeness takes the square of the length
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
    best = max(known, key=lambda word: likeness(name, word), default=None)
    if best is None:
        return None
    slipped = next(
        (
            word
            for word in known
            if len(leaf_of(name)) <= SHORT_NAME_LENGTH
            and is_one_slip(leaf_of(name).lower(), leaf_of(word).lower())
        ),
        None,
    )
    return best if likeness(name, best) >= MIN_LIKENESS else slipped


_LOOKS_LIKE = str.maketrans("oil", "011")


def is_one_slip(typed: str, word: str) -> bool:
    """Whether one letter is wrong, missing or too much, or two neighbours have changed places.

    Letters that look like digits are no mistake: `h1oo` is h100.
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


def likeness(name: str, word: str) -> float:
    """Of two spellings, from 0 to 1; a section in front of `word` may be missing in `name`, and
    counts for nothing where both have it.
    """
    section = name.rpartition(".")[0]
    pairs = (
        [(leaf_of(name), leaf_of(word))]
        if section == word.rpartition(".")[0] or not section
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
    """The words that a name consists of: `--seq-len` and `SEQ_LEN` have the same."""
    return [part for part in re.split(r"[^0-9a-z]+", name.lower()) if part]
