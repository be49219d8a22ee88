"""A record's fields decide what it is."""

import pytest

from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.records import Conversation, NotTextError

USER = {"role": "user", "content": "a"}


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
        ({"prompt": "a", "completion": "b", "conversations": [USER]}, "completion"),
        ({"conversations": [USER], "id": "a"}, "messages"),
        ({"conversations": ["a"]}, "text"),
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
