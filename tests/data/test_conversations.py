"""From files of conversations to batches."""

import itertools
import json

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from chat_templates import MODELS, save_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.config import DataConfig
from optimus_jax.config.data import PhaseConfig
from optimus_jax.data.batch import BATCH_ARRAYS
from optimus_jax.data.conversations import encode_conversations
from optimus_jax.data.dataset import load_data
from optimus_jax.data.loader import BatchLoader, check_held_out
from optimus_jax.data.pieces import Pieces, split_pieces
from optimus_jax.data.rendered_chat import RenderedChat
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import DataError
from optimus_jax.training.tasks import MLM, REPLACED, TASKS

EOS = 256
ARRAYS = ("tokens", "targets", "positions", "loss_mask")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def load(*sources, seq_len=16, vocab_size=2000, by=None, kind="documents", **fields):
    config = DataConfig(sources=tuple(map(str, sources)), **({"eval_fraction": 0.0} | fields))
    return load_data(
        config, seq_len=seq_len, vocab_size=vocab_size, model_name="tiny", by=by, kind=kind
    )


@pytest.fixture
def template(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return str(tmp_path / "chat.jinja")


def turns(*texts):
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


CHATS = [turns("1", "2"), turns("hello", "you", "x", "yz"), turns("a" * 5, "b")]


def texts_of(data):
    tokens = data.train.tokens
    borders = itertools.pairwise(data.train.starts)
    return [data.tokenizer.decode(tokens[a:b]) for a, b in borders]


def test_every_format_gives_the_same_conversations(tmp_path, template):
    records = [{"messages": chat, "id": 3} for chat in CHATS]
    # A row of Arrow has every field that some row has; the others are null.
    records[0]["messages"][0] = records[0]["messages"][0] | {"name": "n"}
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "a.feather")
    (tmp_path / "a.json").write_text(json.dumps(records))
    write_lines(tmp_path / "a.jsonl", records)
    write_lines(tmp_path / "b.jsonl", [{"dialogue": chat} for chat in CHATS])
    split = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
    first = load(tmp_path / "a.jsonl", chat_template=template)
    assert texts_of(first) == ["u1;a2;", "uhello;ayou;ux;ayz;", "uaaaaa;ab;"]
    assert first.train.counts.sum() == len("2;you;yz;b;") + 3, "and the ends"
    assert first.identity["documents"] == 3
    for name in ("a.json", "a.parquet", "a.feather"):
        assert load(tmp_path / name, chat_template=template).identity == first.identity, name
    named = load(tmp_path / "b.jsonl", chat_template=template, text_field="dialogue")
    assert named.identity == first.identity
    other = load(write_lines(tmp_path / "c.jsonl", split), chat_template=template)
    assert texts_of(other) == texts_of(first)
    assert other.train.counts.sum() == len("2;yz;b;") + 3
    assert other.identity["content"] == first.identity["content"]
    assert other.identity["conversations"] != first.identity["conversations"], "another loss"


def test_what_the_datasets_library_saves_is_read(tmp_path, template):
    """In several files, whose order its names say; of several splits, one has to be named."""
    datasets = pytest.importorskip("datasets")
    records = [{"messages": turns(f"{number}?", str(number)), "id": number} for number in range(7)]
    lines = load(write_lines(tmp_path / "a.jsonl", records), chat_template=template)
    rows = datasets.Dataset.from_list(records)
    rows.save_to_disk(str(tmp_path / "rows"), num_shards=3)
    assert load(tmp_path / "rows", chat_template=template).identity == lines.identity
    rows.select([4, 2]).save_to_disk(str(tmp_path / "some"))  # rows by number are written out
    assert texts_of(load(tmp_path / "some", chat_template=template)) == ["u4?;a4;", "u2?;a2;"]
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"(?s)several splits.*name one to train on: .*train"):
        load(tmp_path / "splits", chat_template=template)
    one = load(tmp_path / "splits" / "train", chat_template=template)
    assert one.identity == lines.identity
    texts = datasets.Dataset.from_dict({"text": ["one", "two"]})
    texts.save_to_disk(str(tmp_path / "texts"))
    assert load(tmp_path / "texts").identity["documents"] == 2


def test_prompts_and_completions_of_text_need_no_template(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}] * 2)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"completion": "2", "prompt": "1+1="}] * 2),
        tmp_path / "a.parquet",
    )
    for source in (path, tmp_path / "a.parquet"):
        data = load(source)
        assert texts_of(data) == ["1+1=2"] * 2
        assert data.train.tokens.tolist() == [*b"1+1=2", EOS] * 2
        assert data.train.counts.tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 2
    assert load(path, loss_on=("all",)).train.counts.all()


