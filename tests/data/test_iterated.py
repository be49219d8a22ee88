"""Documents of an iterator with a state are one stream, which can go on from any token."""

import itertools
import json

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.config import DataConfig
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.data import iterated
from optimus_jax.data.dataset import load_data
from optimus_jax.data.iterated import IteratedExamples
from optimus_jax.data.loader import BatchLoader
from optimus_jax.errors import DataError

LENGTH = 16
LOAD = {"seq_len": LENGTH, "vocab_size": 257, "model_name": "gpt2-nano"}
TEXTS = [f"{'word ' * (number % 7)}text {number}" for number in range(50)]
STREAM = np.concatenate([[*text.encode(), 256] for text in TEXTS])


class Texts:
    """An iterable whose state is that of the last item, as of an IterableDataset of `datasets`."""

    def __init__(self, num_texts: int = len(TEXTS)) -> None:
        self.num_texts, self.next = num_texts, 0

    def __iter__(self):
        while self.next < self.num_texts:
            self.next += 1
            yield {"text": TEXTS[self.next - 1]}

    def state_dict(self):
        return {"next": self.next, "as_bytes": bytes([self.next])}

    def load_state_dict(self, state):
        self.next = state["next"]
        assert state["as_bytes"] == bytes([self.next])


def of_grain():
    return iter(grain.MapDataset.source(TEXTS).to_iter_dataset())


def examples(items) -> IteratedExamples:
    data = load_data(DataConfig(sources=(IN_PYTHON,)), given=items, **LOAD)
    assert data.held_out is None
    assert isinstance(data.train, IteratedExamples)
    return data.train


def cut(source: IteratedExamples, numbers) -> np.ndarray:
    batch = source.cut_examples(np.asarray(numbers), seq_len=LENGTH, respect_documents=True)
    return batch["tokens"]


def windows(numbers) -> np.ndarray:
    return np.stack([STREAM[number * LENGTH : (number + 1) * LENGTH] for number in numbers])


@pytest.fixture(autouse=True)
def _short_strides(monkeypatch):
    monkeypatch.setattr(iterated, "STRIDE_TOKENS", 40)
    monkeypatch.setattr(iterated, "MAX_STATES", 8)
    monkeypatch.setattr(iterated, "CHECKED_TOKENS", 100)


@pytest.mark.parametrize("items", [Texts, of_grain])
def test_examples_are_windows_of_the_documents_in_order(items):
    source = examples(items())
    np.testing.assert_array_equal(cut(source, [0, 1, 2]), windows([0, 1, 2]))
    np.testing.assert_array_equal(cut(source, [5, 3]), windows([5, 3]))
    np.testing.assert_array_equal(cut(source, [0]), windows([0]))


def test_an_iterable_dataset_goes_on():
    datasets = pytest.importorskip("datasets")

    def items():
        whole = datasets.Dataset.from_dict({"text": TEXTS})
        return whole.to_iterable_dataset(num_shards=3)

    first, second = examples(items()), examples(items())
    second.go_to(json.loads(json.dumps(first.position_before(20 * LENGTH))))
    np.testing.assert_array_equal(cut(second, range(20, 30)), windows(range(20, 30)))


