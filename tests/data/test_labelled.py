"""Records with labels, their tokens, and where labels count."""

import json
import re

import numpy as np
import pytest

from optimus_jax.config import DataConfig, PhaseConfig
from optimus_jax.data.dataset import load_data
from optimus_jax.data.labelled import names_of_labels
from optimus_jax.data.loader import BatchLoader
from optimus_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from optimus_jax.errors import DataError

EOS = 256
TEXTS = [
    {"text": "fine", "label": "good"},
    {"text": "bad", "label": "bad"},
    {"text": "so so", "label": "good"},
]


def load(path, records, kind="labels", *, tokenizer=None, seq_len=64, **more):
    """The data of records in a file; `more` are settings of the data, or arguments."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = {name: more.pop(name) for name in ("labels", "label_place") if name in more}
    tokenizer = tokenizer or ByteTokenizer()
    return load_data(
        DataConfig(**{"sources": (str(path),), "eval_fraction": 0.0, **more}),
        seq_len=seq_len,
        vocab_size=tokenizer.vocab_size,
        model_name="a model",
        tokenizer=tokenizer,
        kind=kind,
        **arguments,
    )


def row_of(data, seq_len=64, example=0):
    cut = data.train.cut_examples(np.array([example]), seq_len=seq_len, respect_documents=True)
    return {name: array[0] for name, array in cut.items()}


def text_of(row, segment):
    return ByteTokenizer().decode(row["tokens"][row["segments"] == segment])


@pytest.mark.parametrize(("place", "at"), [("first", 0), ("last", -1)])
def test_a_label_counts_at_one_token_of_its_text(tmp_path, place, at):
    data = load(tmp_path / "a.jsonl", TEXTS, label_place=place)
    assert data.labels == ("bad", "good")
    row = row_of(data)
    for segment, record in enumerate(TEXTS):
        here = row["segments"] == segment
        assert text_of(row, segment) == record["text"]
        counts = np.flatnonzero(row["loss_mask"][here])
        assert counts.tolist() == [np.arange(here.sum())[at]]
        assert data.labels[row["targets"][here][at]] == record["label"]
        assert row["tokens"][here][-1] == EOS
    assert row["loss_mask"].sum() == len(TEXTS)
    assert not row["types"].any()


def test_two_texts_have_one_label_and_two_types(tmp_path):
    records = [{"text": "ab", "after": "cde", "label": n} for n in (1, 0)]
    row = row_of(load(tmp_path / "a.jsonl", records, second_text_field="after"))
    here = row["segments"] == 0
    assert row["tokens"][here].tolist() == [EOS, *b"ab", EOS, *b"cde", EOS]
    assert row["types"][here].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_second_text_that_is_null_is_empty(tmp_path):
    records = [{"text": "ab", "after": after, "label": n} for n, after in enumerate([None, "cd"])]
    data = load(tmp_path / "a.jsonl", records, second_text_field="after")
    row = row_of(data)
    assert row["tokens"][row["segments"] == 0].tolist() == [EOS, *b"ab", EOS, EOS]
    assert row["tokens"][row["segments"] == 1].tolist() == [EOS, *b"ab", EOS, *b"cd", EOS]
    assert data.train.count_targets(6) == 2
    with pytest.raises(DataError, match="'after' is a number, not a text"):
        load(
            tmp_path / "b.jsonl", [records[0] | {"after": 0}, records[1]], second_text_field="after"
        )


def test_words_have_labels_at_their_first_tokens(tmp_path):
    words, labels = ["the", "big", "dog"], ["det", "adj", "noun"]
    data = load(
        tmp_path / "a.jsonl",
        [{"words": words, "labels": labels}],
        "word_labels",
        text_field="words",
    )
    row = row_of(data)
    text = bytes(row["tokens"][1:12].tolist()).decode()
    assert text == "the big dog"
    places = np.flatnonzero(row["loss_mask"])
    assert [text[place - 1] for place in places] == ["t", "b", "d"]
    assert [data.labels[label] for label in row["targets"][places]] == labels


def tokenizer_like_berts(directory):
    """Words, and the frame of BERT: [CLS] A [SEP] B [SEP], with types 0 and 1."""
    library = pytest.importorskip("tokenizers")
    names = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "un", "##able", "c"]
    vocabulary = {name: number for number, name in enumerate(names)}
    whole = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
    whole.pre_tokenizer = library.pre_tokenizers.Whitespace()
    whole.add_special_tokens(names[:4])
    whole.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    whole.save(str(directory / "tokenizer.json"))
    return load_tokenizer(str(directory / "tokenizer.json"), "[SEP]")


def test_the_frame_is_that_of_the_tokenizer(tmp_path):
    tokenizer = tokenizer_like_berts(tmp_path)
    assert tokenizer.frame == ((1,), (2,), (1,), (2,), (2,), 1)
    assert tokenizer.mask == 3
    records = [{"text": "a [SEP] b", "second": "c", "label": n} for n in (0, 1)]
    options = {"tokenizer": tokenizer, "second_text_field": "second"}
    row = row_of(load(tmp_path / "a.jsonl", records, **options))
    here = row["segments"] == 0
    tokens = row["tokens"][here].tolist()
    assert (tokens[0], tokens[1], tokens[-3:]) == (1, 4, [2, 8, 2])
    assert tokens.count(2) == 2, "a special token in a text is ordinary text"
    assert row["types"][here].tolist() == [*[0] * (len(tokens) - 2), 1, 1]


def test_the_label_of_a_word_of_two_tokens_is_at_the_first(tmp_path):
    tokenizer = tokenizer_like_berts(tmp_path)
    records = [{"words": ["a", "unable", "c"], "labels": [0, 1, 2]}]
    data = load(
        tmp_path / "a.jsonl", records, "word_labels", text_field="words", tokenizer=tokenizer
    )
    row = row_of(data)
    assert row["tokens"][:6].tolist() == [1, 4, 6, 7, 8, 2]
    assert row["targets"][:6].tolist() == [-1, 0, 1, -1, 2, -1]


def test_a_word_without_tokens_gives_its_label_to_no_other(tmp_path):
    library = pytest.importorskip("tokenizers")
    tokenizer_like_berts(tmp_path)
    whole = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole.normalizer = library.normalizers.Replace("\u200b", "")
    whole.save(str(tmp_path / "tokenizer.json"))
    records = [{"words": ["\u200b", "a", "c", "\u200b"], "labels": [3, 0, 1, 2]}]
    data = load(
        tmp_path / "a.jsonl",
        records,
        "word_labels",
        text_field="words",
        tokenizer=load_tokenizer(str(tmp_path / "tokenizer.json"), "[SEP]"),
        labels=("0", "1", "2", "3"),
    )
    row = row_of(data)
    assert row["tokens"][:4].tolist() == [1, 4, 8, 2]
    assert row["targets"][:4].tolist() == [-1, 0, 1, -1]


def test_held_out_texts_that_are_sorted_by_label_are_shuffled(tmp_path):
    records = [{"text": f"{n}", "label": n // 50} for n in range(200)]
    data = load(tmp_path / "a.jsonl", records, eval_fraction=0.4)
    first = data.held_out.labels.targets[data.held_out.labels.targets >= 0][:16]
    assert len({*first.tolist()}) > 2
    whole = data.train.mixed().labels.targets
    assert len({*whole[whole >= 0][:16].tolist()}) > 2


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_long_text_is_cut_inside_its_frame(tmp_path, place):
    records = [{"text": letter * 100, "label": letter} for letter in "ab"]
    path = tmp_path / "a.jsonl"
    data = load(path, [*records, *TEXTS], seq_len=16, label_place=place)
    first = [EOS] if place == "first" else []
    for seq_len in (16, 9):  # that of training, and a shorter one of an evaluation
        row = row_of(data, seq_len=seq_len)
        size = seq_len - 1 - len(first)
        assert row["tokens"].tolist() == [*first, *b"a" * size, EOS]
        assert row["loss_mask"].tolist() == [
            at == (0 if first else seq_len - 1) for at in range(seq_len)
        ]
    (note,) = data.notes
    assert re.search(r"2 text\(s\) .* seq_len=16 .* 2 truncated", note)
    assert not load(path, TEXTS, seq_len=16, label_place=place).notes
    with pytest.raises(DataError, match="no text of"):
        BatchLoader(
            load(path, records, seq_len=16, too_long="drop").train,
            seq_len=16,
            global_batch=1,
            seed=0,
            rows=np.array([0]),
            respect_documents=True,
        )


def test_two_long_texts_are_cut_alike_at_once_and_later(tmp_path):
    records = [
        {"text": "a" * first, "after": "c" * second, "label": n % 2}
        for n, (first, second) in enumerate([(40, 40), (4, 40), (40, 4), (3, 3)])
    ]
    path, seconds = tmp_path / "a.jsonl", {"second_text_field": "after"}
    once = load(path, records, seq_len=16, **seconds).train
    later = load(path, records, seq_len=50, **seconds).train
    options = {"seq_len": 16, "respect_documents": True}
    examples = np.arange(once.count_examples(16))
    expected = once.cut_examples(examples, **options)
    assert (expected["tokens"] == EOS).sum() >= 3 * 3
    found = later.cut_examples(examples, **options)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_phase_of_shorter_examples_says_what_it_cuts(tmp_path):
    records = [{"text": letter * 20, "label": letter} for letter in "ab"]
    phases = (PhaseConfig(after_step=5, seq_len=12),)
    (note,) = load(tmp_path / "a.jsonl", records, phases=phases).notes
    assert re.search("seq_len=12 .* 2 truncated", note)


def test_a_label_at_the_last_token_stays_without_a_token_after_the_text(tmp_path):
    tokenizer_like_berts(tmp_path)
    library = pytest.importorskip("tokenizers")
    whole = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    whole.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), "[SEP]")
    records = [{"text": "a b c a b c", "label": n} for n in (1, 0)]
    data = load(tmp_path / "a.jsonl", records, tokenizer=tokenizer, label_place="last")
    row = row_of(data, seq_len=4)
    assert row["tokens"].tolist() == [1, 4, 5, 8]
    assert row["targets"].tolist() == [-1, -1, -1, 1]
    assert row["loss_mask"].tolist() == [False, False, False, True]


def test_examples_without_room_for_the_frame_are_refused(tmp_path):
    records = [{"text": "a", "after": "b", "label": n} for n in (1, 0)]
    train = load(tmp_path / "a.jsonl", records, second_text_field="after").train
    assert (train.count_examples(5), train.count_examples(2)) == (2, 0)


def test_whole_numbers_are_labels_in_their_order():
    assert names_of_labels(["10", "2", "0"]) == tuple(map(str, range(11)))
    assert names_of_labels(["b", "a", "10"]) == ("10", "a", "b")
    assert names_of_labels(["01", "00"]) == ("00", "01"), "names, as they are written"
    assert names_of_labels(["10", "-1", "2"]) == ("-1", "2", "10")


def test_negative_numbers_stand_for_no_label(tmp_path):
    records = [{"text": ["a", "b", "c"], "labels": [1, -100, 0]}]
    data = load(tmp_path / "words.jsonl", records, "word_labels")
    assert data.labels == ("0", "1")
    batch = data.train.cut_examples(np.array([0]), seq_len=16, respect_documents=True)
    assert sorted(batch["targets"][batch["loss_mask"]].tolist()) == [0, 1]
    floats = [{"text": text, "label": float(number)} for number, text in enumerate("ab")]
    assert load(tmp_path / "floats.jsonl", floats).labels == ("0", "1")


def test_labels_that_are_known_keep_their_order(tmp_path):
    path = tmp_path / "a.jsonl"
    assert load(path, TEXTS, labels=("good", "bad", "odd")).labels == ("good", "bad", "odd")
    with pytest.raises(DataError, match="labels that the model does not know") as error:
        load(path, TEXTS, labels=("good", "odd"))
    assert "bad" in str(error.value)


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({"text": "a"}, "labels", "no field 'label'"),
        ({"label": "a"}, "labels", "no field 'text'"),
        ({"text": "a", "label": 0.5}, "labels", "not a text or a whole number"),
        ({"text": "a", "label": ""}, "labels", "not a text or a whole number"),
        ({"text": "a", "label": -1}, "labels", "is -1; negative numbers stand for none"),
        ({"text": ["a"], "label": "b"}, "labels", "'text' is a list, not a text"),
        ({"text": ["a", "b"], "labels": ["x"]}, "word_labels", "2 words have 1 labels"),
        ({"text": "a b", "labels": ["x"]}, "word_labels", "'text' is a text, not a list"),
        ({"text": [1], "labels": ["x"]}, "word_labels", "not a list of words"),
    ],
)
def test_other_records_are_refused(tmp_path, record, kind, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.jsonl", [record], kind)


def test_texts_without_labels_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a text")
    with pytest.raises(DataError, match="no texts with labels"):
        load_data(
            DataConfig(sources=(str(path),)),
            seq_len=8,
            vocab_size=257,
            model_name="a model",
            kind="labels",
        )


def test_one_label_teaches_nothing(tmp_path):
    with pytest.raises(DataError, match="the same label"):
        load(tmp_path / "a.jsonl", TEXTS[::2])
    with pytest.raises(DataError, match="the same label"):
        load(tmp_path / "a.jsonl", [{"text": text, "label": 1} for text in "ab"])


def test_the_identity_tells_labels_apart(tmp_path):
    path = tmp_path / "a.jsonl"
    first = load(path, TEXTS).identity
    other = load(path, [{**TEXTS[0], "label": "bad"}, *TEXTS[1:]]).identity
    assert {name for name in first if first[name] != other[name]} == {"conversations"}


def test_a_mixture_needs_the_same_labels(tmp_path):
    paths = []
    for name, labels in (("a", "xy"), ("b", "xz")):
        path = tmp_path / f"{name}.jsonl"
        records = [{"text": label, "label": label} for label in labels]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        paths.append(f"{name}=1:{path}")
    config = DataConfig(sources=tuple(paths), eval_fraction=0.0)
    options = {"seq_len": 8, "vocab_size": 257, "model_name": "a model", "kind": "labels"}
    with pytest.raises(DataError, match="different labels"):
        load_data(config, **options)
    assert load_data(config, **options, labels=("x", "y", "z")).labels == ("x", "y", "z")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".parquet"])
def test_tables_have_columns_of_texts_and_labels(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(TEXTS))
    elif suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist([{"n": 1, **each} for each in TEXTS]), path)
    else:
        separator = "," if suffix == ".csv" else "\t"
        rows = [["n", "label", "text"], *([1, each["label"], each["text"]] for each in TEXTS)]
        path.write_text("".join(separator.join(map(str, row)) + "\n" for row in rows))
    data = load_data(
        DataConfig(sources=(str(path),), eval_fraction=0.0),
        seq_len=64,
        vocab_size=257,
        model_name="a model",
        kind="labels",
    )
    row = row_of(data)
    assert [text_of(row, segment) for segment in range(3)] == [each["text"] for each in TEXTS]
    assert [data.labels[n] for n in row["targets"][row["loss_mask"]]] == ["good", "bad", "good"]


def test_a_bad_row_of_a_table_is_named_or_skipped(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,x\nb,\nc,y\n")
    options = {"seq_len": 16, "vocab_size": 257, "model_name": "a model", "kind": "labels"}
    with pytest.raises(DataError, match="line 3, is no row"):
        load_data(DataConfig(sources=(str(path),)), **options)
    skipping = DataConfig(sources=(str(path),), eval_fraction=0.0, skip_bad_lines=True)
    data = load_data(skipping, **options)
    assert data.train.num_pieces == 2
    assert any("1 bad line" in note for note in data.notes)


def test_a_table_without_labels_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,sentiment\na,x\n")
    with pytest.raises(DataError, match="holds no texts with labels") as error:
        load_data(
            DataConfig(sources=(str(path),)),
            seq_len=8,
            vocab_size=257,
            model_name="a model",
            kind="labels",
        )
    assert "--set data.label_field=NAME, one of sentiment, or" in str(error.value)


def test_advice_names_the_fields_that_are_there(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("review,sentiment\na,x\n")
    options = {"seq_len": 8, "vocab_size": 257, "model_name": "a model", "kind": "labels"}
    with pytest.raises(DataError) as error:
        load_data(DataConfig(sources=(str(path),)), **options)
    advice = "--set data.text_field=NAME --set data.label_field=NAME, each one of review, sentiment"
    assert advice in str(error.value)
    with pytest.raises(DataError, match="give each text its 'label'"):
        load(tmp_path / "a.jsonl", [{"text": "a"}])


def answered(start, text="the answer is blue", answer="blue"):
    answers = {"text": [answer], "answer_start": [start]} if start is not None else None
    return {"question": "which", "context": text, "answers": answers}


def test_an_answer_is_told_by_its_first_and_last_token(tmp_path):
    data = load(tmp_path / "a.jsonl", [answered(14), answered(None)], "answers")
    assert data.labels == ("begin", "end")
    row = row_of(data)
    for segment, expected in ((0, "blue"), (1, None)):
        here = row["segments"] == segment
        tokens, targets = row["tokens"][here], row["targets"][here]
        assert ByteTokenizer().decode(tokens) == "whichthe answer is blue"
        (first,), (last,) = (np.flatnonzero((targets & bit > 0) & (targets > 0)) for bit in (1, 2))
        found = ByteTokenizer().decode(tokens[first : last + 1])
        assert found == (expected or "")
        assert (first, last) != (0, 0) or expected is None
        assert row["types"][here].sum() == len("the answer is blue") + 1


def test_a_question_whose_answer_is_cut_off_is_left_out(tmp_path):
    path, long = tmp_path / "a.jsonl", answered(60, text="x" * 60 + "blue")
    none = long | {"answers": {"text": [], "answer_start": []}}
    data = load(path, [long, answered(14), none], "answers", seq_len=32)
    assert data.train.num_pieces == 2
    truncated, lost = sorted(data.notes, key=lambda note: "left out" in note)
    assert re.search(r"1 question\(s\) .* 1 truncated", truncated)
    assert re.search(r"1 question\(s\) .* left out: .* seq_len=32", lost)
    assert row_of(data, 32)["loss_mask"].sum() == 2
    assert row_of(data, 32, example=1)["targets"].tolist() == [3, *[-1] * 31]
    with pytest.raises(DataError, match=r"all questions of .* are left out"):
        load(path, [long], "answers", seq_len=32)


def test_a_question_whose_answer_is_cut_in_shorter_examples_is_left_out_of_these(tmp_path):
    records = [answered(60, text="x" * 60 + "blue"), answered(4, text="the blue one")]
    data = load(tmp_path / "a.jsonl", records, "answers", seq_len=80)
    assert not data.notes
    assert data.train.packing(80)[0].tolist() == [0, 1]
    assert data.train.packing(32)[0].tolist() == [1]
    half = answered(13, text="x" * 13 + "blue" * 5, answer="blue" * 5)
    whole = load(tmp_path / "b.jsonl", [half, *records], "answers", seq_len=80)
    assert whole.train.packing(32)[0].tolist() == [2], "half an answer is none"


def test_several_answers_have_bits_of_their_own(tmp_path):
    record = answered(14)
    record["answers"] = {"text": ["blue", "answer is", "blue"], "answer_start": [14, 4, 14]}
    row = row_of(load(tmp_path / "a.jsonl", [record], "answers"))
    found = {int(at): int(row["targets"][at]) for at in np.flatnonzero(row["targets"] > 0)}
    begin = len("which") + 2
    assert found == {begin + 14: 1, begin + 17: 2, begin + 4: 4, begin + 12: 8}
    assert np.flatnonzero(row["loss_mask"]).tolist() == [begin + 14, begin + 17]


def test_squads_own_file_is_read(tmp_path):
    text = "the answer is blue"
    asked = [
        {"id": "1", "question": "which", "answers": [{"text": "blue", "answer_start": 14}]},
        {"id": "2", "question": "who", "answers": [], "is_impossible": True},
    ]
    whole = {"data": [{"title": "x", "paragraphs": [{"context": text, "qas": asked}]}]}
    path = tmp_path / "train.json"
    path.write_text(json.dumps(whole))
    options = {"seq_len": 64, "vocab_size": 257, "model_name": "a model", "kind": "answers"}
    config = DataConfig(sources=(str(path),), eval_fraction=0.0)
    row = row_of(load_data(config, **options))
    assert [text_of(row, segment) for segment in (0, 1)] == [f"which{text}", f"who{text}"]
    assert row["targets"][row["targets"] > 0].tolist() == [1, 2, 3]
    del asked[1]["answers"]
    path.write_text(json.dumps(whole))
    with pytest.raises(DataError, match="no field 'answers'"):
        load_data(config, **options)
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": text}, 7]}]}))
    with pytest.raises(DataError, match="no field 'question'"):
        load_data(config, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": {"text": ["blue"], "answer_start": [3]}}, "is not at character 3"),
        ({"answers": {"text": ["blue"], "answer_start": [-4]}}, "is not at character -4"),
        ({"answers": {"text": ["blue", "the"], "answer_start": [14, 5]}}, "'the' is not at"),
        ({"answers": {"text": ["blue"], "answer_start": []}}, "not lists `text`"),
        ({"answers": [{"text": "blue"}]}, "is not at character None"),
        ({"answers": "blue"}, "'answers' is a text"),
        ({"question": 3}, "is not a text"),
    ],
)
def test_malformed_answers_are_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.jsonl", [answered(14) | changes], "answers")


def test_large_numbers_are_names():
    assert names_of_labels(["1000000000", "7"]) == ("1000000000", "7")
    assert names_of_labels(["9" * 5000, "7"]) == ("7", "9" * 5000)
