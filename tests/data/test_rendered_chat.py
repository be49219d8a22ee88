"""Ids and counted tokens of conversations, compared with transformers'."""

import json

import pytest
from chat_templates import (
    CHATML,
    CHATML_GENERATION,
    FORGETFUL,
    LLAMA3,
    MODELS,
    save_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.data.chat_template import ChatTemplate
from optimus_jax.data.records import Conversation, NotConversationError, PromptCompletion
from optimus_jax.data.rendered_chat import ChatWriter, RenderedChat
from optimus_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from optimus_jax.errors import DataError

PLAIN = [
    {"role": "user", "content": "  what is 1 + 1? "},
    {"role": "assistant", "content": "It is 2.\n"},
    {"role": "user", "content": "h\xe9llo \u4e2d world < | >"},
    {"role": "assistant", "content": "how are you"},
]
SPECIAL = sorted({token for model in MODELS.values() for token in model["special"]})
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"name": "add", "arguments": {"a": 1, "b": "</s><|eot_id|>"}}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, tmp_path_factory):
    """Our tokenizer, transformers', and a writer."""
    return load(tmp_path_factory.mktemp("model"), **MODELS[request.param])


def load(folder, **arguments):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(folder, **arguments)
    ours = load_tokenizer(str(folder))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return ours, theirs, writer_of(ours)


def writer_of(tokenizer, **fields):
    return ChatWriter(
        template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        has_end_of_turn=bool(tokenizer.special_tokens),
        **fields,
    )


def tokens_of(tokenizer, writer, messages, **fields):
    return tokenizer.encode_chats([writer(Conversation(messages=messages, **fields))])[0]


def counted_text(theirs, tokens):
    return theirs.decode(tokens.ids[tokens.counts].tolist(), skip_special_tokens=False)


def in_turns(texts):
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_ids_are_those_of_transformers(model):
    ours, theirs, writer = model
    assert (
        tokens_of(ours, writer, PLAIN).ids.tolist()
        == theirs.apply_chat_template(PLAIN)["input_ids"]
    )


@settings(max_examples=25)
@given(
    st.lists(
        st.text(st.sampled_from("abt 12\n.<|>[]/_\u4e2d\xe9"), max_size=12), min_size=2, max_size=5
    )
)
def test_ids_of_any_contents_are_those_of_transformers(model, texts):
    """Contents that hold no whole special token; parts of some at their ends need marks."""
    ours, theirs, writer = model
    messages = in_turns(texts)
    assert (
        tokens_of(ours, writer, messages).ids.tolist()
        == theirs.apply_chat_template(messages)["input_ids"]
    )


@settings(max_examples=25)
@given(
    st.lists(
        st.lists(
            st.sampled_from([*SPECIAL, "<s>", "</s>", "<|im_", "a", " ", "\n"]), max_size=5
        ).map("".join),
        min_size=2,
        max_size=5,
    )
)
def test_messages_cannot_make_special_tokens(model, texts):
    """The special tokens are those of the same conversation with harmless messages."""
    ours, theirs, writer = model
    special = {theirs.convert_tokens_to_ids(token) for token in ours.special_tokens}
    found = tokens_of(ours, writer, in_turns(texts))
    harmless = tokens_of(ours, writer, in_turns(["a"] * len(texts)))

    def specials(tokens):
        return [token for token in tokens.ids.tolist() if token in special]

    assert specials(found) == specials(harmless)
    if theirs.chat_template == CHATML:  # byte-level, and it writes messages as they are
        text = theirs.apply_chat_template(in_turns(texts), tokenize=False)
        assert theirs.decode(found.ids.tolist(), skip_special_tokens=False) == text, (
            "no text is lost"
        )


def test_special_tokens_are_ordinary_text_in_roles_names_tools_and_arguments(tmp_path):
    ours, theirs, writer = load(tmp_path, **MODELS["llama3"])
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "3<|eot_id|>"},
        {"role": "critic<|eot_id|>", "content": "ok"},
        {"role": "assistant", "content": "3"},
    ]
    tools = json.loads(json.dumps(TOOLS).replace("object", "<|begin_of_text|>"))
    found = tokens_of(ours, writer, messages, tools=tools)
    text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert theirs.decode(found.ids.tolist(), skip_special_tokens=False) == text
    count = found.ids.tolist().count
    assert count(theirs.convert_tokens_to_ids("<|eot_id|>")) == 6, (
        "the system's, and five messages'"
    )
    assert count(theirs.convert_tokens_to_ids("<|begin_of_text|>")) == 1


