"""What a record holds, and errors that say what is wrong with one."""

import pytest

from optimus_jax.data.records import Conversation, NotTextError, PromptCompletion, chat_in

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


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
