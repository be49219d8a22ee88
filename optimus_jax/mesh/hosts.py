"""On how many machines a run is: processes may share one."""

import hashlib
import uuid
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def count_hosts() -> int:
    """Machines that the run's processes are on. Every process has to call it."""
    if jax.process_count() == 1:
        return 1
    own = np.frombuffer(hashlib.sha256(_machine().encode()).digest()[:8], np.uint32)
    return len(np.unique(multihost_utils.process_allgather(own), axis=0))


def _machine() -> str:
    """The same for all containers of a machine, which may each have a host name of their own."""
    try:
        return _BOOT_ID.read_text()
    except OSError:  # not Linux
        return str(uuid.getnode())
