"""Checks that tensors are those of a model, by their names, shapes and dtypes alone.

Files differ in what they leave out or add: the family's prefix, constants, and a head that is the
embedding. What remains is compared with the tensors that the model has.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.errors import CheckpointError, counted, explain
from optimus_jax.models.huggingface_format import HEAD_LEAVES
from optimus_jax.models.huggingface_formats import format_of
from optimus_jax.models.huggingface_tensors import Tensor, TensorLike, tensor_shapes

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of weights. Others are indices, or quantised: useless without their scales."""
EMBEDDING = "embedding/table"
"""The leaf that a tied head repeats."""
COMPARED_ROWS = 4096
"""Rows of a table that are in memory at once while a tied head is compared with the embedding."""


def model_tensors(
    given: Mapping[str, Tensor], config: ModelConfig, *, needs_head: bool = True
) -> dict[str, Tensor]:
    """The tensors of a model by their names without the prefix, and without buffers.

    A tied head stays, if there is one (`check_tied_head`).

    Args:
      given: tensors by name, with the family's prefix, its last parts, or none.
      needs_head: whether the parts of a head over the vocabulary must be there, if the model has
        one.
    Raises:
      CheckpointError: tensors are missing, unknown, there twice, of another shape, or not of
        floats. The error lists all of them, or the first few of each kind and their number.
    """
    hf_format, wanted = format_of(config), tensor_shapes(config)
    head = hf_format.head if config.tied else None
    optional = {} if head is None else {head: wanted[hf_format.tensors[EMBEDDING]]}
    tensors, twice = {}, []
    for full_name, tensor in given.items():
        if not full_name.endswith(hf_format.buffers):
            for older, ending in hf_format.older_endings.items():
                if full_name.endswith(older):
                    full_name = full_name.removesuffix(older) + ending
            name = _without_prefix(full_name, hf_format.prefix)
            twice += [name] if name in tensors else []
            tensors[name] = tensor
    for name, shape in hf_format.file_shapes(config).items():
        if name in tensors and tuple(tensors[name].shape) == shape:
            tensors[name] = tensors[name].reshape(wanted[name])
    known = {name: shape for name, shape in (optional | wanted).items() if name in tensors}
    shapes = {
        name: f"shape {tuple(tensors[name].shape)}, wanted {shape}"
        for name, shape in known.items()
        if tuple(tensors[name].shape) != shape
    }
    dtypes = {
        name: f"dtype {tensors[name].dtype}"
        for name in known
        if tensors[name].dtype.name not in FLOAT_DTYPES
    }
    of_head = {
        name
        for leaf in HEAD_LEAVES
        for name in hf_format.tensors.get(leaf, "").split()
        if not needs_head and not config.labels
    }
    names = {
        "missing": sorted(wanted.keys() - tensors.keys() - of_head),
        "unknown": sorted(tensors.keys() - known.keys()),
    }
    wrong = {**shapes, **dtypes}
    if not (wrong or twice or any(names.values())):
        return tensors
    kinds = [f"{kind}: {listed(found)}" for kind, found in names.items()]
    kinds += [f"twice: {listed(twice)}"] if twice else []
    if wrong:
        kinds.append(listed([f"{name} has {what}" for name, what in wrong.items()]))
    what = (
        f"these are not the weights of {config.family} with {counted(config.num_layers, 'layer')}"
    )
    if len(wrong) == 1 and not twice and not any(names.values()):
        ((name, found),) = wrong.items()
        what, kinds = f"tensor {name!r} does not fit the model", [found]
    raise CheckpointError(
        explain(what, given="; ".join(kinds), do="use the config.json that came with the weights")
    )


def other_tensors(given: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What `model_tensors` leaves out, by names without the prefix: some of it is of another head,
    such as BERT's pooler.
    """
    hf_format = format_of(config)
    return {
        _without_prefix(name, hf_format.prefix): tensor
        for name, tensor in given.items()
        if name.endswith(hf_format.buffers)
    }


def check_tied_head(tensors: Mapping[str, TensorLike], config: ModelConfig) -> None:
    """Raise CheckpointError if a tied head is stored and differs from the embedding.

    Reads both tables, a few rows at a time.
    """
    hf_format = format_of(config)
    head = tensors.get(hf_format.head) if config.tied and hf_format.head else None
    if head is None:
        return
    embedding = tensors[hf_format.tensors[EMBEDDING]]
    for start in range(0, config.vocab_size, COMPARED_ROWS):
        rows = (slice(start, start + COMPARED_ROWS),)
        both = np.asarray(head[rows]), np.asarray(embedding[rows])
        # NaN differs from itself: that is another fault, found when the embedding is read.
        if not np.array_equal(*both) and not np.array_equal(*both, equal_nan=True):
            raise CheckpointError(
                explain(
                    f"weights are tied, but {hf_format.head} is not the embedding",
                    given="model.tied=True",
                    do="set tie_word_embeddings=false in config.json, or model.tied=false",
                )
            )


def _without_prefix(name: str, prefix: str) -> str:
    """A name without the longest end of a prefix's parts that it begins with: a model of which
    only the decoder was saved has the last part alone.
    """
    while prefix:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
        prefix = prefix.partition(".")[2]
    return name


def listed(names: Sequence[str]) -> str:
    """The first few of some names, and how many there are."""
    first = ", ".join(ascii(name[:200])[1:-1] for name in names[:5])
    return (first or "none") + (f" and {len(names) - 5} more" if len(names) > 5 else "")
