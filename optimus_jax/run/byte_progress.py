"""The progress bar of work that is counted in bytes."""

import sys

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn


def byte_progress(*, show: bool = True) -> Progress:
    """A progress bar on standard error, which is erased at the end; hidden unless that is a
    terminal.

    Args:
      show: whether this process shows progress at all.
    """
    console = Console(file=sys.stderr)
    return Progress(
        *(*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()),
        console=console,
        transient=True,
        disable=not (console.is_terminal and show),
    )
