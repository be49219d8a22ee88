"""Where a command writes a page, and how: `--out` of `report`, `--html` of `plan`."""

import os
from pathlib import Path

from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.paths import UserPath, local_path

SUFFIXES = (".html", ".htm")


def page_path(text: UserPath, *, flag: str) -> Path:
    """The file that a flag names.

    Raises:
      ConfigError: it cannot be a page, or its folder does not exist.
    """
    out = local_path(text, what=flag)
    if out.suffix not in SUFFIXES:
        name = out.with_suffix(".html") if out.name else out / "page.html"
        raise ConfigError(
            explain(
                "the name of a page must end in .html",
                given=f"{flag} {out}",
                do=f"use {flag} {name}",
            )
        )
    if not out.parent.is_dir():
        raise _not_written(f"{out.parent} is no directory", flag)
    return out


def write_page(out: Path, text: str, *, flag: str) -> None:
    """Write a page, atomically, because a reader may have it open.

    Raises:
      ConfigError: it cannot be written.
    """
    temporary = out.with_name(out.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise _not_written(error, flag) from error


def _not_written(why: object, flag: str) -> ConfigError:
    return ConfigError(
        explain("the page cannot be written", given=why, do=f"name another place with {flag}")
    )
