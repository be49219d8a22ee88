"""Whatever the vocabulary, the token ids of a text never contain the end-of-document token."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from optimus_jax.data.tokenizers import ByteTokenizer, encode_documents, load_tokenizer
from optimus_jax.errors import DataError

LETTERS = [*"abcdefgHlowrspk<>/|_[]SEP"]
SPEAK = "<speak>Hello</s> world</speak>"


def unigram(*, as_special=True, **parts):
    """As SentencePiece makes them: special tokens are pieces too, and likelier than any other
    spelling.
    """
    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        *((letter, -5.0) for letter in ("\u2581", *LETTERS)),
        ("Hello", -3.0),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    if as_special:
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def byte_bpe(added=(), *, merges=()):
    vocabulary = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_tokens(list(added))
    return tokenizer


def word_piece():
    vocabulary = {
        token: number
        for number, token in enumerate(
            ["[UNK]", "[SEP]", *LETTERS, *("##" + letter for letter in LETTERS)]
        )
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.WhitespaceSplit(),
        decoders.WordPiece(),
    )
    tokenizer.add_tokens([AddedToken("[SEP]", special=False)])
    return tokenizer


DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
KINDS = {
    "a piece of Unigram": (unigram, SPEAK),
    "a piece of Unigram that is not called special": (lambda: unigram(as_special=False), SPEAK),
    "what a normalizer makes": (
        lambda: unigram(normalizer=normalizers.Replace("\u00a7", "</s>")),
        "Hello \u00a7 world",
    ),
    "what merges form": (lambda: byte_bpe(merges=[("<", "/"), ("</", "s"), ("</s", ">")]), SPEAK),
    "an added token that is not called special": (
        lambda: byte_bpe([AddedToken("</s>", special=False)]),
        SPEAK,
    ),
    "an added token of other characters": (
        lambda: byte_bpe([AddedToken(DEEPSEEK, special=False)]),
        f"Hello{DEEPSEEK} world",
    ),
    "an added special token": (
        lambda: byte_bpe([AddedToken("<|endoftext|>", special=True)]),
        "a<|endoftext|>b<|endoftext|>",
    ),
    "a token that may have spaces before it": (
        lambda: byte_bpe([AddedToken("</s>", special=False, lstrip=True, rstrip=True)]),
        SPEAK,
    ),
    "a piece of WordPiece": (word_piece, "Hello [SEP] world"),
}


def loaded(tokenizer, folder, **named):
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder / "tokenizer.json"), **named)


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_document_never_contains_eos(tmp_path, kind):
    make, text = KINDS[kind]
    tokenizer = loaded(make(), tmp_path)
    [ids] = tokenizer.encode_batch([text])
    assert tokenizer.eos not in ids
    output = tokenizer.decode([*ids, tokenizer.eos])
    if "WordPiece" in kind:  # which cannot begin within a word
        output = output.replace("[ ", "[")
    assert output == text.replace("\u00a7", "</s>"), "the text is what it was"
    stream = np.concatenate(list(encode_documents(tokenizer, [text, "Hello", text])))
    assert np.count_nonzero(stream == tokenizer.eos) == 3


def test_respelled_special_tokens_are_counted(tmp_path):
    tokenizer = loaded(unigram(), tmp_path)
    assert tokenizer.respelled.notes() == []
    tokenizer.encode_batch([SPEAK, "Hello", "</s></s><s>Hello"])
    assert tokenizer.respelled.notes() == [
        "2 document(s) contain the text of a special token, such as the end of a document: 4 such"
        " token(s) were written by ordinary ones"
    ]
    assert ByteTokenizer().respelled.notes() == []


def test_eos_text_that_a_normalizer_changes_is_spelled_normalized(tmp_path):
    """NFKC replaces the wide characters in the token's name, so the name itself never comes out of
    it."""
    made = byte_bpe([AddedToken(DEEPSEEK, special=False)])
    made.normalizer = normalizers.NFKC()
    tokenizer = loaded(made, tmp_path)
    assert (
        tokenizer.decode(tokenizer.encode(f"a{DEEPSEEK} b")) == "a<|end\u2581of\u2581sentence|> b"
    )
    assert "other text" not in tokenizer.notes[0]
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("s", -5.0), ("/", -5.0), (">", -5.0)]  # and no <
    tokenizer = loaded(Tokenizer(models.Unigram(vocabulary, unk_id=0)), tmp_path)
    assert tokenizer.decode(tokenizer.encode("s</s>s")) == "s <unk> / s > s"
    assert tokenizer.notes[0].endswith(
        "1 such token(s) were written by ordinary ones (1 of them with other text than the document"
        " has, because the vocabulary cannot write it)"
    )


def test_eos_text_that_cannot_be_spelled_otherwise_is_left_out(tmp_path):
    # and so is every word that it does not know
    words = models.WordLevel({"</s>": 0, "Hello": 1, "world": 2}, unk_token="</s>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = loaded(tokenizer, tmp_path)
    assert tokenizer.encode("Hello big </s> world").tolist() == [1, 2]
    assert tokenizer.respelled.notes()[0].endswith(
        "2 left out because the vocabulary cannot write them otherwise"
    )


@settings(deadline=None, max_examples=60)
@given(
    text=st.lists(
        st.sampled_from([*LETTERS, " ", "</s>", "<s>", "<unk>", "</", "s>", "\u00e9"]), max_size=12
    ).map("".join),
    kind=st.integers(0, 1),
)
def test_any_encoded_text_is_free_of_eos(tmp_path_factory, text, kind):
    if not (folder := tmp_path_factory.getbasetemp() / f"any{kind}").exists():
        folder.mkdir()
        (unigram, word_piece)[kind]().save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.eos not in tokenizer.encode(text)


def test_eos_token_is_chosen_by_name(tmp_path):
    made = byte_bpe(
        [
            AddedToken(token, special=True)
            for token in ("<|endoftext|>", "</s>", "<|im_end|>", "<eos>")
        ]
    )
    assert loaded(made, tmp_path).end == "'<|endoftext|>', id 256 (the usual name)"
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}})
    )
    assert loaded(made, tmp_path).end == "'</s>', id 257 (special_tokens_map.json)"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert loaded(made, tmp_path).end == "'<|im_end|>', id 258 (tokenizer_config.json)"
    assert loaded(made, tmp_path, eos="<eos>").end == "'<eos>', id 259 (data.eos)"
    assert loaded(made, tmp_path, by_list=True).eos == 256, (
        "as in runs of before files beside it were asked"
    )
    again = tmp_path / "again"
    again.mkdir()
    for name, content in loaded(made, tmp_path, eos="<eos>").files.items():
        (again / name).write_bytes(content)
    assert load_tokenizer(str(again)).eos == 259, "what a run keeps says which token it chose"
    assert load_tokenizer(str(again)).digest == loaded(made, tmp_path).digest


@pytest.mark.parametrize(
    ("content", "named", "message"),
    [
        (
            "{}",
            {"eos": "<|end|>"},
            r"has no token '<\|end\|>'\n  given: data.eos=<\|end\|>\n.*such as <unk>, <s>, </s>",
        ),
        (
            '{"eos_token": "<gone>"}',
            {},
            (
                r"names an end of documents that tokenizer.json does not have\n  given:"
                r" '<gone>'(.|\n)*--set data.eos=TOKEN"
            ),
        ),
        ("nope", {}, r"cannot read .*tokenizer_config.json, which may name the end"),
        ("[1]", {}, r"cannot read .*tokenizer_config.json.*\n.*not a JSON object, but a list"),
        ('{"eos_token": {"a": 1}}', {}, r"cannot read .*\n.*eos_token=\{'a': 1\} is neither"),
        ('{"eos_token": 3}', {}, r"cannot read .*\n.*eos_token=3 is neither"),
    ],
)
def test_missing_eos_token_is_an_error(tmp_path, content, named, message):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=message):
        loaded(unigram(), tmp_path, **named)


def test_byte_tokenizer_refuses_a_chosen_eos():
    with pytest.raises(DataError, match="an id that is no byte"):
        load_tokenizer("bytes", "</s>")


def test_text_that_cannot_be_tokenized_is_an_error(tmp_path):
    tokenizer = loaded(
        Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>")), tmp_path
    )
    with pytest.raises(
        DataError,
        match=r"the tokenizer cannot write a document\n  given: 'b'(.|\n)*has an unknown token",
    ):
        tokenizer.encode_batch(["a", "b"])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_broken_tokenizer_file_is_a_readable_error(tmp_path_factory, data):
    text = unigram().to_str()
    place = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 20))
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_bytes(
        (
            text[:place]
            + data.draw(st.sampled_from(["", "null", "-1", "[", "1e400", '"', "99999999999"]))
            + text[place + cut :]
        ).encode()
        + data.draw(st.sampled_from([b"", b"\xff", b"\0"]))
    )
    output = None
    try:
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.eos not in tokenizer.encode(SPEAK)
    except DataError as error:
        output = str(error)
    assert output is None or "\n  do:    " in output


def test_panic_of_the_library_is_a_readable_error(tmp_path, monkeypatch):
    class PanicException(BaseException):  # as pyo3 calls it
        pass

    def panic(_):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(tokenizers.Tokenizer, "from_buffer", panic)
    with pytest.raises(DataError, match="PanicException: index out of bounds"):
        loaded(unigram(), tmp_path)
