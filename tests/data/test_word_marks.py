"""Where words begin."""

import numpy as np
import pytest

from optimus_jax.data.tokenizers import ByteTokenizer, load_tokenizer


def words_of(tokenizer, text):
    """The words of a text, as the tokenizer tells them apart."""
    tokens = tokenizer.encode(text)
    begins = np.flatnonzero(tokenizer.begins_word(tokens[None].astype(np.int32))[0])
    return [tokenizer.decode(part) for part in np.split(tokens, begins)[1:]]


def test_words_of_bytes_are_runs_of_letters_and_digits():
    found = words_of(ByteTokenizer(), "f(x1) é\n")
    assert found == ["f", "(", "x1", ")", " ", "é", "\n"]
    eos = ByteTokenizer().begins_word(np.array([[97, 256, 97]]))
    assert eos.all()


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        (["[UNK]", "un", "##able", "a"], "unable a", ["unable", "a"]),
        (["[UNK]", "\u2581un", "able", "\u2581a"], "\u2581unable\u2581a", None),
        (["[UNK]", "x", "y"], "x y", ["x", "y"]),
    ],
)
def test_words_are_as_the_marks_of_tokens_say(tmp_path, names, text, expected):
    library = pytest.importorskip("tokenizers")
    vocabulary = {name: number for number, name in enumerate([*names, "</s>"])}
    if expected is None:
        model = library.models.BPE(vocabulary, [], unk_token="[UNK]")
    else:
        model = library.models.WordPiece(vocabulary, unk_token="[UNK]")
    whole = library.Tokenizer(model)
    whole.pre_tokenizer = library.pre_tokenizers.Whitespace()
    whole.decoder = library.decoders.WordPiece()
    whole.add_special_tokens(["</s>", "[UNK]"])
    whole.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), "</s>")
    ids = np.arange(len(vocabulary))[None]
    begins = {
        name: bool(tokenizer.begins_word(ids)[0][number]) for name, number in vocabulary.items()
    }
    if expected is None:
        assert begins == {"[UNK]": True, "\u2581un": True, "able": False, "\u2581a": True} | {
            "</s>": True
        }
    else:
        assert begins == {name: not name.startswith("##") for name in vocabulary}
        assert words_of(tokenizer, text) == expected
