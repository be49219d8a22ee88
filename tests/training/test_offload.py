"""Offloading only changes where arrays lie: the same bits, moments on the host, copies one after
another.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from plans import GPT, SEQ_LEN, batch_of_step, build, case, make_config, random_state

from optimus_jax.config import Config
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.presets import model_preset
from optimus_jax.errors import PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.ahead_of_time.compile_check import check
from optimus_jax.planning.cost.cost import HOST_COPIES, predict
from optimus_jax.planning.cost.memory import memory_of_run
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.reshard.memory_kinds import lies_on_host

CASES = [
    ("fsdp=8", {"zero": 3}),
    ("data=2,fsdp=2,tensor=2", {"zero": 1, "microbatches": 2}),
    ("tensor=4,data=2", {}),
]
PLACED_ON_HOST = re.compile(
    r'annotate_device_placement.*_xla_buffer_placement = "pinned_host".*-> tensor<(\S+)>'
)


def trained(mesh: str, **parallel) -> tuple:
    """The program, and state and metrics after three steps."""
    built = build(GPT, case(mesh, **parallel))
    state, metrics = random_state(built.program), []
    for step in (1, 2, 3):
        state, step_metrics = built.program.train_step(state, batch_of_step(built.program, step))
        metrics.append(jax.device_get(step_metrics))
    return built.program, state, metrics


@functools.cache
def trained_without_offload(mesh: str, **parallel) -> tuple:
    """What runs with offload are compared with."""
    return trained(mesh, remat="full", offload="none", **parallel)


def on_gpu(mesh: str, **parallel) -> str:
    """The step as it would be given to a GPU's compiler."""
    built = build(GPT, case(mesh, **parallel))
    traced = built.program.train_step.trace(
        jax.eval_shape(built.program.init, jnp.int32(0)), built.batch
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("mesh", "settings", "offload"),
    [
        pytest.param(*CASES[0], "all", marks=pytest.mark.nightly),
        *((mesh, settings, "all") for mesh, settings in CASES[1:]),
        (*CASES[0], "activations"),
        (*CASES[1], "optimizer"),
    ],
)
def test_offloading_changes_no_bit_of_training(mesh, settings, offload):
    _, state, metrics = trained_without_offload(mesh, **settings)
    program, other, others = trained(mesh, remat="full", offload=offload, **settings)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(other))
    assert metrics == others
    on_host = {
        lies_on_host(leaf.sharding) for leaf in jax.tree.leaves(other.opt_state) if leaf.ndim
    }
    assert on_host == {program.plan.offloads_moments}
    assert not any(lies_on_host(leaf.sharding) for leaf in jax.tree.leaves((other.params, state)))


def test_skipped_step_does_not_change_offloaded_moments():
    built = build(GPT, case("fsdp=8", offload="optimizer"))
    state = random_state(built.program)
    state, _ = built.program.train_step(state, built.batch)
    before = jax.device_get(state.opt_state)
    broken = replace(state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))
    after, metrics = built.program.train_step(broken, built.batch)
    assert metrics["skipped"]
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(after.opt_state))


def test_only_inputs_of_layers_are_offloaded_as_activations():
    assert not PLACED_ON_HOST.findall(on_gpu("fsdp=8", remat="full", offload="none"))
    rows = 48 // 8
    assert set(PLACED_ON_HOST.findall(on_gpu("fsdp=8", remat="full", offload="activations"))) == {
        f"{rows}x{SEQ_LEN}x{GPT.embed_dim}xf32"
    }


def barriers_of(jaxpr) -> list:
    """Every jaxpr with optimization barriers, and its barriers in order."""
    found = [
        equation for equation in jaxpr.eqns if equation.primitive.name == "optimization_barrier"
    ]
    inner = [
        getattr(value, "jaxpr", value)
        for equation in jaxpr.eqns
        for value in equation.params.values()
        if hasattr(getattr(value, "jaxpr", value), "eqns")
    ]
    return [(jaxpr, found)] if found else [each for within in inner for each in barriers_of(within)]


def needs(jaxpr, variable) -> set:
    """All variables that one is computed from, itself included."""
    made_by, found, left = (
        {out: equation for equation in jaxpr.eqns for out in equation.outvars},
        set(),
        [variable],
    )
    while left:
        if (each := left.pop()) not in found:
            found.add(each)
            left += (
                [
                    given
                    for given in made_by[each].invars
                    if not isinstance(given, jax.extend.core.Literal)
                ]
                if each in made_by
                else []
            )
    return found


@pytest.mark.parametrize(("mesh", "settings"), CASES)
def test_every_moment_is_fetched_after_the_one_before(mesh, settings):
    """Each waits for the last earlier one that varies over no other mesh axes than it does."""
    built = build(GPT, case(mesh, offload="optimizer", **settings))
    state = jax.eval_shape(built.program.init, jnp.int32(0))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    [(jaxpr, barriers)] = barriers_of(
        built.program.train_step.trace(state, built.batch).jaxpr.jaxpr
    )
    held_back = [barrier.outvars[0] for barrier in barriers]
    fetched = [
        equation.invars[0]
        for equation in jaxpr.eqns
        if equation.primitive.name == "device_put"
        and jax.memory.Space.Device in equation.params["devices"]
    ]
    assert len(held_back) == len(moments)
    assert fetched == held_back, "and none that waits for nothing"
    pairs, varying = (
        range(0, len(barriers), 2),
        [frozenset(re.findall(r"\w+", str(each.aval).partition("V:")[2])) for each in held_back],
    )
    chained = 0
    for place in pairs:
        before = [
            earlier for earlier in pairs if earlier < place and varying[earlier] <= varying[place]
        ]
        for barrier in barriers[place : place + 2]:  # both moments of a leaf
            waits_for = needs(jaxpr, barrier.invars[1])
            assert {earlier for earlier in before if held_back[earlier] in waits_for} >= set(
                before[-1:]
            )
            assert not waits_for & set(held_back[place:])
        chained += bool(before)
    assert chained >= len(pairs) - len(set(varying))


