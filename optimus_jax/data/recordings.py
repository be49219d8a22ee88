"""Recordings and their texts, and the examples that are made of them.

A source is a folder, or a Parquet or Arrow file with columns of recordings (bytes, or Hugging
Face's objects with `bytes`) and of texts. In a folder the texts are in metadata.csv or
metadata.jsonl, with the field `file_name`, or in a .txt file beside each recording. A tar file has
WebDataset's names (`0001.flac`, `0001.txt`). A folder without recordings may have such files.

An example is a recording: a token for each frame, then the text. The text begins with the tokens
that ask for it (`prompt_of`) and ends with eos; all after the first token counts. Recordings and
texts that are longer than the model reads are left out.
"""

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.config.model import COLUMNS_PER_FRAME, PATCH_TOKEN
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.encoded_files import EncodedFile, opened
from optimus_jax.data.folders import walk
from optimus_jax.data.named_files import (
    SHARDS,
    TABLES,
    FileExamples,
    NamedFile,
    files_of,
    in_threads,
    is_shard,
    rows_of_table,
    samples_in_shard,
)
from optimus_jax.data.spectrogram import SAMPLE_RATE, STEP, log_mel
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.errors import DataError, counted, explain

SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff")
"""Of recordings in folders."""
METADATA = ("metadata.csv", "metadata.jsonl")
"""Files with texts of a folder's recordings."""
TEXT_PART = "txt"
"""Part of a sample in a tar file that has its text."""
FILE_NAME = "file_name"
"""Field of these files."""
NO_LANGUAGE = "none"
"""In the place of a language's code: texts do not name it, as those of models of English alone."""
START, NO_TIMESTAMPS = "<|startoftranscript|>", "<|notimestamps|>"
"""Tokens of published models."""
TextUse = Literal["needed", "optional", "unread"]
"""Whether a recording's text is learnt, compared if there is one, or not read."""


class StoredRecording(NamedTuple):
    """An encoded recording and its text."""

    name: str
    """Where it is, for messages and for its hash: a path within its folder, or a row of a file."""
    place: EncodedFile
    text: str | None
    """None: it has none."""


