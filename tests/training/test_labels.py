"""Labels of texts and of words: learnt alike under every layout, and as transformers does."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, assert_close
from test_equal_to_one_device import Run, run_case

from optimus_jax.config import Config
from optimus_jax.config.model import SPAN_LABELS
from optimus_jax.config.presets import model_preset
from optimus_jax.data.labelled import BEGINS, ENDS
from optimus_jax.errors import ConfigError
from optimus_jax.training.label_loss import count_spans, span_loss
from optimus_jax.training.step import STEP_METRICS
from optimus_jax.training.tasks import TASKS, check_task, model_of, task_of

LABELS = ("no", "yes", "perhaps")
HEADS = (("bert", "sequence"), ("bert", "token"), ("bert", "span"), ("llama", "sequence"))
CASES = (
    plans.case("data=4,fsdp=2", zero=2, microbatches=2),
    plans.case("data=2,fsdp=2,tensor=2", zero=3, remat="full", microbatches=2),
    plans.case("fsdp=2,tensor=4", zero=3, sequence_parallel=True, microbatches=2),
    plans.case("pipe=2,data=2,tensor=2", microbatches=4, sequence_parallel=True),
    plans.case("pipe=4,data=2", microbatches=3, send_slack=True),
)
"""ZeRO stages, split tokens, and stages."""
DAILY = {"sequence": CASES[3:4], "span": CASES}
"""Plans under which BERT learns labels in `make test`; the others are nightly."""


def with_labels_of_batch(batch):
    """Labels and types that the shared batches do not have."""
    return {
        **batch,
        "targets": batch["targets"] % len(LABELS),
        "types": batch["segments"] % 2,
    }


def with_spans_of_batch(batch):
    """Every segment is an answer, from its first token to its last; some do not count."""
    is_first = batch["positions"] == 0
    is_last = np.concatenate([is_first[:, 1:], np.ones_like(is_first[:, :1])], axis=1)
    targets = (BEGINS * is_first + ENDS * is_last).astype(np.int32)
    counts = (batch["segments"] + batch["examples"][:, None]) % 3 > 0
    return {**with_labels_of_batch(batch), "targets": targets, "loss_mask": counts & (targets > 0)}


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    for name, task in TASKS.items():
        if task.labelled is not None:
            prepare = with_spans_of_batch if task.labelled == "span" else with_labels_of_batch
            monkeypatch.setitem(TASKS, name, replace(task, prepare=prepare))


def model_for(case, family, labelled):
    labels = SPAN_LABELS if labelled == "span" else LABELS
    return replace(plans.model_for(case, family), labels=labels, labelled=labelled)


def settings_of(model):
    return {"task": next(name for name, t in TASKS.items() if t.labelled == model.labelled)}


@functools.cache
def one_device(model) -> Run:
    return run_case(model, plans.ONE_DEVICE, settings_of(model))


@pytest.mark.parametrize(
    ("family", "labelled", "case"),
    [
        pytest.param(
            family,
            labelled,
            case,
            id=f"{family}, {labelled}, {case}",
            marks=()
            if family == "bert" and case in DAILY.get(labelled, ())
            else pytest.mark.nightly,
        )
        for family, labelled in HEADS
        for case in CASES
    ],
)
def test_labels_are_learnt_alike_under_every_layout(case, family, labelled):
    model = model_for(case, family, labelled)
    run, one = run_case(model, case, settings_of(model)), one_device(model)
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        metric = "exact_match" if labelled == "span" else "accuracy"
        assert set(found) == {*STEP_METRICS, metric}
        assert found["tokens"] == expected["tokens"] > 0
        assert 0 <= expected[metric] < 1
        assert_close(found, expected, F32_RELATIVE)
    for found, expected in zip(run.states, one.states, strict=True):
        if labelled == "span":  # moves all logits of a segment alike: its gradient is rounding
            found, expected = (
                {path: leaf for path, leaf in state.items() if "head_bias" not in path}
                for state in (found, expected)
            )
        assert_close(found, expected, F32_RELATIVE)


def test_a_task_without_labels_needs_its_own_head():
    model = replace(model_preset("bert-nano"), labels=LABELS)
    with pytest.raises(ConfigError, match="head over the vocabulary"):
        check_task(Config(model=model, task="mlm"))


@pytest.mark.parametrize("labelled", ["sequence", "token", "span"])
def test_a_model_with_labels_picks_its_task(labelled):
    model = replace(model_preset("bert-nano"), labels=LABELS, labelled=labelled)
    assert task_of(Config(model=model)).labelled == labelled


def test_a_task_says_what_has_a_label():
    model = replace(model_preset("bert-nano"), labels=LABELS, labelled="sequence")
    config = Config(model=model, task="token_classification")
    check_task(config)
    assert (model_of(config).labelled, model_of(config).labels) == ("token", LABELS)


def test_a_plan_without_data_has_some_labels():
    config = Config(model=model_preset("bert-nano"), task="token_classification")
    found = model_of(config)
    assert (len(found.labels), found.labelled) == (2, "token")
    assert model_of(replace(config, model=replace(found, labels=LABELS))).labels == LABELS
    assert model_of(replace(config, task="mlm")) == config.model


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [(1, 2, 1), (3, 4, 1), (5, 5, 1), (1, 4, 0), (3, 2, 0), (0, 0, 0)],
)
def test_any_of_several_answers_is_a_match(first, last, found):
    targets = np.full((1, 8), -1, np.int32)
    targets[0, [1, 2, 3, 4, 5]] = [BEGINS, ENDS, BEGINS << 2, ENDS << 2, 3 << 4]
    logits = np.zeros((1, 8, 2), np.float32)
    logits[0, first, 0] = logits[0, last, 1] = 5.0
    same = SimpleNamespace(
        all_tokens=lambda values: values,
        local_tokens=lambda values: values,
        head_input=lambda value, comm: value,
        logits=lambda value, context: value,
    )
    rows = {
        "targets": jnp.asarray(targets),
        "segments": jnp.zeros((1, 8), jnp.int32),
        "loss_mask": jnp.asarray((targets == BEGINS) | (targets == ENDS)),
    }
    inputs = SimpleNamespace(
        comm=same, model=same, rows=rows, value=jnp.asarray(logits), weight=jnp.float32(1.0)
    )
    sums = span_loss(inputs)
    assert count_spans(rows) == 1
    assert sums.metrics["exact_match"] == found
    of_first = jax.nn.log_softmax(logits[0], axis=0)
    # Where the loss is small, log_softmax subtracts numbers that are almost equal.
    np.testing.assert_allclose(sums.loss, -(of_first[1, 0] + of_first[2, 1]) / 2, atol=1e-6)
