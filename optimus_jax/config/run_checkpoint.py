"""A run, or one of its checkpoints, as the user names it: DIR or DIR@STEP, where DIR may be a
URL."""

import os
import re
from dataclasses import dataclass, replace

from optimus_jax.system.paths import Url, user_path

INIT_FROM = "--init-from"
"""Flag of the setting `init_from`."""
_STEP = re.compile(r"(?P<run>.+)@(?P<step>\d+)", re.DOTALL)


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint of a run."""

    run: str
    """Directory or URL of the run."""
    step: int | None
    """Step of the checkpoint; None: the newest good one."""

    @classmethod
    def parse(cls, text: str, *, what: str) -> "RunCheckpoint":
        """Read DIR or DIR@STEP; a directory whose own name ends so is written `DIR@1/`.

        Args:
          what: name of the flag, for errors.
        Raises:
          PathError: it is not a path.
        """
        match = _STEP.fullmatch(text)
        run, step = (text, None) if match is None else (match["run"], int(match["step"]))
        user_path(run, what=what)
        return cls(run, step)

    def __str__(self) -> str:
        return self.run if self.step is None else f"{self.run}@{self.step}"

    def with_whole_path(self) -> "RunCheckpoint":
        """The same checkpoint by its absolute path, found from any working directory."""
        path = user_path(self.run, what="this path")
        whole = str(path) if isinstance(path, Url) else os.path.abspath(path)
        return replace(self, run=f"{whole}/" if _STEP.fullmatch(whole) else whole)
