"""Mixtures: proportions, epochs of each source, and batches by step alone."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optimus_jax.config import DataConfig
from optimus_jax.data.dataset import load_data
from optimus_jax.data.loader import BatchLoader, check_held_out, eval_batches
from optimus_jax.data.mixture import MAX_PERIOD, Mixture, SourceSequence, period_counts
from optimus_jax.data.sampler import count_examples, cut_examples, order_of
from optimus_jax.data.tokenizers import ByteTokenizer, encode_documents
from optimus_jax.data.tokens import TokenStream, write_token_file
from optimus_jax.errors import ConfigError, DataError

LENGTH = 4


def load(*sources, by=None, seq_len=LENGTH, **fields):
    config = DataConfig(sources=sources, **({"eval_fraction": 0.0} | fields))
    return load_data(config, seq_len=seq_len, vocab_size=300, model_name="tiny", by=by)


def loader_of(source, *, rows=None, global_batch=6, seed=3, seq_len=LENGTH):
    return BatchLoader(
        source,
        seq_len=seq_len,
        global_batch=global_batch,
        seed=seed,
        rows=np.arange(global_batch) if rows is None else np.array(rows),
        respect_documents=True,
    )


@pytest.fixture
def files(tmp_path):
    """A text, a token file, and conversations; their tokens tell them apart."""
    (tmp_path / "web.txt").write_text("w" * 201)
    texts = ["c" * 30] * 4
    write_token_file(
        tmp_path / "code.bin", encode_documents(ByteTokenizer(), texts), ByteTokenizer()
    )
    chats = [{"prompt": "pp", "completion": f"{n}"} for n in range(50)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return {name: str(tmp_path / name) for name in ("web.txt", "code.bin", "chat.jsonl")}


def three(files):
    return (
        f"web=0.5:{files['web.txt']}",
        f"code=0.2:{files['code.bin']}",
        f"chat=0.3:{files['chat.jsonl']}",
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
@example([20, 8, 20, 1, 1])  # to serve whoever is most behind is not enough here
def test_no_source_is_ever_an_example_ahead_or_behind(counts):
    sequence = SourceSequence(counts)
    taken = [0] * len(counts)
    for place in range(2 * sequence.period):
        source, number = sequence[place]
        assert number == taken[source]
        taken[source] += 1
        for have, count in zip(taken, counts, strict=True):
            assert abs(have - Fraction(count * (place + 1), sequence.period)) < 1
    assert taken == [2 * count for count in counts]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=4))
def test_the_longest_beginning_needs_no_more_than_there_is(pairs):
    counts, available = zip(*pairs, strict=True)
    sequence = SourceSequence(counts)
    needed, length = [0] * len(counts), 0
    while True:
        source, number = sequence[length]
        if number >= available[source]:
            break
        needed[source] += 1
        length += 1
    assert sequence.longest(available) == length


def test_weights_are_exact_or_rounded_to_a_period():
    def counts(*weights):
        return period_counts([Fraction(weight) for weight in weights])

    assert counts("0.8", "0.2") == (4, 1)
    assert counts("8", "2") == (4, 1)
    assert counts("0.333", "0.333", "0.334") == (333, 333, 334)
    rounded = counts("1234567", "0.001", "7654321")
    assert sum(rounded) == MAX_PERIOD
    assert rounded[1] == 1
    assert abs(rounded[0] / MAX_PERIOD - 1234567 / 8888888) < 1e-4


def test_every_source_goes_through_its_own_epochs(files):
    data = load(*three(files))
    assert isinstance(data.train, Mixture)
    order = order_of(data.train, LENGTH, 3)
    found = [divmod(order[n], 3) for n in range(400)]
    for source, part in enumerate(data.train.parts):
        own = [number for number, which in found if which == source]
        assert abs(len(own) - 400 * (0.5, 0.2, 0.3)[source]) < 1
        size = count_examples(part, LENGTH)
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert found != [divmod(order_of(data.train, LENGTH, 4)[n], 3) for n in range(400)]


def test_rows_come_from_sources_of_each_kind(files):
    data = load(*three(files))
    batch = loader_of(data.train, global_batch=10).batch(1)
    kinds = [
        "web" if ord("w") in row else "code" if ord("c") in row else "chat"
        for row in batch["tokens"].tolist()
    ]
    assert sorted(kinds) == ["chat"] * 3 + ["code"] * 2 + ["web"] * 5
    for row, kind in enumerate(kinds):
        if kind == "chat":
            assert batch["tokens"][row, :2].tolist() == [*b"pp"]
            assert not batch["loss_mask"][row, 0]


def test_batches_are_a_function_of_seed_and_step_for_any_rows(files):
    data = load(*three(files))
    for step in (1, 7, 10**9):
        whole = loader_of(data.train).batch(step)
        for rows in ([0, 1, 2], [5], [4, 3]):
            part = loader_of(data.train, rows=rows).batch(step)
            for name, array in part.items():
                assert np.array_equal(array, whole[name][rows]), name
    assert loader_of(data.train, rows=np.array([], int)).batch(1)["tokens"].shape == (0, LENGTH)


def test_a_phase_goes_on_where_the_one_before_has_stopped(files):
    data = load(*three(files))
    small = np.concatenate([loader_of(data.train).batch(step)["tokens"] for step in range(1, 6)])
    larger = BatchLoader(
        data.train,
        seq_len=LENGTH,
        global_batch=9,
        seed=3,
        rows=np.arange(9),
        respect_documents=True,
        steps_before=2,
        examples_before=12,
    )
    assert np.array_equal(
        np.concatenate([larger.batch(step)["tokens"] for step in (3, 4)]), small[12:30]
    )


def test_one_source_with_a_weight_has_all_rows(files):
    data = load(f"web=3:{files['web.txt']}")
    assert set(loader_of(data.train).batch(1)["tokens"].ravel()) == {ord("w")}


def test_weights_of_old_lines_change_nothing(files):
    """Sources without weights are one stream, with the batches that they had before."""
    data = load(files["web.txt"], files["web.txt"])
    assert isinstance(data.train, TokenStream)
    order = order_of(data.train, LENGTH, 3)
    batch = loader_of(data.train).batch(2)
    examples = np.array([order[6 + row] for row in range(6)])
    cut = cut_examples(data.train, examples, seq_len=LENGTH, respect_documents=True)
    assert np.array_equal(batch["tokens"], cut["tokens"])


def test_what_is_held_out_is_mixed_by_the_weights_too(files):
    data = load(*three(files), eval_fraction=0.3)
    assert data.identity["held_out_by"] == "documents end documents"
    sizes = [count_examples(part, LENGTH) for part in data.held_out.parts]
    number = check_held_out(data.held_out, seq_len=LENGTH, respect_documents=True, num_examples=999)
    assert number == data.held_out.sequence.longest(sizes) > 5
    batches = eval_batches(
        data.held_out,
        seq_len=LENGTH,
        num_rows=4,
        rows=np.arange(4),
        respect_documents=True,
        num_examples=number,
    )
    sources = [data.held_out.sequence[place][0] for place in range(number)]
    rows = [row for batch in batches for row in batch["tokens"].tolist()][:number]
    assert [ord("w") in row for row in rows] == [source == 0 for source in sources]
    again = load(*three(files), eval_fraction=0.3, by="documents documents documents")
    assert again.identity["held_out_by"] == "documents documents documents"
    assert again.identity["content"] != data.identity["content"], "a run keeps its rule"


def test_a_run_recognises_sources_and_weights(files):
    first = load(*three(files)).identity
    moved = load(*(source.replace("web=", "net=") for source in three(files))).identity
    assert moved == first, "names are for people"
    for changed in (
        three(files)[::-1],
        (three(files)[0].replace("0.5", "0.6"), *three(files)[1:]),
        three(files)[:2],
    ):
        assert load(*changed).identity["content"] != first["content"]


def test_the_description_says_each_sources_share_and_tokens(files):
    data = load(f"web=2:{files['web.txt']}", f"code=1:{files['code.bin']}")
    assert data.description.startswith("mixture of 2 sources by examples: web 66.67%: ")
    assert "web.txt: 202 tokens" in data.description
    assert "code 33.33%: " in data.description
    assert "code.bin: 124 tokens" in data.description
    rounded = load(f"web=0.3333333:{files['web.txt']}", f"code=0.1:{files['code.bin']}")
    assert rounded.notes[-1].startswith("the weights of the mixture are rounded to web 50,")


def test_a_source_that_is_too_short_is_named(files, tmp_path):
    (tmp_path / "short.txt").write_text("ab")
    data = load(f"web=1:{files['web.txt']}", f"short=1:{tmp_path / 'short.txt'}")
    with pytest.raises(DataError, match=r"short\.txt is shorter than one example"):
        loader_of(data.train)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (("web=1:a.txt", "b.txt"), r"only some sources(.|\n)*web=1:a.txt and b.txt"),
        (("web=0:a.txt",), "must be a positive number"),
        (("web=-1:a.txt",), "must be a positive number"),
        (("web=1e99:a.txt",), "must be a positive number"),
        (("web=1.2.3:a.txt",), "must be a positive number"),
        (("web=1:a.txt", "web=2:b.txt"), r"the same name(.|\n)*web=1:a.txt web=2:b.txt"),
        (("web=1:  ",), "--data"),
    ],
)
def test_malformed_weights_are_refused(sources, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(sources=sources)


def test_paths_of_a_mixture_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = DataConfig(sources=("web=0.8:a/*.txt", "std=0.2:stdlib", "far=1:s3://bucket/a.txt"))
    assert config.with_whole_paths().sources == (
        f"web=0.8:{tmp_path}/a/*.txt",
        "std=0.2:stdlib",
        "far=1:s3://bucket/a.txt",
    )
    plain = DataConfig(sources=("s3://bucket/a.txt", "./a=1:b.txt"))
    assert plain.mixture == ()
