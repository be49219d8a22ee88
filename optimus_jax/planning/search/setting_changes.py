"""Single changes of layout settings, each with its distance from the user's request.

A distance has no unit: 1 for changing a setting, plus 0.1 per doubling or halving of a number.
planning/search/suggestions.py combines the changes and tries them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optimus_jax.config import Config
from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.errors import PlanError
from optimus_jax.mesh.axes import EMBED, HEADS, MLP
from optimus_jax.mesh.topology import Topology
from optimus_jax.pipeline.tables import SCHEDULES
from optimus_jax.plan import Plan
from optimus_jax.planning.search.assemble import fixed_microbatches, plan_for
from optimus_jax.planning.search.divisors import divisors
from optimus_jax.planning.search.layouts import axis_sizes

DOUBLING = 0.1
"""Distance of a number from its double."""
FURTHER_PIPELINE_SETTING = 0.4
"""Distance of each further pipeline setting in one change: they often make sense only together."""
UNUSED_AXIS = {"data": 0.01, "fsdp": 0.02, "tensor": 0.03, "pipe": 0.04}
"""Distance added for using a mesh axis that the user did not use."""


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A change of one setting, or of several that belong together."""

    changes: dict[str, Any]
    """Dotted names of settings to new values."""
    distance: float


def asked_axes(config: Config, topology: Topology) -> AxisSizes:
    """The requested mesh; with `--mesh auto`, the mesh from which distances are measured."""
    devices = topology.num_devices
    left_open = AxisSizes(fsdp=devices) if config.parallel.zero else AxisSizes(data=devices)
    return config.parallel.axes or left_open


def meshes(config: Config, topology: Topology) -> Iterator[SettingChange]:
    """Every other mesh for these devices; for virtual devices also the number the mesh needs."""
    asked = asked_axes(config, topology)
    for axes in axis_sizes(topology.num_devices):
        if axes != asked or config.parallel.axes is None:
            unused = sum(UNUSED_AXIS[axis] for axis in MESH_AXES if axes[axis] > 1 == asked[axis])
            apart = sum(_doublings(axes[axis], asked[axis]) for axis in MESH_AXES)
            yield SettingChange(
                changes={"parallel.mesh": str(axes)}, distance=1 + unused + DOUBLING * apart
            )
    if (
        topology.platform == "cpu"
        and topology.num_processes == 1
        and asked.num_devices != topology.num_devices
    ):
        yield SettingChange(
            changes={"cpu_devices": asked.num_devices},
            distance=1 + DOUBLING * _doublings(asked.num_devices, topology.num_devices),
        )


