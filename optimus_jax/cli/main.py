"""`optimus COMMAND`: imports the command and runs it."""

import sys
from importlib import import_module

from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.faults.stopping import exit_on_signal
from optimus_jax.version import VERSION

COMMANDS = {
    "train": "train a model, or go on with a run",
    "plan": "rank the layouts of a model on a cluster",
    "generate": "go on with a text by a trained model",
    "report": "write one HTML page about a run",
    "launch": "run a command as several processes on this machine",
    "tokenize": "tokenize text files into one .bin file",
    "profile": "count what a model and a data set consist of",
    "schedule": "show a pipeline schedule, and write its table",
    "simulate": "try the controller on a simulated cluster",
}
HANDLES_ITS_ERRORS = ("train", "launch")
"""Commands whose `main` returns the exit code of any error."""


def main(command: str | None = None) -> int:
    """Run a command on the arguments of this process.

    Args:
      command: one of COMMANDS; None: the first argument names it.
    Returns:
      Its exit code.
    """
    if command is None and sys.argv[1:2] and sys.argv[1] in COMMANDS:
        command = sys.argv.pop(1)
        sys.argv[0] = f"optimus {command}"  # what --help shows
    if command == "train":
        exit_on_signal()
    # These take a while, and from here on a signal ends `train` with one line.
    from optimus_jax.run.command_line import run

    if command is None:
        return run(lambda: _no_command(sys.argv[1:]))
    command_main = import_module(f"optimus_jax.cli.{command}").main
    return command_main() if command in HANDLES_ITS_ERRORS else run(command_main)


def _no_command(arguments: list[str]) -> int:
    """Help, the version, or an error. Raises ConfigError for a name that is no command."""
    if arguments == ["--version"]:
        print(f"optimus_jax {VERSION}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: optimus COMMAND [flags]\n")
        for name, meaning in COMMANDS.items():
            print(f"  {name:<10}{meaning}")
        print("\n`optimus COMMAND --help` shows a command's flags.")
        return 0
    raise ConfigError(
        explain(
            "there is no such command",
            given=f"optimus {arguments[0]}",
            do=nearest(arguments[0], COMMANDS),
        )
    )
