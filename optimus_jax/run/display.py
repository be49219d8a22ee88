"""Progress displays of a run: a live bar on a terminal, plain lines in a log file, or nothing."""

import collections
import math
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Self, TextIO

import jax
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from optimus_jax.config import LogConfig
from optimus_jax.planning.search.explain import gib
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.system.resilient_io import ignoring_write_errors
from optimus_jax.training.numbers import short
from optimus_jax.training.watchers import Display, metrics_text

UNKNOWN = "-"
NUM_AVERAGED = 10
"""Number of latest steps over which the speed shown is averaged."""


class SilentDisplay(Display):
    """Shows only messages that other processes cannot show; used where another process displays
    the run."""

    def process_message(self, text: str) -> None:
        print(
            f"process {jax.process_index()}: {text}",
            file=ignoring_write_errors(sys.stderr),
            flush=True,
        )


class PlainDisplay(Display):
    """Prints lines for a log file: this process's first step, every `every`th step, and the
    last."""

    def __init__(self, total_steps: int, stream: TextIO, every: int) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._every = every
        self._steps = _LatestSteps(total_steps)
        self._is_first = True

    def step(self, record: StepRecord) -> None:
        self._steps.add(record)
        if self._is_first or record.step % self._every == 0 or record.step == self._total_steps:
            self.message(
                "  ".join(
                    [
                        f"step {record.step}/{self._total_steps}",
                        *self._steps.numbers(),
                        f"eta {self._steps.time_left()}",
                    ]
                )
            )
        self._is_first = False

    def message(self, text: str) -> None:
        # flush: Python buffers output that does not go to a terminal
        print(text, file=self._stream, flush=True)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        self.message("\n".join([title, *(f"  {line}".rstrip() for line in lines)]))


class RichDisplay(Display):
    """Shows a progress bar at the bottom of a terminal; messages appear above it."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._steps = _LatestSteps(total_steps)
        # log.progress=rich shows the bar even on a pipe.
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("eta {task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total_steps, left=UNKNOWN)
        self._live = Live(self._bar, console=self._console, refresh_per_second=4)
        self._decision = ""

    def step(self, record: StepRecord) -> None:
        self._steps.add(record)
        self._bar.update(self._task, completed=record.step, left=self._steps.time_left())
        memory = UNKNOWN if record.peak_bytes is None else gib(record.peak_bytes)
        lines = [Text("  ".join([*self._steps.numbers(), f"memory {memory}"]))]
        if self._decision:
            lines.append(
                Text(
                    f"plan {record.plan}  controller: {self._decision}",
                    overflow="ellipsis",
                    no_wrap=True,
                )
            )
        self._live.update(Group(self._bar, *lines))

    def decision(self, text: str) -> None:
        self._decision = text
        super().decision(text)

    def message(self, text: str) -> None:
        # the console must not interpret square brackets or wrap lines
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=Text(title), title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def make_display(
    config: LogConfig, total_steps: int, *, show: bool = True, stream: TextIO | None = None
) -> Display:
    """The display that `config.progress` selects.

    Args:
      total_steps: steps of the whole run, including those before a resume.
      show: False in all processes but one.
      stream: stream to write to; None for standard output.
    """
    target = ignoring_write_errors(sys.stdout if stream is None else stream)
    if not show:
        return SilentDisplay()
    kind = config.progress
    if kind == "auto":
        kind = "rich" if target.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    if kind == "rich":
        return RichDisplay(total_steps, target)
    return PlainDisplay(total_steps, target, config.every) if kind == "plain" else Display()


class _LatestSteps:
    """Speed over the latest steps, and the remaining time.

    A busy host sees that steps have ended later than they did, several at once, so that single
    times are too long or next to nothing; sums of several are right. The remaining time follows
    their median, so that a checkpoint or a compilation in one of them does not distort it.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._latest: collections.deque[StepRecord] = collections.deque(maxlen=20)

    def add(self, record: StepRecord) -> None:
        self._latest.append(record)

    def time_left(self) -> str:
        median_s = statistics.median(each.step_time_s for each in self._latest)
        return short_duration((self._total_steps - self._latest[-1].step) * median_s)

    def numbers(self) -> list[str]:
        """What is shown of the newest step."""
        record = self._latest[-1]
        of_plan = [each for each in self._latest if each.plan == record.plan][-NUM_AVERAGED:]
        time_s = sum(each.step_time_s for each in of_plan)
        tokens = sum(each.tokens_per_s * each.step_time_s for each in of_plan)
        used = [(each.mfu, each.step_time_s) for each in of_plan if each.mfu is not None]
        mfu = (
            f"{sum(map(math.prod, used)) / sum(time_s for _, time_s in used):.1%}"
            if used
            else UNKNOWN
        )
        return [
            f"loss {short(record.loss, 4)}" + (" (no update)" if record.skipped else ""),
            *metrics_text(record.metrics),
            f"{short_count(tokens / time_s)} tokens/s",
            f"{time_s / len(of_plan):.3f} s/step",
            f"mfu {mfu}",
        ]


def short_count(value: float) -> str:
    """A count with one decimal and a metric suffix: 12345 is `12.3k`."""
    for suffix in ("", "k", "M"):
        if value < 999.95:
            return f"{value:.1f}{suffix}"
        value /= 1000
    return f"{value:.1f}G"


def short_duration(seconds: float) -> str:
    """A duration in its two largest units: `42s`, `1m36s`, `2h05m`, `3d04h`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
