"""Errors that a user can act on.

Every OptimusError is the user's to mend (exit code 2 at the command line; training/stopping.py has the others), so its text says
what happened, what was given and what to do. A mistake of ours is an `assert` or whatever
Python raises.
"""

import difflib
from collections.abc import Iterable


class OptimusError(Exception):
    """Something that the user can mend."""

    is_everyones = False
    """Whether all processes of a run have it together. Otherwise an orderly end of this one would wait for the others, who may never come."""


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
    """A run no longer learns: its loss, gradients or weights are not finite. All its processes have this together (exit code 76)."""

    is_everyones = True


class FaultError(Exception):
    """A machine, the network or another process has failed, and nobody can mend it here: the run is worth starting again (exit code 75)."""


def explain(what: str, *, given: object, do: str) -> str:
    """The three lines of every error: what happened, what was given, what to do."""
    return f"{what}\n  given: {given}\n  do:    {do}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the known word that is closest to `name`, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "choose one of: " + ", ".join(known)
