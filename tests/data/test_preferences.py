"""Preference pairs of all forms become two lists of tokens whose answers count."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import MODELS, save_tokenizer

from optimus_jax.config import DataConfig
from optimus_jax.data.dataset import load_data
from optimus_jax.data.preferences import preference_in
from optimus_jax.data.records import NotTextError, PromptCompletion
from optimus_jax.data.token_ids import ChatTokens
from optimus_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from optimus_jax.errors import DataError

USER = {"role": "user", "content": "what is 1 + 1?"}


def answer(text):
    return {"role": "assistant", "content": text}


def load(path, tokenizer, seq_len=256, kind="pairs", **fields):
    config = DataConfig(**{"sources": (str(path),), "eval_fraction": 0.0, **fields})
    return load_data(
        config,
        seq_len=seq_len,
        vocab_size=tokenizer.vocab_size,
        model_name="a model",
        tokenizer=tokenizer,
        kind=kind,
    )


def read(path, tokenizer):
    """Tokens of the chosen and of the rejected text of every pair."""
    train = load(path, tokenizer).train
    assert train.group_size == 2
    ends = zip(train.starts[:-1], train.starts[1:], strict=True)
    texts = [ChatTokens(train.tokens[a:b], train.counts[a:b]) for a, b in ends]
    return list(zip(texts[::2], texts[1::2], strict=True))


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_pairs_of_messages_are_tokenized_as_conversations(tmp_path):
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path / "model", **MODELS["chatml"])))
    explicit = {"prompt": [USER], "chosen": [answer("2")], "rejected": [answer("It is 3.")]}
    implicit = {"chosen": [USER, answer("2")], "rejected": [USER, answer("It is 3.")]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([explicit]), tmp_path / "a.parquet")
    sources = (
        write_lines(tmp_path / "a.jsonl", explicit),
        write_lines(tmp_path / "b.jsonl", implicit),
        tmp_path / "a.parquet",
    )
    for source in sources:
        [(chosen, rejected)] = read(source, tokenizer)
        for tokens, text in ((chosen, "2"), (rejected, "It is 3.")):
            prompt = "<|im_start|>user\nwhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer._tokenizer.decode(tokens.ids.tolist(), skip_special_tokens=False) == (
                f"{prompt}{text}<|im_end|>\n"
            )
            counted = tokens.ids[tokens.counts].tolist()
            assert tokenizer._tokenizer.decode(counted, skip_special_tokens=False) == (
                f"{text}<|im_end|>"
            )


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "be brief"}]])
@pytest.mark.parametrize("earlier", [[], [answer("of what?"), {"role": "user", "content": "x"}]])
def test_a_text_prompt_beside_whole_conversations_is_not_doubled(system, earlier):
    before = [*system, USER, *earlier]
    pair = {"chosen": [*before, answer("2")], "rejected": [*before, answer("3")]}
    expected = preference_in(pair)
    assert expected.chosen.num_prompt == len(before)
    for prompt in (USER["content"], f"{USER['content']}\n"):
        assert preference_in({"prompt": prompt, **pair}) == expected
    assert preference_in({"question": USER["content"], **pair}) == expected


def test_a_text_prompt_beside_answers_is_the_message_of_the_user(tmp_path):
    pair = {"chosen": [answer("2")], "rejected": [answer("3")]}
    assert preference_in({"prompt": USER["content"], **pair}) == preference_in(
        {"prompt": [USER], **pair}
    )
    tokenizer = ByteTokenizer()
    path = tmp_path / "a.parquet"
    record = {"prompt": "a", "chosen": [USER, answer("2")], "rejected": [USER, answer("3")]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    with pytest.raises(DataError, match=r"'chosen' begins .*\n.*do: .*leave 'prompt' out"):
        read(path, tokenizer)


def test_pairs_of_texts_end_with_the_end_of_documents(tmp_path):
    tokenizer = ByteTokenizer()
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "11"})
    [(chosen, rejected)] = read(path, tokenizer)
    assert chosen.ids.tolist() == [*b"1+1=2", tokenizer.eos]
    assert chosen.counts.tolist() == [False] * 4 + [True] * 2
    assert rejected.ids.tolist() == [*b"1+1=11", tokenizer.eos]
    assert rejected.counts.tolist() == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Human: hi Assistant: yes", "Human: hi Assistant: no", "Human: hi Assistant:"),
        ("It is wonderful", "It is worse", "It is"),
        ("yes", "no", ""),
        ("yesterday", "yes", ""),
        ("a b", "a b c", "a"),
    ],
)
def test_without_a_prompt_it_is_what_both_texts_begin_with(chosen, rejected, prompt):
    pair = preference_in({"chosen": chosen, "rejected": rejected})
    assert pair.chosen == PromptCompletion(prompt=prompt, completion=chosen[len(prompt) :])
    assert pair.rejected == PromptCompletion(prompt=prompt, completion=rejected[len(prompt) :])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_prompt_by_another_name_is_not_left_out(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"

    def loaded(question, chosen, rejected):
        record = {"question": question, "chosen": chosen, "rejected": rejected}
        if suffix == "jsonl":
            write_lines(path, record)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
        return load(path, ByteTokenizer()).train.num_pieces

    with pytest.raises(DataError, match=r"do: .*rename 'question' to 'prompt', or leave the field"):
        loaded("1 + 1?", "it is 2", "it is 3")
    assert loaded("1 + 1?", "1 + 1? 2", "1 + 1? 3") == 1
    assert loaded(None, "it is 2", "it is 3") == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "a"}, "needs 'chosen' and 'rejected'; there are 'chosen'"),
        ("a", "there are no fields"),
        ({"chosen": "a", "rejected": "a"}, "are the same"),
        ({"chosen": [USER, answer("a")], "rejected": [USER]}, "'rejected' is an empty list"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "a", "chosen": [answer("a")], "rejected": "b"}, "and 'chosen' .*both must be"),
        ({"chosen": "a", "rejected": [answer("a")]}, "'chosen' is a text, not a list of messages"),
    ],
)
def test_what_is_no_pair_is_a_bad_line(tmp_path, record, message):
    with pytest.raises(NotTextError, match=message):
        preference_in(record)
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = write_lines(tmp_path / "a.jsonl", good, record)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, is not a preference pair"):
        load(path, ByteTokenizer())
    data = load(path, ByteTokenizer(), skip_bad_lines=True)
    assert data.train.num_pieces == 1
    assert any("1 bad line" in note for note in data.notes)


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_pairs_for_another_task_are_advised_to_use_dpo(tmp_path, suffix, messages):
    record = {"chosen": "a", "rejected": "b"}
    if messages:
        record = {name: [answer(text)] for name, text in record.items()}
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "c", **record})
    if suffix == "parquet":
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    with pytest.raises(DataError, match=r"do: +learn from preference pairs with --set task=dpo"):
        load(path, ByteTokenizer(), kind="documents")


def test_a_table_without_pairs_says_which_columns_they_need(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), path)
    with pytest.raises(DataError, match=r"(?s)no preference pairs.*leave task=dpo out, or give"):
        load(path, ByteTokenizer())


def test_both_texts_of_a_pair_are_neighbours_in_one_example(tmp_path):
    lines = [{"prompt": "p" * size, "chosen": "c" * size, "rejected": "r"} for size in range(1, 9)]
    data = load(write_lines(tmp_path / "a.jsonl", *lines), ByteTokenizer(), seq_len=32)
    seen = []
    for example in range(data.train.count_examples(32)):
        rows = data.train.cut_examples(np.array([example]), seq_len=32, respect_documents=True)
        tokens, segments = rows["tokens"][0], rows["segments"][0]
        counts = rows["loss_mask"][0]
        for pair in range(segments.max() // 2 + 1):
            texts = [bytes(tokens[segments == 2 * pair + which].tolist()) for which in (0, 1)]
            if not counts[(segments == 2 * pair)].any():
                assert not counts[segments >= 2 * pair].any()
                continue
            size = texts[0].count(b"p")
            assert texts == [b"p" * size + b"c" * size, b"p" * size + b"r"]
            seen.append(size)
    assert sorted(seen) == list(range(1, 9))


@pytest.mark.parametrize(("too_long", "sizes"), [("drop", [2, 3]), ("truncate", [8, 8])])
def test_a_pair_that_is_too_long_is_truncated_or_dropped_whole(tmp_path, too_long, sizes):
    lines = [
        {"prompt": "p", "chosen": "c" * 20, "rejected": "r" * 9},
        {"prompt": "p", "chosen": "c", "rejected": "rr"},
    ]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    data = load(path, ByteTokenizer(), seq_len=16, too_long=too_long)
    rows = data.train.cut_examples(np.array([0]), seq_len=16, respect_documents=True)
    assert np.bincount(rows["segments"][0]).tolist()[:2] == sizes
    assert any("1 pair(s) of" in note for note in data.notes)


def test_a_pair_is_held_out_or_trained_on_as_a_whole(tmp_path):
    lines = [{"prompt": f"<{n}>", "chosen": "c", "rejected": "r"} for n in range(60)]
    data = load(write_lines(tmp_path / "a.jsonl", *lines), ByteTokenizer(), eval_fraction=0.3)
    assert data.held_out is not None
    assert data.train.num_pieces + data.held_out.num_pieces == 60
    for part in (data.train, data.held_out):
        texts = bytes(part.tokens[part.tokens < 256].tolist()).decode()
        assert all((f"<{n}>c<{n}>r" in texts) == (f"<{n}>" in texts) for n in range(60))


@pytest.mark.parametrize("name", ["a.txt", "stdlib", "b.jsonl"])
def test_other_data_is_refused(tmp_path, name):
    (tmp_path / "a.txt").write_text("text")
    write_lines(tmp_path / "b.jsonl", {"text": "text"})
    path = name if name == "stdlib" else tmp_path / name
    with pytest.raises(DataError, match=r"preference pairs|needs 'chosen'") as caught:
        load(path, ByteTokenizer())
    assert "do:    leave task=dpo out, or give records with 'prompt'" in str(caught.value)
    assert "skip_bad_lines" not in str(caught.value)
