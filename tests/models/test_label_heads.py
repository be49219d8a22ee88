"""Models with heads of labels equal Hugging Face's, on one device, on a mesh and in stages."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from published_models import libraries
from test_huggingface import (
    CASES,
    GLOBAL_BATCH,
    GRADIENT_RTOL,
    LOGITS_ATOL,
    ONE_DEVICE,
    SEQ_LEN,
    SHARDED,
    STAGES,
    batch,
    differences,
    logits,
    program_for,
    run,
    state_of,
)

from optimus_jax.config.model import SPAN_LABELS
from optimus_jax.data.labelled import BEGINS, ENDS
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface, to_huggingface
from optimus_jax.models.huggingface_config import config_to_huggingface
from optimus_jax.training.tasks import TASKS

LABELS = {"0": "no", "1": "yes", "2": "perhaps"}
HEADS = {
    "bert, sequences": (CASES["bert"], "AutoModelForSequenceClassification"),
    "bert, tokens": (CASES["bert"], "AutoModelForTokenClassification"),
    "bert, spans": (CASES["bert"], "AutoModelForQuestionAnswering"),
    "electra, spans": (CASES["electra"], "AutoModelForQuestionAnswering"),
    "electra, sequences": (CASES["electra"], "AutoModelForSequenceClassification"),
    "electra, tokens": (CASES["electra"], "AutoModelForTokenClassification"),
    "gpt2, sequences": (CASES["gpt2"], "AutoModelForSequenceClassification"),
    "llama, sequences": (
        CASES["llama, 4 heads per kv head, tied"],
        "AutoModelForSequenceClassification",
    ),
}
TASK_OF = {
    "sequence": "classification",
    "token": "token_classification",
    "span": "question_answering",
}
PAD = 0
"""No token of the batch, so that the last token of a row is the last one that is no padding."""


@cache
def reference(name: str) -> SimpleNamespace:
    """The model in PyTorch: weights, and of `rows_for` the logits, the loss and its gradients."""
    torch, transformers = libraries()
    values, auto = HEADS[name]
    values = {key: value for key, value in values.items() if key != "model_type"}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        HEADS[name][0]["model_type"],
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=PAD,
        id2label={
            int(number): label
            for number, label in LABELS.items()
            if "spans" not in name or int(number) < len(SPAN_LABELS)
        },
        **values,
    )
    config.architectures = None
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager").eval()
    config.architectures = [type(model).__name__]
    for weight in model.parameters():
        weight.data = 0.2 * torch.randn_like(weight) + (weight.data if weight.ndim == 1 else 0)
    rows = rows_for(name, config.vocab_size)
    tokens = torch.tensor(rows["tokens"], dtype=torch.long)
    types = (
        {"token_type_ids": torch.tensor(rows["types"], dtype=torch.long)}
        if config.model_type in ("bert", "electra")
        else {}
    )
    found = model(tokens, **types)
    if "spans" in name:
        bits = rows["targets"] * rows["loss_mask"]
        first, last = (torch.tensor(((bits & bit) > 0).argmax(1)) for bit in (BEGINS, ENDS))
        loss = model(tokens, start_positions=first, end_positions=last, **types).loss
        found = torch.stack([found.start_logits, found.end_logits], -1)
    else:
        found = found.logits
        labels = np.where(rows["loss_mask"], rows["targets"], -100)
        labels = labels if found.ndim == 3 else labels.max(1)
        loss = torch.nn.functional.cross_entropy(
            found.reshape(-1, found.shape[-1]), torch.tensor(labels.reshape(-1), dtype=torch.long)
        )
    loss.backward()
    return SimpleNamespace(
        config=config.to_dict(),
        state_dict={key: tensor.numpy() for key, tensor in model.state_dict().items()},
        logits=found.detach().numpy(),
        loss=loss.item(),
        gradients={
            key: np.zeros(weight.shape, np.float32) if weight.grad is None else weight.grad.numpy()
            for key, weight in model.named_parameters()
        },
    )


def rows_for(name: str, vocab_size: int) -> dict[str, np.ndarray]:
    """Rows of two types, with labels where the class has them."""
    rng, rows = np.random.default_rng(1), dict(batch(vocab_size))
    rows["tokens"] = np.maximum(rows["tokens"], PAD + 1)
    rows["targets"] = rng.integers(0, len(LABELS), (GLOBAL_BATCH, SEQ_LEN), dtype=np.int32)
    rows["types"] = (np.arange(SEQ_LEN) >= rng.integers(3, 9, (GLOBAL_BATCH, 1))).astype(np.int32)
    if "spans" in name:
        rows["targets"] = np.full((GLOBAL_BATCH, SEQ_LEN), -1, np.int32)
        first = rng.integers(0, SEQ_LEN, GLOBAL_BATCH)
        last = np.minimum(first + rng.integers(0, 5, GLOBAL_BATCH), SEQ_LEN - 1)
        for row, (begin, end) in enumerate(zip(first, last, strict=True)):
            rows["targets"][row, begin] = BEGINS
            rows["targets"][row, end] = ENDS if end > begin else BEGINS + ENDS
        rows["loss_mask"] = rows["targets"] > 0
    if "sequences" in name:
        is_decoder = name.startswith(("gpt2", "llama"))
        rows["loss_mask"] = np.zeros((GLOBAL_BATCH, SEQ_LEN), bool)
        rows["loss_mask"][:, -1 if is_decoder else 0] = True
        rows["types"] *= not is_decoder
    return rows


DAILY = ("bert, sequences", "bert, spans")
"""Heads that `make test` compares on a mesh and in stages; `make nightly` compares the others."""


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param(
            name,
            axes,
            id=f"{name} on {axes}",
            marks=() if axes is ONE_DEVICE or name in DAILY else pytest.mark.nightly,
        )
        for name in HEADS
        for axes in (ONE_DEVICE, SHARDED, STAGES)
    ],
)
def test_logits_loss_and_gradients_equal_huggingface(name: str, axes):
    theirs = reference(name)
    model = config_from_huggingface(theirs.config)
    labelled = name.partition(", ")[2].removesuffix("s")
    labels = SPAN_LABELS if labelled == "span" else tuple(LABELS.values())
    assert (model.labels, model.labelled) == (labels, labelled)
    program = program_for(model, axes, task=TASK_OF[labelled])
    vocab_rows = program.shapes.vocab_rows
    state = state_of(program, from_huggingface(theirs.state_dict, model, vocab_rows))
    rows = put_batch(rows_for(name, model.vocab_size), program.batch_sharding, GLOBAL_BATCH)
    if axes is ONE_DEVICE:
        found = np.asarray(run(jax.jit(partial(logits, program)), state.params, rows))
        if labelled == "sequence":
            found = found[:, -1 if name.startswith(("gpt2", "llama")) else 0]
        assert np.abs(found - theirs.logits).max() < LOGITS_ATOL
    state, metrics = run(program.train_step, state, rows)
    off = differences(state.opt_state[0].mu, from_huggingface(theirs.gradients, model, vocab_rows))
    assert float(metrics["loss"]) == pytest.approx(theirs.loss, rel=1e-5)
    if labelled == "span":  # moves all logits of a segment alike: zero but for rounding
        del off["['head_bias']"]
    assert {leaf: value for leaf, value in off.items() if not value < GRADIENT_RTOL} == {}


@pytest.mark.parametrize("name", HEADS)
def test_exported_weights_and_config_are_theirs(name: str):
    theirs = reference(name)
    model = config_from_huggingface(theirs.config)
    assert config_from_huggingface(config_to_huggingface(model)) == model
    ours = to_huggingface(from_huggingface(theirs.state_dict, model, model.vocab_size + 3), model)
    assert ours.keys() == theirs.gradients.keys()
    for key, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs.state_dict[key])


def test_tasks_of_labels_are_those_tested_here():
    of_others = {None, "replacement"}  # tests/models/test_generator.py
    assert {task.labelled for task in TASKS.values()} == {*of_others, *TASK_OF}
