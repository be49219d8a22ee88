"""A head of labels on parameters of a model that has none, or others: it is left out when they are
read, and begins anew (`retuned_params`).
"""

from optimus_jax.config import ModelConfig
from optimus_jax.errors import ConfigError, explain
from optimus_jax.models.huggingface_format import HEAD_LEAVES
from optimus_jax.models.shapes import Params

OF_LABELS = {"label_table", "head_bias"}
"""Parameters of a head whose rows are labels."""
_PARTS = {path.partition("/")[0] for path in HEAD_LEAVES}


def needs_new_head(source: ModelConfig, model: ModelConfig) -> bool:
    """Whether a model has labels, and the one whose parameters it begins with none or others."""
    return bool(model.labels) and _labels(source) != _labels(model)


def check_new_head(model: ModelConfig) -> None:
    """Raise ConfigError if a head that begins anew is not trained."""
    if not model.tuning.trains("head"):
        raise ConfigError(
            explain(
                "the head of labels begins anew, and is frozen",
                given=f"model.tuning.method={model.tuning.method},"
                f" frozen: {', '.join(model.tuning.frozen)}",
                do="train it beside adapters: --set"
                " model.tuning.freeze=embedding,attention,mlp,norm",
            )
        )


def _labels(model: ModelConfig) -> tuple[tuple[str, ...], str]:
    return model.labels, model.labelled if model.labels else ""


def without_head(params: Params) -> Params:
    """Parameters, or anything by their names, without those of a head."""
    return {name: part for name, part in params.items() if name not in _PARTS}
