"""Suggest accepted settings when a config is refused.

A check inside Plan knows which dimension does not divide, but not what else the user fixed, so its
suggestion might be refused in turn; its message states only the requirement. This module knows the
whole config. It changes one kind of setting, then two, then three, and asks the function that
refused the config, so every printed suggestion has been accepted.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from optimus_jax.config import Config, ParallelConfig
from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.config.request import typed
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.axes import EMBED, HEADS, MLP
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.search.assemble import fixed_microbatches, plan_for
from optimus_jax.planning.search.divisors import divisors
from optimus_jax.planning.search.layouts import axis_sizes

Accepts = Callable[[Config, Topology], object]
"""Raises PlanError if the config cannot run on these devices."""
Changes = Mapping[str, Any]
"""Dotted names of settings to new values."""

MESH = "parallel.mesh"
MOMENTS = "precision.moments"
PIPELINE = tuple(
    f"parallel.{name}"
    for name in ("schedule", "repeats", "layers_per_stage", "send_slack", "stage_residuals")
)
RECOMPUTING = ("parallel.remat", "parallel.offload")
MOST_NAMED = 3
MOST_KINDS = 3
MOST_TRIED = 1500
"""Configs; a try takes 0.3 ms, or 2 ms where memory is estimated."""
UNUSED_AXIS = {"data": 0.1, "fsdp": 0.2, "tensor": 0.3, "pipe": 0.4}
"""Distance, in doublings of an axis size, of a mesh axis that the user did not use."""
NAMED = "; what is accepted, nearest first: "
"""Precedes the suggestions in an error's last line; ` or ` separates them."""


def with_suggestions(
    error: PlanError,
    config: Config,
    topology: Topology,
    accepts: Accepts,
    *,
    fixed: tuple[str, ...] = (),
) -> PlanError:
    """The error with suggested flags, to be added to the given ones; if there are none, the error
    with the list of fixed settings.

    Args:
      accepts: refused `config` with `error`.
      fixed: names, or prefixes of names, of settings that must not change.
    """
    found = nearest_accepted(config, topology, accepts, fixed=fixed)
    if found:
        return PlanError(f"{error}{NAMED}{' or '.join(map(typed, found))}")
    given = {"data.global_batch": config.data.global_batch} | {
        name: value for name, (value, _) in _given(config).items()
    }
    return PlanError(f"{error}; no similar setting works while these are fixed: {typed(given)}")


def nearest_accepted(
    config: Config, topology: Topology, accepts: Accepts, *, fixed: tuple[str, ...] = ()
) -> list[Changes]:
    """Accepted changes: those of the fewest kinds first, then in the order of each kind. No
    suggestion changes all the settings of another one.
    """

    answers: dict[tuple[tuple[str, Any], ...], bool] = {}

    def accepted(changes: Changes) -> bool:
        key = tuple(sorted(changes.items()))
        if key not in answers:
            try:
                accepts(*_changed(config, topology, changes))
                answers[key] = True
            except PlanError:
                answers[key] = False
        return answers[key]

    found: list[Changes] = []
    for changes in _few_kinds(config, topology):
        if len(found) == MOST_NAMED or len(answers) >= MOST_TRIED:
            break
        if any(name.startswith(fixed) for name in changes) or any(
            other.keys() <= changes.keys() for other in found
        ):
            continue
        if accepted(changes):
            found.append(changes)
    if found:
        return found
    # Far away: the nearest mesh with every other setting left open, less what need not be.
    open_settings = {
        name: default
        for name, (_, default) in _given(config).items()
        if name != MESH and not name.startswith(fixed)
    }
    for mesh in _meshes(config, topology):
        changes = {**mesh, **open_settings}
        if accepted(changes):
            for name in open_settings:
                fewer = {other: value for other, value in changes.items() if other != name}
                if accepted(fewer):
                    changes = fewer
            return [changes]
    # Last, because it is the only suggestion that does not concern the layout.
    moments = {MOMENTS: "bf16"}
    if MOMENTS.startswith(fixed):
        return []
    try:
        accepts(config.with_values(moments), topology)
    except (ConfigError, PlanError):  # ConfigError: betas that bf16 cannot follow
        return []
    return [moments]


def _few_kinds(config: Config, topology: Topology) -> Iterator[Changes]:
    for number in range(1, MOST_KINDS + 1):
        for kinds in sorted(itertools.combinations(KINDS, number), key=_reluctance):
            yield from _combined(kinds, config, topology)


def _reluctance(kinds: "Sequence[ChangeSource]") -> tuple[bool, ...]:
    """Sort key: rules that leave dimensions unsplit come last, before them other meshes."""
    return tuple(kind in kinds for kind in (_rules, _meshes, _pipelines))


def _combined(
    kinds: "Sequence[ChangeSource]", config: Config, topology: Topology
) -> Iterator[Changes]:
    """One change of each kind; a later kind sees the config with the changes of the earlier."""
    if not kinds:
        yield {}
        return
    for change in kinds[0](config, topology):
        for more in _combined(kinds[1:], *_changed(config, topology, change)):
            yield {**change, **more}


def _asked_axes(config: Config, topology: Topology) -> AxisSizes:
    """The requested mesh; with `--mesh auto`, the mesh from which distances are measured."""
    devices = topology.num_devices
    left_open = AxisSizes(fsdp=devices) if config.parallel.zero else AxisSizes(data=devices)
    return config.parallel.axes or left_open


