"""A task: what a batch holds, and what is learnt from it. The tasks are in training/tasks.py.

A task names the arrays of its batches, makes them of the loader's examples, and gives the loss and
the metrics of some rows. Everything else (microbatches, pipelines, sums over devices, evaluation,
costs) is the same for all tasks.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from optimus_jax.config import Config, ModelConfig, PreferenceConfig
from optimus_jax.config.data import ExampleKind
from optimus_jax.config.model import Labelled, Medium
from optimus_jax.data.batch import BatchArray, HostBatch
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sums import Sums
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.transformer import Decoder
from optimus_jax.run_directory.contents import COMMON, EVENTS
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.training.answers import Answer, AnswerInputs

_LABELLED: Mapping[str, Labelled] = {
    "labels": "sequence",
    "word_labels": "token",
    "answers": "span",
    "images": "sequence",
}
_MEDIA: Mapping[str, Medium] = {
    "images": "images",
    "unlabelled_images": "images",
    "recordings": "sound",
}
TYPES = "types"
"""Array with the type of every token, of tasks that have types."""
PATCHES = "patches"
"""Array with the bytes of every patch, or the values of every frame of sound, of tasks that have
images or sound."""
DRAWS = "draws"
"""Array with a float32 number from 0 to below 1 for every token, where tokens are drawn from what
the model predicts."""
GENERATOR_LOSS = "generator_loss"
"""Metric of models with a generator: the mean of its loss over hidden tokens."""
WORD_ERROR_RATE = "word_error_rate"
"""Rate of evaluations that transcribe recordings."""
POLICY, REFERENCE = "policy", "reference"
"""Streams of a task with a reference: of the model, and of the model without its adapters."""
Batch = dict[str, Array]
"""Arrays on devices, by the names of the task's arrays."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What the loss of some rows is computed from, inside the step's `shard_map`."""

    model: Decoder
    value: Any
    """The stage value after the last layer: the residual stream [B, L, D], or if the task has a
    reference one for each of POLICY and REFERENCE."""
    rows: Batch
    comm: Collectives
    weight: Array | float
    """Weight of every term."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    chunk_tokens: int
    """Tokens whose logits exist at the same time."""