class Transcript(NamedTuple):
    """A recording with the tokens of its text."""

    recording: StoredRecording
    tokens: np.ndarray
    """int32, with those that ask for the text, and eos."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recordings(FileExamples[Transcript]):
    """Recordings to cut examples from."""

    what = "recordings"
    num_prompt_tokens: int = 1
    """Tokens that ask for a text (`prompt_of`)."""

    @staticmethod
    def file_of(item: Transcript) -> NamedFile:
        recording = item.recording
        return NamedFile(recording.name, recording.text or "", recording.place)

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

    def texts(self, examples: Iterable[int]) -> list[str]:
        """What is said in the recordings with these numbers."""
        return [self.items[example].recording.text or "" for example in examples]

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
        samples, rate = soundfile.read(opened(recording.place), dtype="float32", always_2d=True)
    except (OSError, ValueError, soundfile.SoundFileError) as error:
        raise _unreadable(recording, error) from error
    mono = samples.mean(1)
    return mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE)


def _num_samples(recording: StoredRecording) -> int:
    """Number of samples at SAMPLE_RATE, by what the file says of itself."""
    import soundfile

    try:
        info = soundfile.info(opened(recording.place))
    except (OSError, ValueError, soundfile.SoundFileError) as error:
        raise _unreadable(recording, error) from error
    return round(info.frames * SAMPLE_RATE / info.samplerate)


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


def lacks_language(tokenizer: Tokenizer, language: str) -> bool:
    """Whether a tokenizer has tokens of languages, but none of this one."""
    both = (tokenizer.token_id(f"<|{code}|>") for code in (language, "en"))
    return [each is None for each in both] == [True, False]


def names_no_language(generation: Mapping[str, Any]) -> bool:
    """Whether a generation_config.json is that of a model of English alone. Its tokenizer may have
    tokens of languages, but its texts name none."""
    return generation.get("is_multilingual") is False


def prompt_of(tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """The tokens that ask a model for a text: those of published models that the tokenizer has, for
    start, language, task and no timestamps; or eos, if it does not have the first. Those of
    language and task are left out if the language is NO_LANGUAGE.

    Raises DataError for a language without a token, if there are others with one.
    """
    if (start := tokenizer.token_id(START)) is None:
        return [tokenizer.eos]
    without = [start, *(n for n in [tokenizer.token_id(NO_TIMESTAMPS)] if n is not None)]
    if config.language == NO_LANGUAGE:
        return without
    language, task = (
        tokenizer.token_id(f"<|{name}|>") for name in (config.language, config.speech_task)
    )
    if lacks_language(tokenizer, config.language):
        raise DataError(
            explain(
                "the tokenizer has no token of this language",
                given=f"data.language={config.language}",
                do=f"give the language's code, such as en, de or fr; or {NO_LANGUAGE}",
            )
        )
    if language is None:
        return without
    return [start, language, *([] if task is None else [task]), *without[1:]]


def prompt_text(tokenizer: Tokenizer, config: DataConfig) -> str:
    """What `prompt_of` asks a model for, in words; empty if the tokenizer cannot ask.

    Raises DataError as `prompt_of` does.
    """
    if tokenizer.token_id(START) is None:
        return ""
    asked = prompt_of(tokenizer, config)
    has_language, has_task, is_plain = (
        tokenizer.token_id(token) in asked
        for token in (f"<|{config.language}|>", f"<|{config.speech_task}|>", NO_TIMESTAMPS)
    )
    text = "asked for texts"
    if has_language:
        task = config.speech_task if has_task else "write"
        text = f"asked to {task} in {config.language}"
        if task == "translate":
            text = f"asked to translate from {config.language} to English"
    return text + (", without timestamps" if is_plain else "")


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
    present, notes = [], []
    for source in sources:
        recordings, left_out = recordings_in(source, config)
        present += recordings
        notes += left_out
    found = [each for each in present if (each.text or "").strip()]
    if not found:
        raise DataError(
            explain(
                f"{name} holds no recordings with texts",
                given=f"{counted(len(present), 'recording')}, none of them named in"
                f" {' or '.join(METADATA)}, with a .txt file beside it, or with a text in the"
                f" column {config.text_field}",
                do=f"give a folder of recordings and a metadata.csv with {FILE_NAME} and"
                f" {config.text_field}, or name the latter with --set data.text_field=NAME",
            )
        )
    prompt = prompt_of(tokenizer, config)
    texts = tokenizer.encode_batch([each.text or "" for each in found])
    kept, empty, long_sound, long_text = [], 0, 0, 0
    for recording, text in zip(found, texts, strict=True):
        tokens = np.array([*prompt, *text.tolist(), tokenizer.eos], np.int32)
        num_samples = _num_samples(recording)
        if num_samples == 0:
            empty += 1
        elif num_samples > most_samples(model):
            long_sound += 1
        elif len(tokens) - 1 > longest:
            long_text += 1
        else:
            kept.append(Transcript(recording, tokens))
    seconds = most_samples(model) / SAMPLE_RATE
    notes += [
        f"{counted(number, 'recording')} left out: {why}"
        for number, why in (
            (long_sound, f"longer than the {seconds:g} s that {model.name} reads"),
            (long_text, f"texts of more than {longest} tokens"),
            (len(present) - len(found), "without a text"),
            (empty, "without a sound"),
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
    whole = Recordings(name=name, items=kept, model=model, num_prompt_tokens=len(prompt))
    return whole, notes


def before_eos(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Tokens [T] up to the first eos; all if there is none."""
    return tokens[: np.argmax(tokens == eos)] if eos in tokens else tokens


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


def check_exists(source: str, config: DataConfig) -> None:
    """Raise DataError if there is no such file or folder."""
    if not Path(source).exists():
        raise _no_recordings(f"there is no {source}", config)


def _no_recordings(what: str, config: DataConfig) -> DataError:
    return DataError(
        explain(
            what,
            given=f"files with {', '.join(SUFFIXES)}, tables with columns {config.audio_field} and"
            f" {config.text_field}, and {', '.join(SHARDS)} files, are read",
            do="give a recording, a folder of them, or a table, whose columns are named by --set"
            " data.audio_field=NAME --set data.text_field=NAME",
        )
    )


