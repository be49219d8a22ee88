"""`optimus profile`: show where the time of a run's profiled steps went.

`optimus profile runs/gpt2-nano-20260801-120000`
"""

import sys

from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.command_line import Parser
from optimus_jax.run.named_run import check_names_run
from optimus_jax.system.command import typed_command
from optimus_jax.system.environment import import_jax
from optimus_jax.system.paths import local_path

OPERATION_COLUMNS = 72
"""Columns of the name that JAX has for an operation; its end says most."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description=(
            "Show where the time of a run's profiled steps went, beside what was predicted. Profile"
            f" steps with `{typed_command('train')} --profile 10:15`."
        ),
        words={"run_dir": "run_dir run dir"},
    )
    flags.add_argument(
        "run_dir", metavar="RUN_DIR", help="directory of a run, such as one under runs/"
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
    from optimus_jax.planning.search.explain import mib, seconds
    from optimus_jax.run.display import PlainDisplay
    from optimus_jax.run.step_profiler import read_profile
    from optimus_jax.run.stored_run import config_of_run
    from optimus_jax.run_directory.directory import RunDirectory

    with flags.own_words():
        check_names_run(given["run_dir"], what="RUN_DIR")
        run_dir = local_path(given["run_dir"], what="RUN_DIR")
        run = RunDirectory(run_dir, writer=False)
        config_of_run(run, given["run_dir"], purpose="with a profile")
        folder, profile = read_profile(run_dir, given["step"])
    if given["json"]:
        print(profile.to_json())
        return
    display = PlainDisplay(profile.last_step, sys.stdout, every=1)
    display.table(profile.title, profile.table())
    longest = [
        [
            each.part,
            seconds(each.time_s),
            f"{each.runs:g}",
            each.name,
            each.source[-OPERATION_COLUMNS:],
        ]
        for each in profile.operations
    ]
    head = ["part of the step", "in a step", "runs", "instruction", "operation"]
    display.table("operations that take longest", [head, *longest])
    if (memory := profile.memory) is not None:
        display.table(memory.title, memory.table())
        largest = [
            [
                each.part,
                mib(each.num_bytes),
                f"{each.number} x {each.shape}",
                each.source[-OPERATION_COLUMNS:],
            ]
            for each in memory.arrays
        ]
        head = ["in a device's memory", "size", "arrays", "operation or argument"]
        display.table("largest arrays when a step needs most", [head, *largest])
    display.message(f"trace, compiled step and memory: {folder}")
