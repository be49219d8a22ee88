"""A task of one row trains under every layout like on one device."""

import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE, assert_close
from test_equal_to_one_device import run_case

from optimus_jax.data.batch import BATCH_ARRAYS, BatchArray
from optimus_jax.errors import ConfigError
from optimus_jax.training.task import TASKS, Task, task_named


def two_ahead() -> Task:
    """Predict the token after the next one, from an array of its own."""
    next_token = TASKS["next_token"]

    def prepare(batch):
        known = batch["segments"][:, 1:] == batch["segments"][:, :-1]
        after = np.concatenate([batch["targets"][:, 1:], batch["targets"][:, :1]], axis=1)
        counts = np.concatenate([known, np.zeros_like(known[:, :1])], axis=1)
        kept = {name: batch[name] for name in ("tokens", "positions", "segments", "examples")}
        return kept | {"second": after, "counts": counts & batch["loss_mask"]}

    def loss(model, x_BLD, rows, **how):
        read = {"targets": rows["second"], "loss_mask": rows["counts"]}
        return next_token.loss(model, x_BLD, read, **how)

    arrays = {
        name: array for name, array in BATCH_ARRAYS.items() if name not in ("targets", "loss_mask")
    }
    return Task(
        loss=loss,
        count=lambda rows: rows["counts"].sum(dtype=jnp.int32),
        arrays=arrays
        | {
            "second": BatchArray(np.int32, "the token after the next one"),
            "counts": BatchArray(np.bool_, "whether it counts"),
        },
        prepare=prepare,
    )


@pytest.mark.parametrize(
    "case",
    [
        plans.case("data=2,fsdp=2,tensor=2", zero=3, microbatches=2),
        plans.case("pipe=2,tensor=4", microbatches=4, sequence_parallel=True),
    ],
    ids=str,
)
def test_a_second_task_equals_one_device(case, monkeypatch):
    monkeypatch.setitem(TASKS, "two_ahead", two_ahead())
    model, settings = plans.model_for(case, "gpt"), {"task": "two_ahead"}
    run, one = (run_case(model, each, settings) for each in (case, plans.ONE_DEVICE))
    for ours, theirs in zip(run.metrics, one.metrics, strict=True):
        assert_close(ours["loss"], theirs["loss"], F32_RELATIVE)
        assert ours["tokens"] == theirs["tokens"] > 0
    other = run_case(model, plans.ONE_DEVICE)
    assert other.metrics[0]["tokens"] > one.metrics[0]["tokens"]
    for path, theirs in one.states[1].items():
        assert_close(run.states[1][path], theirs, F32_RELATIVE)


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="next_token"):
        task_named("next-token")
