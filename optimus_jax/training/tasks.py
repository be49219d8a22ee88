"""The table of tasks (training/task.py), and what a run must have for one."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.in_python import IN_PYTHON, not_given
from optimus_jax.config.model import FIXED_LABELS, REPLACEMENT_LABELS, Labelled
from optimus_jax.config.tuning import BASE_GROUPS
from optimus_jax.data.batch import BATCH_ARRAYS, BatchArray
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.mesh.axes import VOCAB
from optimus_jax.models.encoder_decoder import text_of
from optimus_jax.models.families import features_of
from optimus_jax.training.answers import image_answer, label_answer, span_answer, words_answer
from optimus_jax.training.augmentation import IMAGE_ARRAYS, augmented
from optimus_jax.training.label_loss import (
    LABEL_ARRAYS,
    count_spans,
    label_loss,
    replacement_loss,
    span_loss,
    with_types,
)
from optimus_jax.training.loss import cross_entropy_and_draws
from optimus_jax.training.masking import (
    MASKED_ARRAYS,
    with_masked_tokens,
    with_tokens_to_draw,
    with_words,
)
from optimus_jax.training.patch_masking import patch_loss, with_hidden_patches
from optimus_jax.training.preference import count_pairs, preference_loss
from optimus_jax.training.task import DRAWS, PATCHES, Batch, LossInputs, Task, TaskSums

NEXT_TOKEN, MLM, REPLACED = "next_token", "mlm", "replaced_tokens"
IMAGES, TRANSCRIPTION = "image_classification", "transcription"
"""Tasks, if none is named, of models that see earlier tokens only, of those that see all, of those
that read images, and of those that read sound."""
LEARNS: dict[Labelled, str] = {
    "sequence": "classification",
    "token": "token_classification",
    "span": "question_answering",
    "replacement": REPLACED,
}
"""Those of models of text with labels, by what has one each."""
READ_BY_THE_MODEL = ("tokens", "positions", "segments", "examples")
"""Arrays that every task needs."""


SOUND_ARRAYS = {
    **BATCH_ARRAYS,
    PATCHES: BatchArray(np.float32, "columns of the spectrogram, of each frame", per="patch"),
}
"""Arrays of a batch of recordings."""


def _count_tokens(rows: Batch) -> Array:
    return rows["loss_mask"].sum(dtype=jnp.int32)


def _token_loss(inputs: LossInputs) -> TaskSums:
    """Cross-entropy of the targets that count; and tokens that are drawn, for rows with DRAWS."""
    model, comm, rows = inputs.model, inputs.comm, inputs.rows
    hidden_BLE = comm.fan_out(model.head_input(inputs.value, comm), VOCAB)
    counts: Any = text_of(rows["loss_mask"], model.config)
    weights = counts.astype("float32") * inputs.weight
    tokens = (
        hidden_BLE.reshape(-1, hidden_BLE.shape[-1]),
        model.output_head,
        text_of(rows["targets"], model.config).reshape(-1),
        weights.reshape(-1),
    )
    draws_BL = rows.get(DRAWS)
    loss, drawn_N = cross_entropy_and_draws(
        *tokens,
        None if draws_BL is None else draws_BL.reshape(-1),
        comm=comm,
        vocab_size=model.config.vocab_size,
        chunk_tokens=inputs.chunk_tokens,
    )
    drawn = None if drawn_N is None or draws_BL is None else drawn_N.reshape(draws_BL.shape)
    return TaskSums(loss, {}, drawn)


_LABELS = Task(
    loss=label_loss,
    count=_count_tokens,
    term="label",
    arrays=LABEL_ARRAYS,
    prepare=with_types,
    reads="labels",
    is_causal=None,
    answer=label_answer,
)
TASKS: dict[str, Task] = {
    NEXT_TOKEN: Task(
        loss=_token_loss,
        count=_count_tokens,
        arrays=BATCH_ARRAYS,
    ),
    MLM: Task(
        loss=_token_loss,
        count=_count_tokens,
        term="masked token",
        arrays=MASKED_ARRAYS,
        prepare=with_words,
        reads="texts",
        is_causal=False,
        corrupt=with_masked_tokens,
    ),
    REPLACED: Task(
        loss=replacement_loss,
        count=_count_tokens,
        arrays=MASKED_ARRAYS,
        prepare=with_words,
        reads="texts",
        is_causal=False,
        corrupt=with_tokens_to_draw,
        has_generator=True,
    ),
    "classification": _LABELS,
    "token_classification": dataclasses.replace(_LABELS, reads="word_labels", answer=words_answer),
    "question_answering": dataclasses.replace(
        _LABELS,
        loss=span_loss,
        count=count_spans,
        term="answer",
        reads="answers",
        answer=span_answer,
    ),
    IMAGES: Task(
        loss=label_loss,
        count=_count_tokens,
        term="label",
        arrays=IMAGE_ARRAYS,
        reads="images",
        is_causal=False,
        answer=image_answer,
        augment=augmented,
    ),
    "mim": Task(
        loss=patch_loss,
        count=_count_tokens,
        term="hidden patch",
        unit="mean absolute difference",
        arrays=IMAGE_ARRAYS,
        reads="unlabelled_images",
        is_causal=False,
        augment=augmented,
        corrupt=with_hidden_patches,
    ),
    TRANSCRIPTION: Task(
        loss=_token_loss,
        count=_count_tokens,
        arrays=SOUND_ARRAYS,
        reads="recordings",
    ),
    "dpo": Task(
        loss=preference_loss,
        count=count_pairs,
        term="pair",
        arrays=BATCH_ARRAYS,
        reads="pairs",
        has_reference=True,
    ),
}
"""By the value of the setting `task`."""
SECTIONS: dict[str, tuple[str, Callable[[Task], bool]]] = {
    "preference.": ("preference pairs", lambda task: task.reads == "pairs"),
    "masking.discriminator_weight": ("replaced tokens", lambda task: task.has_generator),
    "masking.": ("masked tokens", lambda task: task.masks_tokens),
    "patch_masking.": (
        "hidden patches",
        lambda task: task.medium == "images" and task.corrupt is not None,
    ),
    "evaluation.transcribed": ("recordings", lambda task: task.reads == "recordings"),
    "augmentation.": ("images", lambda task: task.augment is not None),
}
"""Sections of settings that only some tasks use: what they are of, and which tasks those are."""


def task_name(config: Config) -> str:
    """The task of a run: the one that is named, or that of its kind of model and head."""
    if config.task is not None:
        return config.task
    if config.model.reads != "text":
        return IMAGES if config.model.image_size else TRANSCRIPTION
    if labels := config.model.labels:
        labelled = config.model.labelled
        is_of_data = labelled == "replacement" and labels != REPLACEMENT_LABELS
        return LEARNS["sequence" if is_of_data else labelled]
    return NEXT_TOKEN if features_of(config.model).causal else MLM


def task_of(config: Config) -> Task:
    """`task_named` of `task_name`."""
    return task_named(task_name(config))


SOME_LABELS = ("0", "1")
"""Labels of a model whose data is not known."""


def kept_model(config: Config) -> ModelConfig:
    """The model without what its task has no use for: a generator, and the head that finds what it
    replaced.
    """
    model, task = config.model, task_of(config)
    if task.has_generator or (model.generator is None and model.labelled != "replacement"):
        return model
    return dataclasses.replace(
        model,
        generator=None,
        labels=() if model.labels == REPLACEMENT_LABELS else model.labels,
        labelled=task.labelled or "sequence",
    )


def model_of(config: Config, labels: tuple[str, ...] = ()) -> ModelConfig:
    """The model with the head that its task needs.

    Args:
      labels: those of the data; empty: the model's own, or SOME_LABELS, which cost about as much as
        others.
    """
    labelled, model = task_of(config).labelled, kept_model(config)
    if labelled is None:
        return model
    if labelled in FIXED_LABELS:
        labels = FIXED_LABELS[labelled]
    return dataclasses.replace(
        model, labels=labels or model.labels or SOME_LABELS, labelled=labelled
    )


def task_named(name: str) -> Task:
    """A row of TASKS. Raises ConfigError, with the nearest name, if there is none."""
    if name == IN_PYTHON and name not in TASKS:
        raise not_given("task", "task")
    if name not in TASKS:
        raise ConfigError(
            explain(
                f"unknown task {name!r}",
                given=f"task={name}",
                do=nearest(name, [each for each, _ in named_tasks()]),
            )
        )
    return TASKS[name]


@contextmanager
def keeps_own_task() -> Iterator[None]:
    """What is the task named IN_PYTHON is that again afterwards. Also a decorator."""
    before = TASKS.get(IN_PYTHON)
    try:
        yield
    finally:
        use_own_task(before)


def named_tasks() -> list[tuple[str, Task]]:
    """The rows of TASKS that a setting can name."""
    return [(name, task) for name, task in TASKS.items() if name != IN_PYTHON]


def use_own_task(given: Task | None) -> None:
    """Make a task the one named IN_PYTHON.

    Args:
      given: None: there is none any more, so that no run goes on with that of another.
    """
    TASKS.pop(IN_PYTHON, None)
    if given is not None:
        TASKS[IN_PYTHON] = given


def check_task(config: Config, named: Collection[str] = ()) -> None:
    """Raise ConfigError if the task is unknown, lacks an array that the model reads, or the model
    does not have what the task needs.

    Args:
      named: dotted names of the settings that the user gave. Those of SECTIONS need a task that
        uses them.
    """
    name = task_name(config)
    tuning, task = config.model.tuning, task_named(name)
    if task.is_causal not in (None, features_of(config.model).causal):
        others = [name for name, each in named_tasks() if each.is_causal is not task.is_causal]
        sees = "earlier tokens only" if task.is_causal else "all tokens of a document"
        raise ConfigError(
            explain(
                f"task {name} needs a model in which a token sees {sees}",
                given=f"model.family={config.model.family},"
                f" causal={features_of(config.model).causal}",
                do=f"use --set task={' or '.join(others)}, or another model",
            )
        )
    if task.medium != config.model.reads:
        raise ConfigError(
            explain(
                f"task {name} needs a model that reads {task.medium}",
                given=f"{config.model.name}, which reads {config.model.reads}",
                do="leave the task out, or name another model",
            )
        )
    lengths = [config.seq_len, *(phase.seq_len or config.seq_len for phase in config.data.phases)]
    if min(*lengths, config.eval_seq_len) <= config.model.frames:
        raise ConfigError(
            explain(
                "an example is the frames of a recording and then its text",
                given=f"data.seq_len={min(lengths)}, evaluation.seq_len={config.eval_seq_len},"
                f" model.frames={config.model.frames}",
                do=f"choose more than {config.model.frames}, or leave it out",
            )
        )
    if config.model.image_size and {*lengths, config.eval_seq_len} != {config.model.max_length}:
        raise ConfigError(
            explain(
                "every image has as many tokens as the model has positions",
                given=f"data.seq_len={', '.join(map(str, lengths))},"
                f" evaluation.seq_len={config.eval_seq_len},"
                f" model.max_length={config.model.max_length}",
                do="leave --seq-len, lengths of phases and evaluation.seq_len out",
            )
        )
    if task.masks_tokens and config.mask_token >= config.model.vocab_size:
        raise ConfigError(
            explain(
                "the model does not have the mask token",
                given=f"masking.token={config.mask_token},"
                f" model.vocab_size={config.model.vocab_size}",
                do="set masking.token to an id below model.vocab_size",
            )
        )
    if task.has_generator and config.model.generator is None:
        raise ConfigError(
            explain(
                f"task {name} needs a model with a generator",
                given=f"{config.model.name}, no model.generator",
                do="name a model with one, such as electra-nano, or another task, such as --task"
                " classification",
            )
        )
    if config.model.labels and task.labelled is None:
        what = "the vocabulary" if task.predicts_tokens else "the values of patches"
        raise ConfigError(
            explain(
                f"task {name} needs a head over {what}",
                given=f"model.labels={','.join(config.model.labels)},"
                f" model.labelled={config.model.labelled}",
                do="leave --task or model.labels out, or name a model without labels",
            )
        )
    if missing := [name for name in READ_BY_THE_MODEL if name not in task.arrays]:
        raise ConfigError(
            explain(
                f"task {name} lacks arrays that the model reads",
                given=f"no {', '.join(missing)} among {', '.join(task.arrays)}",
                do="add them to Task.arrays",
            )
        )
    for section, (what, is_used_by) in SECTIONS.items():
        unused = sorted(each for each in named if each.startswith(section))
        if unused and not is_used_by(task):
            tasks = [each for each, other in named_tasks() if is_used_by(other)]
            raise ConfigError(
                explain(
                    f"settings of {what} have no use in task {name}",
                    given=f"{', '.join(unused)}; task={name}",
                    do=f"add --set task={' or '.join(tasks)}, or leave them out",
                )
            )
    if task.has_reference and not (tuning.has_adapters and set(tuning.frozen) == set(BASE_GROUPS)):
        raise ConfigError(
            explain(
                f"task {name} compares the model with what it was before, which must still"
                " be there: only adapters may be trained",
                given=f"model.tuning.method={tuning.method},"
                f" frozen: {', '.join(tuning.frozen) or 'nothing'}",
                do="set model.tuning.method=lora, and leave model.tuning.freeze out",
            )
        )
