"""A stage value of several leaves, with auxiliary sums and metrics, through the executor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, assert_close
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from optimus_jax.mesh.zero import vary
from optimus_jax.pipeline.executor import Pipeline, StageFunctions
from optimus_jax.pipeline.gpipe import forward_only
from optimus_jax.pipeline.tables import make_schedule

STAGES, MICROBATCHES, ROWS, LENGTH = 2, 4, 6, 5
WIDE, NARROW, VOCAB = 8, 3, 7
FACTORS = {"squares": 0.3}
"""Weights of auxiliary sums; there is another one, which has none."""


def embed(outer, rows):
    """Two floating leaves of different shapes, and the tokens, which the layers read."""
    return {
        "wide": jnp.take(outer["table"], rows["tokens"], axis=0),
        "narrow": jnp.take(outer["small"], rows["tokens"], axis=0).sum(1),
        "tokens": rows["tokens"],
    }


def run_layers(weights, value):
    """Each floating leaf reads the other one and the tokens."""

    def layer(value, weights):
        odd = (value["tokens"] % 2)[:, :, None].astype(jnp.float32)
        wide = jnp.tanh(value["wide"] @ weights["wide"] + odd * value["narrow"][:, None, :1])
        narrow = jnp.tanh(value["narrow"] @ weights["narrow"] + wide.mean(1)[:, :NARROW])
        sums = {"squares": jnp.square(wide).sum(), "unweighted": (1 + narrow).sum()}
        return {"wide": wide, "narrow": narrow, "tokens": value["tokens"]}, sums

    value, sums = lax.scan(layer, value, weights)
    return value, {name: parts.sum(0) for name, parts in sums.items()}


def loss(outer, value, rows):
    """A weighted sum, and the number of positive scores."""
    scores = value["wide"] @ outer["head"] + value["narrow"].sum(1)[:, None]
    metrics = {"positive": (scores > 0).astype(jnp.float32).sum()}
    return (jnp.square(scores) * rows["weights"]).sum(), metrics


def problem(num_layers):
    """Parameters outside the layers, parameters of the layers, and microbatches."""
    draw = iter(jax.random.split(jax.random.key(3), 7))
    outer = {
        "table": jax.random.normal(next(draw), (VOCAB, WIDE)),
        "small": jax.random.normal(next(draw), (VOCAB, NARROW)),
        "head": jax.random.normal(next(draw), (WIDE,)),
    }
    weights = {
        "wide": jax.random.normal(next(draw), (num_layers, WIDE, WIDE)),
        "narrow": jax.random.normal(next(draw), (num_layers, NARROW, NARROW)),
    }
    batch = {
        "tokens": jax.random.randint(next(draw), (MICROBATCHES, ROWS, LENGTH), 0, VOCAB),
        "weights": jax.random.normal(next(draw), (MICROBATCHES, ROWS, LENGTH)),
    }
    return outer, weights, batch


def without_pipeline(outer, weights, batch):
    """Loss, metrics and auxiliary sums, and the gradients."""

    def total(outer, weights):
        def one(rows):
            value, auxiliary = run_layers(weights, embed(outer, rows))
            return *loss(outer, value, rows), auxiliary

        sums = jax.tree.map(lambda each: each.sum(0), lax.map(one, batch))
        return sums[0] + FACTORS["squares"] * sums[2]["squares"], sums

    (_, sums), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(outer, weights)
    return sums, *gradients


def through_pipeline(schedule, outer, weights, batch, *, keep_residuals, differentiate=True):
    """The same on devices of a mesh, which share microbatches' rows and the layers."""
    repeats = schedule.num_repeats
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, STAGES), ("data", "pipe"))
    visits = jax.tree.map(lambda leaf: leaf.reshape(repeats, STAGES, -1, *leaf.shape[1:]), weights)

    def on_device(outer, visits, batch):
        pipeline = Pipeline(
            functions=StageFunctions(
                embed=embed,
                layers=lambda weights, constants, value, rows: run_layers(weights, value),
                loss=loss,
            ),
            schedule=schedule,
            outer=jax.tree.map(lambda leaf: vary(leaf, ["data"]), outer),
            params=jax.tree.map(lambda leaf: vary(leaf[:, 0], ["data"]), visits),
            constants=(),
            microbatches=batch,
            keep_residuals=keep_residuals,
            auxiliary_weights=FACTORS,
        )
        if not differentiate:
            return lax.psum(pipeline.sums(), "data")
        sums, d_outer, d_params = lax.psum(pipeline.sums_and_gradients(), "data")
        return sums, d_outer, jax.tree.map(lambda leaf: leaf[:, None], d_params)

    by_stage, scalar = PartitionSpec(None, "pipe"), PartitionSpec()
    out = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(scalar, by_stage, PartitionSpec(None, "data")),
            out_specs=(scalar, scalar, by_stage) if differentiate else scalar,
        )
    )(outer, visits, batch)
    if not differentiate:
        return out
    sums, d_outer, d_visits = out
    return sums, d_outer, jax.tree.map(lambda d, leaf: d.reshape(leaf.shape), d_visits, weights)


