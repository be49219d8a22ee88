"""What one implementation of training does and another does not, as far as time goes.

The time model is one; what differs between this project's step and, say, Megatron-LM's is a value
of `ImplementationProfile`. So measurements of another framework can be priced by the functions that
price our plans, and what they say about a GPU carries over.

A *pass* is one reading or writing of an array. Passes are counted by hand from the code that they
speak of: they are what is left when an ideal compiler, or the kernels named, have fused what they
can.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, eq=False)
class ImplementationProfile:
    """How an implementation computes a step; one of the values below, compared by identity."""

    name: str
    """What people call it."""
    causal_share: float | None
    """Of the square of attention scores that unfused attention computes; None: what this project's
    blocks do (models/kernels.py)."""
    score_bytes: tuple[float, float]
    """Unfused attention: bytes moved for each score, forward and backward, in 16-bit formats."""
    stream_passes: tuple[float, float]
    """Passes over [tokens, embed] of a layer outside matmuls, forward and backward."""
    hidden_passes: tuple[float, float]
    """The same over the feed-forward's hidden values and the heads' queries, keys and values."""
    weight_bytes: float
    """Bytes moved for each weight and microbatch beside the matmuls: casts, and adding to the sum
    of gradients."""
    logit_bytes: float
    """Bytes moved for each logit, forward and backward, beside the matmuls."""
    optimizer_bytes: float
    """Bytes moved for each parameter that a device updates."""
    layer_kernels: tuple[float, float]
    """Kernels launched for a layer, forward and backward."""
    collective_kernels: float
    """Further launches, in units of a kernel, of the host for each collective."""
    head_kernels: float
    """Kernels of embedding, head and loss together, for each microbatch."""
    softmax_multiple: int
    """Sequences times heads of a device that the fused softmax needs to be a multiple of; 1: any
    number."""
    plain_softmax_kernels: float
    """Kernels more, in each direction, where it cannot be used."""
    plain_softmax_bytes: float
    """Bytes more for each score there, in each direction."""
    launched_by_interpreter: bool
    """Whether an interpreter launches each kernel by itself, or a compiled program does."""
    gradient_bytes: int
    """Width of a gradient on the wire between replicas."""
    lockstep: bool
    """Whether stages keep in step, every tick as long as its slowest, or each goes on when its
    input is there."""
    head_shared: bool
    """Whether all stages share embedding and head, or they are the first and the last stage's."""
    repeats_last: bool
    """Whether recomputing a layer repeats its last product and all-reduce, whose result nothing
    needs."""
    fsdp_hides: bool
    """Whether collectives of fsdp may run beside the layer's compute."""
    pads_whole_vocab: bool
    """Whether a vocabulary that is not split is padded to a multiple of 8 too."""


OURS = ImplementationProfile(
    name="optimus_jax",
    causal_share=None,
    score_bytes=(18.0, 24.0),
    stream_passes=(8.0, 14.0),
    hidden_passes=(2.0, 5.0),
    weight_bytes=18.0,
    logit_bytes=24.0,
    optimizer_bytes=36.0,
    layer_kernels=(16.0, 34.0),
    collective_kernels=2.0,
    head_kernels=20.0,
    softmax_multiple=1,
    plain_softmax_kernels=0.0,
    plain_softmax_bytes=0.0,
    launched_by_interpreter=False,
    gradient_bytes=4,
    lockstep=True,
    head_shared=True,
    repeats_last=False,
    fsdp_hides=True,
    pads_whole_vocab=True,
)
"""This project: float32 weights cast at use, gradients and moments in
float32 (28 bytes for Adam, 8 for norm and clipping)."""

MEGATRON = ImplementationProfile(
    name="Megatron-LM",
    causal_share=1.0,
    score_bytes=(13.0, 19.0),
    stream_passes=(11.0, 15.0),
    hidden_passes=(2.0, 4.0),
    weight_bytes=6.0,
    logit_bytes=30.0,
    optimizer_bytes=36.0,
    layer_kernels=(28.0, 52.0),
    collective_kernels=3.0,
    head_kernels=60.0,
    softmax_multiple=4,
    plain_softmax_kernels=13.0,
    plain_softmax_bytes=15.0,
    launched_by_interpreter=True,
    gradient_bytes=2,
    lockstep=False,
    head_shared=False,
    repeats_last=True,
    fsdp_hides=False,
    pads_whole_vocab=False,
)
"""Megatron-LM of 2021 and 2022, with its own fused softmax and dropout (arXiv:2104.04473). Scores:
written by the product, read and written by softmax, read and written with a mask by dropout, read
by the next product; backward alike. Its fused softmax wants sequences x heads in fours
(`FusedScaleMaskSoftmax.is_kernel_available`)."""
