"""Commands of the package, run in this process: a new one would spend seconds on starting Python
and importing JAX.
"""

import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from optimus_jax.cli.main import main

SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def run_in_process(name: str, *arguments: object, cwd: Path | None = None) -> Ended:
    """The outcome of a command of the package.

    Not for `train`, which handles signals and may end its process.

    Args:
      name: one of `optimus_jax.cli.main.COMMANDS`.
      arguments: the arguments of the command.
      cwd: its current directory; None: that of the tests.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPTS / f"{name}.py"), *map(str, arguments)])
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        # A command that only calculates sets it.
        patch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])
        if cwd is not None:
            patch.chdir(cwd)
        try:
            code = main(name)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
    return Ended(returncode=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())
