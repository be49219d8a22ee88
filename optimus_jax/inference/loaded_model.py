"""`load`: a trained model in memory, for use in Python."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.config.axes import AxisSizes, mesh_text
from optimus_jax.data.given import RandomAccess, check_ends, check_records
from optimus_jax.data.recordings import check_libraries, recordings_in, samples_of
from optimus_jax.data.records import Message
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.devices.cpu import use_cpu_devices
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, DataError, OptimusError, counted, explain
from optimus_jax.inference.chats import GivenPrompt, is_one_prompt
from optimus_jax.inference.loading import load_text_model
from optimus_jax.inference.text_model import GenerationSettings, TextModel
from optimus_jax.inference.transcription import SpeechModel
from optimus_jax.run.evaluate import EvaluationResult, evaluate
from optimus_jax.run.export import ExportResult, export
from optimus_jax.run.parameter_source import RunSource
from optimus_jax.run.predict import (
    LabelModel,
    Records,
    check_predicts,
    label_model_config,
    open_label_model,
    predicts,
)
from optimus_jax.run.trained_model import trained_source
from optimus_jax.system.command import typed_command
from optimus_jax.system.paths import UserPath
from optimus_jax.training.answers import Answer

if TYPE_CHECKING:
    from optimus_jax.inference.harness import HarnessModel


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A trained model on devices of this process, with its tokenizer."""

    source: UserPath
    """The run or the published model that it is from."""
    loaded: TextModel | LabelModel
    """Its parameters, and how they are split; with labels a LabelModel."""
    step: int | None
    """Step of the run's checkpoint; None: it is a published model."""
    warn: Callable[[str], object] = warnings.warn
    """Called with messages."""
    token_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `data` that `load` was told of the tokenizer, by dotted name."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and family of the model."""
        loaded = self.loaded
        return loaded.config.model if isinstance(loaded, LabelModel) else loaded.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Of its run, or published with it."""
        return self.loaded.tokenizer

    @property
    def text_model(self) -> TextModel:
        """The model as one of text or sound. Raises ConfigError if it has labels."""
        if not isinstance(self.loaded, LabelModel):
            return self.loaded
        raise ConfigError(
            explain(
                "a model with labels writes no text",
                given=f"{self.config.name}, with {counted(len(self.config.labels), 'label')}",
                do=f"ask it for labels: `{typed_command('predict')}`, or in Python predict()",
            )
        )

    def predict(
        self,
        records: str | PathLike | Mapping[str, Any] | Sequence[Any],
        *,
        top: int | None = None,
        max_answer_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> list[Answer]:
        """What a model with labels says of records, which need no labels themselves.

        Args:
          records: one or a list: texts, or objects as lines of a JSON Lines file; a Path names a
            file of them. Of a model of images, paths.
          top: labels that `scores` ranks (5).
          max_answer_tokens: most tokens of an answer to a question (30).
          batch_size: most examples at once, which may hold several texts (8 for each device).
        Returns:
          A dict for each record: of a text `label`, `score` and `scores`; of an image `file` too;
          of words `words`, `labels` and `scores`; of a question `answer`, `start`, `end`
          (characters of its context; None: there is no answer) and `score`.
        Raises:
          OptimusError: the model has no labels, or a record cannot be read.
        """
        if not isinstance(self.loaded, LabelModel):
            check_predicts(self.config, self.source)
        assert isinstance(self.loaded, LabelModel)
        data = _as_records(records, are_files=bool(self.config.image_size))
        answers = self.loaded.predict(
            data,
            top=top,
            max_answer_tokens=max_answer_tokens,
            batch_size=batch_size,
            say=self.warn,
        )
        return list(answers)

    @overload
    def generate(self, prompt: str | list[Message] | dict[str, Any], **settings: Any) -> str: ...

    @overload
    def generate(
        self, prompt: Sequence[str] | list[list[Message]], *, batch_size: int = 8, **settings: Any
    ) -> list[str]: ...

    def generate(
        self, prompt: GivenPrompt | Sequence[GivenPrompt], *, batch_size: int = 8, **settings: Any
    ) -> str | list[str]:
        """The text that follows a prompt, without it; of several prompts, that of each.

        A prompt is a text, or a conversation so far: a list of messages, each a dict with `role`
        and `content`, which the model answers by the tokenizer's chat template; with tools, a dict
        with `messages` and `tools`.

        Args:
          prompt: a prompt, or a list of prompts.
          batch_size: most prompts of a list at once; without effect for a single prompt.
          settings: as `stream` has them.
        Returns:
          A text; of a list of prompts a list of texts, in the same order.
        Raises:
          OptimusError: as `stream` does, before anything is generated.
        """
        if not isinstance(cast("object", prompt), RandomAccess):
            raise DataError(
                explain(
                    "a prompt is a text, or a conversation so far",
                    given=f"{prompt!r} ({type(prompt).__name__})",
                    do='give a text, or messages such as [{"role": "user", "content": "Hello"}]',
                )
            )
        if is_one_prompt(prompt):
            return "".join(self.stream(prompt, **settings))
        warn, how = self._generation(settings)
        several = cast("Sequence[GivenPrompt]", prompt)
        texts = self.text_model.generate_each(several, how, batch_size=batch_size, warn=warn)
        return [text for (text,) in texts]

    def stream(self, prompt: GivenPrompt, **settings: Any) -> Iterator[str]:
        """The text that follows a prompt, in pieces, while it is generated.

        Args:
          settings: max_new_tokens (200), temperature (1.0; 0: always the likeliest token), top_k
            (None: draw from all tokens), top_p (1.0: from all), seed (0), stop (texts before which
            it ends; none), chat (False: whether the prompt is a user's message),
            past_trained_length (False), warn (called with messages; that of `load`).
        Raises:
          ConfigError: a setting is unknown or out of range, or the model writes no text.
          DataError: the prompt is empty or too long, or has tokens that the model lacks. Both are
            raised by the call, not by the iterator.
        """
        warn, how = self._generation(settings)
        pieces = self.text_model.generate(prompt, how, warn=warn)
        return (piece for (piece,) in pieces if piece)

    def _generation(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[str], object], GenerationSettings]:
        """Who is warned, and how one text is generated for each prompt."""
        warn = settings.pop("warn", self.warn)
        known = {each.name for each in fields(GenerationSettings)} - {"num_samples"}
        if unknown := settings.keys() - known:
            raise ConfigError(
                explain(
                    "generation has no such setting",
                    given=", ".join(f"{name}={settings[name]}" for name in sorted(unknown)),
                    do="call it again with another seed= for another text"
                    if unknown == {"num_samples"}
                    else f"choose from {', '.join(sorted(known))}",
                )
            )
        return warn, GenerationSettings(**settings)

    def logits(self, text: str | Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits of the token that follows each token of a text, or of some token ids.

        Args:
          text: a text, or int [L]. A text of a published model begins with the BOS token that its
            tokenizer has.
        Returns:
          float32 [L, V] on the host, of L tokens and a vocabulary of V.
        Raises:
          ConfigError: the model has labels, or is one of sound.
          DataError: there is no token, or the model lacks one, or a position for it.
        """
        model = self.text_model
        is_text = isinstance(text, str)
        return model.logits(model.encode(text, past_trained_length=True) if is_text else text)

    def transcribe(
        self,
        recordings: UserPath | np.ndarray | Sequence[UserPath | np.ndarray],
        *,
        language: str | None = None,
        translate: bool = False,
        batch_size: int = 8,
    ) -> list[str]:
        """The texts of recordings, by a model of sound.

        Args:
          recordings: files and folders, or arrays, float32 [S] of 16,000 samples a second.
          language: as in `data.language`; None: that of the run, or of the published model.
          translate: whether to write English.
          batch_size: most recordings, or parts of long ones, at once.
        Raises:
          OptimusError: the model does not read sound, or a recording cannot be read.
        """
        model = self.speech_model(language=language, translate=translate)
        given = [recordings] if isinstance(recordings, str | PathLike | np.ndarray) else recordings
        samples = [each for one in given for each in _samples_in(one, model.data, self.warn)]
        return model.transcribe(samples, batch_size=batch_size)

    def speech_model(self, *, language: str | None = None, translate: bool = False) -> SpeechModel:
        """The model as one that writes down recordings; arguments as in `transcribe`.

        Raises ConfigError if it does not read sound, or its generation_config.json names a language
        or tokens that it lacks.
        """
        task = "translate" if translate else None
        return SpeechModel.of(self.text_model, language=language, speech_task=task)

    def for_lm_eval(self, *, batch_size: int = 8) -> "HarnessModel":
        """The model for EleutherAI's lm-evaluation-harness: `lm_eval.simple_evaluate(model=...)`.

        Args:
          batch_size: most texts that are scored or continued at once.
        Raises:
          ConfigError: lm-eval is not installed, or the model has labels.
        """
        from optimus_jax.inference.harness import HarnessModel

        return HarnessModel(self.text_model, batch_size=batch_size)

    def evaluate(self, **settings: Any) -> EvaluationResult:
        """`optimus_jax.evaluate` of this model. Its parameters are read again, for the mesh, so
        that the devices need room for them twice.

        Args:
          settings: arguments of `optimus_jax.evaluate` but `model` and `step`: `data`, `examples`,
            `mesh` and others.
        Raises:
          OptimusError, FaultError: as `optimus_jax.evaluate`.
        """
        settings.setdefault("warn", self.warn)
        # What a run holds out is written out by its own template.
        is_own = self.step is not None and settings.get("data") is None
        told = {} if is_own else self.token_settings
        return evaluate(self.source, step=self.step, **{**told, **settings})

    def export(self, to: UserPath, **settings: Any) -> ExportResult:
        """`optimus_jax.export` of this model.

        Args:
          to: the directory to make.
          settings: `dtype`, `max_shard_size`, `generator` and `warn` of `optimus_jax.export`.
        Raises:
          OptimusError: as `optimus_jax.export`, or the model is a published one.
        """
        settings.setdefault("warn", self.warn)
        return export(self.source, to, step=self.step, **settings)


def _samples_in(
    recordings: UserPath | np.ndarray, data: DataConfig, warn: Callable[[str], object]
) -> Iterator[np.ndarray]:
    """Samples of each recording of a file or folder; an array is that of one."""
    if isinstance(recordings, np.ndarray):
        yield np.asarray(recordings, np.float32)
        return
    check_libraries(str(recordings))
    found, notes = recordings_in(str(recordings), data, texts="unread")
    for note in notes:
        warn(note)
    yield from map(samples_of, found)


def load(
    model: UserPath,
    *,
    step: int | None = None,
    mesh: str | AxisSizes | Mapping[str, int] = "",
    cpu_devices: int | None = None,
    eos: str | None = None,
    chat_template: str | None = None,
    warn: Callable[[str], object] = warnings.warn,
) -> LoadedModel:
    """Load a model that generates text, writes down recordings or predicts labels, onto the first
    devices of this process.

    Args:
      model: directory or URL of a run, which may have used any mesh; directory of a published
        model or of PEFT's adapters, or hf://ORG/NAME.
      step: step of the run's checkpoint; None: the newest good one.
      mesh: sizes of fsdp and tensor over which it is split: `tensor=4`, or as a dict or
        AxisSizes; of a model with labels any sizes; empty: one device.
      cpu_devices: number of virtual CPU devices; None: the devices that JAX finds.
      eos: token that ends a text of a published model; None: the one that its files name.
      chat_template: path or URL of a chat template; None: the tokenizer's own.
      warn: called with messages about what was skipped or left out.
    Raises:
      OptimusError: there is no such run, checkpoint, model or tokenizer, the mesh does not fit, or
        the model predicts hidden tokens.
    """
    if cpu_devices is not None:
        use_cpu_devices(cpu_devices)
    axes = AxisSizes.parse(mesh_text(mesh)) if mesh else AxisSizes()
    given = {"data.eos": eos, "data.chat_template": chat_template}
    told = {name: value for name, value in given.items() if value is not None}
    if _has_labels(model, step):
        check_jax_settings()
        _check_tokens_used(model, eos, chat_template)
        settings = {"parallel.mesh": str(axes)} | told
        config = label_model_config(model, settings, step=step)
        labels = open_label_model(config, say=warn, num_devices=axes.num_devices)
        return LoadedModel(
            source=model, loaded=labels, step=labels.step, warn=warn, token_settings=told
        )
    loaded = load_text_model(
        model,
        step,
        mesh=axes,
        eos=eos,
        chat_template=chat_template,
        warn=warn,
    )
    return LoadedModel(
        source=model, loaded=loaded, step=loaded.step, warn=warn, token_settings=told
    )


def _check_tokens_used(model: UserPath, eos: str | None, chat_template: str | None) -> None:
    """Raise ConfigError if what `load` is told of the tokenizer of a model with labels would have
    no effect.
    """
    unused = None
    if chat_template is not None:
        unused = f"chat_template={chat_template!r}; a model with labels reads no conversation"
    elif eos is not None and isinstance(trained_source(model, None)[0], RunSource):
        unused = f"eos={eos!r}; a run has a token of its own that ends its texts"
    if unused is not None:
        raise ConfigError(
            explain("a setting of the tokenizer has no use", given=unused, do="leave it out")
        )


def _as_records(
    given: str | PathLike | Mapping[str, Any] | Sequence[Any], *, are_files: bool
) -> Records:
    """What `LoadedModel.predict` is given, as `LabelModel.predict` takes it.

    Args:
      are_files: whether strings are names of files, too.
    """
    if isinstance(given, str | PathLike | Mapping):
        given = [given]
    if isinstance(given, list | tuple):
        of_files = str | PathLike if are_files else PathLike
        if given and all(isinstance(one, of_files) for one in given):
            return tuple(map(str, given))
        given = list(given)
    found = check_records(given, "records")
    check_ends(found, "records")
    assert isinstance(found, RandomAccess)
    return found


def _has_labels(model: UserPath, step: int | None) -> bool:
    """Whether a model predicts labels; False also if it cannot be read, which loading explains."""
    with suppress(OptimusError):
        return predicts(trained_source(model, step)[0].config())
    return False
