"""Preference pairs of all forms become two lists of tokens whose answers count."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import MODELS, save_tokenizer

from optimus_jax.config import DataConfig
from optimus_jax.data.preferences import preference_in, read_preferences
from optimus_jax.data.records import NotTextError, PromptCompletion
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from optimus_jax.errors import DataError

USER = {"role": "user", "content": "what is 1 + 1?"}


def answer(text):
    return {"role": "assistant", "content": text}


def read(path, tokenizer, **fields):
    return list(read_preferences(DataConfig(sources=(str(path),), **fields), tokenizer))


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


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "a"}, "needs 'chosen' and 'rejected'; there are 'chosen'"),
        ("a", "there are no fields"),
        ({"chosen": "a", "rejected": "a"}, "are the same"),
        ({"chosen": [USER, answer("a")], "rejected": [USER]}, "'completion' is an empty list"),
        ({"prompt": "a", "chosen": [answer("a")], "rejected": "b"}, "both must be texts"),
        ({"chosen": "a", "rejected": [answer("a")]}, "'chosen' is a text, not a list of messages"),
    ],
)
def test_what_is_no_pair_is_a_bad_line(tmp_path, record, message):
    with pytest.raises(NotTextError, match=message):
        preference_in(record)
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = write_lines(tmp_path / "a.jsonl", good, record)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        read(path, ByteTokenizer())
    skipped_input = SkippedInput()
    config = DataConfig(sources=(str(path),), skip_bad_lines=True)
    assert len(list(read_preferences(config, ByteTokenizer(), skipped_input))) == 1
    assert skipped_input.num_bad_lines == 1
