"""`optimus schedule`: show a pipeline schedule, and write its table.

`optimus schedule --schedule 1f1b --stages 4 --microbatches 8`
"""

from argparse import SUPPRESS
from pathlib import Path

from optimus_jax.errors import ConfigError, explain
from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.chart import picture, text
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import REPEATING, SCHEDULES, make_schedule
from optimus_jax.run.command_line import Parser
from optimus_jax.store.local_copies import local_file
from optimus_jax.system.environment import import_jax
from optimus_jax.system.paths import local_path

DESCRIBING = ("schedule", "stages", "microbatches", "repeats", "slack")
"""Flags that choose the schedule."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description=(
            "Show a pipeline schedule as a chart, with its bubble and its buffers, and write its"
            " table."
        ),
        argument_default=SUPPRESS,
        words={
            "stages": (
                "num_stages pipe pp pp_size pipeline_parallel_size pipeline_model_parallel_size"
            ),
            "picture": "plot svg out output",
        },
    )
    flags.add_argument("--schedule", metavar="NAME", help=", ".join(SCHEDULES) + " (default: 1f1b)")
    flags.add_argument(
        "--stages",
        metavar="N",
        type=int,
        help="devices along mesh axis pipe (default: those of --table)",
    )
    flags.add_argument(
        "--microbatches",
        metavar="N",
        type=int,
        help="microbatches of a step (default: those of --table)",
    )
    flags.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        help="interleaved: visits of a microbatch to each device (default: as in a run)",
    )
    flags.add_argument(
        "--slack",
        action="store_true",
        help="leave one tick between sending and use (default: none)",
    )
    flags.add_argument(
        "--table",
        metavar="FILE.json",
        help="show the schedule whose table is in this file (default: none)",
    )
    flags.add_argument(
        "--json",
        metavar="FILE.json",
        help="write the table, to edit it and train with --schedule FILE.json (default: none)",
    )
    flags.add_argument(
        "--picture", metavar="FILE.svg", help="draw the chart; .png or .svg (default: none)"
    )
    return flags


def schedule_of(given: dict) -> Schedule:
    """The schedule that the flags describe, or the one in a file."""
    describing = [f"--{name}" for name in DESCRIBING if name in given]
    if "table" in given:
        if describing:
            raise ConfigError(
                explain(
                    "--table already chooses the schedule",
                    given=" ".join([*describing, "--table"]),
                    do=f"leave out {' '.join(describing)}, or --table",
                )
            )
        try:
            return Schedule.from_json(local_file(given["table"], what="--table").read_bytes())
        except OSError as error:
            raise ConfigError(
                explain("a table cannot be read", given=error, do="name another file")
            ) from error
    for name in ("stages", "microbatches"):
        if name not in given:
            raise ConfigError(
                explain(
                    f"the number of {name} is missing",
                    given=" ".join(describing) or "no flags",
                    do=f"give --{name} N, or --table FILE.json",
                )
            )
    name, repeats = given.get("schedule", "1f1b"), given.get("repeats", 1)
    if name in REPEATING and "repeats" not in given:
        import_jax(only_cpu=True)
        # imported here because it imports JAX
        from optimus_jax.planning.search.assemble import DEFAULT_REPEATS

        repeats = DEFAULT_REPEATS
    return make_schedule(
        name, given["stages"], given["microbatches"], repeats, 2 if "slack" in given else 1
    )


def facts(schedule: Schedule) -> str:
    """The cost of a schedule in time and in memory, as two lines of text."""
    kept, recomputed = Buffers.of(schedule, keep_residuals=True), Buffers.of(schedule)
    return (
        f"{schedule.num_ticks} ticks, bubble {schedule.bubble():.1%}, at most"
        f" {schedule.in_flight().max()} tasks in flight\nslots on each stage: residuals"
        f" {kept.num_residuals}, inputs {kept.num_inputs}, cotangents {kept.num_cotangents} if"
        f" residuals are kept; inputs {recomputed.num_inputs}, cotangents"
        f" {recomputed.num_cotangents} if stages are recomputed"
    )


def write_table(schedule: Schedule, path: Path) -> None:
    """Write the table into a new file. An existing file may be a hand-written table, so it is kept.

    Raises ConfigError if the file exists or cannot be written.
    """
    if path.suffix != ".json":
        raise ConfigError(
            explain(
                "the name of a table must end in .json",
                given=f"--json {path}",
                do=f"use --json {path.with_suffix('.json')}",
            )
        )
    try:
        with path.open("x") as file:
            file.write(schedule.to_json())
    except FileExistsError as error:
        raise ConfigError(
            explain(
                "a table is never overwritten",
                given=f"--json {path}, which exists",
                do="use another name, or remove it",
            )
        ) from error
    except OSError as error:
        raise ConfigError(
            explain("a table cannot be written", given=error, do="name another file")
        ) from error
    print(
        f"wrote {path}; train with: --mesh pipe={schedule.num_stages},... --microbatches"
        f" {schedule.num_microbatches} --schedule {path}"
    )


def draw(schedule: Schedule, path: Path) -> None:
    """Draw the chart into a file."""
    try:
        picture(schedule, path)
    except OSError as error:
        raise ConfigError(
            explain("a picture cannot be written", given=error, do="name another file")
        ) from error
    print(f"wrote {path}")


def main() -> None:
    given = parser().read()
    schedule = schedule_of(given)
    print(text(schedule), facts(schedule), sep="")
    if "json" in given:
        write_table(schedule, local_path(given["json"], what="--json"))
    if "picture" in given:
        draw(schedule, local_path(given["picture"], what="--picture"))
