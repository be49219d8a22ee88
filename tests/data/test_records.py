"""What a record holds, and errors that say what is wrong with one."""

import pytest

from optimus_jax.data.records import (
    Conversation,
    NotTextError,
    PromptCompletion,
    RecordReader,
    chat_in,
)

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def reader(**fields):
    return RecordReader(text_field="text", write_out=lambda chat: chat, **fields)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ("a text", "text"),
        ({"text": "x", "messages": [USER], "prompt": "a", "completion": "b"}, "text"),
        ({"messages": [USER], "prompt": "a", "completion": "b"}, "messages"),
        ({"text": [USER]}, "messages"),
        ({"text": ["a", "b"], "prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": "a"}, "text"),
    ],
)
def test_fields_decide_what_a_record_is(record, kind):
    assert reader().decide(record if isinstance(record, dict) else {}) == kind
    assert reader(kind="completion").decide({"text": "x"}) == "completion"


def test_the_first_good_record_decides_for_all():
    records = reader()
    with pytest.raises(NotTextError):
        records.document({"other": 1})
    assert records.document({"messages": [USER]}) == Conversation(messages=[USER])
    with pytest.raises(NotTextError, match="'text' is a text, not a list of messages"):
        records.document({"text": "x"})


def test_other_fields_and_tools_are_handed_on_without_nulls():
    message = USER | {"name": "n", "tool_calls": None, "parts": [{"a": None}]}
    tools = [{"type": "function"}]
    for given in (tools, '[{"type": "function"}]'):
        chat = chat_in({"messages": [message], "tools": given}, "messages")
        assert chat == Conversation(
            messages=[USER | {"name": "n", "parts": [{"a": None}]}], tools=tools
        )
    for none in ([], "", None, "null"):
        assert chat_in({"messages": [USER], "tools": none}, "messages").tools is None


def test_prompts_and_completions_are_texts_or_messages():
    assert chat_in({"prompt": "a", "completion": "b"}, "completion") == PromptCompletion(
        prompt="a", completion="b"
    )
    assert chat_in({"prompt": [USER], "completion": [ANSWER]}, "completion") == Conversation(
        messages=[USER, ANSWER], num_prompt=1
    )
    for record, message in (
        ({"prompt": "a", "completion": [ANSWER]}, "both must be texts, or both lists"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": "a", "text": "b"}, "no field 'completion'; there are 'prompt', 'text'"),
        ({"prompt": [USER], "completion": []}, "'completion' is an empty list"),
        (3, "it is a number, not an object"),
    ):
        with pytest.raises(NotTextError, match=message):
            chat_in(record, "completion")
