"""Records without labels: how they are read, and where each is."""

import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from optimus_jax.config import DataConfig
from optimus_jax.config.presets import model_preset
from optimus_jax.data import unlabelled
from optimus_jax.data.labelled import LabelledSpan, LabelledText
from optimus_jax.data.tokenizers import load_tokenizer
from optimus_jax.data.unlabelled import in_groups, place_of, unlabelled_images, unlabelled_records
from optimus_jax.errors import DataError

MODEL, VISION = model_preset("bert-nano"), model_preset("vit-nano")


def read(*sources, kind="labels", say=lambda note: None, **settings):
    return list(unlabelled_records(tuple(map(str, sources)), kind, DataConfig(**settings), say))


def grouped(records, *, longest=16, say=lambda note: None):
    tokenizer = load_tokenizer("bytes", None)
    return list(in_groups(records, tokenizer, MODEL, place="first", longest=longest, say=say))


def encoded():
    pillow = pytest.importorskip("PIL.Image")
    data = io.BytesIO()
    pillow.fromarray(np.zeros((8, 8), np.uint8)).save(data, "PNG")
    return data.getvalue()


def add(shard, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


def test_images_are_named_by_their_files_rows_and_members(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    folder = tmp_path / "folder"
    (folder / "more").mkdir(parents=True)
    (folder / "README").write_text("no image")
    table = arrow.table({"image": [encoded()] * 2})
    parquet.write_table(table, folder / "more" / "a.parquet")
    feather.write_feather(table, tmp_path / "b.arrow", compression="lz4")
    for name, mode in (("plain.tar", "w"), ("packed.tar", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as shard:
            add(shard, "in/0.png", encoded())
            add(shard, "in/1.png", encoded())
    image = tmp_path / "c.png"
    image.write_bytes(encoded())
    names = ("b.arrow", "plain.tar", "packed.tar", "c.png")
    sources = [str(folder), *(str(tmp_path / name) for name in names)]
    notes = []
    (group,) = unlabelled_images(sources, VISION, "image", notes.append)
    assert [place_of(image) for image in group.records] == [
        f"{folder}/more/a.parquet, row 1",
        f"{folder}/more/a.parquet, row 2",
        f"{tmp_path}/b.arrow, row 1",
        f"{tmp_path}/b.arrow, row 2",
        f"{tmp_path}/plain.tar, in/0",
        f"{tmp_path}/plain.tar, in/1",
        f"{tmp_path}/packed.tar, in/0",
        f"{tmp_path}/packed.tar, in/1",
        str(image),
    ]
    assert len(notes) == 1
    assert "1 file" in notes[0]
    with pytest.raises(DataError, match="1, 3 or 4 channels"):
        list(unlabelled_images([str(image)], replace(VISION, num_channels=2), "image", print))


def test_images_come_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(unlabelled, "RECORDS_AT_ONCE", 2)
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(encoded())
    groups = list(unlabelled_images([str(tmp_path)], VISION, "image", print))
    assert [len(group.records) for group in groups] == [2, 1]
    assert [group.examples.count_examples(17) for group in groups] == [2, 1]
    assert len({group.digest for group in groups}) == 2


def test_no_record_is_skipped(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="record 2, is not a record that the model reads"):
        read(tmp_path / "a.parquet")
    table = tmp_path / "a.csv"
    table.write_text('text\na\n""\nb\n\n')
    assert [one.text for one in read(table)] == ["a", "", "b"], "the last line is no row"
    table.write_text("text\na\n\nb\n")
    with pytest.raises(DataError, match="line 3, is blank"):
        read(table)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").write_text("")
    with pytest.raises(DataError, match=r"b\.txt holds no text"):
        read(folder)


def test_advice_names_the_fields_that_are_absent(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"text": "a", "pair": "b"}) + "\n")
    with pytest.raises(DataError, match=r"data\.second_text_field=NAME, one of pair") as raised:
        read(data, second_text_field="second")
    assert "data.text_field" not in str(raised.value)
    assert "label" not in str(raised.value).partition("given")[2]
    assert read(data, second_text_field="pair") == [LabelledText("a", "b", "0")]
    data.write_text('{"text": "a"}\nno JSON\n')
    with pytest.raises(DataError, match="or leave the line out") as raised:
        read(data)
    assert "skip_bad_lines" not in str(raised.value)


def test_notes_say_what_is_left_out_and_truncated(tmp_path, monkeypatch):
    notes = []
    (tmp_path / "a.jsonl").write_text('"a"\n')
    (tmp_path / "b.other").write_text("b")
    read(tmp_path, say=notes.append)
    assert len(notes) == 1
    assert "1 .other" in notes[0]
    monkeypatch.setattr(unlabelled, "RECORDS_AT_ONCE", 2)
    notes.clear()
    texts = [LabelledText("a" * size, None, "0") for size in (1, 1, 30, 30)]
    first, second = grouped(texts, say=notes.append)
    assert len(notes) == 1
    assert "2 text(s) of records 3 to 4" in notes[0]
    assert first.digest != second.digest


def test_the_tokens_of_a_context_are_those_of_the_example():
    question, text = "ab", "cdé" * 8
    (group,) = grouped([LabelledSpan(question, text, ())])
    (context,) = group.contexts
    tokens = group.examples.tokens
    assert len(tokens) == 16
    assert group.needs_all
    written = text.encode()
    assert tokens[context[:, 0]].tolist() == list(written[: len(context)])
    assert context[:4, 1:].tolist() == [[0, 1], [1, 2], [2, 3], [2, 3]]