def _pipelines(config: Config, topology: Topology) -> Iterator[SettingChange]:
    """Other schedules and repeats, and pipeline settings reset to their defaults."""
    parallel, pipe = config.parallel, asked_axes(config, topology).pipe
    options: dict[str, list[tuple[float, Any]]] = {}
    if parallel.schedule != "auto":
        others = ["1f1b", *SCHEDULES, "auto"] if pipe > 1 else ["auto"]
        options["schedule"] = [
            (0.02 * place, name)
            for place, name in enumerate(dict.fromkeys(others))
            if name != parallel.schedule
        ]
    if parallel.repeats is not None:
        numbers = range(1, config.model.num_layers // pipe + 1) if pipe > 1 else ()
        options["repeats"] = [
            (0.0, None),
            *(
                (0.05 + DOUBLING * _doublings(n, parallel.repeats), n)
                for n in numbers
                if n != parallel.repeats
            ),
        ]
    for name, is_set, unset in (
        ("layers_per_stage", bool(parallel.layers_per_stage), ()),
        ("send_slack", parallel.send_slack, False),
        ("stage_residuals", parallel.stage_residuals != "auto", "auto"),
    ):
        if is_set:
            options[name] = [(0.0, unset)]
    for num_changed in range(1, len(options) + 1):
        for names in itertools.combinations(options, num_changed):
            for chosen in itertools.product(*(options[name] for name in names)):
                yield SettingChange(
                    changes={
                        f"parallel.{name}": value
                        for name, (_, value) in zip(names, chosen, strict=True)
                    },
                    distance=1
                    + FURTHER_PIPELINE_SETTING * (num_changed - 1)
                    + sum(distance for distance, _ in chosen),
                )


def _zero_stages(config: Config, topology: Topology) -> Iterator[SettingChange]:
    asked = config.parallel.zero
    stages = range(4) if asked_axes(config, topology).fsdp > 1 else (0,) if asked else ()
    return (
        SettingChange(changes={"parallel.zero": zero}, distance=1 + 0.05 * abs(zero - (asked or 0)))
        for zero in stages
        if zero != asked
    )


def _rules(config: Config, topology: Topology) -> Iterator[SettingChange]:
    """Drop one of the user's rules, or leave one or two more dimensions unsplit."""
    given, axes = config.parallel.rules, asked_axes(config, topology)
    for rule in given:
        yield SettingChange(
            changes={"parallel.rules": tuple(other for other in given if other != rule)}, distance=1
        )
    ruled = {rule.partition("=")[0].strip() for rule in given}
    whole = [
        f"{name}=none"
        for name, split in ((HEADS, axes.tensor), (MLP, axes.tensor), (EMBED, axes.fsdp))
        if split > 1 and name not in ruled
    ]
    for number in (1, 2):
        for more in itertools.combinations(whole, number):
            yield SettingChange(
                changes={"parallel.rules": (*given, *more)}, distance=1 + 0.1 * number
            )


def _recomputing(config: Config, topology: Topology) -> Iterator[SettingChange]:
    if config.parallel.remat != "auto":
        yield SettingChange(changes={"parallel.remat": "auto"}, distance=1)
    if config.parallel.offload != "auto":
        yield SettingChange(changes={"parallel.offload": "auto"}, distance=1)


def _microbatches(config: Config, topology: Topology) -> Iterator[SettingChange]:
    if (plan := _plan(config, topology)) is None:
        return
    if plan.pipeline is not None and plan.pipeline.table is not None:
        if config.parallel.microbatches is not None:
            yield SettingChange(changes={"parallel.microbatches": None}, distance=1)
        return
    rows, rest = divmod(config.data.global_batch, plan.batch_ways())
    for number in divisors(rows) if not rest else ():
        if number != plan.microbatches:
            yield SettingChange(
                changes={"parallel.microbatches": number},
                distance=1 + DOUBLING * _doublings(number, plan.microbatches),
            )


def _global_batches(config: Config, topology: Topology) -> Iterator[SettingChange]:
    """The next smaller and larger global batch that divides evenly."""
    if (plan := _plan(config, topology)) is None:
        return
    free = plan.axes.pipe if plan.pipeline is not None and plan.pipeline.repeats > 1 else 1
    unit = plan.batch_ways() * (fixed_microbatches(config, plan.pipeline) or free)
    below = config.data.global_batch // unit * unit
    for number in (below, below + unit):
        if number not in (0, config.data.global_batch):
            yield SettingChange(
                changes={"data.global_batch": number},
                distance=1 + DOUBLING * _doublings(number, config.data.global_batch),
            )


def _plan(config: Config, topology: Topology) -> Plan | None:
    """The plan on the requested mesh, possibly illegal; None if it cannot be built."""
    try:
        return plan_for(config, asked_axes(config, topology), topology)
    except PlanError:
        return None


def _doublings(number: int, other: int) -> float:
    return abs(math.log2(number / other))


CHANGES_BY_KIND: Sequence[Callable[[Config, Topology], Iterator[SettingChange]]] = (
    meshes,
    _pipelines,
    _zero_stages,
    _rules,
    _recomputing,
    _microbatches,
    _global_batches,
)
"""Generators of changes, one per kind, in the order in which they are combined: a later kind sees
the changes of earlier ones."""
