"""Time of a small program on a device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

ROUNDS, IN_A_ROW = 5, 20


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of one run: the median of several rounds.

    A round dispatches its runs one after the other and waits once, so that the launch of a run
    overlaps with the run before it.
    """
    jax.block_until_ready(run())
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(IN_A_ROW - 1):
            run()
        jax.block_until_ready(run())
        rounds.append((time.perf_counter() - started) / IN_A_ROW)
    return statistics.median(rounds)
