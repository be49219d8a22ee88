"""The README.md of an exported model: what is known of the run, without paths of its machine."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import jax

from optimus_jax.config import Config, DataConfig, ModelConfig
from optimus_jax.config.data import SpeechTask
from optimus_jax.config.model import COLUMNS_PER_FRAME, Resample
from optimus_jax.config.phases import phases_of
from optimus_jax.data.given import NAME, given_in_python
from optimus_jax.data.recordings import NO_TIMESTAMPS, start_of
from optimus_jax.data.spectrogram import SAMPLE_RATE, STEP, WINDOW
from optimus_jax.data.token_ids import frame_of_ends
from optimus_jax.data.tokenizers import ByteTokenizer, Tokenizer
from optimus_jax.errors import OptimusError, counted
from optimus_jax.models.families import features_of
from optimus_jax.plan import Plan
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import weights_in_run
from optimus_jax.system.hub_model import HubModel
from optimus_jax.training.task import GENERATOR_LOSS
from optimus_jax.training.tasks import named_tasks, task_name
from optimus_jax.version import VERSION

CARD = "README.md"
LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
"""Tokens of languages in published tokenizers."""
HEADER = """---
library_name: transformers
pipeline_tag: {tag}
tags:
- optimus_jax
---
"""
USE = """
```python
from transformers import {reader}, {auto}

{variable} = {reader}.from_pretrained(DIRECTORY)
model = {auto}.from_pretrained(DIRECTORY)
```
"""


class Purpose(NamedTuple):
    """What a model is for."""

    tag: str
    """Name of the hub."""
    auto: str
    """Class of transformers that loads it."""
    reader: str = "AutoTokenizer"
    """Class of transformers that makes its input."""
    variable: str = "tokenizer"


GENERATION = Purpose("text-generation", "AutoModelForCausalLM")
_OF_IMAGES = Purpose(
    "image-classification", "AutoModelForImageClassification", "AutoImageProcessor", "processor"
)
_OF_PATCHES = Purpose(
    "image-feature-extraction",
    "AutoModelForMaskedImageModeling",
    "AutoImageProcessor",
    "processor",
)
_OF_SOUND = Purpose(
    "automatic-speech-recognition",
    "AutoModelForSpeechSeq2Seq",
    "AutoFeatureExtractor",
    "feature_extractor",
)
_OF_LABELS = {
    "sequence": Purpose("text-classification", "AutoModelForSequenceClassification"),
    "token": Purpose("token-classification", "AutoModelForTokenClassification"),
    "span": Purpose("question-answering", "AutoModelForQuestionAnswering"),
    "replacement": Purpose("feature-extraction", "AutoModelForPreTraining"),
}


def purpose_of(model: ModelConfig) -> Purpose:
    """What a model is for, by its input and its head."""
    if model.reads != "text":
        if not model.image_size:
            return _OF_SOUND
        return _OF_IMAGES if model.labels else _OF_PATCHES
    if model.labels:
        return _OF_LABELS[model.labelled]
    if features_of(model).causal:
        return GENERATION
    return Purpose("fill-mask", "AutoModelForMaskedLM")


def model_card(
    run: RunDirectory,
    config: Config,
    tokenizer: Tokenizer,
    *,
    step: int,
    metadata: Mapping[str, Any],
    num_params: int,
    dtype: str,
    adds_tokens: bool,
) -> str:
    """The text of the card.

    Args:
      step: of the checkpoint whose parameters are exported.
      metadata: the checkpoint's.
      dtype: of the files.
      adds_tokens: whether the tokenizer adds tokens that the run did not.
    """
    facts = [
        ("model", f"{config.model.name}, of the family {config.model.family}"),
        ("parameters", f"{num_params:,}"),
        ("weights", f"{dtype}, after step {step:,}"),
        *_of_training(run, config, step, metadata),
        *([] if config.model.image_size else [("tokenizer", _tokenizer_text(tokenizer))]),
        ("written by", f"optimus_jax {VERSION}, jax {jax.__version__}"),
    ]
    rows = "".join(f"| {name} | {_cell(value)} |\n" for name, value in facts)
    note = (
        "\nThe model has learnt texts without the special tokens that this tokenizer adds by\n"
        "default: call it with `add_special_tokens=False`.\n"
        if adds_tokens
        else ""
    )
    if config.model.reads != "text":
        note = ""
    elif config.model.labels and config.model.labelled != "replacement":
        note = _frame_note(tokenizer, is_causal=bool(features_of(config.model).causal))
    purpose = purpose_of(config.model)._asdict()
    return (
        f"{HEADER.format(**purpose)}\n# {_cell(config.model.name)}\n{USE.format(**purpose)}{note}"
        f"\n| fact | value |\n|---|---|\n{rows}"
    )


def _frame_note(tokenizer: Tokenizer, *, is_causal: bool) -> str:
    """What a user must put around texts, if the tokenizer does not; nothing if it does."""
    eos = tokenizer.eos
    if tokenizer.frame != frame_of_ends(eos):
        return ""
    where = "after each text" if is_causal else "before and after each text"
    padding = (
        "Texts of a batch are padded with another id, which `model.config.pad_token_id` must be:\n"
        "the label is that of the last token that is none.\n"
    )
    return (
        f"\nThe model has learnt texts with the id {eos} {where}: add it to the tokenizer's ids.\n"
        + (padding if is_causal else "")
    )


def _of_training(
    run: RunDirectory, config: Config, step: int, metadata: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What the run's logs and the checkpoint say."""
    # A task that a program gave is not here when another one exports the run.
    task = dict(named_tasks()).get(task_name(config))
    term = "token" if task is None else task.term
    per_term = f"{'nats' if task is None else task.unit} per {term}"
    steps = [record for record in run.metrics() if record.step <= step]
    events = [event for event in run.events() if event.get("step", 0) <= step]
    evaluations = [event for event in events if event.get("event") == "eval"]
    metrics = dict((evaluations[-1].get("metrics") or {}) if evaluations else {})
    held_out = evaluations[-1].get("loss") if evaluations else None
    loss = steps[-1].loss if steps else None
    if config.model.labelled != "replacement" and steps and GENERATOR_LOSS in steps[-1].metrics:
        # Of a generator the run says this alone.
        loss, held_out = steps[-1].metrics[GENERATOR_LOSS], metrics.get(GENERATOR_LOSS)
        metrics = {}
    elif steps:
        yield f"{term}s seen", f"{sum(record.tokens for record in steps):,}"
    if loss is not None:
        yield "training loss", f"{loss:.4f} {per_term}, of step {steps[-1].step:,}"
    if isinstance(held_out, float):
        after = f"after step {evaluations[-1]['step']:,}"
        yield "held-out loss", f"{held_out:.4f} {per_term}, {after}"
        for name, value in metrics.items():
            if isinstance(value, float):
                yield f"held-out {name}", f"{value:.4f}, {after}"
    named = ", ".join(_last_part(source) for source in config.data.sources)
    yield "data", NAME if given_in_python(config.data.sources) else named
    if config.model.image_size:
        size = f"{config.model.image_size} x {config.model.image_size}"
        yield "images", f"{size} pixels of {counted(config.model.num_channels, 'channel')}"
    if config.model.frames:
        seconds = config.model.frames * COLUMNS_PER_FRAME * STEP / SAMPLE_RATE
        yield "recordings", f"{seconds:g} s, {config.model.mel_bins} mel bands"
    lengths = {phase.seq_len for phase in phases_of(config) if phase.steps_before < max(1, step)}
    learned = features_of(config.model).positions == "learned"
    unseen = ", so that later positions are untrained" if learned else ""
    yield (
        "longest sequence",
        f"{max(lengths):,} tokens" + (unseen if max(lengths) < config.model.max_length else ""),
    )
    if (weights := weights_in_run(run)) is not None:
        yield "first parameters", _source(weights)
    try:
        yield "plan", Plan.from_json(metadata["plan"]).describe()
    except (KeyError, OptimusError):
        return


