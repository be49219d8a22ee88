"""Draws a schedule as text or as a picture."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_jax.errors import ConfigError, explain
from optimus_jax.pipeline.schedule import IDLE, Schedule, Table
from optimus_jax.system.paths import local_path

MAX_TICKS = 96
"""Most ticks in a text chart; 1F1B and GPipe of 8 stages and 32 microbatches need fewer."""
MAX_STAGES = 16
"""Most stages in a text chart."""
NOTHING = "."
REPEAT_LETTERS = "abcdefghijklmnopqrstuvwxyz"
PALETTE = (
    (0.40, 0.65, 0.90),
    (1.0, 0.70, 0.40),
    (0.50, 0.80, 0.50),
    (0.95, 0.55, 0.55),
    (0.75, 0.65, 0.90),
    (0.80, 0.65, 0.55),
    (0.95, 0.70, 0.85),
    (0.70, 0.70, 0.70),
    (0.80, 0.80, 0.40),
    (0.45, 0.85, 0.90),
)
"""RGB colours of microbatches, used again from the first when there are more microbatches."""
DARKEST = 0.5
"""Limit of how much the colours of later repeats are darkened, as a share."""


def text(schedule: Schedule, *, max_ticks: int = MAX_TICKS, max_stages: int = MAX_STAGES) -> str:
    """A text chart: a column for each tick, and for each stage a row of forward (F) tasks and a row
    of backward (B) tasks.

    A task is shown as its microbatch's number, followed by a letter for the repeat if there are
    several: `3b` is the second visit of microbatch 3. The last row shows the microbatch whose loss
    is computed. Ticks and stages beyond the limits are left out, and a last line says so.
    """
    ticks, stages = min(schedule.num_ticks, max_ticks), min(schedule.num_stages, max_stages)
    rows = [("tick", [str(tick) for tick in range(ticks)])]
    for stage in range(stages):
        rows.append((f"stage {stage} F", _labels(schedule, schedule.forward[:ticks, stage])))
        if not schedule.is_forward_only:
            rows.append(("B", _labels(schedule, schedule.backward[:ticks, stage])))
    rows.append(
        (
            "head",
            [
                NOTHING if microbatch == IDLE else str(microbatch)
                for microbatch in schedule.head[:ticks].tolist()
            ],
        )
    )
    title_width = len(f"stage {stages - 1} F")
    width = max(len(label) for _, labels in rows for label in labels)
    lines = [title(schedule)]
    lines += [
        " ".join(
            [
                name.rjust(title_width) if name == "B" else name.ljust(title_width),
                *(label.rjust(width) for label in labels),
            ]
        )
        for name, labels in rows
    ]
    left_out = [
        f"{total - shown} of {total} {what}"
        for shown, total, what in (
            (ticks, schedule.num_ticks, "ticks"),
            (stages, schedule.num_stages, "stages"),
        )
        if shown < total
    ]
    if left_out:
        lines.append(f"(not shown: {' and '.join(left_out)})")
    return "\n".join(lines) + "\n"


def title(schedule: Schedule) -> str:
    """One line with the schedule's name, sizes, bubble and number of tasks in flight."""
    counts = [f"stages {schedule.num_stages}", f"microbatches {schedule.num_microbatches}"]
    if schedule.num_repeats > 1:
        counts.append(f"repeats {schedule.num_repeats}")
    if schedule.latency > 1:
        counts.append(f"latency {schedule.latency}")
    counts.append(f"bubble {schedule.bubble():.1%}")
    if not schedule.is_forward_only:
        counts.append(f"in flight {schedule.in_flight().max()}")
    return f"{schedule.name}: " + ", ".join(counts)


def _labels(schedule: Schedule, tasks: Table) -> list[str]:
    return [label(schedule, task) if task != IDLE else NOTHING for task in tasks.tolist()]


def label(schedule: Schedule, task: int) -> str:
    """The task's microbatch number, followed by the repeat's letter if there are several repeats
    (after z, by the repeat's number in brackets).
    """
    microbatch, repeat = divmod(task, schedule.num_repeats)
    if schedule.num_repeats == 1:
        return str(microbatch)
    return (
        f"{microbatch}{REPEAT_LETTERS[repeat] if repeat < len(REPEAT_LETTERS) else f'[{repeat}]'}"
    )


def picture(schedule: Schedule, path: str | Path) -> None:
    """Draw the schedule into a file whose name ends in .png, .svg or another format of matplotlib.

    Each microbatch has a colour, which is paler for backward and darker for later repeats. Tasks
    are labelled as in `text` if there are at most MAX_TICKS ticks.

    Raises:
      ConfigError: matplotlib is not installed, or cannot write that file format.
    """
    path = local_path(path, what="the picture")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain(
                "pictures of schedules need matplotlib, which is not installed",
                given=str(path),
                do="pip install 'optimus-jax[plots]', or print the chart as text",
            )
        ) from error
    stages, ticks = schedule.num_stages, schedule.num_ticks
    figure = Figure(
        figsize=(2 + 0.3 * min(ticks, MAX_TICKS), 1.2 + 0.6 * min(stages, MAX_STAGES)),
        layout="constrained",
    )
    canvas = FigureCanvasAgg(figure)
    if path.suffix.lstrip(".").lower() not in canvas.get_supported_filetypes():
        raise ConfigError(
            explain(
                "a picture's name ends in the kind of its file",
                given=str(path),
                do="choose .png or .svg",
            )
        )
    # Rows: forward and backward of stage 0, of stage 1, and so on.
    rows = np.stack([schedule.forward.T, schedule.backward.T], axis=1).reshape(2 * stages, ticks)
    axes = figure.add_subplot()
    axes.imshow(
        _colours(schedule, rows),
        aspect="auto",
        interpolation="nearest",
        extent=(0, ticks, stages, 0),
    )
    for stage in range(1, stages):
        axes.axhline(stage, color="white", linewidth=4)
    if ticks <= MAX_TICKS:
        for row, tick in np.argwhere(rows != IDLE).tolist():
            axes.text(
                tick + 0.5,
                row / 2 + 0.25,
                label(schedule, int(rows[row, tick])),
                ha="center",
                va="center",
                fontsize=7,
            )
    axes.set(
        title=title(schedule),
        xlabel="tick",
        ylabel="stage: forward above, backward below",
        yticks=np.arange(stages) + 0.5,
        yticklabels=range(stages),
    )
    axes.spines[["top", "right"]].set_visible(False)
    canvas.print_figure(str(path), dpi=150)


def _colours(schedule: Schedule, rows: Table) -> NDArray[np.float64]:
    """[rows, ticks, RGB]: white where idle; odd rows, which are backward, are mixed half with
    white."""
    microbatch, repeat = np.divmod(rows, schedule.num_repeats)
    colours = np.array(PALETTE)[microbatch % len(PALETTE)] * (
        1 - DARKEST * repeat[..., None] / schedule.num_repeats
    )
    colours[1::2] = (1 + colours[1::2]) / 2
    return np.where(rows[..., None] == IDLE, 1.0, colours)
