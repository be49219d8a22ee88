"""Kills a run at random instants of its plan switches, resumes it, and checks that nothing is lost.

    python benchmarks/kill_fuzz.py --kills 100 --out kills.jsonl     # called again, it continues
    python benchmarks/kill_fuzz.py --report --out kills.jsonl        # a table by phase

A real training run with scripted switches (kill_victim.py) gets SIGKILL, is resumed, is killed
again, and so on, until it completes. Half of the kills happen inside the process, just before or
after a write, a sync, a rename, the move of a group of arrays, a checksum or a step; some of them
leave only half of a journal line. The other kills come from outside, at a moment drawn uniformly
from the time that a phase takes. After every kill the following must hold:

* The journal can be read. At most one switch in it has no end, the last one. plan.json is one of
  that switch's two plans, or, if the switch has ended, the plan that its end names. The plan that a
  resume would use is known, and is one of the two.
* The process that resumes uses that plan. The interrupted switch gets an end, and its plan is
  reported as failed.

After a run has completed:

* It has every step exactly once, and no process has ended with an error.
* The same steps, repeated without interruption under the same plans, give the same losses and the
  same state, bit for bit. The losses are within 1e-5 of those of a run that never switched.

SIGKILL ends a process, not the machine, so data that was written but not synced survives. Power
failures are covered by tests of the order of writes.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

# otherwise numpy starts threads, and a process with threads cannot be forked safely
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jax.numpy as jnp
import numpy as np
from kill_processes import Kill, Task, Victims
from kill_victim import (
    MODEL,
    MOVE_BYTES,
    SCENES,
    START,
    STEPS,
    config_of,
    phase_of,
    plan_of,
    run,
    use_devices,
)

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import CheckpointConfig
from optimus_jax.control.executables import Executable, compile_plan
from optimus_jax.control.journal import SwitchRecord, plan_to_resume, switches
from optimus_jax.data.dataset import load_data
from optimus_jax.data.loader import BatchLoader
from optimus_jax.mesh.sharding import local_rows, put_batch
from optimus_jax.plan import Plan
from optimus_jax.reshard.checksum import checksums
from optimus_jax.reshard.reshard import Move
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.paths import path_argument
from optimus_jax.training.state import abstract_stored_state, to_stored

MOST_KILLS = 6
"""Most kills of one run."""
SHORTEST_S, LONGEST_S = 50e-6, 0.5
"""Shortest and longest delay of a kill from outside."""
TWO_SHARE, STUBBORN_SHARE = 0.3, 0.7
"""Share of runs with two scenes; share of processes that try a failed plan again."""
TORN_SHARE = 0.3
"""Share of the kills before a journal line that leave half of the line."""
F32_RELATIVE = 1e-5
"""Largest relative difference of losses between plans."""
PHASES = (
    "prepare",
    "quiesce",
    "move",
    "verify",
    "commit",
    "canary",
    "rollback",
    "checkpoint",
    "resume",
)
ESSENTIAL = (
    Kill(instant="do/prepared/compile plan >", count=1, delay_s=None),
    Kill(instant="carry out/switch/begin/append <", count=1, delay_s=None, is_torn=True),
    Kill(instant="carry out/switch/release >", count=2, delay_s=None),
    Kill(instant="carry out/switch/commit/write plan/replace >", count=1, delay_s=None),
    Kill(instant="first steps <", count=2, delay_s=None),
    Kill(instant="keep/end/append <", count=1, delay_s=None, is_torn=True),
)
"""A short version: one kill in each phase of a switch."""


class WrongError(Exception):
    """A check failed: something was lost or mixed up."""


def check(is_true: bool, what: object) -> None:
    """Raise WrongError unless `is_true`."""
    if not is_true:
        raise WrongError(what)


# The instants, and drawing kills from them.


@dataclass(frozen=True)
class Moment:
    """An instant of an undisturbed run."""

    instant: str
    count: int
    lasts_s: float
    """Time until the next instant."""


def moments_of(trace: Path) -> dict[str, list[Moment]]:
    """The instants in a run's trace, by phase."""
    found = [line for line in map(json.loads, trace.read_text().splitlines()) if "instant" in line]
    by_phase: dict[str, list[Moment]] = defaultdict(list)
    for line, following in zip(found, [*found[1:], found[-1]], strict=True):
        lasts_s = min(max(following["time_s"] - line["time_s"], SHORTEST_S), LONGEST_S)
        by_phase[phase_of(line["instant"])].append(Moment(line["instant"], line["count"], lasts_s))
    return by_phase


