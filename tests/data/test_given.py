"""Data that a program gives is read as the same data in files is."""

import json

import numpy as np
import pytest

from optimus_jax.config import DataConfig
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.config.presets import model_preset
from optimus_jax.data.dataset import load_data
from optimus_jax.data.given import check_paths, check_records, is_paths
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import ConfigError, DataError

TEXTS = [f"text {n} of this data, {n * n} characters from it" for n in range(40)]
EOS = ByteTokenizer.eos
LOAD = {"seq_len": 16, "vocab_size": 257, "model_name": "tiny"}


def given(records, **options):
    config = DataConfig(sources=(IN_PYTHON,), eval_fraction=0.2)
    return load_data(config, given=check_records(records), **LOAD | options)


class ByNumber:
    """Only what is needed: a length, and items by number."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


@pytest.fixture
def in_a_file(tmp_path):
    """The texts as a file has them."""
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    config = DataConfig(sources=(str(tmp_path / "texts.jsonl"),), eval_fraction=0.2)
    return load_data(config, **LOAD)


@pytest.mark.parametrize(
    "records",
    [
        [{"text": text, "source": None} for text in TEXTS],
        ByNumber([{"text": text} for text in TEXTS]),
        ByNumber(TEXTS),
        [list(text.encode()) for text in TEXTS],
        [np.frombuffer(text.encode(), np.uint8) for text in TEXTS],
        [{"input_ids": [*text.encode(), EOS], "length": 3} for text in TEXTS],
        np.concatenate([[*text.encode(), EOS] for text in TEXTS]).astype(np.uint16),
    ],
    ids=["records", "by number", "texts", "ids", "arrays", "input_ids", "one array"],
)
def test_items_are_what_a_file_with_them_is(records, in_a_file):
    data = given(records)
    assert data.identity == in_a_file.identity
    np.testing.assert_array_equal(data.train.tokens, in_a_file.train.tokens)
    np.testing.assert_array_equal(data.held_out.tokens, in_a_file.held_out.tokens)


def test_texts_with_labels_are_read_too():
    records = [{"text": text, "label": "odd" if n % 2 else "even"} for n, text in enumerate(TEXTS)]
    assert given(records, kind="labels").labels == ("even", "odd")
    with pytest.raises(DataError, match="from which the task learns"):
        given([[1, 2], [3]], kind="labels")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": [{"text": "a"}]}, "a dict, which has no items by number"),
        (iter(TEXTS), "gives its items once"),
        ({"a", "b"}, "a set, which has no items by number"),
        (7, "a int, which has no items by number"),
        (ByNumber({"column": 1}), "has no item 0: KeyError"),
        ([], "is empty"),
    ],
)
def test_what_has_no_items_is_refused(data, message):
    with pytest.raises(DataError, match=rf"(?s){message}.*do:"):
        check_records(data)


def test_numbers_of_pandas_are_labels():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": TEXTS})
    texts = frame["text"]
    assert given(texts).identity == given(frame.to_dict("records")).identity
    with pytest.raises(DataError, match=r"(?s)has no item 3, .*Series of 39 items.*reset_index"):
        given(texts.drop(3))
    with pytest.raises(DataError, match=r"(?s)has no item 0.*reset_index\(drop=True\)"):
        given(texts.drop(0))
    with pytest.raises(DataError, match=r"(?s)has no item 0.*to_dict"):
        given(frame)


@pytest.mark.parametrize("text", ["two\nlines", "a" * 300, "some text"])
def test_a_text_in_place_of_a_path_is_one_of_a_record(text):
    def read_as_a_path():
        check_paths(["a.txt", text])
        load_data(DataConfig(sources=(text,)), **LOAD)

    with pytest.raises(DataError, match=r"(?s)do:.*as records: \[\{'text'"):
        read_as_a_path()


def test_items_that_cannot_be_read_are_named():
    with pytest.raises(DataError, match=r"item 2, is not a JSON object with a text named 'text'"):
        given([{"text": "a"}, {"body": "b"}])
    with pytest.raises(DataError, match=r"(?s)item 2, .*no token ids"):
        given([[1], {"text": "b"}])
    with pytest.raises(DataError, match="item 1, is not a JSON object"):
        given([[[1, 2], [3]]])
    for wrong in (257, -1):
        with pytest.raises(DataError, match=rf"(?s)item 1, .*token {wrong}; the tokenizer has 257"):
            given([[1, wrong]])
    skipping = DataConfig(sources=(IN_PYTHON,), skip_bad_lines=True, eval_fraction=0.0)
    records = [{"text": text} for text in TEXTS] + [{"body": "b"}]
    (note,) = load_data(skipping, given=records, **LOAD).notes
    assert "1 bad line(s) skipped" in note


def test_images_are_read_from_files_and_absent_objects_are_missed():
    with pytest.raises(DataError, match="images are read from files"):
        given([{"image": 1}], kind="images", values_for=model_preset("vit-nano"))
    with pytest.raises(ConfigError, match=r"(?s)is not here.*data=\.\.\."):
        load_data(DataConfig(sources=(IN_PYTHON,)), **LOAD)


def test_paths_are_told_from_items(tmp_path):
    assert is_paths("a.txt")
    assert is_paths(tmp_path)
    assert is_paths(["a.txt", tmp_path])
    assert not is_paths([{"text": "a"}])
    assert not is_paths(ByNumber(["a"]))
