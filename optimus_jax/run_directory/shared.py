"""Checks that all processes of a run see the same directory; otherwise each would write its part of
a checkpoint to another disk.
"""

import secrets
import time

import jax

from optimus_jax.cluster.distributed import all_or_none, broadcast_from_0
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run_directory.directory import RunDirectory

PATIENCE_S = 60.0
"""How long a file server may take to show a host a file that another one created: NFS may cache its
absence this long."""
_POLL_S = 0.2


def check_shared(run: RunDirectory) -> None:
    """Raise unless all processes see the same run directory; every process must call it.

    Raises:
      ConfigError: in a process that does not see a file which process 0 has just written; an
        OptimusError in the others.
    """
    if jax.process_count() == 1:
        return
    with all_or_none():
        mark = secrets.token_hex(8)
        run.write_mark(mark)
    mark = broadcast_from_0(mark)
    with all_or_none():
        until_s = time.monotonic() + PATIENCE_S
        while run.mark() != mark:
            if time.monotonic() > until_s:
                raise ConfigError(
                    explain(
                        "the run directory of this process is not that of process 0",
                        given=(
                            f"{run.path}, where this process does not find what process 0 has"
                            " written"
                        ),
                        do=(
                            "give --run-dir a directory that all hosts share, by a path that means"
                            " the same in all processes; if --run-dir is a URL, name such a"
                            " directory by --set store.local_dir=DIR"
                        ),
                    )
                )
            time.sleep(_POLL_S)
