"""Devices that someone has reported to be bad: a health check of the cluster, or a person.

They are named in a file of the run directory, `lost_devices.json`: a list of device ids such as `[3, 7]`. When a
device can be used again its id is taken out of the list, or the file is removed.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

FILE = "lost_devices.json"
POLL_S = 1.0
"""Time between two looks at the file."""


class ReportedDevices:
    """What the file says.

    Args:
      run_directory: where it is.
      warn: told once of a file that is no list of ids; what it said before counts on.
      clock: seconds.
    """

    def __init__(self, run_directory: Path, warn: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._warn, self._clock = run_directory / FILE, warn, clock
        self._ids: frozenset[int] = frozenset()
        self._looked_s, self._bad_text = -POLL_S, ""

    def __call__(self) -> frozenset[int]:
        """Ids of devices that are not to be used."""
        now_s = self._clock()
        if now_s - self._looked_s >= POLL_S:
            self._looked_s = now_s
            self._look()
        return self._ids

    def _look(self) -> None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._ids = frozenset()
            return
        except (OSError, UnicodeDecodeError) as error:
            self._complain(str(error))
            return
        try:
            ids = json.loads(text)
            if not isinstance(ids, list) or not all(type(each) is int for each in ids):
                raise ValueError("no list of numbers")
            self._ids = frozenset(ids)
        except ValueError as error:
            self._complain(f"{error}: {text[:60]!r}")

    def _complain(self, what: str) -> None:
        if what != self._bad_text:
            self._bad_text = what
            self._warn(f"{self._path} cannot be used ({what}); write a list of device ids such as [3, 7]")