def test_conversations_are_refused_where_tokens_are_hidden(tmp_path, template):
    """Whether one of their tokens counts is said at the token before it, which would be hidden."""
    chats = write_lines(tmp_path / "a.jsonl", [{"messages": CHATS[0], "said": "0123"}] * 9)
    pairs = write_lines(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b", "said": "0"}] * 9)
    for path in (chats, pairs):
        with pytest.raises(DataError, match="holds conversations, and the task hides tokens"):
            load(path, chat_template=template, kind="texts")
        as_texts = {"records": "text", "text_field": "said"}
        load(path, kind="texts", **as_texts)
    assert {TASKS[name].reads for name in (MLM, REPLACED)} == {"texts"}


def test_a_text_stays_a_text(tmp_path, template):
    """Records that had a text before conversations were read."""
    records = [{"text": "0123", "messages": CHATS[0], "prompt": "a", "completion": "b"}] * 9
    path = write_lines(tmp_path / "a.jsonl", records)
    assert (
        load(path, seq_len=4).identity["content"]
        == load(write_lines(tmp_path / "b.jsonl", ["0123"] * 9), seq_len=4).identity["content"]
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    note = "'messages' is not used; to learn from the conversations: --set data.records=messages"
    for source in (path, tmp_path / "a.parquet"):
        assert any(note in one for one in load(source, seq_len=4).notes)
        assert not any(note in one for one in load(source, seq_len=4, records="text").notes)
    assert not any(note in one for one in load(tmp_path / "b.jsonl", seq_len=4).notes)
    forced = load(path, records="messages", chat_template=template)
    assert texts_of(forced) == ["u1;a2;"] * 9
    assert texts_of(load(path, records="completion")) == ["ab"] * 9


def test_bad_lines_are_shown_or_skipped(tmp_path, template):
    good = {"messages": CHATS[0]}
    path = tmp_path / "a.jsonl"
    for bad, message in (
        ({"messages": []}, "an empty list, not a list of messages"),
        ({"messages": [{"content": "x"}]}, "message 1 is an object with 'content', not an object"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "the chat template says"),
        ({"messages": CHATS[0], "tools": "{}"}, "'tools' is an object with nothing"),
        ({"messages": turns("\\ud800", "b")}, "surrogates not allowed"),
        ({"text": "x"}, "'text' is a text, not a list of messages"),
        ("x", "it is a text, not an object"),
    ):
        template_text = TEMPLATE.replace("m.content", "m.content + ''")
        (tmp_path / "chat.jinja").write_text(template_text)
        path.write_text(
            "\n".join(json.dumps(x) for x in (good, bad, good)).replace("\\\\ud", "\\ud")
        )
        with pytest.raises(DataError, match=r"a.jsonl, line 2, (.|\n)*" + message):
            load(path, chat_template=template)
        data = load(path, chat_template=template, skip_bad_lines=True)
        assert data.train.num_texts == 2
        assert "1 bad line(s) skipped" in data.notes[0]


def test_a_template_that_refuses_the_first_record_is_to_be_replaced(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHATS[0]}] * 2)
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('never') }}")
    with pytest.raises(DataError, match=r"says: never\n.*do: .*give another template: ") as caught:
        load(path, chat_template=str(tmp_path / "chat.jinja"))
    assert "skip_bad_lines" not in str(caught.value)


def test_texts_and_conversations_are_not_joined(tmp_path, template):
    chats = write_lines(tmp_path / "a.jsonl", [{"messages": CHATS[0]}] * 2)
    (tmp_path / "b.txt").write_text("0123456789" * 9)
    with pytest.raises(DataError, match=r"both texts and conversations(.|\n)*a mixture"):
        load(chats, tmp_path / "b.txt", chat_template=template)
    with pytest.raises(DataError, match="must not see one another"):
        load(chats, chat_template=template, respect_documents=False)
    with pytest.raises(DataError, match=r"no token of .* counts(.|\n)*2 conversation") as caught:
        load(chats, chat_template=template, loss_on=("tool",))
    assert "with the roles assistant, user; data.loss_on=tool\n" in str(caught.value)
    assert str(caught.value).endswith(": --set data.loss_on=assistant")
    notes = load(chats, chat_template=template, loss_on=("assistant", "tol")).notes
    assert any("role 'tol' (data.loss_on); there are assistant, user" in note for note in notes)
    assert not any("the role" in note for note in load(chats, chat_template=template).notes)


