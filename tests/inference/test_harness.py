"""A model measured by lm-evaluation-harness scores as its own logits do."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import F32_RELATIVE
from test_generation import MODELS, random_model

from optimus_jax.data.token_ids import TextFrame
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.errors import ConfigError, DataError

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

from optimus_jax.inference.harness import HarnessModel
from optimus_jax.inference.text_model import GenerationSettings

TEXTS = [
    ("the quick", " brown fox"),
    ("a", "b"),
    ("", "no context at all"),
    ("a rather long context of several words, then", " its end"),
]


@pytest.fixture(scope="module")
def model():
    random = random_model(MODELS["llama with grouped heads"])
    return replace(random, tokenizer=ByteTokenizer())


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=index)
        for index, each in enumerate(arguments)
    ]


def log_probabilities(model, ids) -> np.ndarray:
    """Of each token but the first: float64 [L - 1]."""
    logits = model.logits(ids[:-1]).astype(np.float64)
    normalizer = np.log(np.exp(logits).sum(-1))
    return logits[np.arange(len(ids) - 1), ids[1:]] - normalizer


def test_a_published_model_reads_texts_as_its_tokenizer_begins_them(model):
    class Begins(ByteTokenizer):
        frame = TextFrame(before=(7,), after=(), first=(), middle=(), last=())

    begins = Begins()
    published = HarnessModel(replace(model, tokenizer=begins, step=None))
    of_run = HarnessModel(replace(model, tokenizer=begins))
    asked = instances("loglikelihood", [("ab", "c"), ("", "c")])
    found = [score for score, _ in published.loglikelihood(asked, disable_tqdm=True)]
    assert found[0] == pytest.approx(log_probabilities(model, [7, *b"abc"])[-1], rel=F32_RELATIVE)
    assert found[1] == pytest.approx(log_probabilities(model, [7, *b"c"])[-1], rel=F32_RELATIVE)
    (score, _), *_ = of_run.loglikelihood(asked, disable_tqdm=True)
    assert score == pytest.approx(log_probabilities(model, [*b"abc"])[-1], rel=F32_RELATIVE)
    whole = instances("loglikelihood_rolling", [("abc",)])
    assert published.loglikelihood_rolling(whole, disable_tqdm=True)[0] == pytest.approx(
        log_probabilities(model, [7, *b"abc"]).sum(), rel=F32_RELATIVE
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_continuation_scores_as_its_logits_say(model, batch_size):
    harness = HarnessModel(model, batch_size=batch_size)
    scores = harness.loglikelihood(instances("loglikelihood", TEXTS), disable_tqdm=True)
    for (context, following), (score, is_likeliest) in zip(TEXTS, scores, strict=True):
        before = list(context.encode()) or [harness.prefix_token_id]
        ids = [*before, *following.encode()]
        expected = log_probabilities(model, ids)[-len(following) :].sum()
        assert score == pytest.approx(expected, rel=F32_RELATIVE)
        assert not is_likeliest
    (likeliest,) = model.logits(list(b"abc"))[-1:].argmax(-1)
    given = [([*b"abc"], [int(likeliest)])]
    assert harness._scores(given, True)[0][1], "the likeliest token is what would be generated"


def test_a_long_context_is_cut_at_its_beginning(model):
    harness = HarnessModel(model)
    text = "0123456789" * 10
    (score, _), *_ = harness.loglikelihood(
        instances("loglikelihood", [(text, "abc")]), disable_tqdm=True
    )
    ids = list((text + "abc").encode())[-(model.config.max_length + 1) :]
    expected = log_probabilities(model, ids)[-3:].sum()
    assert score == pytest.approx(expected, rel=F32_RELATIVE)
    with pytest.raises(DataError, match="100 tokens, 64 positions"):
        harness.loglikelihood(instances("loglikelihood", [("a", text)]), disable_tqdm=True)


def test_every_token_of_a_text_counts_once(model):
    harness = HarnessModel(model)
    short, long = "a text", "0123456789" * 10
    values = harness.loglikelihood_rolling(
        instances("loglikelihood_rolling", [(short,), (long,), ("",)]), disable_tqdm=True
    )
    eos = harness.prefix_token_id
    assert values[0] == pytest.approx(
        log_probabilities(model, [eos, *short.encode()]).sum(), rel=F32_RELATIVE
    )
    ids, limit = list(long.encode()), model.config.max_length
    first = log_probabilities(model, [eos, *ids[:limit]]).sum()
    rest = log_probabilities(model, ids[-(limit + 1) :])[-(len(ids) - limit) :].sum()
    assert values[1] == pytest.approx(first + rest, rel=F32_RELATIVE)
    assert values[2] == 0


def test_an_answer_ends_before_its_stop_text(model):
    harness = HarnessModel(model)
    how = GenerationSettings(max_new_tokens=12, temperature=0)
    whole = "".join(piece for (piece,) in model.generate("begin", how))
    assert len(whole) > 5, "so that there is a text to stop at"
    asked = [
        ("begin", {"until": [], "max_gen_toks": 12}),
        ("begin", {"until": whole[3:5], "max_gen_toks": 12, "do_sample": False}),
        ("begin" * 40, {"until": ["\n\n"], "max_gen_toks": 4, "temperature": 0.0}),
    ]
    answers = harness.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert answers[0] == whole
    assert answers[1] == whole[: whole.index(whole[3:5])]
    assert answers[2]
    drawn = [("begin", {"until": [], "max_gen_toks": 12, "temperature": 1.0})] * 2
    first, second = harness.generate_until(instances("generate_until", drawn), disable_tqdm=True)
    assert first != second, "of repeats each is drawn anew"
    assert harness.generate_until(instances("generate_until", [("", asked[0][1])]))[0]
    with pytest.raises(ConfigError, match="num_beams=4"):
        harness.generate_until(
            instances("generate_until", [("a", {"num_beams": 4})]), disable_tqdm=True
        )


def test_the_harness_measures_a_task_without_a_network(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval")
    rows = [
        {"question": f"{number} and", "choices": [" one", " two", " three"], "answer": number % 3}
        for number in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl")},
        "test_split": "train",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    found = lm_eval.simple_evaluate(
        model=HarnessModel(model), tasks=[task], bootstrap_iters=0, log_samples=False
    )
    best = [
        np.argmax(
            [
                log_probabilities(model, list((row["question"] + choice).encode()))[
                    -len(choice) :
                ].sum()
                for choice in row["choices"]
            ]
        )
        for row in rows
    ]
    expected = np.mean([choice == row["answer"] for choice, row in zip(best, rows, strict=True)])
    assert found["results"]["choices"]["acc,none"] == pytest.approx(expected)
