"""The GPU that is measured, and which cases fit into its memory."""

import os
import platform
import subprocess
from dataclasses import dataclass

import jax
from cases import Case
from ours import config_of

from optimus_jax.config.axes import AxisSizes
from optimus_jax.devices.backend import gpu_memory_share
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.search.assemble import plan_for

F32_STATE, BF16_STATE = 16, 8
"""Bytes per parameter of weight, gradient and two moments."""
EAGER_GPT2 = 84
"""Bytes that eager PyTorch under bf16 autocast keeps for backward, per token, layer and feature of
the embedding, in transformers' GPT-2.

Autocast computes sums, norms and powers in float32: the residual of each half of a layer (4, 4),
and in the written-out GELU, which has four times the features, the argument of `pow`, tanh, and
tanh + 1 (16, 16, 16). In bf16 it keeps the inputs of the four projections (2, 2, 2, 8), queries,
keys and values (6), and half of GELU's input (8)."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Card:
    """The first GPU, as nvidia-smi describes it."""

    device_kind: str
    """Name of the GPU, the same as in JAX."""
    text: str
    """Name, driver, highest clock and power limit. Figures of cards that differ in one of these are
    not compared."""
    memory_bytes: int
    """Total memory according to the driver. JAX uses a share of it."""
    capability: tuple[int, int]
    """Compute capability: major, minor."""

    @classmethod
    def of_this_machine(cls) -> "Card | None":
        """The GPU of this machine; None: there is no NVIDIA GPU."""
        try:
            asked = [
                "nvidia-smi",
                "--query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total"
                ",compute_cap",
                "--format=csv,noheader,nounits",
            ]
            name, driver, clock, limit, memory, capability = (
                subprocess.run(asked, capture_output=True, text=True, check=True)
                .stdout.splitlines()[0]
                .split(", ")
            )
        except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
            return None
        major, _, minor = capability.partition(".")
        return cls(
            device_kind=name,
            text=f"{name}, {driver}, {clock} MHz, {limit} W",
            memory_bytes=int(memory) * MIB,
            capability=(int(major), int(minor)),
        )


NO_CARD = f"no NVIDIA GPU, {platform.machine()}"


def gpu_is_here() -> bool:
    """Whether JAX has a GPU.

    JAX is not asked if nvidia-smi sees none, because its CUDA plugin would print long complaints.
    """
    return Card.of_this_machine() is not None and jax.default_backend() == "gpu"


def needed_bytes(case: Case, card: Card) -> int:
    """Predicted memory of a case.

    For our cases it is the plan's estimate. For PyTorch's it is a lower bound: the estimate of our
    step with PyTorch's dtypes.
    """
    topology = Topology(
        num_devices=1,
        num_processes=1,
        num_hosts=1,
        platform="gpu",
        device_kind=card.device_kind,
        compute_capability=card.capability,
        bytes_per_device=usable_bytes(case, card),
    )
    config = config_of(case)
    plan = plan_for(config, AxisSizes(), topology)
    needed = memory_of_run(config, plan)
    kept = (
        EAGER_GPT2 * config.model.embed_dim * config.model.num_layers * case.batch * case.seq_len
        if case.who == "eager" and config.model.family == "gpt2" and case.remat == "none"
        else 0
    )
    return (
        needed.total
        + max(0, kept - needed.activations)
        - (needed.params * (F32_STATE - BF16_STATE) // 4 if case.weights == "bf16" else 0)
    )


def usable_bytes(case: Case, card: Card) -> int:
    """Memory that a case may use: JAX's share for ours, all of it for PyTorch's."""
    return int(card.memory_bytes * gpu_memory_share()) if case.who == "ours" else card.memory_bytes


def has_no_room(case: Case, card: Card) -> str:
    """Why a case does not fit into the GPU's memory; empty: it may fit."""
    if case.who == "matmul":
        return ""
    needed, there = needed_bytes(case, card), usable_bytes(case, card)
    return (
        f"planned to take {needed / 2**30:.1f} of {there / 2**30:.1f} GiB" if needed > there else ""
    )


def flags_of(case: Case) -> str:
    """The XLA_FLAGS of a case; empty for PyTorch's cases."""
    return (
        f"{os.environ.get('XLA_FLAGS', '')} {case.xla_flags}".strip()
        if case.who in ("ours", "matmul")
        else ""
    )
