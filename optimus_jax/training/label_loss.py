"""Learning labels: cross-entropy of the label of each sequence or token, and of the first and last
token of answers.

A sequence's label counts at one of its tokens (data/labelled.py), so that a label of a sequence is
that of a token here.

Shapes: B rows, L length (this device's tokens), W length (all tokens), N labels, E embed.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimus_jax.data.batch import BATCH_ARRAYS, BatchArray, HostBatch
from optimus_jax.data.labelled import BEGINS, ENDS, MOST_ANSWERS
from optimus_jax.models.block import ForwardContext
from optimus_jax.training.task import TYPES, Batch, LossInputs, TaskSums

LABEL_ARRAYS: Mapping[str, BatchArray] = {
    **BATCH_ARRAYS,
    "targets": BatchArray(np.int32, "label of the token"),
    TYPES: BatchArray(np.int32, "0, or 1 for tokens of a second text"),
}
"""Arrays of a batch with labels."""


def with_types(batch: HostBatch) -> HostBatch:
    """Rows that have types, all 0 where there were none."""
    return batch if TYPES in batch else batch | {TYPES: np.zeros_like(batch["tokens"])}


def label_loss(inputs: LossInputs) -> TaskSums:
    """Cross-entropy of the labels that count, and how many of them have the largest logit."""
    model, comm, rows = inputs.model, inputs.comm, inputs.rows
    hidden_BLE = model.head_input(inputs.value, comm)
    logits_BLN = model.logits(hidden_BLE, ForwardContext(comm=comm))
    targets_BL, counts_BL = (comm.local_tokens(rows[name]) for name in ("targets", "loss_mask"))
    labels_N = jnp.arange(logits_BLN.shape[-1], dtype=jnp.int32)
    is_target_BLN = targets_BL[..., None] == labels_N[None, None]
    losses_BL = -jnp.where(is_target_BLN, jax.nn.log_softmax(logits_BLN), 0).sum(-1)
    is_right_BL = lax.stop_gradient(logits_BLN).argmax(-1) == targets_BL
    return TaskSums(
        jnp.where(counts_BL, losses_BL, 0).sum() * inputs.weight,
        {"accuracy": (is_right_BL & counts_BL).sum(dtype=jnp.float32)},
    )


def span_loss(inputs: LossInputs) -> TaskSums:
    """Cross-entropy of the first token of an answer among all tokens of its segment, and of the
    last one, half of each; and of how many questions the largest logits are at both of an answer.
    """
    comm, rows = inputs.comm, inputs.rows
    hidden_BLE = inputs.model.head_input(inputs.value, comm)
    logits_BLN = inputs.model.logits(hidden_BLE, ForwardContext(comm=comm))
    logits_BWN, segments_BW = comm.all_tokens(logits_BLN), rows["segments"]
    largest_BWN = _over_segments(jax.ops.segment_max, lax.stop_gradient(logits_BWN), segments_BW)
    sums_BWN = _over_segments(jax.ops.segment_sum, jnp.exp(logits_BWN - largest_BWN), segments_BW)
    normalisers_BLN = comm.local_tokens(jnp.log(sums_BWN) + largest_BWN)
    is_target_BWN = _bits(rows)
    is_target_BLN = comm.local_tokens(is_target_BWN)
    losses_BLN = jnp.where(is_target_BLN, normalisers_BLN - logits_BLN, 0)
    exact_BW = _finds_answer(rows, logits_BWN == largest_BWN)
    exact_BL = comm.local_tokens(exact_BW) & is_target_BLN[..., 0]
    return TaskSums(
        0.5 * losses_BLN.sum() * inputs.weight,
        {"exact_match": lax.stop_gradient(exact_BL).sum(dtype=jnp.float32)},
    )


def replacement_loss(inputs: LossInputs) -> TaskSums:
    """Cross-entropy of whether each token was replaced, and how often the likelier is right."""
    model, comm, rows = inputs.model, inputs.comm, inputs.rows
    hidden_BLE = model.head_input(inputs.value, comm)
    logits_BL = model.logits(hidden_BLE, ForwardContext(comm=comm))[..., 0]
    is_replaced_BL, counts_BL = (comm.local_tokens(rows[name]) for name in ("targets", "loss_mask"))
    losses_BL = jnp.logaddexp(logits_BL, 0.0) - logits_BL * is_replaced_BL.astype(jnp.float32)
    loss = jnp.where(counts_BL, losses_BL, 0).sum()
    is_right_BL = (lax.stop_gradient(logits_BL) > 0) == (is_replaced_BL > 0)
    return TaskSums(
        loss * inputs.weight,
        {
            "accuracy": (is_right_BL & counts_BL).sum(dtype=jnp.float32),
            "discriminator_loss": lax.stop_gradient(loss),
        },
    )


def count_spans(rows: Batch) -> Array:
    """int32 number of answers."""
    return _bits(rows)[..., 0].sum(dtype=jnp.int32)


def _bits(rows: Batch) -> Array:
    """Whether each token is the first, and the last, of an answer: bool [B, W, 2]."""
    bits_2 = jnp.array([BEGINS, ENDS], jnp.int32)
    is_any_BW2 = (rows["targets"][..., None] & bits_2[None, None]) > 0
    return is_any_BW2 & rows["loss_mask"][..., None]


def _finds_answer(rows: Batch, is_largest_BW2: Array) -> Array:
    """Whether the largest logits of each token's segment are at the first and the last token of the
    same answer: bool [B, W].
    """
    answers_A = 4 ** jnp.arange(MOST_ANSWERS, dtype=jnp.int32)
    bits_A2 = answers_A[:, None] * jnp.array([[BEGINS, ENDS]], jnp.int32)
    targets_BW = jnp.maximum(rows["targets"], 0)  # none is -1, which has all bits
    is_any_BWA2 = (targets_BW[..., None, None] & bits_A2[None, None]) > 0
    hits_BWA2 = (is_any_BWA2 & is_largest_BW2[..., None, :]).astype(jnp.float32)
    found_BWA2 = _over_segments(jax.ops.segment_sum, hits_BWA2, rows["segments"])
    return (found_BWA2 > 0).all(-1).any(-1)


def _over_segments(reduce: Callable, values_BWN: Array, segments_BW: Array) -> Array:
    """What a reduction over its segment gives, for every token."""
    length = segments_BW.shape[1]

    def of_row(values_WN: Array, segments_W: Array) -> Array:
        return reduce(values_WN, segments_W, num_segments=length)[segments_W]

    return jax.vmap(of_row)(values_BWN, segments_BW)