@pytest.mark.parametrize(
    ("roles", "advice"),
    [
        (("human", "gpt"), "name roles that are there, such as: --set data.loss_on=gpt"),
        (("user", "bot", "writer"), "such as: --set data.loss_on=bot,writer"),
        (("system", "user"), "such as: --set data.loss_on=system,user"),
        (("user", "assistant"), "messages are not empty.*--set data.loss_on=all"),
    ],
)
def test_where_nothing_counts_roles_that_are_there_are_advised(roles, advice):
    chat = RenderedChat(text="some text", roles=frozenset(roles))
    with pytest.raises(DataError, match=rf"no token of a counts(.|\n)*do: .*{advice}$"):
        encode_conversations(ByteTokenizer(), [(chat,)], "a", "drop", loss_on=("assistant",))


def numbers(*sizes, counts=None, too_long="truncate"):
    """Conversations with the tokens 0, 1, 2, ..., so that a token tells its place."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return Pieces(
        name="numbers",
        tokens=np.arange(starts[-1], dtype=np.uint16),
        counts=np.ones(starts[-1], bool) if counts is None else np.array(counts, bool),
        starts=starts,
        vocab_size=65536,
        too_long=too_long,
    )


def loader_of(source, *, rows=None, global_batch=3, seq_len=6, seed=3, **fields):
    return BatchLoader(
        source,
        seq_len=seq_len,
        global_batch=global_batch,
        seed=seed,
        rows=np.arange(global_batch) if rows is None else np.array(rows, int),
        respect_documents=True,
        **fields,
    )


def test_conversations_share_examples_without_being_split():
    data = numbers(4, 6, 3, counts=[1, 0, 1, 1] + [1] * 6 + [0, 0, 1])
    batch = data.cut_examples(np.arange(2), seq_len=6, respect_documents=True)
    assert data.count_examples(6) == 2
    assert batch["tokens"].tolist() == [[0, 1, 2, 10, 11, 0], [4, 5, 6, 7, 8, 0]]
    assert batch["targets"].tolist() == [[1, 2, 3, 11, 12, 0], [5, 6, 7, 8, 9, 0]]
    assert batch["loss_mask"].tolist() == [
        [False, True, True, False, True, False],
        [True, True, True, True, True, False],
    ]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0]]
    assert batch["segments"].tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 1]]
    for name, array in batch.items():
        assert array.dtype == BATCH_ARRAYS[name].dtype
        assert array.shape == (2, 6)


def test_all_sizes_are_looked_at_once_in_a_batch(monkeypatch):
    data, found = numbers(*[4] * 16), []
    data.packing(6)
    sizes = Pieces.sizes.fget
    monkeypatch.setattr(Pieces, "sizes", property(lambda it: (found.append(it), sizes(it))[1]))
    data.cut_examples(np.arange(1), seq_len=6, respect_documents=True)
    num_of_one = len(found)
    data.cut_examples(np.arange(8), seq_len=6, respect_documents=True)
    assert len(found) == 2 * num_of_one


def test_long_conversations_are_truncated_or_dropped_and_counted():
    """One that fits with its last target, two that do not; of one of these nothing remains."""
    counts = [1] * 7 + [1] * 8 + [0] * 7 + [1, 1]
    data = numbers(7, 8, 9, counts=counts)
    batch = data.cut_examples(np.arange(2), seq_len=6, respect_documents=True)
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]
    assert batch["targets"][:, -1].tolist() == [6, 13]
    assert batch["loss_mask"].all()
    assert data.too_long_notes(6) == [
        "2 conversation(s) of numbers are longer than seq_len=6 (data.too_long=truncate):"
        " 1 truncated; 1 dropped, since nothing that counts would remain"
    ]
    assert data.too_long_notes(8) == []
    dropping = numbers(7, 8, 9, counts=counts, too_long="drop")
    assert dropping.count_examples(6) == 1
    assert dropping.too_long_notes(6)[0].endswith("(data.too_long=drop): 2 dropped")
    with pytest.raises(DataError, match="no conversation of numbers fits into an example"):
        loader_of(numbers(9, too_long="drop"))


@given(
    st.lists(st.integers(2, 12), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 2**30)
)
def test_every_target_is_in_one_place_of_an_epoch(sizes, seq_len, bits):
    """With the token before it, its place in its conversation, and whether it counts."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    counts = np.array([bits >> (place % 30) & 1 for place in range(starts[-1])], bool)
    counts[starts[:-1] + 1] = True
    data = numbers(*sizes, counts=counts)
    batch = data.cut_examples(
        np.arange(data.count_examples(seq_len)), seq_len=seq_len, respect_documents=True
    )
    is_data = batch["targets"] > 0  # no target is token 0, which is the first one
    found = sorted(zip(*(batch[name][is_data].tolist() for name in ARRAYS), strict=True))
    assert found == [
        (start + place, start + place + 1, place, counts[start + place + 1])
        for start, size in zip(starts.tolist(), sizes, strict=False)
        for place in range(min(size - 1, seq_len))
    ]
    assert not batch["loss_mask"][~is_data].any()


