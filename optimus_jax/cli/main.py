"""`optimus COMMAND`: import the command's module and run it."""

import sys
from importlib import import_module

from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.faults.stopping import exit_on_signal
from optimus_jax.version import VERSION

COMMANDS = {
    "train": "train a model, or resume a run",
    "plan": "rank the layouts of a model on a cluster",
    "evaluate": "measure a trained model on held-out data",
    "generate": "generate text with a trained model",
    "predict": "label texts, words or images, or answer questions, with a trained model",
    "transcribe": "write down recordings with a trained model of sound",
    "export": "write a run's model as a directory that transformers loads",
    "report": "write one HTML page about a run, or several",
    "launch": "run a command as several processes on this machine",
    "tokenize": "tokenize text files into one .bin file",
    "summary": "count a model's parameters and FLOPs, and describe a data set",
    "profile": "show where the time of a run's profiled steps went",
    "schedule": "show a pipeline schedule, and write its table",
    "simulate": "try the controller on a simulated cluster",
}
HANDLES_ITS_ERRORS = ("train", "launch")
"""Commands that catch their own errors: their `main` returns the exit code."""


def main(command: str | None = None) -> int:
    """Run a command with the arguments of this process.

    Args:
      command: one of COMMANDS; None: the first argument names it.
    Returns:
      The exit code of the command.
    """
    if command is None and sys.argv[1:2] and sys.argv[1] in COMMANDS:
        command = sys.argv.pop(1)
        sys.argv[0] = f"optimus {command}"  # the program name that --help shows
    if command == "train":
        exit_on_signal()
    # This import takes a while, so it follows exit_on_signal: a signal now ends `train` with one
    # line instead of a traceback.
    from optimus_jax.run.command_line import run

    if command is None:
        return run(lambda: _no_command(sys.argv[1:]))
    command_main = import_module(f"optimus_jax.cli.{command}").main
    return command_main() if command in HANDLES_ITS_ERRORS else run(command_main)


def _no_command(arguments: list[str]) -> int:
    """Print the help or the version. Raises ConfigError if the first argument is no command."""
    if arguments == ["--version"]:
        print(f"optimus_jax {VERSION}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: optimus COMMAND [flags]\n")
        for name, meaning in COMMANDS.items():
            print(f"  {name:<12}{meaning}")
        print("\n`optimus COMMAND --help` shows the flags of a command.")
        return 0
    raise ConfigError(
        explain(
            "there is no such command",
            given=f"optimus {arguments[0]}",
            do=nearest(arguments[0], COMMANDS),
        )
    )
