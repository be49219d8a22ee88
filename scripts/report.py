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
from optimus_jax.viz.run_report import run_report

USER_ERROR = 2
PAGE = "report.html"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description="Write one self-contained HTML page about a run: loss, step time and plans, decisions and their reasons, predictions against "
                    "measurements, memory, switches. The run may still be under way.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118))
    flags.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run, such as one under runs/")
    flags.add_argument("--out", metavar="FILE.html", help=f"where to write the page; one that is there is replaced (default: RUN_DIR/{PAGE})")
    return flags


def write_page(run_dir: Path, out: Path) -> None:
    """Write the report of a run, whole or not at all: somebody may have the page open."""
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(explain("the name of a page ends in .html", given=f"--out {out}", do=f"use --out {out.with_suffix('.html')}"))
    text = run_report(run_dir)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, out)


def main() -> int:
    """Exit code: 0 done, 2 the user's error."""
    given = parser().parse_args()
    show_every_character()
    run_dir = Path(given.run_dir)
    out = Path(given.out) if given.out is not None else run_dir / PAGE
    try:
        write_page(run_dir, out)
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