def _tokenizer_text(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        return "the bytes of UTF-8; id 256 ends a document"
    return f"documents end with {tokenizer.end.partition(' (')[0]}"


def _source(weights: str) -> str:
    """Where the parameters came from: a seed, a model on the hub, or the last part of a path."""
    is_named = weights.startswith("seed ") or HubModel.parse(weights) is not None
    return weights if is_named else _last_part(weights)


def _last_part(path: str) -> str:
    """A path or URL without its folders, and without what may follow a URL's `?`."""
    path = path.partition("?")[0] if "://" in path else path
    return path.rstrip("/").rpartition("/")[2] or path


def _cell(text: str) -> str:
    """A text within a table: in one line, and without meaning as Markdown."""
    return re.sub(r"([\\`*_|<>\[\]#])", r"\\\1", " ".join(text.split()))


def preprocessor_config(model: ModelConfig) -> str:
    """The preprocessor_config.json: how images or recordings become what the model reads."""
    if model.frames:
        samples = model.frames * COLUMNS_PER_FRAME * STEP
        seconds = samples / SAMPLE_RATE
        sound = {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": model.mel_bins,
            "sampling_rate": SAMPLE_RATE,
            "hop_length": STEP,
            "n_fft": WINDOW,
            "chunk_length": int(seconds) if seconds == int(seconds) else seconds,
            "n_samples": samples,
            "nb_max_frames": model.frames * COLUMNS_PER_FRAME,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
        }
        return json.dumps(sound, indent=2) + "\n"
    mean, std = model.normalisation
    square = {"height": model.image_size, "width": model.image_size}
    is_cropped = model.keep_aspect or model.resized > model.image_size
    # ViTImageProcessor crops nothing, BitImageProcessor scales the shorter side, and
    # DeiTImageProcessor both sides.
    kind = "ViT"
    if is_cropped:
        kind = "Bit" if model.keep_aspect else "DeiT"
    config = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": model.resized}
        if model.keep_aspect
        else {"height": model.resized, "width": model.resized},
        **({"do_center_crop": True, "crop_size": square} if is_cropped else {}),
        "resample": get_args(Resample).index(model.resample),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    return json.dumps(config, indent=2) + "\n"


def generation_config(model: ModelConfig, tokenizer: Tokenizer, data: DataConfig) -> str:
    """The generation_config.json: where a text ends, and beside an encoder, where it begins and in
    which language. Rows of a batch are filled up with eos.
    """
    tokens: dict[str, Any] = {"eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.eos}
    if model.frames:
        tokens |= {
            "decoder_start_token_id": start_of(tokenizer),
            "max_length": model.max_length - model.frames,
            "return_timestamps": False,
            **_language(tokenizer, data),
        }
    return json.dumps(tokens, indent=2) + "\n"


def _language(tokenizer: Tokenizer, data: DataConfig) -> dict[str, Any]:
    """What a text begins with by default, where the tokenizer has tokens of languages, and those
    that may be asked for.
    """
    language = f"<|{data.language}|>"
    if tokenizer.token_id(language) is None:
        return {"is_multilingual": False}
    languages = [token for token in tokenizer.special_tokens if LANGUAGE.fullmatch(token)]
    tasks = {task: tokenizer.token_id(f"<|{task}|>") for task in get_args(SpeechTask)}
    return {
        "is_multilingual": True,
        "language": language,
        "task": data.speech_task,
        "lang_to_id": {token: tokenizer.token_id(token) for token in sorted(languages)},
        "task_to_id": {task: token for task, token in tasks.items() if token is not None},
        "no_timestamps_token_id": tokenizer.token_id(NO_TIMESTAMPS),
    }
