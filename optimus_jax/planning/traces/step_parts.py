"""Which part of a step each instruction of its compiled program belongs to.

Parts are the terms of the planner's prediction (planning/cost/cost.py), so that a measured step can
be compared with it. What an instruction comes from is in its `op_name`: the scopes around it
(mesh/scopes.py), and what differentiation has made of it.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from optimus_jax.config import RematPolicy
from optimus_jax.config.axes import DATA, FSDP, PIPE, TENSOR
from optimus_jax.mesh import scopes
from optimus_jax.planning.ahead_of_time.hlo import Collective, HloProgram, Instruction
from optimus_jax.planning.cost.communication import VOCABULARY
from optimus_jax.planning.cost.cost import GENERATOR, HOST_COPIES, REFERENCE_PASS
from optimus_jax.planning.cost.rates import HEAD

OTHER = "other"
"""The part of what the planner has no term for, or that nobody knows: slices of stacked layers,
copies, sums over microbatches, the batch."""
_SCOPES = re.compile(rf"(?<!\w)({'|'.join(scopes.SCOPES)})(?!\w)")
_CONTAINERS = ("while", "conditional", "call")
"""Their operations have events of their own."""
_ONE_KERNEL = 'xla_cpu_small_call="true"'
"""What XLA writes to a call that runs as one operation."""
_ELSEWHERE = (scopes.LAYER, scopes.FORWARD_TASK, scopes.BACKWARD_TASK, scopes.GRADIENTS)
"""Scopes in which a gather over tensor is no part of a broadcast between stages."""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PRODUCTS = re.compile(r"__cublas|__cudnn|gemm|matmul|conv", re.IGNORECASE)
"""Targets of custom calls that multiply."""
_RECOMPUTED = "rematted_computation"
"""What JAX calls the part of backward that computes something again."""


class MeasuredPart(NamedTuple):
    """The part of a step that an instruction belongs to."""

    name: str
    is_exchange: bool
    """Whether it moves data between devices."""


def step_parts(
    program: HloProgram, sizes: Mapping[str, int], *, remat: RematPolicy
) -> dict[str, MeasuredPart | None]:
    """The part of every instruction; None of those that only contain others.

    Args:
      sizes: of all mesh axes, slowest first.
      remat: of the plan. Under `none` and `selective` norms and activations that backward computes
        again are passes over memory, as they are for the planner.
    """
    found: dict[str, MeasuredPart | None] = {}
    for computation, instruction, _ in program.instructions():
        place = program.collective_at(computation, instruction)
        if place is not None:
            collective = program.placed_collectives[place]
            found[instruction.name] = _of_exchange(collective, sizes)
        elif instruction.opcode in _CONTAINERS and _ONE_KERNEL not in instruction.attributes:
            found[instruction.name] = None
        elif instruction.opcode.startswith("copy-"):
            found[instruction.name] = MeasuredPart(HOST_COPIES, True)
        else:
            multiplies = _multiplies(program, instruction)
            name = _of_compute(instruction, multiplies=multiplies, remat=remat)
            found[instruction.name] = MeasuredPart(name, False)
    return found


def _of_exchange(collective: Collective, sizes: Mapping[str, int]) -> MeasuredPart:
    """That of a collective."""
    axes, inside = collective.axes(dict(sizes)), _SCOPES.findall(collective.source)
    if not axes:
        return MeasuredPart(OTHER, False)
    if collective.kind == "collective-permute" and axes == (PIPE,):
        return MeasuredPart(PIPE, True)
    in_vocabulary = {scopes.HEAD, scopes.EMBEDDING} & set(inside) and {*axes} <= {TENSOR, PIPE}
    # Stages send to all others what embedding and head of all need.
    is_broadcast = axes == (PIPE,) and scopes.GRADIENTS not in inside
    # A device sends its part of that alone, and gets the rest from its neighbours.
    is_broadcast |= (
        collective.kind == "all-gather" and axes == (TENSOR,) and not {*_ELSEWHERE} & set(inside)
    )
    if in_vocabulary or is_broadcast:
        return MeasuredPart(VOCABULARY, True)
    return MeasuredPart(next(axis for axis in (DATA, FSDP, TENSOR, PIPE) if axis in axes), True)


def _of_compute(instruction: Instruction, *, multiplies: bool, remat: RematPolicy) -> str:
    """That of what a device computes.

    Args:
      multiplies: whether matrices are multiplied.
    """
    inside = _SCOPES.findall(instruction.source)
    if scopes.GENERATOR in inside:
        return GENERATOR
    if scopes.REFERENCE in inside:
        return REFERENCE_PASS
    if {scopes.OPTIMIZER, scopes.GRADIENTS} & set(inside):
        return "optimizer"
    if {scopes.HEAD, scopes.EMBEDDING} & set(inside):
        return HEAD
    if scopes.LAYER not in inside:
        return OTHER
    is_forward = "transpose(" not in instruction.source
    is_again = _RECOMPUTED in instruction.source and (
        multiplies or remat not in ("none", "selective") or inside[-1] == scopes.ATTENTION
    )
    if is_again or (scopes.BACKWARD_TASK in inside and is_forward):
        return "recompute"
    if multiplies:
        return "attention" if inside[-1] == scopes.ATTENTION else "feed-forward"
    return "memory"


def _multiplies(program: HloProgram, instruction: Instruction) -> bool:
    if instruction.opcode in ("dot", "convolution"):
        return True
    if instruction.opcode == "custom-call":
        target = _TARGET.search(instruction.attributes)
        return target is not None and _PRODUCTS.search(target[1]) is not None
    if instruction.opcode != "fusion":
        return False
    return any(
        _multiplies(program, inner)
        for callee in instruction.callees
        for inner in program.computations[callee].values()
    )
