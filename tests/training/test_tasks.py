"""A task of one row, with a metric, on layers with auxiliary sums: it trains under every layout
like on one device.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F16_RELATIVE, F32_RELATIVE, assert_close
from test_equal_to_one_device import Run, run_case

from optimus_jax.data.batch import BATCH_ARRAYS, BatchArray, synthetic_batch
from optimus_jax.errors import ConfigError
from optimus_jax.mesh.axes import MLP, VOCAB
from optimus_jax.models import transformer
from optimus_jax.models.block import Block, ForwardContext
from optimus_jax.models.families import FAMILIES
from optimus_jax.models.layer_program import layer_programs
from optimus_jax.training.step import STEP_METRICS
from optimus_jax.training.task import RESERVED_NAMES, Task
from optimus_jax.training.tasks import TASKS, task_named

WEIGHTS = {"stream": 0.1, "units": 0.02}
"""Of the auxiliary sums; both change the gradients."""
SETTINGS = {"task": "two_ahead"}


class BlockWithSums(Block):
    """A block that sums squares of the residual stream, of which devices have all or their own
    tokens, and of hidden units, of which devices have all or their own.
    """

    def __call__(self, x_BLD, layer, run, cos_sin, cache=None):
        out = super().__call__(x_BLD, layer, run, cos_sin, cache)
        every_token = run.comm.fan_out(x_BLD.astype(run.comm.sums), MLP)
        units = self.mlp.hidden(every_token, run.comm).astype(jnp.float32)
        stream = out.x_BLD.astype(jnp.float32)
        return out._replace(
            auxiliary={
                "stream": jnp.square(stream).mean(-1).sum(),
                "units": jnp.square(units).sum() / plans.LLAMA.mlp_dim,
            }
        )


def two_ahead(**changes) -> Task:
    """Predict the token after the next one, from an array of its own, and count how many are
    predicted.
    """
    next_token = TASKS["next_token"]

    def prepare(batch):
        known = batch["segments"][:, 1:] == batch["segments"][:, :-1]
        after = np.concatenate([batch["targets"][:, 1:], batch["targets"][:, :1]], axis=1)
        counts = np.concatenate([known, np.zeros_like(known[:, :1])], axis=1)
        kept = {name: batch[name] for name in ("tokens", "positions", "segments", "examples")}
        return kept | {"second": after, "counts": counts & batch["loss_mask"]}

    def loss(inputs):
        rows, comm, model = inputs.rows, inputs.comm, inputs.model
        read = {"targets": rows["second"], "loss_mask": rows["counts"]}
        sums = next_token.loss(replace(inputs, rows=read))
        hidden = model.head_input(inputs.value, comm)
        logits = jax.lax.stop_gradient(model.logits(hidden, ForwardContext(comm=comm)))
        ids = comm.offset(logits.shape[-1], VOCAB) + jnp.arange(logits.shape[-1])
        is_target = ids[None, None] == rows["second"][:, :, None]
        of_target = comm.max(jnp.where(is_target, logits, -jnp.inf).max(-1), VOCAB)
        is_largest = of_target >= comm.max(logits.max(-1), VOCAB)
        return sums._replace(metrics={"accuracy": (is_largest & rows["counts"]).sum()})

    arrays = {
        name: array for name, array in BATCH_ARRAYS.items() if name not in ("targets", "loss_mask")
    }
    task = Task(
        loss=loss,
        count=lambda rows: rows["counts"].sum(dtype=jnp.int32),
        arrays=arrays
        | {
            "second": BatchArray(np.int32, "the token after the next one"),
            "counts": BatchArray(np.bool_, "whether it counts"),
        },
        prepare=prepare,
        auxiliary_weights=WEIGHTS,
    )
    return replace(task, **changes)


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setitem(TASKS, "two_ahead", two_ahead())
    monkeypatch.setitem(FAMILIES, "with_sums", FAMILIES["llama"])
    monkeypatch.setattr(transformer, "Block", BlockWithSums)


def model_for(case):
    return replace(plans.model_for(case, "llama"), name="with-sums", family="with_sums")


@functools.cache
def one_device(model) -> Run:
    return run_case(model, plans.ONE_DEVICE, SETTINGS)


DAILY = (
    plans.case("data=4,fsdp=2", zero=2, microbatches=2),
    plans.case("data=2,fsdp=2,tensor=2", zero=3, remat="full", microbatches=2),
    plans.case("fsdp=2,tensor=4", zero=3, sequence_parallel=True, microbatches=2),
    plans.case("data=2,tensor=4", rules=("mlp=none",), remat="full"),
    plans.case("pipe=2,data=2,tensor=2", microbatches=4, sequence_parallel=True),
    plans.case(
        "pipe=2,fsdp=2,tensor=2",
        schedule="interleaved",
        microbatches=4,
        stage_residuals="recompute",
        sequence_parallel=True,
        zero=2,
    ),
)
"""Plans that `make test` trains under; the others are nightly. ZeRO stages, schedules, split
tokens, split hidden units or whole ones."""
EVALUATED = (DAILY[1], DAILY[2], DAILY[4], DAILY[5])
"""Plans that `make test` evaluates under."""


def test_daily_plans_are_of_the_shared_list():
    assert set(DAILY) <= set(plans.PLANS)


def of_the_shared_list(daily):
    """All plans; those that are not among the daily ones are nightly."""
    return [
        pytest.param(case, marks=() if case in daily else pytest.mark.nightly)
        for case in plans.PLANS
    ]


@pytest.mark.parametrize("case", of_the_shared_list(DAILY), ids=str)
def test_a_task_with_a_metric_and_auxiliary_sums_equals_one_device(case):
    model = model_for(case)
    run, one = run_case(model, case, SETTINGS), one_device(model)
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        assert set(found) == {*STEP_METRICS, *WEIGHTS, "accuracy"}
        assert found["tokens"] == expected["tokens"] > 0
        assert 0 < expected["accuracy"] < 1
        assert_close(found, expected, F32_RELATIVE)
    for found, expected in zip(run.states, one.states, strict=True):
        assert_close(found, expected, F32_RELATIVE)


@pytest.mark.parametrize("case", of_the_shared_list(EVALUATED), ids=str)
def test_an_evaluation_with_a_metric_and_auxiliary_sums_equals_one_device(case):
    model = model_for(case)
    found, expected = (
        built.program.eval_step(
            plans.random_state(built.program).params, plans.batch_of_step(built.program, 3)
        )
        for built in (plans.build(model, case, SETTINGS), one_device(model).built)
    )
    assert set(found.metrics) == {*WEIGHTS, "accuracy"}
    assert_close(list(found), list(expected), F32_RELATIVE)


def test_auxiliary_sums_change_gradients_and_not_the_loss(monkeypatch):
    model = model_for(plans.ONE_DEVICE)
    [with_sums, *_] = one_device(model).metrics
    monkeypatch.setitem(TASKS, "two_ahead", two_ahead(auxiliary_weights={"stream": 0.0}))
    [without, *_] = run_case(model, plans.ONE_DEVICE, SETTINGS).metrics
    assert with_sums["grad_norm"] != pytest.approx(without["grad_norm"], rel=0.01)
    for name in ("loss", "accuracy", *WEIGHTS):
        assert with_sums[name] == without[name] > 0


@pytest.mark.parametrize(
    "case",
    [plans.case("data=2,fsdp=2", zero=3), plans.case("pipe=2,fsdp=2", microbatches=4)],
    ids=str,
)
def test_a_loss_scale_does_not_scale_metrics(case):
    model = replace(model_for(plans.ONE_DEVICE), dropout=0.0)
    f16 = {"precision.compute": "f16", "precision.loss_scale": 256}
    [found, *_] = run_case(model, case, SETTINGS | f16).metrics
    [expected, *_] = one_device(model).metrics
    assert found["loss_scale"] == 256
    assert 0 < found["accuracy"] < 1
    names = ("loss", "grad_norm", *WEIGHTS)
    assert_close(
        *({name: side[name] for name in names} for side in (found, expected)), F16_RELATIVE
    )


def test_another_task_counts_other_terms():
    case = plans.ONE_DEVICE
    other = run_case(model_for(case), case)
    assert other.metrics[0]["tokens"] > one_device(model_for(case)).metrics[0]["tokens"]
    assert set(other.metrics[0]) == {*STEP_METRICS, *WEIGHTS}


@pytest.mark.parametrize("name", ["loss", "stream", "mfu", "perplexity"])
def test_a_name_that_is_taken_is_refused(name, monkeypatch):
    task = two_ahead()

    def loss(inputs):
        sums = task.loss(inputs)
        return sums._replace(metrics={name: sums.metrics["accuracy"]})

    monkeypatch.setitem(TASKS, "two_ahead", replace(task, loss=loss))
    built = plans.build(model_for(plans.ONE_DEVICE), plans.ONE_DEVICE, SETTINGS)
    with pytest.raises(ConfigError, match=f"another value\n.*{name}"):
        plans.compiled_step(built)


def test_metrics_of_a_step_are_reserved_names():
    assert set(STEP_METRICS) <= RESERVED_NAMES


def test_a_layers_program_has_the_work_of_auxiliary_sums(monkeypatch):
    """The planner reads it: here, the products of the hidden units that are computed once more."""

    def products(family):
        model = replace(model_for(plans.ONE_DEVICE), family=family)
        programs = layer_programs(model, seq_len=16, precision="f32", kernel="xla")
        program = programs.under("none")
        return len(program.forward.products), len(program.backward.products)

    with_sums = products("with_sums")
    monkeypatch.undo()
    plain = products("llama")
    assert (with_sums[0] - plain[0], with_sums[1] - plain[1]) == (1, 2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("second", lambda array: array[:, :-1], r"second: int32 \(2, 8\) (.|\n)*int32 \(2, 7\)"),
        ("counts", lambda array: array.astype(np.int32), r"counts: bool (.|\n)*int32 \(2, 8\)"),
        ("third", None, r"third: none by Task.arrays, int32 \(2, 8\) by Task.prepare"),
    ],
)
def test_prepared_arrays_are_those_that_a_task_names(name, change, message):
    task, rows = two_ahead(), synthetic_batch(vocab_size=9, rows=2, seq_len=8, seed=0)
    assert set(task.batch_of(rows)) == set(task.arrays)

    def prepare(batch):
        made = task.prepare(batch)
        return made | {name: change(made[name]) if change else made["second"]}

    with pytest.raises(ConfigError, match=message):
        replace(task, prepare=prepare).batch_of(rows)


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="next_token"):
        task_named("next-token")


@pytest.mark.parametrize("name", ["tokens", "positions", "segments", "examples"])
def test_a_task_without_an_array_that_the_model_reads_is_refused(name, monkeypatch):
    task = two_ahead()
    arrays = {other: array for other, array in task.arrays.items() if other != name}
    monkeypatch.setitem(TASKS, "two_ahead", replace(task, arrays=arrays))
    case = plans.ONE_DEVICE
    with pytest.raises(ConfigError, match=f"lacks arrays(.|\n)*no {name}"):
        plans.build(model_for(case), case, SETTINGS)
