"""Reads documents out of records: decides what they hold, and has it written out.

With `data.records=auto` a record's fields decide, in this order: a string named `data.text_field`
is a text; a list named `messages`, or named `data.text_field`, is a conversation; `prompt` and
`completion` are a prompt with its completion, two strings or two lists of messages; a list named
`conversations` is a conversation. A JSON value that is a string is a text.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from optimus_jax.config.data import RecordChoice
from optimus_jax.data.other_names import advice_to_rename
from optimus_jax.data.record_names import COMPLETION, CONVERSATIONS, MESSAGES, PROMPT, TOOLS
from optimus_jax.data.records import Chat, chat_in, names_of_messages, text_in


@dataclass(kw_only=True)
class RecordReader:
    """Reads documents out of records: texts, or what `write_out` makes of conversations.

    The first record decides which of them all records must be, unless `kind` is given.
    """

    text_field: str
    write_out: Callable[[Chat], Any]
    """Makes a document of a conversation or a prompt with its completion; raises
    NotConversationError if it cannot be written out."""
    kind: RecordChoice = "auto"
    has_good: bool = False
    """Whether a document was read."""
    has_unused_messages: bool = False
    """Whether a record that was taken for a text, by its fields, also holds a conversation."""
    possible_label: str | None = None
    """A field of texts that may be their label, which is not learnt; None: no note says so."""
    has_label: bool = False
    """Whether a text has it."""
    wanted: ClassVar[str] = "conversations"
    """What a table is to hold if not texts."""
    counts_each: ClassVar[bool] = False
    """Whether results go by the number of the record: one that holds nothing is refused, and bad
    ones cannot be skipped."""

    @property
    def reads_texts(self) -> bool:
        """Whether documents are texts, as far as is known."""
        return self.kind in ("auto", "text")

    def decide(self, fields: Mapping[str, object]) -> RecordChoice:
        """The kind of records with these fields: values, or Arrow types as text by name."""
        if self.kind != "auto":
            return self.kind
        kind = _kind_by_fields(fields, self.text_field)
        if kind != "text" or self.text_field in fields:  # a bad line decides nothing
            self.kind = kind
            self.has_unused_messages = kind == "text" and _has_objects(fields, MESSAGES)
        return kind

    def notes(self, name: str) -> list[str]:
        """What a user should know about fields of the source `name` that are not used."""
        found = []
        if self.has_unused_messages:
            found.append(
                f"records of {name} have {self.text_field!r} and {MESSAGES!r}:"
                f" {self.text_field!r} is learnt as plain text, and {MESSAGES!r} is not used; to"
                f" learn from the conversations: --set data.records={MESSAGES}"
            )
        if self.has_label:
            found.append(
                f"records of {name} also have {self.possible_label!r}, which is not used; to learn"
                " it: --task classification"
            )
        return found

    def see_text(self, fields: Collection[str]) -> None:
        """Note the fields of a record, or the columns of a table, of which the text is read."""
        self.has_label |= self.possible_label in fields

    def document(self, record: Any) -> Any:
        """A text, or the result of `write_out`. Raises NotTextError if the record is another kind's
        or malformed."""
        document = self._read(record)
        self.has_good = True
        return document

    def _read(self, record: Any) -> Any:
        kind = self.decide(record if isinstance(record, dict) else {})
        if kind == "text":
            if isinstance(record, dict):
                self.see_text(record)
            return text_in(record, self.text_field, advice_to_rename)
        return self.write_out(chat_in(record, kind, self.text_field))

    def records_in(self, value: Any) -> Iterable[Any]:
        """The records of a JSON file that is this value: its items, or itself."""
        return value if isinstance(value, list) else [value]

    def columns(self, names: Collection[str]) -> list[str]:
        """The columns to read of a table whose rows hold conversations."""
        if self.kind == MESSAGES:
            found = [name for name in names_of_messages(self.text_field) if name in names][:1]
        else:
            found = [PROMPT, COMPLETION] if {PROMPT, COMPLETION} <= {*names} else []
        return [*found, *({TOOLS} & {*names})] if found else []

    def if_absent(self, names: Collection[str]) -> str:
        """What to do if a table with these columns has none of those to read."""
        if self.kind == MESSAGES:
            return "name the column with the messages: --set data.text_field=NAME"
        return advice_to_rename(names) or f"give columns {PROMPT} and {COMPLETION}"


def _kind_by_fields(fields: Mapping[str, object], text_field: str) -> RecordChoice:
    text = fields.get(text_field)
    if isinstance(text, str) or (isinstance(text, _ArrowType) and not text.is_list):
        return "text"
    if _has_objects(fields, MESSAGES) or _has_objects(fields, text_field):
        return MESSAGES
    if PROMPT in fields and COMPLETION in fields:
        return COMPLETION
    return MESSAGES if _has_objects(fields, CONVERSATIONS) else "text"


def _has_objects(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if isinstance(value, _ArrowType):
        return value.is_list
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


@dataclass(frozen=True)
class _ArrowType:
    """The type of a column."""

    name: str

    @property
    def is_list(self) -> bool:
        return "list" in self.name.partition("<")[0]  # list, large_list, fixed_size_list


def column_types(schema: Any) -> dict[str, _ArrowType]:
    """The types of an Arrow schema's columns, for `RecordReader.decide`."""
    return {field.name: _ArrowType(str(field.type)) for field in schema}
