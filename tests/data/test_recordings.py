"""Recordings of folders and tables, and the examples that are made of them."""

import json
import shutil
import tarfile

import numpy as np
import pytest

from optimus_jax.config import DataConfig
from optimus_jax.config.model import PATCH_TOKEN
from optimus_jax.config.presets import model_preset
from optimus_jax.data.dataset import load_data
from optimus_jax.data.encoded_files import FileRange
from optimus_jax.data.recordings import frames_of, most_samples, prompt_of, recordings_in
from optimus_jax.data.spectrogram import SAMPLE_RATE
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import DataError

MODEL = model_preset("whisper-nano")
soundfile = pytest.importorskip("soundfile")
EOS = ByteTokenizer.eos


def samples(number: int, seconds: float = 0.5, rate: int = SAMPLE_RATE) -> np.ndarray:
    """A tone, different for each number."""
    time = np.arange(int(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * (200 + 100 * number) * time)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    """Four recordings, with texts in a file beside each or in metadata.csv, and one without."""
    whole = tmp_path / "speech"
    (whole / "more").mkdir(parents=True)
    for number, text in enumerate(("one", "two")):
        soundfile.write(whole / f"{number}.wav", samples(number), SAMPLE_RATE)
        (whole / f"{number}.txt").write_text(f"{text}\n")
    for number in (2, 3):
        soundfile.write(whole / "more" / f"{number}.flac", samples(number), SAMPLE_RATE)
    (whole / "more" / "metadata.csv").write_text("file_name,text\n2.flac,three\n3.flac,four\n")
    soundfile.write(whole / "silent.wav", samples(9), SAMPLE_RATE)
    return whole


def load(*sources, tokenizer=None, **settings):
    return load_data(
        DataConfig(**{"sources": tuple(map(str, sources)), "eval_fraction": 0.0, **settings}),
        seq_len=MODEL.max_length,
        vocab_size=MODEL.vocab_size,
        model_name=MODEL.name,
        kind="recordings",
        tokenizer=tokenizer,
        values_for=MODEL,
    )


def cut(data, *examples, seq_len=MODEL.max_length):
    return data.train.cut_examples(np.array(examples), seq_len=seq_len, respect_documents=True)


def texts_of(data):
    return {each.recording.name: each.recording.text for each in data.train.items}


def test_an_example_is_frames_and_then_the_text(folder):
    data = load(folder)
    assert texts_of(data) == {
        "0.wav": "one",
        "1.wav": "two",
        "more/2.flac": "three",
        "more/3.flac": "four",
    }
    batch = cut(data, 2, 0)
    frames, written = MODEL.frames, [EOS, *b"three", EOS]
    assert (batch["tokens"][:, :frames] == PATCH_TOKEN).all()
    text = slice(frames, frames + len(written) - 1)
    assert batch["tokens"][0, text].tolist() == written[:-1]
    assert batch["targets"][0, text].tolist() == written[1:]
    assert batch["loss_mask"].sum(1).tolist() == [len("three") + 1, len("one") + 1]
    assert batch["loss_mask"][0, text].all()
    assert batch["positions"][0].tolist() == [*range(frames), *range(MODEL.max_length - frames)]
    values = batch["patches"]
    assert values.dtype == np.float32
    assert not values[:, frames:].any()
    # 16 bits of a sample are kept in a file.
    np.testing.assert_allclose(values[1, :frames], frames_of(samples(0), MODEL), atol=0.05)


def test_recordings_are_of_one_channel_at_the_models_rate(tmp_path):
    high = samples(3, rate=44_100)
    soundfile.write(tmp_path / "0.wav", np.stack([high, 0 * high], 1), 44_100)
    (tmp_path / "0.txt").write_text("four")
    values = cut(load(tmp_path), 0)["patches"][0, : MODEL.frames]
    # The same tone, half as loud; what is above half the lower rate is gone.
    expected = frames_of(samples(3) / 2, MODEL)
    assert np.abs(values - expected)[:20, :40].max() < 0.1


def test_tables_hold_recordings_as_bytes(folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"audio": {"bytes": (folder / f"{number}.wav").read_bytes()}, "sentence": text}
        for number, text in enumerate(("one", "two"))
    ]
    rows.append({"audio": {"bytes": None}, "sentence": "absent"})
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "speech.parquet")
    data = load(tmp_path / "speech.parquet", text_field="sentence")
    assert list(texts_of(data).values()) == ["one", "two"]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "speech2.parquet")
    (tmp_path / "tables").mkdir()
    for name in ("speech.parquet", "speech2.parquet"):
        (tmp_path / name).rename(tmp_path / "tables" / name)
    data = load(tmp_path / "tables", text_field="sentence")
    assert list(texts_of(data).values()) == ["one", "two", "one"]
    both = cut(data, 0, 1)["patches"]
    np.testing.assert_array_equal(both, cut(load(folder), 0, 1)["patches"])