def draw(moments: dict[str, list[Moment]], chance: random.Random) -> Kill:
    """Draw a kill.

    Every phase is equally likely. Within a phase, half of the kills are uniform over the kinds of
    instants, and half over the time that the phase takes.
    """
    among = moments[chance.choice(sorted(moments))]
    if chance.random() < 0.5:
        [moment] = chance.choices(among, [each.lasts_s for each in among])
        return Kill(
            instant=moment.instant, count=moment.count, delay_s=chance.uniform(0, moment.lasts_s)
        )
    instant = chance.choice(sorted({each.instant for each in among}))
    counts = [each.count for each in among if each.instant == instant]
    count = min(chance.choices(counts, k=2))  # a resumed run reaches fewer
    return Kill(
        instant=instant,
        count=count,
        delay_s=None,
        is_torn=instant.endswith("append <") and chance.random() < TORN_SHARE,
    )


# The checks.


def last_switch(run_dir: Path) -> SwitchRecord | None:
    """The last switch in the journal. Raises WrongError if an earlier one has no end."""
    records = switches(run_dir)
    check(
        all(record.ending for record in records[:-1]),
        f"a switch without an end is followed by another: {[record.ending for record in records]}",
    )
    return records[-1] if records else None


def plan_after(run_dir: Path, first: Plan) -> Plan:
    """The plan that a resume must use according to the journal, checked against plan.json."""
    last, text = last_switch(run_dir), RunDirectory(run_dir, writer=False).plan_text()
    due = (
        first
        if last is None
        else last.target
        if last.ending in ("kept", "stopped")
        else last.source
    )
    check(
        plan_to_resume(run_dir) in ({due.to_json()} if last or text else {None}),
        "a resume would use another plan",
    )
    if text is not None:
        allowed = [due] if last is None or last.ending is not None else [last.source, last.target]
        check(
            Plan.from_json(text) in allowed,
            f"plan.json has {Plan.from_json(text).axes}, the journal has"
            f" {[plan.axes for plan in allowed]}",
        )
    return due


def check_resumed(run_dir: Path, trace: Path, due: Plan, died: SwitchRecord | None) -> None:
    """Check a resumed process: the plan that it used, and how it ended the interrupted switch."""
    notes = [
        line for line in map(json.loads, trace.read_text().splitlines()) if "instant" not in line
    ]
    begun = [line["begins"] for line in notes if "begins" in line]
    if not begun:  # it was killed before
        return
    check(begun == [due.digest], f"the run resumes with {begun}, not {due.digest}")
    if died is not None:
        ends = [
            record.ending
            for record in switches(run_dir)
            if (record.step, record.source, record.target) == (died.step, died.source, died.target)
        ]
        check("died" in ends, f"the interrupted switch has ended as {ends}")
        check(
            {"failed": died.target.digest} in notes,
            "the plan of the interrupted switch is not reported as failed",
        )


class Replay:
    """Repeats the steps of a run without interruption.

    Args:
      text: file of training text.
    """

    def __init__(self, text: Path) -> None:
        self._config = config_of(START | {"data": str(text)})

    @cached_property
    def _stream(self):
        config = self._config
        return load_data(
            config.data,
            seq_len=config.seq_len,
            vocab_size=config.model.vocab_size,
            model_name=MODEL,
        ).train

    @cache  # noqa: B019, one replay lives as long as the program
    def _executable(self, plan: Plan) -> Executable:
        return compile_plan(self._config, plan)

    @cache  # noqa: B019
    def _move(self, source: Plan, target: Plan) -> Move:
        return Move(
            self._executable(source).layout,
            self._executable(target).layout,
            budget_bytes=MOVE_BYTES,
        )

    def of(self, plans: list[Plan]) -> tuple[list[float], dict[str, int]]:
        """Losses of steps under these plans, and checksums of the stored state after them."""
        plan, losses = plans[0], []
        state = self._executable(plan).program.init(jnp.int32(self._config.seed))
        for step, following in enumerate(plans, 1):
            if following != plan:
                state = self._move(plan, following).run(state)
            plan, program = following, self._executable(following).program
            loader = BatchLoader(
                self._stream,
                seq_len=self._config.seq_len,
                global_batch=self._config.data.global_batch,
                seed=self._config.seed,
                rows=local_rows(program.batch_sharding, self._config.data.global_batch),
                respect_documents=self._config.data.respect_documents,
            )
            state, metrics = program.train_step(
                state,
                put_batch(
                    loader.batch(step), program.batch_sharding, self._config.data.global_batch
                ),
            )
            losses.append(float(metrics["loss"]))
        program = self._executable(plan).program
        return losses, checksums(
            to_stored(state, program.shapes, program.plan, program.state_shardings)
        )

    def saved(self, run_dir: Path, step: int, plan: Plan) -> dict[str, int]:
        """The checksums of a checkpoint."""
        program = self._executable(plan).program
        wanted = abstract_stored_state(
            program.shapes, program.optimizer, program.config.precision, program.plan, program.mesh
        )
        checkpoints = Checkpoints(run_dir / "checkpoints", CheckpointConfig())
        sums = checksums(
            checkpoints.restore(wanted, step, paddable=program.shapes.may_be_padded).state
        )
        checkpoints.close()
        return sums


