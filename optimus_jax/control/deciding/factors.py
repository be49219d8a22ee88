"""The factors that conditions consist of: names, families, how much they scatter, and words.

A factor has the name of its link, `compute`, or that of the signal of a process's time.
"""

import math

from optimus_jax.control import constants
from optimus_jax.control.signals import PROCESS_TIME
from optimus_jax.planning.profiles.cluster import INTER_HOST, INTRA_HOST

OF_ALL = (INTRA_HOST, INTER_HOST, "compute")
"""Names of the factors that hold for all processes."""
FAMILY = {INTRA_HOST: "link", INTER_HOST: "link", "compute": "compute"}
OF_PROCESSES = "process"
"""Signals of a family are measured alike, so they are wrong together."""
_WORDS = {
    INTRA_HOST: "exchanges inside hosts take",
    INTER_HOST: "exchanges between hosts take",
    "compute": "computing takes",
}


def process_time(process: int) -> str:
    """Name of a process's factor, and of the signal that it is read from."""
    return f"{PROCESS_TIME}{process}"


def process_of(name: str) -> int | None:
    """The process whose factor has this name; None: it is the factor of a link, or of all."""
    return int(name.removeprefix(PROCESS_TIME)) if name.startswith(PROCESS_TIME) else None


def on_grid(factor: float) -> float:
    """The nearest factor on the grid, which contains 1."""
    plausible, spacing = (
        min(constants.MAX_FACTOR, max(constants.MIN_FACTOR, factor)),
        constants.FACTOR_GRID,
    )
    return math.exp(round(math.log(plausible) / spacing) * spacing)


def in_words(name: str, factor: float) -> str:
    """What a factor of this size means."""
    process = process_of(name)
    times = "as long" if f"{factor:.2g}" == "1" else f"{factor:.2g} times as long"
    return (
        f"{_WORDS[name]} {times} as expected"
        if process is None
        else f"process {process} takes {times} as the others"
    )


def family_of(name: str) -> str:
    """The family of a factor's signal."""
    return FAMILY.get(name, OF_PROCESSES)


def min_log_change(name: str) -> float:
    """Least change of a factor's logarithm that counts as other conditions."""
    return {
        "link": constants.MIN_LINK_CHANGE,
        "compute": constants.MIN_COMPUTE_CHANGE,
        OF_PROCESSES: constants.MIN_PROCESS_CHANGE,
    }[family_of(name)]
