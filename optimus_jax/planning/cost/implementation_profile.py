"""How implementations of training differ in ways that affect the time of a step.

There is one time model. The differences between this project's step and, for example, Megatron-LM's
are values of `ImplementationProfile`. So the functions that predict our plans also predict the
steps of other frameworks, and rates fitted to their measurements on a GPU apply to our plans.

A *pass* is one read or one write of an array. Passes were counted by hand from the code of each
implementation, after all the fusion that an ideal compiler, or the kernels named, can do.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, eq=False)
class ImplementationProfile:
    """How an implementation computes a step. The values are the constants below, compared by
    identity.
    """

    name: str
    """Name of the implementation."""
    causal_share: float | None
    """Share of the square matrix of attention scores that unfused attention computes. None: the
    share that this project's blocks compute (models/kernels.py)."""
    score_bytes: tuple[float, float]
    """Bytes that unfused attention moves per score, forward and backward, in 16-bit formats."""
    stream_passes: tuple[float, float]
    """A layer's passes over [tokens, embed] outside matmuls, forward and backward."""
    hidden_passes: tuple[float, float]
    """The same over the feed-forward's hidden values and the heads' queries, keys and values."""
    weight_bytes: float
    """Bytes moved per weight and microbatch outside matmuls: casts, and adding to the sum of
    gradients."""
    gradient_bytes_per_weight: float
    """Of these, those for the gradient."""
    logit_bytes: float
    """Bytes moved per logit outside matmuls, forward and backward together."""
    optimizer_bytes: float
    """Bytes that the optimizer moves per parameter that a device updates."""
    layer_kernels: tuple[float, float]
    """Kernels launched per layer, forward and backward."""
    collective_kernels: float
    """Launch cost of a collective for the host, in kernel launches."""
    head_kernels: float
    """Kernels launched for embedding, head and loss together, per microbatch."""
    softmax_multiple: int
    """The fused softmax needs a device's sequences times heads to be a multiple of this. 1: any
    number."""
    plain_softmax_kernels: float
    """Additional kernels in each direction if the fused softmax cannot be used."""
    plain_softmax_bytes: float
    """Additional bytes per score in each direction if the fused softmax cannot be used."""
    launched_by_interpreter: bool
    """Whether an interpreter launches each kernel, rather than a compiled program."""
    gradient_bytes: int
    """Bytes of one gradient element when replicas reduce gradients."""
    lockstep: bool
    """Whether stages run in lockstep, so that a tick lasts as long as its slowest stage. If not, a
    stage starts as soon as its input arrives."""
    waits_for_sends: bool
    """Whether a stage computes nothing while it sends or receives. In lockstep the plan says so."""
    head_shared: bool
    """Whether all stages share embedding and head. If not, they belong to the first and last
    stage."""
    sends_parts: bool
    """Whether devices along tensor that hold the same stage value send a part of it each, which the
    next stage's devices gather."""
    repeats_last: bool
    """Whether recomputing a layer repeats its last product and all-reduce, although nothing needs
    the result."""
    fsdp_hides: bool
    """Whether collectives over fsdp can overlap with a layer's compute."""
    scheduled_by_xla: bool
    """Whether on GPUs exchanges run beside compute as XLA's compiler orders them
    (planning/cost/overlap.py)."""
    fsdp_combines: bool
    """Whether a layer's matrices are gathered, and their gradients scattered, as one array."""
    pads_whole_vocab: bool
    """Whether the vocabulary is padded to a multiple of 8 even if it is not split."""


OURS = ImplementationProfile(
    name="optimus_jax",
    causal_share=None,
    score_bytes=(18.0, 24.0),
    stream_passes=(8.0, 14.0),
    hidden_passes=(2.0, 5.0),
    weight_bytes=18.0,
    gradient_bytes_per_weight=12.0,
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
    waits_for_sends=False,
    head_shared=True,
    sends_parts=True,
    repeats_last=False,
    fsdp_hides=True,
    scheduled_by_xla=True,
    fsdp_combines=False,
    pads_whole_vocab=True,
)
"""This project: float32 weights cast at use, and float32 gradients and moments. The optimizer's
bytes are 28 for Adam and 8 for the gradient norm and clipping."""

MEGATRON = ImplementationProfile(
    name="Megatron-LM",
    causal_share=1.0,
    score_bytes=(13.0, 19.0),
    stream_passes=(11.0, 15.0),
    hidden_passes=(2.0, 4.0),
    weight_bytes=6.0,
    gradient_bytes_per_weight=6.0,
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
    waits_for_sends=True,
    head_shared=False,
    sends_parts=True,
    repeats_last=True,
    fsdp_hides=False,
    scheduled_by_xla=False,
    fsdp_combines=True,
    pads_whole_vocab=False,
)
"""Megatron-LM of 2021 and 2022, with its own fused softmax and dropout (arXiv:2104.04473). Scores
are written by the matmul, read and written by softmax, read and written with a mask by dropout, and
read by the next matmul; similarly in backward. Its fused softmax requires sequences x heads to be a
multiple of four (`FusedScaleMaskSoftmax.is_kernel_available`). It sends in parts (section 4.1), and
waits for every send (`p2p_communication.py`)."""