def recordings_in(
    source: str, config: DataConfig, *, texts: TextUse = "needed"
) -> tuple[list[StoredRecording], list[str]]:
    """The recordings of a folder, a table or a file, with their texts if these have any, and
    sentences about what is left out.

    Raises DataError if there are none; or if metadata has no texts, and these are needed.
    """
    check_exists(source, config)
    path = Path(source)
    files, notes = files_of(path, SUFFIXES, _is_text)
    written, found = dict[Path, str](), list[StoredRecording]()
    if texts != "unread" and any(_is_recording(file) for file in files):
        written, of_texts = _texts_of(path, config, texts)
        notes += of_texts
    for file in files:
        inside = file.relative_to(path).parent
        if file.suffix in TABLES:
            columns = [config.audio_field, config.text_field]
            for name, data, (text,) in rows_of_table(file, columns, "recordings"):
                said = text if isinstance(text, str) else None
                found.append(StoredRecording(str(inside / name), data, said))
        elif is_shard(file):
            for name, parts, beside in samples_in_shard(file, "recordings", texts=(TEXT_PART,)):
                data = next((parts[each[1:]] for each in SUFFIXES if each[1:] in parts), None)
                if data is not None:
                    said = None
                    if TEXT_PART in beside:
                        said = beside[TEXT_PART].decode("utf-8-sig", "replace").strip()
                    found.append(StoredRecording(str(inside / name), data, said))
        elif _is_recording(file):
            name = str(inside / file.name)
            found.append(StoredRecording(name, file, written.get(_plain(file))))
    if not found:
        raise _no_recordings(f"{source} holds no recordings", config)
    return found, notes


def _is_recording(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and file.is_file()


def _is_text(file: Path) -> bool:
    """Whether a file beside recordings may have their texts."""
    return file.name in METADATA or file.suffix == f".{TEXT_PART}"


def _texts_of(source: Path, config: DataConfig, use: TextUse) -> tuple[dict[Path, str], list[str]]:
    """Texts of recordings in a folder, or of one, by their absolute paths: what metadata says, else
    a file beside each. And sentences about metadata that is left out.

    Raises DataError if metadata cannot be read, and texts are needed.
    """
    if source.is_dir():
        folders = walk(source)
    else:
        folders = [(source.parent, [], [source.name, source.with_suffix(".txt").name])]
    beside, named, present = dict[Path, str](), dict[Path, str](), set[Path]()
    notes = []
    for folder, _, names in folders:
        for file in (folder / name for name in names):
            if file.name in METADATA:
                try:
                    texts = _metadata(file, config.text_field)
                except _METADATA_ERRORS as error:
                    why = f"{type(error).__name__}: {error}"
                    if use == "needed":
                        raise _no_texts(f"{file}: {why}", config) from error
                    notes.append(
                        f"texts in {file} left out ({why}): --text-field names their column"
                    )
                    continue
                named |= {_plain(folder / name): text for name, text in texts.items()}
            elif file.suffix.lower() in SUFFIXES:
                present.add(_plain(file))
                text = file.with_suffix(".txt")
                if text.name in names and text.is_file():
                    content = text.read_text(encoding="utf-8-sig", errors="replace")
                    beside[_plain(file)] = content.strip()
    if absent := [str(path) for path in named if path not in present]:
        notes.append(
            f"{counted(len(absent), 'row')} of metadata left out: there is no {absent[0]}"
            + (", for example" if len(absent) > 1 else "")
        )
    return beside | named, notes


def _plain(path: Path) -> Path:
    """An absolute path without `..`."""
    return Path(os.path.normpath(path.absolute()))


_METADATA_ERRORS = (OSError, ValueError, KeyError, TypeError, csv.Error)
"""What damaged metadata raises."""


def _metadata(path: Path, text_field: str) -> dict[str, str]:
    """Texts in a file of metadata, by the names that it has for recordings. Raises
    _METADATA_ERRORS.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = (
            list(csv.DictReader(file))
            if path.suffix == ".csv"
            else [json.loads(line) for line in file if line.strip()]
        )
    found = {str(row[FILE_NAME]): row[text_field] for row in rows}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _no_texts(given: str, config: DataConfig) -> DataError:
    return DataError(
        explain(
            "the texts of recordings cannot be read",
            given=given,
            do=f"give every recording {FILE_NAME} and {config.text_field}, or name the latter with"
            " --set data.text_field=NAME",
        )
    )