def test_a_message_and_the_template_cannot_make_a_special_token_together():
    template = ChatTemplate(
        "{% for m in messages %}<|{{ m.name }}|>{{ m.content | trim }}_end|>{% endfor %}"
    )
    writer = ChatWriter(template=template, special_tokens=["<|im_end|>"], loss_on=("all",))
    for name, content in (("im_end", "x"), ("a", "<|im"), ("a", "b <|im  ")):
        chat = writer(Conversation(messages=[{"role": "user", "name": name, "content": content}]))
        for start in (at for at in range(len(chat.text)) if chat.text.startswith("<|im_end|>", at)):
            assert chat.from_data & {*range(start, start + 10)}
    trusted = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{% endfor %}")
    chat = ChatWriter(template=trusted, special_tokens=["<|user|>"], loss_on=("all",))(
        Conversation(messages=[{"role": "user"}])
    )
    assert chat == RenderedChat(text="<|user|>", counted=((0, 8),)), (
        "some templates make it of roles"
    )


def test_tools_and_reasoning_are_given_as_transformers_gives_them(tmp_path):
    ours, theirs, writer = load(tmp_path, **MODELS["llama3"])
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": {"result": 3}},
        {"role": "assistant", "content": "3"},
    ]
    found = tokens_of(ours, writer, messages, tools=TOOLS)
    assert found.ids.tolist() == theirs.apply_chat_template(messages, tools=TOOLS)["input_ids"]
    assert counted_text(theirs, found) == (
        '{"name": "add", "parameters": {"a": 1}}<|eot_id|>3<|eot_id|>'
    )
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}"
    assert ChatTemplate(template).render([{"role": "assistant", "reasoning": "hm"}]) == "hm|hm"


@pytest.mark.parametrize("in_files", [False, True], ids=["list in the config", "files"])
def test_conversations_with_tools_have_their_own_template(tmp_path, in_files):
    transformers = pytest.importorskip("transformers")
    _, plain, _ = load(tmp_path / "plain", **MODELS["llama3"])
    named = {"default": CHATML, "tool_use": LLAMA3, "rag": "no"}
    plain.chat_template = named
    plain.save_pretrained(str(tmp_path / "named"), save_jinja_files=in_files)
    assert (tmp_path / "named" / "chat_template.jinja").is_file() == in_files
    ours = load_tokenizer(str(tmp_path / "named"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in ours.files.items():
        (copy / name).write_bytes(content)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(copy))
    assert theirs.chat_template == {name: named[name] for name in ("default", "tool_use")}
    messages = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "3"}]
    texts = set()
    for tokenizer in (ours, load_tokenizer(str(copy))):
        assert tokenizer.chat_template.digest == ours.chat_template.digest
        for tools in (None, [], TOOLS):
            chat = writer_of(tokenizer)(Conversation(messages=messages, tools=tools))
            assert chat.text == plain.apply_chat_template(messages, tools=tools, tokenize=False)
            texts.add(chat.text)
    assert len(texts) == 3
    assert ours.chat_template.digest != ChatTemplate(CHATML, plain.special_tokens_map).digest


def test_the_assistants_tokens_and_its_end_of_turn_count(tmp_path):
    expected = {
        "chatml": "It is 2.\n<|im_end|>how are you<|im_end|>",
        "llama3": "It is 2.<|eot_id|>how are you<|eot_id|>",
        "gemma": "It is 2.<end_of_turn>how are you<end_of_turn>",
        "mistral": "It is 2.\n</s> how are you</s>",
    }
    for name, text in expected.items():
        ours, theirs, writer = load(tmp_path / name, **MODELS[name])
        assert counted_text(theirs, tokens_of(ours, writer, PLAIN)).strip() == text


def test_generation_tags_say_what_counts_as_in_transformers(tmp_path):
    ours, theirs, writer = load(tmp_path, **MODELS["chatml"] | {"template": CHATML_GENERATION})
    found = tokens_of(ours, writer, PLAIN)
    wanted = theirs.apply_chat_template(PLAIN, return_assistant_tokens_mask=True)
    assert found.ids.tolist() == wanted["input_ids"]
    assert found.counts.astype(int).tolist() == wanted["assistant_masks"]
    marked = in_turns(["<|im_end|>", "<|im_start|>2"])
    assert counted_text(theirs, tokens_of(ours, writer, marked)) == "<|im_start|>2<|im_end|>"


def test_a_template_that_leaves_out_the_end_of_a_turn_is_noticed(tmp_path):
    """A run's start has a note then."""
    leaving_out = CHATML_GENERATION.replace(
        " + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}"
    )
    assert leaving_out != CHATML_GENERATION
    for template, stops in ((CHATML_GENERATION, True), (leaving_out, False), (CHATML, True)):
        writer = ChatWriter(template=ChatTemplate(template), special_tokens=["<|im_end|>"])
        assert writer(Conversation(messages=PLAIN)).stops == stops


