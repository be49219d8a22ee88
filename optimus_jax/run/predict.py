"""`predict`: what a trained model with labels says of records that have none.

The program is the one that evaluates (`evaluate.py`), on the same plans; logits become answers as
the model's task says (training/answers.py).
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from optimus_jax.cluster.distributed import all_or_none, assert_same_everywhere
from optimus_jax.config import Config, DataConfig, ModelConfig
from optimus_jax.data.given import RandomAccess
from optimus_jax.data.labelled import NO_LABEL, LabelledWords, LabelPlace
from optimus_jax.data.loader import eval_batches
from optimus_jax.data.tokenizers import Tokenizer, load_tokenizer
from optimus_jax.data.unlabelled import (
    Part,
    Unlabelled,
    in_groups,
    unlabelled_images,
    unlabelled_records,
)
from optimus_jax.errors import ConfigError, DataError, counted, explain
from optimus_jax.mesh.build import discover
from optimus_jax.mesh.sharding import local_rows
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.families import features_of
from optimus_jax.models.shapes import Params
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.run.initial_weights import initial_weights
from optimus_jax.run.parameter_source import RunSource, parameter_source
from optimus_jax.run.requested_config import requested_config, shared_settings
from optimus_jax.run.trained_model import (
    ALL,
    EXAMPLES_PER_DEVICE,
    FORWARD_ONLY,
    by_writer,
    connected,
    settings_of,
    trained_source,
)
from optimus_jax.system.command import typed_command
from optimus_jax.system.paths import UserPath
from optimus_jax.training.answers import MAX_ANSWER_TOKENS, TOP, Answer, AnswerInputs
from optimus_jax.training.evaluation import all_batches, eval_rows
from optimus_jax.training.step import Program, build_program
from optimus_jax.training.tasks import task_of

LENGTH, EVAL_LENGTH, GLOBAL_BATCH = "data.seq_len", "evaluation.seq_len", "data.global_batch"
OF_THE_HEAD = ("task", "model.labels", "model.labelled")
"""Settings."""
Records = tuple[str, ...] | RandomAccess
"""Paths, or records by number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelModel:
    """A trained model with labels, on its devices."""

    program: Program
    """Its config has the model, the data's settings and the length of examples."""
    params: Params
    tokenizer: Tokenizer
    weights: str
    """Where the parameters are from: DIR@STEP of a run, or a published model."""

    @property
    def step(self) -> int | None:
        """Step of the run's checkpoint; None: it is a published model."""
        source = parameter_source(self.weights)
        return source.named.step if isinstance(source, RunSource) else None

    @property
    def config(self) -> Config:
        """Settings of the model and of its data."""
        return self.program.config

    def predict(
        self,
        data: Records,
        *,
        top: int | None = None,
        max_answer_tokens: int | None = None,
        batch_size: int | None = None,
        say: Callable[[str], object] = warnings.warn,
    ) -> Iterator[Answer]:
        """What the model says of each record, in their order. Every process gives the same.

        Args:
          data: files and folders, or of a model of text also records: texts, or objects as a line
            of a JSON Lines file holds them.
          top: labels that `scores` ranks; None: TOP.
          max_answer_tokens: most tokens of an answer to a question; None: MAX_ANSWER_TOKENS.
          batch_size: most examples at once, rounded to what the plan divides; None: `global_batch`
            of the config.
          say: called with what a user should know about the data, such as texts that are truncated.
        Yields:
          JSON objects: of a text `label`, `score` and `scores`; of an image `file` too; of words
          `words`, `labels` and `scores`; of a question `answer`, `start`, `end` and `score`.
        Raises:
          OptimusError: raised by the call where a setting is wrong, by the iterator where a record
            is.
        """
        config = self.config
        finds_answers = config.model.labelled == "span"
        self._check("top", top, is_used=config.model.labelled == "sequence")
        self._check("max_answer_tokens", max_answer_tokens, is_used=finds_answers)
        if batch_size is not None:
            config = config.with_values({GLOBAL_BATCH: batch_size})
        num_rows = eval_rows(config, self.program.plan, ALL)
        how = {"top": top or TOP, "max_answer_tokens": max_answer_tokens or MAX_ANSWER_TOKENS}
        return self._answers(_same_everywhere(self._groups(data, say)), num_rows, how)

    def _answers(
        self, groups: Iterator[Unlabelled], num_rows: int, how: dict[str, Any]
    ) -> Iterator[Answer]:
        """The answers in the order of the records, each as soon as those before it are there."""
        answer = task_of(self.config).answer
        assert answer is not None, "checked when the model was loaded"
        for group in groups:
            made: dict[int, Answer] = {}
            due = 0
            for part, logits_LN in self._logits(group, num_rows):
                made[part.record] = answer(self._inputs(group, part, logits_LN, how))
                while due in made:
                    yield made.pop(due)
                    due += 1
            for number in range(due, len(group.records)):
                if number in made:
                    yield made.pop(number)
                    continue
                if not isinstance(group.records[number], LabelledWords):
                    raise DataError(
                        explain(
                            "a record has no room in an example",
                            given=f"{EVAL_LENGTH}={self.config.eval_seq_len}",
                            do="choose a larger --seq-len",
                        )
                    )
                nothing = Part(number, slice(0, 0), np.zeros(0, np.int32))
                yield answer(self._inputs(group, nothing, np.zeros((0, 0), np.float32), how))

    def _inputs(
        self, group: Unlabelled, part: Part, logits_LN: np.ndarray, how: dict[str, Any]
    ) -> AnswerInputs:
        """What the answer of a record is made of.

        Args:
          logits_LN: of the tokens of `part`.
        """
        needed = slice(None) if group.needs_all else part.numbers != NO_LABEL
        return AnswerInputs(
            record=group.records[part.record],
            logits_LN=logits_LN[needed],
            numbers_L=part.numbers[needed],
            labels=self.config.model.labels,
            context=group.contexts[part.record] if group.contexts else None,
            **how,
        )

    def _groups(self, data: Records, say: Callable[[str], object]) -> Iterator[Unlabelled]:
        """The records and the examples that they are put into."""
        config = self.config
        if config.model.image_size:
            if not isinstance(data, tuple):
                raise DataError(
                    explain(
                        "images are read from files",
                        given=f"a {type(data).__name__}",
                        do="name files, folders, tables or .tar files of them",
                    )
                )
            yield from unlabelled_images(data, config.model, config.data.image_field, say)
            return
        yield from in_groups(
            unlabelled_records(data, task_of(config).reads, config.data, say),
            self.tokenizer,
            config.model,
            place=self._place,
            longest=config.eval_seq_len,
            say=say,
        )

    def _logits(self, group: Unlabelled, num_rows: int) -> Iterator[tuple[Part, np.ndarray]]:
        """The logits of every record that has a part of an example, float32 [L, N]."""
        program, length = self.program, self.config.eval_seq_len
        num_examples = group.examples.count_examples(length)
        rows = local_rows(program.batch_sharding, num_rows)

        def make_batches() -> Iterator[dict[str, np.ndarray]]:
            return eval_batches(
                group.examples,
                seq_len=length,
                num_rows=num_rows,
                rows=rows,
                respect_documents=True,
                num_examples=num_examples,
            )

        for number, batch in enumerate(all_batches(make_batches, what="batches of records")):
            of_rows = {**batch, "examples": rows.astype(np.int32)}
            found = program.label_logits(self.params, program.put_batch(of_rows, num_rows))
            logits_RLN, first = np.asarray(jax.device_get(found)), number * num_rows
            for example in range(first, min(first + num_rows, num_examples)):
                for part in group.parts(example, length):
                    yield part, logits_RLN[example - first, part.tokens]

    @property
    def _place(self) -> LabelPlace:
        return "last" if features_of(self.config.model).causal else "first"

    def _check(self, name: str, value: int | None, *, is_used: bool) -> None:
        """Raise ConfigError if a number is too small, or means nothing to the model."""
        if value is None:
            return
        if value < 1:
            raise ConfigError(
                explain(f"{name} is out of range", given=f"{name}={value}", do="choose 1 or more")
            )
        if not is_used:
            raise ConfigError(
                explain(
                    f"{name} has no use for this model",
                    given=f"{name}={value}; it has labels of each {self.config.model.labelled}",
                    do="leave it out",
                )
            )