def test_batches_are_a_function_of_seed_and_step_for_any_rows():
    data = numbers(*np.random.default_rng(1).integers(2, 9, 60).tolist())
    whole = loader_of(data)
    for step in (1, 2, 40):
        batch = whole.batch(step)
        parts = [loader_of(data, rows=[row]).batch(step) for row in (2, 0, 1)]
        for name, array in batch.items():
            joined = np.concatenate([parts[1][name], parts[2][name], parts[0][name]])
            assert np.array_equal(joined, array)
    epoch = [loader_of(data, global_batch=1).batch(n) for n in range(1, whole.num_examples + 1)]
    counted = sum(int(batch["loss_mask"].sum()) for batch in epoch)
    assert counted == data.count_targets(6), "each once in an epoch"
    assert not np.array_equal(whole.batch(1)["tokens"], loader_of(data, seed=4).batch(1)["tokens"])


def test_conversations_are_held_out_by_their_hash(tmp_path, template):
    chats = [turns(f"{n}", f"{n * n}") for n in range(60)]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in (*chats, *chats)])
    data = load(path, chat_template=template, eval_fraction=0.2)
    sides = [
        {bytes(side.tokens[a:b]) for a, b in itertools.pairwise(side.starts)}
        for side in (data.train, data.held_out)
    ]
    assert not sides[0] & sides[1], "copies are on one side"
    assert len(sides[0]) + len(sides[1]) == 60
    assert 3 <= len(sides[1]) <= 25
    assert check_held_out(data.held_out, seq_len=16, respect_documents=True, num_examples=99) > 1
    assert data.identity["held_out_by"] == "documents"
    assert load(path, chat_template=template, eval_fraction=0.2, by="end").identity == data.identity
    with pytest.raises(DataError, match="too few conversations"):
        split_pieces(numbers(4), 0.1)


def test_a_run_recognises_masks_borders_and_template(tmp_path, template):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS])
    first = load(path, chat_template=template).identity
    every = load(path, chat_template=template, loss_on=("all",)).identity
    assert {name for name in first if first[name] != every[name]} == {"conversations"}
    (tmp_path / "other.jinja").write_text(TEMPLATE + "{# the same text #}")
    other = load(path, chat_template=str(tmp_path / "other.jinja")).identity
    assert {name for name in first if first[name] != other[name]} == {"chat_template"}
    shifted = numbers(4, 6), numbers(5, 5)
    assert shifted[0].digest != shifted[1].digest


def test_the_description_counts_conversations_and_tokens(tmp_path):
    save_tokenizer(tmp_path / "model", **MODELS["chatml"])
    records = [{"messages": chat} for chat in [*CHATS, turns("no answer")]]
    path = write_lines(tmp_path / "a.jsonl", records)
    data = load(path, tokenizer=str(tmp_path / "model"), seq_len=64)
    counted = int(data.train.counts.sum())
    assert f"in 3 conversations, {counted} of which count" in data.description
    assert data.notes[0].startswith("1 conversation(s) of")
    assert data.notes[0].endswith("left out, because no token of them counts (data.loss_on)")
    assert not any("to end its turn" in note for note in data.notes)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    endless = load(path, tokenizer=str(tmp_path / "model"), seq_len=64)
    assert any("to end its turn" in note for note in endless.notes)
    phases = (PhaseConfig(after_step=1, seq_len=4), PhaseConfig(after_step=2, global_batch=2))
    notes = load(path, tokenizer=str(tmp_path / "model"), seq_len=64, phases=phases).notes
    assert sum("longer than seq_len=4" in note for note in notes) == 1
    messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x"}]
    path = write_lines(tmp_path / "b.jsonl", [{"messages": messages}] * 2)
    notes = load(path, tokenizer=str(tmp_path / "model"), seq_len=64).notes
    assert "2 document(s) contain the text of a special token" in notes[-1]
