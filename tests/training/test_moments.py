"""Moments in bf16: half of the bytes, the same training under every plan, and no bit lost when the
state moves.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, host_leaves
from plans import GPT, LLAMA, ONE_DEVICE, PlanCase, batch_of_step, build, case, random_state
from switch_cases import layout_of

import optimus_jax
from optimus_jax.config import Config, OptimizerConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import CheckpointError, ConfigError, PlanError
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.planning.cost.cost import HOST_COPIES, predict
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.reshard import reshard
from optimus_jax.reshard.reshard import Move
from optimus_jax.reshard.restack import is_stacked
from optimus_jax.training.optimizer import make_optimizer

PLANS = [
    case("fsdp=8", zero=3),
    case("data=2,fsdp=2,tensor=2", zero=1, microbatches=2),
    case("pipe=2,fsdp=4", zero=2, microbatches=4),
    case("data=2,fsdp=4", zero=3, offload="optimizer"),
]
DAILY = PLANS[1:3]
"""Plans that `make test` trains under; the others are nightly."""
TINY = {
    "global_batch": 8,
    "seq_len": 16,
    "lr": 1e-2,
    "eval_every": 0,
    "progress": "none",
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 4,
    "model.mlp_dim": 32,
}


def with_moments(given: PlanCase, moments: str = "bf16") -> PlanCase:
    return replace(given, settings=(*given.settings, ("precision.moments", moments)))


def trained(model, given: PlanCase):
    """The program, the state after three steps, and their losses."""
    program = build(model, given).program
    state, losses = random_state(program), []
    for step in (1, 2, 3):
        state, metrics = program.train_step(state, batch_of_step(program, step))
        losses.append(float(metrics["loss"]))
    return program, state, losses


def moments_of(state) -> dict[str, np.ndarray]:
    return {
        path: leaf for path, leaf in host_leaves(state).items() if "/mu/" in path or "/nu/" in path
    }


@pytest.fixture(scope="module")
def losses_on_one_device():
    """Losses on one device, by model and format."""
    layers = {"one": GPT, "stages": replace(GPT, num_layers=10)}
    return {
        (name, moments): trained(model, with_moments(ONE_DEVICE, moments))[2]
        for name, model in layers.items()
        for moments in ("f32", "bf16")
    }


@pytest.mark.parametrize(
    "given",
    [pytest.param(given, marks=() if given in DAILY else pytest.mark.nightly) for given in PLANS],
    ids=str,
)
def test_bf16_moments_train_alike_under_every_plan(losses_on_one_device, given):
    name = "stages" if given.axes.pipe > 1 else "one"
    _, state, losses = trained(
        GPT if name == "one" else replace(GPT, num_layers=10), with_moments(given)
    )
    assert {leaf.dtype.name for leaf in moments_of(state).values()} == {"bfloat16"}
    assert {
        leaf.dtype.name for path, leaf in host_leaves(state).items() if path.startswith("params/")
    } == {"float32"}
    assert losses == pytest.approx(losses_on_one_device[name, "bf16"], rel=F32_RELATIVE)
    assert losses[:2] == pytest.approx(losses_on_one_device[name, "f32"][:2], rel=F32_RELATIVE), (
        "the first update has seen no rounded moment"
    )


def test_moments_are_rounded_to_bf16_once_per_step():
    """Computed in float32, rounded once a step: both moments, and nothing else."""
    config, random = (
        OptimizerConfig(beta1=0.8, beta2=0.9, epsilon=0.01, weight_decay=0.0),
        np.random.default_rng(0),
    )
    optimizer = make_optimizer(
        config, {"w": Leaf(("embed", "mlp"), "matrix", "mlp")}, moments="bf16"
    )
    params = {"w": jnp.zeros((30, 40))}
    state, m, v = (
        optimizer.init(params),
        np.zeros((30, 40), np.float32),
        np.zeros((30, 40), np.float32),
    )
    for step in (1, 2, 3):
        gradient = random.standard_normal((30, 40)).astype(np.float32)
        updates, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        expected = m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + 0.01)
        np.testing.assert_allclose(np.asarray(updates["w"]), expected, rtol=F32_RELATIVE)
        for name, exact in (("mu", m), ("nu", v)):
            found = getattr(state[0], name)["w"]
            assert found.dtype == jnp.bfloat16
            np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8)
            assert (np.asarray(found) == exact.astype(jnp.bfloat16)).mean() > 0.99
        m, v = (np.asarray(getattr(state[0], name)["w"], np.float32) for name in ("mu", "nu"))


@pytest.mark.parametrize("way", ["programs", "one memory"])
def test_resharded_state_is_bitwise_the_same(way, monkeypatch):
    if way == "programs":
        monkeypatch.setattr(reshard, "share_memory", lambda devices: False)
    model = replace(LLAMA, num_layers=10)
    source, state, _ = trained(
        model, with_moments(case("data=2,fsdp=2,tensor=2", zero=1, microbatches=2))
    )
    target = build(
        model, with_moments(case("pipe=2,fsdp=4", zero=2, microbatches=4, offload="optimizer"))
    ).program
    before = {path: leaf.copy() for path, leaf in host_leaves(state).items()}
    after = host_leaves(Move(layout_of(source), layout_of(target), budget_bytes=2**20).run(state))
    for path, leaf in before.items():
        rows = (
            model.num_layers
            if is_stacked(path)
            else model.vocab_size
            if path.endswith("/table")
            else None
        )
        places = (
            [target.shapes.slots.index(layer) for layer in range(model.num_layers)]
            if is_stacked(path)
            else slice(rows)
        )
        found = after[path] if rows is None else after[path][places]
        assert found.tobytes() == (leaf if rows is None else leaf[:rows]).tobytes(), path
    assert {
        leaf.dtype.name for path, leaf in after.items() if "/mu/" in path or "/nu/" in path
    } == {"bfloat16"}


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offloaded_moments_are_bitwise_the_same(offload):
    _, on_device, losses = trained(GPT, with_moments(case("fsdp=8", zero=3, remat="full")))
    _, on_host, others = trained(
        GPT, with_moments(case("fsdp=8", zero=3, remat="full", offload=offload))
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(on_device), jax.device_get(on_host))
    assert losses == others


def test_run_resumes_with_bf16_moments_and_refuses_f32_moments(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall.\n" for number in range(300)))
    settings = TINY | {
        "steps": 6,
        "data": str(text),
        "precision.moments": "bf16",
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "checkpoint.snapshot_every": 2,
    }
    whole = optimus_jax.train(
        "gpt2-nano", run_dir=tmp_path / "whole", mesh="fsdp=4,data=2", **settings
    )
    optimus_jax.train(
        "gpt2-nano", run_dir=tmp_path / "run", mesh="fsdp=4,data=2", **settings | {"steps": 3}
    )
    resumed = optimus_jax.train(run_dir=tmp_path / "run", resume=True, steps=6)
    assert [record.loss for record in resumed.history] == [record.loss for record in whole.history]
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(resumed.state), jax.device_get(whole.state)
    )
    capsys.readouterr()
    moved = optimus_jax.train(
        run_dir=tmp_path / "run",
        resume=True,
        steps=7,
        mesh="tensor=2,data=4",
        progress="plain",
        verbose=True,
    )
    output = capsys.readouterr().out
    assert "f32 compute, bf16 moments" in output
    (table,) = (
        line.split()[-6:]
        for line in output.splitlines()
        if line.strip().startswith("embedding/table")
    )
    assert [float(size) for size in table[::2]] == [0.01, 0.01, 0.0], (
        "of 132 rows of 16, half on each device: 4 bytes, 4 bytes, 2 bytes"
    )
    assert moved.plan.moments == "bf16"
    assert moved.plan.axes != resumed.plan.axes
    assert {leaf.dtype.name for leaf in moments_of(moved.state).values()} == {"bfloat16"}
    with pytest.raises(
        CheckpointError, match=r"saved bfloat16.* requested float32(?s:.*)precision\.moments"
    ):
        optimus_jax.train(
            run_dir=tmp_path / "run", resume=True, steps=8, **{"precision.moments": "f32"}
        )


@pytest.mark.parametrize(("name", "beta"), [("beta1", 0.999), ("beta2", 0.999), ("beta2", 0.9975)])
def test_betas_that_bf16_cannot_follow_are_refused(name, beta):
    with pytest.raises(ConfigError, match=f"optimizer.{name}={beta}"):
        Config().with_values({f"optimizer.{name}": beta, "precision.moments": "bf16"})
    Config().with_values({f"optimizer.{name}": beta})


@pytest.mark.parametrize("beta", [0.95, 0.99, 1 - 2.0**-8])
def test_bf16_moments_decay_where_gradients_vanish(beta):
    """With a beta that the config refuses they would not."""

    def decayed(beta2):
        optimizer = make_optimizer(
            OptimizerConfig(beta1=beta, beta2=beta2),
            {"w": Leaf(("norm",), "bias", "norm")},
            moments="bf16",
        )
        params = {"w": jnp.zeros(1000)}
        first = jnp.exp(jax.random.normal(jax.random.key(0), (1000,)))
        _, state = optimizer.update({"w": first}, optimizer.init(params), params)
        before = state[0].nu["w"].astype(jnp.float32)
        for _ in range(3):
            _, state = optimizer.update({"w": jnp.zeros(1000)}, state, params)
        return state[0].nu["w"].astype(jnp.float32) < before

    assert decayed(beta).all()
    assert not decayed(0.999).any()


def test_planner_counts_half_the_bytes_for_bf16_moments():
    def planned(moments, offload="none"):
        config = Config(model=model_preset("llama3-8b")).with_values(
            {
                "precision.compute": "bf16",
                "precision.moments": moments,
                "data.seq_len": 4096,
                "data.global_batch": 1,
                "parallel.remat": "full",
                "parallel.offload": offload,
            }
        )
        cluster = Cluster.parse("h200:1")
        plan = plan_for(config, AxisSizes(), cluster.topology())
        return (
            plan,
            memory_of_run(config, plan),
            predict(Workload.of(config), plan, cluster, Rates.of(cluster.accelerator)),
        )

    for offload in ("none", "optimizer"):
        (_, before, slow), (plan, after, quick) = planned("f32", offload), planned("bf16", offload)
        assert (after.moments, 2 * (after.host or after.moments)) == (
            before.moments // 2,
            before.host or before.moments,
        )
        assert after.total < before.total
        assert plan.moments == "bf16"
        assert "moments bf16" in plan.describe()
        seconds = [{term.name: term.time_s for term in each.terms} for each in (slow, quick)]
        assert seconds[1]["optimizer"] < seconds[0]["optimizer"]
        assert seconds[1].get(HOST_COPIES, 0.0) == pytest.approx(
            seconds[0].get(HOST_COPIES, 0.0) / 2
        )


def test_estimated_moment_bytes_equal_those_of_the_state():
    for moments in ("f32", "bf16"):
        built = build(GPT, with_moments(case("data=2,fsdp=4", zero=3), moments))
        state = jax.eval_shape(built.program.init, jnp.int32(0))
        block_layout = sum(
            np.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf, sharding in zip(
                jax.tree.leaves(state.opt_state),
                jax.tree.leaves(built.program.state_shardings.opt_state),
                strict=True,
            )
            if leaf.ndim
        )
        assert memory_of_run(built.config, built.plan).moments == block_layout


def test_bf16_moments_are_advised_where_nothing_else_fits():
    config = Config(model=model_preset("llama3-8b")).with_values(
        {
            "precision.compute": "bf16",
            "data.seq_len": 1024,
            "data.global_batch": 1,
            "parallel.offload": "none",
        }
    )
    topology = replace(Cluster.parse("h200:1").topology(), bytes_per_device=110 * 2**30)
    with pytest.raises(PlanError, match=r"--set precision\.moments=bf16"):
        choose_plan(config, topology)
    choose_plan(config.with_values({"precision.moments": "bf16"}), topology)
    with pytest.raises(
        PlanError, match=r"--set precision\.moments=bf16\), with which mesh data=1 fits"
    ):
        optimus_jax.find_plans(
            "llama3-8b",
            "h200:1",
            global_batch=1,
            seq_len=4096,
            remat="full",
            **{"parallel.offload": "none"},
        )
    with pytest.raises(PlanError, match="do:    give more devices"):
        optimus_jax.find_plans(
            "llama2-13b", "h200:1", global_batch=1, seq_len=4096, **{"parallel.offload": "none"}
        )
