"""Read which operations ran on which device, and when, from a trace of the profiler.

XLA names the instruction of every operation that it runs, and its program. On a CPU the events lie
on threads, and name their device; on a GPU they lie on the streams of a device.
"""

import re
from pathlib import Path
from typing import NamedTuple

import jax

from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.command import typed_command

_OPERATION, _MODULE, _DEVICE = "hlo_op", "hlo_module", "device_ordinal"
_LAST_NUMBER = re.compile(r"(\d+)\D*$")


class OperationRun(NamedTuple):
    """An operation that ran once on a device."""

    name: str
    """Of its instruction in the compiled program."""
    start_ns: float
    end_ns: float


def read_trace(folder: Path, module: str) -> dict[int, list[OperationRun]]:
    """The operations of one program, by the number of the device in its process.

    Args:
      folder: as given to `jax.profiler.start_trace`.
      module: name of the program.
    Raises:
      ConfigError: the folder has no trace.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise ConfigError(
            explain(
                "there is no trace of the profiler",
                given=folder,
                do="name the directory of a run with a profile:"
                f" {typed_command('train')} --profile FIRST:LAST",
            )
        )
    found: dict[int, list[OperationRun]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        number = _LAST_NUMBER.search(plane.name) if plane.name.startswith("/device:") else None
        for line in plane.lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats if name is not None}
                device = stats.get(_DEVICE, None if number is None else number[1])
                if _OPERATION not in stats or stats.get(_MODULE) != module or device is None:
                    continue
                found.setdefault(int(device), []).append(
                    OperationRun(
                        str(stats[_OPERATION]),
                        event.start_ns,
                        event.start_ns + event.duration_ns,
                    )
                )
    return found