@given(asked=st.lists(st.integers(0, len(STREAM) // LENGTH - 2), min_size=1, max_size=12))
@settings(max_examples=40)
def test_any_example_can_be_asked_for_at_any_time(asked):
    source = examples(Texts())
    for number in asked:
        np.testing.assert_array_equal(cut(source, [number]), windows([number]))


def test_the_beginning_is_read_again_without_drawing_all_that_follows():
    class Counted(Texts):
        num_drawn = 0

        def __iter__(self):
            for item in super().__iter__():
                self.num_drawn += 1
                yield item

    def drawn_for_the_probe(source, items):
        """Items drawn to read the first example, and the next one after example 60."""
        before = items.num_drawn
        np.testing.assert_array_equal(cut(source, [0]), windows([0]))
        np.testing.assert_array_equal(cut(source, [61]), windows([61]))
        return items.num_drawn - before

    first, again = Counted(), Counted()
    source, resumed = examples(first), examples(again)
    cut(source, range(61))
    assert drawn_for_the_probe(source, first) < 10 < first.next
    resumed.go_to(source.position_before(61 * LENGTH))
    assert drawn_for_the_probe(resumed, again) < 10


@given(before=st.integers(0, 20), after=st.integers(1, 20))
@settings(max_examples=40)
def test_a_position_in_a_checkpoint_is_where_another_process_goes_on(before, after):
    first = examples(Texts())
    cut(first, range(before + 2))  # a loader makes batches ahead
    position = json.loads(json.dumps(first.position_before(before * LENGTH)))
    assert position["token"] + position["skip"] == before * LENGTH
    second = examples(Texts())
    second.go_to(position)
    numbers = range(before, before + after)
    np.testing.assert_array_equal(cut(second, numbers), windows(numbers))
    third = examples(Texts())
    third.go_to(second.position_before(before * LENGTH))
    np.testing.assert_array_equal(cut(third, numbers), windows(numbers))
    np.testing.assert_array_equal(cut(second, [0]), windows([0]))


def test_token_ids_and_texts_are_documents_and_empty_ones_are_left_out():
    class Mixed(Texts):
        def __iter__(self):
            yield from ({"text": "ab"}, {"text": ""}, [99, 256])
            yield from ({"input_ids": [100]}, np.array([101]))

    source = examples(Mixed())
    with pytest.raises(DataError, match=r"has ended[\s\S]*9 tokens since it began"):
        cut(source, [0])
    assert source._joined().tolist() == [97, 98, 256, 99, 256, 100, 256, 101, 256]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([257], "does not have"),
        ({"messages": [{"role": "user", "content": "a"}]}, "texts, or token ids|chat template"),
        ({"label": 1}, "item 1"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask is not read"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "labels is not read"),
        ([], "holds no text"),
    ],
)
def test_what_is_no_document_is_an_error(item, message, monkeypatch):
    monkeypatch.setattr(iterated, "MAX_EMPTY", 10)

    class Wrong(Texts):
        def __iter__(self):
            return itertools.repeat(item)

    with pytest.raises(DataError, match=message):
        examples(Wrong())


def test_states_that_json_does_not_have_come_back_as_they_were():
    state = {
        "random": (3, (1, 2), None),
        3: [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.5)],
        "<odd>": b"\0\xff",
    }
    again = iterated._decoded(json.loads(json.dumps(iterated._encoded(state))))
    assert again["random"] == state["random"]
    np.testing.assert_array_equal(again[3][0], state[3][0])
    assert again[3][0].dtype == np.int16
    assert again["<odd>"] == state["<odd>"]


def test_an_iterator_without_a_state_is_refused():
    class Odd(Texts):
        def state_dict(self):
            return {"next": object()}

    with pytest.raises(DataError, match="cannot be kept in a checkpoint"):
        examples(Odd())


def test_a_state_that_does_not_bring_back_the_same_documents_is_refused():
    class Forgetful(Texts):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.next += 1

    with pytest.raises(DataError, match=r"the same documents[\s\S]*at its beginning"):
        examples(Forgetful())
    source = examples(Texts())
    cut(source, range(12))
    position = source.position_before(11 * LENGTH)
    assert position["skip"] > 0
    other = iterated._encoded({"next": 3, "as_bytes": bytes([3])})
    with pytest.raises(DataError, match="where a checkpoint left it"):
        examples(Texts()).go_to(position | {"state": other})
    with pytest.raises(DataError, match=r"does not take back its state[\s\S]*KeyError"):
        examples(Texts()).go_to(position | {"state": {}})


def of_datasets():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=3)


@pytest.mark.parametrize("make", [Texts, of_grain, of_datasets])
def test_an_iterator_that_is_put_back_can_be_given_again(make):
    items = make()
    source = examples(items)
    cut(source, range(12))
    source.put_back()
    with pytest.raises(DataError, match="has ended"):
        cut(source, [40])  # it reads nothing more
    again = examples(items)
    assert again.digest == source.digest
    np.testing.assert_array_equal(cut(again, [7, 0]), windows([7, 0]))
    again.put_back()
    moved = iter(items)
    next(moved)
    if make is not of_datasets:  # whose iteration always begins at the state that was set
        assert examples(items).digest != source.digest


def test_an_iterator_that_was_moved_is_another_one():
    moved = of_grain()
    next(moved)
    assert examples(of_grain()).digest == examples(Texts()).digest
    assert examples(moved).digest != examples(Texts()).digest


def test_processes_draw_the_same_documents_and_never_go_back():
    class Counted(Texts):
        num_loads = 0

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.num_loads += 1

    sources, batches = [Counted(), Counted()], []
    for items, rows in zip(sources, ([0, 1], [2, 3]), strict=True):
        loader = BatchLoader(
            examples(items),
            seq_len=LENGTH,
            global_batch=4,
            seed=0,
            rows=np.array(rows),
            respect_documents=True,
        )
        assert items.num_loads == 2, "those of the check at the beginning"
        batches.append([loader.batch(step)["tokens"] for step in range(1, 8)])
        assert items.num_loads == 2
        with pytest.raises(DataError, match="has ended") as ended:
            loader.batch(len(STREAM) // (4 * LENGTH) + 1)
        assert ended.value.raised_by_all_processes
    assert sources[0].next == sources[1].next
    whole = np.concatenate([np.concatenate(each) for each in zip(*batches, strict=True)])
    np.testing.assert_array_equal(whole, windows(range(28)))
