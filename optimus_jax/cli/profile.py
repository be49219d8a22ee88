"""`optimus profile`: show where the time of a run's profiled steps went.

`optimus profile runs/gpt2-nano-20260801-120000`
"""

import sys

from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.command_line import Parser
from optimus_jax.system.command import typed_command
from optimus_jax.system.environment import import_jax
from optimus_jax.system.resilient_io import print_to_stderr

OPERATION_COLUMNS = 72
"""Columns of the name that JAX has for an operation; its end says most."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description=(
            "Show where the time of a run's profiled steps went, beside what was predicted. Profile"
            " steps with `train.py --profile 10:15`."
        ),
        words={"run_dir": "run_dir run dir"},
    )
    flags.add_argument(
        "run_dir", metavar="RUN_DIR", help="directory of a run, such as one under runs/, or its URL"
    )
    flags.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="first step of the profile (default: that of the newest one)",
    )
    flags.add_argument(
        "--json", action="store_true", help="print one value of JSON (default: tables)"
    )
    return flags


def main() -> None:
    flags = parser()
    if any(each.partition("=")[0] == "--model" for each in sys.argv[1:]):
        given = " ".join(sys.argv[1:])
        do = f"write {typed_command('summary')} {given}, which counts parameters and FLOPs"
        raise ConfigError(explain("a profile is that of a run", given=given, do=do))
    given = flags.read()
    import_jax()  # after parsing, so that --help does not wait for JAX
    from optimus_jax.planning.traces.step_profile import milliseconds
    from optimus_jax.run.display import PlainDisplay
    from optimus_jax.run.step_profiler import read_profile
    from optimus_jax.run.stored_run import run_to_read

    with flags.own_words():
        run = run_to_read(given["run_dir"], what="RUN_DIR", checkpoint="none", say=print_to_stderr)
        folder, profile = read_profile(run, given["step"])
    if given["json"]:
        print(profile.to_json())
        return
    display = PlainDisplay(profile.last_step, sys.stdout, every=1)
    display.table(profile.title, profile.table())
    longest = [
        [
            each.part,
            milliseconds(each.time_s),
            f"{each.runs:g}",
            each.name,
            each.source[-OPERATION_COLUMNS:],
        ]
        for each in profile.operations
    ]
    head = ["part of the step", "in a step", "runs", "instruction", "operation"]
    display.table("operations that take longest", [head, *longest])
    display.message(f"trace, compiled step and memory: {folder}")