class TaskSums(NamedTuple):
    """This device's shares (mesh/sums.py) of sums over the terms of some rows."""

    loss: Array
    """The weighted sum, a float32 scalar; differentiated."""
    metrics: Sums
    """By name, without the weight; not differentiated. A metric of an operation that has no
    derivative reads `jax.lax.stop_gradient` of its arguments."""
    drawn: Array | None = None
    """No sum: the tokens that were drawn, int32 [B, L], for rows with DRAWS; without a pipeline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A task: a row of TASKS (training/tasks.py). Two tasks are equal if they are the same one."""

    loss: Callable[[LossInputs], TaskSums]
    count: Callable[[Batch], Array]
    """int32 number of terms in the loss of some rows. The loss, its gradient, metrics and auxiliary
    sums are divided by it, over all devices."""
    term: str = "token"
    """What a term is, in the singular."""
    unit: str = "nats"
    """What the loss of a term is counted in."""
    arrays: Mapping[str, BatchArray]
    """The arrays of a batch. Those that the model reads (tokens, positions, segments, examples) are
    among them."""
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda batch: batch
    """Some rows of `arrays` on the host, made of the same rows as the loader gives them
    (data/batch.py). A row may depend on nothing else."""
    reads: ExampleKind = "documents"
    """What its records hold. A preference pair becomes two segments of an example."""
    is_causal: bool | None = True
    """Whether the model must see earlier tokens only, or all of a document; None: either."""
    corrupt: Callable[[Config, Batch, Array], Batch] | None = None
    """(config, rows, keys [B]) -> the rows as the model learns from them. A row depends on its own
    key alone, which the seed, the step and the number of its example determine; the keys of
    evaluations do not depend on the step."""
    answer: Callable[[AnswerInputs], Answer] | None = None
    """What a trained model says of a record without labels; None: it predicts none."""
    augment: Callable[[Config, Batch, Array], Batch] | None = None
    """As `corrupt`, and before it; evaluations read the rows as they are."""
    has_generator: bool = False
    """Whether the model's generator restores the tokens that `corrupt` hides, and what it draws for
    them takes their place (training/generator.py)."""
    has_reference: bool = False
    """Whether the rows also run through the model as it is without its adapters."""
    auxiliary_weights: Mapping[str, float] = field(default_factory=dict)
    """What training adds to the loss for each auxiliary sum of the layers (`LayersOutput`): this
    times the sum. Names that a model does not give add nothing."""

    @property
    def has_perplexity(self) -> bool:
        """Whether the loss is that of tokens of a text, so that its exponential is a perplexity."""
        return self.reads in ("documents", "texts") and not self.has_generator

    @property
    def medium(self) -> Medium:
        """`ModelConfig.reads` of its models."""
        return _MEDIA.get(self.reads, "text")

    @property
    def predicts_tokens(self) -> bool:
        """`ModelConfig.predicts_tokens` of its models."""
        return self.labelled is None and self.medium != "images"

    @property
    def masks_tokens(self) -> bool:
        """Whether it hides tokens of a text."""
        return self.corrupt is not None and self.medium == "text"

    @property
    def labelled(self) -> Labelled | None:
        """`ModelConfig.labelled` of its models; None: they have no labels."""
        return "replacement" if self.has_generator else _LABELLED.get(self.reads)

    @property
    def num_references(self) -> int:
        """Residual streams of the rows that run forward only, without adapters, beside the one that
        is differentiated."""
        return 1 if self.has_reference else 0

    def batch_of(self, loaded: HostBatch, patch_values: int = 0) -> HostBatch:
        """What `prepare` makes of rows of the loader. Raises ConfigError if these are not the
        `arrays`.

        Args:
          patch_values: `ModelConfig.patch_values`.
        """
        prepared = self.prepare(loaded)
        rows, seq_len = loaded["tokens"].shape
        expected = {
            name: f"{np.dtype(array.dtype)} {array.shape(rows, seq_len, patch_values)}"
            for name, array in self.arrays.items()
        }
        found = {name: f"{array.dtype} {array.shape}" for name, array in prepared.items()}
        if found != expected:
            names = [
                name for name in {**expected, **found} if expected.get(name) != found.get(name)
            ]
            raise ConfigError(
                explain(
                    "a task prepares other arrays than it names",
                    given="; ".join(
                        f"{name}: {expected.get(name, 'none')} by Task.arrays,"
                        f" {found.get(name, 'none')} by Task.prepare"
                        for name in names
                    ),
                    do="let both have the same names, dtypes and shapes",
                )
            )
        return prepared


def embedded(model: Decoder, rows: Batch, run: ForwardContext) -> Array:
    """The residual stream before the first layer, [B, L, D]."""
    patches_BLP = rows.get(PATCHES)
    if patches_BLP is not None and patches_BLP.dtype == np.uint8:
        patches_BLP = scaled(patches_BLP, model.config)
    return model.embed(rows["tokens"], rows["positions"], run, rows.get(TYPES), patches_BLP)


def scaled(patches_BLP: Array, model: ModelConfig) -> Array:
    """Bytes of pixels, normalised as the model reads them, float32: from -1 to 1 by default."""
    mean_C, std_C = map(np.array, model.normalisation)

    def per_value(of_channel_C: np.ndarray) -> float | np.ndarray:
        if (of_channel_C == of_channel_C[0]).all():
            return float(of_channel_C[0])
        # A patch holds one channel after another (data/images.py).
        return np.repeat(of_channel_C, model.patch_size**2).astype(np.float32)[None, None]

    return patches_BLP.astype("float32") / per_value(255 * std_C) - per_value(mean_C / std_C)


RESERVED_NAMES = frozenset(
    {
        *(one.name for one in dataclasses.fields(StepRecord)),
        *COMMON,
        *EVENTS["eval"].fields,
        WORD_ERROR_RATE,
    }
)
"""Names that a step or an evaluation records already."""


def reported(loss: Array, metrics: Sums, auxiliary: Sums, drawn: Array | None = None) -> TaskSums:
    """The sums of some rows that a run reports: auxiliary sums are metrics too.

    Raises ConfigError if a name is another value's.
    """
    both, all_names = metrics.keys() & auxiliary, metrics.keys() | auxiliary
    if taken := sorted(both | all_names & RESERVED_NAMES):
        raise ConfigError(
            explain(
                "a metric has the name of another value",
                given=f"{', '.join(taken)}, among metrics {sorted(metrics)} of the task and"
                f" auxiliary sums {sorted(auxiliary)} of the layers",
                do="call it something else",
            )
        )
    return TaskSums(loss, metrics | auxiliary, drawn)
