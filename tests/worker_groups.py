"""The groups of tests that one pytest-xdist worker runs together: the tests of a file, and in the
comparison with one device those of a plan and a model.

Long groups begin first, so that no worker is left with one at the end.
"""

from pathlib import PurePosixPath

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

PARITY_FILE = "test_equal_to_one_device.py"
SLOWEST = (
    "test_kill.py",
    "test_huggingface.py",
    "test_slurm.py",
    "test_exactness.py",
    "test_two_processes.py",
    "test_controller.py",
    "test_faults.py",
    "test_tasks.py",
    "test_mpirun.py",
    "test_tuning.py",
    "test_process_groups.py",
    "test_program.py",
)
"""Files that begin first, some of which have one test of minutes. Those whose tests start processes
and wait for them alternate with those that only compile, so that few of them run at the same
time."""


class Groups(LoadScopeScheduling):
    """Gives a worker the next group when it has finished its last one."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The group of a test: its file, or its file and parameters."""
    file, _, test = nodeid.partition("::")
    _, bracket, parameters = test.partition("[")
    return f"{file}[{parameters}" if bracket and file.endswith(PARITY_FILE) else file


def by_length(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests in the order in which their groups should begin: the slowest files, others that start
    processes or compile, the plans one by one, files of quick tests."""

    def is_long(item: pytest.Item) -> bool:
        return any(item.get_closest_marker(mark) for mark in ("processes", "compiles", "slow"))

    long_files = {group_of(item.nodeid) for item in items if is_long(item)}

    def rank(item: pytest.Item) -> int:
        group = group_of(item.nodeid)
        if (name := PurePosixPath(group).name) in SLOWEST:
            return SLOWEST.index(name)
        return len(SLOWEST) + (1 if PARITY_FILE in group else 0 if group in long_files else 2)

    return sorted(items, key=rank)
