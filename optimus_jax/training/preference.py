"""Direct preference optimization: learning which of two continuations is preferred.

Rafailov et al. 2023 (arXiv:2305.18290), equation 7. A *pair* is two segments of an example, the
preferred one first: segments 2p and 2p + 1. Its *reward* is beta times the logarithm of the ratio
of the model's probability of a continuation to that of the reference, which is the model without
its adapters. The loss of a pair is -log sigmoid(reward of the first - reward of the second).

Shapes: B rows, L length, P pairs of a row, E embed.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.mesh.axes import VOCAB
from optimus_jax.training.loss import cross_entropy, token_losses
from optimus_jax.training.task import POLICY, REFERENCE, Batch, LossInputs, TaskSums


def preference_loss(inputs: LossInputs) -> TaskSums:
    """The loss of pairs, and metrics: whether the preferred continuation has the higher reward, by
    how much, and both rewards.
    """
    settings, rows = inputs.preference, inputs.rows
    hidden = inputs.model.head_input(inputs.value[POLICY], inputs.comm)
    hidden_BLE = inputs.comm.fan_out(hidden, VOCAB)
    policy = _log_probabilities(inputs, lax.stop_gradient(hidden_BLE))
    reference = inputs.comm.fan_out(
        inputs.model.head_input(inputs.value[REFERENCE], inputs.comm), VOCAB
    )
    rewards_BP2 = settings.beta * (
        policy - _log_probabilities(inputs, lax.stop_gradient(reference))
    )
    margin_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
    is_pair_BP = pairs_of(rows)
    flip = settings.label_smoothing
    losses_BP = -(1 - flip) * jax.nn.log_sigmoid(margin_BP) - flip * jax.nn.log_sigmoid(-margin_BP)
    # -d loss / d margin: what a token's log probability contributes to the gradient, times beta.
    pull_BP = (1 - flip) * jax.nn.sigmoid(-margin_BP) - flip * jax.nn.sigmoid(margin_BP)
    pull_BP = settings.beta * jnp.where(is_pair_BP, pull_BP, 0)
    by_segment = jnp.stack((pull_BP, -pull_BP), -1).reshape(len(pull_BP), -1)
    weights_BL = jnp.take_along_axis(by_segment, rows["segments"], axis=1)
    weights_BL = jnp.where(rows["loss_mask"], weights_BL, 0)
    # Its gradient is that of the loss; its value is not.
    surrogate = cross_entropy(
        hidden_BLE.reshape(-1, hidden_BLE.shape[-1]),
        inputs.model.output_head,
        rows["targets"].reshape(-1),
        (weights_BL * inputs.weight).reshape(-1),
        comm=inputs.comm,
        vocab_size=inputs.model.config.vocab_size,
        chunk_tokens=inputs.chunk_tokens,
    )

    def over_pairs(values_BP: Array) -> Array:
        return jnp.where(is_pair_BP, values_BP, 0).sum()

    loss = over_pairs(losses_BP) * inputs.weight
    metrics = {
        "preference_accuracy": over_pairs((margin_BP > 0).astype(jnp.float32)),
        "reward_margin": over_pairs(margin_BP),
        "reward_chosen": over_pairs(rewards_BP2[..., 0]),
        "reward_rejected": over_pairs(rewards_BP2[..., 1]),
    }
    return TaskSums(surrogate + lax.stop_gradient(loss - surrogate), metrics)


def pairs_of(rows: Batch) -> Array:
    """Which pairs there are, bool [B, P]: those of which both continuations have tokens that
    count.
    """
    return (_by_pair(rows["loss_mask"].astype(jnp.float32), rows["segments"]) > 0).all(-1)


def count_pairs(rows: Batch) -> Array:
    """int32 number of pairs."""
    return pairs_of(rows).sum(dtype=jnp.int32)


def _log_probabilities(inputs: LossInputs, hidden_BLE: Array) -> Array:
    """Logarithm of the probability of each continuation, float32 [B, P, 2]."""
    rows = inputs.rows
    losses_N = token_losses(
        hidden_BLE.reshape(-1, hidden_BLE.shape[-1]),
        inputs.model.output_head,
        rows["targets"].reshape(-1),
        comm=inputs.comm,
        vocab_size=inputs.model.config.vocab_size,
        chunk_tokens=inputs.chunk_tokens,
    )
    losses_BL = losses_N.reshape(rows["targets"].shape)
    return -_by_pair(jnp.where(rows["loss_mask"], losses_BL, 0), rows["segments"])


def _by_pair(values_BL: Array, segments_BL: Array) -> Array:
    """Sums over segments, [B, P, 2]."""
    length = segments_BL.shape[1]
    num_segments = length + length % 2
    sums = jax.vmap(lambda values, ids: jax.ops.segment_sum(values, ids, num_segments))
    return sums(values_BL, segments_BL).reshape(len(values_BL), -1, 2)
