"""The host of each process (several may share one), and devices ordered so that those of a host
are adjacent.
"""

import hashlib
import os
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@cache
def hosts_of_processes() -> tuple[int, ...]:
    """The host of each process; hosts are numbered from 0, in the order of their first processes.

    Every process must make the first call, which is collective.
    """
    if jax.process_count() == 1:
        return (0,)
    own = np.frombuffer(hashlib.sha256(_host().encode()).digest()[:8], np.uint32)
    names = [bytes(np.ascontiguousarray(row)) for row in multihost_utils.process_allgather(own)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def count_hosts() -> int:
    """Number of hosts that the run's processes are on. Every process must make the first call."""
    return len(set(hosts_of_processes()))


def devices_by_host() -> list[Any]:
    """All devices, host after host and process after process: launchers may assign processes to
    hosts round-robin, and JAX lists devices by process. Every process must make the first call.
    """
    hosts = hosts_of_processes()
    return sorted(jax.devices(), key=lambda device: hosts[device.process_index])


def _host() -> str:
    """An identifier that processes share if they share a machine and its network.

    A container with its own network counts as its own host, because the link between it and others
    can be slower than memory. Host names are not used: containers that share a network may have
    different ones.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_NETWORK)}"
    except OSError:  # not Linux
        return str(uuid.getnode())
