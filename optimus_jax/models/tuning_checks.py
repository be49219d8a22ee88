"""Checks that `model.tuning.freeze` does to a model what it says, by the model's leaf table."""

import jax

from optimus_jax.config import ModelConfig
from optimus_jax.errors import ConfigError, explain
from optimus_jax.models.shapes import model_shapes


def check_freeze(model: ModelConfig) -> None:
    """Raise ConfigError if a group that is to be frozen is part of another that is trained, or if
    nothing is trained.
    """
    tuning = model.tuning
    if tuning.freeze is None and not tuning.has_adapters:
        return
    given = f"model.tied={str(model.tied).lower()}, " + (
        f"model.tuning.method={tuning.method}"
        if tuning.freeze is None
        else f"model.tuning.freeze={','.join(tuning.freeze)}"
    )
    frozen = tuning.freeze is not None
    if frozen and model.tied and not tuning.trains("head") and tuning.trains("embedding"):
        raise ConfigError(
            explain(
                f"the head of {model.name} is its embedding, which would be trained",
                given=given,
                do="add embedding to model.tuning.freeze, which freezes both uses of the matrix, or"
                " leave head out",
            )
        )
    leaves = jax.tree.leaves(model_shapes(model, model.vocab_size).leaves)
    if not any(leaf.trained for leaf in leaves):
        groups = sorted({leaf.group for leaf in leaves})
        raise ConfigError(
            explain(
                f"nothing of {model.name} would be trained",
                given=f"{given}; it has parameters of {', '.join(groups)}",
                do="let layers of your own have adapters, as Attention and FeedForward do"
                if tuning.has_adapters
                else "leave out a group, or add adapters with model.tuning.method=lora",
            )
        )
