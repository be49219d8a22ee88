"""Suggest the nearest accepted settings when a config is refused.

A check inside Plan knows which dimension does not divide, but not what else the user fixed, so its
suggestion might be refused in turn; its message states only the requirement. This module knows the
whole config. It tries changes in order of distance (planning/search/setting_changes.py), with the
function that refused the config, so every printed suggestion has been accepted.
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
from optimus_jax.planning.search.setting_changes import CHANGES_BY_KIND, meshes

Accepts = Callable[[Config, Topology], object]
"""Raises PlanError if the config cannot run on these devices."""

MESH = "parallel.mesh"
MOMENTS = "precision.moments"
MOST_NAMED = 3
MOST_TRIED = 1500
"""Configs; a try takes 0.3 ms, or 2 ms where memory is estimated."""
FARTHER = 1.5
"""Suggestions may be this much farther away than the nearest one."""
NAMED = "; what is accepted, nearest first: "
"""Precedes the suggestions in an error's last line; ` or ` separates them."""


def with_suggestions(
    error: PlanError,
    config: Config,
    topology: Topology,
    accepts: Accepts,
    *,
    kept: tuple[str, ...] = (),
) -> PlanError:
    """The error with suggested flags, to be added to the given ones; if there are none, the error
    with the list of fixed settings.

    Args:
      accepts: refused `config` with `error`.
      kept: names, or prefixes of names, of settings that must not change.
    """
    found = nearest_accepted(config, topology, accepts, kept=kept)
    if found:
        return PlanError(f"{error}{NAMED}{' or '.join(map(typed, found))}")
    fixed = {"data.global_batch": config.data.global_batch} | {
        name: value for name, (value, _) in _said(config).items()
    }
    return PlanError(
        f"{error}; nothing near is accepted while all of this is fixed: {typed(fixed)}"
    )


def nearest_accepted(
    config: Config, topology: Topology, accepts: Accepts, *, kept: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Accepted changes, nearest first. Each changes a different set of settings, and none contains
    a change that is not needed.
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
    """The nearest mesh that is accepted when every other setting is left open, reduced to the
    changes that are needed.
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
    """The optimizer's moments in bf16, if that alone suffices. Tried last, because it is the only
    suggestion that does not concern the layout.
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
    """Combinations of setting changes, with a cache of which are accepted."""

    def __init__(self, config: Config, topology: Topology, accepts: Accepts):
        self._config, self._topology, self._accepts = config, topology, accepts
        self._answers: dict[tuple[tuple[str, Any], ...], bool] = {(): False}

    @property
    def num_tried(self) -> int:
        """Number of configs tried so far."""
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
        """Yield (distance, changes), nearest first. Accepted changes are not extended.

        A change follows only changes of earlier kinds, so each combination appears once.
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
            for later in range(kind, len(CHANGES_BY_KIND)):
                for move in CHANGES_BY_KIND[later](config, topology):
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
    """Layout settings that differ from their defaults: dotted name -> (value, default)."""
    given, default = dataclasses.asdict(config.parallel), dataclasses.asdict(ParallelConfig())
    return {
        f"parallel.{name}": (value, default[name])
        for name, value in given.items()
        if value != default[name]
    }
