"""Factors on the learning rate: by the group of a parameter, and by its layer.

A stack holds several layers, in the order of its slots (mesh/slots.py), and a pipeline stage has
some of them. So a stack has one factor for each of a device's slots, looked up by the layer in it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config import Config, LearningRateFactors, OptimizerConfig
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.models.shapes import ModelShapes, model_shapes


@dataclass(frozen=True)
class RateFactors:
    """Scales the learning rate of every leaf, inside the step's `shard_map`."""

    config: OptimizerConfig
    shapes: ModelShapes
    comm: Collectives

    def rate(self, lr: Array, leaf: Leaf, update: Array) -> Array:
        """The rate of a leaf: float32 [], or [slots, 1, ...] of this device's part of a stack.

        Args:
          lr: float32 learning rate of the step.
          update: the leaf's update, laid out like the moments.
        """
        factors = rate_factors(self.config, leaf, self.shapes)
        if len(set(factors)) > 1:
            return lr * of_own_slots(factors, update, self.comm)
        return lr if factors[0] == 1 else lr * factors[0]


def rate_factors(config: OptimizerConfig, leaf: Leaf, shapes: ModelShapes) -> list[float]:
    """The factors of a stack's slots, or the one of a leaf outside the layers.

    The embedding lies below the lowest layer; the final norm and the head lie above all.
    """
    num_layers = shapes.config.num_layers
    if leaf.is_in_layers:
        layers_above = [num_layers - 1 - max(0, layer) for layer in shapes.slots]
    else:
        layers_above = [num_layers if leaf.group == "embedding" else 0]
    factor: float = getattr(config.lr_factors, leaf.group)
    return [factor * config.layer_lr_decay**above for above in layers_above]


def of_own_slots(by_slot: list, like: Array, comm: Collectives) -> Array:
    """Values of all slots of a stack -> those of this device's part `like`, [slots, 1, ...]."""
    values = jnp.asarray(by_slot)
    values = values.reshape(-1, *[1] * (like.ndim - 1))
    if LAYERS not in comm.rules:
        return values
    return lax.dynamic_slice_in_dim(values, comm.offset(len(like), LAYERS), len(like))


def check_rate_factors(config: Config) -> None:
    """Raise ConfigError if a factor is that of parameters that are not trained, or not there."""
    optimizer, model = config.optimizer, config.model
    if optimizer.lr_factors == LearningRateFactors() and optimizer.layer_lr_decay == 1:
        return
    if optimizer.layer_lr_decay != 1 and model.generator is not None:
        raise ConfigError(
            explain(
                "a decay of the learning rate by layers is of the layers of one model",
                given=f"optimizer.layer_lr_decay={optimizer.layer_lr_decay}, and"
                f" {model.name} has a generator",
                do="leave it out",
            )
        )
    leaves = jax.tree.leaves(model_shapes(model, model.vocab_size).leaves)
    trained = [leaf for leaf in leaves if leaf.trained]
    groups = {leaf.group for leaf in trained}
    for group, factor in vars(optimizer.lr_factors).items():
        if factor != 1 and group not in groups:
            raise ConfigError(
                explain(
                    f"no parameter of group {group!r} is trained, so its learning rate has no use",
                    given=f"optimizer.lr_factors.{group}={factor}, model {model.name}",
                    do=f"leave it out, or name a group that is: {', '.join(sorted(groups))}",
                )
            )
    if optimizer.layer_lr_decay != 1 and not any(
        leaf.is_in_layers or leaf.group == "embedding" for leaf in trained
    ):
        raise ConfigError(
            explain(
                "no layer is trained, so a decay of the learning rate by layers has no use",
                given=f"optimizer.layer_lr_decay={optimizer.layer_lr_decay}",
                do="leave it out, or train layers (model.tuning.freeze)",
            )
        )