@functools.cache
def expected_of(num_layers):
    """Sums and gradients of the problem, without a pipeline."""
    return without_pipeline(*problem(num_layers))


@functools.cache
def evaluated_by(repeats, latency):
    """The problem's sums, by a schedule without backward."""
    return through_pipeline(
        forward_only(STAGES, MICROBATCHES, num_repeats=repeats, latency=latency),
        *problem(num_layers=2 * STAGES * repeats),
        keep_residuals=False,
        differentiate=False,
    )


@pytest.mark.parametrize("keep_residuals", [True, False], ids=["keep", "recompute"])
@pytest.mark.parametrize(
    ("name", "repeats", "latency"),
    [("gpipe", 1, 1), ("1f1b", 1, 1), ("1f1b", 1, 2), ("interleaved", 2, 1)],
    ids=str,
)
def test_sums_and_gradients_equal_those_without_a_pipeline(name, repeats, latency, keep_residuals):
    num_layers = 2 * STAGES * repeats
    schedule = make_schedule(name, STAGES, MICROBATCHES, repeats, latency)
    found = through_pipeline(schedule, *problem(num_layers), keep_residuals=keep_residuals)
    expected = expected_of(num_layers)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(expected), F32_RELATIVE)
    evaluated = evaluated_by(repeats, latency)
    assert_close(jax.tree.leaves(evaluated), jax.tree.leaves(expected[0]), F32_RELATIVE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda value: value | {"wide": value["wide"][:, :2]}, "change the type"),
        (lambda value: value | {"wide": value["wide"].astype(jnp.bfloat16)}, "bfloat16"),
        (lambda value: {"wide": value["wide"]}, "change the type"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_layers_that_change_the_type_of_the_value_are_refused(change, words, monkeypatch):
    kept = run_layers

    def changing(weights, value):
        value, sums = kept(weights, value)
        return change(value), sums

    monkeypatch.setitem(globals(), "run_layers", changing)
    outer, weights, batch = problem(num_layers=2)
    schedule = make_schedule("1f1b", STAGES, MICROBATCHES)
    with pytest.raises(TypeError, match=words):
        through_pipeline(schedule, outer, weights, batch, keep_residuals=True)


def test_a_leaf_that_cannot_be_sent_is_named(monkeypatch):
    kept = embed
    monkeypatch.setitem(
        globals(), "embed", lambda outer, rows: kept(outer, rows) | {"odd": rows["tokens"] > 1}
    )
    outer, weights, batch = problem(num_layers=2)
    schedule = make_schedule("1f1b", STAGES, MICROBATCHES)
    with pytest.raises(TypeError, match=r"\['odd'\] of dtype bool"):
        through_pipeline(schedule, outer, weights, batch, keep_residuals=True)
