"""Memory in huge pages, which has to be asked for before a program starts."""

import os
import sys

HUGE_PAGES = "glibc.malloc.hugetlb=1"


def restart_with_huge_pages() -> None:
    """Restart this program with its memory in huge pages (Linux), unless GLIBC_TUNABLES sets them
    already.

    Every step on a CPU maps its buffers anew; with small pages, clearing them took an eighth of a
    step's CPU time (docs/decisions/0003). glibc reads the setting only when a program starts. Call
    this first, before slow imports; the process keeps its id, arguments and terminal.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and "glibc.malloc.hugetlb" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}".strip(":")
        os.execv(sys.executable, sys.orig_argv)
