"""A head of labels on parameters of a model that has none: it is left out when they are read, and
begins anew (`retuned_params`).
"""

from optimus_jax.config import ModelConfig
from optimus_jax.models.huggingface_format import HEAD_LEAVES
from optimus_jax.models.shapes import Params

_PARTS = {path.partition("/")[0] for path in HEAD_LEAVES}


def needs_new_head(source: ModelConfig, model: ModelConfig) -> bool:
    """Whether a model has labels, and the one whose parameters it begins with has none."""
    return bool(model.labels) and not source.labels


def without_head(params: Params) -> Params:
    """Parameters, or anything by their names, without those of a head."""
    return {name: part for name, part in params.items() if name not in _PARTS}
