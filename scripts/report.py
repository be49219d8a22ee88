"""Write one HTML page about a run, ended or under way. `python scripts/report.py runs/gpt2-nano-20260801-120000`"""

import os
import sys

# Python puts the folder of a script first on the path, and there scripts/tokenize.py would take the
# place of the standard module `tokenize`, which inspect and linecache import, and matplotlib with them.
if (folder := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(folder)

import argparse
from pathlib import Path

from optimus_jax.environment import show_every_character
from optimus_jax.errors import ConfigError, OptimusError, explain
from optimus_jax.paths import local_path, user_path
from optimus_jax.stored_run import run_to_read
from optimus_jax.viz.run_report import run_report

USER_ERROR = 2
PAGE = "report.html"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description="Write one self-contained HTML page about a run: loss, step time and plans, decisions and their reasons, predictions against "
                    "measurements, memory, switches. The run may still be under way.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118))
    flags.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run, such as one under runs/, or its URL")
    flags.add_argument("--out", metavar="FILE.html", help=f"where to write the page; one that is there is replaced (default: RUN_DIR/{PAGE}, for a URL ./{PAGE})")
    return flags


def write_page(run_dir: Path, out: Path) -> None:
    """Write the report of a run, whole or not at all: somebody may have the page open."""
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(explain("the name of a page ends in .html", given=f"--out {out}", do=f"use --out {out.with_suffix('.html')}"))
    text = run_report(run_dir)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, out)


def note(text: str) -> None:
    """What is under way."""
    print(text, file=sys.stderr)


def main() -> int:
    """Exit code: 0 done, 2 the user's error."""
    given = parser().parse_args()
    show_every_character()
    try:
        run = user_path(given.run_dir, what="RUN_DIR")
        home = run if isinstance(run, Path) else Path()  # a page about a run in a store is written here
        out = home / PAGE if given.out is None else local_path(given.out, what="--out")
        write_page(run_to_read(given.run_dir, what="RUN_DIR", checkpoint="none", say=note), out)
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        print("error: " + explain("the page cannot be written", given=error, do="name another place with --out FILE.html"), file=sys.stderr)
        return USER_ERROR
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