def _same_everywhere(groups: Iterator[Unlabelled]) -> Iterator[Unlabelled]:
    """The groups of records, each once all processes have read the same one. Raises an error of one
    process in all.
    """
    while True:
        with all_or_none():
            group = next(groups, None)
        if jax.process_count() > 1:
            assert_same_everywhere({"the records": "no more" if group is None else group.digest})
        if group is None:
            return
        yield group


def predicts(model: ModelConfig) -> bool:
    """Whether a model has labels of records that it was not trained on."""
    return bool(model.labels) and task_of(replace(Config(), model=model)).answer is not None


def check_predicts(model: ModelConfig, named: object) -> None:
    """Raise ConfigError, with the command for such a model, if it predicts no labels."""
    if predicts(model):
        return
    if model.reads == "sound":
        do = f"write recordings down with {typed_command('transcribe')}"
    elif model.predicts_tokens and features_of(model).causal:
        do = f"continue texts with {typed_command('generate')}"
    else:
        do = "name a run that has learnt labels, such as one with --task classification"
    raise ConfigError(
        explain("the model predicts no labels", given=f"{named}: {model.name}", do=do)
    )


def label_model_config(
    model: UserPath, overrides: dict[str, Any], *, step: int | None = None
) -> Config:
    """The settings with which a trained model predicts; touches no device.

    Args:
      model, step: as of `evaluate`.
      overrides: settings by dotted name.
    Raises:
      OptimusError: there is no such model, or it has no labels.
    """
    if taken := sorted(name for name in overrides if name in OF_THE_HEAD):
        raise ConfigError(
            explain(
                "what is predicted, the model has learnt",
                given=", ".join(f"{name}={overrides[name]}" for name in taken),
                do="leave it out",
            )
        )
    source, adapters = trained_source(model, step)
    check_predicts(source.config(), model)
    base, given = None, {"init_from": str(adapters or source)}
    if isinstance(source, RunSource):
        base = replace(settings_of(source), task=None)
        given["data.tokenizer"] = source.tokenizer()
    if LENGTH in overrides:
        overrides = {EVAL_LENGTH: overrides[LENGTH], **overrides}
    without_data = {
        "data.sources": DataConfig().sources,
        "data.eval_fraction": 0.0,
        "data.skip_bad_lines": False,
        "evaluation.data": (),
    }
    config = requested_config(None, base, None, False, given | without_data | overrides, False)
    if config.data.skip_bad_lines:
        raise ConfigError(
            explain(
                "no record is skipped: each one has an answer",
                given="data.skip_bad_lines=true",
                do="leave the setting out, and fix the records",
            )
        )
    # Batches have as many examples as `global_batch` says, whatever the length of training.
    return config.with_values({**FORWARD_ONLY, LENGTH: config.eval_seq_len})


