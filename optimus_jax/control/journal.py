"""The journal of switches on disk: a run that dies during a switch can resume under one of the two
plans.

A checkpoint is independent of plans (training/state.py), and every plan can read it. So the state
on disk is always consistent, whatever happens in the middle of a switch. All that has to be known
is which plan to resume with, and which one not to try again at once. `switches.jsonl` in the run
directory tells, with one record per line; each is on disk before the run acts on it:

1. `begin`, with both plans; then the state moves, in memory
2. plan.json is replaced; then `commit`
3. the first steps under the new plan; then `end` with how it went. If the switch is taken back,
   plan.json is replaced before that.

A run that dies between `begin` and `end` resumes under the plan before the switch, which is known
to run: the new one may be why it died. A switch without a record has not happened.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from optimus_jax.config.settings import shown, with_right_types
from optimus_jax.errors import PlanError, RunDirectoryError, explain
from optimus_jax.plan import Plan
from optimus_jax.run_directory.contents import SWITCHES_FILE
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.files import explained, json_object

Ending = Literal["kept", "stopped", "taken back", "failed", "died"]
"""How a switch ended. `kept`: the new plan stays. `stopped`: the run was ended on purpose during
the first steps. `taken back`: the run went back after the first steps. `failed`: the move failed.
`died`: the process died."""
FAILURES: tuple[Ending, ...] = ("taken back", "failed", "died")


@dataclass(frozen=True, kw_only=True)
class SwitchRecord:
    """The record of one switch."""

    step: int
    """Number of steps done when it began."""
    source: Plan
    target: Plan
    why: str
    """Why it was made."""
    ending: Ending | None
    """How it ended; None: it is in progress, or the run died in it."""
    ended_step: int | None
    ended_why: str
    costs_s: dict[str, float]
    """Delay of the run by phase, in seconds, of the phases that were reached."""
    by_choice: bool
    """Whether the run could have stayed under its plan."""

    @property
    def is_failure(self) -> bool:
        """Whether it failed, so its target must not be tried again soon."""
        return self.ending in FAILURES


def switches(run_dir: Path) -> list[SwitchRecord]:
    """All switches of a run, in order. Lines that a crash has cut short are skipped.

    Raises:
      RunDirectoryError: a complete line is not a valid record of a switch.
    """
    records: list[SwitchRecord] = []
    for values in _read(run_dir / SWITCHES_FILE):
        try:
            if values["record"] == "begin":
                records.append(
                    with_right_types(
                        SwitchRecord(
                            step=values["step"],
                            source=_plan(values["source"]),
                            target=_plan(values["target"]),
                            why=values["why"],
                            ending=None,
                            ended_step=None,
                            ended_why="",
                            costs_s={},
                            # Older journals lack `by_choice`.
                            by_choice=values.get("by_choice", True),
                        )
                    )
                )
            elif records and records[-1].ending is None:
                ended = values["record"] == "end"
                records[-1] = with_right_types(
                    replace(
                        records[-1],
                        costs_s=values.get("costs_s", {}),
                        **(
                            {
                                "ending": values["ending"],
                                "ended_step": values["step"],
                                "ended_why": values["why"],
                            }
                            if ended
                            else {}
                        ),
                    )
                )
        except (KeyError, TypeError, PlanError) as error:
            raise RunDirectoryError(
                explain(
                    "a record of a switch is damaged",
                    given=f"{run_dir / 'switches.jsonl'}: {shown(error)}",
                    do="restore the file, or move it away: the run then continues with plan.json",
                )
            ) from error
    return records


def unfinished(run_dir: Path) -> SwitchRecord | None:
    """The switch that a run died in; None: it did not die in a switch."""
    last = next(reversed(switches(run_dir)), None)
    return last if last is not None and last.ending is None else None


def plan_to_resume(run_dir: Path) -> str | None:
    """The plan that a run resumes with, as JSON; None: it has had none.

    It is plan.json, or, if the run died in a switch, the plan before that switch. Only reads, so it
    can be called before the run directory is locked.
    """
    if (died := unfinished(run_dir)) is not None:
        return died.source.to_json()
    return RunDirectory(run_dir, writer=False).plan_text()


class Journal:
    """Writes the records of one run; does nothing in processes that do not write.

    Args:
      run: the run directory.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._path = run, run.path / SWITCHES_FILE

    def recover(self, step: int) -> SwitchRecord | None:
        """End the switch that the run died in, if any, and return it: the first thing a resume at
        `step` does.

        Calling it twice has the effect of calling it once.
        """
        died = unfinished(self._run.path)
        if died is not None:
            self._run.write_plan(died.source.to_json())
            self.end(
                "died",
                step=step,
                why="the run ended before the new plan was known to be good",
                costs_s=died.costs_s,
            )
        return died

    def begin(self, source: Plan, target: Plan, *, step: int, why: str, by_choice: bool) -> None:
        """Record that the state is about to be moved.

        Raises RunDirectoryError, as `commit` does, if it cannot be written.
        """
        self._append(
            {
                "record": "begin",
                "step": step,
                "source": json.loads(source.to_json()),
                "target": json.loads(target.to_json()),
                "why": why,
                "by_choice": by_choice,
            }
        )

    def commit(self, plan: Plan, *, step: int, costs_s: Mapping[str, float]) -> None:
        """Record that the state has been moved and verified, and that `plan` is now the run's.

        `costs_s`: delay of the run so far, by phase.
        """
        self._run.write_plan(plan.to_json())
        self._append(
            {"record": "commit", "step": step, "plan": plan.digest, "costs_s": dict(costs_s)}
        )

    def end(
        self,
        ending: Ending,
        *,
        step: int,
        why: str,
        costs_s: dict[str, float],
        back_to: Plan | None = None,
    ) -> None:
        """Record how the switch ended; `back_to`: the plan before, if it is the run's again.

        Raises nothing: the switch is over. If the record cannot be written, the error is stored in
        the run's `failure`, like errors of its logs, so that the state is saved before the run
        ends. The disk then says that the switch was not completed.
        """
        try:
            if back_to is not None:
                self._run.write_plan(back_to.to_json())
            self._append(
                {"record": "end", "step": step, "ending": ending, "why": why, "costs_s": costs_s}
            )
        except RunDirectoryError as error:
            self._run.failure = self._run.failure or error

    def _append(self, values: dict[str, Any]) -> None:
        """Append a line; it is on disk when this returns."""
        if not self._run.writer:
            return
        line = json.dumps({**values, "time_s": time.time()}).encode() + b"\n"
        try:
            is_new = not self._path.exists()
            with open(self._path, "a+b", buffering=0) as file:
                if file.seek(0, os.SEEK_END) and _last_byte(file.fileno()) != b"\n":
                    line = b"\n" + line  # a line that a crash has cut short stays separate
                if file.write(line) != len(line):
                    raise OSError("the disk took only a part of a line")
                os.fsync(file.fileno())
            if is_new:
                _sync_directory(self._run.path)
        except OSError as error:
            raise RunDirectoryError(
                explain(
                    "the record of a switch cannot be written",
                    given=f"{self._path}: {error}",
                    do="make room or fix the permissions; until then the run keeps its plan",
                )
            ) from error


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The complete records of the file.

    A last line that lacks only its newline counts as complete: the next write adds the newline, and
    must not change what the journal says.
    """
    with explained(path):
        content = path.read_bytes() if path.exists() else b""
    for line in content.split(b"\n"):
        if (values := json_object(line)) is not None and "record" in values:
            yield values


def _plan(values: dict[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(values))


def _last_byte(descriptor: int) -> bytes:
    return os.pread(descriptor, 1, os.fstat(descriptor).st_size - 1)


def _sync_directory(path: Path) -> None:
    """Sync the directory, so that the file's name is on disk as well."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
