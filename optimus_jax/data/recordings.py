"""Recordings and their texts, and the examples that are made of them.

A source is a folder, or a Parquet or Arrow file with columns of recordings (bytes, or Hugging
Face's objects with `bytes`) and of texts. In a folder the texts are in metadata.csv or
metadata.jsonl, with the field `file_name`, or in a .txt file beside each recording.

An example is a recording: a token for each frame, then the text. The text begins with the tokens
that ask for it (`prompt_of`) and ends with eos; all after the first token counts. Recordings and
texts that are longer than the model reads are left out.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.config.model import COLUMNS_PER_FRAME, PATCH_TOKEN
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.folders import walk
from optimus_jax.data.named_files import (
    TABLES,
    EncodedFile,
    FileExamples,
    NamedFile,
    in_threads,
    rows_of_table,
)
from optimus_jax.data.spectrogram import SAMPLE_RATE, STEP, log_mel
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.errors import DataError, counted, explain

SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff")
"""Of recordings in folders."""
METADATA = ("metadata.csv", "metadata.jsonl")
"""Files with texts of a folder's recordings."""
FILE_NAME = "file_name"
"""Field of these files."""
START, NO_TIMESTAMPS = "<|startoftranscript|>", "<|notimestamps|>"
"""Tokens of published models."""


class StoredRecording(NamedTuple):
    """An encoded recording and its text."""

    name: str
    """Where it is, for messages and for its hash: a path within its folder, or a row of a file."""
    place: EncodedFile
    text: str