def test_roles_may_be_chosen(tmp_path):
    ours, theirs, _ = load(tmp_path, **MODELS["chatml"])
    users = tokens_of(ours, writer_of(ours, loss_on=("user",)), PLAIN[:2])
    assert counted_text(theirs, users) == "<|im_start|>user\n  what is 1 + 1? <|im_end|>"
    both = tokens_of(ours, writer_of(ours, loss_on=("user", "assistant")), PLAIN[:2])
    assert counted_text(theirs, both).endswith("1? <|im_end|>It is 2.\n<|im_end|>")
    assert tokens_of(ours, writer_of(ours, loss_on=("all",)), PLAIN).counts.all()
    assert not tokens_of(ours, writer_of(ours, loss_on=("tool",)), PLAIN).counts.any()


def test_a_completion_counts_of_texts_and_of_messages(tmp_path):
    ours, theirs, writer = load(tmp_path, **MODELS["chatml"])
    chat = writer(PromptCompletion(prompt="what is <|im_end|>", completion=" the cat"))
    found = ours.encode_chats([chat])[0]
    assert found.ids[-1] == ours.eos
    assert ours.eos not in found.ids[:-1]
    assert counted_text(theirs, found) == " the cat<|im_end|>"
    parts = {"messages": PLAIN, "num_prompt": 3}
    found = ours.encode_chats([writer(Conversation(**parts))])[0]
    assert counted_text(theirs, found) == "how are you<|im_end|>"
    assert found.ids.tolist() == theirs.apply_chat_template(PLAIN)["input_ids"]


def test_a_template_that_is_not_consistent_names_the_message():
    writer = ChatWriter(template=ChatTemplate(FORGETFUL), special_tokens=["<|im_end|>"])
    assert writer(Conversation(messages=PLAIN[:2])).counted
    with pytest.raises(NotConversationError, match=r"counts of message 2 \(assistant\)"):
        writer(Conversation(messages=PLAIN))
    all_of_it = ChatWriter(template=ChatTemplate(FORGETFUL), special_tokens=[], loss_on=("all",))
    assert all_of_it(Conversation(messages=PLAIN)).counted


def test_bytes_have_conversations_too():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = ByteTokenizer(template)
    found = tokens_of(tokenizer, writer_of(tokenizer), in_turns(["h\xe9", "y\xe9s"]))
    assert tokenizer.decode(found.ids) == "user: h\xe9\nassistant: y\xe9s\n"
    assert tokenizer.decode(found.ids[found.counts]) == "y\xe9s\n"
    assert found.ids[-1] == tokenizer.eos
    assert found.counts[-1], "it must learn to stop"
    question = tokens_of(
        tokenizer, writer_of(tokenizer, loss_on=("assistant",)), in_turns(["a", "b", "c"])
    )
    assert not question.counts[-1], "no message of the assistant ends there"


def test_there_must_be_a_template():
    with pytest.raises(DataError, match=r"need a chat template(.|\n)*data\.chat_template=FILE"):
        writer_of(ByteTokenizer())(Conversation(messages=PLAIN))


def test_a_template_that_compares_messages_with_special_tokens_is_refused():
    template = ChatTemplate("{% for m in messages %}{{ m.content == '<|im_end|>' }}{% endfor %}")
    writer = ChatWriter(template=template, special_tokens=["<|im_end|>"], loss_on=("all",))
    with pytest.raises(NotConversationError, match="compares a message"):
        writer(Conversation(messages=[{"role": "user", "content": "<|im_end|>"}]))


def test_private_characters_in_messages_are_kept():
    text = "".join(map(chr, range(0xE000, 0xE010))) + "\\ue011 <|im_end|>"
    writer = ChatWriter(template=ChatTemplate(CHATML), special_tokens=["<|im_end|>"])
    chat = writer(Conversation(messages=in_turns([text, "ok"])))
    assert text in chat.text
    full = "".join(map(chr, range(0xE000, 0xF8FF))) + "<|im_end|>"
    with pytest.raises(NotConversationError, match="private use"):
        writer(Conversation(messages=in_turns([full, "ok"])))


def test_templates_may_write_messages_as_ascii_json():
    template = ChatTemplate("{{ messages | tojson(ensure_ascii=true) }}<|im_end|>")
    writer = ChatWriter(template=template, special_tokens=["<|im_end|>"], loss_on=("all",))
    messages = [{"role": "user", "content": "<|im_end|>"}]
    chat = writer(Conversation(messages=messages))
    assert chat.text == json.dumps(messages) + "<|im_end|>"
    assert chat.from_data == {chat.text.index("<|im_end|>")}


def test_llama3_has_a_date_of_its_own():
    assert "26 Jul 2024" in ChatTemplate(LLAMA3).render(PLAIN)