def test_impossible_offloads_are_refused():
    with pytest.raises(PlanError, match="only with remat=full"):
        build(GPT, case("fsdp=8", remat="dots", offload="activations"))
    with pytest.raises(PlanError, match="pipeline stages keep their activations"):
        build(GPT, case("pipe=2,data=4", remat="full", microbatches=4, offload="all"))
    config = make_config(GPT, case("fsdp=8", offload="optimizer"))
    with pytest.raises(
        PlanError, match="offloading needs devices with memory separate from the host's"
    ):
        choose_plan(
            config,
            Topology(
                num_devices=8,
                num_processes=1,
                num_hosts=1,
                platform="cpu",
                device_kind="cpu",
                bytes_per_device=None,
            ),
        )


def large(**parallel) -> tuple[Config, Cluster]:
    config = Config(model=model_preset("llama3-8b")).with_values(
        {
            "precision.compute": "bf16",
            "data.seq_len": 4096,
            "data.global_batch": 1,
            **{f"parallel.{name}": value for name, value in parallel.items()},
        }
    )
    return config, Cluster.parse("h200:1")


def test_planner_predicts_the_memory_and_time_of_offloading():
    (config, cluster), (offloaded, _) = (
        large(remat="full", offload="none"),
        large(remat="full", offload="all"),
    )
    kept, moved = (
        plan_for(each, choose_plan(offloaded, cluster.topology()).plan.axes, cluster.topology())
        for each in (config, offloaded)
    )
    before, after = (memory_of_run(config, plan) for plan in (kept, moved))
    assert after.moments == 0
    assert (
        after.host == before.moments + config.model.num_layers * 4096 * config.model.embed_dim * 2
    )
    assert after.total < before.total
    rates, workload = Rates.of(cluster.accelerator), Workload.of(config)
    slower, faster = (predict(workload, plan, cluster, rates) for plan in (moved, kept))
    copies = {term.name: term.time_s for term in slower.terms}[HOST_COPIES]
    assert copies == pytest.approx(before.moments / (rates.host_share * 63e9), rel=0.01)
    assert slower.step_time_s == pytest.approx(faster.step_time_s + copies)
    unknown = replace(cluster, to_host=replace(cluster.to_host, bytes_per_s=None))
    with pytest.raises(PlanError, match="unknown speed"):
        predict(workload, moved, unknown, rates)


def test_copies_of_layer_inputs_cost_what_layers_do_not_hide():
    """Each goes out during its forward and comes in during its backward: over a quick link for
    nothing, over a slow one for the copy less the layer's own time.
    """
    config, cluster = large(remat="full", offload="activations")
    plan, rates = plan_for(config, AxisSizes(), cluster.topology()), Rates.of(cluster.accelerator)
    moved_bytes = 2 * config.model.num_layers * 4096 * config.model.embed_dim * 2

    def terms(bytes_per_s: float) -> dict[str, float]:
        over = replace(cluster, to_host=replace(cluster.to_host, bytes_per_s=bytes_per_s))
        return {
            term.name: term.time_s for term in predict(Workload.of(config), plan, over, rates).terms
        }

    quick = terms(63e9)
    assert HOST_COPIES not in quick
    in_layers_s = sum(
        quick.get(name, 0.0)
        for name in ("attention", "feed-forward", "recompute", "memory", "launching")
    )
    for speed in (1e9, 0.5e9):
        assert terms(speed)[HOST_COPIES] == pytest.approx(
            moved_bytes / (rates.host_share * speed) - in_layers_s
        )


def test_offload_is_chosen_only_where_nothing_else_fits():
    config, cluster = large()
    config = replace(config.with_values({"data.seq_len": 1024}), model=model_preset("gpt2-xl"))
    small = replace(cluster.topology(), bytes_per_device=24 * 2**30)
    assert choose_plan(config, cluster.topology()).plan.offload == "none"
    chosen = choose_plan(config, small)
    assert chosen.plan.offloads_moments
    assert chosen.memory.total <= 0.9 * small.bytes_per_device
    with pytest.raises(PlanError, match="does not fit"):
        choose_plan(config.with_values({"parallel.offload": "none"}), small)


def test_compile_check_refuses_offloaded_plans():
    config, cluster = large(offload="optimizer")
    with pytest.raises(PlanError, match=r"forgets what lies on the host|needs XLA's CUDA compiler"):
        check(config, choose_plan(config, cluster.topology()).plan, cluster)


def test_plan_json_without_offload_is_read():
    plan = build(GPT, case("fsdp=8")).plan
    text = plan.to_json().replace(',\n  "offload": "none"', "")
    assert "offload" not in text
    assert Plan.from_json(text) == plan
