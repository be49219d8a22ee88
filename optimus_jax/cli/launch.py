"""`optimus launch`: run a script or a command as several processes on this machine.

`optimus launch --processes 2 --cpu-devices 4 -- train --model gpt2-nano`
"""

import math
import sys
from argparse import REMAINDER
from typing import Any

from optimus_jax.cli.main import COMMANDS
from optimus_jax.cluster.local_launch import run_processes
from optimus_jax.errors import ConfigError, OptimusError, explain
from optimus_jax.faults.stopping import EXIT_USER_ERROR
from optimus_jax.run.command_line import Parser
from optimus_jax.system.environment import replace_unencodable_characters
from optimus_jax.system.paths import local_path
from optimus_jax.system.resilient_io import ignoring_write_errors, open_closed_streams

GRACE_S = 20.0
"""Default of --grace."""
WORDS = {"processes": "nproc_per_node nproc num_processes n np num_procs"}
"""Aliases: what other programs call these flags."""


def parser() -> Parser:
    """The parser of this command's flags. The script and its own flags follow `--`."""
    flags = Parser(
        usage="%(prog)s --processes N [flags] -- SCRIPT [flags of the script]",
        words=WORDS,
        description=(
            "Run a Python script as several processes of one run on this machine. The exit code is"
            " 0, or that of the first process that failed. SIGINT, SIGTERM and SIGUSR1 are"
            " forwarded to all processes; if the terminal closes, they receive SIGTERM."
        ),
    )
    flags.add_argument(
        "--processes", type=int, required=True, metavar="N", help="number of processes"
    )
    flags.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help=("virtual CPU devices of each process; passed to the script (default: not passed)"),
    )
    flags.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="S",
        help=(
            "seconds that the other processes get to end after one has failed"
            " (default: %(default)g)"
        ),
    )
    flags.add_argument(
        "script", metavar="SCRIPT", help="path of a script, or a command such as train"
    )
    flags.add_argument("arguments", nargs=REMAINDER, metavar="...", help="flags of the script")
    return flags


def command(given: dict[str, Any]) -> list[str]:
    """The command line of each process. Raises ConfigError if it cannot be run."""
    if given["processes"] < 1 or not 0 <= given["grace"] < math.inf:
        raise ConfigError(
            explain(
                "--processes must be at least 1, and --grace must not be negative",
                given=f"--processes {given['processes']} --grace {given['grace']:g}",
                do="give --processes 1 or more, --grace 0 or more",
            )
        )
    path = local_path(given["script"], what="SCRIPT")
    if path.is_file():
        program = [str(path)]
    elif path.stem in COMMANDS and str(path) in (path.stem, f"{path.stem}.py"):
        program = ["-P", "-m", "optimus_jax", path.stem]
    else:
        raise ConfigError(
            explain(
                "there is no such script",
                given=given["script"],
                do=f"give a path, or one of: {', '.join(COMMANDS)}",
            )
        )
    devices = [] if given["cpu_devices"] is None else ["--cpu-devices", str(given["cpu_devices"])]
    return [sys.executable, *program, *given["arguments"], *devices]


def main() -> int:
    """Returns the exit code: that of the processes, or 2 for a user error."""
    open_closed_streams()
    replace_unencodable_characters()
    sys.stdout, sys.stderr = ignoring_write_errors(sys.stdout), ignoring_write_errors(sys.stderr)
    try:
        given = parser().read()
        return run_processes(command(given), given["processes"], grace_s=given["grace"])
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
