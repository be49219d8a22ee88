"""Log of faults that any process may write to.

`events.jsonl` has one writer, process 0, which may be the one that died. So every process appends
faults to its own file in the run directory's `faults/`, and the next start, which holds the run's
lock, copies new ones into `events.jsonl`. At any time the two together are complete.
"""

import time
from pathlib import Path
from typing import Any

from optimus_jax.run_directory.directory import FAULTS_DIR, RunDirectory
from optimus_jax.run_directory.files import append, complete_lines, event_line, event_of


def write_fault(run_directory: Path, process: int, step: int, **fields: Any) -> None:
    """Append one event as a whole line, and fsync it. Raises OSError.

    Args:
      process: index of this process.
      step: newest finished step of this process.
      fields: JSON values.
    """
    path = run_directory / FAULTS_DIR / f"{process}.jsonl"
    path.parent.mkdir(exist_ok=True)
    common = {"event": "fault", "step": step, "time_s": time.time(), "process": process}
    append(path, event_line(common | fields), on_disk=True)


def take_over(run: RunDirectory) -> int:
    """Copy the faults of earlier starts into `events.jsonl`, in the order of time; only the writer
    does.

    The files stay, so that a kill in the middle loses nothing; a second call copies nothing.

    Returns:
      How many events were new.
    """
    if not run.writer:
        return 0
    known = {_key(event) for event in run.events() if event["event"] == "fault"}
    new = [event for event in read_faults(run.path) if _key(event) not in known]
    for event in new:
        fields = {
            name: value for name, value in event.items() if name not in ("event", "step", "time_s")
        }
        run.log_event("fault", event["step"], seen_s=event["time_s"], **fields)
    return len(new)


def read_faults(run_directory: Path) -> list[dict[str, Any]]:
    """All events of `faults/*.jsonl`, in the order of time; torn lines are skipped."""
    found = []
    for path in sorted((run_directory / FAULTS_DIR).glob("*.jsonl")):
        for line in complete_lines(path):
            if (event := event_of(line)) is not None:
                found.append(event)
    return sorted(found, key=lambda event: event["time_s"])


def _key(event: dict[str, Any]) -> tuple[int | None, float | None]:
    """Identity of a fault: its process and time (`seen_s` in an event that was copied)."""
    return event.get("process"), event.get("seen_s", event["time_s"])
