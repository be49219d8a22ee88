"""Records with the names of other tools are read, or the error says what to rename."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from optimus_jax.data.formats import SourceFile, read_csv, read_json_lines, read_parquet
from optimus_jax.data.other_names import advice_to_rename, usual_message
from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.records import Conversation
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.errors import DataError

SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "a"},
    {"from": "gpt", "value": "b"},
]
USUAL = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
]


def read(reader, path, *, records=True, **fields):
    source_file = SourceFile(
        path=path,
        text_field="text",
        skip_bad_lines=False,
        skipped_input=SkippedInput(),
        records=RecordReader(text_field="text", write_out=lambda chat: chat, **fields)
        if records
        else None,
    )
    return list(reader(source_file))


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_table(path, *records):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    return path


@pytest.mark.parametrize("fields", [{}, {"kind": "messages"}])
@pytest.mark.parametrize("messages", [SHAREGPT, USUAL])
def test_sharegpts_conversations_are_read(tmp_path, messages, fields):
    record = {"id": "1", "conversations": messages}
    expected = [Conversation(messages=USUAL)]
    assert read(read_json_lines, write_lines(tmp_path / "a.jsonl", record), **fields) == expected
    assert read(read_parquet, write_table(tmp_path / "a.parquet", record), **fields) == expected


def test_only_messages_without_a_role_are_renamed():
    message = {"role": "human", "from": "x", "value": "y"}
    assert usual_message(message) is message
    assert usual_message({"from": "editor", "value": "y", "weight": 1}) == {
        "role": "editor",
        "content": "y",
        "weight": 1,
    }


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (
            ("instruction", "input", "output"),
            "rename 'instruction' to 'prompt' (with the text of 'input' after it) and 'output' to"
            " 'completion'",
        ),
        (
            ("instruction", "output"),
            "rename 'instruction' to 'prompt' and 'output' to 'completion'",
        ),
        (("prompt", "response"), "rename 'response' to 'completion'"),
        (("input", "output"), "rename 'input' to 'prompt' and 'output' to 'completion'"),
        (("question", "completion"), "rename 'question' to 'prompt'"),
    ],
)
def test_a_prompt_by_another_name_is_an_error_that_says_what_to_rename(tmp_path, names, advice):
    record = dict.fromkeys(names, "x")
    lines, table = write_lines(tmp_path / "a.jsonl", record), tmp_path / "a.parquet"
    write_table(table, record)
    for kind in ("auto", "completion"):
        with pytest.raises(DataError) as caught:
            read(read_json_lines, lines, kind=kind)
        assert str(caught.value).endswith(f"do:    {advice}")
    with pytest.raises(DataError) as caught:
        read(read_parquet, table)
    assert str(caught.value).endswith(f"do:    {advice}")
    with pytest.raises(DataError) as caught:
        read(read_parquet, table, kind="completion")
    assert str(caught.value).endswith(f"do:    {advice}, or leave the file out")
    for reader, path in ((read_json_lines, lines), (read_parquet, table)):
        with pytest.raises(DataError) as caught:
            read(reader, path, records=False)  # as tokenize.py does
        assert str(caught.value).endswith(f"starts: {advice}, and give the file to --data")
    (tmp_path / "a.csv").write_text(f"{','.join(names)}\nx\n")
    with pytest.raises(DataError, match=r"JSON lines with the fields 'prompt' and 'completion'$"):
        read(read_csv, tmp_path / "a.csv")


def test_a_prompt_alone_lacks_its_completion_or_is_a_text(tmp_path):
    with pytest.raises(DataError, match=r"its 'completion', or .* --set data\.text_field=prompt$"):
        read(read_json_lines, write_lines(tmp_path / "a.jsonl", {"prompt": "x"}))


@pytest.mark.parametrize("names", [("text",), ("output",), ("prompt", "completion"), ()])
def test_nothing_is_renamed_without_need(names):
    assert advice_to_rename(names) is None


def test_one_record_of_another_kind_may_still_be_left_out(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "x"}, {"prompt": "x", "response": "y"})
    with pytest.raises(DataError, match=r"rename 'response' .*, or .*data\.skip_bad_lines=true$"):
        read(read_json_lines, path)
