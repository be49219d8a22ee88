"""What to type instead, where what was asked is refused: the nearest settings that are accepted.

A check deep in a Plan knows the dimension that does not divide, not what else the user has fixed:
what it could suggest might be refused in turn. So its text says only what has to hold. Here, where
the whole config is known, changes of it are tried in order of their distance by the very function
that refused it, and what is printed has been accepted.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optimus_jax.config import Config, ParallelConfig
from optimus_jax.config.request import typed
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.search.moves import MOVES, meshes

Accepts = Callable[[Config, Topology], object]
"""What raises PlanError for a config that cannot be run on such devices."""

MESH = "parallel.mesh"
MOMENTS = "precision.moments"
MOST_NAMED = 3
MOST_TRIED = 1500
"""Configs; a try takes 0.3 ms, or 2 where memory has to be estimated."""
FARTHER = 1.5
"""Alternatives are named up to this much farther than the nearest."""
NAMED = "; what is accepted, nearest first: "
"""Precedes the alternatives in an error's last line; ` or ` stands between them."""


def with_neighbours(
    error: PlanError,
    config: Config,
    topology: Topology,
    accepts: Accepts,
    *,
    kept: tuple[str, ...] = (),
) -> PlanError:
    """The error with flags that mend it, each to be added to what was given; or with what is fixed,
    if none are found.

    Args:
      accepts: refused `config` with `error`.
      kept: names, or beginnings of names, of settings that cannot change.
    """
    found = neighbours(config, topology, accepts, kept=kept)
    if found:
        return PlanError(f"{error}{NAMED}{' or '.join(map(typed, found))}")
    fixed = {"data.global_batch": config.data.global_batch} | {
        name: value for name, (value, _) in _said(config).items()
    }
    return PlanError(
        f"{error}; nothing near is accepted while all of this is fixed: {typed(fixed)}"
    )


def neighbours(
    config: Config, topology: Topology, accepts: Accepts, *, kept: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Changes that are accepted, nearest first, each of other settings and none with a change that
    it can do without.
    """
    search = _Search(config, topology, accepts)
    found: list[dict[str, Any]] = []
    farthest = float("inf")
    for distance, changes in search.nearest_first(kept):
        if distance > farthest or search.num_tried > MOST_TRIED:
            break
        if not search.accepts(changes) or changes.keys() in [other.keys() for other in found]:
            continue
        if not any(
            search.accepts({name: value for name, value in changes.items() if name != spare})
            for spare in changes
        ):
            found.append(changes)
            farthest = min(farthest, distance + FARTHER)
        if len(found) == MOST_NAMED:
            break
    return (
        found
        or _freed(config, topology, search, kept)
        or _in_smaller_moments(config, topology, accepts, kept)
    )


def _freed(
    config: Config, topology: Topology, search: "_Search", kept: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The nearest mesh that is accepted once all else is left open, as changes none of which can be
    spared.
    """
    free = {
        name: default
        for name, (_, default) in _said(config).items()
        if name != MESH and not name.startswith(kept)
    }
    for mesh in sorted(meshes(config, topology), key=lambda move: move.distance):
        changes = mesh.changes | free
        if search.accepts(changes):
            for name in free:
                fewer = {other: value for other, value in changes.items() if other != name}
                changes = fewer if search.accepts(fewer) else changes
            return [changes]
    return []


def _in_smaller_moments(
    config: Config, topology: Topology, accepts: Accepts, kept: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The optimizer's moments in bf16, if that alone helps: the only change here that is not of the
    layout, so it comes last.
    """
    changes = {MOMENTS: "bf16"}
    if MOMENTS.startswith(kept):
        return []
    try:
        accepts(config.with_values(changes), topology)
    except (ConfigError, PlanError):  # ConfigError: betas that bf16 cannot follow
        return []
    return [changes]


class _Search:
    """Combinations of moves, and which of them are accepted."""

    def __init__(self, config: Config, topology: Topology, accepts: Accepts):
        self._config, self._topology, self._accepts = config, topology, accepts
        self._answers: dict[tuple[tuple[str, Any], ...], bool] = {(): False}

    @property
    def num_tried(self) -> int:
        """Configs that have been tried."""
        return len(self._answers) - 1

    def accepts(self, changes: Mapping[str, Any]) -> bool:
        """Whether the config with these changes is accepted."""
        key = tuple(sorted(changes.items()))
        if key not in self._answers:
            try:
                self._accepts(*self._changed(changes))
                self._answers[key] = True
            except PlanError:
                self._answers[key] = False
        return self._answers[key]

    def nearest_first(self, kept: tuple[str, ...]) -> Iterator[tuple[float, dict[str, Any]]]:
        """(distance, changes), nearest first; what is accepted is not changed further.

        A move of one kind follows moves of earlier kinds, so each combination comes up once.
        """
        order = itertools.count()
        heap: list[tuple[float, int, int, dict[str, Any]]] = [(0.0, next(order), 0, {})]
        while heap:
            distance, _, kind, changes = heapq.heappop(heap)
            if changes:
                yield distance, changes
            if self.accepts(changes):
                continue
            config, topology = self._changed(changes)
            for later in range(kind, len(MOVES)):
                for move in MOVES[later](config, topology):
                    if not any(name.startswith(kept) for name in move.changes):
                        heapq.heappush(
                            heap,
                            (
                                distance + move.distance,
                                next(order),
                                later + 1,
                                changes | move.changes,
                            ),
                        )

    def _changed(self, changes: Mapping[str, Any]) -> tuple[Config, Topology]:
        num_devices = changes.get("cpu_devices", self._topology.num_devices)
        memory = self._topology.bytes_per_device
        # virtual devices share one memory
        shared = memory and memory * self._topology.num_devices // num_devices
        return _replaced(self._config, changes), dataclasses.replace(
            self._topology, num_devices=num_devices, bytes_per_device=shared
        )


def _replaced(config: Config, changes: Mapping[str, Any]) -> Config:
    """`Config.with_values` for values of the right type, in a tenth of the time."""
    top, sections = {}, {"parallel": {}, "data": {}}
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        (sections[section] if section else top)[field] = value
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, **sections["parallel"]),
        data=dataclasses.replace(config.data, **sections["data"]),
        **top,
    )


def _said(config: Config) -> dict[str, tuple[Any, Any]]:
    """What the user has fixed of the layout: dotted name to its value, and to the default."""
    given, default = dataclasses.asdict(config.parallel), dataclasses.asdict(ParallelConfig())
    return {
        f"parallel.{name}": (value, default[name])
        for name, value in given.items()
        if value != default[name]
    }
