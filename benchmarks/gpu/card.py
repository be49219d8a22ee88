"""The card that is measured, and what it has room for."""

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
from optimus_jax.planning.cost.memory import estimate_memory
from optimus_jax.planning.search.assemble import plan_for

F32_STATE, BF16_STATE = 16, 8
"""Bytes a parameter: weight, gradient and two moments."""
EAGER_GPT2 = 84
"""Bytes that PyTorch keeps of a token in a layer of transformers' GPT-2 for backward, eager under
bf16 autocast, for each of the model's features. float32, as autocast has what is added, normalised
or raised to a power: what each half of a layer adds to (4, 4), and of a GELU that is written out,
with four times the features, the argument of `pow`, tanh, and one more than that (16, 16, 16).
bf16: inputs of the four projections (2, 2, 2, 8), queries, keys and values (6), and half of GELU's
input (8)."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Card:
    """What nvidia-smi says of the first one."""

    device_kind: str
    """Its name, which is JAX's too."""
    text: str
    """Name, driver, highest clock and power limit: of two cards that differ in one of them, figures
    are not compared."""
    memory_bytes: int
    """The driver's, of which JAX takes its share."""
    capability: tuple[int, int]
    """Of computing."""

    @classmethod
    def here(cls) -> "Card | None":
        """None: there is no NVIDIA GPU."""
        try:
            asked = [
                "nvidia-smi",
                "--query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total,compute_cap",
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
    """Whether JAX has a GPU; where nvidia-smi sees none JAX is not asked, whose CUDA plugin would
    complain at length.
    """
    return Card.here() is not None and jax.default_backend() == "gpu"


def needed_bytes(case: Case, card: Card) -> int:
    """What a case takes as planned: ours by its own plan; one of PyTorch's, of which there is no
    plan, at least about what ours would with its formats.
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
    needed = estimate_memory(config.model, plan, seq_len=case.seq_len, global_batch=case.batch)
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
    """By us what JAX may use, by PyTorch all."""
    return int(card.memory_bytes * gpu_memory_share()) if case.who == "ours" else card.memory_bytes


def has_no_room(case: Case, card: Card) -> str:
    """Why a case is not worth its time on the card; empty: it may fit."""
    if case.who == "matmul":
        return ""
    needed, there = needed_bytes(case, card), usable_bytes(case, card)
    return (
        f"planned to take {needed / 2**30:.1f} of {there / 2**30:.1f} GiB" if needed > there else ""
    )


def flags_of(case: Case) -> str:
    """XLA_FLAGS that a case runs under; of PyTorch's none matter."""
    return (
        f"{os.environ.get('XLA_FLAGS', '')} {case.xla_flags}".strip()
        if case.who in ("ours", "matmul")
        else ""
    )
