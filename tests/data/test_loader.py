import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.data.loader import BatchLoader, check_held_out, eval_batches
from optimus_jax.data.sampler import cut_examples
from optimus_jax.data.tokens import TokenStream
from optimus_jax.errors import DataError


def stream_of(length, eos=65535):
    """Tokens 0, 1, 2, ..., so that a token tells its place."""
    return TokenStream(
        name="numbers", tokens=np.arange(length, dtype=np.uint16), eos=eos, vocab_size=65536
    )


def loader_of(length=101, *, rows=None, global_batch=6, seq_len=4, seed=3):
    rows = np.arange(global_batch) if rows is None else np.array(rows, int)
    return BatchLoader(
        stream_of(length),
        seq_len=seq_len,
        global_batch=global_batch,
        seed=seed,
        rows=rows,
        respect_documents=True,
    )


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for name, array in batch.items():
        assert array.dtype == other[name].dtype
        assert np.array_equal(array, other[name]), name


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_phase_continues_the_data_order_of_earlier_steps():
    """Two steps of 6 examples, then steps of 9 in the same order; step numbers continue."""
    ramped = BatchLoader(
        stream_of(101),
        seq_len=4,
        global_batch=9,
        seed=3,
        rows=np.arange(9),
        respect_documents=True,
        steps_before=2,
        examples_before=12,
    )
    small = np.concatenate([loader_of().batch(step)["tokens"] for step in range(1, 6)])
    assert np.array_equal(
        np.concatenate([ramped.batch(step)["tokens"] for step in (3, 4)]), small[12:30]
    )
    [(step, batch)] = itertools.islice(ramped.iterate(4), 1)
    assert step == 4
    assert_same(batch, ramped.batch(4))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.permutations(range(6)),
    cuts=st.lists(st.integers(0, 6), max_size=4),
    step=st.integers(1, 30),
)
def test_any_partition_of_the_rows_makes_the_same_global_batch(rows, cuts, step):
    whole = loader_of().batch(step)
    edges = [0, *sorted(cuts), 6]
    parts = [loader_of(rows=rows[a:b]).batch(step) for a, b in itertools.pairwise(edges)]
    union = {name: np.concatenate([part[name] for part in parts]) for name in whole}
    assert union["examples"].tolist() == list(rows)
    assert_same(
        {name: array[np.argsort(union["examples"])] for name, array in union.items()}, whole
    )


