"""Devices that someone has reported to be bad: a health check of the cluster, or a person.

They are listed in the file `lost_devices.json` in the run directory: a list of device ids such as
`[3, 7]`. To use a device again, remove its id from the list, or remove the file.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path

from optimus_jax.system.json_input import parse_json

FILE = "lost_devices.json"
POLL_S = 1.0
"""Seconds between two reads of the file."""


class ReportedDevices:
    """Reads the ids of reported devices from the file.

    Args:
      run_directory: the directory that holds the file.
      devices: ids of the run's devices.
      can_leave: whether the run can continue without some of them.
      warn: called once for each problem: the file is not a list of ids (its last valid content
        stays in use), no device has an id, or the run cannot continue without a device.
      clock: returns the time in seconds.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        devices: Collection[int],
        can_leave: bool,
        warn: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._devices, self._can_leave, self._warn, self._clock = (
            run_directory / FILE,
            frozenset(devices),
            can_leave,
            warn,
            clock,
        )
        self._ids: frozenset[int] = frozenset()
        self._looked_s, self._complaint = -POLL_S, ""

    def __call__(self) -> frozenset[int]:
        """Ids of devices that must not be used."""
        now_s = self._clock()
        if now_s - self._looked_s >= POLL_S:
            self._looked_s = now_s
            self._look()
        return self._ids

    def _look(self) -> None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._ids, self._complaint = frozenset(), ""
            return
        except (OSError, UnicodeDecodeError) as error:
            self._complain(
                f"is not followed ({error}); it has to be a list of device ids such as [3, 7]"
            )
            return
        try:
            ids = parse_json(text)
            if not isinstance(ids, list) or not all(type(each) is int for each in ids):
                raise ValueError("no list of numbers")
        except ValueError as error:
            self._complain(
                f"is not followed ({error}: {text[:60]!r}); it has to be a list of device ids such"
                " as [3, 7]"
            )
            return
        self._ids = self._usable(frozenset(ids))

    def _usable(self, ids: frozenset[int]) -> frozenset[int]:
        """The ids that this run can continue without; warns about the others."""
        unknown, usable = sorted(ids - self._devices), ids & self._devices
        if usable and not self._can_leave:
            self._complain(
                f"is not followed: a run of several processes cannot leave devices {sorted(usable)}"
                " while it continues; stop it, and start it with --resume on the others"
            )
            return frozenset()
        rest = f", and is followed for {sorted(usable)}" if usable else ""
        self._complain(
            f"names {unknown[0]}, which no device of this run has (they have {min(self._devices)}"
            f" to {max(self._devices)}){rest}"
            if unknown
            else ""
        )
        return usable

    def _complain(self, what: str) -> None:
        """Warn once; again only if the problem has changed. Empty: there is no problem."""
        if what not in ("", self._complaint):
            self._warn(f"{self._path} {what}")
        self._complaint = what