class Transcript(NamedTuple):
    """A recording with the tokens of its text."""

    recording: StoredRecording
    tokens: np.ndarray
    """int32, with those that ask for the text, and eos."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recordings(FileExamples[Transcript]):
    """Recordings to cut examples from."""

    what = "recordings"

    @staticmethod
    def file_of(item: Transcript) -> NamedFile:
        recording = item.recording
        return NamedFile(recording.name, recording.text, recording.place)

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """The recordings numbered `examples`; patches are float32, columns of the spectrogram, and
        those of text 0."""
        frames, shape = self.model.frames, (len(examples), seq_len)
        tokens, targets = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        tokens[:, :frames], loss_mask = PATCH_TOKEN, np.zeros(shape, bool)
        values = np.zeros((*shape, self.model.patch_values), np.float32)
        for row, example in enumerate(examples.tolist()):
            written = self.items[example].tokens
            text = slice(frames, frames + len(written) - 1)
            tokens[row, text], targets[row, text] = written[:-1], written[1:]
            loss_mask[row, text] = True
        values[:, :frames] = in_threads(self._frames, examples.tolist())
        places = np.concatenate([np.arange(frames), np.arange(seq_len - frames)])
        return {
            "tokens": tokens,
            "targets": targets,
            "positions": np.broadcast_to(places.astype(np.int32), shape).copy(),
            "segments": np.zeros(shape, np.int32),
            "loss_mask": loss_mask,
            "patches": values,
        }

    def _frames(self, example: int) -> np.ndarray:
        return frames_of(samples_of(self.items[example].recording), self.model)


def frames_of(samples: np.ndarray, model: ModelConfig) -> np.ndarray:
    """float32 [F, P]: what a model reads of a recording, one channel at SAMPLE_RATE."""
    columns = log_mel(samples, model.mel_bins, COLUMNS_PER_FRAME * model.frames)
    return columns.reshape(model.frames, model.patch_values)


def most_samples(model: ModelConfig) -> int:
    """Samples of the longest recording that a model reads."""
    return model.frames * COLUMNS_PER_FRAME * STEP


def samples_of(recording: StoredRecording) -> np.ndarray:
    """Samples of a recording, float32 [S]: the mean of its channels at SAMPLE_RATE.

    Raises:
      DataError: it is damaged.
    """
    import soundfile
    import soxr

    try:
        samples, rate = soundfile.read(_file(recording), dtype="float32", always_2d=True)
    except (OSError, ValueError, soundfile.SoundFileError) as error:
        raise _unreadable(recording, error) from error
    mono = samples.mean(1)
    return mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE)


def _num_samples(recording: StoredRecording) -> int:
    """Number of samples at SAMPLE_RATE, by what the file says of itself."""
    import soundfile

    try:
        info = soundfile.info(_file(recording))
    except (OSError, ValueError, soundfile.SoundFileError) as error:
        raise _unreadable(recording, error) from error
    return round(info.frames * SAMPLE_RATE / info.samplerate)


def _file(recording: StoredRecording) -> Path | io.BytesIO:
    place = recording.place
    return io.BytesIO(place) if isinstance(place, bytes) else place


def _unreadable(recording: StoredRecording, error: Exception) -> DataError:
    return DataError(
        explain(
            f"a recording cannot be read: {recording.name}",
            given=f"{type(error).__name__}: {error}",
            do="remove the file, or replace it by a whole one",
        )
    )


def start_of(tokenizer: Tokenizer) -> int:
    """The token with which a text begins."""
    start = tokenizer.token_id(START)
    return tokenizer.eos if start is None else start


def prompt_of(
    tokenizer: Tokenizer, config: DataConfig, *, names_language: bool = True
) -> list[int]:
    """The tokens that ask a model for a text: those of published models that the tokenizer has, for
    start, language, task and no timestamps; or eos, if it does not have the first.

    Args:
      names_language: whether those of language and task are among them.
    Raises DataError for a language without a token, if there are others with one.
    """
    if (start := tokenizer.token_id(START)) is None:
        return [tokenizer.eos]
    without = [start, *(n for n in [tokenizer.token_id(NO_TIMESTAMPS)] if n is not None)]
    if not names_language:
        return without
    language, task = (
        tokenizer.token_id(f"<|{name}|>") for name in (config.language, config.speech_task)
    )
    if language is None and tokenizer.token_id("<|en|>") is not None:
        raise DataError(
            explain(
                "the tokenizer has no token of this language",
                given=f"data.language={config.language}",
                do="give the language's code, such as en, de or fr",
            )
        )
    if language is None:
        return without
    return [start, language, *([] if task is None else [task]), *without[1:]]


def read_recordings(
    sources: Sequence[str],
    model: ModelConfig,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    seq_len: int,
) -> tuple[Recordings, list[str]]:
    """The recordings of folders and tables, and sentences about those left out.

    Args:
      config: names fields, the language and the task.
      seq_len: tokens of the shortest examples, frames included.
    Raises:
      DataError: a library is missing, a source has no recordings with texts, or all of them are too
        long.
    """
    check_libraries(" ".join(sources))
    name, longest = " ".join(sources), seq_len - model.frames
    found = [each for source in sources for each in recordings_in(source, config)]
    prompt = prompt_of(tokenizer, config)
    texts = tokenizer.encode_batch([each.text for each in found])
    kept, long_sound, long_text = [], 0, 0
    for recording, text in zip(found, texts, strict=True):
        tokens = np.array([*prompt, *text.tolist(), tokenizer.eos], np.int32)
        if _num_samples(recording) > most_samples(model):
            long_sound += 1
        elif len(tokens) - 1 > longest:
            long_text += 1
        else:
            kept.append(Transcript(recording, tokens))
    seconds = most_samples(model) / SAMPLE_RATE
    notes = [
        f"{counted(number, 'recording')} left out: {why}"
        for number, why in (
            (long_sound, f"longer than the {seconds:g} s that {model.name} reads"),
            (long_text, f"texts of more than {longest} tokens"),
        )
        if number
    ]
    if not kept:
        raise DataError(
            explain(
                f"no recording fits {model.name}",
                given=f"{name}: {'; '.join(notes)}",
                do="cut recordings into shorter ones, or name a model that reads more",
            )
        )
    return Recordings(name=name, items=kept, model=model), notes


def check_libraries(given: str) -> None:
    """Raise DataError if soundfile or soxr are missing."""
    try:
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise DataError(
            explain(
                "recordings need soundfile and soxr, which are not installed",
                given=f"{given}: {error}",
                do="pip install 'optimus-jax[sound]'",
            )
        ) from error


def recordings_in(
    source: str, config: DataConfig, *, needs_text: bool = True
) -> Iterator[StoredRecording]:
    """The recordings of a folder, a table or a file.

    Args:
      needs_text: whether recordings without a text are passed over; otherwise theirs is empty.
    Raises:
      DataError: there are none.
    """
    path, is_empty = Path(source), True
    if path.suffix.lower() in SUFFIXES and path.is_file() and not needs_text:
        is_empty = False
        yield StoredRecording(path.name, path, "")
    elif path.suffix in TABLES:
        columns = [config.audio_field, config.text_field]
        for name, data, (text,) in rows_of_table(path, columns, "recordings"):
            if isinstance(text, str):
                is_empty = False
                yield StoredRecording(name, data, text)
    elif path.is_dir():
        for folder, _, names in walk(path):
            texts = _texts_in(folder, names, config)
            for name in names:
                file = folder / name
                if file.suffix.lower() in SUFFIXES and (name in texts or not needs_text):
                    is_empty = False
                    text = texts.get(name, "")
                    yield StoredRecording(str(file.relative_to(path)), file, text)
    if is_empty:
        raise DataError(
            explain(
                f"{source} holds no recordings" + (" with texts" if needs_text else ""),
                given=f"files with {', '.join(SUFFIXES)}, named in {' or '.join(METADATA)} or with"
                f" a .txt file beside each, or tables with columns {config.audio_field} and"
                f" {config.text_field}, are read",
                do=f"give a folder of recordings and a metadata.csv with {FILE_NAME} and"
                f" {config.text_field}",
            )
        )


def _texts_in(folder: Path, names: Sequence[str], config: DataConfig) -> dict[str, str]:
    """Texts of the recordings in a folder, by the names of their files."""
    texts = {}
    for name in names:
        if name in METADATA:
            texts |= _metadata(folder / name, config.text_field)
        elif Path(name).suffix.lower() in SUFFIXES:
            beside = (folder / name).with_suffix(".txt")
            if beside.name in names:
                texts.setdefault(name, beside.read_text(errors="replace").strip())
    return texts


def _metadata(path: Path, text_field: str) -> dict[str, str]:
    try:
        with path.open(newline="") as file:
            rows = (
                list(csv.DictReader(file))
                if path.suffix == ".csv"
                else [json.loads(line) for line in file if line.strip()]
            )
        return {str(row[FILE_NAME]): str(row[text_field]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(
            explain(
                "the texts of recordings cannot be read",
                given=f"{path}: {type(error).__name__}: {error}",
                do=f"give every recording {FILE_NAME} and {text_field}, or name the latter with"
                " --set data.text_field=NAME",
            )
        ) from error