def _meshes(config: Config, topology: Topology) -> Iterator[Changes]:
    """Every other mesh for these devices; for virtual devices also the number the mesh needs."""
    asked = _asked_axes(config, topology)

    def distance(axes: AxisSizes) -> float:
        unused = (UNUSED_AXIS[axis] for axis in MESH_AXES if axes[axis] > 1 == asked[axis])
        return sum(unused) + sum(abs(math.log2(axes[axis] / asked[axis])) for axis in MESH_AXES)

    for axes in sorted(axis_sizes(topology.num_devices), key=distance):
        if axes != config.parallel.axes:
            yield {MESH: str(axes)}
    if (
        topology.platform == "cpu"
        and topology.num_processes == 1
        and asked.num_devices != topology.num_devices
    ):
        yield {"cpu_devices": asked.num_devices}


def _left_out(names: Sequence[str], config: Config) -> Iterator[Changes]:
    """The given ones of these settings at their defaults: one, then several."""
    defaults = {name: default for name, (_, default) in _given(config).items() if name in names}
    for number in range(1, len(defaults) + 1):
        yield from map(dict, itertools.combinations(defaults.items(), number))


def _pipelines(config: Config, topology: Topology) -> Iterator[Changes]:
    if config.parallel.schedule == "none":  # a wish for no stages, which `auto` may not grant
        yield {"parallel.schedule": "1f1b"}
    yield from _left_out(PIPELINE, config)


def _zero_stages(config: Config, topology: Topology) -> Iterator[Changes]:
    asked = config.parallel.zero or 0
    stages = range(4) if _asked_axes(config, topology).fsdp > 1 else (0,)
    for zero in sorted(stages, key=lambda zero: abs(zero - asked)):
        if zero != asked:
            yield {"parallel.zero": zero}


def _rules(config: Config, topology: Topology) -> Iterator[Changes]:
    """Drop one of the user's rules, or leave one or two more dimensions unsplit."""
    given, axes = config.parallel.rules, _asked_axes(config, topology)
    for rule in given:
        yield {"parallel.rules": tuple(other for other in given if other != rule)}
    ruled = {rule.partition("=")[0].strip() for rule in given}
    whole = [
        f"{name}=none"
        for name, split in ((HEADS, axes.tensor), (MLP, axes.tensor), (EMBED, axes.fsdp))
        if split > 1 and name not in ruled
    ]
    for number in (1, 2):
        for more in itertools.combinations(whole, number):
            yield {"parallel.rules": (*given, *more)}


def _recomputing(config: Config, topology: Topology) -> Iterator[Changes]:
    yield from _left_out(RECOMPUTING, config)


def _microbatches(config: Config, topology: Topology) -> Iterator[Changes]:
    if (plan := _plan(config, topology)) is None:
        return
    if plan.pipeline is not None and plan.pipeline.table is not None:
        if config.parallel.microbatches is not None:
            yield {"parallel.microbatches": None}
        return
    rows, rest = divmod(config.data.global_batch, plan.batch_ways())
    for number in _nearest(plan.microbatches, divisors(rows) if not rest else ()):
        yield {"parallel.microbatches": number}


def _global_batches(config: Config, topology: Topology) -> Iterator[Changes]:
    """The next smaller and larger global batch that divides evenly."""
    if (plan := _plan(config, topology)) is None:
        return
    free = plan.axes.pipe if plan.pipeline is not None and plan.pipeline.repeats > 1 else 1
    unit = plan.batch_ways() * (fixed_microbatches(config, plan.pipeline) or free)
    below = config.data.global_batch // unit * unit
    for number in _nearest(config.data.global_batch, (below, below + unit)):
        yield {"data.global_batch": number}


def _nearest(asked: int, numbers: Sequence[int]) -> list[int]:
    """Positive numbers other than the requested one, by their ratio to it."""
    return sorted(
        (number for number in numbers if number not in (0, asked)),
        key=lambda number: abs(math.log2(number / asked)),
    )


ChangeSource = Callable[[Config, Topology], Iterator[Changes]]
"""Yields the changes of one kind of setting, nearest to the config first."""
KINDS: tuple[ChangeSource, ...] = (
    _meshes,
    _pipelines,
    _zero_stages,
    _rules,
    _recomputing,
    _microbatches,
    _global_batches,
)
"""Sources of changes, in the order in which they are combined."""


def _plan(config: Config, topology: Topology) -> Plan | None:
    """The plan on the requested mesh, possibly illegal; None if it cannot be built."""
    try:
        return plan_for(config, _asked_axes(config, topology), topology)
    except PlanError:
        return None


def _changed(config: Config, topology: Topology, changes: Changes) -> tuple[Config, Topology]:
    """`Config.with_values` for values of the right type, in a tenth of the time; and the devices
    of the changed config.
    """
    top, sections = {}, {"parallel": {}, "data": {}}
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        (sections[section] if section else top)[field] = value
    num_devices = changes.get("cpu_devices", topology.num_devices)
    memory = topology.bytes_per_device
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, **sections["parallel"]),
        data=dataclasses.replace(config.data, **sections["data"]),
        **top,
    ), dataclasses.replace(
        topology,
        num_devices=num_devices,
        # virtual devices share one memory
        bytes_per_device=memory and memory * topology.num_devices // num_devices,
    )


def _given(config: Config) -> dict[str, tuple[Any, Any]]:
    """Layout settings that differ from their defaults: dotted name -> (value, default)."""
    given, default = dataclasses.asdict(config.parallel), dataclasses.asdict(ParallelConfig())
    return {
        f"parallel.{name}": (value, default[name])
        for name, value in given.items()
        if value != default[name]
    }