def open_label_model(
    config: Config,
    *,
    say: Callable[[str], object],
    has_batch: bool = False,
    num_devices: int | None = None,
) -> LabelModel:
    """The model of a config, on devices.

    Args:
      config: of `label_model_config`.
      say: called with messages about the parameters.
      has_batch: whether the size of batches is given.
      num_devices: the first devices of this process that are used, by it alone; None: all devices,
        by all processes.
    Raises:
      OptimusError: the parameters or the tokenizer cannot be read, or the mesh does not fit.
    """
    topology = discover()
    if num_devices is not None:
        topology = _first_devices(topology, num_devices)
    with all_or_none():
        if not has_batch:
            size = EXAMPLES_PER_DEVICE * topology.num_devices
            config = config.with_values({GLOBAL_BATCH: size})
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.eos)
        plan = choose_plan(config, topology).plan
    assert_same_everywhere(shared_settings(config) | {"the plan": plan.describe()})
    devices = None if num_devices is None else jax.local_devices()[:num_devices]
    program = build_program(config, plan, devices)
    identity = {"tokenizer": tokenizer.digest, "eos": tokenizer.eos}
    state, weights = initial_weights(config, identity).initial_state(program, say)
    return LabelModel(program=program, params=state.params, tokenizer=tokenizer, weights=weights)


def _first_devices(topology: Topology, number: int) -> Topology:
    """The topology of the first devices of the only process.

    Raises ConfigError if there are several processes, or fewer devices.
    """
    if topology.num_processes > 1 or topology.num_devices < number:
        raise ConfigError(
            explain(
                "a loaded model predicts on devices of one process",
                given=f"{counted(number, 'device')} of {topology}",
                do=f"name a smaller mesh; several processes predict with"
                f" {typed_command('predict')}",
            )
        )
    first = slice(0, number)
    return replace(
        topology,
        num_devices=number,
        process_of=topology.process_of and topology.process_of[first],
        host_of=topology.host_of and topology.host_of[first],
    )


def predict(
    model: UserPath,
    data: Records,
    *,
    step: int | None = None,
    top: int | None = None,
    max_answer_tokens: int | None = None,
    warn: Callable[[str], object] = warnings.warn,
    when_connected: Callable[[], object] | None = None,
    **overrides: Any,
) -> Iterator[Answer]:
    """What a model with labels says of records, on any mesh; on several processes every one gives
    the same.

    Args:
      model, step, warn: as of `evaluate`.
      data, top, max_answer_tokens: as of `LabelModel.predict`.
      when_connected: called before the model is read, once processes are connected; its error is
        raised in all of them.
      overrides: settings by dotted name.
    Raises:
      OptimusError: a mistake that the user can fix; the message says how.
    """
    config = label_model_config(model, overrides, step=step)
    with connected(config):
        if when_connected is not None:
            with all_or_none():
                when_connected()
        say = by_writer(warn)
        loaded = open_label_model(config, say=say, has_batch=GLOBAL_BATCH in overrides)
        yield from loaded.predict(data, top=top, max_answer_tokens=max_answer_tokens, say=say)
