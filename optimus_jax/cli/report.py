"""`optimus report`: write one HTML page about a run, which may still be running.

`optimus report runs/gpt2-nano-20260801-120000`
"""

from pathlib import Path

from optimus_jax.cli.page_files import page_path, write_page
from optimus_jax.report.run_report import run_report
from optimus_jax.run.command_line import Parser
from optimus_jax.run.stored_run import run_to_read
from optimus_jax.system.paths import user_path
from optimus_jax.system.resilient_io import print_to_stderr

PAGE = "report.html"
"""Default name of the page."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description=(
            "Write one self-contained HTML page about a run: loss, rates, step time, plans and"
            " profiles, decisions and their reasons, predictions against measurements, switches,"
            " memory, settings. The run may still be running."
        ),
        words={"run_dir": "run_dir run dir", "out": "output output_file"},
    )
    flags.add_argument(
        "run_dir", metavar="RUN_DIR", help="directory of a run, such as one under runs/, or its URL"
    )
    flags.add_argument(
        "--out",
        metavar="FILE.html",
        help=(
            f"file to write, replaced if it exists (default: RUN_DIR/{PAGE}; for a URL ./{PAGE})"
        ),
    )
    return flags


def main() -> None:
    flags = parser()
    given = flags.read()
    run_dir = user_path(given["run_dir"], what="RUN_DIR")
    # the page of a run in a store goes into the current directory
    home = run_dir if isinstance(run_dir, Path) else Path()
    out = home / PAGE if given["out"] is None else page_path(given["out"], flag="--out")
    with flags.own_words():
        run = run_to_read(given["run_dir"], what="RUN_DIR", checkpoint="none", say=print_to_stderr)
    write_page(out, run_report(run), flag="--out")
    print(f"wrote {out}")
