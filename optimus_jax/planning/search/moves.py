"""Single changes of what the user fixed of the layout, and how far each is from what was asked.

A distance has no unit. It is 1 for a setting that is changed at all, and where settings are numbers
0.1 more for each doubling or halving. planning/search/suggestions.py adds changes up and tries
them.
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
TOGETHER = 0.4
"""Distance of one more setting of the pipeline: they are often meaningless one without the
other."""
UNUSED_AXIS = {"data": 0.01, "fsdp": 0.02, "tensor": 0.03, "pipe": 0.04}
"""Distance added where a mesh axis comes into use: an axis that the user named comes first."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change of one setting, or of some that belong together."""

    changes: dict[str, Any]
    """Dotted names of settings to new values."""
    distance: float


def asked_axes(config: Config, topology: Topology) -> AxisSizes:
    """The mesh that was asked for; where it was left open, the one that nearness is measured
    from."""
    devices = topology.num_devices
    left_open = AxisSizes(fsdp=devices) if config.parallel.zero else AxisSizes(data=devices)
    return config.parallel.axes or left_open


def meshes(config: Config, topology: Topology) -> Iterator[Move]:
    """Every other mesh for these devices; of virtual ones, also as many as the mesh needs."""
    asked = asked_axes(config, topology)
    for axes in axis_sizes(topology.num_devices):
        if axes != asked or config.parallel.axes is None:
            unused = sum(UNUSED_AXIS[axis] for axis in MESH_AXES if axes[axis] > 1 == asked[axis])
            apart = sum(_doublings(axes[axis], asked[axis]) for axis in MESH_AXES)
            yield Move(changes={"parallel.mesh": str(axes)}, distance=1 + unused + DOUBLING * apart)
    if (
        topology.platform == "cpu"
        and topology.num_processes == 1
        and asked.num_devices != topology.num_devices
    ):
        yield Move(
            changes={"cpu_devices": asked.num_devices},
            distance=1 + DOUBLING * _doublings(asked.num_devices, topology.num_devices),
        )


def _pipelines(config: Config, topology: Topology) -> Iterator[Move]:
    """Other schedules, repeats and stages, and fewer of the settings that are about them."""
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
                yield Move(
                    changes={
                        f"parallel.{name}": value
                        for name, (_, value) in zip(names, chosen, strict=True)
                    },
                    distance=1
                    + TOGETHER * (num_changed - 1)
                    + sum(distance for distance, _ in chosen),
                )


def _zero_stages(config: Config, topology: Topology) -> Iterator[Move]:
    asked = config.parallel.zero
    stages = range(4) if asked_axes(config, topology).fsdp > 1 else (0,) if asked else ()
    return (
        Move(changes={"parallel.zero": zero}, distance=1 + 0.05 * abs(zero - (asked or 0)))
        for zero in stages
        if zero != asked
    )


def _rules(config: Config, topology: Topology) -> Iterator[Move]:
    """Without one of the user's rules, or with one or two more dimensions kept whole."""
    given, axes = config.parallel.rules, asked_axes(config, topology)
    for rule in given:
        yield Move(
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
            yield Move(changes={"parallel.rules": (*given, *more)}, distance=1 + 0.1 * number)


def _recomputing(config: Config, topology: Topology) -> Iterator[Move]:
    if config.parallel.remat != "auto":
        yield Move(changes={"parallel.remat": "auto"}, distance=1)
    if config.parallel.offload != "auto":
        yield Move(changes={"parallel.offload": "auto"}, distance=1)


def _microbatches(config: Config, topology: Topology) -> Iterator[Move]:
    if (plan := _plan(config, topology)) is None:
        return
    if plan.pipeline is not None and plan.pipeline.table is not None:
        if config.parallel.microbatches is not None:
            yield Move(changes={"parallel.microbatches": None}, distance=1)
        return
    rows, rest = divmod(config.data.global_batch, plan.batch_ways())
    for number in divisors(rows) if not rest else ():
        if number != plan.microbatches:
            yield Move(
                changes={"parallel.microbatches": number},
                distance=1 + DOUBLING * _doublings(number, plan.microbatches),
            )


def _global_batches(config: Config, topology: Topology) -> Iterator[Move]:
    """The next below and above that can be dealt out."""
    if (plan := _plan(config, topology)) is None:
        return
    free = plan.axes.pipe if plan.pipeline is not None and plan.pipeline.repeats > 1 else 1
    unit = plan.batch_ways() * (fixed_microbatches(config, plan.pipeline) or free)
    below = config.data.global_batch // unit * unit
    for number in (below, below + unit):
        if number not in (0, config.data.global_batch):
            yield Move(
                changes={"data.global_batch": number},
                distance=1 + DOUBLING * _doublings(number, config.data.global_batch),
            )


def _plan(config: Config, topology: Topology) -> Plan | None:
    """Perhaps not a legal one; None where there is not even that."""
    try:
        return plan_for(config, asked_axes(config, topology), topology)
    except PlanError:
        return None


def _doublings(number: int, other: int) -> float:
    return abs(math.log2(number / other))


MOVES: Sequence[Callable[[Config, Topology], Iterator[Move]]] = (
    meshes,
    _pipelines,
    _zero_stages,
    _rules,
    _recomputing,
    _microbatches,
    _global_batches,
)
"""Of each kind, all moves from a config; a later kind may look at what an earlier one has
changed."""