def test_what_is_longer_than_the_model_reads_is_left_out_and_counted(folder):
    long = samples(1, seconds=most_samples(MODEL) / SAMPLE_RATE + 0.1)
    soundfile.write(folder / "long.wav", long, SAMPLE_RATE)
    (folder / "long.txt").write_text("too long")
    (folder / "0.txt").write_text("x" * 40)
    data = load(folder)
    assert {*texts_of(data)} == {"1.wav", "more/2.flac", "more/3.flac"}
    assert "1 recording left out: longer than the 2 s" in data.notes[0]
    assert "1 recording left out: texts of more than 28 tokens" in data.notes[1]
    for name in ("1", "more/2", "more/3"):
        for suffix in ("wav", "flac"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    with pytest.raises(DataError, match="no recording fits whisper-nano"):
        load(folder)


def test_what_has_no_text_or_no_sound_is_left_out_and_counted(folder):
    (folder / "0.txt").write_text(" \n")
    soundfile.write(folder / "1.wav", samples(1)[:0], SAMPLE_RATE)
    data = load(folder)
    assert {*texts_of(data)} == {"more/2.flac", "more/3.flac"}
    assert data.notes[:2] == (
        "2 recordings left out: without a text",
        "1 recording left out: without a sound",
    )


def test_held_out_recordings_depend_on_their_names_alone(folder):
    data = load(folder, eval_fraction=0.4)
    held_out = {each.recording.name for each in data.held_out.items}
    soundfile.write(folder / "zz.wav", samples(7), SAMPLE_RATE)
    (folder / "zz.txt").write_text("more")
    more = load(folder, eval_fraction=0.4)
    now = {each.recording.name for each in more.held_out.items}
    assert held_out
    assert now - {"zz.wav"} <= held_out
    assert not held_out & {*texts_of(data)}
    assert more.identity["content"] != data.identity["content"]


def test_a_text_begins_with_the_tokens_of_its_language_and_task():
    class Published(ByteTokenizer):
        known = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|notimestamps|>")

        def token_id(self, token):
            return 300 + self.known.index(token) if token in self.known else None

    tokenizer = Published()
    german = DataConfig(language="de", speech_task="translate")
    assert prompt_of(tokenizer, german) == [300, 302, 303, 304]
    assert prompt_of(ByteTokenizer(), german) == [EOS]
    assert prompt_of(tokenizer, DataConfig(language="none")) == [300, 304]
    with pytest.raises(DataError, match="no token of this language"):
        prompt_of(tokenizer, DataConfig(language="xx"))
    tokenizer.known = ("<|startoftranscript|>", "<|notimestamps|>")
    assert prompt_of(tokenizer, german) == [300, 301], "a model of one language"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.csv", "file,text\n0.wav,one\n", "the texts of recordings cannot be read"),
        ("metadata.jsonl", "[1]\n", "the texts of recordings cannot be read"),
    ],
)
def test_metadata_without_names_is_refused(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load(folder)


def test_what_is_no_recording_is_said(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no recordings\n"):
        load(tmp_path / "empty")
    with pytest.raises(DataError, match=r"there is no .*/nowhere"):
        load(tmp_path / "nowhere")
    shutil.copy(folder / "silent.wav", tmp_path / "empty")
    with pytest.raises(DataError, match="holds no recordings with texts"):
        load(tmp_path / "empty")
    (folder / "0.wav").write_bytes(b"RIFF and no more")
    with pytest.raises(DataError, match=r"a recording cannot be read: 0\.wav"):
        load(folder)


def test_metadata_names_recordings_in_folders_below(folder):
    rows = "file_name,text\nmore/2.flac,zwei\nsilent.wav\n"
    (folder / "metadata.csv").write_text(rows, encoding="utf-8-sig")
    data = load(folder)
    assert texts_of(data)["more/2.flac"] == "three", "what is nearer"
    (folder / "more" / "metadata.csv").unlink()
    data = load(folder)
    assert texts_of(data)["more/2.flac"] == "zwei"
    assert not {"silent.wav", "more/3.flac"} & {*texts_of(data)}
    assert any("2 recordings left out: without a text" in note for note in data.notes)


def test_tar_files_have_recordings_and_their_texts(folder, tmp_path):
    with tarfile.open(tmp_path / "speech.tar", "w") as shard:
        for name in ("0.wav", "0.txt", "1.wav"):
            shard.add(folder / name, f"train/{name}")
    data = load(tmp_path / "speech.tar")
    assert isinstance(data.train.items[0].recording.place, FileRange)
    assert texts_of(data) == {"speech.tar, train/0": "one"}
    np.testing.assert_array_equal(cut(data, 0)["patches"], cut(load(folder), 0)["patches"])


def test_a_table_need_not_have_texts(folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"audio": (folder / "0.wav").read_bytes()}]
    table = pyarrow.Table.from_pylist(rows)
    with (
        pyarrow.OSFile(str(tmp_path / "speech.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as stream,
    ):
        stream.write_table(table)
    [found], _ = recordings_in(str(tmp_path / "speech.arrow"), DataConfig())
    assert found.text is None
    with pytest.raises(DataError, match="holds no recordings with texts"):
        load(tmp_path / "speech.arrow")


def test_what_is_left_out_of_a_folder_is_counted(folder):
    (folder / "4.m4a").write_bytes(b"")
    (folder / "5.webm").write_bytes(b"")
    rows = "file_name,text\n0.wav,one\n4.m4a,four\nno.wav,five\n"
    (folder / "metadata.csv").write_text(rows)
    others, rows, without = load(folder).notes
    assert others.startswith(f"2 files in {folder} left out, where .wav, ")
    assert others.endswith(": 1 .m4a, 1 .webm")
    assert rows.startswith("2 rows of metadata left out: there is no /")
    assert rows.endswith("4.m4a, for example")
    assert "without a text" in without


def test_texts_that_are_optional_need_no_field(folder):
    (folder / "more" / "metadata.csv").write_text("file_name,sentence\n2.flac,three\n")
    config = DataConfig()
    found, [note] = recordings_in(str(folder), config, texts="optional")
    assert {each.name: each.text for each in found}["more/2.flac"] is None
    assert "metadata.csv left out (KeyError: 'text'): --text-field names" in note
    found, notes = recordings_in(str(folder), config, texts="unread")
    assert ([each.text for each in found], notes) == ([None] * 5, [])
    named, notes = recordings_in(str(folder), DataConfig(text_field="sentence"), texts="optional")
    assert ({each.name: each.text for each in named}["more/2.flac"], notes) == ("three", [])


class Published(ByteTokenizer):
    """With the tokens of a published model."""

    known = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>")

    def token_id(self, token):
        known = (*self.known, "<|notimestamps|>")
        return 200 + known.index(token) if token in known else None


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, "; the model is asked to transcribe in en, without timestamps"),
        (
            {"language": "de", "speech_task": "translate"},
            "; the model is asked to translate from de to English, without timestamps",
        ),
        ({"language": "none"}, "; the model is asked for texts, without timestamps"),
    ],
)
def test_the_description_says_what_the_model_is_asked(folder, settings, asked):
    assert load(folder, tokenizer=Published(), **settings).description.endswith(
        f" recordings held out{asked}"
    )
    assert load(folder, **settings).description.endswith(" recordings held out")


def test_metadata_may_be_lines_of_json(folder):
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "silent.wav", "text": "hm"}))
    assert texts_of(load(folder))["silent.wav"] == "hm"
