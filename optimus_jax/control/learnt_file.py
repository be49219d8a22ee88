"""What runs have learnt about this hardware, in a JSON file for later runs."""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from optimus_jax.system.cache import write_atomically
from optimus_jax.system.json_input import read_json


class Learner(Protocol):
    """Something that learns from runs."""

    def learnt(self) -> Any:
        """What it has learnt, as JSON."""
        ...

    def recall(self, value: Any) -> None:
        """Take over what an earlier run has learnt.

        Raises ValueError, TypeError, KeyError, AttributeError or OverflowError, and takes over
        nothing, if the value is damaged.
        """
        ...


def finite_numbers(values: object) -> list[float]:
    """A list of numbers from a file. Raises TypeError or ValueError if it is none."""
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is no list of numbers")
    if not all(isinstance(each, int | float) for each in values):
        raise TypeError(f"{values!r} has something that is no number")
    numbers = [float(each) for each in values]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("numbers are finite")
    return numbers


class LearntFile:
    """The file of one kind of hardware.

    Args:
      path: the file.
      learners: by the name of their part of the file.
    """

    def __init__(self, path: Path, learners: Mapping[str, Learner]) -> None:
        self._path, self._learners = path, learners

    def read(self) -> None:
        """Let the learners recall their parts. A part that is damaged, or the whole file, is only
        a warning; a missing one is none.
        """
        try:
            parts = read_json(self._path)
            if not isinstance(parts, Mapping):
                raise TypeError("it is no JSON object")
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            self._warn(error)
            return
        for name, learner in self._learners.items():
            try:
                if name in parts:
                    learner.recall(parts[name])
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                self._warn(error)

    def write(self) -> None:
        """Replace the file; a failure is only a warning."""
        parts = {name: learner.learnt() for name, learner in self._learners.items()}
        text = json.dumps(parts, indent=1) + "\n"
        write_atomically(self._path, text, "what was learnt about this hardware")

    def _warn(self, error: Exception) -> None:
        warnings.warn(f"{self._path} cannot be read and does not count: {error}", stacklevel=3)