@settings(max_examples=40, deadline=None)
@given(length=st.integers(6, 120), global_batch=st.integers(1, 7), seq_len=st.integers(1, 5))
def test_an_epoch_shows_every_token_once(length, global_batch, seq_len):
    loader = loader_of(length, global_batch=global_batch, seq_len=seq_len)
    steps = -(-loader.num_examples // global_batch)
    rows = np.concatenate([loader.batch(step)["tokens"] for step in range(1, steps + 1)])[
        : loader.num_examples
    ]
    assert sorted(rows.ravel()) == list(range(loader.tokens_per_epoch))


def test_the_next_epoch_has_another_order():
    loader = loader_of(25, global_batch=6)  # one step is one epoch
    assert loader.num_examples == 6
    epochs = [loader.batch(step)["tokens"][:, 0].tolist() for step in range(1, 9)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 4


def test_the_seed_changes_the_order():
    assert not np.array_equal(
        loader_of(seed=3).batch(1)["tokens"], loader_of(seed=4).batch(1)["tokens"]
    )


def test_rows_equal_examples_cut_from_the_stream():
    batch = loader_of(rows=[5, 2]).batch(7)
    examples = batch["tokens"][:, 0] // 4
    expected = cut_examples(stream_of(101), examples, seq_len=4, respect_documents=True)
    assert_same(batch, expected | {"examples": np.array([5, 2], np.int32)})


def test_resumed_loader_gives_the_same_batches():
    straight = list(itertools.islice(loader_of().iterate(1), 8))
    resumed = list(itertools.islice(loader_of().iterate(5), 4))
    assert [step for step, _ in straight] == list(range(1, 9))
    for (step, batch), (resumed_step, other) in zip(straight[4:], resumed, strict=True):
        assert step == resumed_step
        assert_same(batch, other)
        assert_same(batch, loader_of().batch(step))


@pytest.fixture
def requested_steps(monkeypatch):
    """The steps that batches were made of; step 4 fails."""
    steps, batch = [], BatchLoader.batch

    def record(loader, step):
        steps.append(step)
        if step == 4:
            raise OSError("the disk is gone")
        return batch(loader, step)

    monkeypatch.setattr(BatchLoader, "batch", record)
    return steps


@pytest.mark.usefixtures("requested_steps")
def test_error_of_the_loader_is_raised_at_its_own_step():
    batches = loader_of().iterate(2)
    assert [next(batches)[0], next(batches)[0]] == [2, 3]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not loader_threads()


def test_stopping_early_ends_the_thread_and_prefetch_is_bounded(requested_steps):
    batches = loader_of().iterate(10)
    next(batches)
    assert loader_threads()
    batches.close()
    assert not loader_threads()
    assert requested_steps[0] == 10
    assert set(requested_steps) <= {10, 11, 12}


def test_data_shorter_than_an_example_is_an_error():
    assert loader_of(5).num_examples == 1
    with pytest.raises(DataError) as error:
        loader_of(4)
    assert str(error.value) == (
        "numbers is shorter than one example\n  given: 4 tokens; seq_len=4 needs 5\n"
        "  do:    give more data, or use a smaller --seq-len"
    )


def test_rows_outside_the_batch_fail_an_assertion():
    with pytest.raises(AssertionError):
        loader_of(rows=[6])


def evaluate(length, num_examples=48, rows=range(6), num_rows=6):
    return list(
        eval_batches(
            stream_of(length),
            seq_len=4,
            num_rows=num_rows,
            rows=np.array(rows, int),
            respect_documents=True,
            num_examples=num_examples,
        )
    )


@given(length=st.integers(5, 150), num_examples=st.integers(1, 50), num_rows=st.integers(1, 9))
def test_evaluation_counts_the_same_held_out_tokens_once_and_in_order(
    length, num_examples, num_rows
):
    """However many rows a batch has."""
    batches = evaluate(length, num_examples, range(num_rows), num_rows)
    found = min(num_examples, (length - 1) // 4)
    assert len(batches) == -(-found // num_rows)
    counted = np.concatenate([batch["tokens"][batch["loss_mask"]] for batch in batches])
    assert counted.tolist() == list(range(found * 4))


def test_last_evaluation_batch_is_filled_up_to_full_shape():
    first, last = evaluate(8 * 4 + 1)
    assert last["tokens"].shape == first["tokens"].shape == (6, 4)
    assert last["loss_mask"].any(axis=1).tolist() == [True, True, False, False, False, False]
    assert last["tokens"].max() < 8 * 4
    assert last["examples"].tolist() == list(range(6, 12)), "numbers in the evaluation"


@given(rows=st.permutations(range(6)), num_rows=st.integers(1, 6))
def test_evaluation_rows_are_those_of_the_global_batch(rows, num_rows):
    rows = rows[:num_rows]
    for mine, whole in zip(evaluate(60, rows=rows), evaluate(60), strict=True):
        assert_same(mine, {name: array[rows] for name, array in whole.items()})


def test_held_out_data_shorter_than_an_example_fails_at_the_call():
    message = r"given: 4 tokens; seq_len=4 needs 5\n.*raise data.eval_fraction.*--set eval_every=0"
    with pytest.raises(DataError, match=message):
        check_held_out(stream_of(4), seq_len=4, respect_documents=True, num_examples=6)


def test_held_out_data_without_counted_tokens_is_an_error():
    """In documents of one token, every token is the last and has nothing to predict."""
    ends = TokenStream(name="ends", tokens=np.full(41, 7, np.uint16), eos=7, vocab_size=8)
    with pytest.raises(
        DataError, match=r"no token of ends counts(.|\n)*10 examples of 4 tokens(.|\n)*eval_every=0"
    ):
        check_held_out(ends, seq_len=4, respect_documents=True, num_examples=50)
    assert check_held_out(ends, seq_len=4, respect_documents=False, num_examples=50) == 10
    assert (
        check_held_out(stream_of(4 * 40 + 1), seq_len=4, respect_documents=True, num_examples=17)
        == 17
    )
