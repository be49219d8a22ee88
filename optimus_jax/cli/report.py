"""`optimus report`: write one HTML page about a run, which may still be running, or about several.

`optimus report runs/gpt2-nano-20260801-120000`
"""

import time
from collections.abc import Callable
from pathlib import Path

from optimus_jax.cli.page_files import page_path, write_page
from optimus_jax.report.compared_runs import compared_runs
from optimus_jax.report.run_history import RunHistory
from optimus_jax.report.run_report import run_report
from optimus_jax.run.command_line import Parser
from optimus_jax.run.stored_run import run_to_read
from optimus_jax.run_directory.contents import REPORT_FILE
from optimus_jax.system.paths import UserPath, user_path
from optimus_jax.system.resilient_io import print_to_stderr

PAGE, COMPARISON = REPORT_FILE, "comparison.html"
"""Default names of the page about one run, and about several."""
WATCH_S = 15
"""Seconds between two pages of --watch."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description=(
            "Write one self-contained HTML page about a run: loss, rates, step time, plans and"
            " profiles, decisions and their reasons, predictions against measurements, switches,"
            " memory, settings. The run may still be running. With several runs the page shows them"
            " side by side."
        ),
        words={"run_dir": "run_dir run dir", "out": "output output_file"},
    )
    flags.add_argument(
        "run_dir",
        nargs="+",
        metavar="RUN_DIR",
        help="directories of runs, such as one under runs/, or their URLs",
    )
    flags.add_argument(
        "--out",
        metavar="FILE.html",
        help=(
            f"file to write, replaced if it exists (default: RUN_DIR/{PAGE}; for a URL ./{PAGE};"
            f" for several runs ./{COMPARISON})"
        ),
    )
    flags.add_argument(
        "--watch",
        action="store_true",
        help=f"write the page every {WATCH_S} s, until the runs have ended or Ctrl-C is pressed; an"
        " open page follows (default: write it once)",
    )
    return flags


def main() -> None:
    flags = parser()
    given = flags.read()
    runs: list[UserPath] = given["run_dir"]
    found = [user_path(run, what="RUN_DIR") for run in runs]
    if given["out"] is not None:
        out = page_path(given["out"], flag="--out")
    elif len(found) > 1:
        out = Path(COMPARISON)
    else:  # the page of a run in a store goes into the current directory
        out = (found[0] if isinstance(found[0], Path) else Path()) / PAGE
    with flags.own_words():
        write_report(runs, out, watch=given["watch"])


def write_report(
    runs: list[UserPath], out: Path, *, watch: bool, wait: Callable[[float], None] = time.sleep
) -> None:
    """Write the page about some runs; with `watch` again and again until all of them have ended.

    Args:
      runs: directories or URLs, as typed.
      wait: called with WATCH_S between two pages.
    """
    while True:
        paths = [
            run_to_read(run, what="RUN_DIR", checkpoint="none", say=print_to_stderr) for run in runs
        ]
        # Read before the page is made: what a run writes meanwhile is on the next page.
        is_last = not watch or all(RunHistory.read(path).has_ended for path in paths)
        refresh_s = None if is_last else WATCH_S
        if len(paths) > 1:
            names = [str(run) for run in runs]
            text = compared_runs(paths, names=names, refresh_s=refresh_s)
        else:
            text = run_report(paths[0], refresh_s=refresh_s)
        write_page(out, text, flag="--out")
        if is_last:
            print(f"wrote {out}")
            return
        print(f"wrote {out}; again every {WATCH_S} s, until the end or Ctrl-C", flush=True)
        try:
            wait(WATCH_S)
        except KeyboardInterrupt:  # a last page, which does not wait for the next one
            watch = False