def check_ended(run_dir: Path, replay: Replay, plans: dict[str, Plan]) -> None:
    """Check a completed run."""
    history = RunDirectory(run_dir, writer=False).metrics()
    check(
        [record.step for record in history] == list(range(1, STEPS + 1)),
        f"steps {[record.step for record in history]}",
    )
    last = plan_after(run_dir, plans[history[0].plan])
    check(history[-1].plan == last.digest, "the last step was under another plan")
    lineage = [plans[record.plan] for record in history]
    losses, sums = replay.of(lineage)
    check(
        losses == [record.loss for record in history],
        f"losses {[record.loss for record in history]}, without interruption {losses}",
    )
    check(sums == replay.saved(run_dir, STEPS, last), "the state differs from that without kills")
    stayed, _ = replay.of([plans[plan_of(START).digest]] * STEPS)
    check(
        np.allclose(losses, stayed, rtol=F32_RELATIVE, atol=0),
        f"losses {losses}, in a run that never switched {stayed}",
    )


# The runs.


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all runs share."""

    folder: Path
    """Temporary folder for one run at a time and for compiled programs."""
    victims: Victims
    replay: Replay
    plans: dict[str, Plan]
    """Plans by digest."""
    task: Task
    """The task of a process, without a kill."""

    def chain(self, kills: "list[Kill | None]", *, is_stubborn: list[bool]) -> list[dict]:
        """Do one run, which is killed until a process completes it. Returns a row for each kill.

        Raises:
          WrongError: names the failed check and the kills before it.
        """
        run_dir = self.folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        rows: list[dict] = []
        try:
            for kill, stubborn in zip([*kills, None], [*is_stubborn, False], strict=True):
                rows.append(row := self._process(run_dir, kill, stubborn))
                if not row["killed"]:
                    break
            check_ended(run_dir, self.replay, self.plans)
        except WrongError as error:
            raise WrongError(f"{error}\n  after {json.dumps(rows, indent=1)}\n  {kills}") from error
        return rows

    def _process(self, run_dir: Path, kill: Kill | None, is_stubborn: bool) -> dict:
        trace = self.folder / "trace"
        trace.unlink(missing_ok=True)
        is_begun = (run_dir / "config.json").exists()
        first = plan_of(START)
        due, before = (
            (plan_after(run_dir, first), last_switch(run_dir)) if is_begun else (first, None)
        )
        died = before if before is not None and before.ending is None else None
        end = self.victims.run(replace(self.task, kill=kill, is_stubborn=is_stubborn))
        check(
            end.is_killed or end.code == 0,
            f"a process has ended with {end.code}: see {self.folder / 'log'}",
        )
        if trace.exists():
            check_resumed(run_dir, trace, due, died)
        row: dict = {"killed": end.is_killed, "cpu_s": round(end.cpu_s, 2)}
        if end.is_killed and kill is not None:
            left = plan_after(run_dir, first) if (run_dir / "config.json").exists() else first
            open_switch = last_switch(run_dir)
            row |= {
                "phase": phase_of(kill.instant),
                "kill": asdict(kill),
                "goes_on_under": str(left.axes),
                "in_a_switch": bool(open_switch and open_switch.ending is None),
                "checkpoints": sorted(
                    int(path.name)
                    for path in (run_dir / "checkpoints").glob("*")
                    if path.name.isdigit()
                ),
            }
        return row


def fuzz(ground: Ground, num_kills: int, seed: int, out: Path) -> None:
    """Do runs until there are `num_kills` kills in all, and append a line for each kill."""
    moments = [
        census(replace(ground, task=replace(ground.task, scenes=(number,))))
        for number in range(len(SCENES))
    ]
    done = rows_of(out)
    number, count = 1 + max((row["run"] for row in done), default=0), len(done)
    while count < num_kills:
        chance = random.Random(f"{seed} {number}")
        scenes = tuple(chance.sample(range(len(SCENES)), k=1 + (chance.random() < TWO_SHARE)))
        kills: list[Kill | None] = [
            draw(moments[chance.choice(scenes)], chance)
            for _ in range(chance.randint(2, MOST_KILLS))
        ]
        stubborn = [chance.random() < STUBBORN_SHARE for _ in kills]
        rows = replace(ground, task=replace(ground.task, scenes=scenes)).chain(
            kills, is_stubborn=stubborn
        )
        total_s, killed = sum(row["cpu_s"] for row in rows), [row for row in rows if row["killed"]]
        with out.open("a") as file:
            for row in killed:
                file.write(
                    json.dumps(
                        {
                            "run": number,
                            "scenes": scenes,
                            "cpu_s_per_kill": round(total_s / len(killed), 2),
                            **row,
                        }
                    )
                    + "\n"
                )
        number, count = number + 1, count + len(killed)
        print(
            f"{count} kills: {', '.join(row['phase'] for row in killed)}; {total_s:.0f} CPU-s",
            flush=True,
        )


def census(ground: Ground) -> dict[str, list[Moment]]:
    """The instants of an undisturbed run, by phase."""
    ground.chain([], is_stubborn=[])
    return moments_of(ground.folder / "trace")


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def report(out: Path) -> None:
    """Print a table by phase."""
    by_phase: dict[str, list[dict]] = defaultdict(list)
    for row in rows_of(out):
        by_phase[row["phase"]].append(row)
    print(
        "| phase | kills | at an instant | half a line | from outside | in a switch | instants"
        " |\n|---|---|---|---|---|---|---|"
    )
    for phase in PHASES:
        rows = by_phase[phase]
        kinds = Counter(
            (
                "half a line"
                if row["kill"]["is_torn"]
                else "then"
                if row["kill"]["delay_s"] is None
                else "outside"
            )
            for row in rows
        )
        print(
            f"| {phase} | {len(rows)} | {kinds['then']} | {kinds['half a line']} |"
            f" {kinds['outside']} | {sum(row['in_a_switch'] for row in rows)} |"
            f" {len({row['kill']['instant'] for row in rows})} |"
        )
    rows = rows_of(out)
    print(
        f"{len(rows)} kills in {len({row['run'] for row in rows})} runs,"
        f" {sum(row['cpu_s_per_kill'] for row in rows) / max(1, len(rows)):.1f} CPU-s each"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="kills in all (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws (default: 0)")
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("kills.jsonl"),
        help="JSON Lines, one kill per line (default: kills.jsonl)",
    )
    parser.add_argument(
        "--essential",
        action="store_true",
        help=f"do only {len(ESSENTIAL)} kills, one in each phase of one switch",
    )
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args()
    if args.report:
        report(args.out)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="kill_fuzz-"))
    text = folder / "text.txt"
    text.write_text(
        "".join(
            f"{n} bottles of beer on the wall, take {n % 7} down and pass them around.\n"
            for n in range(300)
        )
    )
    victims = Victims(folder / "log", run)  # before JAX starts here
    use_devices(str(folder / "cache"), is_kept=True)
    task = Task(
        run_dir=str(folder / "run"),
        text=str(text),
        trace=str(folder / "trace"),
        cache=str(folder / "cache"),
        scenes=(0,),
    )
    plans = {
        plan.digest: plan for plan in map(plan_of, (START, *(scene.settings for scene in SCENES)))
    }
    ground = Ground(folder=folder, victims=victims, replay=Replay(text), plans=plans, task=task)
    try:
        if args.essential:
            there = plan_of(SCENES[0].settings)
            # compile here, once for all processes
            ground.replay.of([plan_of(START), there, plan_of(START), there])
            rows = ground.chain(list(ESSENTIAL), is_stubborn=[True] * len(ESSENTIAL))
            print(json.dumps(rows))
        else:
            fuzz(ground, args.kills, args.seed, args.out)
    except WrongError as error:
        print(f"WRONG: {error}\n  the run is left in {folder}", file=sys.stderr)
        return 1
    finally:
        victims.close()
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
